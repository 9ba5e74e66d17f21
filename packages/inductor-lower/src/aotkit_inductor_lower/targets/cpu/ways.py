"""The ways in which kernels are written for the CPU: each kernel in the first that takes it.

A new way is a row of :data:`WAYS`. That is also where tools read which kinds of kernels a machine runs, and so which
ones a run of the tests must have seen (`tools/emulation/kinds.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType

from ...ir import DType
from ...kernel_ir.attention_site import AttentionSite
from ...kernel_ir.launches import KernelText
from ...kernel_ir.matmul_site import FewRowsSite, MatmulSite
from ...kernel_ir.nodes import Kernel
from .choose_attention import attends_in_vectors, attention_form, multiplies_attention
from .machine import Machine
from .products import (
    GroupedProduct,
    ProductForm,
    TiledProduct,
    has_tiles,
    has_tiles_of_bytes,
    lies_along_columns,
    multiplies_bytes,
    multiplies_few_bytes,
    product_form,
)
from .products import multiplies_pairs as multiplies_bfloat16
from .render.amx_product import TiledProductEmitter
from .render.attention_backward import AttentionBackward
from .render.attention_forward import AttentionForward
from .render.attention_vectors_backward import VectorAttentionBackward
from .render.attention_vectors_forward import VectorAttentionForward
from .render.blocked_product import BlockedProductEmitter
from .render.few_rows_along_columns import FewRowsAlongColumns
from .render.few_rows_along_sums import FewRowsAlongSums
from .render.few_rows_in_digits import FewRowsInDigits, multiplies_digits, suits_digits
from .render.few_rows_in_pairs import FewRowsInPairs, multiplies_pairs, pairs_of
from .render.few_rows_in_panels import FewRowsInPanels, panels_of
from .render.few_rows_in_short_digits import (
    COLUMNS,
    FewRowsInShortDigits,
    multiplies_short_digits,
    suits_short_digits,
)
from .render.few_rows_of_bytes import FewRowsOfBytes
from .render.few_rows_of_bytes_in_digits import FewRowsOfBytesInDigits, widened_bytes
from .render.few_rows_of_halves import FewRowsOfHalves, halves_of
from .render.few_rows_of_words import FewRowsOfWords
from .render.kernel import emit_kernel
from .render.product import ProductEmitter
from .render.product_in_groups import GroupedProductEmitter
from .render.sort_in_digits import SortInDigits
from .sort_site import SortSite, sort_site

__all__ = ["WAYS", "Way", "way_of", "ways_of"]

Form = AttentionSite | ProductForm | SortSite | None
Write = Callable[[], KernelText]

#: Gives what writes a kernel of this form, or ``None`` if this way is not for it.
Way = Callable[[Kernel, Form, Machine, dict[str, str]], Write | None]


def _attention(backward: bool, kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, AttentionSite) or form.backward != backward or not multiplies_attention(target):
        return None
    return (AttentionBackward if backward else AttentionForward)(kernel, form, target, known).emit


def _attention_on_vectors(
    backward: bool, kernel: Kernel, form: Form, target: Machine, known: dict[str, str]
) -> Write | None:
    if not isinstance(form, AttentionSite) or form.backward != backward or not attends_in_vectors(target):
        return None
    return (VectorAttentionBackward if backward else VectorAttentionForward)(kernel, form, target, known).emit


def _tiles(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    return TiledProductEmitter(kernel, form, target, known).emit if isinstance(form, TiledProduct) else None


def _in_groups(group: int, kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, GroupedProduct) or form.panels.group != group:
        return None
    return GroupedProductEmitter(kernel, form, target, known).emit


def _product(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, MatmulSite):
        return None
    emitter = BlockedProductEmitter if target.vector_bits == 256 else ProductEmitter
    return emitter(kernel, form, target, known).emit


def _of_bytes(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, FewRowsSite) or form.reduce.dtype is not DType.I32:
        return None
    return (FewRowsOfBytes if multiplies_bytes(target) else FewRowsOfWords)(kernel, form, target, known).emit


def _in_pairs(
    kernel: Kernel, form: Form, target: Machine, known: dict[str, str], *, digits: bool = False
) -> Write | None:
    if not isinstance(form, FewRowsSite) or not (multiplies_digits if digits else multiplies_pairs)(target):
        return None
    panels = panels_of(kernel, form) if not digits or suits_digits(form) else None
    byte = None if panels is None else pairs_of(kernel, form, panels)
    if panels is None or byte is None:
        return None
    return (FewRowsInDigits if digits else FewRowsInPairs)(kernel, form, target, known, panels, byte).emit


def _in_short_digits(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, FewRowsSite) or not (multiplies_short_digits(target) and suits_short_digits(form)):
        return None
    panels = panels_of(kernel, form)
    byte = None if panels is None else pairs_of(kernel, form, panels, COLUMNS)
    if panels is None or byte is None:
        return None
    return FewRowsInShortDigits(kernel, form, target, known, panels, byte).emit


def _in_panels(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    panels = panels_of(kernel, form) if isinstance(form, FewRowsSite) else None
    if panels is None or not isinstance(form, FewRowsSite):
        return None
    return FewRowsInPanels(kernel, form, target, known, panels).emit


def _along_columns(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, FewRowsSite) or not lies_along_columns(kernel, form):
        return None
    return FewRowsAlongColumns(kernel, form, target, known).emit


def _of_halves(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    halves = halves_of(kernel, form) if isinstance(form, FewRowsSite) else None
    if halves is None or not isinstance(form, FewRowsSite):
        return None
    return FewRowsOfHalves(kernel, form, target, known, halves).emit


def _of_bytes_in_digits(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    if not isinstance(form, FewRowsSite) or not multiplies_bytes(target):
        return None
    byte = widened_bytes(kernel, form)
    if byte is None:
        return None
    return FewRowsOfBytesInDigits(kernel, form, target, known, byte).emit


def _along_sums(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    return FewRowsAlongSums(kernel, form, target, known).emit if isinstance(form, FewRowsSite) else None


def _in_digits(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    return SortInDigits(kernel, form, target, known).emit if isinstance(form, SortSite) else None


def _loops(kernel: Kernel, form: Form, target: Machine, known: dict[str, str]) -> Write | None:
    return functools.partial(emit_kernel, kernel, target, known) if form is None else None


def _multiplies_and_adds(machine: Machine) -> bool:
    return machine.has("fma")


def _multiplies_bytes_on_vectors(machine: Machine) -> bool:
    return multiplies_bytes(machine) and not has_tiles_of_bytes(machine)  # which take all that vectors would


def _every(_: Machine) -> bool:
    return True


#: By name: which machines a way is for, and the way. Where two take a kernel, the first does.
WAYS: Mapping[str, tuple[Callable[[Machine], bool], Way]] = MappingProxyType(
    {
        "attention": (multiplies_attention, functools.partial(_attention, False)),
        "attention backward": (multiplies_attention, functools.partial(_attention, True)),
        "attention on vectors": (attends_in_vectors, functools.partial(_attention_on_vectors, False)),
        "attention backward on vectors": (attends_in_vectors, functools.partial(_attention_on_vectors, True)),
        "product in tile registers": (has_tiles, _tiles),
        "product in pairs": (multiplies_bfloat16, functools.partial(_in_groups, 2)),
        "product of bytes": (_multiplies_bytes_on_vectors, functools.partial(_in_groups, 4)),
        "product": (_multiplies_and_adds, _product),
        "few rows of bytes": (multiplies_few_bytes, _of_bytes),
        "few rows in digits": (multiplies_digits, functools.partial(_in_pairs, digits=True)),
        "few rows in pairs": (multiplies_pairs, _in_pairs),
        "few rows in short digits": (multiplies_short_digits, _in_short_digits),
        "few rows in panels": (_multiplies_and_adds, _in_panels),
        "few rows of halves": (_multiplies_and_adds, _of_halves),
        "few rows of bytes in digits": (multiplies_bytes, _of_bytes_in_digits),
        "few rows along columns": (_multiplies_and_adds, _along_columns),
        "few rows along sums": (_multiplies_and_adds, _along_sums),
        "sort in digits": (_every, _in_digits),
        "loops": (_every, _loops),
    }
)


def ways_of(machine: Machine) -> frozenset[str]:
    """The names of the ways that are for a machine."""
    return frozenset(name for name, (suits, _) in WAYS.items() if suits(machine))


def way_of(kernel: Kernel, target: Machine, declarations: dict[str, str]) -> tuple[str, Write]:
    """The way of a kernel in normal form, by name, and what writes it. External functions that it calls are then added
    to ``declarations``."""
    form: Form = attention_form(kernel, target) or product_form(kernel, target) or sort_site(kernel)
    for name, (_, way) in WAYS.items():
        write = way(kernel, form, target, declarations)
        if write is not None:
            return name, write
    raise AssertionError(f"no way takes a {type(form).__name__}")  # each form has one
