"""Random programs over wrapper subclasses: what the records make of dense values is what eager mode gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_functionalize import FunctionalLayer, GraphMetadata, Unsupported, collect_metadata, functional_layer
from aotkit_functionalize.records import MutationKind, OutputKind, TensorMeta, ViewSpec
from aotkit_functionalize.subclasses import SubclassBoundary, is_subclass, rebuild, subclass_arguments, tensors_inside
from aotkit_functionalize.subclasses.meta import SubclassMeta, SubclassValue, TensorSource
from aotkit_functionalize.subclasses.views import _same
from aotkit_functionalize.symbols import tensor_meta
from aotkit_functionalize.tracing import below_functional_layer, from_functional, to_functional
from aotkit_functionalize.view_methods import view_method

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def _copy(value: Tensor) -> Tensor:
    with below_functional_layer(), torch.no_grad():
        part = value[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in value.stride())]
        return torch.empty_strided(part.shape, part.stride(), dtype=value.dtype).copy_(part).expand(value.shape)


class _Run:
    """A functional run of a function of wrappers, and its records; dense values are plain and copied."""

    def __init__(self, fn: Callable[..., Any], args: Sequence[Any]) -> None:
        plain = [rebuild(a.detach(), map(_copy, tensors_inside(a.detach()))) for a in args]
        before = torch.is_grad_enabled()
        with functional_layer(FunctionalLayer.MODE) as storages:
            apart = subclass_arguments(plain)
            assert apart is not None
            self.inputs = apart.enter(apart.dense, args)
            outputs = list(fn(*(i.value for i in self.inputs)))
            modes = (before, torch.is_grad_enabled())
            record = collect_metadata(self.inputs, outputs, grad_mode=modes, storages=storages, sizes=apart.sizes)
            self.dense = [_copy(from_functional(v)) if isinstance(v, Tensor) else v for v in record.forward_values]
        torch.set_grad_enabled(before)
        assert record.subclasses is not None and record.metadata.subclasses is not None
        self.run, self.metadata = record.subclasses, record.metadata
        self.boundary: SubclassBoundary = record.metadata.subclasses
        self.dense_args = [tensor for arg in args for tensor in tensors_inside(arg)]
        assert len(self.metadata.inputs) == len(self.dense_args) == len(apart.dense)
        assert GraphMetadata.from_json(self.metadata.to_json()) == self.metadata

    def forward(self) -> list[Any]:
        """The values that the caller's contract counts."""
        return [self._subclass_value(made, self.dense) for made in self.boundary.forward]

    def _subclass_value(self, made: SubclassValue, dense: Sequence[Tensor]) -> Any:
        parts = [self._part(part, dense) for part in made.parts]
        if made.subclass is None:
            (only,) = parts
            return only
        with torch.no_grad():
            return _put_together(made.subclass, iter(parts))

    def _part(self, part: TensorSource, dense: Sequence[Tensor]) -> Tensor:
        source = self.dense_args[part.index].detach() if part.source == "input" else dense[part.index]
        if part.view is None:
            return source
        assert part.base_dtype == str(source.dtype).removeprefix("torch.")
        return _taken(source, part.view)

    def gradients(self, tangents: Sequence[Any]) -> list[Any]:
        """Of the differentiable arguments; put together as the records say."""
        outer = self.boundary.outer
        with functional_layer(FunctionalLayer.MODE):
            pairs = []
            for info, subclass in zip(outer.tangents, self.boundary.tangents, strict=True):
                given = tangents[info.forward_output]
                assert (subclass is not None) is is_subclass(self.run.outer_values[info.forward_output])
                if given is not None:
                    assert subclass is None or len(subclass.leaves) == len(list(tensors_inside(given)))
                    functional = rebuild(given, map(to_functional, tensors_inside(given)))
                    pairs.append((self.run.outer_values[info.forward_output], functional))
            leaves = [i for i in self.inputs if i.leaf is not None]
            values, grads = zip(*pairs, strict=True)
            found = torch.autograd.grad(values, [i.leaf for i in leaves], grads, allow_unused=True, retain_graph=True)
            by_index = {i.index: g for i, g in zip(leaves, found, strict=True)}
            complete, dense = self.run.with_gradients(self.metadata, by_index)
            plain = [_copy(from_functional(g)) for g in dense]
        boundary = complete.subclasses
        assert boundary is not None and boundary.num_gradients == len(dense)
        assert GraphMetadata.from_json(complete.to_json()) == complete
        made = [None if record is None else self._subclass_value(record, plain) for record in boundary.gradients]
        return [made[i.index] for i in leaves]


