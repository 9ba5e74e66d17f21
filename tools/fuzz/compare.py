"""What a caller can see of one run of a program, as named facts, and how the facts of two runs differ.

Facts: values, sizes, strides, dtype, `requires_grad`, `is_leaf` and identity of outputs; values, geometry and version
counters of the inputs and of whatever they are views of; which of all these share memory; the effect of the program's
own `afterwards` statement; gradients of all leaves; and what everything holds after each output was written to in
place, one after another.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from .program import Program

__all__ = ["RECOMPUTED", "Run", "differences", "observe", "weighted"]

#: Not a mismatch: `afterwards` wrote to a value that the compiled backward, unlike eager's, computes with again.
RECOMPUTED = "the caller wrote to a value before the backward that only the compiled backward needs"
_CLAIMED = "claimed only"
_RTOL = {
    torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 2e-5, torch.complex64: 2e-5, torch.float64: 1e-10
}  # fmt: skip


@dataclass(slots=True)
class Run:
    """Facts of one run, in the order in which they were observed. ``error`` is what the call itself raised.

    ``before`` holds the values of the inputs before the call, under the names of the facts. ``coarse``: see
    :func:`_coarse`.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    before: dict[str, torch.Tensor] = field(default_factory=dict)
    coarse: dict[str, float] = field(default_factory=dict)
    unseen: bool = False  # `afterwards` wrote to memory of tensors that do not count that write (`.data` was taken)
    error: BaseException | None = None

    @property
    def gradients_raise(self) -> bool:
        """Whether the backward was refused."""
        return isinstance(self.facts.get("gradients"), Exception)


def observe(program: Program, call: Callable[..., Any], shift: float = 0.0) -> Run:
    """Run ``call`` on fresh inputs of ``program`` in the present grad mode; ``shift`` gives other values."""
    run = Run()
    with torch.enable_grad():
        named = program.make(shift)
    inputs = [named[name] for name in program.inputs]
    versions = [t._version for t in inputs]
    run.before = {f"{name} value": named[name].detach().clone() for name in program.inputs}
    run.coarse = _coarse(program, named)
    grad_mode = torch.is_grad_enabled()
    torch.manual_seed(0)
    try:
        outputs = list(call(*inputs))
    except Exception as error:  # noqa: BLE001 - it is the finding
        run.error = error
        return run
    run.facts["grad mode"] = torch.is_grad_enabled() == grad_mode
    for index, output in enumerate(outputs):
        _describe(run, f"output {index}", output, program)
    for name, tensor in named.items():
        _describe(run, name, tensor, program)
    for name, tensor, version in zip(program.inputs, inputs, versions, strict=True):
        run.facts[f"{name} version moved"] = tensor._version != version
    _aliases(run, outputs, named)
    _afterwards(run, program, inputs, outputs)
    _gradients(run, program, inputs, outputs, named)
    _writes(run, outputs, named)
    return run


def differences(eager: Run, other: Run) -> list[str]:
    """Sentences about the facts in which ``other`` departs from ``eager``; none if all is well."""
    found: list[str] = []
    for name, expected in eager.facts.items():
        if isinstance(expected, Exception):
            # A program that eager refuses has no defined result from here on, unless both refuse it.
            if not isinstance(other.facts.get(name), Exception):
                tolerated = name.partition(" ")[0] in ("gradients", "write") or "modified inplace" in str(expected)
                return found if tolerated else [*found, f"{name}: only eager raises {expected!r}"]
            return found
        got = other.facts.get(name)
        if name.endswith("is_leaf") and (name not in other.facts or expected == "raises"):
            continue
        if any(isinstance(fact, str) and fact == _CLAIMED for fact in (expected, got)):
            continue  # it makes no difference to any gradient; those are compared below
        if name.endswith("is a view") and (not expected or _is_alone(name.removesuffix(" is a view"), eager)):
            continue  # docs/limits.md says which outputs own their memory, and which do not
        if name.endswith("version moved") and _harmless(name, eager):
            continue
        if isinstance(got, Exception):
            if "modified by an inplace operation" in str(got) and eager.facts.get("afterwards") == "ran" and not found:
                return [RECOMPUTED]
            return [*found, f"{name}: raises {type(got).__name__}: {str(got).splitlines()[0]}"]
        if not _same(expected, got, eager.coarse.get(_FACT.sub("", name), 0.0)):
            found.append(f"{name}: {_short(expected)} in eager, {_short(got)} compiled")
    return found


