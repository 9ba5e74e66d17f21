"""Random programs, wrapped around a functional run of themselves, against eager: plain arguments, arguments that share
memory, tensors with lazy bits, and wrapper subclasses."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    NeedsDispatcherLayer,
    OverlappingMutation,
    Unsupported,
    analyze,
    below_functional_layer,
    collect_metadata,
    from_functional,
    function_inputs,
    functional_layer,
    is_subclass,
    rebuild,
    subclass_arguments,
    tensors_inside,
    to_functional,
)
from aotkit_runtime_wrappers import (
    PreparedFunction,
    WrapperError,
    WrapperPlan,
    bind,
    build_plan,
    graph_inputs,
    interpret,
    plan_synthetic_bases,
    prepare_inputs,
)

HOWS = pytest.mark.parametrize("how", [bind, interpret], ids=["bind", "interpret"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:Use of masked_fill_ on expanded tensors"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental"),
]


def _copy(value: Any) -> Any:
    """A copy in its own memory, expanded as the value is."""
    if not isinstance(value, Tensor):
        return value
    with below_functional_layer(), torch.no_grad():
        value = value.resolve_conj().resolve_neg()
        part = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
        return torch.empty_strided(part.shape, part.stride(), dtype=value.dtype).copy_(part).expand(value.shape)


class FunctionalGraph:
    """Serves ``function`` as the compiled graph that its metadata describes, by functional runs of it."""

    def __init__(self, function: Callable[..., Any], examples: Sequence[Any], layer: FunctionalLayer) -> None:
        self.function, self.layer = function, layer
        self.callers = [_flags(example) for example in examples]
        self.examples = [e.detach() if isinstance(e, Tensor) else e for e in examples]
        self.grad_mode = torch.is_grad_enabled()
        self.has_subclasses = any(map(is_subclass, examples))
        self.metadata: GraphMetadata | None = None

    def complete(self, dense: Sequence[Any]) -> GraphMetadata:
        """The metadata of a run, for subclasses with what gradients are made of."""
        record, inputs = self._run(dense)
        self.metadata = record.metadata
        if record.subclasses is not None and record.metadata.is_training:
            with functional_layer(self.layer):
                tangents = [torch.ones_like(record.subclasses.outer_values[t.forward_output])
                            for t in record.metadata.subclasses.outer.tangents]  # fmt: skip
                self.metadata, _ = self._subclass_gradients(record, inputs, tangents)
        return self.metadata

    @property
    def num_saved(self) -> int:
        assert self.metadata is not None
        return sum(i.kind.value == "tensor" for i in self.metadata.inputs) if self.metadata.is_training else 0

    def _run(self, dense: Sequence[Any]) -> tuple[Any, Any]:
        before = torch.is_grad_enabled()
        torch.set_grad_enabled(self.grad_mode)
        try:
            with functional_layer(self.layer) as storages:
                sizes: Any = ()
                if self.has_subclasses:
                    leaves = iter([_copy(value) for value in dense])
                    apart = subclass_arguments([rebuild(e, leaves) for e in self.examples])
                    assert apart is not None
                    inputs, sizes = apart.enter(apart.dense, self.callers), apart.sizes
                else:
                    inputs = function_inputs([_copy(value) for value in dense], self.callers)
                outputs = list(self.function(*(i.value for i in inputs)))
                modes = (self.grad_mode, torch.is_grad_enabled())
                return collect_metadata(inputs, outputs, grad_mode=modes, storages=storages, sizes=sizes), inputs
        finally:
            torch.set_grad_enabled(before)

    def forward(self, args: list[Any]) -> list[Any]:
        inputs = list(args)
        args.clear()
        record, _ = self._run(inputs)
        with functional_layer(self.layer):
            outputs = [_copy(from_functional(v.resolve_conj().resolve_neg())) if isinstance(v, Tensor) else v
                       for v in record.forward_values]  # fmt: skip
        return [*outputs, *([v for v in inputs if isinstance(v, Tensor)] if self.num_saved else [])]

    def backward(self, args: list[Any]) -> list[Any]:
        saved, tangents = args[: self.num_saved], args[self.num_saved :]
        args.clear()
        record, inputs = self._run(saved)
        assert self.metadata is not None
        with functional_layer(self.layer):
            if record.subclasses is not None:
                found, dense = self._subclass_gradients(record, inputs, self._wrapped(record, tangents))
                assert found == self.metadata
                return [_copy(from_functional(g)) for g in dense]
            given = [to_functional(_copy(t)) for t in tangents]
            values = [record.forward_values[t.forward_output] for t in self.metadata.tangents]
            grads: list[Any] = [None] * len(self.metadata.inputs)
            leaves = [i for i in inputs if i.leaf is not None]
            for i, g in zip(leaves, torch.autograd.grad(values, [i.leaf for i in leaves], given, allow_unused=True),
                            strict=True):  # fmt: skip
                grads[i.index] = None if g is None else _copy(from_functional(g))
        return grads

    def _wrapped(self, record: Any, dense: Sequence[Any]) -> list[Any]:
        parts = iter([to_functional(_copy(t)) for t in dense])
        outer = record.metadata.subclasses.outer
        return [rebuild(record.subclasses.outer_values[t.forward_output].detach(), parts) for t in outer.tangents]

    def _subclass_gradients(self, record: Any, inputs: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
        outer = record.metadata.subclasses.outer
        values = [record.subclasses.outer_values[t.forward_output] for t in outer.tangents]
        leaves = [i for i in inputs if i.leaf is not None]
        found = torch.autograd.grad(values, [i.leaf for i in leaves], tangents, allow_unused=True)
        return record.subclasses.with_gradients(
            record.metadata, {i.index: g for i, g in zip(leaves, found, strict=True)}
        )


def _flags(value: Any) -> Any:
    """What a run asks of the caller's tensor; its flags may change in the call."""
    if not isinstance(value, Tensor) or is_subclass(value):
        return value
    conj, neg = value.is_conj(), value.is_neg()
    return SimpleNamespace(
        requires_grad=value.requires_grad, is_leaf=value.is_leaf, is_conj=lambda: conj, is_neg=lambda: neg
    )


