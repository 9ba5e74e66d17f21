"""Stand-ins for a compiler, so that wrappers are tested on any function without tracing one, and a look at both sides.

``EagerGraph`` serves a function as the compiled graph that its metadata describes: functional, because it runs on
copies of the inputs, with the copies saved for a backward that runs the function again. ``FunctionalGraph`` does the
same by functional runs, of which nothing needs to be known before. ``same_as_eager`` compares what a caller sees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd.graph import get_gradient_edge
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_functionalize import (
    FunctionalLayer,
    GraphMetadata,
    NeedsDispatcherLayer,
    OverlappingMutation,
    analyze,
    collect_metadata,
    function_inputs,
    functional_layer,
    records,
)
from aotkit_functionalize.subclasses import is_subclass, rebuild, subclass_arguments, tensors_inside
from aotkit_functionalize.tracing import below_functional_layer, fake_twin, from_functional, to_functional
from aotkit_runtime_wrappers import (
    InputPlan,
    WrapperError,
    WrapperOptions,
    WrapperPlan,
    bind,
    build_plan,
    interpret,
    prepare_inputs,
)
from aotkit_runtime_wrappers.errors import MetadataMismatchError
from aotkit_runtime_wrappers.synthetic_base import PreparedFunction, graph_inputs, plan_synthetic_bases

FRESH, INTERMEDIATE = records.OutputKind.FRESH, records.OutputKind.ALIAS_OF_INTERMEDIATE


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return copy.copy_(tensor.detach())


class EagerGraph:
    """Boxed forward and backward of ``function`` as its metadata describes them."""

    def __init__(self, function: Callable[..., Sequence[Any]], meta: GraphMetadata) -> None:
        self.function, self.meta = function, meta
        self.forward_calls = self.backward_calls = 0

    @property
    def num_saved(self) -> int:
        return sum(1 for i in self.meta.inputs if i.kind is records.InputKind.TENSOR) if self.meta.is_training else 0

    def _run(self, inputs: Sequence[Any]) -> tuple[list[torch.Tensor], list[Any]]:
        leaves, values = [], []
        for index, value in enumerate(inputs):
            if not isinstance(value, torch.Tensor):
                values.append(value)
                continue
            copy = copy_of(value)
            if index in self.meta.differentiable_inputs:
                leaves.append(copy.requires_grad_())
                copy = _identity(copy)
            values.append(copy)
        outputs = list(self.function(*values))
        forward: list[Any] = [None] * self.meta.num_forward_outputs
        for info in self.meta.inputs:
            if info.updated_output is not None:
                forward[info.updated_output] = values[info.index]
        for info in self.meta.outputs:
            if info.graph_output is not None:
                forward[info.graph_output] = outputs[info.index]
            if info.kind is INTERMEDIATE:
                first = self.meta.num_forward_outputs - len(self.meta.intermediate_bases)
                forward[first + info.base] = outputs[info.index]._base
        return leaves, forward

    def forward(self, args: list[Any]) -> list[Any]:
        self.forward_calls += 1
        inputs = list(args)
        args.clear()
        assert not torch.is_grad_enabled()
        with torch.set_grad_enabled(self.meta.is_training):
            _, outputs = self._run(inputs)
        outputs = [copy_of(o) if isinstance(o, torch.Tensor) else o for o in outputs]
        saved = [v for v in inputs if isinstance(v, torch.Tensor)] if self.meta.is_training else []
        return [*outputs, *saved]

    def backward(self, args: list[Any]) -> list[Any]:
        self.backward_calls += 1
        saved, tangents = args[: self.num_saved], args[self.num_saved :]
        args.clear()
        with torch.enable_grad():
            leaves, outputs = self._run(saved)
        wanted = [outputs[t.forward_output] for t in self.meta.tangents]
        for info, tangent in zip(self.meta.tangents, tangents, strict=True):
            assert tangent.stride() == tuple(info.meta.strides), "the tangent was not coerced"
        found = torch.autograd.grad(wanted, leaves, tangents, allow_unused=True)
        grads: list[Any] = [None] * len(self.meta.inputs)
        for index, grad in zip(self.meta.differentiable_inputs, found, strict=True):
            grads[index] = grad
        return grads


class _Identity(torch.autograd.Function):
    """A non-leaf with the strides of the leaf and memory of its own."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor) -> torch.Tensor:
        return copy_of(leaf)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _identity(leaf: torch.Tensor) -> torch.Tensor:
    return _Identity.apply(leaf)


def boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True
    return run


