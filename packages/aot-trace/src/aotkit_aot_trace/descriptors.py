"""What each input and output of a captured graph means, by descriptors in ``node.meta["desc"]``.

A graph's calling convention is positional and depends on what the function does. A pass that wants "the gradient of
parameter ``l.weight``" reads descriptors instead: ``GradAOTOutput(grad_of=ParamAOTInput(target="l.weight"))``. A
placeholder has one, the output node a tuple with one per result. They nest from the outside in: what the user passed
or got (``Plain``, ``Param``, ``Buffer``), what aliases and mutations make of it (``ViewBase``, ``InputMutation`` ..),
derivatives (``Tangent``, ``Grad``), and last the tensors inside of subclasses. Names are those of torch's descriptors.

There are none for effect tokens and random state, which are never inputs or outputs of our graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from aotkit_functionalize import GraphMetadata, records

__all__ = [
    "AOTInput",
    "AOTOutput",
    "BackwardAOTInput",
    "BufferAOTInput",
    "GradAOTOutput",
    "InputMutationAOTOutput",
    "IntermediateBaseAOTOutput",
    "ParamAOTInput",
    "PlainAOTInput",
    "PlainAOTOutput",
    "SubclassGetAttrAOTInput",
    "SubclassGetAttrAOTOutput",
    "SubclassSizeAOTInput",
    "SubclassStrideAOTInput",
    "SyntheticBaseAOTInput",
    "TangentAOTInput",
    "ViewBaseAOTInput",
    "describe_graph",
]


@dataclass(frozen=True, slots=True)
class AOTInput:
    """Of an input; ``expr()`` says in Python how it is had from what the caller passes."""

    def expr(self) -> str:
        """Readable form, unique for each input of a graph."""
        return _expr(self)


@dataclass(frozen=True, slots=True)
class AOTOutput:
    """Of an output; ``expr()`` says in Python how it is had from what the caller gets."""

    def expr(self) -> str:
        """Readable form, unique for each output of a graph."""
        return _expr(self)


@dataclass(frozen=True, slots=True)
class PlainAOTInput(AOTInput):
    """Flat argument number ``idx`` of the function, parameters and buffers not counted."""

    idx: int


@dataclass(frozen=True, slots=True)
class ParamAOTInput(AOTInput):
    """The parameter with the full name ``target``."""

    target: str


@dataclass(frozen=True, slots=True)
class BufferAOTInput(AOTInput):
    """The buffer with the full name ``target``."""

    target: str


@dataclass(frozen=True, slots=True)
class ViewBaseAOTInput(AOTInput):
    """The tensor that autograd knows as the base of ``base_of``, and of other arguments that overlap it."""

    base_of: AOTInput


@dataclass(frozen=True, slots=True)
class SyntheticBaseAOTInput(AOTInput):
    """A tensor made over the storage of ``base_of``, and of other arguments that overlap it."""

    base_of: AOTInput


@dataclass(frozen=True, slots=True)
class TangentAOTInput(AOTInput):
    """The gradient that comes in for ``output``."""

    output: AOTOutput


@dataclass(frozen=True, slots=True)
class BackwardAOTInput(AOTInput):
    """``written`` as it is when the backward runs, which writes to it."""

    written: AOTInput


@dataclass(frozen=True, slots=True)
class SubclassGetAttrAOTInput(AOTInput):
    """The tensor that the subclass ``base`` holds as ``attr``."""

    base: AOTInput
    attr: str


@dataclass(frozen=True, slots=True)
class SubclassSizeAOTInput(AOTInput):
    """The size of dimension ``idx`` of the subclass ``base``, which is symbolic."""

    base: AOTInput
    idx: int


@dataclass(frozen=True, slots=True)
class SubclassStrideAOTInput(AOTInput):
    """The stride of dimension ``idx`` of the subclass ``base``, which is symbolic."""

    base: AOTInput
    idx: int


@dataclass(frozen=True, slots=True)
class PlainAOTOutput(AOTOutput):
    """Flat result number ``idx`` of the function."""

    idx: int


@dataclass(frozen=True, slots=True)
class InputMutationAOTOutput(AOTOutput):
    """The new value of ``mutated_input``, which the function writes to."""

    mutated_input: AOTInput


@dataclass(frozen=True, slots=True)
class IntermediateBaseAOTOutput(AOTOutput):
    """The tensor that ``base_of``, and perhaps other results, are views of."""

    base_of: AOTOutput


@dataclass(frozen=True, slots=True)
class GradAOTOutput(AOTOutput):
    """The gradient of ``grad_of``; the graph may return ``None`` for it."""

    grad_of: AOTInput


@dataclass(frozen=True, slots=True)
class SubclassGetAttrAOTOutput(AOTOutput):
    """The tensor that the subclass ``base`` will hold as ``attr``."""

    base: AOTOutput
    attr: str


_FORMS = {
    "PlainAOTInput": "args[{0}]",
    "ParamAOTInput": "self.get_parameter({0!r})",
    "BufferAOTInput": "self.get_buffer({0!r})",
    "ViewBaseAOTInput": "{0}._base",
    "SyntheticBaseAOTInput": "__synthetic_base({0})",
    "TangentAOTInput": "__tangent({0})",
    "BackwardAOTInput": "__in_backward({0})",
    "SubclassSizeAOTInput": "{0}.size({1})",
    "SubclassStrideAOTInput": "{0}.stride({1})",
    "SubclassGetAttrAOTInput": "{0}.{1}",
    "SubclassGetAttrAOTOutput": "{0}.{1}",
    "PlainAOTOutput": "results[{0}]",
    "InputMutationAOTOutput": "__updated({0})",
    "IntermediateBaseAOTOutput": "{0}._base",
    "GradAOTOutput": "__grad({0})",
}


def _expr(descriptor: AOTInput | AOTOutput) -> str:
    values = [getattr(descriptor, field.name) for field in fields(descriptor)]
    texts = [v.expr() if isinstance(v, AOTInput | AOTOutput) else v for v in values]
    return _FORMS[type(descriptor).__name__].format(*texts)


def describe_graph(graph: torch.fx.Graph, metadata: GraphMetadata, inputs: Sequence[AOTInput]) -> None:
    """Write descriptors into ``node.meta["desc"]`` of the placeholders and of the output node.

    ``inputs`` are those of the graph's inputs; where there are tensor subclasses, of the arguments they come from.
    """
    boundary = metadata.subclasses
    outer: records.CallContract = metadata if boundary is None else boundary.outer
    forward = _forward_outputs(outer, inputs)
    tangents: list[AOTInput] = [TangentAOTInput(forward[t.forward_output]) for t in outer.tangents]
    gradients: list[AOTOutput] = [GradAOTOutput(i) for i in inputs] if metadata.is_training else []
    late = {write.input: BackwardAOTInput(inputs[write.input]) for write in outer.backward_writes}
    for index, written in late.items():
        gradients[index] = InputMutationAOTOutput(written)
    placeholders: list[AOTInput] = [*inputs, *tangents, *late.values()]
    results: list[AOTOutput] = [*forward, *gradients]
    if boundary is not None:
        dense_inputs = [
            d for desc, subclass in zip(inputs, boundary.inputs, strict=True) for d in _inside(desc, subclass)
        ]
        sizes = {"size": SubclassSizeAOTInput, "stride": SubclassStrideAOTInput}
        dense_inputs += [sizes[s.source](inputs[s.input_index], s.dim or 0) for s in boundary.sizes]
        dense_tangents = [
            d for desc, subclass in zip(tangents, boundary.tangents, strict=True) for d in _inside(desc, subclass)
        ]
        placeholders = [*dense_inputs, *dense_tangents, *late.values()]
        results = _dense_results(metadata, forward, gradients)
    for node, descriptor in zip(graph.find_nodes(op="placeholder"), placeholders, strict=True):
        node.meta["desc"] = descriptor
    (output,) = graph.find_nodes(op="output")
    if len(output.args[0]) != len(results):
        raise ValueError(f"the graph returns {len(output.args[0])} values and its metadata describes {len(results)}")
    output.meta["desc"] = tuple(results)


def _forward_outputs(metadata: records.CallContract, inputs: Sequence[AOTInput]) -> list[AOTOutput]:
    found: dict[int, AOTOutput] = {}
    for info in metadata.inputs:
        if info.updated_output is not None:
            found[info.updated_output] = InputMutationAOTOutput(inputs[info.index])
        if info.storage is not None and info.storage.output is not None:
            found.setdefault(info.storage.output, InputMutationAOTOutput(inputs[info.index]))
    first = metadata.num_forward_outputs - len(metadata.intermediate_bases)
    for output in metadata.outputs:
        if output.graph_output is not None:
            found.setdefault(output.graph_output, PlainAOTOutput(output.index))
        elif output.kind is records.OutputKind.ALIAS_OF_INTERMEDIATE and output.base is not None:
            found.setdefault(first + output.base, IntermediateBaseAOTOutput(PlainAOTOutput(output.index)))
    return [found[position] for position in range(metadata.num_forward_outputs)]


def _inside(descriptor: Any, subclass: Any) -> Iterator[Any]:
    """Descriptors of the tensors inside of a subclass, or of what is none."""
    if subclass is None:
        yield descriptor
        return
    part = SubclassGetAttrAOTInput if isinstance(descriptor, AOTInput) else SubclassGetAttrAOTOutput
    for name, child in subclass.attrs:
        if isinstance(child, records.TensorMeta):
            yield part(descriptor, name)
        elif hasattr(child, "attrs"):
            yield from _inside(part(descriptor, name), child)


def _dense_results(
    metadata: GraphMetadata, forward: Sequence[AOTOutput], gradients: Sequence[AOTOutput]
) -> list[AOTOutput]:
    boundary = metadata.subclasses
    assert boundary is not None
    found: dict[tuple[str, int], AOTOutput] = {}
    for descriptors, subclass_value in ((forward, boundary.forward), (gradients, boundary.gradients)):
        for descriptor, value in zip(descriptors, subclass_value, strict=False):
            if value is not None:
                for part, inner in zip(value.parts, _inside(descriptor, value.subclass), strict=True):
                    found.setdefault((part.source, part.index), inner)
    plain = [found["forward", position] for position in range(metadata.num_forward_outputs)]
    return [*plain, *(found["gradient", position] for position in range(boundary.num_gradients))]
