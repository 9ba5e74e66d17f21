"""Every ATen op that gives a view may stand in a graph as it is, also one that captures take apart into others."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_inductor_lower import CompiledGraph, LowerOptions, bind_program, compile_graph

OTHER = torch.zeros(3, 6, 4, 5)
# What follows the tensor, which is (6, 4, 5) unless another size stands first, as a tuple.
CALLS: dict[str, list[tuple[Any, ...]]] = {
    "_autocast_to_full_precision": [(False, True)],
    "_autocast_to_reduced_precision": [(False, False, torch.float16, torch.bfloat16)],
    "_reshape_alias": [([24, 5], [5, 1])],
    "adjoint": [()],
    "alias": [()],
    "as_strided": [([3, 4], [20, 2]), ([2, 4, 5], [20, 5, 1], 40)],
    "broadcast_to": [([3, 6, 4, 5],)],
    "chunk": [(4, 2), (4,), (3, -2)],
    "contiguous": [()],
    "detach": [()],
    "diagonal": [(1, 0, 1), (-1, -1, 0)],
    "dsplit.array": [([1, 3],)],
    "dsplit.int": [(5,)],
    "expand": [([3, 6, 4, 5],)],
    "expand_as": [(OTHER,)],
    "flatten.using_ints": [(), (1,), (0, 1)],
    "hsplit.array": [([1, 3],)],
    "hsplit.int": [(2,)],
    "lift_fresh": [()],
    "linalg_diagonal": [(), ((1, 0, 1),)],
    "mH": [()],
    "mT": [()],
    "matrix_H": [((4, 5),)],
    "moveaxis.int": [(0, -1)],
    "moveaxis.intlist": [([0, 1], [2, 0])],
    "movedim.int": [(0, -1)],
    "movedim.intlist": [([0, 1], [2, 0])],
    "narrow": [(1, 1, 2), (-1, -3, 2)],
    "numpy_T": [((4, 5),)],
    "permute": [([2, 0, 1],)],
    "positive": [()],
    "ravel": [()],
    "real": [()],
    "reshape": [([24, 5],), ([6, -1, 2],)],
    "reshape_as": [(torch.zeros(24, 5),)],
    "resolve_conj": [()],
    "resolve_neg": [()],
    "conj": [()],
    "select.int": [(1, -2)],
    "slice.Tensor": [(1, 1, 4, 2), (2, -3)],
    "split.Tensor": [(4,), (2, -1)],
    "split.sizes": [([1, 5],), ([2, 2], 1)],
    "split_with_sizes": [([1, 5],), ([2, 2], 1)],
    "squeeze": [(), ((6, 1, 4, 1),)],
    "squeeze.dim": [(1,), ((6, 1, 4, 1), -1)],
    "squeeze.dims": [([0, 1],), ((6, 1, 4, 1), [1, 2, 3])],
    "swapaxes": [(0, -1)],
    "swapdims": [(0, 1)],
    "t": [((4, 5),)],
    "tensor_split.indices": [([1, 3],), ([2], 2)],
    "tensor_split.sections": [(4,), (3, 1)],
    "to.device": [(torch.device("cpu"), torch.float32)],
    "to.dtype": [(torch.float32,)],
    "to.dtype_layout": [()],
    "to.other": [(OTHER,)],
    "transpose.int": [(0, -1)],
    "unbind.int": [(), (-1,)],
    "unflatten.int": [(0, [2, 3]), (-1, [5, -1])],
    "unfold": [(2, 3, 1), (0, 3, 2)],
    "unsqueeze": [(1,), (-1,)],
    "view": [([24, 5],), ([6, -1, 2, 1],)],
    "view.dtype": [(torch.int32,)],
    "view_as": [(torch.zeros(24, 5),)],
    "vsplit.array": [([1, 3],)],
    "vsplit.int": [(2,)],
}
# No view of a dense tensor of real numbers on the CPU, or not called by a graph.
OUTSIDE = {
    *("_fw_primal", "_make_dual", "_unpack_dual", "_test_autograd_multiple_dispatch_view", "pin_memory"),
    *("_indices", "_values", "indices", "values", "ccol_indices", "col_indices", "crow_indices", "row_indices"),
    *("coalesce", "_sparse_broadcast_to", "slice_inverse"),
    *("_nested_get_values", "_nested_view_from_buffer", "_nested_view_from_jagged"),
    *("_conj", "_neg_view", "imag", "view_as_complex", "view_as_real"),  # of complex numbers, or lazy bits
    *("narrow.Tensor", "tensor_split.tensor_indices_or_sections"),  # where to cut depends on data
}
#: Of named tensors, which torch from 2.13 on does not have.
NAMED = {
    *("align_to", "align_to.ellipsis_idx", "refine_names", "rename", "diagonal.Dimname", "select.Dimname"),
    *("flatten.DimnameList", "flatten.named_out_dim", "flatten.using_names", "squeeze.dimname", "transpose.Dimname"),
    *("unbind.Dimname", "unflatten.Dimname"),
}


def view_ops() -> Iterator[tuple[str, torch._ops.OpOverload]]:
    """All ATen ops of this torch whose schema says that a result is a view of an argument, by name and overload."""
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        namespace, _, name = qualified.partition("::")
        if namespace != "aten":
            continue
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is None or op._schema.is_mutable:
            continue
        if any(result.alias_info is not None for result in op._schema.returns):
            yield name, op


OPS = dict(view_ops())


def inputs(size: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of a size in several layouts: dense, backwards with gaps and an offset, expanded in front."""
    count = torch.Size(size).numel()
    dense = torch.arange(1.0, count + 1).view(size)
    strides = [2 * stride for stride in dense.new_empty(size[::-1]).stride()]
    gaps = torch.arange(1.0, 2 * count + 8)[7:].as_strided(size[::-1], strides)
    return [dense, gaps.permute(*reversed(range(len(size)))), dense[:1].expand(size)]


