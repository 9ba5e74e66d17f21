"""Everything that can be chosen about lowering, in one frozen record."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["INTERPRETERS", "Interpreter", "LowerOptions", "Processor"]

#: What runs kernels on the CPU without making machine code of them.
Interpreter = Literal["interpreter", "triton-interpreter"]
Processor = Literal["host", "x86-64", "x86-64-v2", "x86-64-v3", "x86-64-v4", "x86-64-amx", Interpreter]
INTERPRETERS: tuple[str, ...] = get_args(Interpreter)


@dataclass(frozen=True, slots=True)
class LowerOptions:
    """How a graph is compiled. All fields change the output, so all of them belong in a cache key; but for
    two. ``check_inputs``: a call looks at types, sizes and strides of its arguments. Off, the caller vouches for them.
    ``compile_workers``: kernels for a CUDA device are compiled in so many processes beside this one, which end when
    they had nothing to do for five minutes. ``None``: as many as this process may use processors, up to 16. 0: in
    threads of this process, which mostly wait for each other.

    ``numerics``: ``"eager"`` rounds where eager rounds; ``"fast"`` permits fewer rounding points: kernels on a
    CUDA device round a product and the sum that it goes into once, and quotients and square roots not to nearest; and
    on the CPU each sort is stable, whose order torch leaves open.
    ``rng``: ``"eager"`` leaves random ops ATen calls in program order; with ``"fast"`` kernels make most random
    numbers, from seeds that one call per graph draws.
    ``redzones``: watch the memory of every call (slow): a write beside a buffer raises, and what is read before it was
    written is NaN. ``verify``: check the IR after each stage. ``disable``: names of passes to leave out.
    ``fuel``: make only that many optional rewrites, counted over all passes, and no others (for bisecting a wrong
    result); ``None`` is no limit. ``max_fusion_nodes`` and ``max_fusion_instructions`` bound one kernel.
    ``max_recompute`` bounds how many instructions a value may cost to be computed again in each of several readers.
    ``tune``: on a CUDA device, measure block sizes of kernels and which matrix products to generate; what was chosen is
    kept with the compiled program. On the CPU, measure which products, convolutions and attention to generate, each
    with what is computed before and after it, for about two seconds a graph; times are kept in the store of compiled
    programs. ``contractions``: ``"generated"`` makes all products of matrices kernels that the
    target has a form for, and on the CPU all convolutions, ``"aten"`` none, ``"auto"`` those that are faster: as
    measured, with ``tune``, or by what is known of the processor.
    ``index_asserts``: a generated kernel on a CUDA device stops at an index that is out of range, as eager's do; the
    device can't be used afterwards. Off, such an index reads 0 and writes nothing, and the kernel is smaller; nothing
    outside of a tensor is touched either way. On the CPU such an index is always an error.
    ``separate_kernels``: on the CPU, each kernel is a native call of its own, which a profiler can time; slower where
    there are many small ones.
    ``overlap_memory``: so that other steps run while collectives do, steps may change their order, and the peak of
    memory may grow by this share; 0.0: not at all; ``None``: collectives run where the graph has them.
    ``arena_bytes``: on the CPU, temporaries of more bytes than these are tensors of torch's, given back behind their
    last reader, and not in the arena, which stays: for the halves of a training step. ``None``: of any size.
    ``link_latency`` and ``link_bandwidth``: a collective takes so many seconds and its bytes by so many a second; from
    this follow the order of steps beside collectives and how many of them become one.
    ``pack_constants``: matrices among the graph's constants never change, and are laid out once as products read them.
    ``processor``: of graphs on the CPU: generate for this one, or for any that has its x86-64 level (``"x86-64-v3"`` is
    AVX2, ``"x86-64-amx"`` AVX-512 with AMX). ``"interpreter"`` makes no code: this processor's kernels run in the
    interpreter of their IR (very slow: to tell a fault of a pass from one of code generation). ``"triton-interpreter"``
    generates the kernels that a CUDA device would get and runs them on the CPU in Triton's interpreter (slow: to look
    at kernels without a device).
    """

    numerics: Literal["eager", "fast"] = "eager"
    rng: Literal["fast", "eager"] = "eager"
    verify: bool = False
    redzones: bool = False
    disable: tuple[str, ...] = ()
    fuel: int | None = None
    fuse: bool = True
    max_fusion_nodes: int = 64
    max_fusion_instructions: int = 600
    max_recompute: int = 6
    tune: bool = False
    contractions: Literal["auto", "generated", "aten"] = "auto"
    index_asserts: bool = True
    check_inputs: bool = True
    compile_workers: int | None = None
    separate_kernels: bool = False
    overlap_memory: float | None = 0.1
    arena_bytes: int | None = None
    pack_constants: bool = False
    link_latency: float = 20e-6
    link_bandwidth: float = 4e9
    processor: Processor = "host"
