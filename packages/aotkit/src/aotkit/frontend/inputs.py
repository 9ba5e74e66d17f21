"""Inputs of a graph of Dynamo, and fake ones for a compile, made the way Dynamo made its own so that symbols agree.

Note [Tensors that a graph holds]
    Dynamo stores what never changes identity (parameters of an optimizer and their state) on the graph module itself.
    As attributes they would be constants: not written to, not differentiated. As arguments they are tensors like any
    other, so that is what :func:`lift_attributes` makes of them.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext, detect_fake_mode
from torch._subclasses import FakeTensor, FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.experimental._backward_state import BackwardState
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .changed_graphs import has_call
from .plain_fakes import has_fixed_sizes, plain_inputs, plain_twin

__all__ = ["ACCUMULATIONS", "accumulates_gradients", "attribute_tensors", "calls_flex_attention", "fake_inputs"]
__all__ += ["fake_of_the_program", "has_float_symbols", "has_lists", "has_symbols", "lift_attributes"]
__all__ += ["symbolic_twins", "unsupported_input"]

#: Functions of compiled autograd that set ``.grad``.
ACCUMULATIONS = ("AccumulateGrad", "call_accumulate_grad")


def calls_flex_attention(gm: torch.fx.GraphModule) -> bool:
    """Whether ``gm``, or a graph in it, calls that higher-order operator."""
    return has_call(gm, _is_flex_attention)


def _is_flex_attention(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.HigherOrderOperator) and node.target.name() == "flex_attention"


def fake_inputs(
    example_inputs: Sequence[Any], gm: torch.fx.GraphModule, *, fixed_floats: bool = False
) -> tuple[FakeTensorMode, list[Any]]:
    """Fakes of Dynamo's example inputs of ``gm``, under its own fake mode when there is one.

    Dynamo hands over real tensors. Converting each with the symbolic context that Dynamo recorded for
    it gives the very symbols that its guards talk about; a tensor without one becomes static.
    ``fixed_floats``: see Note [Python floats under dynamic shapes].
    """
    context = TracingContext.try_get()
    mode = (context.fake_mode if context is not None else None) or detect_fake_mode(example_inputs)
    mode = mode or FakeTensorMode(shape_env=ShapeEnv())
    plain = plain_inputs(example_inputs)
    fakes = [_fake(value, mode, context, plain) for value in example_inputs]
    on_device = any(isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in example_inputs)
    for position, placeholder in enumerate(gm.graph.find_nodes(op="placeholder")):
        seen = placeholder.meta.get("example_value")
        if _stands_for_float(seen) and isinstance(fakes[position], FakeTensor):
            _note_float(fakes[position], seen.item_memo, fixed_floats or on_device)
    return mode, fakes


def symbolic_twins(values: Sequence[Any], gm: torch.fx.GraphModule, context: TracingContext | None) -> list[Any]:
    """Per input of ``gm`` (and tensor that it holds) a fake tensor with Dynamo's symbols; ``None`` if static.

    Nothing is specialised here: a number that Dynamo passes as a tensor keeps its symbol, in ``item_memo``.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    seen = [node.meta.get("example_value") for node in placeholders]
    mode = None if context is None else context.fake_mode
    if mode is None or mode.shape_env is None or not mode.shape_env.var_to_range:
        return [None] * len(values)
    twins: list[Any] = []
    for position, value in enumerate(values):
        shown = seen[position] if position < len(seen) else None
        if not isinstance(value, torch.Tensor) or context is None or context.tensor_to_context.get(value) is None:
            twins.append(None)
        elif _stands_for_float(shown):
            twins.append(shown)
        elif _is_static(value, context.tensor_to_context[value]):
            twins.append(None)
        else:
            twins.append(_fake(value, mode, context))
    return twins


def _is_static(value: torch.Tensor, symbolic: Any) -> bool:
    """Whether a fake made in this symbolic context has numbers only, so that it says no more than ``value`` does.

    Torch makes numbers of the strides and the offset as well where all sizes are. A view follows its base, a subclass
    what it is made of, and a number of the user's that is passed as a tensor may be a symbol.
    """
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value._base is not None:
        return False
    if value.dim() == 0 and value.is_floating_point():
        return False
    return has_fixed_sizes(symbolic)


def has_float_symbols(gm: torch.fx.GraphModule) -> bool:
    """Whether an input of Dynamo's graph stands for a Python float that may change."""
    return any(_stands_for_float(node.meta.get("example_value")) for node in gm.graph.find_nodes(op="placeholder"))


def has_symbols(gm: torch.fx.GraphModule) -> bool:
    """Whether a size, or a number, of an input of Dynamo's graph may change."""
    symbols = (torch.SymInt, torch.SymFloat, torch.SymBool)
    for node in gm.graph.find_nodes(op="placeholder"):
        value = node.meta.get("example_value")
        shape = value.shape if isinstance(value, torch.Tensor) else ()
        if isinstance(value, symbols) or any(isinstance(size, symbols) for size in shape):
            return True
    return has_float_symbols(gm)


def _stands_for_float(seen: Any) -> bool:
    """A memo without a value is of ``.item()`` on a tensor of the user's, not of a number that is passed."""
    number = seen.item_memo if isinstance(seen, FakeTensor) and seen.dim() == 0 else None
    return isinstance(number, torch.SymFloat) and number.node.has_hint()


