"""The Triton target: a CUDA device, or Triton's interpreter on the CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..._observer import Observer
from ...ir import Buffer, Contraction, ExternCall, LoopNest, Program
from ...kernel_ir.matmul_site import sum_of_products
from ...kernel_ir.nodes import KernelModule
from ...kernel_ir.panels import Panels
from ...launch_plan import CompiledProgram
from ...launch_plan.store import ObjectStore
from ...ops.dtypes import ATOMIC
from ...options import LowerOptions
from ...target import Capabilities, Choice, CompileCall, CompileProgram, Measure, ProductSplit, Race, SplitPolicy
from .attention import FEW_QUERIES, choose_attention, computes_attention
from .checks import check_device, products_lose_bits
from .choose import choose_form, shares_launches
from .convolutions import choose_convolution
from .map_loops import TileLimits
from .products import HOPPER
from .records import Gpu

__all__ = ["TRITON_INTERPRETER", "TritonTarget", "cuda_capabilities"]

_INTERPRETED = "triton-interpreter"

# One instance may walk a row of up to ``long_row`` elements several times. A large device runs eight instances on each
# of some 130 multiprocessors, and those that go down columns need as many to keep enough loads under way.
SPLITS = SplitPolicy(
    units=256,
    column_units=1024,
    least=1024,
    shortest=128,
    tail="mask",
    long_row=1 << 14,
    assume=4096,
    walked=16,
    longest_walked=TileLimits().row,
    product=ProductSplit(units=128),
    few_rows=False,
)


def cuda_capabilities(device: str) -> Capabilities:
    """What kernels on a CUDA device can do."""
    return Capabilities(
        device=device,
        arena=False,
        host_memory=False,
        unordered=True,
        sorts_rows=False,
        wide_statistics=False,
        careful_variance=False,
        channels_last=False,
        one_pass_rows=True,
        row_bytes=16,
        apart_biases=True,
        shares_launches=True,
        recomputes=1,
        atomics=ATOMIC,
        coalesces=True,
        contraction_forms=("dot", "rows", "attention", "implicit"),
        attention_rows=FEW_QUERIES,
        attention_bodies=True,
        float8_products=True,
        stores_odd_rows=_was_measured(device),
        knows_times=_was_measured(device),
    )


def _was_measured(device: str) -> bool:
    """Whether a device is of the kind that times of products and convolutions are known of: Hopper."""
    place = torch.device(device)
    if place.type != "cuda" or not torch.cuda.is_available():
        return False
    known = (place.index or 0) < torch.cuda.device_count()
    return known and torch.cuda.get_device_capability(device) == (HOPPER // 10, HOPPER % 10)


@dataclass(frozen=True, slots=True)
class TritonTarget:
    """``id``: ``"cuda:0"`` and so on, or ``"triton-interpreter"``."""

    id: str
    capabilities: Capabilities
    split_policy: SplitPolicy | None = SPLITS

    def choose(
        self, product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
    ) -> Choice:
        """Kernels where those are asked for everywhere or measured to be faster, now or once for all, and of few rows
        by a rule."""
        return choose_form(product, buffers, options, measure, self.capabilities)

    def choose_convolution(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], options: LowerOptions
    ) -> Choice:
        """Kernels where there can be some, see :mod:`.convolutions`."""
        return choose_convolution(parts, call, buffers, options, known=self.capabilities.knows_times)

    def choose_attention(self, nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions) -> Choice:
        """Kernels, where there is a form for the operands."""
        return choose_attention(nest, buffers, options)

    def choose_sort(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
        """ATen's call."""
        return Choice("aten", "sorting is left to ATen")

    def computes_attention(
        self, lengths: tuple[int | None, int | None], head: int, dtype: str, options: LowerOptions
    ) -> bool:
        """Whether there are kernels, which are faster than products and a softmax."""
        return computes_attention(lengths, head, dtype, options, tf32=products_lose_bits())

    def packs_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Panels | None:
        """None: tensors on a device are read as they lie."""
        return None

    def renders_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
        """Not asked: products are nests from the start."""
        return False

    def choose_library(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """ATen's own."""
        return Choice("aten", "matrix products are left to ATen")

    @property
    def interpreted(self) -> bool:
        """Whether kernels are interpreted, so not compiled."""
        return self.id == _INTERPRETED

    def measure(self, compiled: CompileCall) -> Measure | None:
        """ATen's call against ``tl.dot``, on the device."""
        if self.interpreted:
            return None
        from .tune import product_times

        check_device(self.capabilities.device)
        return product_times(self.capabilities.device, compiled)

    def race(self, compiled: CompileProgram, options: LowerOptions, store: ObjectStore | None) -> Race | None:
        """Products are measured by themselves, see :meth:`measure`."""
        return None

    def key(self, options: LowerOptions) -> str:
        """The architecture of the device, and options of kernels that the program does not show. Measured kernels are
        for one kind of device."""
        made = self.id
        if not self.interpreted:
            arch = check_device(self.id)
            made = f"tuned on {torch.cuda.get_device_name(self.id)}" if options.tune else f"sm_{arch}"
            if options.contractions == "generated":
                made += f" of {_processors(self.id)}"  # whose tiles are chosen
        shared = " shared" * shares_launches(options)
        return f"{made} asserts={options.index_asserts} tf32={products_lose_bits()} numerics={options.numerics}{shared}"

    def generate(
        self, program: Program, kernels: KernelModule, options: LowerOptions, observer: Observer | None = None
    ) -> CompiledProgram:
        """A cubin of each kernel, or what Triton's interpreter runs.

        Raises :class:`~.errors.TritonMissing` without Triton, and :class:`~.errors.TritonError` for a device or a type
        that kernels are not made for.
        """
        from .build import build

        device, tune = self.capabilities.device, options.tune and not self.interpreted
        return build(
            program,
            kernels,
            device,
            None if self.interpreted else self._gpu(kernels),
            tune=tune,
            tf32=products_lose_bits(),
            options=options,
            observer=observer,
        )

    def _gpu(self, kernels: KernelModule) -> Gpu:
        """What tiles of products are chosen for; of how many multiprocessors, if there are such tiles."""
        arch = check_device(self.id)
        return Gpu(arch, _processors(self.id)) if any(map(sum_of_products, kernels.kernels)) else Gpu(arch)


def _processors(device: str) -> int:
    """Multiprocessors of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


#: The kernels are those of a CUDA device. Tensors are on the CPU, and so are ATen's calls: statistics are as wide as
#: eager's there, and convolutions gain by the layout. Program instances run one after the other.
TRITON_INTERPRETER = TritonTarget(
    _INTERPRETED,
    replace(cuda_capabilities("cpu"), host_memory=True, unordered=False, wide_statistics=True, channels_last=True),
)