def _put_together(subclass: SubclassMeta, parts: Any) -> Any:
    inner = {
        name: _put_together(child, parts) if isinstance(child, SubclassMeta) else next(parts)
        for name, child in subclass.attrs
        if isinstance(child, SubclassMeta | TensorMeta)
    }
    return subclass.type.cls.__tensor_unflatten__(
        inner, subclass.type.context, subclass.meta.sizes, subclass.meta.strides
    )


def _taken(base: Any, view: ViewSpec) -> Any:
    method, order = view_method(tensor_meta(base), view)
    match method:
        case "permute":
            return base.permute(order)
        case "as_strided":
            return base.as_strided(view.sizes, view.strides, base.storage_offset() + int(view.offset_delta))
    return getattr(base, method)(view.sizes)


def _regenerated(base: Any, view: ViewSpec) -> Any:
    if not view.detached and base.requires_grad and not view.requires_grad:
        base = base.detach()
    with torch.set_grad_enabled(torch.is_grad_enabled() and not view.under_no_grad):
        taken = _taken(base, view)
    return taken.detach() if view.detached else taken


class _Graph(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _Run, *inputs: Any) -> Any:
        values = run.forward()
        wanted = run.boundary.outer.forward_requires_grad
        ctx.mark_non_differentiable(*(v for v, w in zip(values, wanted, strict=True) if not w))
        ctx.set_materialize_grads(False)
        ctx.run = run
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *tangents: Any) -> Any:
        return None, *ctx.run.gradients(tangents)


def _applied(run: _Run, args: Sequence[Any]) -> list[Any]:
    outer = run.boundary.outer
    if outer.is_training:
        forward = list(_Graph.apply(run, *(args[i] for i in outer.differentiable_inputs)))
    else:
        forward = run.forward()
    assert len(forward) == outer.num_forward_outputs
    for info in outer.inputs:
        assert info.mutation in (MutationKind.NONE, MutationKind.DATA)
        arg, before = args[info.index], args[info.index]._version
        if info.updated_output is not None:
            hidden = info.mutation_hidden_from_autograd
            with torch.set_grad_enabled(torch.is_grad_enabled() and not info.mutation_under_no_grad):
                (arg.data if hidden else arg).copy_(forward[info.updated_output])
        for _ in range(info.version_steps - (arg._version - before)):
            torch.autograd.graph.increment_version(arg)
    results: list[Any] = [None] * len(outer.outputs)
    for output in sorted(outer.outputs, key=lambda o: o.kind is OutputKind.ALIAS_OF_OUTPUT):
        base: Any = None
        match output.kind:
            case OutputKind.CONSTANT:
                results[output.index] = output.constant
            case OutputKind.FRESH:
                results[output.index] = forward[output.graph_output or 0]
            case OutputKind.INPUT:
                results[output.index] = args[output.base or 0]
            case OutputKind.ALIAS_OF_INPUT:
                base = args[output.base or 0]
            case OutputKind.ALIAS_OF_OUTPUT:
                base = results[output.base or 0]
            case OutputKind.ALIAS_OF_INTERMEDIATE:
                base = forward[len(forward) - len(outer.intermediate_bases) + (output.base or 0)]
        if base is not None:
            assert output.view is not None
            results[output.index] = _regenerated(base, output.view)
        if output.same_as is not None:
            results[output.index] = results[output.same_as]
    return results


def _flat(value: Any) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in tensors_inside(value)]


def _seen(args: Sequence[Any], call: Callable[..., Any]) -> dict[str, Any]:
    """What a caller sees of one call, of its gradients, and after writes to each of the values."""
    versions = [a._version for a in args]
    edges = [get_gradient_edge(a) for a in args if a.requires_grad]
    outputs = list(call(*args))
    tensors = [*args, *(o for o in outputs if isinstance(o, Tensor))]
    inside = [[t.untyped_storage()._cdata for t in tensors_inside(value)] for value in tensors]
    facts: dict[str, Any] = {
        "constants": [o for o in outputs if not isinstance(o, Tensor)],
        "versions": [a._version - before for a, before in zip(args, versions, strict=True)],
        "identity": [next(i for i, other in enumerate(tensors) if other is t) for t in tensors],
        "memory": [[bool({*a} & {*b}) for b in inside] for a in inside],
        "geometry": [(type(t), t.shape, t.stride(), t.dtype) for t in tensors],
        "values": [_flat(t) for t in tensors],
        "requires grad": [_is_differentiable(t) for t in tensors],
    }
    values = list({id(t): t for t in tensors if t.requires_grad}.values())
    if values and edges:
        try:
            losses = [(t.sin() * (k + 1)).sum() for k, t in enumerate(values)]
            found = torch.autograd.grad(losses, edges, [torch.ones_like(x) for x in losses], allow_unused=True)
        except RuntimeError:
            facts["no gradient"] = True
        else:
            facts["gradients"] = [[torch.zeros(())] if g is None else _flat(g) for g in found]
    with torch.no_grad():
        for number, value in enumerate(tensors):
            value.fill_(number + 3)
            facts[f"after {number}"] = [_flat(t) for t in tensors]
    return facts