class Calls:
    """A graph in the making: nodes with fake values, and what eager says to each."""

    def __init__(self, symbolic: bool) -> None:
        self.graph = torch.fx.Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv())
        self.symbolic = symbolic
        self.given: list[torch.Tensor] = []

    def input(self, value: torch.Tensor) -> torch.fx.Node:
        node = self.graph.placeholder(f"x{len(self.given)}")
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=not self.symbolic)
        self.given.append(value)
        return node

    def call(self, target: Any, *args: Any) -> torch.fx.Node:
        node = self.graph.call_function(target, args)
        plain = torch.fx.map_arg(args, lambda used: used.meta["val"])
        with self.mode:
            node.meta["val"] = target(*plain)
        return node

    def check(self, results: list[torch.fx.Node], want: list[torch.Tensor]) -> None:
        """Values, strides and shared memory of all results are eager's, also between redzones."""
        self.graph.output(tuple(results))
        compiled = compile_graph(torch.fx.GraphModule({}, self.graph), options=LowerOptions(verify=True))
        assert isinstance(compiled, CompiledGraph)
        for run in (compiled, bind_program(compiled.compiled, compiled.constants, redzones=True)):
            got = run(list(self.given))
            for g, w, node in zip(got, want, results, strict=True):
                what = f"{node.target} of {[v.stride() for v in self.given]}"
                assert (g.dtype, g.shape) == (w.dtype, w.shape), what
                if w.numel():
                    assert [s for n, s in zip(g.shape, g.stride(), strict=True) if n != 1] == [
                        s for n, s in zip(w.shape, w.stride(), strict=True) if n != 1
                    ], what
                torch.testing.assert_close(g, w, rtol=1e-5, atol=1e-5, msg=lambda text, what=what: f"{what}: {text}")
                assert self.owner(g) == self.owner(w), what

    def owner(self, tensor: torch.Tensor) -> int | None:
        """The argument whose memory this is, or ``None``."""
        pointers = [value.untyped_storage().data_ptr() for value in self.given]
        pointer = tensor.untyped_storage().data_ptr()
        return pointers.index(pointer) if tensor.numel() and pointer in pointers else None


def eager_takes(op: torch._ops.OpOverload, value: torch.Tensor, args: tuple[Any, ...]) -> bool:
    """Whether there is such a view of this layout."""
    if op is torch.ops.aten._reshape_alias.default and not value.is_contiguous():
        return False  # its caller gives the strides, and it takes any
    try:
        op(value, *args)
    except RuntimeError:
        return False
    return True


def test_every_view_op_of_this_torch_is_called_here_or_named_as_none_of_ours():
    assert set(OPS) - NAMED == set(CALLS) | OUTSIDE
    assert set(OPS) & NAMED == (NAMED if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13) else set())
    assert not set(CALLS) & OUTSIDE


@pytest.mark.parametrize("name", CALLS)
def test_a_view_op_in_a_graph_is_read_by_kernels_and_aten_as_in_eager_mode(name):
    for number, call in enumerate(CALLS[name]):
        size, rest = (call[0], call[1:]) if call and isinstance(call[0], tuple) else ((6, 4, 5), call)
        values = [value for value in inputs(size) if eager_takes(OPS[name], value, rest)]
        assert values, "no layout has this view"
        check_views(OPS[name], values if number == 0 else values[:1], rest, symbolic=number == 0)


def check_views(op: torch._ops.OpOverload, values: list[torch.Tensor], rest: tuple[Any, ...], symbolic: bool) -> None:
    """Views of arguments and of what the graph computes, returned and read by a kernel and by ATen."""
    calls = Calls(symbolic)
    results: list[torch.fx.Node] = []
    want: list[torch.Tensor] = []
    others = [calls.input(a) if isinstance(a, torch.Tensor) else a for a in rest]
    given = [calls.input(value) for value in values]
    sources = [*zip(given, values, strict=True), (calls.call(torch.ops.aten.add.Tensor, given[0], 1), values[0] + 1)]
    for source, value in sources:
        view, eager = calls.call(op, source, *others), op(value, *rest)
        several = isinstance(eager, list | tuple)
        for position in (0, len(eager) - 1) if several else (0,):
            part = calls.call(operator.getitem, view, position) if several else view
            real = eager[position] if several else eager
            by_aten = calls.call(operator.getitem, calls.call(torch.ops.aten.mode.default, part, 0), 0)
            results += [part, calls.call(torch.ops.aten.mul.Tensor, part, 2), by_aten]
            want += [real, real * 2, real.mode(0)[0]]
    calls.check(results, want)
