"""What a machine can do, in the words of whoever asks: passes and lowering ask a capability, never a device.

Note [One device test]
    Kernels take tensors of one device, :attr:`Capabilities.device`; ``owns`` tells whether a tensor is there. What
    eager computes on the CPU, some rules compute bit by bit as its kernels do: :func:`on_host` tells that of a tensor,
    also where there is no target yet, as while a graph is traced. Nothing else looks at a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, Protocol

import torch

from ._observer import Observer
from .errors import CodegenError
from .ir import Buffer, Contraction, ExternCall, LoopNest, Precision, Program
from .kernel_ir.nodes import KernelModule
from .kernel_ir.panels import Panels
from .launch_plan import CompiledProgram
from .launch_plan.store import ObjectStore
from .ops.dtypes import DType
from .options import LowerOptions

__all__ = ["HOST", "HOST_SPLITS", "NO_MACHINE", "Capabilities", "Choice", "CompileCall", "CompileProgram", "Measure"]
__all__ += ["NoMachine", "ProductSplit", "Race", "SplitPolicy", "Target", "Times", "choose_on_host", "on_host"]

#: Seconds of ATen's call of a product, and of the kernels generated for it.
Measure = Callable[[ExternCall, Mapping[str, Buffer]], tuple[float, float]]
#: Makes a program callable, in the boxed convention, with the tensors of its constants: a fragment of a graph, which is
#: where the pass of this name leaves it.
CompileProgram = Callable[[Program, Mapping[str, torch.Tensor], str], Callable[[list[Any]], list[Any]]]
#: Compiles the call of an operator on tensors, with kernels where there can be some; gives a boxed callable.
CompileCall = Callable[[Callable[..., Any], list[torch.Tensor]], Callable[[list[Any]], list[Any]]]


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What kernels of a target can do, and what pays there.

    ``device``: as torch prints it; kernels take tensors there. ``arena``: the plan places temporaries; else torch's
    allocator does. ``host_memory``: Python reads a number that a kernel wrote without waiting for it. ``unordered``:
    threads meet in no order, so stores that combine must be among the ``atomics``. ``sorts_rows``: kernels sort.
    ``wide_statistics``: batch norms sum as wide as eager's kernels on the CPU. ``careful_variance``: so do variances
    and the other norms. ``channels_last``: convolutions are faster with the channels of an image together.
    ``one_pass_rows``: rows that are not held are read once for a sum and the squares around its mean, or a maximum and
    the sum below it.
    ``narrow_convolutions``: the processor multiplies bfloat16, so that the layouts around ATen's convolutions of it
    count. ``wide_convolutions``: so do those around ATen's convolutions of float32, which are as fast in either.
    ``row_bytes``: ATen's products of bfloat16 and float16 are fast if rows begin at multiples of so many bytes;
    0: anywhere. ``apart_biases``: ATen adds the bias of a convolution in a kernel of its own. ``shares_launches``: a
    launch costs as much as a small kernel, and may compute several. ``recomputes``: so many dear operations an element
    take less time than its result takes to be stored and loaded. ``contraction_forms``: what products of matrices
    become besides ATen's call. ``tiles_products``: they are written in tiles, as long as nothing else is summed beside
    them. ``float8_products``: 8-bit floats are multiplied as they are. ``stores_odd_rows``: products are faster than
    ATen's call, with padding and a copy, where rows of a large result begin at no multiple of ``row_bytes``.
    ``knows_times``: what was measured of convolutions holds for this machine.
    ``coalesces``: neighbouring threads run at once, and should access neighbouring elements. ``attention_rows``: so
    many queries, at most, of which kernels cut the keys in parts, which ATen's attention doesn't; 0: none.
    ``attention_bodies``: kernels of attention hide keys that are too far back by where they are, cap scores,
    and compute masks that follow from positions. ``float_bytes``: so many rows of bytes, or more, take less time as
    products of floats than ATen takes for them; 0: none. ``float_packed``: so do so many rows of a type times weights
    of 4 or 8 bits, as ATen packs them. ``patches``: types of images of which convolutions whose places share no pixels
    take less time as products of matrices.
    """

    device: str
    arena: bool
    host_memory: bool
    unordered: bool
    sorts_rows: bool
    wide_statistics: bool
    careful_variance: bool
    channels_last: bool
    one_pass_rows: bool
    narrow_convolutions: bool = False
    wide_convolutions: bool = False
    row_bytes: int = 0
    apart_biases: bool = False
    shares_launches: bool = False
    recomputes: int = 0
    atomics: frozenset[tuple[DType, str]] = frozenset()
    contraction_forms: tuple[str, ...] = ()
    tiles_products: bool = False
    float8_products: bool = False
    stores_odd_rows: bool = False
    knows_times: bool = False
    coalesces: bool = False
    attention_rows: int = 0
    attention_bodies: bool = False
    float_bytes: int = 0
    float_packed: tuple[tuple[str, int], ...] = ()
    patches: tuple[str, ...] = ()

    def owns(self, device: torch.device) -> bool:
        """Whether kernels take tensors on this device."""
        return device == _device(self.device)


