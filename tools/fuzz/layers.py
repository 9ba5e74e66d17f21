"""`python -m tools.fuzz.layers`: random products, convolutions and attention, and what models put around them.

Each program of `layer_programs` runs eagerly, compiled, and in float64. Results and gradients may be three times as far
from float64 as eager's, are nan and infinite where eager's and float64's are, and have eager's types; results have its
strides; kernels of ours give the same bits on two threads. What is wrong for one draw of numbers is drawn twice more: a
tie that rounds to the other side, or a ReLU at zero, is not wrong again.
"""

from __future__ import annotations

import argparse
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch._dynamo

import aotkit

from .layer_programs import Input, LayerProgram, exact_helpers, helpers, make_program
from .marks import Marks
from .sizes import print_counts, seen_strides

__all__ = ["difference", "main", "make_tensor", "make_tensors", "outcome"]

_DRAWS = 3

Observed = dict[str, torch.Tensor]  #: what a call returned, and the gradients of inputs, by name


def make_tensors(program: LayerProgram, seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The program's inputs, and the same numbers in float64."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [make_tensor(each, program.low, generator) for each in program.inputs]
    return [real for real, _ in pairs], [exact for _, exact in pairs]


def make_tensor(each: Input, low: torch.dtype, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """An input, and the same numbers in float64."""
    if each.fill == "bool":
        made = torch.rand(each.shape, generator=generator) < 0.7
        return made, made
    if each.fill.startswith("ids:"):
        made = torch.randint(int(each.fill[4:]), each.shape, generator=generator)
        return made, made
    if each.fill == "int8":
        made = torch.randint(-127, 128, each.shape, generator=generator).to(torch.int8)
        return made, made
    if each.fill == "int4":
        made = torch.randint(0, 16, each.shape, generator=generator, dtype=torch.int32)
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(made, 2), made
    values = torch.randn(each.shape, generator=generator, dtype=torch.float64)
    values = values.abs() + 0.5 if each.fill == "positive" else values
    values = _with_specials(values * each.scale, each.fill, low, generator)
    made = _laid_out(values.to(torch.bfloat16 if each.half else low), each.layout)
    return made, made.double()


def _with_specials(values: torch.Tensor, fill: str, low: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    specials = {"nan": torch.nan, "inf": torch.inf, "huge": torch.finfo(low).max ** 0.6, "tiny": 1e-40}
    if fill in specials and values.numel():
        where = torch.rand(values.shape, generator=generator) < (0.3 if fill == "tiny" else 2 / values.numel())
        sign = torch.rand(values.shape, generator=generator) - 0.5
        values = torch.where(where, specials[fill] * sign.sign(), values)
    return values


def _laid_out(values: torch.Tensor, layout: str) -> torch.Tensor:
    if layout == "last" and values.dim() == 4:
        return values.contiguous(memory_format=torch.channels_last)
    if layout == "turned" and values.dim() > 1:
        return values.mT.contiguous().mT
    if layout == "expanded" and values.dim() > 1:
        return values[..., :1, :].expand(values.shape)
    if layout == "cut":
        wide = values.new_full((*values.shape[:-1], values.shape[-1] + 3), 7.0)
        wide[..., 1:-2] = values
        return wide[..., 1:-2]
    if layout == "offset":
        room = values.new_full((values.numel() + 3,), 7.0)
        room[3:] = values.flatten()
        return room[3:].view(values.shape)
    return values


def _observe(program: LayerProgram, run: Any, tensors: Sequence[torch.Tensor], exact: bool = False) -> Observed:
    """Results, what was written to inputs, and gradients of the inputs that are no whole numbers, all but a few."""
    leaves, wanted, before = [], dict[str, torch.Tensor](), [each._version for each in tensors]
    for n, (each, tensor) in enumerate(zip(program.inputs, tensors, strict=True)):
        leaf = tensor.detach()
        if program.training and leaf.is_floating_point() and (each.weight or n % 4 != 3):
            wanted[each.name] = leaf.requires_grad_()
        leaves.append(leaf)
    cast = torch.autocast("cpu", torch.bfloat16) if program.autocast and not exact else nullcontext()
    with cast, nullcontext() if program.training else torch.no_grad():
        results = run(*leaves)
    found = {f"result {n}": each.detach() for n, each in enumerate(results)}
    for each, tensor, version in zip(program.inputs, tensors, before, strict=True):
        if tensor._version != version:
            found[each.name] = tensor.detach()
    outputs = [each for each in results if each.requires_grad]
    if outputs and wanted:
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, list(wanted.values()), grads, allow_unused=True)
        found.update({f"gradient of {n}": g for n, g in zip(wanted, gradients, strict=True) if g is not None})
    return found


def _compiled(program: LayerProgram, tensors: Sequence[torch.Tensor], backend: Any) -> Any:
    """The program's function, or a module that has its weights, if they are constants."""
    fn = program.function(helpers())
    if not program.frozen:
        return torch.compile(fn, backend=backend, fullgraph=True, dynamic=program.dynamic)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for each, tensor in zip(program.inputs, tensors, strict=True):
                if each.weight:
                    self.register_buffer(each.name, tensor)

        def forward(self, **given: torch.Tensor) -> Any:
            return fn(*(getattr(self, each.name) if each.weight else given[each.name] for each in program.inputs))

    module = torch.compile(Net(), backend=backend, fullgraph=True, dynamic=program.dynamic)
    names = [each.name for each in program.inputs]

    def call(*leaves: torch.Tensor) -> Any:
        given = dict(zip(names, leaves, strict=True))
        return module(**{each.name: given[each.name] for each in program.inputs if not each.weight})

    return call


def outcome(
    program: LayerProgram,
    number: int,
    backend: Any = None,
    contractions: Any = "auto",
    *,
    verify: bool = True,
    marks: Marks | None = None,
) -> tuple[str, str]:
    """What became of it (``equal``, ``eager``, ``refused``, ``mismatch`` or ``crash``), and a text on that. ``marks``
    keeps what passes did."""
    options = aotkit.Options(
        fallback="error", cache=False, freezing=program.frozen, contractions=contractions, verify=verify
    )
    recorder = aotkit.Recorder() if marks is None else aotkit.Recorder().shown_to(marks)
    backend = backend or aotkit.make_backend(options, recorder)

    def all_ours() -> bool:
        return contractions == "generated" and not any("left to ATen" in str(each.report) for each in recorder.graphs)

    texts = []
    for draw in range(_DRAWS):
        kind, text = _one_draw(program, 1000 * number + draw, backend, all_ours)
        if kind != "mismatch":
            return kind, text
        texts.append(text)
    return "mismatch", texts[0]


def _one_draw(program: LayerProgram, seed: int, backend: Any, all_ours: Callable[[], bool]) -> tuple[str, str]:
    tensors, exact = make_tensors(program, seed)  # anew for each run, which may write to them
    try:
        want = _observe(program, program.function(helpers()), tensors)
        true = _observe(program, program.function(exact_helpers()), exact, exact=True)
    except (RuntimeError, ValueError, IndexError, NotImplementedError) as error:
        return "eager", str(error).partition("\n")[0]
    torch._dynamo.reset()
    tensors, _ = make_tensors(program, seed)
    run = _compiled(program, tensors, backend)
    try:
        got = _observe(program, run, tensors)
        tensors = _with_weights(program, make_tensors(program, seed)[0], tensors)
        torch.set_num_threads(2)
        again = _observe(program, run, tensors)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        kind = "refused" if isinstance(error.inner_exception, aotkit.CompileError) else "crash"
        return kind, str(error.inner_exception)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        return "crash", "".join(traceback.format_exception(error)[-3:])
    finally:
        torch.set_num_threads(1)
    same = all_ours()
    for name, value in got.items():
        if same and not _same_bits(value, again[name]):
            return "mismatch", f"{name}: other bits on two threads"
    kind, text = _compare(program, want, true, got)
    if kind == "equal":  # no kernels of ATen's give the same bits on two threads, but good ones all the same
        kind, text = _compare(program, want, true, again)
        text = text and f"on two threads: {text}"
    return kind, text


def _with_weights(
    program: LayerProgram, tensors: Sequence[torch.Tensor], compiled: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """The tensors, but for weights those that a program was compiled with."""
    return [old if each.weight else new for each, new, old in zip(program.inputs, tensors, compiled, strict=True)]


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return bool(torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num()))


def _compare(program: LayerProgram, want: Observed, true: Observed, got: Observed) -> tuple[str, str]:
    if want.keys() != got.keys():
        return "mismatch", f"{[*got]} for {[*want]}"
    rounds = program.autocast or "half(" in program.source or "int4" in program.source
    types = {program.low} | ({torch.bfloat16} if rounds else set())
    tolerance = max(torch.finfo(each).eps for each in types) * (16 if types <= {torch.float32, torch.float64} else 1)
    for name, value in want.items():
        if name.startswith("result") and seen_strides(value) != seen_strides(got[name]):
            return "mismatch", f"{name}: strides {seen_strides(got[name])} for {seen_strides(value)}"
        if text := difference(value, true[name], got[name], tolerance):
            return "mismatch", f"{name}: {text}"
    return "equal", ""


def difference(want: torch.Tensor, true: torch.Tensor, got: torch.Tensor, tolerance: float) -> str:
    """What is wrong with ``got``, where eager has ``want`` and float64 ``true``; empty if nothing is."""
    if (want.dtype, want.shape) != (got.dtype, got.shape):
        return f"{got.dtype} {list(got.shape)} for {want.dtype} {list(want.shape)}"
    rounded = true.to(want.dtype)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf, torch.isfinite):
        wrong = kind(want) & kind(rounded) & ~kind(got)
        if wrong.any():
            place = tuple(wrong.nonzero()[0].tolist())
            return f"{got[place].item()} for {want[place].item()} at {place}, {int(wrong.sum())} of {want.numel()}"
    finite = want.isfinite() & rounded.isfinite() & got.isfinite()
    if not finite.any():
        return ""
    want, true, got = (each[finite].double() for each in (want, true, got))
    scale = max(float(true.abs().max()), 1e-2)  # less is what is left of terms that cancel each other
    ours, eagers = (float((each - true).abs().max()) / scale for each in (got, want))
    if ours <= 3 * (eagers + tolerance):
        return ""
    return f"error {ours:.2g}, eager's {eagers:.2g}"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a program mismatched or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.layers", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--seconds", type=float, default=0, help="begin no program after so long; 0: run all")
    parser.add_argument("--contractions", choices=("auto", "generated", "aten"), help="else: each in its turn")
    parser.add_argument("--against", action="store_true", help="say of failures what ATen's products and torch's give")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    begun = time.monotonic()
    for number in range(chosen.seed, chosen.seed + chosen.programs):
        if chosen.seconds and time.monotonic() - begun > chosen.seconds:
            break
        program = make_program(number)
        who = chosen.contractions or random.Random(number).choice(("auto", "generated"))
        kind, text = outcome(program, number, contractions=who)
        kinds[kind] += 1
        if kind == "refused":
            refusals[text.partition("\n")[0][:160]] += 1
        if kind in ("mismatch", "crash"):
            print(f"-- program {number} ({who}): {kind}: {text[:1200]}\n{program}", flush=True)
            if chosen.against:
                print("aten:", *outcome(program, number, contractions="aten"))
                print("inductor:", *outcome(program, number, "inductor"), flush=True)
    for text, count in refusals.most_common(10):
        print(f"refused {count}: {text}")
    return print_counts(kinds)


if __name__ == "__main__":
    raise SystemExit(main())
