"""Ranks that compile other collectives than each other, or nothing, all get a typed error, and none of them hangs."""

from __future__ import annotations

import importlib.util
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import aotkit
from aotkit.driver.ranks import Exchange
from aotkit.errors import RanksDisagree

_spec = importlib.util.spec_from_file_location("several_ranks", Path(__file__).with_name("several_ranks.py"))
several_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several_ranks)
main, run_ranks = several_ranks.main, several_ranks.run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")

GIVEN = torch.arange(12, dtype=torch.float64).view(3, 4)


def tried(fn, *args, **options):
    """What ``fn`` gives compiled, as a list, or what is raised."""
    run = torch.compile(fn, backend="aotkit", fullgraph=True, options={"cache": False, "rank_timeout": 20, **options})
    try:
        return run(*args).tolist()
    except Exception as error:  # noqa: BLE001  # the test looks at it
        inner = getattr(error, "inner_exception", error)
        return f"{type(inner).__name__}: {inner}"


def reduced(x, op="sum"):
    return functional.all_reduce(x * 2, op, dist.group.WORLD) + 1


def gathered(x):
    return functional.all_gather_tensor(x * 2, 0, dist.group.WORLD) + 1


def alike(rank, _folder):
    """Other computations and numbers, the same collectives."""

    def fn(x):
        return reduced(x.sin() + 3) if rank else reduced((x * 5).cos() * 7)

    want = fn(GIVEN).tolist()
    return tried(fn, GIVEN) == want or tried(fn, GIVEN)


def other_operator(rank, _folder):
    return tried(reduced if rank == 0 else gathered, GIVEN)


def other_order(rank, _folder):
    def fn(x):
        first, second = (reduced, gathered) if rank == 0 else (gathered, reduced)
        return first(x).sum() + second(x).sum()

    return tried(fn, GIVEN)


def other_reduction(rank, _folder):
    return tried(lambda x: reduced(x, "sum" if rank == 0 else "max"), GIVEN)


def fewer(rank, _folder):
    return tried(lambda x: reduced(reduced(x)) if rank == 0 else reduced(x), GIVEN)


def other_size(rank, _folder):
    return tried(reduced, GIVEN if rank == 0 else GIVEN[:2].clone())


def other_backward(rank, _folder):
    """Forwards are alike; the gradients of one rank are gathered."""

    def fn(x):
        y = functional.all_reduce(x * 2, "sum", dist.group.WORLD)
        if rank == 0:
            return y * functional.all_gather_tensor_autograd(x, 0, dist.group.WORLD)[:3]
        return y * functional.all_gather_tensor(x.detach(), 0, dist.group.WORLD)[:3]

    return tried(fn, GIVEN.clone().requires_grad_())


def whole_graphs(rank, _folder):
    fn = (lambda x: reduced(x.sin())) if rank == 0 else (lambda x: reduced(x.cos()))
    return tried(fn, GIVEN, compare_ranks="graphs")


def one_fails(rank, _folder):
    """The compile of one rank is refused: it would run eagerly, by itself."""
    disable = ["no-such-pass"] if rank == 1 else []
    return tried(reduced, GIVEN, disable=disable)


def one_is_alone(rank, _folder):
    began = time.monotonic()
    answer = tried(reduced, GIVEN, rank_timeout=2) if rank == 0 else "nothing to do"
    return [answer, time.monotonic() - began]


def first_dies(rank, folder):
    (folder / "somebody dies").touch()
    if rank == 0:
        os._exit(1)
    return tried(reduced, GIVEN, rank_timeout=2)


def without_collectives(rank, _folder):
    """Whatever ranks compute by themselves, in whatever number of graphs, nobody waits."""
    for k in range(rank):
        tried(lambda x, k=k: x.sin() * k, GIVEN)
    want = reduced(GIVEN).tolist()
    return tried(reduced, GIVEN) == want


def other_sizes_later(rank, _folder):
    """One rank meets a new size and compiles again; the others don't, and are not waited for."""

    def fn(x):
        return reduced(x.sum(0))

    run = torch.compile(fn, backend="aotkit", options={"cache": False, "rank_timeout": 5})
    first, sizes = run(GIVEN), (3, 4 + rank, 5 + rank)
    for size in sizes:
        x = GIVEN[:1].expand(size, 4).contiguous()
        torch.testing.assert_close(run(x), fn(x), rtol=1e-12, atol=0)
    return first.tolist() == fn(GIVEN).tolist()