def _boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True
    return run


def _compiled(function: Callable[..., Any], args: Sequence[Any], how: Any) -> Callable[[list[Any]], list[Any]]:
    inputs = prepare_inputs(args)
    layer = FunctionalLayer.MODE

    def metadata(layer: FunctionalLayer) -> GraphMetadata:
        return analyze(PreparedFunction(function, inputs), graph_inputs(inputs, args), layer=layer)

    before = torch.is_grad_enabled()
    try:
        try:
            metadata(layer)
        except NeedsDispatcherLayer:
            layer = FunctionalLayer.DISPATCHER
            metadata(layer)
    except OverlappingMutation as overlap:
        inputs = plan_synthetic_bases(inputs, args, overlap.groups)
    finally:
        torch.set_grad_enabled(before)
    examples = graph_inputs(inputs, args)
    prepared = PreparedFunction(function, inputs)
    graph = FunctionalGraph(prepared, examples, layer)
    inside = [tensor for example in examples for tensor in tensors_inside(example)]
    dense = [tensor.detach() if isinstance(tensor, Tensor) else tensor for tensor in inside]
    meta = graph.complete([_memory(value) for value in dense])
    plan = build_plan(meta, input_plan=prepared.finish(), num_saved_tensors=graph.num_saved)
    reloaded = WrapperPlan.from_json(plan.to_json())
    assert reloaded == plan and str(reloaded) == str(plan)
    backward = (lambda: _boxed(graph.backward)) if plan.call.training else None
    return how(reloaded, _boxed(graph.forward), backward)


def _memory(value: Any) -> Any:
    if isinstance(value, Tensor):
        value = torch._conj(value) if value.is_conj() else value
        value = torch._neg_view(value) if value.is_neg() else value
    return value


# -- what a caller sees ------------------------------------------------------------------------------------


def _flat(value: Any) -> list[Tensor]:
    return [t.detach().resolve_conj().resolve_neg().clone() for t in tensors_inside(value)]


