"""Graphs over distributed tensors are kept and loaded: their keys name the mesh, and what spreads operators over it."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import aotkit
import aotkit.saved
from aotkit.artifact.guards import Names
from aotkit.artifact.key import graph_key
from aotkit_cache import Uncacheable, explain, make_key
from aotkit_functionalize import Unsupported
from aotkit_functionalize.subclasses import encode_context
from aotkit_functionalize.subclasses.context import decode_context

_spec = importlib.util.spec_from_file_location("several_ranks", Path(__file__).with_name("several_ranks.py"))
several_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several_ranks)

RELEASE = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
pytestmark = [
    pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed"),
    pytest.mark.skipif(RELEASE < (2, 12), reason="before torch 2.12 such tensors hold their mesh inside an object"),
]
if dist.is_available():
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
    from torch.distributed.tensor.experimental import implicit_replication
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.distributed.tensor.placement_types import _MaskPartial, _StridedShard


@pytest.fixture(autouse=True)
def _products_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Of one process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("all",))
    dist.destroy_process_group()


class Perceptron(nn.Module):
    """Its words are an odd number, of which two ranks have parts of different sizes that begin at different words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(11, 5)
        self.wide, self.narrow = nn.Linear(5, 8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.narrow(torch.tanh(self.wide(self.words(x))))


def spread(mesh: DeviceMesh) -> nn.Module:
    plan = {"words": RowwiseParallel(input_layouts=Replicate()), "wide": ColwiseParallel(), "narrow": RowwiseParallel()}
    return parallelize_module(Perceptron().double(), mesh, plan)


def step(model: nn.Module, call: Callable[..., Tensor]) -> list[list[float]]:
    model.zero_grad()
    result = call(torch.arange(6).reshape(2, 3) + 4)
    result.square().sum().backward()
    found = [result, *(p.grad for p in model.parameters())]
    return [(v.full_tensor() if isinstance(v, DTensor) else v).detach().flatten().tolist() for v in found]


def compiled_anew(model: nn.Module, **options: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    chosen = aotkit.Options(fallback="error").patch(**options)
    return torch.compile(model, backend=aotkit.make_backend(chosen, recorder), fullgraph=True), recorder


def starts(mesh: DeviceMesh, expected: Any, **options: Any) -> list[list[str]]:
    """Cache events of a first and of a second start, of which both give what eager mode does."""
    events = []
    for _ in range(2):
        model = spread(mesh)
        call, recorder = compiled_anew(model, **options)
        for found, wanted in zip(step(model, call), expected, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-9, atol=1e-9)
        events.append([name for name, _ in recorder.events if name in ("cache.loaded", "cache.bypass")])
    return events


def test_a_split_model_is_loaded_at_the_second_start(mesh: DeviceMesh) -> None:
    model = spread(mesh)
    assert starts(mesh, step(model, model)) == [[], ["cache.loaded"]]


# -- what is in the key ----------------------------------------------------------------------------------


def graph(placement: Any) -> torch.fx.GraphModule:
    g = torch.fx.Graph()
    x, mesh = g.placeholder("x"), g.placeholder("mesh")
    node = g.call_function(DTensor.from_local, (x, mesh, (placement,)))
    g.output((g.call_method("redistribute", (node,), {"placements": (Replicate(),)}),))
    return torch.fx.GraphModule(torch.nn.Module(), g)


def key_of(mesh: DeviceMesh, placement: Any, *, x: Any = None, options: aotkit.Options | None = None) -> Any:
    arguments = [torch.ones(4) if x is None else x, mesh]
    return make_key(**graph_key(graph(placement), arguments, [None, None], options or aotkit.Options(), Names()))


def test_placements_and_meshes_are_told_apart(mesh: DeviceMesh) -> None:
    other = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))
    unnamed = DeviceMesh.from_group(dist.new_group([0]), "cpu")
    keys = [
        key_of(mesh, Shard(0)),
        key_of(mesh, Shard(1)),
        key_of(mesh, Partial()),
        key_of(mesh, Partial("max")),
        key_of(mesh, _StridedShard(0, split_factor=2)),
        key_of(mesh, _StridedShard(0, split_factor=3)),
        key_of(other, Shard(0)),
        key_of(other["a"], Shard(0)),
        key_of(unnamed, Shard(0)),
        key_of(mesh, Shard(0), x=distribute_tensor(torch.ones(4), mesh, [Shard(0)])),
        key_of(mesh, Shard(0), x=distribute_tensor(torch.ones(4), mesh, [Replicate()])),
    ]
    flat = other._flatten("flat")
    keys += [key_of(other, Shard(0)), key_of(flat, Shard(0))]  # a redistribution may take its group
    assert len({key.digest for key in keys}) == len(keys)
    assert key_of(mesh, Shard(0)) == keys[0]


