"""One rank compiles and the others load what it wrote, unless it fails, dies or takes too long."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import random
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

import aotkit
from aotkit_cache import CacheWarning

_spec = importlib.util.spec_from_file_location("several_ranks", Path(__file__).with_name("several_ranks.py"))
several_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several_ranks)
run_ranks = several_ranks.run_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")
SECRET = {"AOTKIT_CACHE_KEY": "a secret of the ranks"}


class Net(torch.nn.Module):
    """A layer whose parts are summed over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 16).double(), torch.nn.Linear(16, 4).double()

    def forward(self, x):
        hidden = functional.all_reduce(torch.tanh(self.first(x)), "sum", dist.group.WORLD)
        return self.second(hidden)


def train(run, net, rank, steps=3):
    """Losses and then parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for step in range(steps):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = run(torch.randn(3, 8, dtype=torch.float64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found + [value for p in net.parameters() for value in p.detach().flatten().tolist()]


def compiles_of(recorder):
    """Names of the graphs that this process compiled, and of those that it loaded."""
    return [sorted(g.name.rpartition("-")[2] for g in recorder.graphs if g.loaded is had) for had in (False, True)]


def shared(rank, folder, **options):
    """A training in eager mode and one that is compiled by one rank; each rank has a folder of its own."""
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    net = Net()
    want = train(net, net, rank)
    recorder, net = aotkit.Recorder(), Net()
    options = {"observer": recorder, "share_compiles": True, "rank_timeout": 100, **options}
    sys.modules.pop("aotkit.driver.run", None)  # whoever imports it imports all that compiles
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = train(torch.compile(net, backend="aotkit", options=options), net, rank)
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-12, atol=1e-12)
    notices = [str(w.message) for w in told if issubclass(w.category, CacheWarning)]
    return [*compiles_of(recorder), notices, "aotkit.driver.run" in sys.modules]


def other_secrets(rank, folder):
    """Ranks on machines that have no key in common refuse each other's entries, and compile for themselves."""
    os.environ["AOTKIT_CACHE_KEY"] = f"a secret of {rank} alone"
    return shared(rank, folder)


def measured_choices(rank, folder):
    """Ranks that measure, and would choose otherwise: how often each measured, and its number of kernels."""
    from aotkit_inductor_lower.targets.cpu.target import CpuTarget

    chosen, measured, found = CpuTarget.choose, [], {}

    def by_measure(self, product, buffers, options, measure):
        """As a device does that is faster with our products on the first rank, and with ATen's on the second."""
        measured.append(product.name)
        options = dataclasses.replace(options, contractions="aten" if rank else "generated")
        return chosen(self, product, buffers, options, measure)

    CpuTarget.choose = by_measure
    for shares in (False, True):
        torch._dynamo.reset()
        os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}{shares}")
        measured.clear()
        recorder, net, x = aotkit.Recorder(), torch.nn.Linear(64, 64), torch.randn(64, 64)
        options = {"observer": recorder, "share_compiles": shares, "rank_timeout": 100}
        run = torch.compile(net, backend="aotkit", options=options)
        with torch.no_grad():
            torch.testing.assert_close(run(x), net(x), rtol=1e-4, atol=1e-4)
        found[str(shares)] = [len(measured), [graph.report.kernel_count for graph in recorder.graphs]]
    return found


def compiler_dies(rank, folder):
    """The rank that compiles is killed while it does; the others don't meet it in a collective."""
    from aotkit.driver import graph_compiler

    (folder / "somebody dies").touch()
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    if rank == 0:
        graph_compiler.GraphCompiler.compile = lambda *_: ((folder / "began").touch(), os._exit(1))
    else:
        several_ranks.wait_for(folder / "began")
    return quietly(lambda x: x.sin() * 2, torch.ones(3))


def quietly(fn, *args, timeout=2):
    recorder = aotkit.Recorder()
    options = {"observer": recorder, "share_compiles": True, "rank_timeout": timeout}
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        got = torch.compile(fn, backend="aotkit", options=options)(*args)
    torch.testing.assert_close(got, fn(*args))
    return [*compiles_of(recorder), [str(w.message) for w in told if issubclass(w.category, CacheWarning)]]


def compiler_is_slow(rank, folder):
    """The rank that compiles needs longer than the others wait."""
    from aotkit.driver import graph_compiler

    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    compiled = graph_compiler.GraphCompiler.compile

    def slowly(self, args):
        (folder / "began").touch()
        for other in (1, 2):
            several_ranks.wait_for(folder / f"done{other}")
        return compiled(self, args)

    if rank == 0:
        graph_compiler.GraphCompiler.compile = slowly
    else:
        several_ranks.wait_for(folder / "began")
    answer = quietly(lambda x: x.sin() * 2, torch.ones(3))
    (folder / f"done{rank}").touch()
    return answer