def _claims(value: Tensor) -> bool:
    """Whether a view taken under ``no_grad`` says that it requires grad; no gradient flows there."""
    try:
        return value.requires_grad and value._is_view() and value.grad_fn is None
    except RuntimeError:  # written to since
        return True


def _seen(args: Sequence[Any], call: Callable[..., Any]) -> dict[str, Any]:
    tensors: list[Any] = [a for a in args if isinstance(a, Tensor)]
    versions = [a._version for a in tensors]
    # Autograd makes the functions of views anew when their base is written to.
    roots = [a._base if a._base is not None and a._base.requires_grad else a for a in tensors]
    edges = [get_gradient_edge(a) for a in roots if a.requires_grad]
    before = torch.is_grad_enabled()
    try:
        outputs = list(call(*args))
        facts: dict[str, Any] = {"grad mode": torch.is_grad_enabled()}
    finally:
        torch.set_grad_enabled(before)
    facts["versions"] = [a._version - before for a, before in zip(tensors, versions, strict=True)]
    facts["constants"] = [o for o in outputs if not isinstance(o, Tensor)]
    facts["geometry of inputs"] = [(t.storage_offset(), t.untyped_storage().nbytes()) for t in tensors]
    tensors += [o for o in outputs if isinstance(o, Tensor)]
    storages = [[t.untyped_storage()._cdata for t in tensors_inside(value)] for value in tensors]
    facts["identity"] = [next(i for i, other in enumerate(tensors) if other is t) for t in tensors]
    facts["memory"] = [[bool({*a} & {*b}) for b in storages] for a in storages]
    facts["geometry"] = [(type(t), t.shape, t.stride(), t.dtype, t.is_conj(), t.is_neg()) for t in tensors]
    facts["values"] = [_flat(t) for t in tensors]
    facts["requires grad"] = [None if _claims(t) else t.requires_grad for t in tensors]
    values = list({id(t): t for t in tensors if t.requires_grad}.values())
    if values and edges:
        try:
            real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in values]
            losses = [(t.sin() * (k + 1)).sum() for k, t in enumerate(real)]
            found = torch.autograd.grad(losses, edges, [torch.ones_like(x) for x in losses], allow_unused=True)
        except WrapperError:
            raise
        except RuntimeError:
            facts["no gradients"] = True
        else:
            flat = [[] if g is None else _flat(g) for g in found]  # none is as good as zeros
            facts["gradients"] = [tensors if any(t.any() for t in tensors) else [] for tensors in flat]
    with torch.no_grad():
        for number, value in enumerate(tensors):
            if 0 not in value.stride():
                value.fill_(number + 3)
                facts[f"after {number}"] = [_flat(t) for t in tensors]
    return facts


def _compare(fn: Callable[..., Any], make: Callable[[], Sequence[Any]], how: Any, versions: bool = True) -> None:
    expected = _seen(make(), fn)
    call = _compiled(fn, make(), how)
    for _ in range(2):
        ours = _seen(make(), lambda *args: call(list(args)))
        left_out = ("gradients",) if "no gradients" in expected else ()
        left_out += () if versions else ("versions",)
        for name in {*expected, *ours}:
            if any(part in name for part in left_out):
                continue
            assert name in ours and name in expected, name
            want, got = expected[name], ours[name]
            if name in ("values", "gradients") or name.startswith("after"):
                torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
            elif name == "requires grad":
                assert all(a == b for a, b in zip(got, want, strict=True) if None not in (a, b)), (want, got)
            else:
                assert got == want, f"{name}: {want} in eager mode, {got} wrapped"


# -- programs over tensors ---------------------------------------------------------------------------------


