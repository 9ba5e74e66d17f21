"""A whole training step compiled: the module, the loss, the backward and the update of an optimizer, in one graph.

Note [What a step is]
    The step is captured as one function of plain tensors: parameters and buffers, the state of the optimizer, a
    learning rate per group, and the tensors of the call. The loss is differentiated and the optimizer's own ``step``
    runs while it is captured, so any optimizer may be used whose update is tensor operations. Learning rates, which
    schedulers change, are inputs. Numbers of a step that eager keeps in double precision (``lr``, ``1 - beta ** step``)
    are 0-d float64 tensors here; a call like ``addcdiv_(value=number)``, which takes a Python number only, is written
    out as a product. All other settings of a group are constants of the graph.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from aotkit_aot_trace.callables import FunctionalCall, named_tensors
from aotkit_cache import Uncacheable
from aotkit_functionalize import Unsupported

from ..artifact.custom_ops import operators_of
from ..artifact.graph_inputs import PLAIN, GraphInput, InputContract
from ..artifact.module_settings import settings_of
from ..artifact.structure import describe_structure
from ..artifact.torch_state import state_of_call
from ..artifact.values import NoForm, value_to_json
from ..driver.bugs import is_bug, line_of_function, raise_bug, raised_by_user
from ..driver.compile import capture_function, compile_captured
from ..driver.context import CompileContext
from ..driver.package import environment_of_package
from ..driver.process import deep_recursion
from ..driver.refusals import REFUSALS
from ..driver.saved_step import FORMAT, StateSlot, TrainingStep, why_not_trained
from ..driver.specializations import example_fakes, next_name
from ..driver.stages import own_stages
from ..environment import read_environment
from ..errors import CompileError, PackageError
from ..options import Options
from ..recorder import Recorder

__all__ = ["compile_step"]

# Whose state is all zeros before the first step; that of others has to be made by a step of their own.
_ZERO_STATE = frozenset({"SGD", "Adam", "AdamW", "RMSprop", "Adadelta", "Adamax", "Adagrad"})
_HOW = {"foreach": False, "fused": False, "capturable": False}


def compile_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    gradients: Callable[[list[torch.Tensor]], Any] | None = None,
    options: Options | None = None,
) -> TrainingStep:
    """Compile a training step, which a call of the result takes, and which ``save`` writes to a file::

        step = aotkit.saved.compile_step(model, optimizer, lambda model, x, y: F.cross_entropy(model(x), y), (x, y))
        step.save("step.aotkit")
        loss = step(x, y)      # forward, backward and update; gradients are not left behind

    Nothing is computed here, and neither the model nor the optimizer is changed.

    Args:
        model: with the parameters that calls begin with.
        optimizer: with the state that calls begin with. Model and optimizer are used by calls of the
            result, so that ``state_dict`` and schedulers of learning rates go on as ever.
        loss: ``loss(model, *args, **kwargs)`` returns a scalar, or a tuple that begins with it.
        args: of an example call; later ones have the same sizes.
        kwargs: those that are passed by name.
        gradients: called with the parameters when their ``grad`` is there: to clip gradients, say.
        options: of the compile.

    Raises :class:`CompileError` for what can't be compiled as one graph, and what ``loss`` raises.
    """
    chosen = (options or read_environment().options()).patch(fallback="error")
    if chosen.freezing:
        raise CompileError("the option 'freezing' is for graphs of one process; leave it out for a step")
    if chosen.cudagraphs:
        raise CompileError(
            "the option 'cudagraphs' is not for steps, which read learning rates on the CPU; leave it out"
        )
    source = _Source.of(model, optimizer, loss, gradients)
    leaves: list[Any] = []
    try:
        structure = describe_structure([list(args), dict(kwargs or {})], _is_tensor, leaves)
        groups = [value_to_json({k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    except (PackageError, NoForm) as error:
        raise CompileError(f"the step can't be compiled: {error}") from None
    function = _Function(source, args, kwargs or {})
    flat = [*(w.detach() for w in source.weights), *source.state, *source.rates(), *leaves]
    for label, value in zip(source.labels(leaves), flat, strict=True):
        if type(value) not in PLAIN:
            raise CompileError(f"steps take plain dense tensors; {label} is a {type(value).__name__}")
    artifact = _compile(function, flat, chosen, source)
    described = {
        "format": FORMAT,
        "environment": environment_of_package(chosen.processor, _device_of(flat)),
        "weights": list(source.names),
        "places": dict(source.places),
        "slots": [[slot.weight, slot.key] for slot in source.slots],
        "members": [[source.indices[id(p)] for p in group["params"]] for group in optimizer.param_groups],
        "optimizer": type(optimizer).__qualname__,
        "groups": groups,
        "inputs": structure,
        "outputs": function.structure,
        "settings": settings_of(model),
        "begins_with_zeros": _begins_with_zeros(optimizer),
        "state": value_to_json(state_of_call()),
        "contract": InputContract(list(map(_described, source.labels(leaves), flat))).to_json(),
        "operators": function.operators,
    }
    return TrainingStep(artifact, described).bind(model, optimizer, state=source.state)


@dataclass(frozen=True, slots=True)
class _Source:
    """The parts of a step.

    ``names``, ``weights``: of the distinct parameters and buffers; ``places``: of each of all names, the one of these
    that it means; ``indices``: the same by the identity of a tensor.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    loss: Callable[..., Any]
    gradients: Callable[..., Any] | None
    names: tuple[str, ...]
    weights: tuple[torch.Tensor, ...]
    places: Mapping[str, int]
    indices: Mapping[int, int]
    slots: tuple[StateSlot, ...]
    state: tuple[torch.Tensor, ...]

    @staticmethod
    def of(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Any, gradients: Any) -> _Source:
        named = named_tensors(model)
        distinct = {id(value): (name, value) for name, value in reversed(named.items())}
        distinct = dict(reversed(distinct.items()))  # in order, a tensor of several names by the first of them
        indices = {key: index for index, key in enumerate(distinct)}
        hooks = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
        if any(hooks):
            raise CompileError("the optimizer has hooks of its step, which would run once, when the step is compiled")
        for group in optimizer.param_groups:
            if group.get("differentiable"):
                raise CompileError("the optimizer is differentiable; the update of a compiled step is not")
            for parameter in group["params"]:
                if id(parameter) not in indices:
                    raise CompileError("the optimizer has a parameter that is none of the model's")
                reason = why_not_trained(parameter)
                if reason is not None:
                    raise CompileError(f"the optimizer has a parameter that {reason}")
        state = _state_of(optimizer)
        slots, values = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                for key, value in sorted(state.get(parameter, {}).items()):
                    if value is None:
                        continue
                    if not isinstance(value, torch.Tensor):
                        raise CompileError(f"the optimizer's state {key!r} is a {type(value).__name__}, and no tensor")
                    slots.append(StateSlot(indices[id(parameter)], key))
                    values.append(value)
        names = tuple(name for name, _ in distinct.values())
        weights = tuple(value for _, value in distinct.values())
        places = {name: indices[id(value)] for name, value in named.items()}
        return _Source(model, optimizer, loss, gradients, names, weights, places, indices, tuple(slots), tuple(values))

    def rates(self) -> list[torch.Tensor]:
        """The learning rate of each group, as the graph takes it."""
        return [
            torch.tensor(float(group["lr"]), dtype=torch.float64, device="cpu") for group in self.optimizer.param_groups
        ]

    def labels(self, leaves: Sequence[Any]) -> list[str]:
        """What the inputs of the graph are called."""
        state = [f"the optimizer's {slot.key} of {self.names[slot.weight]}" for slot in self.slots]
        rates = [f"the learning rate {number}" for number in range(len(self.optimizer.param_groups))]
        return [*self.names, *state, *rates, *(f"argument {number}" for number in range(len(leaves)))]


