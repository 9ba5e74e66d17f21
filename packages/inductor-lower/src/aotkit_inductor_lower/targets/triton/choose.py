"""Which matrix products are generated and which are left to ATen (cuBLAS): measured, with the reason kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ...ir import BufferRef, ExternCall, Program
from .render.matmul import matmul_nest

__all__ = ["DeviceTuning", "Product", "ProductChoice"]

GAIN = 0.97  # of ATen's time is what a generated product must take at most: it also makes the plan longer to compile


@dataclass(frozen=True, slots=True)
class Product:
    """A matrix product as a timer sees it: operator, dtype, and sizes and strides of its tensors as text."""

    target: str
    dtype: str
    operands: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.target} {self.dtype} {' x '.join(self.operands)}"


@dataclass(frozen=True, slots=True)
class ProductChoice:
    """Whether a product is generated. ``reason`` holds the times."""

    template: bool
    reason: str


#: (seconds of the ATen call, seconds of the best generated kernel) of a product.
ProductTimer = Callable[[Product], tuple[float, float]]


@dataclass(frozen=True, slots=True)
class DeviceTuning:
    """What is compared before it is chosen. ``kernels``: block sizes of every kernel. ``products``: the timer that
    decides between ATen and generated matrix products (``None``: ATen). ``every_product``: generate all that have the
    form. ``tf32``: f32 products may lose bits, as ``torch.backends.cuda.matmul.allow_tf32`` says."""

    kernels: bool = False
    products: ProductTimer | None = None
    every_product: bool = False
    tf32: bool = False

    def choose_products(self, program: Program) -> Iterator[tuple[str, ProductChoice]]:
        """(call, choice) for each matrix product of a program; equal ones are measured once."""
        if self.products is None and not self.every_product:
            return
        buffers = {b.name: b for b in program.buffers}
        known: dict[Product, ProductChoice] = {}
        for step in program.steps:
            if not isinstance(step, ExternCall) or matmul_nest(step, buffers) is None:
                continue
            tensors = [buffers[a.name] for a in step.args if isinstance(a, BufferRef)]
            operands = tuple(f"{list(map(str, t.sizes))}:{list(map(str, t.strides))}" for t in tensors)
            product = Product(step.target, tensors[0].dtype, operands)
            if product not in known:
                known[product] = self._choose(product)
            yield step.name, known[product]

    def _choose(self, product: Product) -> ProductChoice:
        if self.products is None:
            return ProductChoice(True, f"{product}: every product is generated")
        library, generated = self.products(product)
        better = generated <= GAIN * library
        word = "generated" if better else "ATen"
        times = f"ATen {library * 1e6:.1f} us, generated {generated * 1e6:.1f} us"
        return ProductChoice(better, f"{product}: {word}, {times}")