class _Thrice(torch.autograd.Function):
    """A view whose gradient is not that of a view."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 3


def _complex(x: Tensor) -> Tensor:
    return torch.view_as_complex(x.contiguous().view(-1)[: x.numel() // 2 * 2].view(-1, 2))


VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "t": lambda x: x.t() if x.dim() == 2 else x.unsqueeze(0),
    "reshape": lambda x: x.reshape(-1),
    "first": lambda x: x[:1],
    "row": lambda x: x[-1],
    "step": lambda x: x[..., ::2],
    "detach": lambda x: x.detach(),
    "expand": lambda x: x.unsqueeze(0).expand(2, *x.shape),
    "negated": lambda x: torch._neg_view(x),
    "conj": lambda x: x.conj() if x.is_complex() else _complex(x * 2).conj(),
    "imag": lambda x: x.imag if x.is_complex() else x.view_as(x),
    "as complex": lambda x: x if x.is_complex() else _complex(x),
    "bytes": lambda x: x.detach().view(torch.int32),
}
INSIDE: dict[str, Callable[[Any], Any]] = {
    "inside": lambda x: x.a,
    "product of the inside": lambda x: x.a * 2,
    "part of the inside": lambda x: x.b[1:],
    "swapped": lambda x: TwoTensor(x.b, x.a),
    "half new": lambda x: TwoTensor(x.a.detach(), x.b * 3),
    "column": lambda x: x[:, 1],
    "view_as": lambda x: x.view_as(x),
    "of plain ones": lambda x: TwoTensor(x.detach() * 2, x.detach() + 1),
}
FRESH: dict[str, Callable[[Tensor], Any]] = {
    "double": lambda x: x * 2,
    "sin": lambda x: x.sin(),
    "sum": lambda x: x.sum(0),
    "number": lambda x: x.shape[0],
    "largest": lambda x: x.detach().abs().argmax(),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "fill_": lambda x: x.fill_(0.5),
    "masked_fill_": lambda x: x.masked_fill_(x.detach().abs() > 0.7, 0.25),
    "item": lambda x: x.__setitem__(0, 7.0),
    "detached": lambda x: x.detach().mul_(3),
    "data": lambda x: x.data.mul_(3),
}
SHAPES: dict[str, Callable[[Tensor], Any]] = {
    "t_": lambda x: x.t_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, -1),
}
FLAGS: dict[str, Callable[[Tensor], Any]] = {
    "requires_grad_": lambda x: x.requires_grad_() if x.is_leaf and x.is_floating_point() else x,
    "detach_": lambda x: x.detach_(),
}
TABLES = {"view": VIEWS, "inside": INSIDE, "fresh": FRESH, "write": WRITES, "shape": SHAPES, "flag": FLAGS}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "gaps": lambda: torch.randn(4, 12)[:, ::2],
    "offset": lambda: torch.randn(40)[7:31].view(4, 6),
    "row": lambda: torch.randn(6),
    "negated": lambda: torch._neg_view(torch.randn(4, 6)),
    "conjugated": lambda: torch.randn(4, 6, dtype=torch.complex64).conj(),
}
SHARED: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "columns": lambda x: x[:, :3],
    "transposed": lambda x: x.t(),
    "flat": lambda x: x.view(-1)[5:],
    "complex": lambda x: torch.view_as_complex(x.view(4, 3, 2)),
    "numbers": lambda x: x.view(torch.int32)[2:],
    "halves": lambda x: x.view(torch.float16)[:, 2:6],
    "doubles": lambda x: x.view(torch.float64)[1:],
    "negated": lambda x: torch._neg_view(x[:2]),
}


WRAPPED: dict[str, Callable[[], Tensor]] = {
    "flat": lambda: TwoTensor(torch.randn(4, 6), torch.randn(4, 6)),
    "nested": lambda: TwoTensor(WRAPPED["flat"](), WRAPPED["flat"]()),
    "plain": lambda: torch.randn(4, 6),
}
FAMILIES: dict[str, dict[str, Any]] = {"apart": LAYOUTS, "shared": SHARED, "wrapped": WRAPPED}


@dataclass(frozen=True)
class Program:
    """Steps (kind, name, operands, whether under ``no_grad``), and the numbers of what is returned."""

    layouts: tuple[str, ...]
    grads: tuple[str, ...]
    steps: tuple[tuple[str, str, int, int, bool], ...]
    results: tuple[int, ...]
    family: str

    @staticmethod
    def random(seed: int, family: str) -> Program:
        rng, shared, table = random.Random(seed), family == "shared", FAMILIES[family]
        kinds = rng.choices(["view", "fresh", "write", "product", "shape", "flag", "grad", "inside"],
                            [8, 4, 6, 2, 1, 0.3, 0.3, 0], k=rng.randint(1, 6))  # fmt: skip
        if family == "wrapped":
            kinds = [{"shape": "inside", "view": rng.choice(["view", "inside"])}.get(k, k) for k in kinds]
        steps = []
        for kind in kinds:
            name = rng.choice(sorted(TABLES[kind])) if kind in TABLES else kind
            steps.append((kind, name, rng.randrange(8), rng.randrange(8), rng.random() < 0.15))
        number = rng.choice([2, 3] if shared else [1, 2])
        layouts = tuple(rng.choices(sorted(table), k=number))
        grads = tuple(rng.choices(["none", "leaf", "computed"], k=1 if shared else number))
        return Program(layouts, grads, tuple(steps), tuple(rng.randrange(8) for _ in range(rng.randint(0, 4))), family)

    @property
    def moves_versions(self) -> bool:
        """Whether version counters are compared: a change of shape of what shares memory is counted with the writes."""
        return self.family != "shared" or all(step[0] != "shape" for step in self.steps)

    def make(self) -> list[Tensor]:
        torch.manual_seed(1)
        if self.family == "shared":
            (grad,) = self.grads
            base = torch.randn(4, 6).requires_grad_(grad != "none")
            base = base * 1 if grad == "computed" else base
            views = [SHARED[name](base if name not in ("numbers", "halves", "doubles") else base.detach())
                     for name in self.layouts]  # fmt: skip
            return [*views, torch.randn(4, 6)]
        made = [FAMILIES[self.family][name]().detach().requires_grad_(g != "none")
                for name, g in zip(self.layouts, self.grads, strict=True)]  # fmt: skip
        return [x * 1 if grad == "computed" else x for x, grad in zip(made, self.grads, strict=True)]

    def __call__(self, *args: Tensor) -> list[Any]:
        values: list[Any] = list(args)
        for kind, name, first, second, no_grad in self.steps:
            tensors = [v for v in values if isinstance(v, Tensor)]
            x, y = tensors[first % len(tensors)], tensors[second % len(tensors)]
            with torch.set_grad_enabled(torch.is_grad_enabled() and not no_grad):
                match kind:
                    case "product":
                        values.append(x.sum() * y)
                    case "view" | "fresh" | "inside":
                        values.append(TABLES[kind][name](x))
                    case "write" | "shape" | "flag":
                        TABLES[kind][name](x)
            if kind == "grad":
                torch.set_grad_enabled(not torch.is_grad_enabled())
        return [values[-1 - r % len(values)] for r in self.results]


# What torch's functionalization refuses, and its autograd.
TORCHS_OWN = ("for tensors with negative bit", "for tensors with conjugate bit", "as_strided() is non-compositional",
              "needed for gradient computation has been modified")  # fmt: skip


def _valid(program: Any) -> bool:
    before = torch.is_grad_enabled()
    try:
        program(*program.make())
    except (RuntimeError, IndexError, AssertionError, AttributeError, ValueError, TypeError):
        return False
    finally:
        torch.set_grad_enabled(before)
    return True


def _check(programs: Sequence[Any], how: Any) -> tuple[int, int]:
    compared = refused = 0
    for program in programs:
        if not _valid(program):
            continue
        try:
            _compare(program, program.make, how, program.moves_versions)
        except (Unsupported, WrapperError):
            refused += 1
            continue
        except Exception as error:
            if any(text in str(error) for text in TORCHS_OWN):
                refused += 1
                continue
            raise AssertionError(f"{error}\nin {program}") from error
        compared += 1
    return compared, refused


@HOWS
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("first", range(0, 90, 30))
def test_random_programs_cannot_be_told_from_eager(how: Any, family: str, first: int) -> None:
    compared, refused = _check([Program.random(seed, family) for seed in range(first, first + 30)], how)
    assert compared >= 12 and refused <= compared, (compared, refused)