def _state_of(optimizer: torch.optim.Optimizer) -> Mapping[Any, Mapping[str, Any]]:
    """The optimizer's state; of parameters that it has not updated yet, zeros of the form that a step gives it."""
    new = [p for group in optimizer.param_groups for p in group["params"] if not optimizer.state.get(p)]
    if not new:
        return optimizer.state
    if not _begins_with_zeros(optimizer):
        if any(optimizer.state.values()):
            return optimizer.state
        raise CompileError(
            f"the state of {type(optimizer).__name__} before its first step is not known; take one step with it first"
        )
    stand_ins: dict[torch.Tensor, torch.Tensor] = {}
    groups = []
    for group in optimizer.param_groups:
        missing = [p for p in group["params"] if not optimizer.state.get(p)]
        copies = [torch.zeros_like(p, requires_grad=True) for p in missing]
        stand_ins.update(zip(missing, copies, strict=True))
        for copy in copies:
            copy.grad = torch.zeros_like(copy)
        groups.append({**group, "params": copies})
    shadow = _shadow(optimizer, groups, defaultdict(dict))
    _update_of(shadow)
    first = {
        parameter: {key: torch.zeros_like(value) for key, value in shadow.state[copy].items() if value is not None}
        for parameter, copy in stand_ins.items()
    }
    return {**optimizer.state, **first}


