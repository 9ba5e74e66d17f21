"""The adapters around a dense graph as straight-line Python; see Note [Where subclasses are taken apart]."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch.utils._pytree as pytree

from ..contract import Opaque, SubclassMeta, SubclassValue, SymbolicDim, TensorMeta, TensorSource
from ..dims import render, render_tuple, symbols_of
from ..emit import emit_unpack
from ..errors import PlanError
from ..source import Source
from .call import SubclassCall

__all__ = ["emit_subclasses"]


def emit_subclasses(call: SubclassCall, out: Source) -> None:
    """Write ``def dense_forward(box)`` and, of a training graph, ``def dense_backward(run, box)``.

    Then they take the place of the compiled code in the functions that follow.
    """
    _emit_forward(call, out)
    out.lines.append("")
    out.add("_forward = dense_forward", 0)
    if call.training:
        out.lines.append("")
        _emit_backward(call, out)
        out.lines.append("")
        out.add("_backward = _AdaptedBackward(_backward, dense_backward)", 0)
    out.lines.append("")


def _emit_forward(call: SubclassCall, out: Source) -> None:
    boundary = call.boundary
    out.add("def dense_forward(box):", 0)
    count = len(boundary.inputs)
    if count:
        out.add(f"[{', '.join(f'x{i}' for i in range(count))}] = box")
    position = 0
    for index, subclass in enumerate(boundary.inputs):
        if subclass is None:
            out.add(f"d{position} = x{index}")
            position += 1
            continue
        out.add(f"if _check{index}.last() is not x{index}:")
        out.add(f"_check{index}(x{index})", 2)
        for path in _paths(subclass):
            out.add(f"d{position} = x{index}.{'.'.join(path)}")
            position += 1
    for binding in boundary.sizes:
        dim = "" if binding.dim is None else binding.dim
        out.add(f"d{position} = x{binding.input_index}.{binding.source}({dim})")
        position += 1
    for symbol in call.symbols:
        out.add(f"{symbol.symbol} = {symbol.expression(symbol.value)}")
    _emit_alias_check(call, out)
    for name, held in {**_opaque_names(boundary.forward), **_kept_opaque(call)}.items():
        out.add(f"{name} = {'.'.join([f'x{held.input_index}', *map(_identifier, held.path)])}")
    out.add(f"dense = [{', '.join(f'd{k}' for k in range(call.num_dense_inputs))}]")
    out.add("box.clear()")
    unneeded = _unneeded(call)
    if unneeded:
        out.add(f"del {', '.join(unneeded)}")
    _emit_dense_call(call, out)
    for number, value in enumerate(boundary.forward):
        out.add(f"y{number} = {_subclass_value(value, out)}")
    _emit_results(call, out)


def _emit_dense_call(call: SubclassCall, out: Source) -> None:
    num_forward, num_tensors = call.num_forward_outputs, call.num_saved_tensors
    out.add("result = _dense_forward(dense)")
    emit_unpack(num_forward + num_tensors + call.num_saved_symints, num_forward, out, 1)
    if call.own_outputs:
        out.add(f"if {' or '.join(f'fw{i}._is_view()' for i in call.own_outputs)}:")
        out.add(f"result = _own_outputs(result, {call.own_outputs}, {num_forward}, {num_forward + num_tensors})", 2)
        out.add(f"[{', '.join(f'fw{i}' for i in range(num_forward))}] = result[:{num_forward}]", 2)


def _emit_results(call: SubclassCall, out: Source) -> None:
    first, end = call.num_forward_outputs, call.num_forward_outputs + call.num_saved_tensors
    results = [f"y{i}" for i in range(len(call.boundary.forward))]
    if not call.training:
        out.add(f"return [{', '.join(results)}]")
        return
    saved = f"result[{first}:{end}]"
    if call.mutated and call.num_saved_tensors:
        saved = f"_keep_values({saved}, [{', '.join(f'd{k}' for k in call.mutated)}])"
    out.add(f"saved = {saved}")
    wrappers = [f"({name}, ({inside}))" for name, inside in _witnesses(call)]
    if wrappers:
        out.add(f"seen = _witnesses(saved, ({', '.join(wrappers)},))")
    kept = ["*saved", *(["*seen"] if wrappers else []), f"*result[{end}:]", *call.kept_symbols, *_kept_opaque(call)]
    out.add(f"return [{', '.join([*results, *kept])}]")


def _witnesses(call: SubclassCall) -> list[tuple[str, str]]:
    """Expressions of wrappers, and of the tensors inside each."""
    found = []
    for index in call.witnesses[0]:
        found.append((f"x{index}", "".join(f"d{k}, " for k in call.boundary.dense_positions(index))))
    for number in call.witnesses[1]:
        names = [f"{'fw' if p.source == 'forward' else 'd'}{p.index}" for p in call.boundary.forward[number].parts]
        found.append((f"y{number}", "".join(f"{name}, " for name in names)))
    return found


def _emit_alias_check(call: SubclassCall, out: Source) -> None:
    outer = call.boundary.outer
    tensors = [k for i in outer.inputs if i.kind.value == "tensor" for k in call.boundary.dense_positions(i.index)]
    others = [k for k in tensors if k not in call.mutated]
    if not call.check_aliasing or not call.mutated or (len(call.mutated) < 2 and not others):
        return
    names = [" ".join(f"d{k}" for k in group) for group in (call.mutated, others)]
    groups = ["".join(f"d{k}, " for k in group) for group in (call.mutated, others)]
    out.add(f'_refuse_new_aliases(({groups[0]}), ({groups[1]}), "{names[0]}", "{names[1]}")')


def _unneeded(call: SubclassCall) -> list[str]:
    """Names that must not outlive the dense call, so that it can free what it has used."""
    parts = [part for value in call.boundary.forward for part in value.parts]
    needed = {f"d{part.index}" for part in parts if part.source == "input"}
    needed |= {f"x{i}" for i in call.witnesses[0]} | {f"d{k}" for k in call.mutated if call.training}
    needed |= {f"d{k}" for i in call.witnesses[0] for k in call.boundary.dense_positions(i)}
    names = [f"x{i}" for i in range(len(call.boundary.inputs))] + [f"d{k}" for k in range(call.num_dense_inputs)]
    return [name for name in names if name not in needed]


def _emit_backward(call: SubclassCall, out: Source) -> None:
    boundary = call.boundary
    out.add("def dense_backward(run, box):", 0)
    symints = call.num_saved_symints
    tensors = call.num_kept + call.num_saved_tensors
    first = tensors + sum(map(len, call.witnesses))
    kept = [*call.kept_symbols, *_kept_opaque(call)]
    if kept:
        out.add(f"[{', '.join(kept)}] = box[{symints}:{call.num_kept}]")
    nested = [first + number for number, subclass in enumerate(boundary.tangents) if subclass is not None]
    if call.class_conditions and nested:
        out.add(f"if {' or '.join(f'box[{position}] is None' for position in nested)}:")
        out.add(f"_check_gradient_classes({_constant(call.class_conditions, out)}, box[{first}:])", 2)
    values = [f"*box[:{symints}]", f"*box[{call.num_kept}:{tensors}]"]
    for number, (info, subclass) in enumerate(
        zip(boundary.outer.tangents, boundary.tangents, strict=True), start=first
    ):
        if subclass is None:
            values.append(f"box[{number}]")
            continue
        layouts = "".join(f"({render_tuple(m.sizes)}, {render_tuple(m.strides)}), " for m in _metas(subclass))
        given = f"{_constant(subclass, out)}, {info.forward_output}, ({layouts}), {_symbol_values(subclass)}"
        values.append(f"*_tangent_parts(box[{number}], {given})")
    if boundary.outer.backward_writes:
        values.append(f"*box[{first + len(boundary.tangents)}:]")
    out.add(f"dense = [{', '.join(values)}]")
    out.add("box.clear()")
    out.add("grads = run(dense)")
    out.add(f"if len(grads) != {boundary.num_gradients}:")
    out.add(f'_wrong_count("dense gradients", {boundary.num_gradients}, len(grads))', 2)
    for index, value in enumerate(boundary.gradients):
        out.add(f"g{index} = {'None' if value is None else _subclass_value(value, out)}")
    out.add(f"return [{', '.join(f'g{i}' for i in range(len(boundary.gradients)))}]")


def _metas(subclass: SubclassMeta) -> list[TensorMeta]:
    """Of the wrapper, then of everything in it, in order."""
    found = [subclass.meta]
    for _, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            found += _metas(child)
        elif isinstance(child, TensorMeta):
            found.append(child)
    return found


def _subclass_value(value: SubclassValue, out: Source) -> str:
    sources = iter([_part(part, out) for part in value.parts])
    if value.subclass is None:
        return next(sources)
    return _subclass(value.subclass, sources, out)


def _subclass(subclass: SubclassMeta, sources: Iterator[str], out: Source) -> str:
    parts: list[str] = []
    for name, child in subclass.attrs:
        if isinstance(child, SubclassMeta):
            made = _subclass(child, sources, out)
        elif isinstance(child, Opaque):
            made = _opaque_name(child)
        else:
            made = next(sources)
        parts.append(f"{name!r}: {made}")
    context = _constant(subclass.type.context, out) if subclass.type.context is not None else "None"
    if any(isinstance(leaf, SymbolicDim) for leaf in pytree.tree_leaves(subclass.type.context)):
        context = f"_symbolic_context({context}, {_symbol_values(subclass)})"
    make = _constant(subclass.type.cls.__tensor_unflatten__, out)
    sizes, strides = render_tuple(subclass.meta.sizes), render_tuple(subclass.meta.strides)
    return f"{make}({{{', '.join(parts)}}}, {context}, {sizes}, {strides})"


def _constant(value: object, out: Source) -> str:
    """A constant of its own: contexts may be equal and still not be exchangeable."""
    name = f"_a{len(out.constants)}"
    out.constants[name] = value
    return name


def _symbol_values(subclass: SubclassMeta) -> str:
    """A dictionary with the values of the symbols in the contexts of ``subclass``."""
    leaves = [leaf for inner in _subclasses(subclass) for leaf in pytree.tree_leaves(inner.type.context)]
    names = sorted(symbols_of(leaf.text for leaf in leaves if isinstance(leaf, SymbolicDim)))
    return f"{{{', '.join(f'{name!r}: {name}' for name in names)}}}"


def _subclasses(subclass: SubclassMeta) -> list[SubclassMeta]:
    return [
        subclass,
        *(inner for _, child in subclass.attrs if isinstance(child, SubclassMeta) for inner in _subclasses(child)),
    ]


def _part(part: TensorSource, out: Source) -> str:
    name = {"forward": f"fw{part.index}", "input": f"d{part.index}", "gradient": f"grads[{part.index}]"}[part.source]
    view = part.view
    if view is None:
        return name
    sizes, strides, delta = render_tuple(view.sizes), render_tuple(view.strides), render(view.offset_delta)
    return f"_take_view({name}, {_constant(view, out)}, {sizes}, {strides}, {delta})"


def _paths(subclass: SubclassMeta, before: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Attribute paths of the tensors inside."""
    found: list[tuple[str, ...]] = []
    for name, child in subclass.attrs:
        here = (*before, _identifier(name))
        if isinstance(child, SubclassMeta):
            found += _paths(child, here)
        elif isinstance(child, TensorMeta):
            found.append(here)
    return found


def _identifier(name: str) -> str:
    if not name.isidentifier():
        raise PlanError(f"a tensor subclass names the attribute {name!r}, which is no identifier")
    return name


def _opaque_name(held: Opaque) -> str:
    return f"o{held.input_index}_{'_'.join(map(_identifier, held.path))}"


def _opaque_names(values: Sequence[SubclassValue]) -> dict[str, Opaque]:
    subclasses = [
        subclass for value in values if value.subclass is not None for subclass in _subclasses(value.subclass)
    ]
    held = [child for subclass in subclasses for _, child in subclass.attrs if isinstance(child, Opaque)]
    return {_opaque_name(child): child for child in held}


def _kept_opaque(call: SubclassCall) -> dict[str, Opaque]:
    return {_opaque_name(held): held for held in call.kept_opaque}
