"""What options decide: which products are kernels (of few rows, all, or what is measured faster), who launches."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, Contraction
from ...ops.dtypes import DType
from ...options import LowerOptions
from ...target import Choice, Measure
from .few_rows import is_few_rows, takes_few_rows

__all__ = ["choose_form", "shares_launches"]

GAIN = 0.97  # of ATen's time is what a generated product must take at most: it also makes the plan longer to compile


def choose_form(
    product: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, measure: Measure | None
) -> Choice:
    """``"dot"``, ``"rows"`` or ``"aten"``, with the times that speak for it."""
    if product.accumulate is not DType.F32:
        return Choice("aten", f"kernels of products sum in f32, not in {product.accumulate.value}")
    form = "rows" if is_few_rows(product) else "dot"
    if options.contractions == "generated" or product.library is None:
        return Choice(form, "every product is generated")
    if measure is None and takes_few_rows(product, buffers):
        return Choice(form, "a product of few rows takes in what is around it")
    if measure is None:
        return Choice("aten", "ATen, nothing is measured without tune")
    library, generated = measure(product.library, buffers)
    times = f"ATen {library * 1e6:.1f} us, generated {generated * 1e6:.1f} us"
    if generated <= GAIN * library:
        return Choice(form, f"generated, {times}", generated)
    return Choice("aten", f"ATen, {times}", library)


def shares_launches(options: LowerOptions) -> bool:
    """Whether small kernels share launches: as long as the pass that brings them together runs."""
    return options.fuse and "gather-launches" not in options.disable
