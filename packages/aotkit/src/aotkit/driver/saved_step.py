"""A compiled training step: called, saved and loaded. What this module imports is what a deployed process needs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from aotkit_cache import CacheError, Uncacheable
from aotkit_cache.sealed import unseal
from aotkit_functionalize import Unsupported
from aotkit_inductor_lower.runtime import BindError
from aotkit_runtime_wrappers import AliasingChangedError, WrapperError

from .._dynamo_frames import hide_from_dynamo
from ..artifact.custom_ops import check_operators
from ..artifact.graph_inputs import GraphInput, InputCheck, InputContract
from ..artifact.module_settings import ModuleSettings
from ..artifact.package_file import read_weights, write_block
from ..artifact.records import Artifact
from ..artifact.structure import flatten_like, rebuild_structure
from ..artifact.torch_state import outside_of_modes, state_of_call, tell_state
from ..artifact.values import value_to_json
from ..errors import GuardError, PackageError
from .bind import bind
from .package import check_environment
from .process import collections_put_off

__all__ = ["FORMAT", "StateSlot", "TrainingStep", "load_step", "why_not_trained"]

FORMAT = 2


@dataclass(frozen=True, slots=True)
class StateSlot:
    """One tensor of an optimizer's state: ``key`` of the weight at the index ``weight``."""

    weight: int
    key: str