def loaded_and_compiled(rank, _folder):
    """One rank compiled before and finds it in the cache, with the backward; the other compiles."""

    def fn(x):
        return (functional.all_gather_tensor_autograd(x.sin(), 0, dist.group.WORLD) ** 2).sum()

    results = []
    for turn in range(2):
        torch._dynamo.reset()
        x = GIVEN.clone().requires_grad_()
        options = {"cache": turn == 0 or rank == 0, "rank_timeout": 20}
        loss = torch.compile(fn, backend="aotkit", options=options)(x)
        results.append([loss.item(), *torch.autograd.grad(loss, x)[0].flatten().tolist()])
    return results[0] == results[1]


SAME = (alike, without_collectives, other_sizes_later, loaded_and_compiled)
DIFFERENCES = {
    other_operator: ("all_reduce(float64[3, 4], reduce_op=sum)", "all_gather_into_tensor(float64[3, 4], group_size=2)"),
    other_order: ("all_reduce(float64[3, 4], reduce_op=sum)", "all_gather_into_tensor(float64[3, 4], group_size=2)"),
    other_reduction: ("reduce_op=sum", "reduce_op=max"),
    fewer: ("all_reduce(float64[3, 4], reduce_op=sum)", "has nothing more"),
    other_size: ("float64[3, 4]", "float64[2, 4]"),
    other_backward: ("reduce_scatter_tensor(float64[6, 4]", "all_reduce(float64[3, 4]"),
    whole_graphs: (".sin", ".cos"),
}


def several(cases):
    """One case after the other: after a difference the group is as good as before, since nothing was started."""

    def run(rank, folder):
        answers = {}
        for case in cases:
            torch._dynamo.reset()
            answers[case.__name__] = case(rank, folder)
        return answers

    return run


CASES = {f.__name__: f for f in (one_is_alone, first_dies)}
CASES["same"], CASES["differences"] = several(SAME), several((*DIFFERENCES, one_fails))


def test_ranks_with_the_same_collectives_run_them(tmp_path: Path, warm_python: Any) -> None:
    assert (
        run_ranks(warm_python, __file__, "same", tmp_path)
        == [dict.fromkeys((case.__name__ for case in SAME), True)] * 2
    )


def test_a_difference_is_an_error_on_every_rank_that_shows_the_first_one_of_both(
    tmp_path: Path, warm_python: Any
) -> None:
    answers = run_ranks(warm_python, __file__, "differences", tmp_path)
    for case, (mine, its) in DIFFERENCES.items():
        first, second = (answer[case.__name__] for answer in answers)
        start = "RanksDisagree: the ranks [0, 1] did not compile the same graph"
        assert first == second and str(first).startswith(start), first
        lines = first.splitlines()
        assert lines[1].startswith("  rank 0: ") and mine in lines[1], first
        assert lines[2].startswith("  rank 1: ") and its in lines[2], first
    first, second = (answer["one_fails"] for answer in answers)
    assert first.startswith("RanksDisagree") and "rank 1 could not compile it: UnknownPassError" in first, first
    assert second.startswith("UnknownPassError"), second


def test_nobody_waits_longer_than_the_timeout_for_a_rank_that_compiles_nothing(
    tmp_path: Path, warm_python: Any
) -> None:
    (answer, seconds), _ = run_ranks(warm_python, __file__, "one_is_alone", tmp_path)
    assert answer.startswith("RanksDisagree") and "rank 1 did not say within 2 s" in answer, answer
    assert seconds < 60


def test_the_first_rank_may_have_ended(tmp_path: Path, warm_python: Any) -> None:
    _, answer = run_ranks(warm_python, __file__, "first_dies", tmp_path)
    assert answer.startswith("RanksDisagree") and "rank 0" in answer, answer


@pytest.mark.parametrize("alike", [True, False])
def test_what_ranks_posted_is_kept_only_where_they_differ(alike: bool) -> None:
    """Ranks of one process, since a store does not care. A record may be the text of a large graph."""
    store, names = dist.HashStore(), range(3)

    def rank(number: int) -> str:
        exchange = Exchange(store, "comparison", number, names, 60.0, time.monotonic() + 60)
        rows = ["a row"] if alike or number < 2 else ["another row"]
        exchange.post_rows(rows, rows)
        try:
            exchange.finish()
        except RanksDisagree as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(3) as pool:
        told = list(pool.map(rank, names))
    assert [("another row" in text) for text in told] == [not alike] * 3
    for kind in ("rows", "answer"):
        assert [bool(store.get(f"comparison/{kind} of {number}")) for number in names] == [not alike] * 3


def test_the_option_turns_it_off() -> None:
    with pytest.raises(aotkit.UnknownOption, match="compare_ranks"):
        aotkit.Options(compare_ranks="perhaps")  # type: ignore[arg-type]
    with pytest.raises(aotkit.UnknownOption, match="rank_timeout"):
        aotkit.Options(rank_timeout=0)


if __name__ == "__main__":
    main(CASES)
