"""Sizes that vary: bound from inputs and outputs, in records of every kind; what is bound twice, or late."""

from __future__ import annotations

from typing import Any

import torch

from aotkit_functionalize import FunctionalLayer, GraphMetadata, analyze, fake_arguments
from aotkit_functionalize.records import EffectInfo, MutationKind, OutputKind, SymbolBinding
from aotkit_functionalize.symbols import bind_symbols, dim, dims, is_symbolic, used_symbols


def _value(text: Any, symbols: dict[str, int]) -> int:
    return text if isinstance(text, int) else eval(text, {"__builtins__": {}, "min": min, "max": max}, dict(symbols))


def test_symbols_are_bound_first_from_numbers_then_sizes_then_strides_then_offsets() -> None:
    _, (x, y) = fake_arguments([torch.empty(3, 5), torch.empty(7, 5)], dynamic=True)
    rows, columns = dims(x.shape)
    assert is_symbolic(x.shape[0]) and not is_symbolic(3) and dim(4) == 4 and dim(True) == 1
    assert used_symbols([x.shape[0], 4, x.shape[0] * x.shape[1]]) == {rows, columns}
    bound = {b.name: b for b in bind_symbols([y, x, x.shape[0], "text", None])}
    assert bound[str(rows)] == SymbolBinding(str(rows), 2, "int")
    assert bound[str(columns)] == SymbolBinding(str(columns), 0, "size", 1)
    assert bound[str(dim(y.shape[0]))] == SymbolBinding(str(dim(y.shape[0])), 0, "size", 0)
    assert [b.name for b in bind_symbols([x, y])] == sorted(b.name for b in bind_symbols([x, y]))
    part = torch.empty(0)
    assert bind_symbols([part]) == ()


def test_strides_and_offsets_tell_what_no_size_does() -> None:
    _, (x,) = fake_arguments([torch.empty(6, 10)], dynamic=True)
    mode = x.fake_mode
    with mode:
        part = x[1:3, :2]
    columns = str(dim(x.shape[1]))
    assert bind_symbols([part]) == (SymbolBinding(columns, 0, "stride", 0),)
    with mode:
        flat = part.as_strided((2,), (1,), x.shape[0])
    assert SymbolBinding(str(dim(x.shape[0])), 0, "storage_offset") in bind_symbols([flat])


def _records(fn: Any, *args: Any, layer: FunctionalLayer) -> tuple[GraphMetadata, dict[str, int]]:
    metadata = analyze(fn, list(args), dynamic=True, layer=layer)
    values = {}
    for binding in metadata.symbols:
        source = args[binding.input_index]
        read = source.shape if binding.source == "size" else source.stride()
        values[binding.name] = read[binding.dim or 0]
    assert GraphMetadata.from_json(metadata.to_json()) == metadata
    return metadata, values


def test_views_and_writes_of_varying_sizes(layer: FunctionalLayer) -> None:
    def fn(x: Any, y: Any) -> list[Any]:
        x[1:].add_(1)
        y.t_()
        z = x * 2
        return [x[2:], z[1:], z.t(), y, x.shape[0] * 2, x.numel()]

    metadata, values = _records(fn, torch.empty(6, 4), torch.empty(5, 7), layer=layer)
    assert [i.mutation for i in metadata.inputs] == [MutationKind.DATA, MutationKind.METADATA]
    view = metadata.outputs[0].view
    assert view is not None and metadata.outputs[0].dynamic_dims == (0, 1)
    assert [_value(s, values) for s in (*view.sizes, *view.strides, view.offset_delta)] == [4, 4, 4, 1, 8]
    new = metadata.inputs[1].new_view
    assert new is not None and [_value(s, values) for s in (*new.sizes, *new.strides)] == [7, 5, 1, 7]
    assert [o.kind for o in metadata.outputs[1:4]] == [OutputKind.ALIAS_OF_INTERMEDIATE] * 2 + [OutputKind.INPUT]
    assert [o.kind for o in metadata.outputs[4:]] == [OutputKind.SYMINT] * 2
    assert [o.graph_output for o in metadata.outputs[4:]] == [1, 2] and metadata.num_forward_outputs == 4


def test_a_size_that_depends_on_data_is_read_off_a_result(layer: FunctionalLayer) -> None:
    def fn(x: Any) -> list[Any]:
        found = x.nonzero()
        return [found, found[:, 0]]

    metadata = analyze(fn, [torch.ones(4, 3)], layer=layer)
    (binding,) = metadata.symbols
    assert binding.of_output and binding.source == "size" and binding.dim == 0
    assert metadata.outputs[0].meta is not None and metadata.outputs[0].meta.sizes[0] == binding.name
    assert metadata.outputs[1].kind is OutputKind.ALIAS_OF_OUTPUT and metadata.outputs[1].base == 0


def test_a_number_that_no_result_tells_becomes_one(layer: FunctionalLayer) -> None:
    def fn(x: Any) -> list[Any]:
        found = x.nonzero()
        return [torch.cat([found, found]), found.new_zeros(found.shape[0] + 3)]

    metadata = analyze(fn, [torch.ones(4, 3)], layer=layer)
    (binding,) = metadata.symbols
    assert binding.of_output and binding.source == "int" and binding.input_index == 2
    assert metadata.num_forward_outputs == 3 and len(metadata.forward_requires_grad) == 3


def test_effects_are_told(layer: FunctionalLayer) -> None:
    def off(x: Any) -> list[Any]:
        torch.set_grad_enabled(False)
        return [x * 2]

    before = torch.is_grad_enabled()
    try:
        metadata = analyze(off, [torch.ones(3, requires_grad=True)], layer=layer)
    finally:
        torch.set_grad_enabled(before)
    assert metadata.effects == (EffectInfo("grad_mode", False),)
    assert analyze(lambda x: [x * 2], [torch.ones(3)], layer=layer).effects == ()