def test_implicit_replication_and_the_mesh_of_a_with_statement_are_in_the_key(mesh: DeviceMesh) -> None:
    before = key_of(mesh, Shard(0))
    with implicit_replication():
        assert "implicit_replication" in str(explain(before, key_of(mesh, Shard(0))))
    with mesh:
        assert "current" in str(explain(before, key_of(mesh, Shard(0))))


def test_rules_of_users_make_a_graph_uncacheable_unless_they_have_a_version(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.tensor.experimental import register_sharding

    before = key_of(mesh, Shard(0))
    propagator = DTensor._op_dispatcher.sharding_propagator
    for table in ("op_strategy_funcs", "op_to_schema_info"):  # which torch registers in, for good
        monkeypatch.setattr(propagator, table, dict(getattr(propagator, table)))
    register_sharding(torch.ops.aten.frac.default)(lambda x: [([Replicate()], [Replicate()])])
    with pytest.raises(Uncacheable, match=r"a rule of the user's for aten\.frac"):
        key_of(mesh, Shard(0))
    assert key_of(mesh, Shard(0), options=aotkit.Options(cacheable=frozenset({"aten.frac@3"}))) != before


@pytest.mark.parametrize(
    "name", ["Replicate()", "Shard(1)", "Shard(-1)", "Partial('avg')", "_StridedShard(1, split_factor=4)"]
)
def test_a_placement_is_read_back_as_it_was(name: str) -> None:
    placement = eval(name)  # torch may have no distributed tensors where tests are collected
    found = decode_context(DTensor, encode_context(DTensor, (placement,)))
    assert found == (placement,) and type(found[0]) is type(placement)


@pytest.mark.parametrize(
    "raw",
    [
        {"placement": "_MaskPartial", "given": ["sum"]},
        {"placement": "Shard", "given": []},
        {"placement": "Shard", "given": [None]},
        {"placement": "Placement", "given": []},
    ],
    ids=repr,
)
def test_text_that_no_placement_has_is_not_read(raw: Any) -> None:
    with pytest.raises(ValueError, match="no stored placement"):
        decode_context(DTensor, raw)


def test_what_an_embedding_keeps_of_its_mask_has_no_text() -> None:
    with pytest.raises(Unsupported, match="no JSON form"):
        encode_context(DTensor, (_MaskPartial(offset_shape=torch.Size([2]), offset_dim=0),))


# -- what is not for a file ------------------------------------------------------------------------------


def test_a_training_step_of_a_split_model_is_refused(mesh: DeviceMesh) -> None:
    model = spread(mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(aotkit.CompileError, match=r"plain dense tensors; words\.weight is a DTensor"):
        aotkit.saved.compile_step(model, optimizer, lambda m, x: m(x).sum(), (torch.arange(3),))


# -- two ranks -------------------------------------------------------------------------------------------


def two_starts(rank: int, folder: Path) -> list[Any]:
    """Of a model that two ranks have uneven parts of: events with folders of their own, and with one for both."""
    mesh = init_device_mesh("cpu", (2,))
    model = spread(mesh)
    expected = step(model, model)
    found = []
    for name, shares in ((f"own{rank}", False), ("of both", False), (f"shared{rank}", True)):
        os.environ["AOTKIT_CACHE_DIR"] = str(folder / name)
        found.append(starts(mesh, expected, share_compiles=shares, rank_timeout=60))
    return found


def test_two_ranks_load_what_each_compiled_for_its_part(tmp_path: Path, warm_python: Any) -> None:
    found = several_ranks.run_ranks(warm_python, __file__, "two_starts", tmp_path)
    assert found == [[[[], ["cache.loaded"]]] * 3] * 2, found


if __name__ == "__main__":
    several_ranks.main({"two_starts": two_starts})
