"""Everything that differs between the supported torch versions, and the private corners of torch that we touch."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import sympy
import torch
import torch.fx
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv, ValueRangesSLoc
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import _disable_current_modes

from ._kept_calls import has_effect, keep_checks

__all__ = [
    "AllocationEvent",
    "allocation_events",
    "backed_hints",
    "copy_module",
    "declare_symbol",
    "has_effect",
    "is_script_object",
    "keep_checks",
    "known_symbols",
    "lazy_graph_module",
    "make_fake_tensor",
    "memory_profile",
    "new_fake_mode",
    "region_memory_budget_supported",
    "symbolic_hint",
    "without_modes",
]


def symbolic_hint(value: object) -> int | float | bool | None:
    """The example value behind a SymInt, SymFloat or SymBool, None for an unbacked one. Never adds a guard."""
    node = getattr(value, "node", None)
    if node is None:
        return value if isinstance(value, (int, float, bool)) else None
    if not node.has_hint():
        return None
    hint = node.hint
    if isinstance(value, torch.SymBool):
        return bool(hint)
    return int(hint) if isinstance(value, torch.SymInt) else float(hint)


def backed_hints(shape_env: ShapeEnv) -> dict[Any, Any]:
    """Symbol -> example value."""
    return shape_env.backed_var_to_val


def known_symbols(shape_env: ShapeEnv) -> dict[str, Any]:
    """Symbol name -> sympy symbol for every symbol the environment has made."""
    return {symbol.name: symbol for symbol in shape_env.var_to_range}


def declare_symbol(shape_env: ShapeEnv, symbol: Any, hint: int | float | None, value_range: Any) -> None:
    """Make ``symbol`` known to ``shape_env`` under its own name, with its range and (if backed) example value."""
    shape_env.var_to_range[symbol] = value_range
    where = shape_env._get_sloc()
    shape_env.var_to_range_sloc[symbol] = ValueRangesSLoc(where, where)
    if hint is not None:
        # add_backed_var_to_val would make an integer of it.
        backed_hints(shape_env)[symbol] = sympy.Float(hint) if isinstance(hint, float) else sympy.Integer(hint)
        return
    counter = getattr(shape_env, "unbacked_symint_counter", None)
    if isinstance(counter, int) and symbol.name[:1] == "u" and symbol.name[1:].isdigit():
        shape_env.unbacked_symint_counter = max(counter, int(symbol.name[1:]) + 1)


def new_fake_mode() -> FakeTensorMode:
    """A fake mode with a shape environment of its own."""
    return FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)


def lazy_graph_module(root: torch.nn.Module, graph: torch.fx.Graph, name: str) -> torch.fx.GraphModule:
    """A GraphModule that writes its Python code when it is first called; compilers never call it."""
    return _LazyGraphModule(root, graph, class_name=name)


def copy_module(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """A module with a copy of the graph; attributes are shared, so are the values in the nodes' metadata."""
    graph = torch.fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    graph.find_nodes(op="output")[0].meta = dict(module.graph.find_nodes(op="output")[0].meta)
    return _LazyGraphModule(module, graph, class_name=module._get_name())


def make_fake_tensor(fake_mode: FakeTensorMode, meta_tensor: torch.Tensor, device: torch.device) -> FakeTensor:
    """Wrap a meta tensor; the direct constructor is four times quicker than a factory call under the mode."""
    return FakeTensor(fake_mode, meta_tensor, device)


def is_script_object(value: object) -> bool:
    """A TorchBind object, or what stands for one while tracing."""
    return isinstance(value, (torch.ScriptObject, FakeScriptObject))


def without_modes() -> AbstractContextManager[Any]:
    """Switch off whatever dispatch modes are active."""
    return _disable_current_modes()


def region_memory_budget_supported() -> bool:
    """Whether torch has ``torch.autograd.graph.region_activation_memory_budget``: from torch 2.13 on."""
    return hasattr(torch.autograd.graph, "region_activation_memory_budget")


def memory_profile() -> profile:
    """A profiler that records allocations. Before torch 2.13 it warns of the events of other cycles that it forgets,
    though there is one cycle only, unless it keeps them."""
    return profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True)


class AllocationEvent(NamedTuple):
    """An allocation (bytes above 0) or release; ``step`` counts the marked spans, None outside of them."""

    address: int
    bytes: int
    step: int | None


def allocation_events(recorded: Any, marker: str) -> list[AllocationEvent]:
    """The allocator's events of a finished :func:`memory_profile`, in order of time.

    Spans of the name ``marker`` (from ``record_function``) number the steps.
    """
    found: list[tuple[int, int, int, int | None]] = []
    spans = 0
    roots = recorded.profiler.kineto_results.experimental_event_tree()
    pending: list[tuple[Any, int | None]] = [(event, None) for event in roots]
    while pending:
        event, step = pending.pop()
        if event.name == marker:
            step = spans
            spans += 1
        fields = event.extra_fields
        if hasattr(fields, "alloc_size"):
            found.append((event.start_time_ns, fields.ptr, fields.alloc_size, step))
        pending.extend((child, step) for child in event.children)
    return [AllocationEvent(address, size, step) for _, address, size, step in sorted(found, key=lambda row: row[0])]


keep_checks()
