"""Bugs planted one by one in the plan, the metadata, the graphs or the calls of a compile: does the fuzzer find each?

Each bug is a function that replaces one stage of :mod:`aotkit.driver` by one that spoils its result, where there is
something to spoil. Nothing of it is reachable from the packages.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import torch

from aotkit.driver import bind as binding
from aotkit.driver import compile as compiling
from aotkit_runtime_wrappers import WrapperPlan

from .campaign import quiet
from .cells import CELLS
from .execute import check
from .generate import generate
from .program import Program

__all__ = ["PLANTED", "find_planted", "found_after", "planted"]

aten = torch.ops.aten

#: Where a compile looks up its stages.
STAGES = {"capture": compiling, "build_plan": compiling, "bind_plan": binding}


@dataclass(frozen=True, slots=True)
class Bug:
    """``stage``: a name in ``STAGES``; ``spoil``: the true stage and its arguments to a wrong result.

    ``under``: a change of another stage that is right by itself, without which the bug would not show.
    """

    stage: str
    spoil: Callable[..., Any]
    under: Bug | None = None


def find_planted(programs: int) -> int:
    """Look for every planted bug with up to ``programs`` programs; prints how many each took. 1 if one got away."""
    quiet()
    missed = 0
    for name in PLANTED:
        started = time.monotonic()
        number, detail = found_after(name, programs)
        missed += number is None
        took = f"found by program {number:4d}" if number is not None else f"NOT FOUND in {programs} programs"
        print(f"{name:28} {took} in {time.monotonic() - started:5.1f} s  {detail[:110]}", flush=True)
    print(f"{len(PLANTED) - missed} of {len(PLANTED)} planted bugs found")
    return 1 if missed else 0


def found_after(name: str, programs: int, first: int = 0) -> tuple[int | None, str]:
    """How many programs it took to notice the bug ``name``, and what was noticed; ``None`` if it was not."""
    for number in range(programs):
        seed = first + number
        program = generate(seed, (CELLS[seed * 7919 % len(CELLS)], CELLS[(seed * 104729 + 11) % len(CELLS)])).program
        with planted(name):
            wrong = check(program)
        if wrong.failed and not _fails_without(name, program):
            return number + 1, wrong.detail
    return None, ""


def _fails_without(name: str, program: Program) -> bool:
    under = PLANTED[name].under
    with nullcontext() if under is None else _applied(under):
        return check(program).failed


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Compiles in here have the bug ``name``."""
    bug = PLANTED[name]
    with nullcontext() if bug.under is None else _applied(bug.under), _applied(bug):
        yield


def _applied(bug: Bug) -> AbstractContextManager[Any]:
    true = getattr(STAGES[bug.stage], bug.stage)
    return mock.patch.object(STAGES[bug.stage], bug.stage, functools.partial(bug.spoil, true))


# --- in the wrapper plan ----------------------------------------------------------------------------------------


def _in_plan(change: Callable[[WrapperPlan], WrapperPlan]) -> Bug:
    return Bug("build_plan", lambda true, *args, **kwargs: change(true(*args, **kwargs)))


def _each(kind: str, change: Callable[[Any, WrapperPlan], Any]) -> Bug:
    """Every operation of one kind in the epilogue, changed; ``None`` drops it."""

    def spoil(plan: WrapperPlan) -> WrapperPlan:
        changed = [change(op, plan) if type(op).__name__ == kind else op for op in plan.epilogue]
        return replace(plan, epilogue=tuple(op for op in changed if op is not None))

    return _in_plan(spoil)


def _other_base(op: Any, plan: WrapperPlan) -> Any:
    others = [f"in{i}" for i in range(plan.num_inputs) if f"in{i}" != op.base]
    return replace(op, base=others[0]) if others and op.base.startswith("in") else op


def _offset(op: Any, plan: WrapperPlan) -> Any:
    return replace(op, view=replace(op.view, offset_delta=0), method="as_strided")


def _strides(op: Any, plan: WrapperPlan) -> Any:
    view = op.view
    if len(view.sizes) == 2 and view.sizes[0] == view.sizes[1]:
        return replace(op, view=replace(view, strides=view.strides[::-1]), method="as_strided")
    return op


def _swapped(plan: WrapperPlan) -> WrapperPlan:
    return replace(plan, returns=(plan.returns[-1], *plan.returns[1:-1], plan.returns[0])) if plan.returns[1:] else plan


