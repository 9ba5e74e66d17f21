"""Which products of matrices are computed in tile registers (AMX).

Note [Which products are tiles]
    What tiles gain is the multiplication, which packing and the rounding of results must not eat up: so all sides of a
    product have to be long, that of the sum too. Measured against MKL and oneDNN on one core of a Xeon with AMX,
    AVX-512 FP16 and BF16 (`python -m tools.bench.products`): float32 at full accuracy takes 0.62 to 0.8 of MKL's time
    from about 128 rows of 64 columns and 2**24 multiplications on, and more below. Factors of bfloat16 are multiplied
    by the same instructions in oneDNN: its products take up to twice as long where there is little to do, a fifth
    longer where the left factor lies along its rows (the gradient of a weight), and are as fast or faster elsewhere.
    Bytes are left to oneDNN, which multiplies them in tile registers, too, unless every product is to be generated.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...ir import Buffer, Contraction, DType, Load, Precision
from ...options import LowerOptions
from ...symbolic import product
from ...target import Choice
from .choose_few_rows import lies_along
from .machine import Machine
from .tile_forms import FORMS, PANEL

__all__ = ["choose_tiles", "precision_of_products"]

SHORT = (96, 64, 64)  # rows, columns, summed: of less, packing takes too much of the time
WORTH = 1 << 24  # multiplications
FEW_ROWS, LONG_SUM = 128, 256  # of bfloat16: what oneDNN does before and after takes long in proportion
FEW = 1 << 22  # multiplications that a call of oneDNN takes twice as long for


def precision_of_products() -> Precision:
    """What products of float32 may lose, as torch is told. ``"highest"`` where its settings contradict each other."""
    try:
        told = torch.get_float32_matmul_precision()
    except RuntimeError:  # the older and the newer settings of torch were mixed
        return "highest"
    return {"high": "high", "medium": "medium"}.get(told, "highest")  # type: ignore[return-value]


def choose_tiles(
    contraction: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine
) -> Choice | None:
    """A form in tile registers, ATen, or ``None`` where there are no such registers or the product is none for them."""
    factors = {contraction.left.dtype, contraction.right.dtype}
    whole = factors == {DType.I8} and contraction.accumulate is DType.I32
    floats = not factors - {DType.F32, DType.BF16} and contraction.accumulate is DType.F32
    if not machine.has("amx-int8" if whole else "amx-bf16") or not (whole or floats):
        return None
    sides = contraction.rows, contraction.columns, contraction.reduced
    sizes = [product(loop.size for loop in loops).constant for loops in sides]
    known = [size for size in sizes if size is not None]
    if len(known) < len(sizes) or any(size < PANEL // 2 for size in known):
        return None
    precision = precision_of_products()
    form = FORMS["int8" if whole else "bf16" if factors == {DType.BF16} else precision]
    batch = product(loop.size for loop in contraction.batch).constant or 1
    count = batch * known[0] * known[1] * known[2]
    if options.contractions != "generated":
        why = _better_left(contraction, buffers, known, count, factors == {DType.BF16})
        if why:
            return Choice("aten", why)
    return Choice(form.name, "tile registers take less time than the library's call", precision=precision)


def _better_left(
    contraction: Contraction, buffers: Mapping[str, Buffer], sizes: list[int], count: int, narrow: bool
) -> str:
    """Why a product is not one for tiles, if it is not."""
    computed = not all(isinstance(instr, Load) for instr in contraction.right.body)
    if narrow and count < FEW and not computed:
        return ""
    if any(size < short for size, short in zip(sizes, SHORT, strict=True)) or count < WORTH:
        return "the product is small"
    if not narrow or computed or lies_along(contraction.rows, contraction.left, buffers):
        return ""
    return "" if sizes[0] <= FEW_ROWS and sizes[2] >= LONG_SUM else "oneDNN's products of bfloat16 are as fast"
