"""The interpreter target: the processor that the CPU target takes, but no machine code for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..._observer import Observer
from ...ir import Buffer, Contraction, ExternCall, LoopNest, Program
from ...kernel_ir.nodes import KernelModule
from ...kernel_ir.panels import Panels
from ...launch_plan import CompiledProgram
from ...launch_plan.store import ObjectStore
from ...native import host_processor
from ...options import LowerOptions
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

__all__ = ["INTERPRETER", "InterpreterTarget"]


@dataclass(frozen=True, slots=True)
class InterpreterTarget:
    """Answers passes as the CPU target does for this processor, so that both get the same kernels."""

    id: str = "interpreter"
    capabilities: Capabilities = HOST
    split_policy: SplitPolicy | None = HOST_SPLITS

    def choose(
        self, product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
    ) -> Choice:
        """ATen's call: there are no forms."""
        return Choice("aten", "matrix products are left to ATen")

    def choose_convolution(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], options: LowerOptions
    ) -> Choice:
        """ATen's call."""
        return Choice("aten", "convolutions are left to ATen")

    def choose_attention(self, nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions) -> Choice:
        """ATen's call."""
        return Choice("aten", "attention is left to ATen")

    def choose_sort(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
        """ATen's call."""
        return Choice("aten", "sorting is left to ATen")

    def computes_attention(
        self, lengths: tuple[int | None, int | None], head: int, dtype: str, options: LowerOptions
    ) -> bool:
        """There are no kernels for it."""
        return False

    def packs_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Panels | None:
        """None: products are nests from the start."""
        return None

    def renders_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
        """Not asked: products are nests from the start."""
        return False

    def choose_library(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """What is faster on this processor, on which ATen's calls run."""
        _triple, processor, _features = host_processor()
        return choose_on_host(processor)

    def measure(self, compiled: CompileCall) -> Measure | None:
        """Nothing is measured."""
        return None

    def race(self, compiled: CompileProgram, options: LowerOptions, store: ObjectStore | None) -> Race | None:
        """Nothing is measured."""
        return None

    def key(self, options: LowerOptions) -> str:
        """The same for all options: what is kept is what the program says."""
        return self.id

    def generate(
        self, program: Program, kernels: KernelModule, options: LowerOptions, observer: Observer | None = None
    ) -> CompiledProgram:
        """The text of the kernels.

        Raises :class:`~.errors.CodegenError` for a nest over buffers that are not on the CPU.
        """
        from .generate import generate

        compiled = generate(program, kernels, keep_text=observer is not None)
        if observer is not None:
            observer.dump(f"{program.name}.ir", "kernels", lambda: compiled.text)
        return compiled


INTERPRETER = InterpreterTarget()
