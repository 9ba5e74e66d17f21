"""The last stage: kernels, which are called as the function was."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from aotkit_cache import Uncacheable
from aotkit_functionalize import Unsupported
from aotkit_inductor_lower.launch_plan.program_text import programs_in
from aotkit_runtime_wrappers import AliasingChangedError

from ..artifact.records import Artifact, CompiledGraph
from ..artifact.structure import rebuild_structure
from ..driver.bind import bind
from ..errors import PackageError
from ..options import Options
from .call import Call, CallError
from .costs import GraphCost, Memory
from .files import write_stage

if TYPE_CHECKING:
    from ..torch_api.live_module import LiveModule

__all__ = ["Compiled"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Compiled:
    """A compiled call: call it as the function or the module that was captured.

    Results have a backward if the capture had one. Second derivatives are refused.

    Attributes:
        call: as of :class:`.Captured`.
        options: as of :class:`.Captured`.
        artifact: all of it as data.
        costs: what :meth:`cost` gives.
        sizes: what :meth:`memory` gives.
        run: the artifact, bound, of a list of flat arguments.
        module: whose parameters and buffers a call takes; see :meth:`bind`. live: its tensors.
    """

    call: Call
    options: Options
    artifact: Artifact
    costs: Mapping[str, GraphCost]
    sizes: Memory
    run: Callable[[list[Any]], Any]
    module: nn.Module | None = None
    live: LiveModule | None = None

    @staticmethod
    def of(
        call: Call,
        options: Options,
        artifact: Artifact,
        costs: Mapping[str, GraphCost],
        memory: Memory,
        module: nn.Module | None = None,
    ) -> Compiled:
        """The stage of an artifact, which is bound here."""
        code = sum(_code_bytes(graph) for graph in (artifact.forward, artifact.backward) if graph is not None)
        run = bind(artifact, name="stage", redzones=options.redzones)
        live = None if module is None else _live(module)
        return Compiled(call, options, artifact, dict(costs), replace(memory, code=code), run, module, live)

    @property
    def kind(self) -> Literal["training", "inference"]:
        """Whether there is a backward."""
        return "training" if self.artifact.plan.call.training else "inference"

    def cost(self) -> dict[str, GraphCost]:
        """Of each graph, with its kernels."""
        return dict(self.costs)

    def memory(self) -> Memory:
        """As of the stages before, and the size of the code."""
        return self.sizes

    def bind(self, module: nn.Module) -> Compiled:
        """The same stage with the parameters and buffers of ``module``, for a stage that was captured from one such.

        They are read at every call. Raises :class:`CallError` if it has others, or is in another training mode.
        """
        live = _live(module)
        names, _, training = live.read()
        if names != self.call.weight_names:
            odd = sorted(set(names) ^ set(self.call.weight_names))
            raise CallError(f"the module is no such module as the one that was captured: {', '.join(odd[:8])}")
        _check_training(training, self.call)
        return replace(self, module=module, live=live)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run. Raises :class:`CallError` for a call that the stage was not captured for."""
        weights: list[torch.Tensor] = []
        if self.live is not None:
            names, weights, training = self.live.read()
            if names != self.call.weight_names:
                raise CallError("parameters or buffers were added to the module, or removed, since it was captured")
            _check_training(training, self.call)
        elif self.call.weights:
            raise CallError("the stage was captured from a module and has no weights of its own: bind(module) it first")
        try:
            results = self.run(self.call.flatten(weights, args, kwargs))
        except AliasingChangedError as error:  # raised before anything ran
            raise CallError(f"the arguments share memory in another way than when it was captured: {error}") from None
        return rebuild_structure(self.call.outputs, results)

    def save(self, path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> None:
        """Write the stage to a file that :func:`aotkit.staged.load` reads: it compiles nothing.

        The file holds native code, and no weights. With ``signing_key``, ``load`` wants the same.
        Raises :class:`PackageError` for what has no form in a file.
        """
        reason = self.artifact.unportable()
        if reason is not None:
            raise PackageError(f"the stage can't be saved: {reason}")
        try:
            sections, described = self.artifact.to_sections()
        except (Unsupported, Uncacheable) as error:
            raise PackageError(f"the stage can't be saved: {error}") from error
        content = {
            "call": self.call.to_json(),
            "artifact": described,
            "costs": {name: cost.to_json() for name, cost in self.costs.items()},
            "memory": self.sizes.to_json(),
        }
        write_stage(path, "compiled", content, sections, self.options, self.call.device, signing_key)

    @staticmethod
    def read(manifest: Mapping[str, Any], sections: Mapping[str, bytes], options: Options) -> Compiled:
        """What :meth:`save` wrote."""
        artifact = Artifact.from_sections(sections, manifest["artifact"])
        costs = {name: GraphCost(**row) for name, row in manifest["costs"].items()}
        return Compiled.of(Call.from_json(manifest["call"]), options, artifact, costs, Memory(**manifest["memory"]))

    def __repr__(self) -> str:
        return f"<stage compiled for {self.kind}: {', '.join(self.costs)}>"

    def __str__(self) -> str:
        lines = [f"compiled for {self.kind}", str(self.call)]
        lines += [f"  {name}: {cost}" for name, cost in self.costs.items()]
        lines.append(f"  memory: {self.sizes}")
        graphs = zip(self.costs, (self.artifact.forward, self.artifact.backward), strict=False)
        lines += [f"\n{name}: {graph.report}" for name, graph in graphs if graph is not None]
        return "\n".join(lines)


def _live(module: nn.Module) -> LiveModule:
    from ..torch_api.live_module import LiveModule  # brings the tracer, which a stage of a function does without

    return LiveModule(module)


def _check_training(training: tuple[bool, ...], call: Call) -> None:
    if training != call.training:
        raise CallError(
            "the module, or a part of it, is in another training mode than when the stage was captured: use train() or "
            "eval(), or capture it again"
        )


def _code_bytes(graph: CompiledGraph) -> int:
    return sum(len(code) for each in programs_in(graph.program()) for _, code in each.binary.sections)
