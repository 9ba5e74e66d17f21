"""One rank compiles a function for all: the others load it without a trace, and nothing that differs is overlooked."""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn

import aotkit
from aotkit_cache.stores import DistributedStore

_spec = importlib.util.spec_from_file_location("several_ranks", Path(__file__).with_name("several_ranks.py"))
several_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several_ranks)
main, run_ranks = several_ranks.main, several_ranks.run_ranks

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")

X = torch.arange(12, dtype=torch.float64).view(3, 4)
OPTIONS = aotkit.Options(rank_timeout=20)
TYPED = ("CompileError", "RanksDisagree", "GuardError", "PackageError")


class Net(nn.Module):
    """Gathers a parameter, as simple FSDP does, and sums its result over the ranks."""

    def __init__(self, rank=0, ranks=2):
        super().__init__()
        torch.manual_seed(0)
        whole = torch.randn(4, 6, dtype=torch.float64)
        self.shard = nn.Parameter(whole.chunk(ranks)[rank].clone())
        self.last = nn.Linear(6, 2, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(6, dtype=torch.float64)

    def forward(self, x):
        weight = functional.all_gather_tensor_autograd(self.shard, 0, dist.group.WORLD)
        return self.last(self.norm(x @ weight).tanh())


def steps(model, run, rank):
    """Losses, parameters and buffers after some steps on data of the rank's own."""
    losses = []
    for number in range(4):
        torch.manual_seed(10 * number + rank)
        loss = run(model, torch.randn(5, 4, dtype=torch.float64)).square().mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= 0.1 * grad
        losses.append(loss.item())
    return [*losses, *(value.detach().flatten().tolist() for value in model.state_dict().values())]


def traces():
    return torch._dynamo.utils.counters["stats"].get("calls_captured", 0)


def trains(rank, _folder):
    model = Net(rank)
    before = traces()
    compiled = aotkit.saved.compile_for_ranks(model, (torch.randn(5, 4, dtype=torch.float64),), options=OPTIONS)
    traced = traces() - before
    got, want = steps(model, compiled, rank), steps(Net(rank), lambda m, x: m(x), rank)
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(torch.tensor(mine), torch.tensor(its), rtol=1e-12, atol=1e-12)
    return [traced > 0, len(got), kept()]


def kept():
    """Whether what the first rank compiled is still in the store."""
    store, name = dist.distributed_c10d._get_default_store(), dist.group.WORLD.group_name
    number = store.add(f"aotkit/{name}/count of {dist.get_rank()}", 0)
    dist.barrier()
    return DistributedStore(store, prefix=f"aotkit/{name}/{number}").stat("function") is not None


def other_sizes(rank, _folder):
    def fn(x, y, scale=2.0):
        return (x @ y * scale).sum(0)

    compiled = aotkit.saved.compile_for_ranks(fn, (X, torch.ones(4, 5).double()), dynamic=True, options=OPTIONS)
    for rows in (3 + rank, 5, 7 + rank):
        x, y = torch.randn(rows, 4, dtype=torch.float64), torch.randn(4, 2 * rows, dtype=torch.float64)
        torch.testing.assert_close(compiled(x, y), fn(x, y), rtol=1e-12, atol=1e-12)
    return "right"


def with_a_group(rank, _folder):
    """A group of the second rank alone compiles by itself."""
    alone = dist.new_group([1])
    if rank == 0:
        return "not in it"
    compiled = aotkit.saved.compile_for_ranks(torch_sin, (X,), group=alone, options=OPTIONS)
    return "right" if torch.equal(compiled(X), X.sin()) else "wrong"


def torch_sin(x):
    return x.sin()


# What differs between the ranks, and how a function reads it.

RANK = int(os.environ.get("TEST_RANK", "0"))


class Color(enum.Enum):
    RED = 0
    BLUE = 1


@dataclasses.dataclass
class Settings:
    number: int


class Holder:
    shared = 0

    def __init__(self, number):
        self.number = number


class Told:
    """Values that :func:`tell` sets to the number of the rank, in this module."""


NUMBER, TABLE, LIST, PAIR, SETTINGS, HOLDER, COLOR = 0, {"a": 0}, [0], (0, 0), Settings(0), Holder(0), Color.RED
OPERATOR, PACKET, HELPER, GET_RANK, TENSOR, TEXT = torch.sin, torch.ops.aten.sin, None, dist.get_rank, X, "0"
BUILTIN, PARTIAL, WORLD = torch.relu, None, None


def tell(rank):
    """Every global variable differs between ranks."""
    globals().update(
        {"NUMBER": rank, "TABLE": {"a": rank}, "LIST": [rank], "PAIR": (1, rank), "SETTINGS": Settings(rank)},
        HOLDER=Holder(rank),
        COLOR=list(Color)[rank],
        OPERATOR=(torch.sin, torch.cos)[rank],
        PACKET=(torch.ops.aten.sin, torch.ops.aten.cos)[rank],
        HELPER=(helper_of_first, helper_of_second)[rank],
        TENSOR=X.clone() if rank == 0 else X.float(),
        TEXT=str(rank),
        BUILTIN=(torch._C._nn.gelu, torch._C._nn.softplus)[rank],
        PARTIAL=functools.partial(scaled, by=rank),
        WORLD=dist.group.WORLD,
    )
    Holder.shared = OfTheClass.number = rank
    OfTheClass.table = {"a": rank}
    scaled.by = rank
    torch.testing.told = rank
    os.environ["TEST_RANK"] = str(rank)


def helper_of_first(x):
    return x + 1


def helper_of_second(x):
    return x + 2


def scaled(x, by):
    return x * by


@torch._dynamo.assume_constant_result
def constant():
    return int(os.environ["TEST_RANK"])


def closed(rank):
    def inner(x):
        return x + rank

    return inner


class Attribute(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.rank = rank

    def forward(self, x):
        return x + self.rank


class Shape(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1 + 3 * rank, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight


class Depth(nn.Module):
    def __init__(self, rank):
        super().__init__()
        self.layers = nn.ModuleList(Attribute(1) for _ in range(1 + rank))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Asks(nn.Module):
    def forward(self, x):
        return x + dist.get_rank()


class AsksGroup(nn.Module):
    def forward(self, x):
        return x + WORLD.rank()


class OfTheClass(nn.Module):
    number, table = 0, {"a": 0}

    @property
    def by_property(self):
        return self.number

    @classmethod
    def by_class(cls, x):
        return x * (cls.number + 1)

    def forward(self, x):
        return self.by_class(x) + self.number


class OfItsProperty(OfTheClass):
    def forward(self, x):
        return x + self.by_property


class OfItsTable(OfTheClass):
    def forward(self, x):
        return x + self.table["a"]


class Hooked(nn.Module):
    def __init__(self, rank):
        super().__init__()
        if rank:
            self.register_forward_hook(lambda module, given, result: result + 1)

    def forward(self, x):
        return x * 2


READERS = {
    "number": lambda: lambda x: x + NUMBER,
    "comparison": lambda: lambda x: x + 1 if NUMBER == 0 else x + 2,
    "table": lambda: lambda x: x + TABLE["a"],
    "list": lambda: lambda x: x + LIST[0],
    "sum of a list": lambda: lambda x: x + sum(LIST),
    "pair": lambda: lambda x: x + PAIR[1],
    "settings": lambda: lambda x: x + SETTINGS.number,
    "object": lambda: lambda x: x + HOLDER.number,
    "attribute of a class": lambda: lambda x: x + Holder.shared,
    "enum": lambda: lambda x: x + 1 if COLOR is Color.RED else x + 2,
    "value of an enum": lambda: lambda x: x + COLOR.value,
    "operator": lambda: lambda x: OPERATOR(x),
    "packet": lambda: lambda x: PACKET(x),
    "builtin": lambda: lambda x: BUILTIN(x),
    "helper": lambda: lambda x: HELPER(x),
    "type of a tensor": lambda: lambda x: x + TENSOR,
    "text": lambda: lambda x: x + int(TEXT),
    "length of a text": lambda: lambda x: x + len(TEXT * (NUMBER + 1)),
    "partial": lambda: lambda x: PARTIAL(x),
    "attribute of a function": lambda: lambda x: x + scaled.by,
    "attribute of a module": lambda: lambda x: x + torch.testing.told,
    "rank": lambda: lambda x: x + dist.get_rank(),
    "rank by another name": lambda: lambda x: x + GET_RANK(),
    "rank of the group": lambda: lambda x: x + dist.group.WORLD.rank(),
    "environment": lambda: lambda x: x + int(os.environ["TEST_RANK"]),
    "environment with a default": lambda: lambda x: x + int(os.environ.get("TEST_RANK", "0")),
    "getenv": lambda: lambda x: x + int(os.getenv("TEST_RANK", "0")),
    "constant result": lambda: lambda x: x + constant(),
    "enclosing": lambda: closed(NUMBER),
    "default": lambda: lambda x, by=NUMBER: x + by,
    "keyword default": lambda: lambda x, *, by=NUMBER: x + by,
    "code": lambda: (lambda x: x.sin()) if NUMBER else (lambda x: x.cos()),
    "attribute": lambda: Attribute(NUMBER),
    "shape of a parameter": lambda: Shape(NUMBER),
    "number of layers": lambda: Depth(NUMBER),
    "class of a module": lambda: Attribute(1) if NUMBER else Shape(0),
    "module that asks": Asks,
    "module that asks the group": AsksGroup,
    "number of the class": OfTheClass,
    "property of the class": OfItsProperty,
    "table of the class": OfItsTable,
    "hook": lambda: Hooked(NUMBER),
}
ARGUMENTS = {
    "sizes": lambda rank: X[: 2 + rank].clone(),
    "type": lambda rank: X if rank else X.float(),
    "strides": lambda rank: X.clone() if rank else X.T.contiguous().T,
    "gradient": lambda rank: X.clone().requires_grad_(bool(rank)),
    "kind": lambda rank: 3.0 if rank else X,
}


def attempt(fn, x):
    """``right`` where the compiled function gives what eager mode gives here, else what is raised, or the numbers."""
    torch._dynamo.reset()
    arguments = (fn, x) if isinstance(fn, nn.Module) else (x,)
    try:
        compiled = aotkit.saved.compile_for_ranks(fn, (x,), options=OPTIONS)
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return f"{type(error).__name__}: {error}"
    got, want = compiled(*arguments), fn(x)
    return "right" if torch.equal(got, want) else f"wrong: {got.tolist()}"


def differences(rank, _folder):
    tell(rank)
    answers = {name: attempt(make(), X) for name, make in READERS.items()}
    for name, make in ARGUMENTS.items():
        answers[f"argument: {name}"] = attempt(torch_square, make(rank))
    with torch.set_grad_enabled(rank == 0):
        answers["mode"] = attempt(torch_square, X.clone().requires_grad_())
    return answers


def torch_square(x):
    return x * x


def alike(rank, _folder):
    """Global variables of the same values are no reason to refuse."""
    tell(0)
    names = {*READERS} - {"rank", "rank by another name", "rank of the group", "environment", "getenv"}
    names -= {"environment with a default", "constant result", "module that asks", "module that asks the group"}
    return {name: attempt(READERS[name](), X) for name in sorted(names)}


def breaks(x):
    torch._dynamo.graph_break()
    return x * 2


def uncompiled(rank, _folder):
    return attempt(breaks, X)


def second_is_missing(rank, _folder):
    return missing(rank, 0)


def first_is_missing(rank, _folder):
    return missing(rank, 1)


def missing(rank, here):
    if rank != here:
        return "not here"
    began = time.monotonic()
    try:
        aotkit.saved.compile_for_ranks(torch_sin, (X,), options=aotkit.Options(rank_timeout=2))
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return [f"{type(error).__name__}: {error}", time.monotonic() - began]
    return "no error"


def first_dies(rank, folder):
    (folder / "somebody dies").touch()
    if rank == 0:
        os._exit(1)
    return missing(rank, 1)


def other_key(rank, folder):
    os.environ["AOTKIT_CACHE_KEY"] = f"the secret of this machine, {rank}"
    return attempt(torch_sin, X)


def several(*cases):
    def run(rank, folder):
        return {case.__name__: case(rank, folder) for case in cases}

    return run


CASES = {f.__name__: f for f in (differences, alike, first_dies, first_is_missing, second_is_missing)}
CASES["right"] = several(trains, other_sizes, with_a_group)
CASES["failures"] = several(uncompiled, other_key)


def test_ranks_train_with_what_the_first_one_compiled(tmp_path: Path, warm_python: Any) -> None:
    first, second = run_ranks(warm_python, __file__, "right", tmp_path)
    assert isinstance(first, dict) and isinstance(second, dict), (first, second)
    assert first["trains"] == [True, 12, False] and second["trains"] == [False, 12, False], (first, second)
    assert first["other_sizes"] == second["other_sizes"] == "right"
    assert second["with_a_group"] == "right"


def test_nothing_that_differs_between_ranks_is_overlooked(tmp_path: Path, warm_python: Any) -> None:
    answers = run_ranks(warm_python, __file__, "differences", tmp_path)
    assert len(answers[0]) == len(READERS) + len(ARGUMENTS) + 1
    unguarded = {"attribute of a class"} if RELEASE < (2, 12) else set()  # by Dynamo, whatever the backend
    for name in set(answers[0]) - unguarded:
        both = [answer[name] for answer in answers]
        assert both == ["right", "right"] or all(text.startswith(TYPED) for text in both), (name, both)
    refused = {name for name in answers[0] if answers[0][name] != "right"}
    assert {*READERS} - unguarded <= refused


def test_equal_variables_are_no_reason_to_refuse(tmp_path: Path, warm_python: Any) -> None:
    answers = run_ranks(warm_python, __file__, "alike", tmp_path)
    refused = {name: text for name, text in answers[0].items() if text != "right"}
    assert not refused and answers[0] == answers[1], refused


def test_all_ranks_hear_of_a_failure_in_time(tmp_path: Path, warm_python: Any) -> None:
    first, second = run_ranks(warm_python, __file__, "failures", tmp_path)
    assert "torch._dynamo" in first["uncompiled"] or "Unsupported" in first["uncompiled"], first
    assert second["uncompiled"].startswith("RanksDisagree") and "rank 0 could not compile" in second["uncompiled"]
    assert second["other_key"].startswith("PackageError") and first["other_key"].startswith("RanksDisagree")


@pytest.mark.parametrize(("case", "here"), [("second_is_missing", 0), ("first_is_missing", 1)])
def test_nobody_waits_longer_than_the_timeout_for_a_rank_that_does_not_come(
    case: str, here: int, tmp_path: Path, warm_python: Any
) -> None:
    text, seconds = run_ranks(warm_python, __file__, case, tmp_path)[here]
    assert text.startswith(("RanksDisagree", "CompileError")) and "within 2 s" in text, text
    assert seconds < 60


def test_the_first_rank_may_have_ended(tmp_path: Path, warm_python: Any) -> None:
    _, (text, _) = run_ranks(warm_python, __file__, "first_dies", tmp_path)
    assert text.startswith(TYPED) and "first rank" in text, text


if __name__ == "__main__":
    main(CASES)