class TrainingStep:
    """A compiled step; made by :func:`aotkit.saved.compile_step` or :func:`aotkit.saved.load_step`.

    A loaded one has no tensors until :meth:`bind` or :meth:`use_weights` gives it some. A call computes the loss and
    the gradients, and updates the parameters, the buffers and the state of the optimizer where they are.

    Attributes:
        weights: parameters and buffers by name. state: of the optimizer, by ``(name, key)``.
        learning_rates: per group of parameters; of an optimizer that is bound, its own.
    """

    def __init__(self, artifact: Artifact, described: Mapping[str, Any]) -> None:
        self._artifact, self._described = artifact, described
        self._slots = [StateSlot(*row) for row in described["slots"]]
        self._check_inputs = InputCheck(InputContract.from_json(described["contract"]))
        self._run = bind(artifact, name="step")
        self._settings = ModuleSettings(described["settings"])
        self._model: nn.Module | None = None
        self._optimizer: Any = None
        self._groups = [{row[0]: row[1] for row in group["dict"]} for group in described["groups"]]
        self.learning_rates = [_number(group["lr"]) for group in self._groups]
        self.weights: dict[str, torch.Tensor] = {}
        self.state: dict[tuple[str, str], torch.Tensor] = {}

    def bind(
        self, model: nn.Module, optimizer: Any = None, *, state: Sequence[torch.Tensor] | None = None
    ) -> TrainingStep:
        """Let calls use the parameters and buffers of ``model``, and the state and learning rates of ``optimizer``.

        Without an optimizer the state begins with zeros and is kept in :attr:`state`. Returns the step itself. Raises
        :class:`GuardError` for a model or an optimizer that the step was not compiled for, and where there is no state
        to begin with: that of an optimizer which does not begin with zeros.
        """
        found, places = _tensors_of(model), self._described["places"]
        names = self._described["weights"]
        odd = sorted(set(places) ^ set(found))
        odd = odd or [name for name, place in places.items() if found[name] is not found[names[place]]]
        if odd:
            raise GuardError(f"the model is not such a one as the step was compiled for: {', '.join(odd[:8])}")
        self._settings.check(model)
        self._model = model
        self._use({name: found[name] for name in names}, optimizer, state)
        return self

    def use_weights(self, weights: Mapping[str, torch.Tensor] | str | os.PathLike[str]) -> TrainingStep:
        """Let calls use these tensors, or those of a safetensors file, which are read and private; no module is needed.

        Returns the step itself. Raises :class:`GuardError` for names or shapes that the step was not compiled for.
        """
        given = read_weights(weights) if isinstance(weights, str | os.PathLike) else dict(weights)
        names = self._described["weights"]
        for name, place in self._described["places"].items():  # a file may have a tensor by any of its names
            if name in given:
                given.setdefault(names[place], given[name])
        odd = sorted(set(names) - set(given)) + sorted(set(given) - set(self._described["places"]))
        if odd:
            raise GuardError(f"these are not the weights that the step was compiled for: {', '.join(odd[:8])}")
        self._model = None
        self._use({name: given[name] for name in names}, None, None)
        return self

    def _use(self, weights: dict[str, torch.Tensor], optimizer: Any, state: Sequence[torch.Tensor] | None) -> None:
        if optimizer is not None:
            self._check_optimizer(optimizer, weights)
        self.state = self._find_state(weights, optimizer, state)
        self.weights, self._optimizer = weights, optimizer
        if optimizer is not None:
            self.learning_rates = [float(group["lr"]) for group in optimizer.param_groups]

    def _find_state(
        self, weights: Mapping[str, torch.Tensor], optimizer: Any, state: Sequence[torch.Tensor] | None
    ) -> dict[tuple[str, str], torch.Tensor]:
        """The tensors of the state: the optimizer's own, where it has them; else ``state``; else zeros, which it gets.

        Raises :class:`GuardError` where there is none, and zeros are not what the optimizer begins with.
        """
        names = self._described["weights"]
        inputs = self._check_inputs.contract.inputs[len(names) :]
        kept: dict[tuple[str, str], torch.Tensor] = {}
        for number, (slot, wanted) in enumerate(zip(self._slots, inputs, strict=False)):
            name = names[slot.weight]
            held = None if optimizer is None else optimizer.state.get(weights[name], {}).get(slot.key)
            if held is None:
                held = self._first_state(wanted) if state is None else state[number]
                if optimizer is not None:
                    optimizer.state[weights[name]][slot.key] = held
            kept[name, slot.key] = held
        return kept

    def _first_state(self, wanted: GraphInput) -> torch.Tensor:
        if not self._described["begins_with_zeros"]:
            raise GuardError(
                f"{wanted.name} is not there, and the state of {self._described['optimizer']} before its first step is "
                "not known; take a step with the optimizer first, or load its state"
            )
        kind: torch.dtype = getattr(torch, wanted.dtype.removeprefix("torch."))
        return torch.empty_strided(wanted.shape, wanted.stride, dtype=kind, device=wanted.device).zero_()

    def _check_optimizer(self, optimizer: Any, weights: Mapping[str, torch.Tensor]) -> None:
        if type(optimizer).__qualname__ != self._described["optimizer"]:
            made = self._described["optimizer"]
            raise GuardError(f"the optimizer is a {type(optimizer).__qualname__}; the step was compiled for {made}")
        places = {id(value): index for index, value in enumerate(weights.values())}
        members = [[places.get(id(p)) for p in group["params"]] for group in optimizer.param_groups]
        if members != self._described["members"]:
            raise GuardError(
                "the optimizer's groups have other parameters than when the step was compiled, or the model has"
            )
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            raise GuardError("the optimizer has hooks of its step, which a compiled step does not call")
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                reason = why_not_trained(parameter)
                if reason is not None:
                    raise GuardError(f"a parameter of the optimizer {reason}")
        self._check_groups(optimizer)

    def _check_groups(self, optimizer: Any) -> None:
        for number, (group, made) in enumerate(zip(optimizer.param_groups, self._groups, strict=True)):
            for name, wanted in made.items():
                if name not in ("lr", "foreach", "fused", "capturable") and value_to_json(group.get(name)) != wanted:
                    raise GuardError(f"the setting {name} of group {number} is {group.get(name)!r}, and was {wanted}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step: returns what the loss function returned, without a backward.

        Raises :class:`GuardError` for a call that the step was not compiled for.
        """
        if not self.weights:
            raise GuardError("the step has no weights yet: bind(model, optimizer) it, or use_weights(...)")
        flat = self._flat(args, kwargs)
        here = value_to_json(state_of_call())
        if here != self._described["state"]:
            tell_state(here, self._described["state"])
        self._check_inputs(flat)
        try:
            with torch.no_grad():
                results = self._run(flat)
        except AliasingChangedError as error:  # raised before anything ran
            raise GuardError(f"tensors share memory in another way than when it was compiled: {error}") from None
        if self._optimizer is not None:
            self._optimizer._opt_called = True  # schedulers of learning rates look whether there was a step
        return rebuild_structure(self._described["outputs"], results)

    def _flat(self, args: Any, kwargs: Any) -> list[Any]:
        leaves: list[Any] = []
        try:
            flatten_like(self._described["inputs"], [list(args), kwargs], leaves)
        except TypeError as error:
            raise GuardError(str(error).replace("the package", "the step")) from None
        if self._model is not None:
            self._settings.check(self._model)
            held = _tensors_of(self._model)
            self.weights = {name: held[name] for name in self._described["weights"]}
        if self._optimizer is not None:  # whose state may be another one, loaded or cleared
            self._check_optimizer(self._optimizer, self.weights)
            self.state = self._find_state(self.weights, self._optimizer, None)
            self.learning_rates = [float(group["lr"]) for group in self._optimizer.param_groups]
        rates = [torch.tensor(rate, dtype=torch.float64, device="cpu") for rate in self.learning_rates]
        return [*(w.detach() for w in self.weights.values()), *self.state.values(), *rates, *leaves]

    def save(self, path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> None:
        """Write the step to a file that :func:`aotkit.saved.load_step` reads: native code, no weights and no state.

        Raises :class:`PackageError` for a step that has no form in a file.
        """
        reason = self._artifact.unportable()
        if reason is not None:
            raise PackageError(f"the step can't be saved: {reason}")
        try:
            sections, artifact = self._artifact.to_sections()
        except (Unsupported, Uncacheable) as error:
            raise PackageError(f"the step can't be saved: {error}") from error
        write_block(path, sections, {"artifact": artifact, "step": dict(self._described)}, signing_key)

    def __repr__(self) -> str:
        return f"<training step of {len(self._described['weights'])} tensors by {self._described['optimizer']}>"


@collections_put_off()
def load_step(path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> TrainingStep:
    """The step that :meth:`TrainingStep.save` wrote. Neither Dynamo nor a stage of a compile is imported.

    A step holds native code, which runs in this process: load only files that you trust. With ``signing_key``, a file
    that was not signed with it is refused unread.

    Raises :class:`PackageError` if the file is damaged, was made for another torch or processor, or lacks the
    signature, or if a custom operator has changed since.
    """
    try:
        with open(path, "rb") as file:
            entry = unseal(file.read(), signing_key)
    except OSError as error:
        raise PackageError(f"can't read {os.fspath(path)}: {error}") from error
    except CacheError as error:
        raise PackageError(f"{os.fspath(path)} can't be used: {error}") from error
    described: Any = entry.meta.get("step")
    if described is None or described["format"] != FORMAT:
        raise PackageError(f"{os.fspath(path)} holds no training step of this version; compile it again")
    check_environment(described["environment"])
    check_operators(described["operators"])
    try:
        with outside_of_modes(), torch.inference_mode(False):  # it serves other calls, too
            return TrainingStep(Artifact.from_sections(entry.sections, entry.meta["artifact"]), described)  # type: ignore[arg-type]
    except (BindError, WrapperError, ValueError, KeyError) as error:
        raise PackageError(f"{os.fspath(path)} can't be loaded: {error}") from error


def why_not_trained(parameter: torch.Tensor) -> str | None:
    """Why a compiled step can't train a parameter, which it differentiates and updates without autograd's own ways."""
    if not parameter.requires_grad:
        return "does not require grad"
    hooks = parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None)
    return "has hooks for its gradient, which a compiled step does not call" if hooks else None


def _tensors_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by each of their names."""
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))
    return found


def _number(form: Any) -> float:
    """A learning rate as it was written: a number, or the text of one."""
    return float(form["float"]) if isinstance(form, dict) and "float" in form else float(form)


hide_from_dynamo(TrainingStep.__call__, "a saved training step is no part of a graph")