def _begins_with_zeros(optimizer: torch.optim.Optimizer) -> bool:
    """Whether its first step is the one that it takes with a state of zeros."""
    for group in optimizer.param_groups:
        if (group.get("momentum") and group.get("dampening")) or group.get("initial_accumulator_value"):
            return False
    return type(optimizer).__name__ in _ZERO_STATE and type(optimizer).__module__.startswith("torch.optim")


def _shadow(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]], state: Any) -> torch.optim.Optimizer:
    """The same optimizer over other tensors."""
    shadow: torch.optim.Optimizer = object.__new__(type(optimizer))
    shadow.__dict__.update(optimizer.__dict__)
    shadow.param_groups = [{**group, **{k: v for k, v in _HOW.items() if k in group}} for group in groups]
    shadow.state = state
    return shadow


def _update_of(optimizer: torch.optim.Optimizer) -> None:
    """Its step without what torch wraps around it: ranges for a profiler, which would be calls in the graph, and hooks,
    of which there are none."""
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):
        step = getattr(step, "__wrapped__", step)
    step(optimizer)


class _Function:
    """The step of flat tensors: weights, state, learning rates, tensors of the call; gives the flat results."""

    def __init__(self, source: _Source, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._source, self._args, self._kwargs = source, list(args), dict(kwargs)
        self.structure: Any = None
        self.operators: list[dict[str, str]] = []

    def __call__(self, *values: torch.Tensor) -> list[torch.Tensor]:
        source = self._source
        rest = iter(values)
        weights = [next(rest) for _ in source.weights]
        state = [next(rest) for _ in source.slots]
        rates = [next(rest) for _ in source.optimizer.param_groups]
        trained = {source.indices[id(p)] for group in source.optimizer.param_groups for p in group["params"]}
        with torch.enable_grad():
            live = [w.detach().requires_grad_() if i in trained else w for i, w in enumerate(weights)]
            call = FunctionalCall(source.model, list(source.places), strict_out_tuple=False)
            args, kwargs = _filled(self._args, rest), _filled(self._kwargs, rest)
            with _told_of_compiling():
                result = source.loss(_Bound(call, [live[place] for place in source.places.values()]), *args, **kwargs)
            loss = result[0] if isinstance(result, tuple) else result
            if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
                raise TypeError("the loss of a step is a tensor of one element, or a tuple that begins with one")
            order = sorted(trained)
            found = torch.autograd.grad(loss, [live[i] for i in order], allow_unused=True)
        with torch.no_grad():
            self._update(weights, state, rates, dict(zip(order, found, strict=True)))
            leaves: list[Any] = []
            self.structure = describe_structure(_detached(result), _is_tensor, leaves)
        return leaves

    def _update(self, weights: Any, state: Any, rates: Any, found: Mapping[int, torch.Tensor | None]) -> None:
        source = self._source
        for index, gradient in found.items():
            weights[index].grad = gradient
        if source.gradients is not None:
            source.gradients([weights[index] for index in found])
        kept: Any = defaultdict(dict)
        exact = []
        for slot, value in zip(source.slots, state, strict=True):
            number = value.dim() == 0 and value.dtype is torch.float32
            used = value.double() if number else value
            exact += [(value, used)] if number else []
            kept[weights[slot.weight]][slot.key] = used
        groups = []
        for group, rate in zip(source.optimizer.param_groups, rates, strict=True):
            members = [weights[source.indices[id(p)]] for p in group["params"]]
            groups.append({**group, "params": members, "lr": rate})
        with _NumbersAsTensors():
            _update_of(_shadow(source.optimizer, groups, kept))
        known = {(weights[slot.weight], slot.key) for slot in source.slots}
        for weight, held in kept.items():
            made = [key for key, value in held.items() if value is not None and (weight, key) not in known]
            if made:
                raise CompileError(
                    f"the optimizer makes the state {', '.join(sorted(made))} of a parameter in this step, which the "
                    "others have already; take a step with it first in which all parameters have gradients"
                )
        for value, used in exact:
            value.copy_(used)
        for index in found:
            weights[index].grad = None


@contextmanager
def _told_of_compiling() -> Iterator[None]:
    """``torch.compiler.is_compiling()`` is true inside, as in an export: models then look at no values of tensors."""
    before = torch.compiler._is_compiling_flag
    torch.compiler._is_compiling_flag = True
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before


class _Bound:
    """The model with given tensors, which a loss calls; everything else of it is the model's."""

    def __init__(self, call: FunctionalCall, tensors: Sequence[torch.Tensor]) -> None:
        self._call, self._tensors = call, tensors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*self._tensors, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the loss of a compiled step calls the model and reads nothing else of it; it asked for {name!r}"
        )


