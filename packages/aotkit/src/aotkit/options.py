"""Options of the whole stack: one frozen dataclass, passed as an argument everywhere."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from aotkit_inductor_lower.options import Processor

from .errors import UnknownOption

__all__ = ["MODES", "Options"]


@dataclass(frozen=True, slots=True)
class Options:
    """What a user may choose; every field is a key of ``torch.compile(..., options={...})``.

    ``numerics``: ``"eager"`` keeps eager's rounding points; ``"fast"`` may relax them: kernels on a CUDA device fuse
    products with sums, and quotients and square roots are within 2 ulp; on the CPU every sort is stable.
    ``rng``: ``"eager"`` draws the same bits as eager; ``"fast"`` only promises reproducibility under a seed: kernels
    make the numbers of ``dropout``, ``rand``, ``randn``, ``bernoulli``, ``randint`` and the like themselves.
    ``partitioner``: ``"min-cut"`` recomputes cheap values in the backward; ``"default"`` saves all of them;
    ``"min-peak"`` recomputes whatever lowers the peak of memory. ``memory_budget``: from 0.0 to 1.0, the bytes saved
    (``"min-cut"``) or the peak (``"min-peak"``) as a share of what ``"min-cut"`` takes without a budget.
    ``chunk_loss_bytes``: logits of a linear layer that take at least as many bytes (in float32) are computed in chunks
    of rows, with their cross-entropy loss and its gradient, so that they are never whole in memory. 0: never.
    ``fallback``: a graph that is not supported runs eagerly with one notice (``"eager"``) or raises (``"error"``).
    ``lowering``: ``"kernels"`` generates code; ``"none"`` runs the captured graphs with ATen (to bisect a bug).
    ``capture``: ``False`` returns Dynamo's graph unchanged.
    ``cudagraphs``: record graphs on a CUDA device and replay them with one launch, around what can't be recorded.
    ``cudagraph_outputs``: results of replays stay valid (``"survive"``: copied where they are kept; ``"copy"``: always
    copied) or are taken back by the next step (``"overwrite"``: reading them then raises).
    ``freezing``: where gradients are off, parameters and buffers become constants: norms and arithmetic go into the
    weights of convolutions, weights are laid out for oneDNN, or packed once as our products read them. A parameter that
    changes afterwards is an error; :func:`aotkit.discard_parameters` gives back the memory of those as they were.
    ``cache``: keep compiled graphs on disk between processes. ``cacheable``: custom operators, functions that
    Dynamo leaves in graphs, and tensor subclasses, whose graphs may be kept, as ``"namespace.name@version"``: change
    the version when the code changes.
    ``processor``: of graphs on the CPU: generate code for this one, or for every one that has its level of x86-64
    (``"x86-64-v3"`` is AVX2). ``"interpreter"`` makes no code of this processor's kernels but interprets them (very
    slow: to look for a fault); ``"triton-interpreter"`` runs the kernels that a CUDA device would get, in Triton's
    interpreter (slow: to look for a fault without a device).
    ``tune``: measure, once. On a CUDA device block sizes of kernels and which matrix products to generate; on the CPU
    which products, convolutions and attention to generate, for about two seconds a graph (a forward, a backward).
    What was measured is kept in the cache, for this processor and number of threads.
    ``contractions``: who computes products of matrices and convolutions. ``"auto"``: kernels of ours where they are
    faster, as measured with ``tune`` or known of the processor; ``"generated"``: these wherever there can be some;
    ``"aten"``: ATen alone.
    ``channels_last_training``: networks of float32 convolutions train with the channels of an image together, where few
    images need a copy for it: ``"auto"`` if depthwise or wide convolutions, which are faster so, are a good part of
    them, and on AMD's processors with 512-bit vectors, where all are; ``"always"``; or ``"never"``. It changes how
    sums are rounded.
    ``repeated_layers``: layers of a model that compute the same are compiled once and called for each of them: six or
    more (``"once"``), or sixteen or more (``"auto"``). ``"apart"``: they are parts of the whole graph, which takes
    longer to compile with each layer; steps are up to a few per cent faster. Graphs on the CPU only.
    ``index_asserts``: a generated kernel on a CUDA device stops at an index that is out of range, as eager's do. Off,
    such an index reads 0 and writes nothing, and the kernel is smaller. On the CPU it is always an error.
    ``compile_workers``: kernels for a CUDA device are compiled in so many processes beside this one, which end when
    they had nothing to do for five minutes. ``None``: as many as this process may use processors, up to 16. 0: in
    threads of this process, which mostly wait for each other.
    ``backward_ahead``: the backward is compiled while the forward runs for the first time, and not when it is asked
    for. ``None``: on a CUDA device, whose libraries are loaded meanwhile.
    ``redzones``: watch the memory of every call of generated code (slow): a write beside a buffer raises
    ``aotkit_inductor_lower.RedzoneError``, and what is read before it was written is NaN.
    ``separate_kernels``: on the CPU, each kernel is a native call of its own, so that a trace of ``torch.profiler`` has
    a range for each (:func:`aotkit.profile` does this); a little slower.
    ``overlap_memory``: steps of a graph change their order so that some run while collectives do, as far as the peak of
    memory grows by no more than this share; ``None``: collectives run where the program has them.
    ``link_latency`` (seconds) and ``link_bandwidth`` (bytes per second): what a collective takes, by which they are
    overlapped, and those of one block of a model joined; :func:`.link.measure_link` gives both, equal on all ranks.
    ``regather``: parameters that a graph gathers from all ranks are gathered again in its backward, and not kept,
    but for ``regather_budget`` bytes of them: those whose gathers take the longest for their size.
    ``compare_ranks``: at the first compile of a graph with collectives, ranks of an initialized process group compare
    the collectives of forward and backward (``"collectives"``) or also the whole graph (``"graphs"``); what differs is
    :class:`.RanksDisagree`, a :class:`.CompileError`, on every rank. ``"off"``: they don't. ``rank_timeout``: seconds
    that a rank waits for the others, when it compares and when another one compiles for it.
    ``share_compiles``: one rank of an initialized process group compiles a graph, backward included, the others wait
    and load what it wrote to the group's store. Ranks on several machines need the same ``AOTKIT_CACHE_KEY``.
    ``verify``: check the IR between passes; serialize, reload and then use the result of every stage.
    ``fuel``: how many optional rewrites may run (``None``: all). ``disable``: names of passes to leave out.
    """

    numerics: Literal["eager", "fast"] = "eager"
    rng: Literal["fast", "eager"] = "eager"
    partitioner: Literal["min-cut", "default", "min-peak"] = "min-cut"
    memory_budget: float | None = None
    chunk_loss_bytes: int = 1 << 28
    fallback: Literal["eager", "error"] = "eager"
    lowering: Literal["kernels", "none"] = "kernels"
    capture: bool = True
    cudagraphs: bool = False
    cudagraph_outputs: Literal["survive", "copy", "overwrite"] = "survive"
    freezing: bool = False
    cache: bool = True
    tune: bool = False
    contractions: Literal["auto", "generated", "aten"] = "auto"
    channels_last_training: Literal["auto", "always", "never"] = "auto"
    repeated_layers: Literal["auto", "once", "apart"] = "auto"
    index_asserts: bool = True
    compile_workers: int | None = None
    backward_ahead: bool | None = None
    redzones: bool = False
    separate_kernels: bool = False
    overlap_memory: float | None = 0.1
    link_latency: float = 20e-6
    link_bandwidth: float = 4e9
    regather: bool = False
    regather_budget: int = 0
    compare_ranks: Literal["collectives", "graphs", "off"] = "collectives"
    rank_timeout: int = 600
    share_compiles: bool = False
    verify: bool = False
    fuel: int | None = None
    disable: frozenset[str] = frozenset()
    cacheable: frozenset[str] = frozenset()
    processor: Processor = "host"

    def __post_init__(self) -> None:
        for name, hint in _hints().items():
            value = getattr(self, name)
            if not _fits(value, hint):
                raise UnknownOption(f"option {name!r} takes {_type_name(hint)}, not {value!r}")
        if self.chunk_loss_bytes < 0:
            raise UnknownOption(f"option 'chunk_loss_bytes' takes a number of bytes, not {self.chunk_loss_bytes!r}")
        if self.compile_workers is not None and self.compile_workers < 0:
            raise UnknownOption(f"option 'compile_workers' takes a number of processes, not {self.compile_workers!r}")
        if self.regather_budget < 0:
            raise UnknownOption(f"option 'regather_budget' takes a number of bytes, not {self.regather_budget!r}")
        if self.overlap_memory is not None and not self.overlap_memory >= 0.0:
            raise UnknownOption(f"option 'overlap_memory' takes a share from 0.0 on, not {self.overlap_memory!r}")
        for name in ("link_latency", "link_bandwidth"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise UnknownOption(f"option {name!r} takes a number above 0.0, not {getattr(self, name)!r}")
        if self.rank_timeout < 1:
            raise UnknownOption(f"option 'rank_timeout' takes a number of seconds, not {self.rank_timeout!r}")
        if self.memory_budget is not None and not 0.0 <= self.memory_budget <= 1.0:
            raise UnknownOption(f"option 'memory_budget' takes a share from 0.0 to 1.0, not {self.memory_budget!r}")

    def patch(self, **changes: Any) -> Options:
        """A copy with some fields changed. Raises :class:`UnknownOption` on an unknown field or a wrong value."""
        known = [f.name for f in fields(self)]
        for name in changes:
            if name not in known:
                close = difflib.get_close_matches(name, known, 2)
                hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
                raise UnknownOption(f"there is no option {name!r}{hint} Known options: {', '.join(known)}")
        for name in ("disable", "cacheable"):
            if isinstance(changes.get(name), (list, tuple, set)):
                changes[name] = frozenset(changes[name])
        return replace(self, **changes)


MODES: Mapping[str, Mapping[str, Any]] = {
    "default": {},
    "reduce-overhead": {"cudagraphs": True},
    "max-autotune": {"tune": True, "cudagraphs": True},
    "max-autotune-no-cudagraphs": {"tune": True},
    "aot-eager": {"lowering": "none"},
    "eager": {"capture": False},
    "verify": {"verify": True, "rng": "eager", "fallback": "error"},
}
"""Named presets for ``torch.compile(mode=...)``."""


def resolve(mode: str | None, options: Mapping[str, Any] | None, base: Options) -> Options:
    """Options from ``torch.compile``'s ``mode`` and ``options`` on top of ``base``; options win over the mode.

    ``torch.compile`` takes one of the two, so a mode may also be among the options, under ``"mode"``.
    """
    chosen = dict(options or {})
    mode = chosen.pop("mode", None) or mode
    if mode is not None and mode not in MODES:
        raise UnknownOption(f"there is no mode {mode!r}; known modes: {', '.join(MODES)}")
    return base.patch(**MODES[mode or "default"]).patch(**chosen)


@cache
def _hints() -> Mapping[str, Any]:
    """The type of each option: read of the source once, since a compile makes several sets of options."""
    return MappingProxyType(get_type_hints(Options))


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return value in get_args(hint)
    if origin is frozenset:
        return isinstance(value, frozenset) and all(isinstance(v, str) for v in value)
    if origin is not None:
        return any(_fits(value, arg) for arg in get_args(hint))
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _type_name(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(get_args(hint))
    return getattr(hint, "__name__", str(hint)) if get_origin(hint) is None else str(hint)