def _not_differentiable(plan: WrapperPlan) -> WrapperPlan:
    call = plan.call
    return replace(plan, call=replace(call, differentiable_outputs=call.differentiable_outputs[:-1]))


# --- around the compiled code -----------------------------------------------------------------------------------


def _copied_aliases(true: Callable[..., Any], plan: WrapperPlan, *args: Any, **kwargs: Any) -> Any:
    """An alias is returned as a copy."""
    call = true(plan, *args, **kwargs)
    made = {getattr(op, "result", None) for op in plan.epilogue if type(op).__name__ == "ReplayView"}

    def run(box: list[Any]) -> list[Any]:
        outputs = list(call(box))
        return [o.clone() if r.value in made else o for o, r in zip(outputs, plan.returns, strict=True)]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _with_backward(change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Bug:
    def spoil(true: Callable[..., Any], plan: WrapperPlan, forward: Any, backward: Any = None, **kwargs: Any) -> Any:
        if backward is None:
            return true(plan, forward, **kwargs)
        return true(plan, forward, lambda: _boxed(change(backward())), **kwargs)

    return Bug("bind_plan", spoil)


def _boxed(call: Callable[..., Any]) -> Callable[..., Any]:
    call._boxed_call = True  # type: ignore[attr-defined]
    return call


def _stale(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward works with what the first call saved."""
    kept: list[Any] = []

    def run(box: list[Any]) -> Any:
        if not kept:
            kept.extend(v.clone() if isinstance(v, torch.Tensor) else v for v in box[:-1])
        box[:-1] = kept
        return backward(box)

    return run


def _one_gradient_less(backward: Callable[..., Any]) -> Callable[..., Any]:
    def run(box: list[Any]) -> Any:
        gradients = list(backward(box))
        last = max((i for i, g in enumerate(gradients) if g is not None), default=None)
        return [None if i == last else g for i, g in enumerate(gradients)]

    return run


# --- in the captured graph --------------------------------------------------------------------------------------


def _without_clones(true: Callable[..., Any], *args: Any, inner: bool = False, **kwargs: Any) -> Any:
    """A copy becomes the value itself, so that what is returned shares memory with something else.

    ``inner``: only copies that are not returned, which is right, if what the backward needs is kept.
    """
    captured = true(*args, **kwargs)
    graph = captured.graph.graph
    for node in graph.find_nodes(op="call_function", target=aten.clone.default):
        if inner and (any(user.op == "output" for user in node.users) or _is_view(node)):
            continue
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    captured.graph.recompile()
    return captured


def _contiguous_outputs(true: Callable[..., Any], plan: WrapperPlan, forward: Any, *args: Any, **kwargs: Any) -> Any:
    """What is computed has the default strides."""

    def run(box: list[Any]) -> list[Any]:
        outputs = list(forward(box))
        own = plan.call.num_forward_outputs
        return [o.contiguous() if i < own and isinstance(o, torch.Tensor) else o for i, o in enumerate(outputs)]

    return true(plan, _boxed(run), *args, **kwargs)


def _is_view(node: torch.fx.Node) -> bool:
    """Whether a clone has other strides than its argument, or may have users that are views of it."""
    (source, *_) = node.all_input_nodes
    same = node.meta["val"].stride() == source.meta["val"].stride()
    return not same or any(getattr(user.target, "is_view", True) for user in node.users)


PLANTED: dict[str, Bug] = {
    "dropped copy-back": _each("CopyBack", lambda op, plan: None),
    "wrong base": _each("ReplayView", _other_base),
    "missing clone of saved input": replace(
        _in_plan(lambda p: replace(p, call=replace(p.call, written_inputs=()))),
        under=Bug("capture", functools.partial(_without_clones, inner=True)),
    ),
    "wrong storage offset": _each("ReplayView", _offset),
    "lost requires_grad": _in_plan(_not_differentiable),
    "alias loses its gradient": _each("ReplayView", lambda op, plan: replace(op, detach=True)),
    "swapped outputs": _in_plan(_swapped),
    "stale saved tensor": _with_backward(_stale),
    "dropped gradient": _with_backward(_one_gradient_less),
    "missed version bump": _each("CopyBack", lambda op, plan: replace(op, mode="hidden")),
    "alias returned as copy": Bug("bind_plan", _copied_aliases),
    "copy returned as alias": Bug("capture", _without_clones),
    "wrong stride of a view": _each("ReplayView", _strides),
    "wrong stride of a result": Bug("bind_plan", _contiguous_outputs),
}
"""By name; each is one mistake that a wrapper or a capture could make."""