@dataclass
class Compiled:
    call: Callable[[list[Any]], list[Any]]
    plan: WrapperPlan
    graph: EagerGraph
    inputs: InputPlan


def _compile_eagerly(
    function: Callable[..., Sequence[Any]],
    args: Sequence[Any],
    *,
    how: Callable[..., Any] = bind,
    options: WrapperOptions | None = None,
) -> Compiled:
    """Analyze, plan, bind; every product goes through its text form."""
    inputs = prepare_inputs(args)
    prepared = PreparedFunction(function, inputs)
    try:
        meta = analyze(prepared, graph_inputs(inputs, args))
    except Exception as error:
        if not hasattr(error, "groups"):
            raise
        inputs = plan_synthetic_bases(inputs, args, error.groups)
        prepared = PreparedFunction(function, inputs)
        meta = analyze(prepared, graph_inputs(inputs, args))
    inputs = prepared.finish()
    assert InputPlan.from_json(inputs.to_json()) == inputs
    graph = EagerGraph(PreparedFunction(function, inputs), meta)
    plan = build_plan(meta, input_plan=inputs, num_saved_tensors=graph.num_saved, options=options)
    reloaded = WrapperPlan.from_json(plan.to_json())
    assert reloaded == plan
    backward = (lambda: boxed(graph.backward)) if plan.call.training else None
    return Compiled(how(reloaded, boxed(graph.forward), backward), plan, graph, inputs)


@pytest.fixture(params=[bind, interpret], ids=["bind", "interpret"])
def how(request: pytest.FixtureRequest) -> Callable[..., Any]:
    return request.param


@pytest.fixture
def compile_eagerly() -> Callable[..., Compiled]:
    return _compile_eagerly


# -- a functional run as the compiled graph ------------------------------------------------------------


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
        self.symints: tuple[int, ...] = ()
        self.last: list[Any] = []

    def complete(self, dense: Sequence[Any]) -> GraphMetadata:
        """The metadata of a run, with what reaches which gradient, for subclasses with what gradients are made of."""
        record, inputs = self._run(dense)
        self.metadata = made = record.metadata
        if not made.is_training:
            return made
        with functional_layer(self.layer):
            if record.subclasses is None:
                values = [record.forward_values[t.forward_output] for t in made.tangents]
                self.metadata = replace(made, reached_by=_reached(values, inputs))
                return self.metadata
            boundary = made.subclasses
            values = [record.subclasses.outer_values[t.forward_output] for t in boundary.outer.tangents]
            rows = _reached(values, inputs)
            made, _ = self._subclass_gradients(record, inputs, list(map(torch.ones_like, values)))
        nested = [subclass is not None for subclass in boundary.tangents]
        rows = tuple(tuple(number for number in row if nested[number]) for row in rows)
        self.metadata = replace(made, subclasses=replace(made.subclasses, reached_by=rows))
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
        self.last = [None if isinstance(v, Tensor) else v for v in inputs]
        record, _ = self._run(inputs)
        with functional_layer(self.layer):
            outputs = [_copy(from_functional(v.resolve_conj().resolve_neg())) if isinstance(v, Tensor) else v
                       for v in record.forward_values]  # fmt: skip
        outputs = self._with_numbers(outputs, record.metadata)
        return [*outputs, *([v for v in inputs if isinstance(v, Tensor)] if self.num_saved else []), *self.symints]

    def _with_numbers(self, values: Sequence[Any], ran: GraphMetadata) -> list[Any]:
        """The results with the sizes among them, which are constants in a run at fixed sizes."""
        assert self.metadata is not None
        kind = records.OutputKind.SYMINT
        numbers = {o.graph_output: ran.outputs[o.index].constant for o in self.metadata.outputs if o.kind is kind}
        others = iter(values)
        found = [numbers[i] if i in numbers else next(others) for i in range(self.metadata.num_forward_outputs)]
        assert next(others, None) is None
        return found

    def backward(self, args: list[Any]) -> list[Any]:
        assert tuple(args[: len(self.symints)]) == self.symints
        del args[: len(self.symints)]
        saved, tangents = args[: self.num_saved], args[self.num_saved :]
        args.clear()
        assert self.metadata is not None
        record, inputs = self._run(self._as_given(saved))
        with functional_layer(self.layer):
            if record.subclasses is not None:
                found, dense = self._subclass_gradients(record, inputs, self._wrapped(record, tangents))
                boundary = replace(found.subclasses, reached_by=self.metadata.subclasses.reached_by)
                assert replace(found, subclasses=boundary) == self.metadata or self.symints
                return [_copy(from_functional(g)) for g in dense]
            given = [to_functional(_copy(t)) for t in tangents]
            values = [record.forward_values[t.forward_output] for t in record.metadata.tangents]
            grads: list[Any] = [None] * len(self.metadata.inputs)
            leaves = [i for i in inputs if i.leaf is not None]
            for i, g in zip(leaves, torch.autograd.grad(values, [i.leaf for i in leaves], given, allow_unused=True),
                            strict=True):  # fmt: skip
                grads[i.index] = None if g is None else _copy(from_functional(g))
        return grads

    def _as_given(self, saved: Sequence[Any]) -> list[Any]:
        """The inputs of the graph: saved tensors, and what is none as it was in the last call."""
        remaining = iter(saved)
        return [next(remaining) if v is None else v for v in self.last]

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


