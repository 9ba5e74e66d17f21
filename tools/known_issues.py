"""Small programs that torch's own backend was reported to compute wrongly, or to let pass, without a word.

    python -m tools.known_issues              # run each with eager, Inductor and aotkit, and print the table
    python -m tools.known_issues --update     # and write it into docs/known-issues.md

Each program is written anew after the report in its number of pytorch/pytorch. What Inductor does is observed, with the
torch that is installed and its C++ compiler; a later torch may do it right. The tests run every row with aotkit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

import aotkit  # noqa: F401  # registers the backend
from tools.workspace import ROOT

__all__ = ["CASES", "Case", "main", "observe", "outcome", "table"]

PAGE = ROOT / "docs" / "known-issues.md"
BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
F = torch.nn.functional


@dataclass(frozen=True, slots=True)
class Case:
    """A program: ``calls`` makes the arguments of each call, one after the other. ``issue``: its number."""

    issue: int
    what: str
    run: Callable[..., Any]
    calls: Callable[[], list[tuple[Any, ...]]]

    @property
    def name(self) -> str:
        """For tests and the command line."""
        return str(self.issue)


def _bytes(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.uint8)


def _abs_of_bytes(x: torch.Tensor) -> torch.Tensor:
    negated = -x.abs()
    return torch.cat([negated, negated]).sum()


def _negated_byte(x: torch.Tensor) -> torch.Tensor:
    return torch.neg(torch.tensor(7, dtype=torch.uint8)) + x


def _any_of_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.any(x) * 200 + 100


def _wide_sum(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y + x).to(torch.int64)


def _clamped(x: torch.Tensor) -> torch.Tensor:
    return torch.clamp(x, min=-3.4e39, max=3.4e39)


def _argmax_turned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y.sin_()
    return y.t().argmax()


def _selected(x: torch.Tensor) -> torch.Tensor:
    base = x.unsqueeze(1)
    return torch.cat([base.select(1, 0), base.select(1, 1)], -1)


def _added_at(x: torch.Tensor, index: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return torch.index_add(x, 0, index, source).clamp_max(1.0)


def _looked_up(index: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(index, weight)


def _indexed(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return (x - 0.5)[index]


def _doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x + y


def _pairs() -> list[tuple[Any, ...]]:
    base = torch.ones(8)
    return [(torch.ones(4), torch.ones(4)), (base[:4], base[2:6])]


def _view_of_pairs(x: torch.Tensor) -> torch.Tensor:
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:5] = 2
    return y.view(torch.int64)


def _row_of_an_alias(whole: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    whole.add_(100)
    return part[0]


def _aliases() -> list[tuple[Any, ...]]:
    whole = torch.arange(24.0).reshape(4, 6)
    return [(whole, whole[1:])]


def _sign_of_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.copysign(x, -0.0)


def _stacked(wide: torch.Tensor, y: torch.Tensor, alpha: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    x = wide[..., 16]
    positive, rates = F.softplus(x) + 1e-4, F.softplus(y) + 1e-4
    first = torch.special.gammaln(positive + alpha.view(1, -1))
    second = torch.special.erf(x * beta.view(1, -1))
    return torch.stack([first, second, torch.special.xlogy(positive, rates)], dim=-1)


def _added_to_itself(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    at = x + 10
    y[at] += y[at]
    return y


def _large_range(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, 11, dtype=torch.int64) * torch.tensor([1_000_000_000]) + x


def _view_written(x: torch.Tensor) -> torch.Tensor:
    part = x[0::2]
    part.add_(1.0)
    return x * 1


def _random(*shapes: tuple[int, ...]) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randn(shape, generator=generator) for shape in shapes)]


def _most_int() -> list[tuple[Any, ...]]:
    return [(torch.full((8,), 2_000_000_000, dtype=torch.int32), torch.full((8,), 3, dtype=torch.int32))]


CASES = (
    Case(187018, "`-x.abs()` of uint8, joined and summed", _abs_of_bytes, lambda: [(_bytes(200, 200),)]),
    Case(161763, "a negated uint8 number plus floats", _negated_byte, lambda: _random((2, 2))),
    Case(105264, "uint8 numbers added, then widened", lambda x: (x + x).to(torch.int16), lambda: [(_bytes(128),)]),
    Case(198081, "arithmetic on `torch.any` of uint8", _any_of_bytes, lambda: [(_bytes(0, 3),)]),
    Case(190764, "int32 products that overflow, then widened", _wide_sum, _most_int),
    Case(175966, "an int64 range times a large number", _large_range, lambda: [(torch.zeros(1, dtype=torch.int64),)]),
    Case(174172, "`copysign` with the number -0.0", _sign_of_zero, lambda: _random((6,))),
    Case(183082, "`argmax` of a transposed view after `sin_`", _argmax_turned, lambda: _random((5, 7))),
    Case(185702, "slices, special functions and `stack`", _stacked, lambda: _random((4, 8, 32), (4, 8), (8,), (8,))),
    Case(138908, "`y[i] += y[i]` with computed places", _added_to_itself,
         lambda: [(torch.tensor([[-10, -10]]), *_random((2, 32))[0])]),
    Case(139789, "arguments that overlap in the second call only", _doubled, _pairs),
    Case(198101, "a view of another type, read before a write", _view_of_pairs,
         lambda: [(torch.arange(-12, 12).reshape(4, 6),)]),
    Case(198095, "a view of an argument that shares memory with a written one", _row_of_an_alias, _aliases),
    Case(93363, "a write through a view of a tensor with a history", _view_written,
         lambda: [(torch.ones(4, requires_grad=True) * 1,)]),
    Case(195675, "`clamp` by a number that float32 does not have", _clamped, lambda: _random((4,))),
    Case(183769, "`select` beyond the end", _selected, lambda: _random((3, 4))),
    Case(185885, "`index_add` at place -1", _added_at,
         lambda: [(torch.zeros(4, 3), torch.tensor([0, -1]), torch.ones(2, 3))]),
    Case(183608, "`embedding` of the index -2", _looked_up, lambda: [(torch.tensor([2, -2, 4]), torch.ones(5, 2))]),
    Case(195402, "an index out of range in a large tensor", _indexed,
         lambda: [(torch.ones(1, 8, 66, 66), torch.tensor([[1]]))]),
)  # fmt: skip


def observe(case: Case, how: str) -> list[Any]:
    """What each call gives and leaves in its arguments, ``how``: ``"eager"`` or a backend. An error is its type."""
    torch._dynamo.reset()
    options: dict[str, Any] | None = {"fallback": "error"} if how == "aotkit" else None
    run = case.run if how == "eager" else torch.compile(case.run, backend=how, options=options)
    seen: list[Any] = []
    for args in case.calls():
        try:
            seen.append([run(*args).detach(), *(a.detach().clone() for a in args)])
        except Exception as error:  # noqa: BLE001  # whatever eager raises is what is compared
            seen.append(f"raises {type(error).__name__}")
    return seen


def agrees(wanted: list[Any], seen: list[Any]) -> bool:
    """Whether the same was seen, rounding left aside; every error is as good as another."""
    for want, got in zip(wanted, seen, strict=True):
        if isinstance(want, str) or isinstance(got, str):
            if not (isinstance(want, str) and isinstance(got, str)):
                return False
            continue
        for a, b in zip(want, got, strict=True):
            if a.dtype != b.dtype or not torch.allclose(a, b, rtol=2e-5, atol=1e-6, equal_nan=True):
                return False
            if not torch.equal(a.signbit(), b.signbit()):
                return False
    return True


def outcome(case: Case, how: str) -> str:
    """``"as eager"``, or in a few words what differs."""
    wanted, seen = observe(case, "eager"), observe(case, how)
    if agrees(wanted, seen):
        return "as eager"
    words = list(_differences(wanted, seen))
    return words[-1]


def _differences(wanted: list[Any], seen: list[Any]) -> Iterator[str]:
    for want, got in zip(wanted, seen, strict=True):
        if isinstance(got, str):
            yield f"{got}, where eager has a result"
        elif isinstance(want, str):
            yield f"no error, where eager {want}"
        else:
            yield "another result than eager's"


def table(results: list[tuple[Case, str, str]]) -> str:
    """As Markdown."""
    rows = ["| issue | program | Inductor | aotkit |", "|---|---|---|---|"]
    for case, inductor, ours in results:
        link = f"[{case.issue}](https://github.com/pytorch/pytorch/issues/{case.issue})"
        rows.append(f"| {link} | {case.what} | {inductor} | {ours} |")
    return "\n".join(rows)


def _elsewhere(case: Case, how: str) -> str:
    """The outcome in a process of its own, which may die."""
    command = [sys.executable, "-m", "tools.known_issues", "--one", case.name, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode < 0:
        return "ends the process"
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return str(json.loads(done.stdout.splitlines()[-1]))


def main(arguments: list[str] | None = None) -> int:
    """Print the table, and with ``--update`` write it into the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--update", action="store_true", help="write docs/known-issues.md")
    parser.add_argument("--one", nargs=2, metavar=("ISSUE", "BACKEND"), help="one outcome, as JSON")
    given = parser.parse_args(arguments)
    if given.one:
        (case,) = (case for case in CASES if case.name == given.one[0])
        print(json.dumps(outcome(case, given.one[1])))
        return 0
    results = []
    for case in CASES:
        results.append((case, _elsewhere(case, "inductor"), _elsewhere(case, "aotkit")))
        print(table(results[-1:]).splitlines()[-1], flush=True)
    if given.update:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        made = f"With torch {torch.__version__.partition('+')[0]} on the CPU:\n\n{table(results)}\n\n"
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}{END}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
