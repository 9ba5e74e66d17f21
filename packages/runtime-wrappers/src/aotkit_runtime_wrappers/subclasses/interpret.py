"""The adapters around a dense graph, run record by record: the oracle of :mod:`.subclass_emit`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ..boxed import BoxedCallable
from ..contract import Opaque, SubclassMeta, SubclassValue, TensorMeta, TensorSource
from ..dims import evaluate, evaluate_all
from ..lazy_backward import LazyBackward
from ..overlap import refuse_new_aliases
from ..runtime import keep_values, own_outputs, wrong_count
from .bind import AdaptedBackward
from .call import SubclassCall
from .runtime import (
    ArgumentCheck,
    Layout,
    check_gradient_classes,
    symbolic_context,
    take_view,
    tangent_parts,
    witnesses,
)

__all__ = ["interpret_subclasses"]


def interpret_subclasses(
    call: SubclassCall, compiled: BoxedCallable, lazy: LazyBackward | None
) -> tuple[BoxedCallable, LazyBackward | None]:
    """Compiled code over dense tensors as compiled code over the caller's values."""

    def forward(box: list[Any]) -> list[Any]:
        return _forward(call, compiled, box)

    def backward(run: BoxedCallable, box: list[Any]) -> list[Any]:
        return _backward(call, run, box)

    forward._boxed_call = True  # type: ignore[attr-defined]
    return forward, None if lazy is None else AdaptedBackward(lazy, backward)


def _forward(call: SubclassCall, compiled: BoxedCallable, box: list[Any]) -> list[Any]:
    boundary, arguments = call.boundary, list(box)
    dense: list[Any] = []
    for index, (value, subclass) in enumerate(zip(arguments, boundary.inputs, strict=True)):
        if subclass is not None:
            ArgumentCheck(subclass, index)(value)
        dense += [value] if subclass is None else _tensors(value, subclass)
    dense += [_read(arguments[binding.input_index], binding) for binding in boundary.sizes]
    symbols = {s.symbol: _read(dense[int(s.value[1:])], s) for s in call.symbols}
    _check_aliases(call, dense)
    box.clear()
    result = list(compiled(list(dense)))
    first, end = call.num_forward_outputs, call.num_forward_outputs + call.num_saved_tensors
    if len(result) != end + call.num_saved_symints:
        wrong_count("forward results", end + call.num_saved_symints, len(result))
    result = own_outputs(result, call.own_outputs, first, end)
    sources = {"forward": result, "input": dense}
    values = [_assemble(made, sources, lambda held: _held(held, arguments), symbols) for made in boundary.forward]
    if not call.training:
        return values
    saved = keep_values(result[first:end], [dense[k] for k in call.mutated]) if call.mutated else result[first:end]
    wrappers = [(arguments[i], [dense[k] for k in boundary.dense_positions(i)]) for i in call.witnesses[0]]
    for number in call.witnesses[1]:
        wrappers.append((values[number], [sources[p.source][p.index] for p in boundary.forward[number].parts]))
    kept = [*(symbols[name] for name in call.kept_symbols), *(_held(held, arguments) for held in call.kept_opaque)]
    return [*values, *saved, *witnesses(saved, wrappers), *result[end:], *kept]


def _check_aliases(call: SubclassCall, dense: Sequence[Any]) -> None:
    if not call.check_aliasing or not call.mutated:
        return
    others = [k for k, value in enumerate(dense) if isinstance(value, torch.Tensor) and k not in call.mutated]
    names = [" ".join(f"d{k}" for k in group) for group in (call.mutated, others)]
    refuse_new_aliases([dense[k] for k in call.mutated], [dense[k] for k in others], names[0], names[1])


def _backward(call: SubclassCall, run: BoxedCallable, box: list[Any]) -> list[Any]:
    boundary, remaining = call.boundary, iter(list(box))
    box.clear()
    dense = [next(remaining) for _ in range(call.num_saved_symints)]
    symbols = {name: next(remaining) for name in call.kept_symbols}
    opaque = {held: next(remaining) for held in call.kept_opaque}
    dense += [next(remaining) for _ in range(call.num_saved_tensors)]
    for _ in range(sum(map(len, call.witnesses))):
        next(remaining)
    tangents = list(itertools.islice(remaining, len(boundary.tangents)))
    check_gradient_classes(call.class_conditions, tangents)
    for tangent, info, subclass in zip(tangents, boundary.outer.tangents, boundary.tangents, strict=True):
        if subclass is None:
            dense.append(tangent)
        else:
            dense += tangent_parts(tangent, subclass, info.forward_output, _layouts(subclass, symbols), symbols)
    dense += remaining  # inputs that the backward writes to
    grads = run(dense)
    if len(grads) != boundary.num_gradients:
        wrong_count("dense gradients", boundary.num_gradients, len(grads))
    sources = {"gradient": grads}
    return [
        None if made is None else _assemble(made, sources, opaque.__getitem__, symbols) for made in boundary.gradients
    ]


def _read(value: Any, binding: Any) -> Any:
    if binding.source == "int":
        return value
    read = getattr(value, binding.source)
    return read() if binding.dim is None else read(binding.dim)


def _tensors(value: Any, subclass: SubclassMeta) -> list[Any]:
    found: list[Any] = []
    for name, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            found += _tensors(getattr(value, name), child)
        elif isinstance(child, TensorMeta):
            found.append(getattr(value, name))
    return found


def _layouts(subclass: SubclassMeta, symbols: Mapping[str, int]) -> list[Layout]:
    layouts = [_layout(subclass.meta, symbols)]
    for _, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            layouts += _layouts(child, symbols)
        elif isinstance(child, TensorMeta):
            layouts.append(_layout(child, symbols))
    return layouts


def _layout(meta: TensorMeta, symbols: Mapping[str, int]) -> Layout:
    return evaluate_all(meta.sizes, symbols), evaluate_all(meta.strides, symbols)


def _assemble(
    made: SubclassValue,
    sources: Mapping[str, Sequence[Any]],
    opaque: Callable[[Opaque], Any],
    symbols: Mapping[str, int],
) -> Any:
    parts = iter([_part(part, sources, symbols) for part in made.parts])
    return next(parts) if made.subclass is None else _wrap(made.subclass, parts, opaque, symbols)


def _part(part: TensorSource, sources: Mapping[str, Sequence[Any]], symbols: Mapping[str, int]) -> Any:
    value, view = sources[part.source][part.index], part.view
    if view is None:
        return value
    sizes, strides = evaluate_all(view.sizes, symbols), evaluate_all(view.strides, symbols)
    return take_view(value, view, sizes, strides, evaluate(view.offset_delta, symbols))


def _wrap(
    subclass: SubclassMeta, parts: Iterator[Any], opaque: Callable[[Opaque], Any], symbols: Mapping[str, int]
) -> Any:
    inner: dict[str, Any] = {}
    for name, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            inner[name] = _wrap(child, parts, opaque, symbols)
        elif isinstance(child, Opaque):
            inner[name] = opaque(child)
        else:
            inner[name] = next(parts)
    context = symbolic_context(subclass.type.context, symbols)
    return subclass.type.cls.__tensor_unflatten__(inner, context, *_layout(subclass.meta, symbols))


def _held(opaque: Opaque, arguments: Sequence[Any]) -> Any:
    value = arguments[opaque.input_index]
    for name in opaque.path:
        value = getattr(value, name)
    return value
