"""The CPU target: a processor as LLVM knows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..._observer import Observer
from ...ir import Buffer, BufferRef, Contraction, ExternCall, LoopNest, Program
from ...kernel_ir.nodes import KernelModule
from ...kernel_ir.panels import Panels
from ...launch_plan import CompiledProgram
from ...launch_plan.store import ObjectStore
from ...options import LowerOptions
from ...passes import stage
from ...target import (
    HOST,
    HOST_SPLITS,
    Capabilities,
    Choice,
    CompileCall,
    CompileProgram,
    Measure,
    Race,
    SplitPolicy,
    choose_on_host,
)
from .choose_few_rows import AMD, FEW_ROWS, SHORT_AMD
from .machine import Machine, host_machine, processor_machine
from .tile_forms import FORMS

__all__ = ["CpuTarget", "cpu_target", "target_of"]

PATCHES = "float32", "bfloat16"  # see Note [Which patches are products]
SLOW_ROWS = 24  # of bfloat16 times packed weights, from which ATen's products of floats take less time without AVX-512


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """``machine``: what kernels are generated for. ``processor``: LLVM's name of the one that ATen's calls run on."""

    machine: Machine
    processor: str
    capabilities: Capabilities = HOST
    split_policy: SplitPolicy | None = HOST_SPLITS

    @property
    def id(self) -> str:
        """The processor that kernels are generated for."""
        return f"cpu:{self.machine.cpu}"

    def choose(
        self, product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
    ) -> Choice:
        """``"fma"``, panels and tiles of vectors, or a form of tile registers, where that is faster or asked for."""
        from .choose import choose_form

        return choose_form(product, buffers, options, self.machine, self.processor)

    def choose_convolution(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], options: LowerOptions
    ) -> Choice:
        """``"nest"``, loops of vectors, or ``"fma"``, where that is faster or asked for."""
        from .choose_convolutions import choose_convolution

        return choose_convolution(parts, call, buffers, options, self.machine, self.processor)

    def choose_attention(self, nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions) -> Choice:
        """``"amx-attention"`` or ``"fma-attention"``, tile registers or vectors, where they take less time."""
        from .choose_attention import choose_attention

        return choose_attention(nest, buffers, options, self.machine, self.processor)

    def choose_sort(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
        """``"digits"``, where that is faster."""
        from .choose_sorts import choose_sort

        return choose_sort(nest, buffers)

    def computes_attention(
        self, lengths: tuple[int | None, int | None], head: int, dtype: str, options: LowerOptions
    ) -> bool:
        """Where tile registers or vectors take less time than ATen's kernels."""
        from .choose_attention import computes_attention

        return computes_attention(lengths, head, dtype, options, self.machine, self.processor)

    def renders_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
        """Whether its kernel is one for :class:`~.render.product.ProductEmitter`."""
        from .products import product_of

        return product_of(nest, buffers, self.machine) is not None

    def packs_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Panels | None:
        """Of products in tiles of vectors."""
        from .products import packed_form

        return packed_form(nest, buffers, self.machine)

    def choose_library(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """What is faster on the processor that ATen's calls run on."""
        first = next((arg.name for arg in product.args if isinstance(arg, BufferRef)), None)
        if first is None or buffers[first].dtype != "bfloat16":
            return choose_on_host(self.processor)
        if self.machine.has("avx512bw") and torch.backends.mkldnn.is_available():
            return Choice("onednn", "oneDNN's linear layer adds the bias itself, where ATen's product copies it first")
        return Choice("aten", "matrix products are left to ATen")

    def measure(self, compiled: CompileCall) -> Measure | None:
        """Nothing: products are measured with what is around them, see :meth:`race`."""
        return None

    def race(self, compiled: CompileProgram, options: LowerOptions, store: ObjectStore | None) -> Race | None:
        """ATen's calls against kernels, on this processor, see Note [Measuring on the CPU]."""
        if options.contractions != "auto" or not self.capabilities.contraction_forms:
            return None
        from .measured import MeasuredRace

        key = f"{self.id} {self.key(options)} {self.processor} threads={torch.get_num_threads()}"
        return MeasuredRace(self.machine, self.processor, key, options, compiled, store)

    def key(self, options: LowerOptions) -> str:
        """The machine, and which instructions ATen uses, which tells how it packs weights."""
        return f"{self.machine} {torch.backends.cpu.get_cpu_capability()}"

    def generate(
        self, program: Program, kernels: KernelModule, options: LowerOptions, observer: Observer | None = None
    ) -> CompiledProgram:
        """One object file from LLVM text."""
        from .generate import generate

        kept = observer is not None
        compiled = generate(
            program,
            self.machine,
            kernels,
            keep_text=kept,
            around_llvm=stage(observer, "llvm"),
            separate=options.separate_kernels,
            arena_bytes=options.arena_bytes,
        )
        if observer is not None:
            observer.dump(f"{program.name}.ll", "kernels", lambda: compiled.text)
        return compiled


def cpu_target(processor: str = "host") -> CpuTarget:
    """The target of a processor by the name that :attr:`.LowerOptions.processor` gives it.

    Raises :class:`~.errors.CodegenError` for a level of x86-64 that this one lacks.
    """
    return target_of(processor_machine(processor), host_machine().cpu)


def _float_packed(machine: Machine, processor: str) -> tuple[tuple[str, int], ...]:
    """:attr:`~...target.Capabilities.float_packed`, see Note [Packed weights as floats]."""
    if not machine.triple.startswith("x86_64"):
        return ()
    no_vectors = (("float32", FEW_ROWS + 1), ("float16", FEW_ROWS + 1))
    return (*no_vectors, ("bfloat16", SLOW_ROWS)) if processor in SHORT_AMD else no_vectors


def target_of(machine: Machine, processor: str) -> CpuTarget:
    """The target of any machine, also of one that this process can't run. ``processor`` as of :class:`CpuTarget`."""
    tiles = tuple(form.name for form in FORMS.values()) if machine.has("amx-bf16") else ()
    forms = ("fma", *tiles) if machine.has("fma") else ()
    capabilities = replace(
        HOST,
        narrow_convolutions=machine.has("avx512bf16") or machine.has("amx-bf16"),
        wide_convolutions=processor in AMD and machine.vector_bits == 512,
        contraction_forms=forms,
        tiles_products=bool(forms),
        float_bytes=FEW_ROWS + 1 if processor in SHORT_AMD else 0,  # which have no instructions for bytes
        float_packed=() if tiles else _float_packed(machine, processor),
        patches=PATCHES if processor in SHORT_AMD and machine.vector_bits == 256 else (),
    )
    return CpuTarget(machine, processor, capabilities)
