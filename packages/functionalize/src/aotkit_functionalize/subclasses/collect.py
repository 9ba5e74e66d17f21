"""Metadata of a run with tensor subclasses: of the dense graph, and of what the caller sees.

Note [Two contracts from one run]
    The tensors inside of subclasses are functional tensors, so what was written to and what shares memory is asked of
    them, by the same code as for plain tensors: that gives the contract of the dense graph. Autograd knows the
    wrappers only, so what has a gradient, and which result is a view as autograd has it, is asked of these. A result
    that is a view of an argument or of another result is taken anew of that by a view operation of the wrapper; here
    it is tried out that this gives the same tensors inside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import torch

from .. import _torch_compat as compat
from ..aliases import carries_gradient, gradient_reaches
from ..errors import OverlappingMutation, Unsupported
from ..inputs import FunctionInput
from ..metadata import GraphMetadata
from ..records import (
    BackwardWrite,
    CallContract,
    InputInfo,
    OutputInfo,
    OutputKind,
    SymbolBinding,
    TangentInfo,
    TensorMeta,
    ViewSpec,
)
from ..symbols import bind_symbols, is_symbolic, tensor_meta
from ..tangents import check_shapes_that_autograd_knows, is_differentiable, is_training_graph, tangent_meta
from ..unbacked_symbols import unbacked_symbols
from ..wrap import from_functional
from .arguments import SubclassInput, check_layer, read_size
from .meta import (
    Opaque,
    SubclassBoundary,
    SubclassMeta,
    SubclassValue,
    TensorSource,
    attributes_at_capture,
    describe,
    is_subclass,
    tensors_inside,
)
from .mutations import subclass_input_info
from .values import check_functional, common_bases, expected_tangent, plain_value, root, traced_layout
from .views import view_of_wrapper

__all__ = ["SubclassRun", "has_subclasses"]

Dense = Callable[[Sequence[FunctionInput], Sequence[Any]], tuple[GraphMetadata, list[Any]]]
_ALIASES = (OutputKind.INPUT, OutputKind.ALIAS_OF_INPUT, OutputKind.ALIAS_OF_OUTPUT)


def has_subclasses(inputs: Sequence[FunctionInput], outputs: Sequence[Any]) -> bool:
    """Whether a tensor subclass goes in or comes out."""
    return any(isinstance(i, SubclassInput) for i in inputs) or any(is_subclass(output) for output in outputs)


class SubclassRun:
    """A run whose arguments and results are subclasses or hold none; see Note [Two contracts from one run].

    Attributes:
        outer_values: per forward output of the caller's side, the value; wrappers hold functional tensors.
        tangents: per tangent of the caller's side, a plain wrapper or tensor like the gradient that is expected.
    """

    def __init__(self, inputs: Sequence[FunctionInput], outputs: Sequence[Any], sizes: Sequence[SymbolBinding]) -> None:
        check_layer()
        self.inputs, self.outputs, self.sizes = inputs, outputs, sizes
        self.outer_values: list[Any] = []
        self.tangents: list[Any] = []
        self.forward: list[SubclassValue] = []
        self.input_owner: list[tuple[int, int]] = []  # per dense input: argument, and which tensor inside it
        self.output_owner: list[tuple[int, int]] = []
        self.bases = common_bases(inputs, outputs)
        self.dense_inputs = self._dense_inputs()
        self.dense_outputs = self._dense_outputs()
        self.opaque = self._opaque_attributes()

    # -- taking apart ----------------------------------------------------------------------------------

    def _dense_inputs(self) -> list[FunctionInput]:
        dense: list[FunctionInput] = []
        for entered in self.inputs:
            parts = entered.parts if isinstance(entered, SubclassInput) else [entered]
            for number, part in enumerate(parts):
                self.input_owner.append((entered.index, number))
                dense.append(replace(part, index=len(dense)))
        for binding in self.sizes:
            value = read_size(self.inputs[binding.input_index].original, binding)
            self.input_owner.append((-1, 0))
            dense.append(FunctionInput(len(dense), value, value))
        return dense

    def _dense_outputs(self) -> list[Any]:
        dense: list[Any] = []
        for index, output in enumerate((*self.outputs, *self.bases)):
            inside = list(tensors_inside(output))
            if is_subclass(output):
                check_functional(index, output, inside)
            self.output_owner += [(index, number) for number in range(len(inside))]
            dense += inside
        return dense

    def _opaque_attributes(self) -> dict[int, Opaque]:
        found: dict[int, Opaque] = {}

        def look(value: Any, index: int, path: tuple[str, ...]) -> None:
            for name, inner in attributes_at_capture(value)[0]:
                if is_subclass(inner):
                    look(inner, index, (*path, name))
                elif not isinstance(inner, torch.Tensor):
                    found.setdefault(id(inner), Opaque(index, (*path, name)))

        for entered in self.inputs:
            if isinstance(entered, SubclassInput):
                look(entered.value, entered.index, ())
            elif not entered.is_tensor and not isinstance(entered.value, torch.SymInt | int | float | bool | None):
                found.setdefault(id(entered.value), Opaque(entered.index, ()))
        return found

    # -- the two contracts -----------------------------------------------------------------------------

    def collect(self, dense: Dense, training: bool | None, grad_mode: bool) -> tuple[GraphMetadata, list[Any]]:
        """The metadata, dense on the outside and the caller's in its ``subclasses``, and the dense forward values."""
        try:
            inner, values = dense(self.dense_inputs, self.dense_outputs)
        except OverlappingMutation as overlap:
            raise self._caller_overlap(overlap) from overlap
        _check_lazy_bits(inner)
        if any(binding.of_output for binding in inner.symbols):
            raise Unsupported(
                "a size depends on the elements of a tensor, and a tensor subclass goes in or comes out",
                "what a subclass is put together of is worked out from the sizes of inputs",
                "Compute it outside of the compiled region",
            )
        inputs = self._input_infos(inner)
        num_mutated = len(self.forward)
        outputs = self._output_infos(inner)
        for position in range(len(values) - len(inner.intermediate_bases), len(values)):
            self._forward_value(values[position], SubclassValue((TensorSource("forward", position),)))
        bases = inner.intermediate_bases + tuple(self._place_bases(inner))
        wanted = grad_mode and training is not False
        differentiable = [wanted and is_differentiable(value) for value in self.outer_values]
        for info in inputs:
            if info.updated_output is not None and (info.mutation_under_no_grad or info.mutation_hidden_from_autograd):
                differentiable[info.updated_output] = False
        has_joint = is_training_graph(differentiable, self.inputs, training, grad_mode)
        check_shapes_that_autograd_knows(inputs, outputs, has_joint)
        if not has_joint:
            differentiable = [False] * len(self.outer_values)
        is_training = any(differentiable)
        subclasses = tuple(i.subclass if isinstance(i, SubclassInput) else None for i in self.inputs)
        tangents = tuple(self._outer_tangents(differentiable))
        told = bind_symbols([i.original for i in self.inputs])
        untold = unbacked_symbols(told, outputs, [*bases, *(t.meta for t in tangents)])
        outer = CallContract(
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            tangents=tangents,
            symbols=(*told, *(self._told_by_results(untold) if untold else ())),
            effects=inner.effects,
            num_forward_outputs=len(self.forward),
            num_mutated=num_mutated,
            intermediate_bases=bases,
            forward_requires_grad=tuple(differentiable),
            differentiable_inputs=tuple(i.index for i in self.inputs if i.leaf is not None) if is_training else (),
            is_training=is_training,
        )
        boundary = SubclassBoundary(
            outer, subclasses, tuple(self.sizes), tuple(self.forward), self._tangent_subclasses()
        )
        return self._dense_metadata(inner, boundary), values

    def _place_bases(self, inner: GraphMetadata) -> list[TensorMeta]:
        """Bases that are subclasses come after the plain ones."""
        metas, position = [], sum(1 for owner, _ in self.output_owner if owner < len(self.outputs))
        for base in self.bases:
            count = sum(1 for _ in tensors_inside(base))
            parts = [self._part(part, inner) for part in inner.outputs[position : position + count]]
            position += count
            self._forward_value(base, SubclassValue(tuple(parts), self._subclass(base, "the base of several outputs")))
            metas.append(tensor_meta(base, requires_grad=carries_gradient(base)))
        return metas

    def _dense_metadata(self, inner: GraphMetadata, boundary: SubclassBoundary) -> GraphMetadata:
        outer = boundary.outer
        positions = {
            p.index for t in outer.tangents for p in self.forward[t.forward_output].parts if p.source == "forward"
        }
        tangents: list[TangentInfo] = []
        for info, subclass in zip(outer.tangents, boundary.tangents, strict=True):
            if subclass is None:
                tangents.append(TangentInfo(self.forward[info.forward_output].parts[0].index, info.meta))
            else:
                tangents += [TangentInfo(-1, leaf) for leaf in subclass.leaves]
        wanted = set(outer.differentiable_inputs)
        return replace(
            inner,
            tangents=tuple(tangents),
            forward_requires_grad=tuple(p in positions for p in range(inner.num_forward_outputs)),
            differentiable_inputs=tuple(k for k, (owner, _) in enumerate(self.input_owner) if owner in wanted),
            is_training=outer.is_training,
            subclasses=boundary,
        )

    def _told_by_results(self, names: set[str]) -> list[SymbolBinding]:
        """Sizes of tensors inside of arguments, which the arguments do not tell, are read off what is returned."""
        tensors = (v if isinstance(v, torch.Tensor) else None for v in self.outer_values)
        values = [plain_value(v) if is_subclass(v) else v if v is None else from_functional(v) for v in tensors]
        return [replace(b, of_output=True) for b in bind_symbols(values) if b.name in names]

    def _outer_tangents(self, differentiable: Sequence[bool]) -> list[TangentInfo]:
        infos = []
        for position, value in enumerate(self.outer_values):
            if not differentiable[position]:
                continue
            tangent = expected_tangent(value)
            meta = tensor_meta(tangent, requires_grad=False) if is_subclass(tangent) else tangent_meta(tangent)
            self.tangents.append(tangent)
            infos.append(TangentInfo(position, meta))
        return infos

    def _tangent_subclasses(self) -> tuple[SubclassMeta | None, ...]:
        return tuple(
            self._subclass(tangent, f"the gradient number {number}", plain=traced_layout)
            if is_subclass(tangent)
            else None
            for number, tangent in enumerate(self.tangents)
        )

    def _subclass(
        self, value: Any, what: str, plain: Callable[[torch.Tensor], torch.Tensor] = from_functional
    ) -> SubclassMeta:
        def opaque(inner: Any, path: tuple[str, ...]) -> Opaque:
            if id(inner) not in self.opaque:
                raise Unsupported(
                    f"{what} holds in {'.'.join(path)} a {type(inner).__name__} that is neither a tensor nor an "
                    "argument, nor an attribute of one",
                    "the records have no form for it",
                    "Give it to the wrapper's context, or pass an argument that is or holds it",
                )
            return self.opaque[id(inner)]

        return describe(value, what, plain=plain, opaque=opaque)

    @property
    def parts(self) -> frozenset[int]:
        """Which of the dense inputs are inside of a subclass."""
        return frozenset(
            k for k, (i, _) in enumerate(self.input_owner) if i >= 0 and isinstance(self.inputs[i], SubclassInput)
        )

    def with_backward_writes(self, metadata: GraphMetadata, writes: tuple[BackwardWrite, ...]) -> GraphMetadata:
        """``metadata`` completed by what the backward writes to, given by dense inputs that are no parts of others."""
        if not writes:
            return metadata
        assert metadata.subclasses is not None and not self.parts.intersection(write.input for write in writes)
        of_caller = tuple(replace(write, input=self.input_owner[write.input][0]) for write in writes)
        outer = replace(metadata.subclasses.outer, backward_writes=of_caller)
        return replace(metadata, backward_writes=writes, subclasses=replace(metadata.subclasses, outer=outer))

    def with_gradients(
        self,
        metadata: GraphMetadata,
        gradients: Mapping[int, torch.Tensor | None],
        reached_by: tuple[tuple[int, ...], ...] = (),
    ) -> tuple[GraphMetadata, list[torch.Tensor]]:
        """``metadata`` completed by what the gradients of arguments are made of, and the tensors inside of these.

        ``reached_by``: see :class:`.CallContract`, of the caller's side.
        """
        assert metadata.subclasses is not None
        dense: list[torch.Tensor] = []
        records: list[SubclassValue | None] = []
        for entered in self.inputs:
            gradient = gradients.get(entered.index)
            if gradient is None:
                records.append(None)
                continue
            inside = list(tensors_inside(gradient))
            subclass = None
            if is_subclass(gradient):
                check_functional(entered.index, gradient, inside, "the gradient of input")
                subclass = self._subclass(gradient, f"the gradient of input {entered.index}")
            positions = range(len(dense), len(dense) + len(inside))
            records.append(SubclassValue(tuple(TensorSource("gradient", p) for p in positions), subclass))
            dense += inside
        outer = replace(metadata.subclasses.outer, reached_by=reached_by)
        boundary = replace(metadata.subclasses, outer=outer, gradients=tuple(records), num_gradients=len(dense))
        return replace(metadata, subclasses=boundary), dense

    def _forward_value(self, value: Any, subclass_value: SubclassValue) -> int:
        self.outer_values.append(value)
        self.forward.append(subclass_value)
        return len(self.forward) - 1

    # -- arguments -------------------------------------------------------------------------------------

    def _input_infos(self, inner: GraphMetadata) -> list[InputInfo]:
        infos: list[InputInfo] = []
        position = 0
        for entered in self.inputs:
            count = len(entered.parts) if isinstance(entered, SubclassInput) else 1
            parts = inner.inputs[position : position + count]
            position += count
            if not isinstance(entered, SubclassInput):
                info = replace(parts[0], index=entered.index)
                if info.updated_output is not None:
                    made = SubclassValue((TensorSource("forward", info.updated_output),))
                    info = replace(info, updated_output=self._forward_value(entered.value, made))
                infos.append(info)
                continue
            info = subclass_input_info(entered, parts)
            if any(part.updated_output is not None for part in parts):
                info = replace(info, updated_output=self._forward_value(entered.value, self._updated(entered, parts)))
            infos.append(info)
        return infos

    def _updated(self, entered: SubclassInput, parts: Sequence[InputInfo]) -> SubclassValue:
        subclass = self._subclass(entered.value, f"input {entered.index}")
        if entered.subclass is None or subclass.type != entered.subclass.type:
            raise Unsupported(
                f"input {entered.index} has another context after it is written to",
                "the caller's object would have to be changed after the call",
                "Return a new tensor instead",
            )
        sources = [
            TensorSource("input", p.index) if p.updated_output is None else TensorSource("forward", p.updated_output)
            for p in parts
        ]
        return SubclassValue(tuple(sources), subclass)

    def _caller_overlap(self, overlap: OverlappingMutation) -> Unsupported:
        """The refusal in terms of the caller's arguments; of plain ones it may be repaired by a synthetic base."""
        groups = tuple(tuple(sorted({self.input_owner[k][0] for k in group})) for group in overlap.groups)
        for group in groups:
            for index in group:
                if isinstance(self.inputs[index], SubclassInput):
                    named = ", ".join(f"input {i}" for i in group)
                    return Unsupported(
                        f"tensors inside of {named} share memory, one of them is written to, and input {index} is a "
                        f"{type(self.inputs[index].original).__name__}",
                        "no common base can stand for the tensors inside of a subclass",
                        "Pass clones",
                    )
        mutated = {self.input_owner[k][0] for k in overlap.mutated}
        return OverlappingMutation(groups, tuple(sorted(mutated)))

    # -- results ---------------------------------------------------------------------------------------

    def _output_infos(self, inner: GraphMetadata) -> list[OutputInfo]:
        infos: list[OutputInfo] = []
        placed: dict[int, int] = {}  # dense forward output -> the caller's, for plain tensors
        first: dict[int, int] = {}
        position = 0
        for index, output in enumerate(self.outputs):
            count = sum(1 for _ in tensors_inside(output))
            parts = inner.outputs[position : position + count]
            position += count
            twin = first.setdefault(id(output), index) if isinstance(output, torch.Tensor) else index
            if twin != index:
                infos.append(replace(infos[twin], index=index, same_as=twin))
            elif is_subclass(output):
                infos.append(self._subclass_output(index, output, parts, inner, infos))
            else:
                infos.append(self._plain_output(index, output, parts[0], inner, placed))
        return infos

    def _plain_output(
        self, index: int, output: Any, info: OutputInfo, inner: GraphMetadata, placed: dict[int, int]
    ) -> OutputInfo:
        info = replace(info, index=index, same_as=None)
        if info.kind is OutputKind.CONSTANT:
            return info
        if info.graph_output is not None:
            made = SubclassValue((TensorSource("forward", info.graph_output),))
            if info.graph_output not in placed:
                placed[info.graph_output] = self._forward_value(output, made)
            return replace(info, graph_output=placed[info.graph_output])
        if info.kind is OutputKind.ALIAS_OF_INTERMEDIATE:
            return info
        assert info.base is not None
        owners, values = (
            (self.output_owner, self.outputs)
            if info.kind is OutputKind.ALIAS_OF_OUTPUT
            else (self.input_owner, [i.value for i in self.inputs])
        )
        owner, _ = owners[info.base]
        if not is_subclass(values[owner]):
            return replace(info, base=owner)
        if carries_gradient(output):
            raise Unsupported(
                f"output {index} requires grad and shares memory with a tensor inside {type(values[owner]).__name__}",
                "autograd knows the wrapper, not the tensor inside",
                "Return a clone",
            )
        made = SubclassValue((self._part(info, inner),))
        position = self._forward_value(output, made)
        return OutputInfo(index, OutputKind.FRESH, info.meta, graph_output=position, dynamic_dims=info.dynamic_dims)

    def _part(self, info: OutputInfo, inner: GraphMetadata) -> TensorSource:
        """Where a dense result comes from."""
        if info.graph_output is not None:
            return TensorSource("forward", info.graph_output)
        assert info.base is not None
        if info.kind is OutputKind.INPUT:
            owner, meta = self.inputs[self.input_owner[info.base][0]], info.meta
            if isinstance(owner, SubclassInput) or not owner.requires_grad or meta is None:
                return TensorSource("input", info.base)
            detached = ViewSpec(meta.dtype, meta.sizes, meta.strides, 0, requires_grad=False)
            return TensorSource("input", info.base, detached, meta.dtype)
        if info.kind is OutputKind.ALIAS_OF_INPUT:
            base = inner.inputs[info.base].meta
            source, position = "input", info.base
        elif info.kind is OutputKind.ALIAS_OF_INTERMEDIATE:
            base = inner.intermediate_bases[info.base]
            source, position = "forward", inner.num_forward_outputs - len(inner.intermediate_bases) + info.base
        else:
            twin = inner.outputs[info.base]
            if twin.graph_output is None:
                raise Unsupported(
                    f"a tensor inside of output {info.index} is a view of a view",
                    "it is not known which result of the graph holds its memory",
                    "Return a clone",
                )
            base, source, position = twin.meta, "forward", twin.graph_output
        return TensorSource(source, position, info.view, None if base is None else base.dtype)

    def _subclass_output(
        self, index: int, output: Any, parts: Sequence[OutputInfo], inner: GraphMetadata, infos: Sequence[OutputInfo]
    ) -> OutputInfo:
        meta = tensor_meta(output, requires_grad=bool(output.requires_grad))
        dynamic = tuple(i for i, size in enumerate(output.shape) if is_symbolic(size))
        for entered in self.inputs:
            if entered.value is output:
                return OutputInfo(index, OutputKind.INPUT, meta, base=entered.index, dynamic_dims=dynamic)
        alias = self._alias(index, output, parts, inner, infos)
        if alias is not None:
            return replace(alias, meta=meta, dynamic_dims=dynamic)
        if output.requires_grad and not carries_gradient(output):
            raise Unsupported(
                f"output {index} is a {type(output).__name__} that requires grad and has no history",
                "a result of a compiled graph is no leaf of autograd",
                "Call requires_grad_() on it outside of the compiled region",
            )
        made = SubclassValue(
            tuple(self._part(part, inner) for part in parts), self._subclass(output, f"output {index}")
        )
        position = self._forward_value(output, made)
        meta = replace(meta, requires_grad=carries_gradient(output))
        return OutputInfo(index, OutputKind.FRESH, meta, graph_output=position, dynamic_dims=dynamic)

    def _alias(
        self, index: int, output: Any, parts: Sequence[OutputInfo], inner: GraphMetadata, infos: Sequence[OutputInfo]
    ) -> OutputInfo | None:
        """The record of a result that is a view of an argument or of another result, as far as autograd knows."""
        found = self._common_base(parts)
        if found is None:
            return None
        kind, owner = found
        results = (*self.outputs, *self.bases)
        base = self.inputs[owner].value if kind is OutputKind.ALIAS_OF_INPUT else results[owner]
        declared = compat.outer_storage_identity(output) == compat.outer_storage_identity(base)
        if root(output) is not root(base):
            if not declared:
                return None  # the class shares memory without telling anyone; so does the result that we assemble
            if carries_gradient(output):
                self._refuse_view(index, output, "another value, from which it was detached before it was written to")
        plain = self.inputs[owner].original if kind is OutputKind.ALIAS_OF_INPUT else plain_value(base)
        layouts = [part.meta for part in parts if part.meta is not None]
        view = view_of_wrapper(plain, output, layouts)
        if view is None:
            self._refuse_view(index, output, f"{'input' if kind is OutputKind.ALIAS_OF_INPUT else 'output'} {owner}")
        if kind is OutputKind.ALIAS_OF_OUTPUT and owner < len(infos) and infos[owner].kind is not OutputKind.FRESH:
            self._refuse_view(index, output, f"output {owner}, which is a view itself")
        claims = bool(output.requires_grad)
        lost = claims and not gradient_reaches(output, base)
        if owner >= len(self.outputs) and kind is OutputKind.ALIAS_OF_OUTPUT:
            kind, owner = OutputKind.ALIAS_OF_INTERMEDIATE, owner - len(self.outputs) + len(inner.intermediate_bases)
        detached = not output._is_view() and not carries_gradient(output)
        view = replace(view, requires_grad=claims, under_no_grad=lost, detached=detached)
        return OutputInfo(index, kind, base=owner, view=view)

    def _common_base(self, parts: Sequence[OutputInfo]) -> tuple[OutputKind, int] | None:
        """The one argument or result whose tensors, in the same places, all parts are views of."""
        owners: set[tuple[bool, int]] = set()
        for number, part in enumerate(parts):
            if part.kind not in _ALIASES or part.base is None:
                return None
            of_output = part.kind is OutputKind.ALIAS_OF_OUTPUT
            owner, place = (self.output_owner if of_output else self.input_owner)[part.base]
            value = (*self.outputs, *self.bases)[owner] if of_output else self.inputs[owner].value
            if place != number or not is_subclass(value):
                return None
            owners.add((of_output, owner))
        if len(owners) != 1:
            return None
        ((of_output, owner),) = owners
        return (OutputKind.ALIAS_OF_OUTPUT if of_output else OutputKind.ALIAS_OF_INPUT), owner

    def _refuse_view(self, index: int, output: Any, base: str) -> NoReturn:
        raise Unsupported(
            f"output {index}, a {type(output).__name__}, is a view of {base}",
            "no view operation of the class is known to give it of a tensor that the caller has",
            "Return a clone",
        )


def _check_lazy_bits(inner: GraphMetadata) -> None:
    for output in inner.outputs:
        lazy = output.meta is not None and (output.meta.conj or output.meta.neg)
        if lazy and output.kind is not OutputKind.INPUT:
            raise Unsupported(
                "a result is lazily conjugated or negated, and a tensor subclass goes in or comes out",
                "how a subclass is put together is known for ordinary tensors",
                "Return .resolve_conj() or .resolve_neg() of it",
            )
