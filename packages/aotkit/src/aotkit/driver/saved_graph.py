"""One compiled graph of Dynamo that can be written and read: what stands behind torch's own way to save a compile.

Note [Saved by torch]
    ``torch.compile(..., backend="aotkit").aot_compile(...)`` wants from a backend a callable whose class turns it into
    bytes and back; torch keeps those bytes with its own guards and bytecode, in a file of its own, which it unpickles.
    Ours are a sealed block (``aotkit_cache.sealed``) of JSON and native code: reading it runs neither a stage of a
    compile nor anything that the block says. The backward is compiled when the forward is, so a training step is all
    there. Second derivatives, and arguments that share memory in another way than the example, would need the
    compiler, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from aotkit_cache import Uncacheable
from aotkit_cache.sealed import RejectedEntry, seal, unseal
from aotkit_functionalize import Unsupported
from aotkit_inductor_lower.runtime import BindError, Placement
from aotkit_runtime_wrappers import AliasingChangedError, WrapperError
from aotkit_runtime_wrappers.placed_arguments import PlacedArguments

from ..artifact.custom_ops import check_operators
from ..artifact.graph_inputs import InputContract
from ..artifact.records import Artifact
from ..artifact.tensors import bytes_of, tensor_of
from ..errors import GuardError, PackageError
from .bind import bind
from .package import check_environment, environment_of_package
from .process import collections_put_off

__all__ = ["SavedGraph", "graph_to_sections", "load_graph_sections", "read_graph", "write_graph"]

_FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class SavedGraph:
    """A compiled graph with all that a file holds of it; call it with the graph's inputs.

    Attributes:
        artifact: forward and backward, bound in ``run``.
        attributes: tensors that the graph holds, which are arguments of the artifact after its inputs.
        options: of the compile.
        operators: the custom operators that it calls.
        contract: what the inputs have to be.
        unstorable: why it can't be written, or ``None``.
    """

    artifact: Artifact
    attributes: Sequence[torch.Tensor]
    options: dict[str, Any]
    operators: Sequence[dict[str, str]]
    contract: InputContract | None
    unstorable: str | None = None
    run: Callable[[list[Any]], Any] = field(init=False)

    def __post_init__(self) -> None:
        with collections_put_off():
            object.__setattr__(self, "run", bind(self.artifact, name="saved"))

    def __call__(self, *args: Any) -> Any:
        """Run. Raises :class:`GuardError` for arguments that share memory in another way than the example's."""
        return self.call_placed(args, None)

    def call_placed(self, args: Sequence[Any], placement: Placement | None) -> Any:
        """The same for arguments in a row, of which it may be known where they lie."""
        if placement is None or self.attributes:
            given = [*args, *self.attributes]
        else:
            given = PlacedArguments.at(args, placement.addresses, placement.before, placement.moved)
        try:
            return self.run(given)
        except AliasingChangedError as error:  # raised before anything ran
            raise GuardError(f"the arguments share memory in another way than when it was compiled: {error}") from None


def graph_to_sections(graph: SavedGraph) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Named bytes and JSON metadata. Raises :class:`PackageError` for what has no form in a file."""
    if graph.unstorable is not None or graph.contract is None:
        raise PackageError(f"the compiled function can't be saved: {graph.unstorable}")
    try:
        sections, described = graph.artifact.to_sections()
    except (Unsupported, Uncacheable) as error:
        raise PackageError(f"the compiled function can't be saved: {error}") from error
    attributes = []
    for number, value in enumerate(graph.attributes):
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
            raise PackageError("the compiled function can't be saved: it holds a constant that is no plain tensor")
        sections[f"attribute{number}"] = bytes_of(value.detach())
        shape, stride = list(value.shape), list(value.stride())
        attributes.append([str(value.dtype), shape, stride, str(value.device), value.requires_grad])
    meta = {
        "format": _FORMAT,
        "environment": environment_of_package(graph.options["processor"], _device_of(graph)),
        "artifact": described,
        "attributes": attributes,
        "options": graph.options,
        "operators": list(graph.operators),
        "contract": graph.contract.to_json(),
    }
    return sections, meta


def load_graph_sections(sections: Any, meta: Any) -> SavedGraph:
    """The inverse of :func:`graph_to_sections`. Raises :class:`PackageError` for what can't run here."""
    if meta.get("format") != _FORMAT:
        raise PackageError(
            f"the saved function has format {meta.get('format')}, and this version reads format {_FORMAT}; compile it "
            "again"
        )
    check_environment(meta["environment"])
    check_operators(meta["operators"])
    attributes = []
    for number, (dtype, shape, stride, device, requires_grad) in enumerate(meta["attributes"]):
        value = tensor_of(sections[f"attribute{number}"], dtype, shape, stride, device)
        attributes.append(value.requires_grad_() if requires_grad else value)
    contract = InputContract.from_json(meta["contract"])
    try:
        artifact = Artifact.from_sections(sections, meta["artifact"])
        return SavedGraph(artifact, attributes, meta["options"], meta["operators"], contract)
    except (BindError, WrapperError, ValueError, KeyError) as error:
        raise PackageError(f"the saved function can't be loaded: {error}") from error


def write_graph(graph: SavedGraph, signing_key: bytes | str | None = None) -> bytes:
    """The sealed block of a graph. Raises :class:`PackageError` for what has no form in a file."""
    sections, meta = graph_to_sections(graph)
    return seal(sections, meta, signing_key)


def read_graph(data: bytes, signing_key: bytes | str | None = None) -> SavedGraph:
    """The graph in a sealed block. Raises :class:`PackageError` for one that is damaged or can't run here."""
    try:
        entry = unseal(data, signing_key)
    except RejectedEntry as error:
        raise PackageError(f"the saved function can't be read: {error}") from error
    return load_graph_sections(entry.sections, entry.meta)


def _device_of(graph: SavedGraph) -> torch.device:
    """The only CUDA device of the inputs, or the CPU."""
    assert graph.contract is not None
    devices = [entry.device for entry in graph.contract.inputs if entry.device not in ("", "cpu")]
    return torch.device(devices[0] if devices else "cpu")