def _is_alone(output: str, eager: Run) -> bool:
    """Whether no other tensor shares the memory of an output (an empty one has none)."""
    places = {name: place for name, place in eager.facts.items() if name.endswith(" memory")}
    return places.pop(f"{output} memory", None) in (None, f"0 bytes into {output}") and not any(
        place.endswith(f" into {output}") for place in places.values()
    )


def _harmless(name: str, eager: Run) -> bool:
    """Only a changed value has to be announced; not, for example, ``squeeze_()`` where no dimension is 1."""
    value = name.replace("version moved", "value")
    return bool(eager.facts[name]) and _same(eager.facts[value], eager.before.get(value))


def _describe(run: Run, name: str, value: Any, program: Program) -> None:
    if not isinstance(value, torch.Tensor):
        run.facts[name] = (type(value).__name__, value)
        return
    kept = [0 if size == 1 else stride for size, stride in zip(value.shape, value.stride(), strict=True)]
    run.facts[f"{name} dtype"] = value.dtype
    run.facts[f"{name} shape"] = tuple(value.shape)
    run.facts[f"{name} strides"] = tuple(kept) if value.numel() else None
    run.facts[f"{name} requires_grad"] = _claim(value, program)
    # A view of a view that was taken under no_grad has a gradient function that leads nowhere.
    if not (_switches_grad_mode(program) and value._is_view()):
        run.facts[f"{name} is_leaf"] = _attempt(lambda: value.is_leaf)
    if name.startswith("output"):
        run.facts[f"{name} is a view"] = value._is_view()
    run.facts[f"{name} value"] = value.detach().clone()


def _switches_grad_mode(program: Program) -> bool:
    return any("no_grad" in statement for statement in program.body)


def _claim(value: torch.Tensor, program: Program) -> Any:
    """`requires_grad`; a view of an intermediate that was taken under no_grad claims it, but no gradient flows."""
    if not (value.requires_grad and _switches_grad_mode(program) and value._is_view()):
        return bool(value.requires_grad)
    return _CLAIMED if _attempt(lambda: value.grad_fn) in (None, "raises") else True


def _attempt(question: Callable[[], Any]) -> Any:
    try:
        return question()
    except RuntimeError:
        return "raises"


def _aliases(run: Run, outputs: Sequence[Any], named: dict[str, Any]) -> None:
    """For each tensor, the first tensor that shares its storage, and where in that storage it begins."""
    tensors = {**named, **{f"output {i}": o for i, o in enumerate(outputs)}}
    first: dict[int, tuple[str, int]] = {}
    objects: dict[int, str] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        if tensor.numel():
            begin = int(tensor.storage_offset()) * tensor.element_size()
            owner, start = first.setdefault(tensor.untyped_storage()._cdata, (name, begin))
            run.facts[f"{name} memory"] = f"{begin - start} bytes into {owner}"
        run.facts[f"{name} object"] = f"is {objects.setdefault(id(tensor), name)}"


