"""Pass: products of matrices whose rows begin at no multiple of 16 bytes are computed in padded memory.

Before ``mm(x, w.t())`` with 50257 rows of ``w``. After the same with 50264, of which the last ones are 0, and a slice
of it. Requires a target whose library wants that (:attr:`~.target.Capabilities.row_bytes`), known sizes, and a large
product.

Note [Rows of a product]
    Tensor cores are fed 16 bytes at once. Where a row begins between such pieces, cuBLAS has kernels that read two
    bytes each, a sixth of the speed: a language model whose vocabulary is odd spends half of a training step in its
    three largest products. Rows are padded with zeros, which change no sum; a result has more columns, of which
    a copy takes those that are wanted, if the result is returned; kernels read it where it is. Padding and copies are
    loops as any, which fuse with what makes the operands and reads the result. Where only rows of the result would be
    padded, and it is returned, so copied, a target may have a kernel that stores them where they belong in less time
    (:attr:`~.target.Capabilities.stores_odd_rows`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.aten import is_view
from ..passes import Pass, PassContext
from .node_facts import addresses_storage, before_writes, until_first_write
from .patterns import emit
from .replace import fake_result, replace_node
from .rewriting import drop_dead_nodes

__all__ = ["PASS", "WORTH", "has_tiles_of_odd_rows", "pad_products"]

aten = torch.ops.aten
_NARROW = (torch.bfloat16, torch.float16)
_PRODUCTS = (aten.mm.default, aten.addmm.default)
WORTH = 1 << 33  # multiplications and additions: some 10 us, as long as it takes to copy the operands
_TILE = 128  # rows
_MOST = 2**31 - 2**20  # elements, and some that are masked
_TRANSPOSED = {aten.t.default: (), aten.permute.default: ([1, 0],), aten.transpose.int: (0, 1)}


def pad_products(graph: Graph, ctx: PassContext, worth: int = WORTH) -> Graph:
    """Run the pass. ``worth``: multiplications and additions of the smallest product that is padded."""
    done = False
    for node in before_writes(graph):
        if node.op != "call_function" or node.target not in _PRODUCTS or ctx.fuel.left < 1:
            continue
        if _pad(graph, node, ctx, worth):
            ctx.fuel.spend(1)
            done = True
    if done:
        drop_dead_nodes(graph)
    return graph


def _pad(graph: Graph, node: Node, ctx: PassContext, worth: int) -> bool:
    *bias, left, right = node.args
    if not all(isinstance(arg, Node) for arg in node.args) or node.kwargs:
        return False
    a, b = (arg.meta.get("val") for arg in (left, right))  # type: ignore[union-attr]
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype not in _NARROW:
        return False
    (m, k), n = a.shape, b.shape[1]
    if not all(isinstance(size, int) for size in (m, n, k)) or min(m, n, k) == 1 or 2 * m * n * k < worth:
        return False
    unit = ctx.target.capabilities.row_bytes // a.element_size()
    wide = _wide(a, b, unit)
    if wide == (m, n, k) or any(_columns(arg) != n for arg in bias):
        return False
    generated = ctx.target.capabilities.stores_odd_rows and ctx.options.contractions != "aten"
    if generated and _stores_odd_rows(wide, (m, n, k), b) and _is_returned(node):
        return False
    padded, taken = _padded(wide, (m, n, k), bool(bias)), {"left": left, "right": right}
    before = node.prev
    made = emit(graph, padded, node, **taken, **({"bias": bias[0]} if bias else {}))
    if made is None or not replace_node(node, made):
        return False
    if made.target is aten.clone.default:
        _read_instead(graph, made, made.args[0])
    new = before.next
    while new is not node:
        if new.target is aten.cat.default and not any(user.target is aten.cat.default for user in new.users):
            _store_once(graph, new, node)
        new = new.next
    return True


def _stores_odd_rows(wide: tuple[int, int, int], sizes: tuple[int, int, int], right: torch.Tensor) -> bool:
    """Whether only the rows of the result begin between multiples of what is loaded at once, and there are some."""
    m, n, k = sizes
    return wide[0] == m and wide[1] != n and wide[2] == k and _is_transposed(right) and has_tiles_of_odd_rows(m, n)


def has_tiles_of_odd_rows(rows: int, columns: int) -> bool:
    """Whether a result is one that a target with :attr:`~.target.Capabilities.stores_odd_rows` has tiles for: of some
    rows, and with offsets of 32 bits."""
    return rows >= _TILE and rows * columns < _MOST


def _is_returned(node: Node) -> bool:
    """Whether a result, or a view of it, is returned: where it is padded, that is a copy."""
    return any(user.op == "output" or (is_view(user) and _is_returned(user)) for user in node.users)


def _store_once(graph: Graph, joined: Node, product: Node) -> None:
    """Let what comes behind the product, and computes with the tensor that ``joined`` holds with zeros around, read it
    there. Else both would be stored."""
    inner = joined
    while inner.target is aten.cat.default:
        inner = inner.args[0][0]  # type: ignore[index, assignment]
    rows, columns = inner.meta["val"].shape
    dense = joined.meta["val"].shape[1] == columns  # what is returned lies as before then
    others = (*_PRODUCTS, aten.cat.default)
    later = [user for user in until_first_write(graph) if user > product and user in inner.users]
    later = [user for user in later if not is_view(user) and user.target not in others]
    later += [user for user in inner.users if user.op == "output" and dense and not is_view(inner)]
    if not later:
        return

    def part(whole: Any) -> Any:
        return aten.slice.Tensor(aten.slice.Tensor(whole, 0, 0, rows), 1, 0, columns)

    taken = emit(graph, part, product, whole=joined)
    for user in later if taken is not None else ():
        user.replace_input_with(inner, taken)  # type: ignore[arg-type]


def _read_instead(graph: Graph, copy: Node, source: Any) -> None:
    """Let what computes with a copy, or with a view of it, read what it is a copy of. What is returned stays."""
    for user in list(copy.users):
        if user.op != "call_function" or addresses_storage(user.target):
            continue
        if not is_view(user):
            user.replace_input_with(copy, source)
            continue
        with graph.inserting_after(user):
            view = graph.node_copy(user, lambda arg: source if arg is copy else arg)
        try:
            view.meta = {**user.meta, "val": fake_result(view)}
        except (RuntimeError, ValueError):  # rows that are not dense can't be seen so
            graph.erase_node(view)
            continue
        _read_instead(graph, user, view)


def _columns(bias: Any) -> int | None:
    """Of a bias that is the same for each row."""
    value = bias.meta.get("val")
    return value.shape[0] if isinstance(value, torch.Tensor) and value.dim() == 1 else None


def _wide(a: torch.Tensor, b: torch.Tensor, unit: int) -> tuple[int, int, int]:
    """Rows, columns and inner size of the padded product: those along which something is read or written are multiples
    of ``unit``."""
    (m, k), n = a.shape, b.shape[1]
    along_rows, along_columns = _is_transposed(a), not _is_transposed(b)
    rows, columns, inner = (-(-size // unit) * unit for size in (m, n, k))
    whole = along_rows and along_columns  # no operand has the inner size side by side
    return rows if along_rows else m, columns, k if whole else inner


def _is_transposed(x: torch.Tensor) -> bool:
    return x.stride(0) == 1 and x.stride(1) != 1


def _padded(wide: tuple[int, int, int], sizes: tuple[int, int, int], biased: bool) -> Callable[..., Any]:
    """The function that computes a product of ``sizes`` as one of ``wide``."""
    (m, n, _), more = sizes, [w - s for w, s in zip(wide, sizes, strict=True)]

    def product(left: Any, right: Any, bias: Any = None) -> Any:
        a, b = _with_zeros(left, more[0], more[2]), _with_zeros(right, more[2], more[1])
        if biased:
            found = aten.addmm.default(aten.constant_pad_nd.default(bias, [0, more[1]]) if more[1] else bias, a, b)
        else:
            found = aten.mm.default(a, b)
        found = aten.slice.Tensor(found, 0, 0, m) if more[0] else found
        return aten.clone.default(aten.slice.Tensor(found, 1, 0, n)) if more[1] else found

    return product


def _with_zeros(x: Any, rows: int, columns: int) -> Any:
    """``x`` with so many more of both; what is a transposed tensor stays one."""
    if not rows and not columns:
        return x
    node, val = x.node, x.node.meta["val"]
    if not _is_transposed(val):
        return _longer(x, val, rows, columns)
    is_view = node.target in _TRANSPOSED and node.args[1:] == _TRANSPOSED[node.target]
    base = torch.fx.Proxy(node.args[0], x.tracer) if is_view else aten.t.default(x)
    return aten.t.default(_longer(base, val.t(), columns, rows))


def _longer(x: Any, val: torch.Tensor, rows: int, columns: int) -> Any:
    """A matrix like ``val`` with zeros below and beside it. What is computed is stored where it belongs in a joined
    tensor, so that its kernel is spared a copy; a parameter must be copied, which is one kernel for a padded tensor."""
    if x.node.op == "placeholder":
        return aten.constant_pad_nd.default(x, [0, columns, 0, rows])
    if columns:
        x = aten.cat.default([x, aten.new_zeros.default(x, [val.shape[0], columns])], 1)
    if rows:
        x = aten.cat.default([x, aten.new_zeros.default(x, [rows, val.shape[1] + columns])], 0)
    return x


def _is_wanted(ctx: PassContext) -> bool:
    return ctx.target.capabilities.row_bytes > 0


PASS = Pass(
    "pad-products",
    pad_products,
    why="tensor cores read 16 bytes at once, and rows that begin in between are read by far slower kernels",
    after=("simplify",),
    when=_is_wanted,
)