def _note_float(fake: FakeTensor, symbol: torch.SymFloat, fixed: bool) -> None:
    """Let an input that stands for a Python float give Dynamo's symbol, or its value, which is guarded on.

    Note [Python floats under dynamic shapes]
        With ``dynamic=True`` Dynamo passes Python floats as 0-d float64 tensors and reads them with ``.item()``,
        as a symbol. What is captured then takes any value of it. Where that is refused (a derivative has to compare
        it, say) it is captured once more with the number itself: evaluating the symbol installs a guard
        ``float == value``, and a float that changes compiles again. On a device, kernels would have to read the
        memory of the CPU, so there the number is fixed from the start.
    """
    if not fixed:
        fake.item_memo = symbol
    elif symbol.node.has_hint():
        fake.item_memo = None
        with unset_fake_temporarily():
            fake.constant = torch.tensor(float(symbol), dtype=fake.dtype)


def _fake(value: Any, mode: FakeTensorMode, context: TracingContext | None, plain: Collection[int] = ()) -> Any:
    if not isinstance(value, torch.Tensor) or isinstance(value, FakeTensor):
        return value
    symbolic = None if context is None else context.tensor_to_context.get(value)
    made = plain_twin(value, mode, symbolic) if id(value) in plain else None
    if made is not None:
        return made
    if symbolic is not None:
        # Tells distributed tensors, whose cache of layouts can't hash symbols, that this is no call of theirs.
        with enable_python_dispatcher():
            source = getattr(symbolic, "tensor_source", None)
            return mode.from_tensor(value, symbolic_context=symbolic, source=source)
    return mode.from_tensor(value, static_shapes=True)


def has_lists(example_inputs: Sequence[Any]) -> bool:
    """Whether an input is a list."""
    return any(isinstance(value, list | tuple) for value in example_inputs)


def accumulates_gradients(gm: torch.fx.GraphModule) -> bool:
    """Whether it is (a part of) a backward pass as compiled autograd makes it, and sets ``.grad`` of tensors."""
    if "torch._dynamo.compiled_autograd" not in sys.modules:
        return False
    return any(getattr(node.target, "__name__", "") in ACCUMULATIONS for node in gm.graph.nodes)


def unsupported_input(example_inputs: Sequence[Any], *, kernels: bool = True) -> str | None:
    """Why these inputs cannot be compiled, by kind, device or layout, or ``None``."""
    for position, value in enumerate(example_inputs):
        if isinstance(value, BackwardState):
            return f"input {position} is a BackwardState: hooks on values inside do not run under compiled autograd"
        if not isinstance(value, torch.Tensor):
            continue
        if kernels and value.device.type not in ("cpu", "cuda"):
            return f"input {position} is on device {value.device}; code is generated for the CPU and for CUDA only"
        if value.layout is not torch.strided:
            return f"input {position} has layout {value.layout}; only strided tensors are compiled"
        if torch._is_functional_tensor(value):
            return f"input {position} is functionalized from outside (torch.func.functionalize), operator by operator"
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            return f"input {position} is a wrapper that a transform of torch.func has left, without memory of its own"
        if value._is_zerotensor():
            return f"input {position} is a tensor of zeros that has no memory, as gradients of forward mode may be"
    return None


def fake_of_the_program(example_inputs: Sequence[Any]) -> str | None:
    """Which of a graph's inputs the program itself made a fake tensor, as a run that only asks for sizes does.

    Kernels read memory, and fakes have none. Those of Dynamo's own mode only tell what the call will be given.
    """
    context = TracingContext.try_get()
    if context is None or context.fake_mode is None:
        return None
    for position, value in enumerate(example_inputs):
        if any(part.fake_mode is not context.fake_mode for part in _fakes_in(value)):
            return f"input {position} is, or holds, a fake tensor, which has no memory"
    return None


def _fakes_in(value: object) -> Iterator[FakeTensor]:
    if isinstance(value, FakeTensor):
        yield value
    elif isinstance(value, torch.Tensor) and is_traceable_wrapper_subclass(value):
        for name in value.__tensor_flatten__()[0]:
            yield from _fakes_in(getattr(value, name))


def attribute_tensors(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The tensors that :func:`lift_attributes` makes arguments, in their order."""
    attributes = {str(node.target): _attribute(gm, node) for node in gm.graph.find_nodes(op="get_attr")}
    return [value for value in attributes.values() if isinstance(value, torch.Tensor)]


def lift_attributes(gm: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    """The graph with one more argument per tensor attribute that it reads, and these tensors, in order.

    The module given is not changed; without such attributes it is the one returned.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "get_attr"]
    attributes = {str(node.target): value for node in nodes if isinstance(value := _attribute(gm, node), torch.Tensor)}
    if not attributes:
        return gm, ()
    graph = copy.deepcopy(gm.graph)
    arguments: dict[str, torch.fx.Node] = {}
    before = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op != "get_attr" or str(node.target) not in attributes:
            continue
        name = str(node.target)
        if name not in arguments:
            with graph.inserting_before(before):
                arguments[name] = graph.placeholder(f"attribute_{name.replace('.', '_')}")
            arguments[name].target = arguments[name].name  # which no other argument has: of `a.b` and of `a_b`, say
            arguments[name].meta.update(node.meta)
        node.replace_all_uses_with(arguments[name])
        if node is before:
            before = node.next
        graph.erase_node(node)
    lifted = torch.fx.GraphModule(gm, graph)  # takes along only what the graph still names
    lifted.meta = dict(gm.meta)
    return lifted, tuple(attributes[name] for name in arguments)


def _attribute(gm: torch.fx.GraphModule, node: torch.fx.Node) -> object:
    value: object = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value
