"""What the inputs and outputs of an exported graph stand for, by the names of its nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

from aotkit_functionalize import GraphMetadata, records

from ._records import Format

__all__ = ["BackwardSignature", "GraphSignature", "graph_signature"]


@dataclass(frozen=True, slots=True)
class BackwardSignature:
    """Names of the gradient outputs of a joint graph, and of the loss they are taken of."""

    gradients_to_parameters: Mapping[str, str]
    gradients_to_user_inputs: Mapping[str, str]
    loss_output: str


@dataclass(frozen=True, slots=True)
class GraphSignature:
    """An exported graph takes ``(*tokens, *parameters, *buffers, *user_inputs)`` and returns
    ``(*tokens, *new values of what is mutated, *user_outputs, *gradients)``.

    Inputs and outputs are named by their nodes (an output that is a constant has the name ``None``), parameters and
    buffers by their full names in the module. ``in_spec`` and ``out_spec`` are the structures of ``(args, kwargs)``
    (parameters and buffers among the positional ones) and of the module's result. The fields are those of torch's
    signature of the same name.
    """

    parameters: list[str]
    buffers: list[str]
    user_inputs: list[str]
    user_outputs: list[str | None]
    inputs_to_parameters: Mapping[str, str]
    inputs_to_buffers: Mapping[str, str]
    buffers_to_mutate: Mapping[str, str]
    parameters_to_mutate: Mapping[str, str]
    user_inputs_to_mutate: Mapping[str, str]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    backward_signature: BackwardSignature | None
    input_tokens: list[str]
    output_tokens: list[str]

    def to_json(self) -> str:
        """JSON text; ``GraphSignature.from_json(s.to_json()) == s``."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> GraphSignature:
        """Rebuild from :meth:`to_json`. Raises ``ValueError`` for a text of another version."""
        return _FORMAT.from_text(text)


class _StructureForm:
    """A structure has torch's own JSON text."""

    def to_raw(self, spec: pytree.TreeSpec, /) -> str:
        return pytree.treespec_dumps(spec)

    def from_raw(self, raw: Any, /) -> pytree.TreeSpec:
        return pytree.treespec_loads(raw)


_FORMAT = Format(GraphSignature, "aotkit graph signature", 2, own={pytree.TreeSpec: _StructureForm()})


def graph_signature(
    graph: torch.fx.GraphModule,
    metadata: GraphMetadata,
    parameters: Sequence[str],
    buffers: Sequence[str],
    specs: tuple[pytree.TreeSpec, pytree.TreeSpec],
    loss_index: int | None = None,
) -> GraphSignature:
    """The signature of an exported graph; see :class:`GraphSignature` for the order of its inputs and outputs."""
    inputs = [node.name for node in graph.graph.find_nodes(op="placeholder")]
    outputs = [_name(value) for value in _results(graph)]
    first, last = metadata.num_mutated, metadata.num_mutated + len(metadata.outputs)
    of_tensors = [*parameters, *buffers]
    targets = dict(zip(inputs, of_tensors, strict=False))
    mutated = {str(outputs[i.updated_output]): inputs[i.index] for i in _updated(metadata)}
    kind = dict.fromkeys(inputs[: len(parameters)], "parameter")
    kind.update(dict.fromkeys(inputs[len(parameters) : len(of_tensors)], "buffer"))
    backward = None
    if loss_index is not None:
        names = [inputs[i] for i in metadata.differentiable_inputs]
        gradients = dict(zip((str(n) for n in outputs[last:]), names, strict=True))
        backward = BackwardSignature(
            {g: targets[n] for g, n in gradients.items() if n in targets},
            {g: n for g, n in gradients.items() if n not in targets},
            str(outputs[first + loss_index]),
        )
    return GraphSignature(
        parameters=list(parameters),
        buffers=list(buffers),
        user_inputs=inputs[len(of_tensors) :],
        user_outputs=outputs[first:last],
        inputs_to_parameters={n: targets[n] for n in inputs if kind.get(n) == "parameter"},
        inputs_to_buffers={n: targets[n] for n in inputs if kind.get(n) == "buffer"},
        buffers_to_mutate={o: targets[n] for o, n in mutated.items() if kind.get(n) == "buffer"},
        parameters_to_mutate={o: targets[n] for o, n in mutated.items() if kind.get(n) == "parameter"},
        user_inputs_to_mutate={o: n for o, n in mutated.items() if n not in kind},
        in_spec=specs[0],
        out_spec=specs[1],
        backward_signature=backward,
        input_tokens=[],
        output_tokens=[],
    )


def _updated(metadata: GraphMetadata) -> list[Any]:
    infos: tuple[records.InputInfo, ...] = metadata.inputs
    return [info for info in infos if info.updated_output is not None]


def _results(graph: torch.fx.GraphModule) -> list[Any]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])


def _name(value: Any) -> str | None:
    return value.name if isinstance(value, torch.fx.Node) else None