def _is_differentiable(value: Tensor) -> bool | None:
    try:
        return None if value.requires_grad and value._is_view() and value.grad_fn is None else value.requires_grad
    except RuntimeError:
        return None


def _compare(fn: Callable[..., Any], make: Callable[[], Sequence[Any]]) -> GraphMetadata:
    expected = _seen(list(make()), fn)
    found: list[GraphMetadata] = []

    def by_records(*args: Any) -> list[Any]:
        run = _Run(fn, args)
        found.append(run.metadata)
        return _applied(run, args)

    ours = _seen(list(make()), by_records)
    if "no gradient" in expected:
        ours, expected = ({k: v for k, v in f.items() if "gradient" not in k} for f in (ours, expected))
    assert ours.keys() == expected.keys()
    for name, want in expected.items():
        if name in ("values", "gradients") or name.startswith("after"):
            torch.testing.assert_close(ours[name], want, msg=lambda text, name=name: f"{name}: {text}")
        elif name == "requires grad":
            assert all(a == b for a, b in zip(ours[name], want, strict=True) if None not in (a, b)), name
        else:
            assert ours[name] == want, f"{name}: {want} in eager mode, {ours[name]} by the records"
    return found[0]


def _made(kind: str) -> Any:
    inside = {"nested": "flat", "flat": "plain"}.get(kind)
    return torch.randn(4, 4) if inside is None else TwoTensor(_made(inside), _made(inside))


UNARY: dict[str, Callable[[Any], Any]] = {
    "sin": lambda x: x.sin(),
    "double": lambda x: x * 2,
    "t": lambda x: x.t(),
    "rows": lambda x: x[1:3],
    "column": lambda x: x[:, 1],
    "detach": lambda x: x.detach(),
    "sum": lambda x: x.sum(0),
    "flat": lambda x: x.view(-1),
    "view_as": lambda x: x.view_as(x),
    "first inside": lambda x: x.a * 2 if is_subclass(x) else x + 1,
    "inside itself": lambda x: x.b if is_subclass(x) else x,
    "part of the inside": lambda x: x.a[1:] if is_subclass(x) else x[1:],
    "wrapped": lambda x: x if is_subclass(x) else TwoTensor(x.detach() * 2, x.detach() + 1),
    "half new": lambda x: TwoTensor(x.a.detach(), x.b * 3) if is_subclass(x) else x,
    "swapped": lambda x: TwoTensor(x.b, x.a) if is_subclass(x) else x,
}
IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "mul_": lambda x: x.mul_(1.5),
    "zero_": lambda x: x.zero_(),
    "sin_": lambda x: x.sin_(),
    "inside": lambda x: (x.a if is_subclass(x) else x.detach()).add_(1),
}


@dataclass(frozen=True)
class Program:
    """Kinds of arguments, how autograd knows them, steps (what, name, operands), numbers of what is returned."""

    kinds: tuple[str, ...]
    grads: tuple[str, ...]
    steps: tuple[tuple[str, str, int, int], ...]
    results: tuple[int, ...]

    @staticmethod
    def random(seed: int) -> Program:
        rng = random.Random(seed)
        subclass = rng.choice(["flat", "flat", "nested"])
        kinds = [subclass, *rng.choices([subclass, "plain"], k=rng.randint(0, 2))]
        steps = []
        for _ in range(rng.randint(1, 5)):
            what = rng.choices(["unary", "no_grad", "product", "in_place", "in_place no_grad"], [6, 1, 2, 2, 1])[0]
            names = sorted(IN_PLACE if what.startswith("in_place") else UNARY)
            steps.append((what, rng.choice(names), rng.randrange(8), rng.randrange(8)))
        grads = rng.choices(["none", "leaf", "computed"], k=len(kinds))
        return Program(tuple(kinds), tuple(grads), tuple(steps), tuple(rng.choices(range(8), k=rng.randint(1, 4))))

    def __call__(self, *args: Any) -> list[Any]:
        values = list(args)
        for what, name, first, second in self.steps:
            x, y = values[first % len(values)], values[second % len(values)]
            with torch.set_grad_enabled(torch.is_grad_enabled() and "no_grad" not in what):
                if what.startswith("in_place"):
                    IN_PLACE[name](x)
                elif what == "product":
                    values.append(x * y)
                else:
                    values.append(UNARY[name](x))
        return [values[-1 - r % len(values)] for r in self.results]

    def make(self) -> list[Any]:
        torch.manual_seed(1)
        leaves = [_made(k).requires_grad_(g != "none") for k, g in zip(self.kinds, self.grads, strict=True)]
        return [x * 1 if g == "computed" else x for x, g in zip(leaves, self.grads, strict=True)]