@lru_cache(maxsize=64)
def _device(name: str) -> torch.device:
    return torch.device(name)


def on_host(tensor: torch.Tensor) -> bool:
    """Whether eager computes with the tensor on the CPU."""
    return tensor.device.type == "cpu"


@dataclass(frozen=True, slots=True)
class ProductSplit:
    """When sums of matrix products are cut, see Note [Parts of a product's sum]: as long as there are fewer tiles,
    ``side`` by ``side``, than ``units``. A part is a multiple of ``step`` long, and no shorter than ``shortest``."""

    units: int
    side: int = 128
    step: int = 64
    shortest: int = 1024


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How reductions of few results, which would keep a machine idle, are shared out; see Note [Chunks of a reduction].

    ``units``: so many units of work keep the machine busy, and ``column_units`` if each goes down several columns, of
    which it reads little at once. ``least``: reductions of fewer elements stay whole.
    ``shortest``: the least that one unit reduces. ``columns``: results that one unit computes where they lie side by
    side. ``chunk``: elements of a chunk, so that results depend on the nest alone; ``None``: as many chunks as there
    are units. ``tail``: what is left over is a kernel of its own, or the last chunk is masked. ``long_row``: elements
    of a row from which each pass over it is a kernel of its own. ``assume``: what an unknown number of results counts
    as; ``None``: such a nest has enough. ``interleaves``: rows of few columns are taken several at once, which fills
    vectors. ``walked``: rows that one unit walks over where it sums their columns beside, in registers, which hold
    ``longest_walked`` elements of a row; 0: the sums lie in memory, and chunks are long. ``product``: products of
    matrices are cut so; ``None``: as any sum. ``few_rows``: so are those of few rows, which is one more kernel.
    """

    units: int
    least: int
    column_units: int = 0
    shortest: int = 1
    columns: int = 64
    chunk: int | None = None
    tail: Literal["kernel", "mask"] = "kernel"
    long_row: int = 1 << 18
    assume: int | None = None
    interleaves: bool = False
    walked: int = 0
    longest_walked: int = 0
    product: ProductSplit | None = None
    few_rows: bool = True


@dataclass(frozen=True, slots=True)
class Choice:
    """Who computes a product: ``form`` is ``"aten"`` for the call as it stands, another library's name, or one of the
    target's ``contraction_forms``; ``reason`` says why, with the ``seconds`` that were measured. ``precision``: what a
    form of the target makes of factors of float32, see :class:`~.ir.Contraction`. ``unmeasured``: this is so where
    nothing is measured, too; else a form that has to be measured is ATen's there."""

    form: str
    reason: str
    seconds: float | None = None
    precision: Precision = "highest"
    unmeasured: bool = False


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of ATen's call and of the kernels generated for it, with what is around it; ``None`` where that was not
    measured, for this reason: ``why``. ``failed``: the kernels can't be made, or run. ``lasting``: it would be the same
    another time."""

    library: float | None = None
    generated: float | None = None
    why: str = ""
    failed: bool = False
    lasting: bool = False


class Race(Protocol):
    """Measures choices of one graph, see Note [Measured choices] in :mod:`.loop_passes.race`."""

    def product_form(self, contraction: Contraction, buffers: Mapping[str, Buffer]) -> Choice | None:
        """The form that competes with ATen's call of a product; ``None`` where none does."""

    def convolution_form(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer]
    ) -> Choice | None:
        """The form for one result of a convolution or of its backward."""

    def attention_form(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice | None:
        """The form for an attention."""

    def compare(self, library: Program, generated: Program, behind: str) -> Times:
        """How long two programs take that compute the same, where the pass of this name leaves them."""


class Target(Protocol):
    """A machine that kernels are generated for. ``id`` names it and is part of digests."""

    @property
    def id(self) -> str:
        """Such as ``"cpu:znver4"``, ``"cuda:0"``, ``"interpreter"``."""

    @property
    def capabilities(self) -> Capabilities:
        """What passes may ask."""

    @property
    def split_policy(self) -> SplitPolicy | None:
        """How reductions are shared out; ``None`` leaves them whole."""

    def choose(
        self, product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
    ) -> Choice:
        """Who computes a product of matrices: one of the ``contraction_forms``, or ATen's call in it. Asked where there
        are forms, and the options don't say that all is ATen's."""

    def choose_convolution(
        self, parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], options: LowerOptions
    ) -> Choice:
        """Who computes one result of a convolution or of its backward, ATen's ``call``, or these ``parts`` of it: one
        of the ``contraction_forms`` for all, or ``"nest"``, plain loops. Asked where :meth:`choose` is."""

    def choose_attention(self, nest: LoopNest, buffers: Mapping[str, Buffer], options: LowerOptions) -> Choice:
        """Who computes an attention: kernels for its nest, or ATen's call. Asked where :meth:`choose` is."""

    def choose_sort(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Choice:
        """Who computes a stable sort of rows: a kernel for its nest, or ATen's call."""

    def computes_attention(
        self, lengths: tuple[int | None, int | None], head: int, dtype: str, options: LowerOptions
    ) -> bool:
        """Whether kernels compute attention with so many queries and keys (``None`` where that is not known), and
        numbers of a head, in every form of Note [Attention as an operator], and in less time than ATen's fused call, or
        than products and a softmax."""

    def renders_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
        """Whether the nest is a product of matrices, with what is computed of it, that the target writes in tiles.
        Asked where it ``tiles_products``."""

    def packs_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Panels | None:
        """The layout in which the kernel of a product reads its right factor if that is packed before, or already is;
        ``None`` for any other nest. See Note [Matrices in panels]."""

    def choose_library(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """Which library computes a product of matrices that is left to ATen."""

    def measure(self, compiled: CompileCall) -> Measure | None:
        """How long products take, with a function that compiles one; ``None`` where nothing is gained by that."""

    def race(self, compiled: CompileProgram, options: LowerOptions, store: ObjectStore | None) -> Race | None:
        """What measures choices of one graph, with a function that compiles a part of it, and where times are kept;
        ``None`` where nothing is."""

    def key(self, options: LowerOptions) -> str:
        """All that decides, beside the program, what is generated for it."""

    def generate(
        self, program: Program, kernels: KernelModule, options: LowerOptions, observer: Observer | None = None
    ) -> CompiledProgram:
        """The binary of a program's kernels, and the plan that launches them. Raises what a target cannot do."""


HOST = Capabilities(
    device="cpu",
    arena=True,
    host_memory=True,
    unordered=False,
    sorts_rows=True,
    wide_statistics=True,
    careful_variance=True,
    channels_last=True,
    one_pass_rows=False,
)

# A second thread pays from ``least`` elements on; threads wait for each other after each pass over a row.
HOST_SPLITS = SplitPolicy(units=8, least=1 << 16, chunk=1 << 14, long_row=1 << 18, interleaves=True)


_ONEDNN_IS_FASTER = ("znver4", "znver5")


def choose_on_host(processor: str) -> Choice:
    """Who computes products on a processor, by LLVM's name of it: oneDNN's linear layer on those whose vectors MKL does
    not use, see Note [Which product]."""
    if processor in _ONEDNN_IS_FASTER and torch.backends.mkldnn.is_available():
        return Choice("onednn", "matrix products are left to ATen; oneDNN's is the faster one on this processor")
    return Choice("aten", "matrix products are left to ATen")


@dataclass(frozen=True, slots=True)
class NoMachine:
    """The target of a program that is scheduled for no machine in particular: any processor, and nothing is known of
    how fast it is."""

    id: str = "none"
    capabilities: Capabilities = HOST
    split_policy: SplitPolicy | None = None

    def choose(
        self, product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
    ) -> Choice:
        """ATen's call: there is no form for it."""
        return Choice("aten", "the machine is not known")

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

    def renders_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
        """There are no tiles."""
        return False

    def packs_product(self, nest: LoopNest, buffers: Mapping[str, Buffer]) -> Panels | None:
        """There are no panels."""
        return None

    def choose_library(self, product: ExternCall, buffers: Mapping[str, Buffer]) -> Choice:
        """ATen's own: nothing is known that would be faster."""
        return Choice("aten", "the machine is not known")

    def measure(self, compiled: CompileCall) -> Measure | None:
        """Nothing is measured."""
        return None

    def race(self, compiled: CompileProgram, options: LowerOptions, store: ObjectStore | None) -> Race | None:
        """Nothing is measured."""
        return None

    def key(self, options: LowerOptions) -> str:
        """The same for all options."""
        return self.id

    def generate(
        self, program: Program, kernels: KernelModule, options: LowerOptions, observer: Observer | None = None
    ) -> CompiledProgram:
        """Raises :class:`~.errors.CodegenError`."""
        raise CodegenError(f"no code is generated for {program.name}, which is scheduled for no machine in particular")


NO_MACHINE = NoMachine()