def _reached(values: Sequence[Tensor], inputs: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    """Per input, the numbers of the values that its gradient comes from."""
    leaves = [i.leaf for i in inputs if i.leaf is not None]
    ones = list(map(torch.ones_like, values))
    found = [torch.autograd.grad(v, leaves, one, retain_graph=True, allow_unused=True)
             for v, one in zip(values, ones, strict=True)]  # fmt: skip
    rows = iter(zip(*found, strict=True))
    return tuple(tuple(n for n, g in enumerate(next(rows)) if g is not None) if i.leaf is not None else ()
                 for i in inputs)  # fmt: skip


def _flags(value: Any) -> Any:
    """What a run asks of the caller's tensor; its flags may change in the call."""
    if not isinstance(value, Tensor) or is_subclass(value):
        return value
    conj, neg = value.is_conj(), value.is_neg()
    return SimpleNamespace(
        requires_grad=value.requires_grad, is_leaf=value.is_leaf, is_conj=lambda: conj, is_neg=lambda: neg
    )


class Sizes:
    """Fake twins of arguments, with symbols for sizes, and which other arguments a graph over them serves."""

    def __init__(self, args: Sequence[Any]) -> None:
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.env = self.mode.shape_env
        self.fakes = [fake_twin(a, self.mode, static=False) if isinstance(a, Tensor) else a for a in args]

    def serve(self, args: Sequence[Any]) -> bool:
        """Whether the guards of the graph hold for ``args``."""
        known, pairs = {}, []
        for fake, real in zip(self.fakes, args, strict=True):
            if isinstance(real, Tensor):
                pairs += list(zip(_numbers(fake), _numbers(real), strict=True))
        for size, number in pairs:
            if isinstance(size, torch.SymInt) and size.node._expr.is_symbol:
                known.setdefault(size.node._expr, number)
        texts = [(s.node._expr.subs(known) if isinstance(s, torch.SymInt) else s, number) for s, number in pairs]
        return all(int(s) == n for s, n in texts) and all(bool(g.expr.subs(known)) for g in self.env.guards)


def _numbers(value: Tensor) -> list[Any]:
    inside = [] if not is_subclass(value) else [n for t in tensors_inside(value) for n in _numbers(t)]
    return [*value.size(), *value.stride(), value.storage_offset(), *inside]


def _compiled(
    function: Callable[..., Any], args: Sequence[Any], how: Any, sizes: Sizes | None = None
) -> Callable[[list[Any]], list[Any]]:
    given = args if sizes is None else sizes.fakes
    inputs = prepare_inputs(given)
    layer = FunctionalLayer.MODE

    def analyzed() -> tuple[GraphMetadata, InputPlan]:
        prepared = PreparedFunction(function, inputs)
        found = analyze(prepared, graph_inputs(inputs, given), layer=layer)
        return found, prepared.finish()

    before = torch.is_grad_enabled()
    try:
        try:
            meta, plan_of_inputs = analyzed()
        except NeedsDispatcherLayer:
            layer = FunctionalLayer.DISPATCHER
            meta, plan_of_inputs = analyzed()
    except OverlappingMutation as overlap:
        inputs = plan_synthetic_bases(inputs, given, overlap.groups)
        if sizes is not None:
            meta, plan_of_inputs = analyzed()
    finally:
        torch.set_grad_enabled(before)
    prepared = PreparedFunction(function, inputs)
    graph = FunctionalGraph(prepared, graph_inputs(inputs, given), layer)
    if sizes is None:
        meta, plan_of_inputs = graph.complete(_dense(graph_inputs(inputs, args))), prepared.finish()
    else:
        if graph.has_subclasses:
            with sizes.mode:
                meta = graph.complete(_dense(sizes.fakes))
        graph.metadata, graph.symints = meta, (17,) if meta.is_training else ()
    assert InputPlan.from_json(plan_of_inputs.to_json()) == plan_of_inputs
    plan = build_plan(
        meta, input_plan=plan_of_inputs, num_saved_tensors=graph.num_saved, num_saved_symints=len(graph.symints)
    )
    reloaded = WrapperPlan.from_json(plan.to_json())
    assert reloaded == plan and str(reloaded) == str(plan)
    backward = (lambda: boxed(graph.backward)) if plan.call.training else None
    call = how(reloaded, boxed(graph.forward), backward)

    def called(values: list[Any]) -> list[Any]:
        if graph.has_subclasses:  # of what sizes and contexts they are
            graph.examples = [v.detach() if isinstance(v, Tensor) else v for v in values]
        return call(values)

    called.plan = call.plan
    return called


def _dense(examples: Sequence[Any]) -> list[Any]:
    inside = [tensor for example in examples for tensor in tensors_inside(example)]
    return [_memory(tensor.detach()) if isinstance(tensor, Tensor) else tensor for tensor in inside]


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


def _as_values(gradients: Sequence[Any]) -> list[list[Tensor]]:
    flat = [[] if g is None else _flat(g) for g in gradients]  # none is as good as zeros
    return [tensors if any(t.any() for t in tensors) else [] for tensors in flat]


def _last_gradients(loss: Tensor, edges: Sequence[Any]) -> list[list[Tensor]] | None:
    """Where all other results get no gradient; ``None``: a wrapper of zeros for these cannot be made."""
    try:
        return _as_values(torch.autograd.grad(loss, edges, torch.ones_like(loss), allow_unused=True))
    except MetadataMismatchError:
        return None


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
            ones = [torch.ones_like(x) for x in losses]
            found = torch.autograd.grad(losses, edges, ones, allow_unused=True, retain_graph=len(losses) > 1)
        except WrapperError:
            raise
        except RuntimeError:
            facts["no gradients"] = True
        else:
            facts["gradients"] = _as_values(found)
            if len(losses) > 1:
                facts["gradients of the last one"] = _last_gradients(losses[-1], edges)
    with torch.no_grad():
        for number, value in enumerate(tensors):
            if 0 not in value.stride():
                value.fill_(number + 3)
                facts[f"after {number}"] = [_flat(t) for t in tensors]
    return facts


def _compare(
    fn: Callable[..., Any], make: Callable[..., Any], how: Any, versions: bool = True, calls: Sequence[Any] = ()
) -> int:
    """How many calls were compared: two of the captured one, or those of ``calls``, sizes that ``make`` takes."""
    sizes = Sizes(make(calls[0])) if calls else None
    call = _compiled(fn, make(calls[0]) if calls else make(), how, sizes)
    compared = 0
    for size in calls or (None, None):
        args = () if size is None else (size,)
        if sizes is not None and not sizes.serve(make(size)):
            continue
        expected = _seen(make(*args), fn)
        _same(expected, _seen(make(*args), lambda *values: call(list(values))), versions)
        compared += 1
    return compared


def _same(expected: dict[str, Any], ours: dict[str, Any], versions: bool) -> None:
    left_out = ("gradients",) if "no gradients" in expected else ()
    left_out += () if versions else ("versions",)
    for name in {*expected, *ours}:
        if any(part in name for part in left_out):
            continue
        assert name in ours and name in expected, name
        want, got = expected[name], ours[name]
        if got is None:
            assert name == "gradients of the last one"
        elif name in ("values", "gradients", "gradients of the last one") or name.startswith("after"):
            torch.testing.assert_close(got, want, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}")
        elif name == "requires grad":
            assert all(a == b for a, b in zip(got, want, strict=True) if None not in (a, b)), (want, got)
        else:
            assert got == want, f"{name}: {want} in eager mode, {got} wrapped"


@pytest.fixture
def same_as_eager(how: Callable[..., Any]) -> Callable[..., int]:
    """``check(fn, make)``: two calls of ``fn`` wrapped around functional runs of it cannot be told from eager ones.

    ``calls``: sizes that ``make`` takes. The graph is captured with symbols at the first, and called at all that its
    guards admit; their number is returned. ``versions=False``: version counters are not compared.
    """
    return lambda fn, make, versions=True, calls=(): _compare(fn, make, how, versions, calls)


@pytest.fixture
def wrapped(how: Callable[..., Any]) -> Callable[..., Any]:
    """``wrap(fn, args)``: a call of ``fn`` around functional runs of it, of all sizes if they are ``varying``."""
    return lambda fn, args, varying=False: _compiled(fn, args, how, Sizes(args) if varying else None)
