"""Arguments that are given other storages, or whose storage gets another size, against eager mode."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import GraphMetadata, records
from aotkit_runtime_wrappers import WrapperPlan, build_plan, overlap
from aotkit_runtime_wrappers.errors import AliasingChangedError, PlanError

Check = Callable[..., int]
pytestmark = pytest.mark.covers("F4.6")


def _filled(x: Tensor, *sizes: int) -> None:
    x.resize_(*sizes)
    x.fill_(2)


CHANGES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "data of an argument": lambda x, y: setattr(x, "data", y),
    "data of a row of it": lambda x, y: setattr(x, "data", y[1:]),
    "data of its transpose": lambda x, y: setattr(x, "data", y.t()),
    "data of what is computed": lambda x, y: setattr(x, "data", y * 2),
    "set_": lambda x, y: x.set_(y),
    "set_ rows": lambda x, y: x.set_(y[1:]),
    "set_ a part": lambda x, y: x.set_(y[1:, 1:3].t()),
    "set_ what is computed": lambda x, y: x.set_(y * 2),
    "set_ and write": lambda x, y: (x.set_(y), x.mul_(3)),
    "write and set_": lambda x, y: (x.mul_(3), x.set_(y)),
    "resize_": lambda x, y: _filled(x, 5, 7),
    "resize_ to less": lambda x, y: x.resize_(2, 3),
}
RESULTS: dict[str, Callable[[Tensor, Tensor, Tensor], list[Any]]] = {
    "nothing": lambda x, y, z: [],
    "views": lambda x, y, z: [x, x.sum(), x[1:], y.view(-1), (y * z).sum()],
}


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("result", RESULTS)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_another_storage_is_what_eager_mode_gives(same_as_eager: Check, change: str, result: str, grad: bool) -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Any]:
        CHANGES[change](x, y)
        return RESULTS[result](x, y, z)

    def make(n: int = 3) -> list[Tensor]:
        torch.manual_seed(n)
        return [torch.randn(n, 4), torch.randn(n, 4), torch.randn(n, 4, requires_grad=grad)]

    compared = same_as_eager(fn, make)
    assert compared == 2


def test_sizes_of_new_storages_vary(same_as_eager: Check) -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Any]:
        x.set_(y[1:])
        _filled(z, y.shape[0] * 2, 5)
        return [y.sum()]

    compared = same_as_eager(
        fn, lambda n: [torch.zeros(n, 4), torch.arange(4.0 * n + 24).view(n + 6, 4), torch.ones(n, 4)], calls=(3, 4, 7)
    )
    assert compared == 3


def test_storages_are_released_and_come_back(how: Any) -> None:
    def fn(x: Tensor, y: Tensor) -> list[Any]:
        total = x.sum()
        x.untyped_storage().resize_(0)
        return [total, y * 2]

    like = records.TensorMeta("float32", "cpu", ("s0", 4), (4, 1), 0, False)
    change = records.StorageChange(num_bytes="s0*16 - 16")
    record = GraphMetadata(
        inputs=(records.InputInfo(0, records.InputKind.TENSOR, like, mutation=records.MutationKind.STORAGE,
                                   storage=change, version_steps=2),),
        outputs=(records.OutputInfo(0, records.OutputKind.FRESH, graph_output=0),),
        symbols=(records.SymbolBinding("s0", 0, "size", 0),),
        num_forward_outputs=1,
    )  # fmt: skip
    plan = build_plan(record)
    assert WrapperPlan.from_json(plan.to_json()) == plan
    assert "in0.untyped_storage().resize_(s0*16 - 16)" in str(plan)
    call = how(plan, lambda x: [x.sum()])
    for n in (3, 5):
        x = torch.ones(n, 4)
        (total,) = call([x])
        assert total.item() == 4 * n and x.untyped_storage().nbytes() == 16 * n - 16 and x._version == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"storage": records.StorageChange(resized=True)}, "in0 is resized but its new sizes are not recorded"),
        ({"kind": records.InputKind.SYMINT}, "input 0 is a symint and cannot be mutated"),
        ({"storage": records.StorageChange(num_bytes="s3*2")}, r"symbols \['s3'\] are used in the metadata"),
    ],
)
def test_records_of_storages_that_contradict_each_other_are_refused(changes: Any, message: str) -> None:
    like = records.TensorMeta("float32", "cpu", (3,), (1,), 0, False)
    info = {"index": 0, "kind": records.InputKind.TENSOR, "meta": like, "mutation": records.MutationKind.STORAGE}
    with pytest.raises(PlanError, match=message):
        build_plan(GraphMetadata((records.InputInfo(**(info | changes)),), ()))


def test_parts_of_one_memory_are_compared_with_those_in_the_same_bytes(monkeypatch):
    asked = mock.Mock(side_effect=overlap.tensors_overlap)
    monkeypatch.setattr(overlap, "tensors_overlap", asked)
    flat = torch.zeros(4000)
    parts, names = flat.split(10), [f"in{k}" for k in range(401)]
    overlap.refuse_new_aliases(parts[:200], parts[200:], " ".join(names[:200]), " ".join(names[200:400]))
    assert not asked.called
    with pytest.raises(AliasingChangedError, match=r"input in3 is mutated .* with input in400"):
        overlap.refuse_new_aliases(
            parts[:200], [*parts[200:], flat[39:41]], " ".join(names[:200]), " ".join(names[200:])
        )
    assert asked.call_count < 4


def test_random_views_share_memory_where_a_comparison_of_all_says_so():
    draw, refused = random.Random(0), 0
    for _ in range(300):
        memories = [torch.zeros(24), torch.zeros(24, device=draw.choice(["cpu", "meta"]))]
        views = [
            draw.choice(memories).as_strided((draw.randrange(4), 2), (draw.randrange(3), draw.randrange(1, 4)), at)
            for at in draw.sample(range(15), 5)
        ]
        pairs = [(i, k) for i in (0, 1) for k in range(2, 5)] + [(0, 1)]
        expected = any(overlap.tensors_overlap(views[i], views[k]) for i, k in pairs)
        try:
            overlap.refuse_new_aliases(views[:2], views[2:], "in0 in1", "in2 in3 in4")
            found = False
        except AliasingChangedError:
            found = True
        assert found == expected, [(v.device, v.storage_offset(), v.size(), v.stride()) for v in views]
        refused += found
    assert 50 < refused < 250
