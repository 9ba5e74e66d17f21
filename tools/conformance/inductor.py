"""What ``torch.compile(backend="inductor")`` makes of every pair, recorded once.

``python -m tools.conformance inductor --journal FILE`` goes on where it was cut off and ``--json`` writes the file
that the coverage page is made of. One C++ compiler run serves many pairs (Note [Many kernels in one file]).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import re
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch._inductor.compile_fx  # in the parent already, so that no child imports it again
import torch._inductor.config as inductor_config
from torch._inductor.codecache import CppPythonBindingsCodeCache

from .journal import Emit, chunks, read_journal, work_through
from .pairs import DIRECTIONS, DTYPES, Absent, Pair, Program, all_pairs, compare, make_program, run

__all__ = ["main"]

# Note [Many kernels in one file]
#     Nine tenths of a compile of Inductor are the start of the C++ compiler, its headers and the linker. Here the
#     sources of some 40 pairs are put into one file, each in a namespace of its own, and compiled with Inductor's
#     own flags. A kernel that is called before that raises _Pending; its pair is called again afterwards, which finds
#     what Dynamo compiled the first time. A pair with a backward comes round a third time. If the common file
#     does not compile, each of its kernels is compiled alone, so that one error stays with one pair.


class _Pending(Exception):
    """A kernel that is not compiled yet."""


class _Kernel:
    """Stands for a compiled kernel; ``ready`` is the entry of the file that it is in, with its number there."""

    def __init__(self, argument_types: Sequence[str], source: str) -> None:
        self.types, self.source = [t.strip() for t in argument_types], source
        self.ready: tuple[Any, int] | None = None
        self.single: Any = None

    def __call__(self, *args: Any) -> None:
        if self.single is not None:
            self.single(*args)
            return
        if self.ready is None:
            raise _Pending
        entry, number = self.ready
        values = [arg.data_ptr() if isinstance(arg, torch.Tensor) else int(arg) for arg in args]
        array = (ctypes.c_int64 * max(1, len(values)))(*values)
        entry(number, ctypes.addressof(array))


class _Batch:
    """Takes the place of Inductor's loader of kernels."""

    def __init__(self) -> None:
        self.known: dict[str, _Kernel] = {}
        self.load = CppPythonBindingsCodeCache.load_pybinding

    def take(self, argument_types: Sequence[str], source: str, *rest: Any, **options: Any) -> Any:
        if rest or options or any("float" in t and "*" not in t for t in argument_types):
            return self.load(argument_types, source, *rest, **options)
        text = f"{argument_types}{source}"
        return self.known.setdefault(text, _Kernel(argument_types, source))

    def compile_pending(self) -> None:
        pending = [k for k in self.known.values() if k.ready is None and k.single is None]
        if not pending:
            return
        try:
            entry = self.load(["int64_t", "uintptr_t"], _common_source(pending))
            for number, kernel in enumerate(pending):
                kernel.ready = (entry, number)
        except Exception:  # noqa: BLE001  # which kernel it is shows when each is compiled alone
            for kernel in pending:
                kernel.single = self._alone(kernel)

    def _alone(self, kernel: _Kernel) -> Any:
        try:
            return self.load(kernel.types, kernel.source)
        except Exception as error:  # noqa: BLE001  # belongs to the pair that calls it
            return _raiser(f"{type(error).__name__}: {str(error)[:300]}")


def _raiser(text: str) -> Any:
    def raise_it(*_args: Any) -> None:
        raise RuntimeError(text)

    return raise_it


def _common_source(kernels: Sequence[_Kernel]) -> str:
    includes: dict[str, None] = {}
    bodies, cases = [], []
    for number, kernel in enumerate(kernels):
        lines = kernel.source.splitlines()
        includes.update(dict.fromkeys(line for line in lines if line.startswith("#include")))
        body = "\n".join(line for line in lines if not line.startswith("#include"))
        bodies.append(f"namespace k{number} {{\n" + re.sub(r'extern\s+"C"', "", body) + "\n}")
        args = ", ".join(f"({kind})(p[{i}])" for i, kind in enumerate(kernel.types))
        cases.append(f"case {number}: k{number}::kernel({args}); break;")
    switch = "\n".join(cases)
    return (
        "\n".join([*includes, *bodies])
        + '\nextern "C" void kernel(int64_t which, uintptr_t values) {\n'
        + f"    auto p = reinterpret_cast<const uintptr_t*>(values);\n    switch (which) {{\n{switch}\n    }}\n}}\n"
    )


