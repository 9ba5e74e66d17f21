"""A program in parts to a callable: its parts are bound, and the outer plan becomes a Python function of its steps.

The source of such a function holds numbers and the words of this module only, keywords of calls aside, which are
identifiers; all else is handed to it by the namespace that it runs in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .._torch_compat import modes_and_autocast_off
from .._user_kernels import KernelName, constants_from_json, find_kernel, table_of_kernels
from ..errors import BindError
from ..launch_plan.functions import LAUNCHERS, find_function, find_operator
from ..launch_plan.layout import Layout
from ..launch_plan.parts import (
    Argument,
    Body,
    BodyOf,
    CallFunction,
    CallPart,
    Complex,
    ConstantOf,
    KernelConstants,
    KernelOf,
    Named,
    OuterPlan,
    Pairs,
    Part,
    PartitionedProgram,
    Plain,
    Several,
    Step,
    ValueOf,
)
from .arena import ArenaPool
from .bind import Boxed, bind_program
from .input_checks import input_check

__all__ = ["BoundParts", "bind_parts"]

_NAMED_TYPES = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class BoundParts:
    """A program in parts in the boxed calling convention: takes one list, empties it, returns a list. Concurrent calls
    are fine."""

    _boxed_call = True

    def __init__(self, run: Callable[[list[Any]], Any], program: PartitionedProgram) -> None:
        self._run = run
        self.program = program
        device = torch.device(program.device)
        self._device = device if device.type == "cuda" else None

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._device is None:
            return list(self._run(args))
        with torch.cuda.device(self._device):
            return list(self._run(args))


def bind_parts(
    program: PartitionedProgram,
    constants: Mapping[str, torch.Tensor] | None = None,
    arenas: ArenaPool | None = None,
    *,
    redzones: bool = False,
    check_inputs: bool = False,
    label: str = "",
) -> BoundParts:
    """Make a program in parts callable, in the boxed convention. ``check_inputs``: each part looks whether it was
    compiled for what it is given; the other arguments are those of :func:`.bind_program`. In traces a part is called
    by ``label`` and its number.

    Raises :class:`BindError` where it raises that, and for an operator or a name that this torch does not have.
    """
    binder = _Binder(program, dict(constants or {}), arenas or ArenaPool(), redzones, check_inputs, label)
    return BoundParts(binder.whole(), program)


class _Binder:
    def __init__(
        self,
        program: PartitionedProgram,
        constants: Mapping[str, torch.Tensor],
        arenas: ArenaPool,
        redzones: bool,
        check_inputs: bool,
        label: str,
    ) -> None:
        missing = [name for name in program.constants if name not in constants]
        if missing:
            raise BindError(f"{program.name} needs the constant tensors {', '.join(missing)}, which were not given")
        self.program, self.constants, self.arenas = program, constants, arenas
        self.redzones, self.check_inputs, self.label = redzones, check_inputs, label
        self.parts: list[Boxed] = []
        self.bodies: list[Boxed] = []

    def whole(self) -> Callable[[list[Any]], Any]:
        """The function of the whole."""
        program = self.program
        self.parts = [self._part(part, self._label(number)) for number, part in enumerate(program.parts)]
        for body in program.bodies:
            self.bodies.append(self._body(body))
        return self._function(program.plan)

    def _label(self, number: int) -> str:
        return self.label and f"{self.label}-part{number}"

    def _part(self, part: Part, label: str) -> Boxed:
        held = {own: self.constants[name] for own, name in part.constants}
        if isinstance(part.program, PartitionedProgram):
            settings = {"redzones": self.redzones, "check_inputs": self.check_inputs}
            return bind_parts(part.program, held, self.arenas, **settings, label=label)
        bound = bind_program(part.program, held, self.arenas, redzones=self.redzones, label=label)
        if not self.check_inputs:
            return bound
        check = input_check(part.program)

        def checked(args: list[Any]) -> list[Any]:
            check(args)
            return bound(args)

        return checked

    def _body(self, body: Body) -> Boxed:
        """The boxed callable of a body, which gives what the body does: one value or several."""
        recorded = self._function(body.recorded)
        if body.part is None:
            return recorded
        compiled, layouts = self.parts[body.part], self.program.parts[body.part].layouts
        one = not isinstance(body.recorded.result, Several)
        if not layouts:
            return (lambda args: compiled(args)[0]) if one else compiled
        fits = _fits(layouts)

        def run(args: list[Any]) -> Any:
            if not fits(args):
                return recorded(args)
            results = compiled(args)
            return results[0] if one else results

        return run

    def _function(self, plan: OuterPlan) -> Callable[[list[Any]], Any]:
        source, names = _Writer(self, plan).write()
        exec(compile(source, f"<aotkit outer plan {self.program.name}>", "exec"), names)
        return names["call"]  # type: ignore[no-any-return]


class _Writer:
    """Writes the function of one outer plan. A value is let go behind the last step that takes it; arguments of a part
    are in its list only, so that it can let them go while it runs."""

    def __init__(self, binder: _Binder, plan: OuterPlan) -> None:
        self.binder, self.plan = binder, plan
        self.names: dict[str, Any] = {}
        self.known: dict[int, str] = {}

    def write(self) -> tuple[str, dict[str, Any]]:
        plan, lines = self.plan, ["def call(args):"]
        values = [f"v{number}" for number in range(plan.inputs)]
        if values:
            lines.append(f"    {', '.join(values)}{',' if len(values) == 1 else ''} = args")
        lines.append("    args.clear()")
        last = self._last_uses()
        dying: dict[int, list[int]] = {}
        for value, at in last.items():
            dying.setdefault(at, []).append(value)
        for position, step in enumerate(plan.steps):
            number = plan.inputs + position
            dead = [f"v{value}" for value in dying.get(position, ()) if value != number]
            for line in self._step(step, number, dead):
                lines.append(f"    {line}")
            if last.get(number) == position:
                lines.append(f"    v{number} = None")  # nobody takes it
        lines.append(f"    return {self._text(plan.result)}")
        return "\n".join(lines), self.names

    def _last_uses(self) -> dict[int, int]:
        """By value, the step behind which nobody takes it; results are not in it."""
        last = {self.plan.inputs + position: position for position in range(len(self.plan.steps))}
        for position, step in enumerate(self.plan.steps):
            last.update(dict.fromkeys(_values_in(_arguments(step)), position))
        for value in _values_in([self.plan.result]):
            last.pop(value, None)
        return last

    def _step(self, step: Step, number: int, dead: Sequence[str]) -> Iterator[str]:
        free = f"{' = '.join(dead)} = None" if dead else ""
        if isinstance(step, CallPart):
            yield f"box = [{', '.join(map(self._text, step.args))}]"
            for position, layout in self.binder.program.parts[step.part].layouts:
                yield f"box[{position}] = {self._name(layout.conform)}(box[{position}])"
            yield from [free] * bool(free)
            yield f"v{number} = {self._name(self.binder.parts[step.part])}(box)"
            return
        assert isinstance(step, CallFunction)
        if step.target == "higher_order.invoke_subgraph" and step.args and isinstance(step.args[0], BodyOf):
            # It calls the body, so that is called: the operator's own way there takes long beside a small body.
            yield f"box = [{', '.join(map(self._text, step.args[2:]))}]"
            yield from [free] * bool(free)
            yield f"v{number} = {self._name(self.binder.bodies[step.args[0].number])}(box)"
            return
        if step.target == "operator.getitem" and len(step.args) == 2 and not step.kwargs:
            yield f"v{number} = {self._text(step.args[0])}[{self._text(step.args[1])}]"
        else:
            args = [*map(self._text, step.args), *(f"{name}={self._text(value)}" for name, value in step.kwargs)]
            yield f"v{number} = {self._name(self._function_of(step.target))}({', '.join(args)})"
        yield from [free] * bool(free)

    def _function_of(self, target: str) -> Callable[..., Any]:
        found = _found(find_function, target)
        return _unseen(found) if target.removeprefix("higher_order.") in LAUNCHERS else found

    def _text(self, argument: Argument) -> str:
        if isinstance(argument, ValueOf):
            return f"v{argument.number}"
        if isinstance(argument, Several) and argument.kind != "slice":
            items = ", ".join(map(self._text, argument.items))
            return f"[{items}]" if argument.kind == "list" else f"({items}{',' if len(argument.items) == 1 else ''})"
        if isinstance(argument, Several):
            return f"{self._name(slice)}({', '.join(map(self._text, argument.items))})"
        if isinstance(argument, Pairs):
            return f"{{{', '.join(f'{self._name(key)}: {self._text(item)}' for key, item in argument.items)}}}"
        return self._name(self._value(argument))

    def _value(self, argument: Argument) -> Any:
        if isinstance(argument, Plain):
            return argument.value
        if isinstance(argument, BodyOf):
            return _unpacked(self.binder.bodies[argument.number])
        if isinstance(argument, ConstantOf):
            return self.binder.constants[argument.name]
        if isinstance(argument, Complex):
            return complex(argument.real, argument.imag)
        if isinstance(argument, KernelOf):
            return _found(_kernel_place, argument.kernel)
        if isinstance(argument, KernelConstants):
            return _found(_constants_place, argument.text)
        assert isinstance(argument, Named)
        if argument.kind == "operator":
            return _found(find_operator, argument.name)
        return _found(torch.device if argument.kind == "device" else _named(argument.kind), argument.name)

    def _name(self, value: Any) -> str:
        """A name of the namespace for a value, the same for the same value."""
        if id(value) not in self.known:
            self.known[id(value)] = f"k{len(self.names)}"
            self.names[self.known[id(value)]] = value  # which keeps it alive, so that its id stays its own
        return self.known[id(value)]


def _unseen(launch: Callable[..., Any]) -> Callable[..., Any]:
    """A launch that no dispatch mode of the caller's sees, as it sees none in eager mode. Most modes are an error to a
    higher-order operator."""

    def call(**settings: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():
            return launch(**settings)
        with modes_and_autocast_off():
            return launch(**settings)

    return call


def _unpacked(body: Boxed) -> Callable[..., Any]:
    """A body as higher-order operators call it."""

    def call(*args: Any) -> Any:
        results = body(list(args))
        return tuple(results) if isinstance(results, list) else results

    return call


def _fits(layouts: Sequence[tuple[int, Layout]]) -> Callable[[list[Any]], bool]:
    """Whether arguments are laid out as a body was compiled for: written out, since regions are called often."""
    names: dict[str, Any] = {"slowly": lambda args: all(layout.fits(args[position]) for position, layout in layouts)}
    same = ["True"]
    for position, layout in layouts:
        if layout.strides is None:
            return names["slowly"]  # type: ignore[no-any-return]
        names[f"type_{position}"] = layout.dtype
        same.append(f"(x := args[{position}]).dtype is type_{position}")
        same.append(f"x.shape == {layout.sizes} and x.stride() == {layout.strides}")
    exec(f"def fits(args):\n    return ({' and '.join(same)}) or slowly(args)", names)
    return names["fits"]  # type: ignore[no-any-return]


def _named(kind: str) -> Callable[[str], Any]:
    def find(name: str) -> Any:
        found = getattr(torch, name, None)
        if not isinstance(found, _NAMED_TYPES[kind]):
            raise LookupError(f"this torch has no {kind} {name!r}")
        return found

    return find


def _kernel_place(name: KernelName) -> int:
    return table_of_kernels().add_kernel(find_kernel(name))  # type: ignore[no-any-return]


def _constants_place(text: str) -> int:
    return table_of_kernels().add_constant_args(constants_from_json(text))  # type: ignore[no-any-return]


def _found(find: Callable[[Any], Any], name: Any) -> Any:
    try:
        return find(name)
    except (LookupError, RuntimeError) as error:
        raise BindError(f"a program in parts cannot be bound: {error}; compile again with this torch") from error


def _arguments(step: Step) -> list[Argument]:
    if isinstance(step, CallPart):
        return list(step.args)
    assert isinstance(step, CallFunction)
    return [*step.args, *(value for _, value in step.kwargs)]


def _values_in(arguments: Sequence[Argument]) -> Iterator[int]:
    for argument in arguments:
        if isinstance(argument, ValueOf):
            yield argument.number
        elif isinstance(argument, Several):
            yield from _values_in(argument.items)
        elif isinstance(argument, Pairs):
            yield from _values_in([item for _, item in argument.items])