@pytest.mark.covers("F1.2", "F2.31")
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_programs_over_wrappers_are_what_eager_mode_does(first: int) -> None:
    compared = refused = 0
    for seed in range(first, first + 25):
        program = Program.random(seed)
        try:
            program(*program.make())
        except (RuntimeError, IndexError, AssertionError, ValueError):
            continue  # no valid program
        try:
            _compare(program, program.make)
        except Unsupported:
            refused += 1
            continue
        except AssertionError as error:
            raise AssertionError(f"{error}\nin {seed}: {program}") from error
        compared += 1
    assert compared >= 10 and refused <= compared, (compared, refused)


def _no_grad(write: Callable[[], Any]) -> None:
    with torch.no_grad():
        write()


FIXED: dict[str, Callable[[Any], list[Any]]] = {
    "views of one value, and others": lambda x: (lambda y: [x.a * 3, y.t(), x.sin(), y.view(-1)])(x * 2),
    "a value and its views": lambda x: (lambda y: [y.t(), y, y.view(-1)])(x * 2),
    "views of two values": lambda x: (lambda y, z: [y.t(), z.t(), y[1:], z[1:]])(x * 2, x * 3),
    "views of plain values and of wrappers": lambda x: (lambda y, z: [z[1:], y.t(), z.t(), y[1:]])(x * 2, x.a * 3),
    "views of an argument": lambda x: [x.t(), x[1:].t(), x.view(-1), x.unsqueeze(0).expand(2, 4, 4)],
    "a write and a view": lambda x: (x.mul_(2), [x.t(), x * 1])[1],
    "a write to a view": lambda x: (x[1:].mul_(2), [x.t(), x * 1])[1],
}


@pytest.mark.parametrize("kind", ["flat", "nested"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", FIXED)
def test_results_that_share_memory_are_what_eager_mode_gives(name: str, grad: bool, kind: str) -> None:
    def make() -> list[Any]:
        torch.manual_seed(0)
        return [_made(kind).requires_grad_(grad) * 1 if grad else _made(kind)]

    _compare(FIXED[name], make)


@pytest.mark.parametrize("kind", ["flat", "nested"])
def test_a_leaf_may_be_written_to_where_grad_mode_is_off(kind: str) -> None:
    def fn(x: Any) -> list[Any]:
        _no_grad(lambda: x.mul_(2))
        return [x * 3]

    def make() -> list[Any]:
        torch.manual_seed(0)
        return [_made(kind).requires_grad_()]

    info = _compare(fn, make).subclasses.outer.inputs[0]  # type: ignore[union-attr]
    assert info.mutation is MutationKind.DATA and info.mutation_under_no_grad and info.is_leaf


class _Named(TwoTensor):
    """Tells by which names it is taken apart."""

    names: tuple[str, ...] = ("a", "b")

    def __tensor_flatten__(self) -> Any:
        return list(self.names), None


def test_wrappers_that_hold_other_things_are_not_the_same() -> None:
    def wrap(a: Any, b: Any, names: tuple[str, ...] = ("a", "b")) -> Any:
        made = _Named(a, b)
        made.names = names
        return made

    plain, flat = torch.ones(2), TwoTensor(torch.ones(2), torch.ones(2))
    assert _same(wrap(plain, plain), wrap(plain, plain)) and _same(wrap(flat, flat), wrap(flat, flat))
    assert not _same(wrap(plain, plain), wrap(plain, plain, ("b", "a")))
    for one, other in ((flat, plain), (plain, flat)):
        assert not _same(wrap(one, one), wrap(other, other))
    assert not _same(plain, flat) and not _same(plain, torch.ones(3)) and _same(plain, torch.zeros(2))
    assert not _same(torch.ones(2, 2), torch.ones(2, 2).t()) and not _same(wrap(plain, plain), flat)