def check_pairs(pairs: Sequence[Pair], emit: Emit, batch_size: int = 40) -> None:
    """The outcome of each pair to ``emit``; meant for a process of its own, whose settings it changes."""
    inductor_config.compile_threads = 1
    inductor_config.fallback_random = True  # eager's numbers, or nothing could be compared
    inductor_config.fx_graph_cache = False
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.capture_scalar_outputs = False
    for part in chunks(pairs, batch_size):
        batch = _Batch()
        CppPythonBindingsCodeCache.load_pybinding = batch.take  # type: ignore[method-assign,assignment]
        try:
            _check_batch(part, emit, batch)
        finally:
            CppPythonBindingsCodeCache.load_pybinding = batch.load  # type: ignore[method-assign]
            torch._dynamo.reset()


def _check_batch(part: Sequence[Pair], emit: Emit, batch: _Batch) -> None:
    waiting: list[tuple[Program, Any, Any]] = []
    for pair in part:
        emit(pair, {})
        try:
            program = make_program(pair)
            expected = run(program, program.fn)
        except Exception as error:  # noqa: BLE001  # there is nothing to compare with then
            emit(pair, {"kind": "absent", "reason": f"{type(error).__name__}: {str(error)[:150]}"})
            continue
        waiting.append((program, expected, torch.compile(program.fn, backend="inductor", dynamic=False)))
    for _ in range(8):
        again = []
        for program, expected, compiled in waiting:
            emit(program.pair, {})
            outcome = _attempt(program, expected, compiled)
            if outcome is None:
                again.append((program, expected, compiled))
            else:
                emit(program.pair, outcome)
        waiting = again
        if not waiting:
            return
        emit(waiting[0][0].pair, {})
        batch.compile_pending()
    for program, _, _ in waiting:
        emit(program.pair, {"kind": "crash", "reason": "its kernels were never complete"})


def _attempt(program: Program, expected: Any, compiled: Any) -> dict[str, Any] | None:
    started = time.perf_counter()
    try:
        kind, difference = compare(program, expected, run(program, compiled))
    except _Pending:
        return None
    except Absent as error:
        return {"kind": "different", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  # whatever it is, it is the outcome
        if isinstance(error.__cause__, _Pending) or "_Pending" in f"{type(error.__context__)}":
            return None
        return {"kind": "crash", "reason": f"{type(error).__name__}: {str(error)[:200]}"}
    seconds = round(time.perf_counter() - started, 3)
    return {"kind": kind, "reason": difference[:300], "seconds": seconds}


def main(argv: Sequence[str] | None = None) -> int:
    """Record, and write what is known as one JSON file."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance inductor")
    parser.add_argument("--journal", type=Path, required=True, help="one line per pair; a second run goes on with it")
    parser.add_argument("--json", type=Path, help="write what is known here")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS)
    parser.add_argument("--first", type=Path, help="file with keys of pairs, one a line, to run first")
    parser.add_argument("--chunk", type=int, default=240)
    parser.add_argument("--no-run", action="store_true", help="only write --json")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    pairs = list(all_pairs(chosen.dtypes, chosen.directions))
    if not chosen.no_run:
        while todo := _next_pairs(pairs, chosen.first, chosen.journal)[: chosen.chunk]:
            work_through(todo, chosen.journal, check_pairs, chunk=chosen.chunk)
    if chosen.json:
        write_json(chosen.json, pairs, read_journal(chosen.journal))
    return 0


def _next_pairs(pairs: Sequence[Pair], first: Path | None, journal: Path) -> list[Pair]:
    done = read_journal(journal)
    left = [pair for pair in pairs if pair.key not in done]
    wanted = set(first.read_text().splitlines()) if first is not None and first.exists() else set()
    return [pair for pair in left if pair.key in wanted] or left


def write_json(path: Path, pairs: Sequence[Pair], found: dict[str, dict[str, Any]]) -> None:
    """Operator to dtype to direction to kind; reasons of what did not pass; pairs that were not recorded."""
    outcomes: dict[str, dict[str, str]] = {}
    reasons = {}
    missing: dict[str, list[str]] = {}
    for pair in pairs:
        entry = found.get(pair.key)
        if entry is None:
            missing.setdefault(f"{pair.dtype} {pair.direction}", []).append(pair.operator)
            continue
        outcomes.setdefault(pair.operator, {})[f"{pair.dtype} {pair.direction}"] = entry["kind"]
        if entry["kind"] not in ("equal", "nearer", "absent"):
            reasons[pair.key] = entry["reason"]
    lines = (
        f'"torch": {json.dumps(torch.__version__)}',
        '"compiler": "torch.compile(backend=inductor, dynamic=False), fallback_random"',
        f'"outcomes": {_by_line(outcomes)}',
        f'"reasons": {_by_line(reasons)}',
        f'"not_recorded": {_by_line(missing)}',
    )
    path.write_text("{" + ",\n".join(lines) + "}\n")


def _by_line(entries: dict[str, Any]) -> str:
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in entries.items()) + "\n}"
