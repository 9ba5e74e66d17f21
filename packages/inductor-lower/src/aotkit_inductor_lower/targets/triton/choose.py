"""What options decide: which products are kernels (of few rows, all, what is measured faster, or was), and who
launches."""

from __future__ import annotations

from collections.abc import Mapping

from ...graph_passes.pad_products import WORTH, has_tiles_of_odd_rows
from ...ir import Buffer, BufferRef, Contraction, ExternCall
from ...ops.dtypes import DType, dtype_from_torch_name
from ...options import LowerOptions
from ...target import Capabilities, Choice, Measure
from .few_rows import is_few_rows, takes_few_rows

__all__ = ["choose_form", "shares_launches"]

GAIN = 0.97  # of ATen's time is what a generated product must take at most: it also makes the plan longer to compile


def choose_form(
    product: Contraction,
    buffers: Mapping[str, Buffer],
    options: LowerOptions,
    measure: Measure | None,
    capabilities: Capabilities,
) -> Choice:
    """``"dot"``, ``"rows"`` or ``"aten"``, with the times that speak for it, or Note [Odd rows of a result] in
    :mod:`.products`."""
    if product.accumulate is not DType.F32:
        return Choice("aten", f"kernels of products sum in f32, not in {product.accumulate.value}")
    form = "rows" if is_few_rows(product) else "dot"
    if options.contractions == "generated" or product.library is None:
        return Choice(form, "every product is generated")
    if measure is None and takes_few_rows(product, buffers):
        return Choice(form, "a product of few rows takes in what is around it")
    if measure is None and capabilities.stores_odd_rows and _stores_odd_rows(product.library, buffers, capabilities):
        return Choice("dot", "generated, rows of the result begin anywhere")
    if measure is None:
        return Choice("aten", "ATen, nothing is measured without tune")
    library, generated = measure(product.library, buffers)
    times = f"ATen {library * 1e6:.1f} us, generated {generated * 1e6:.1f} us"
    if generated <= GAIN * library:
        return Choice(form, f"generated, {times}", generated)
    return Choice("aten", f"ATen, {times}", library)


def _stores_odd_rows(call: ExternCall, buffers: Mapping[str, Buffer], capabilities: Capabilities) -> bool:
    """Whether a call gives a large matrix of odd rows, of factors whose rows lie along the sum and begin at multiples
    of what is loaded at once."""
    operands = [buffers[a.name] for a in call.args if isinstance(a, BufferRef)][-2:]
    if call.target not in ("aten.mm.default", "aten.addmm.default") or len(operands) != 2:
        return False
    known = [[e.constant for e in (*each.sizes, *each.strides)] for each in operands]
    types = {dtype_from_torch_name(each.dtype) for each in operands}
    if len(types) != 1 or not types <= {DType.BF16, DType.F16} or any(None in each for each in known):
        return False
    rows, inner, row, step = (n or 0 for n in known[0])
    columns, (across, down) = known[1][1] or 0, (n or 0 for n in known[1][2:])
    unit = capabilities.row_bytes // 2
    aligned = step == across == 1 and row % unit == down % unit == 0
    large = has_tiles_of_odd_rows(rows, columns) and 2 * rows * inner * columns >= WORTH
    return aligned and large and columns % unit != 0


def shares_launches(options: LowerOptions) -> bool:
    """Whether small kernels share launches: as long as the pass that brings them together runs."""
    return options.fuse and "gather-launches" not in options.disable