def faults(rank, folder, seed=0, count=8):
    """Compiles of graphs with a collective, of which a random rank's fails, is late or is another one."""
    from aotkit.driver import graph_compiler

    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    compiled, chosen, answers = graph_compiler.GraphCompiler.compile, random.Random(seed), []
    plan = [(chosen.choice(["fails", "refused", "late", "other", "none"]), chosen.randrange(2)) for _ in range(count)]
    for number, (fault, at) in enumerate(plan):
        torch._dynamo.reset()

        def faulty(self, args, fault=fault, at=at):
            if rank == at and fault == "fails":
                raise KeyError("a bug")
            if rank == at and fault == "refused":
                raise aotkit.UnknownOption("refused")
            if rank == at and fault == "late":
                time.sleep(2)
            return compiled(self, args)

        def fn(x, op="max" if fault == "other" and rank == at else "sum", number=number):
            return functional.all_reduce(x * (number + 2), op, dist.group.WORLD)

        graph_compiler.GraphCompiler.compile = faulty
        x = torch.full((3,), float(rank))
        try:
            got = torch.compile(fn, backend="aotkit", options={"share_compiles": True, "rank_timeout": 20})(x)
            torch.testing.assert_close(got, torch.full((3,), number + 2.0))
            answers.append("right")
        except Exception as error:  # noqa: BLE001  # the test looks at it
            answers.append(type(getattr(error, "inner_exception", error)).__name__)
    return [[fault for fault, _ in plan], answers]


def hundred_faults(rank, folder):
    """For a longer look: `python packages/aotkit/tests/test_aotkit_share_compiles.py hundred_faults FOLDER 2`."""
    plan, answers = faults(rank, folder, seed=1, count=100)
    counts = sorted((fault, answer, plan.count(fault)) for fault, answer in set(zip(plan, answers, strict=True)))
    print(f"rank {rank}: {counts}", flush=True)
    return len(answers)


def test_one_of_four_ranks_compiles_and_the_others_load(tmp_path: Path, warm_python: Any) -> None:
    answers = run_ranks(warm_python, __file__, "shared", tmp_path, 4, **SECRET)
    compiled = [answer for answer in answers if answer[0]]
    assert len(compiled) == 1 and compiled[0][0] == ["backward", "forward"], answers
    assert all(answer[1] == ["backward", "forward"] for answer in answers if answer is not compiled[0]), answers
    assert not any(notices for _, _, notices, _ in answers), answers
    assert [imported for *_, imported in answers] == [answer is compiled[0] for answer in answers], "what compiles"


def test_ranks_without_a_common_secret_compile_for_themselves(tmp_path: Path, warm_python: Any) -> None:
    answers = run_ranks(warm_python, __file__, "other_secrets", tmp_path)
    assert [answer[0] for answer in answers] == [["backward", "forward"]] * 2, answers
    assert any("signed" in notice for answer in answers for notice in answer[2]), answers


@pytest.mark.parametrize("case", ["compiler_dies", "compiler_is_slow"])
def test_nobody_waits_longer_than_the_timeout_for_the_rank_that_compiles(
    case: str, tmp_path: Path, warm_python: Any
) -> None:
    answers = run_ranks(warm_python, __file__, case, tmp_path, 3, **SECRET)
    assert (answers[0] is None) == (case == "compiler_dies")
    for compiled, loaded, notices in answers[1:]:
        assert compiled + loaded == ["inference"], answers  # the later one may find what the other has compiled
        assert len(notices) == 1 or loaded, answers  # and then without having waited
        assert all("computing without waiting" in notice for notice in notices), answers
    assert any(answer[0] for answer in answers[1:])


def test_random_faults_end_on_every_rank(tmp_path: Path, warm_python: Any) -> None:
    (plan, first), (_, second) = run_ranks(warm_python, __file__, "faults", tmp_path, 2, **SECRET)
    ends = {  # a fault of a rank that only loads does nothing
        "none": [{"right"}],
        "late": [{"right"}],
        "other": [{"RanksDisagree"}],
        "fails": [{"right"}, {"RanksDisagree"}],
        "refused": [{"right"}, {"RanksDisagree", "UnknownOption"}],
    }
    for fault, mine, its in zip(plan, first, second, strict=True):
        assert {mine, its} in ends[fault], (fault, mine, its)
    assert len(first) == len(plan) == len(second)


def test_one_rank_measures_and_all_run_what_it_chose(tmp_path: Path, warm_python: Any) -> None:
    first, second = run_ranks(warm_python, __file__, "measured_choices", tmp_path, **SECRET)
    assert (first["False"], second["False"]) == ([1, [1]], [1, [0]]), "each for itself: they choose otherwise"
    measured, kernels = zip(first["True"], second["True"], strict=True)
    assert sorted(measured) == [0, 1] and kernels[0] == kernels[1] == [measured[0]], "one chooses for both"


if __name__ == "__main__":
    cases = (shared, other_secrets, measured_choices, compiler_dies, compiler_is_slow, faults, hundred_faults)
    several_ranks.main({case.__name__: case for case in cases})