class _NumbersAsTensors(TorchFunctionMode):
    """Lets an optimizer compute with 0-d tensors where it reads numbers; see Note [What a step is]."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "item" and args[0].dim() == 0 and args[0].dtype.is_floating_point:
            return args[0]
        for key in ("alpha", "value"):
            factor = kwargs.get(key)
            if isinstance(factor, torch.Tensor) and name.rstrip("_") in ("add", "sub", "addcmul", "addcdiv"):
                del kwargs[key]
                first, *others = args
                others[0] = others[0] * factor
                return func(first, *others, **kwargs)
        return func(*args, **kwargs)


def _compile(function: _Function, flat: list[Any], options: Options, source: _Source) -> Any:
    name = next_name()
    try:
        with deep_recursion(), torch.no_grad():
            mode, fakes = example_fakes(flat, dynamic=False)
            ctx = CompileContext(
                options,
                Recorder().of_graph(name),
                own_stages(),
                name,
                num_static=len(source.weights) + len(source.slots),
                keep_input_mutations=True,
                publish=False,
                fake_mode=mode,
            )
            captured = capture_function(function, fakes, flat, ctx)
            function.operators = operators_of(captured.graph, sorted(options.cacheable))
            artifact = compile_captured(captured, ctx)
    except Uncacheable as error:
        raise CompileError(f"the step can't be compiled: {error.reason}") from error
    except (*REFUSALS, Unsupported) as refusal:
        raise CompileError(f"the step could not be compiled: {refusal}") from refusal
    except Exception as error:
        if not is_bug(error) or raised_by_user(error):
            raise
        raise_bug(error, line_of_function(source.loss))
    return artifact


def _described(name: str, value: torch.Tensor) -> GraphInput:
    return GraphInput(
        name, "tensor", str(value.dtype), list(value.shape), list(value.stride()), str(value.device),
        value.requires_grad, (value.is_conj(), value.is_neg()),
    )  # fmt: skip


def _device_of(values: Sequence[Any]) -> torch.device:
    return next((v.device for v in values if v.device.type != "cpu"), torch.device("cpu"))


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _detached(result: Any) -> Any:
    if isinstance(result, torch.Tensor):
        return result.detach()
    if isinstance(result, tuple | list):
        return type(result)(_detached(item) for item in result)
    if isinstance(result, dict):
        return {key: _detached(item) for key, item in result.items()}
    return result


def _filled(value: Any, tensors: Any) -> Any:
    """``value`` with the next of the ``tensors`` in place of each of its own."""
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, dict):
        return {key: _filled(item, tensors) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_filled(item, tensors) for item in value)
    return value
