"""How long an op takes (F3.40): by its arithmetic, by arithmetic and memory traffic, or measured.

Only ratios matter to the solvers, so the rates of the first two are those of no particular machine.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch
import torch.fx
from torch.utils.flop_counter import flop_registry

from ._torch_compat import symbolic_hint, without_modes
from .cost import is_literal, is_view_like
from .errors import InvalidOptionError
from .joint import JointGraph, value_bytes

__all__ = ["FlopsEstimator", "MeasuredEstimator", "RooflineEstimator", "RuntimeEstimator", "graph_flops"]

FLOPS_PER_SECOND = 1e12
BYTES_PER_SECOND = 1e11


class RuntimeEstimator(Protocol):
    """Gives the seconds that a node takes. ``name`` goes into cache keys, so let it tell versions apart."""

    name: str

    def seconds(self, node: torch.fx.Node) -> float:
        """Seconds to run ``node``, which calls an operator on the values described in the nodes' metadata."""


class FlopsEstimator:
    """Arithmetic alone; an op without a formula counts one operation per element of its result."""

    name = "flops"

    def seconds(self, node: torch.fx.Node) -> float:
        """Floating-point operations over a nominal rate."""
        return max(node_flops(node), _elements(node.meta.get("val"))) / FLOPS_PER_SECOND


class RooflineEstimator:
    """The larger of arithmetic and memory traffic, each at a nominal rate."""

    name = "roofline"

    def seconds(self, node: torch.fx.Node) -> float:
        """Seconds at whichever rate limits the op."""
        traffic = sum(value_bytes(other.meta.get("val")) for other in (node, *node.all_input_nodes))
        return max(node_flops(node) / FLOPS_PER_SECOND, traffic / BYTES_PER_SECOND)


class MeasuredEstimator:
    """Runs every distinct op once to warm up and ``repeats`` times for the median, on made-up inputs.

    Random values go in for floating point, zeros for integers (valid as indices). An op that can't run like this is
    estimated by the roofline. Results are kept for the life of the object.
    """

    name = "measured"

    def __init__(self, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self._repeats = repeats
        self._clock = clock
        self._known: dict[Hashable, float] = {}
        self._lock = threading.Lock()
        self.runs = 0

    def seconds(self, node: torch.fx.Node) -> float:
        """The median of the measured times."""
        key = _signature(node)
        with self._lock:
            if key not in self._known:
                self._known[key] = self._measure(node)
            return self._known[key]

    def _measure(self, node: torch.fx.Node) -> float:
        try:
            with without_modes(), torch.no_grad():
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: _real(used.meta.get("val")))
                call: Any = node.target
                times = []
                for _ in range(self._repeats + 1):
                    begun = self._clock()
                    call(*args, **kwargs)
                    times.append(self._clock() - begun)
                    self.runs += 1
        except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            return RooflineEstimator().seconds(node)
        return sorted(times[1:])[self._repeats // 2]


def estimator_named(name: str) -> RuntimeEstimator:
    """The estimator of an option's value.

    Raises:
        InvalidOptionError: no such estimator.
    """
    known: dict[str, Callable[[], RuntimeEstimator]] = {
        "flops": FlopsEstimator,
        "roofline": RooflineEstimator,
        "measured": MeasuredEstimator,
    }
    if name not in known:
        raise InvalidOptionError(f"runtime is {name!r}; known estimators are {', '.join(known)}.")
    return known[name]()


def estimate_seconds(joint: JointGraph, index: int, estimator: RuntimeEstimator) -> float:
    """Seconds to compute one node; 0 for views, sizes, tuple items and constants. Asked once per node."""
    known = joint.seconds.get(index)
    if known is None:
        facts, node = joint.facts[index], joint.nodes[index]
        free = is_view_like(joint, index) or facts.is_getitem or facts.is_symbolic or is_literal(joint, index)
        known = 0.0 if free or node.op != "call_function" else float(estimator.seconds(node))
        joint.seconds[index] = known
    return known


def node_flops(node: torch.fx.Node) -> float:
    """Floating-point operations of a node by torch's formulas; 0 where there is none."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0.0
    args, kwargs, out = torch.fx.node.map_arg(
        (node.args, node.kwargs, node), lambda used: _example(used.meta.get("val"))
    )
    return float(formula(*args, **kwargs, out_val=out))


def graph_flops(module: torch.fx.GraphModule) -> float:
    """Floating-point operations of a whole graph by torch's formulas."""
    return sum(node_flops(node) for node in module.graph.nodes if node.op == "call_function")


def _elements(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return value_bytes(value) / value.element_size()
    return sum(map(_elements, value)) if isinstance(value, (tuple, list)) else 0.0


def _sizes(value: torch.Tensor) -> list[int]:
    return [4096 if hint is None else int(hint) for hint in map(symbolic_hint, value.size())]


def _example(value: Any) -> Any:
    """A stand-in of fixed size, so that counting never guards on a symbol."""
    if isinstance(value, torch.Tensor):
        return torch.empty(_sizes(value), dtype=value.dtype, device="meta")
    if isinstance(value, (tuple, list)):
        return type(value)(_example(item) for item in value)
    return symbolic_hint(value) if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value


def _real(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        sizes = _sizes(value)
        strides = [4096 if hint is None else int(hint) for hint in map(symbolic_hint, value.stride())]
        made = torch.empty_strided(sizes, strides, dtype=value.dtype, device=value.device)
        return made.uniform_() if value.dtype.is_floating_point else made.zero_()
    return type(value)(map(_real, value)) if isinstance(value, (tuple, list)) else _example(value)


def _signature(node: torch.fx.Node) -> Hashable:
    """Equal for nodes that run the same op on values of the same description."""
    described = torch.fx.node.map_arg((node.args, node.kwargs), lambda used: _Described(_text(used.meta.get("val"))))
    return (str(node.target), repr(described))


class _Described(str):
    """Prints as it is, so that a node's name leaves no trace."""

    __slots__ = ()


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = [symbolic_hint(stride) for stride in value.stride()]
        return f"{value.dtype}{_sizes(value)}{strides}{value.device}"
    return f"[{', '.join(map(_text, value))}]" if isinstance(value, (tuple, list)) else repr(_example(value))