def _afterwards(run: Run, program: Program, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    if program.afterwards is None:
        return
    tensors = [value for value in (*inputs, *outputs) if isinstance(value, torch.Tensor)]
    versions = [tensor._version for tensor in tensors]
    try:
        exec(program.afterwards, {"inputs": inputs, "outputs": outputs, "torch": torch})
        run.facts["afterwards"] = "ran"
    except Exception as error:  # noqa: BLE001 - it is the fact
        run.facts["afterwards"] = error
        return
    counted = {t.untyped_storage()._cdata for t, v in zip(tensors, versions, strict=True) if t._version != v}
    run.unseen = any(
        t._version == v and t.untyped_storage()._cdata in counted for t, v in zip(tensors, versions, strict=True)
    )
    for group, members in (("input", inputs), ("output", outputs)):
        for index, tensor in enumerate(members):
            if isinstance(tensor, torch.Tensor):
                run.facts[f"{group} {index} requires_grad afterwards"] = _claim(tensor, program)
                run.facts[f"{group} {index} value afterwards"] = tensor.detach().clone()


def _gradients(
    run: Run, program: Program, inputs: Sequence[Any], outputs: Sequence[Any], named: dict[str, Any]
) -> None:
    starts = [o for i, o in enumerate(outputs) if i not in program.ignored]
    leaves = {n: t for n, t in named.items() if t.requires_grad and _attempt(partial(getattr, t, "is_leaf")) is True}
    try:
        with torch.enable_grad():
            total = sum(weighted([*starts, *inputs]), start=torch.zeros((), dtype=torch.float64))
        if not leaves or not total.requires_grad:
            return
        grads = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
    except Exception as error:  # noqa: BLE001 - it is the fact
        run.facts["gradients"] = error
        return
    run.facts["gradients"] = "ran"
    for (name, leaf), grad in zip(leaves.items(), grads, strict=True):
        # No gradient and a gradient of zeros mean the same to every optimizer step that follows.
        run.facts[f"{name} gradient"] = torch.zeros_like(leaf).detach() if grad is None else grad.clone()


def weighted(tensors: Sequence[Any]) -> list[torch.Tensor]:
    """Of each tensor that requires a gradient a sum with weights, all of them different."""
    found = []
    for number, value in enumerate(tensors):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
            weights = torch.cos(torch.arange(value.numel()) * 0.9 + number).view(value.shape)
            found.append((value * weights).sum())
    return found


def _writes(run: Run, outputs: Sequence[Any], named: dict[str, Any]) -> None:
    for index, output in enumerate(outputs):
        if not isinstance(output, torch.Tensor):
            continue
        try:
            with torch.no_grad():
                output.add_(index + 10)
        except Exception as error:  # noqa: BLE001 - it is the fact
            run.facts[f"write {index}"] = error
            continue
        for name, tensor in [*named.items(), *((f"output {i}", o) for i, o in enumerate(outputs))]:
            if isinstance(tensor, torch.Tensor):
                run.facts[f"{name} value, output {index} written"] = tensor.detach().clone()


_NAME = re.compile(r"\b[alm]\d+\b|\bv\d+\b")
_DTYPE = re.compile(r"\btorch\.(bfloat16|float16|float32|complex64|float64)\b")
_MADE = re.compile(r"\btorch\.(ones|zeros|full|rand|randn|empty)\((?!.*dtype=)")  # of the default dtype
_FACT = re.compile(r" (value|gradient|second gradient)\b.*")


def _coarse(program: Program, named: dict[str, Any]) -> dict[str, float]:
    """By tensor, the relative error that the shortest dtype among those it is connected with allows.

    Connected are names that occur in one statement, and so on: values flow one way and gradients the other.
    """
    groups: list[tuple[set[str], float]] = []
    outputs = [f"{text} output {i}" for i, text in enumerate(program.outputs)]
    for statement in (*program.setup, *program.body, *outputs):
        names = {*_NAME.findall(statement), *re.findall(r"output \d+$", statement)}
        dtypes = [t.dtype for n in names if isinstance(t := named.get(n), torch.Tensor)]
        dtypes += [getattr(torch, name) for name in _DTYPE.findall(statement)]
        if _MADE.search(statement):
            dtypes.append(torch.get_default_dtype())
        error = max((_RTOL.get(dtype, 0.0) for dtype in dtypes), default=0.0)
        joined = [group for group in groups if group[0] & names]
        groups = [group for group in groups if not group[0] & names]
        groups.append((names.union(*(g[0] for g in joined)), max([error, *(g[1] for g in joined)])))
    found = {name: error for names, error in groups for name in names if error}
    return found | {f"input {i}": found[name] for i, name in enumerate(program.inputs) if name in found}


def _same(expected: Any, got: Any, coarse: float = 0.0) -> bool:
    if not isinstance(expected, torch.Tensor):
        return bool(expected == got)
    if not isinstance(got, torch.Tensor) or expected.shape != got.shape or expected.dtype != got.dtype:
        return False
    rtol = max(_RTOL[expected.dtype], coarse) if expected.dtype in _RTOL else 0.0
    return torch.allclose(expected, got, rtol=rtol, atol=rtol, equal_nan=True)


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.flatten()[:8].tolist()}{'...' if value.numel() > 8 else ''}"
    return repr(value)
