"""Ranks of which one fails, dies, is slow or compiles something else: none of the others may hang, or be wrong.

python -m tools.ranks.faults                  100 random faults
python -m tools.ranks.faults --first 17 --count 1

Each is a call of a layer whose result is summed over two or three ranks, that each rank compiles for itself, with
`share_compiles`, or with `compile_for_ranks`, over a store in a file or one that the first rank holds. Every rank that
lives must have the right numbers, or a typed error (or gloo's own, where another one died in the middle of a
collective), within the timeout.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import socket
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .processes import run_ranks

__all__ = ["FAULTS", "Fault", "main", "run_fault"]

RANK_TIMEOUT = 4
#: A rank may have to wait for a shared compile and then for the comparison; the rest is the compile itself.
LIMIT = 60.0

FAULTS = (
    "nothing",
    "dies before",  # it was to compile
    "dies while it compiles",
    "dies behind",  # when the graphs have been compared
    "is slow",  # but in time
    "is too slow",
    "has a bug",
    "is refused",
    "has another graph",
    "has fewer collectives",
    "has another torch",
    "has other options",
)
#: Each rank compiles, one compiles what all have traced, or one traces and compiles (`compile_for_ranks`).
WAYS = ("apart", "share_compiles", "for ranks")
_TYPED = (
    *("RanksDisagree", "CompileError", "GuardError", "InternalError"),
    *("UnknownOption", "UnknownPassError", "CacheError"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens to the rank ``at``, of ``ranks``. ``how``: one of `WAYS`. ``tcp``: the first rank holds the store.
    ``eager``: refused graphs run eagerly."""

    what: str
    at: int
    ranks: int
    how: str
    tcp: bool
    eager: bool

    @staticmethod
    def of(number: int) -> Fault:
        """The fault of that number."""
        chosen = random.Random(number)
        ranks = chosen.choice((2, 3))
        tcp, eager = (chosen.random() < 0.5 for _ in range(2))
        return Fault(FAULTS[number % len(FAULTS)], chosen.randrange(ranks), ranks, chosen.choice(WAYS), tcp, eager)


def run_fault(fault: Fault) -> dict[str, Any]:
    """A row: the ``verdict`` is ``fine``, ``hangs``, ``wrong`` or ``untyped``."""
    began = time.monotonic()
    master = _free_port() if fault.tcp else None
    answers, ended = run_ranks(fault.ranks, lambda rank, folder: _rank(rank, folder, fault), LIMIT, master=master)
    row = {"fault": fault.what, "how": fault.how, "answers": [_short(answer) for answer in answers]}
    return {**row, "verdict": _verdict(fault, answers, ended), "seconds": round(time.monotonic() - began, 1)}


def _short(answer: dict[str, Any] | None) -> str:
    if answer is None:
        return "died"
    return str(answer["error"]).split("\n")[0][:150] if "error" in answer else str(answer["result"])


def _verdict(fault: Fault, answers: Sequence[dict[str, Any] | None], ended: bool) -> str:
    if not ended:
        return "hangs"
    for rank, answer in enumerate(answers):
        if answer is None:
            if not (fault.what.startswith("dies") and rank == fault.at):
                return "died"
        elif "error" not in answer:
            if answer["result"] != "right":
                return "wrong"
        elif not answer["error"].startswith(_TYPED) and not fault.what.startswith("dies"):
            return "untyped"
    return "fine"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _rank(rank: int, folder: Path, fault: Fault) -> dict[str, Any]:
    import aotkit  # noqa: F401  # registers the backend

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    options: dict[str, Any] = {"share_compiles": fault.how == "share_compiles", "rank_timeout": RANK_TIMEOUT}
    options |= {"cache": True, "fallback": "eager" if fault.eager else "error"}
    here, op, twice = rank == fault.at, "sum", True
    if here:
        if fault.what == "dies before":
            _die(folder)
        if fault.what == "has another graph":
            op = "max"
        twice = fault.what != "has fewer collectives"
        if fault.what == "has other options":
            options["link_latency"] = 1e-12
        _break(fault, folder, options)

    world = dist.group.WORLD
    assert world is not None
    group = str(dist.distributed_c10d._world.pg_names[world])

    def step(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y, z = _all_reduced(x @ w, op, group), _all_reduced(x, op, group) if twice else x
        return (y.square().sum() + z.sum()).sin()

    x = torch.full((3, 4), rank + 1.0, dtype=torch.float64)
    w = torch.ones(4, 2, dtype=torch.float64)
    value = _compiled(fault.how, step, (x, w), options)(x, w)
    if here and fault.what == "dies behind":
        _die(folder)
    total = fault.ranks * (fault.ranks + 1) / 2
    want = torch.tensor(6 * (4 * total) ** 2 + 12 * total, dtype=torch.float64).sin()
    return {"result": "right" if torch.allclose(value, want, rtol=1e-9) else f"{value.item()} and not {want.item()}"}


def _compiled(how: str, step: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Callable[..., Any]:
    if how != "for ranks":
        return torch.compile(step, backend="aotkit", fullgraph=True, options=options)
    import aotkit

    given: dict[str, Any] = {name: frozenset(v) if isinstance(v, list) else v for name, v in options.items()}
    chosen = aotkit.Options(**given)
    return aotkit.saved.compile_for_ranks(step, args, options=chosen)


def _all_reduced(x: torch.Tensor, op: str, group: str) -> torch.Tensor:
    ops = torch.ops._c10d_functional
    summed: torch.Tensor = ops.wait_tensor(ops.all_reduce(x, op, group))
    return summed


def _die(folder: Path) -> None:
    (folder / "somebody died").touch()
    os._exit(1)


def _break(fault: Fault, folder: Path, options: dict[str, Any]) -> None:
    """Put the fault into the compile of this process."""
    from aotkit.driver import ranks
    from aotkit.driver.graph_compiler import GraphCompiler

    compiled = GraphCompiler.compile

    def faulty(self: GraphCompiler, args: Any) -> Any:
        if fault.what == "dies while it compiles":
            _die(folder)
        if fault.what in ("is slow", "is too slow"):
            time.sleep(RANK_TIMEOUT * (0.4 if fault.what == "is slow" else 2.5))
        if fault.what == "has a bug":
            raise KeyError("a bug")
        return compiled(self, args)

    GraphCompiler.compile = faulty  # type: ignore[method-assign]
    if fault.what == "is refused":
        options["disable"] = ["no-such-pass"]
    if fault.what == "has another torch":
        ranks.versions = lambda: ["torch 0.1"]


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.ranks.faults", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("AOTKIT_CACHE_KEY", "one secret of all ranks")
    for name in ("torch._dynamo", "aotkit.backend", "torch.distributed._functional_collectives"):
        importlib.import_module(name)
    counts: Counter[str] = Counter()
    slowest = 0.0
    for number in range(chosen.first, chosen.first + chosen.count):
        row = run_fault(Fault.of(number))
        counts[row["verdict"]] += 1
        slowest = max(slowest, row["seconds"])
        print(json.dumps({"number": number, **row}), flush=True)
    print(f"{dict(counts)}, the slowest took {slowest:g} s")
    return int(set(counts) != {"fine"})


if __name__ == "__main__":
    sys.exit(main())
