"""Two processes that trace the same function under different names, and would choose differently, decide alike."""

import json
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from aotkit_partition import PartitionError
from aotkit_partition.rank_sync import Exchange

MODES = ("same", "differ", "own", "own gathers", "fails", "refuses", "never comes", "dies")
WORKER = textwrap.dedent(
    """
    import importlib, json, os, sys, time, traceback
    import torch
    import torch.distributed as dist
    import torch.distributed._functional_collectives
    from torch.fx.experimental.proxy_tensor import make_fx
    from aotkit_partition import Extensions, PartitionError, PartitionOptions, partition

    class Broken(Exception):
        pass

    def broken_pass(graph):
        raise Broken("this rank's own pass does not work")

    def work(rank, store, mode):
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

        ops, gathers = torch.ops._c10d_functional, mode == "own gathers"

        def joint(primals, tangents):
            value = primals[0]
            for weight in primals[1:]:
                if gathers:
                    weight = ops.wait_tensor(ops.all_gather_into_tensor(weight, 2, dist.group.WORLD.group_name))
                value = torch.tanh(value @ weight) if mode != "differ" or rank == 0 else torch.sigmoid(value @ weight)
            return [value, *torch.autograd.grad([value], primals, tangents)]

        rows = 4 if gathers else 8
        weights = [torch.randn(rows, 8, requires_grad=True) for _ in range(4)]
        primals = [torch.randn(32, 8, requires_grad=True), *weights]
        graph = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(32, 8)])
        names = [f"primals_{i + 1}" for i in range(5)] + ["tangents_1"]
        for node, name in zip(graph.graph.find_nodes(op="placeholder"), names):
            node.target = name
        if rank == 1:
            for number, node in enumerate(graph.graph.nodes):
                node._rename(f"other_{number}")
        budget = 1.0 if rank == 0 else 0.5
        kept = {"regather": True, "regather_budget": 0 if rank else 1 << 20} if gathers else {"memory_budget": budget}
        options = PartitionOptions(**kept)
        alone = partition(graph, 1, options)
        began = time.monotonic()
        try:
            extensions = Extensions(
                group=dist.group.WORLD,
                own_budgets=mode.startswith("own"),
                joint_pass=broken_pass if (mode, rank) == ("fails", 1) else None,
                rank_timeout=3.0 if mode in ("never comes", "dies") else 300.0,
            )
            if rank == 1 and mode in ("never comes", "dies"):
                return {}
            outputs = 99 if (mode, rank) == ("refuses", 1) else 1
            together = partition(graph, outputs, options, extensions=extensions)
        except (PartitionError, Broken) as error:
            return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
        place = {node.name: at for at, node in enumerate(graph.graph.nodes)}
        return {
            "alone": alone.report.activation_bytes,
            "together": together.report.activation_bytes,
            "saved": [place[name] for name in together.saved_names],
            "backward": [str(node.target) for node in together.backward.graph.nodes if node.op == "call_function"],
            "strategy": together.report.strategy,
        }

    MODES = json.loads(sys.argv[2])
    # Torch is imported once, for the two ranks of each mode.
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    for mode in MODES:
        for rank in range(2):
            if os.fork() == 0:
                try:
                    answer = work(rank, f"{sys.argv[1]}/store-{mode}", mode)
                except BaseException:  # told to the parent; a forked child must not run on in its code
                    answer = {"failed": traceback.format_exc()}
                os.write(1, (json.dumps([mode, rank, answer]) + "\\n").encode())
                if (mode, rank) == ("dies", 1):
                    os._exit(0)
                os.read(0, 1)  # until it is closed: the other rank may still be talking to this one
                os._exit(0)  # gloo's threads are not always joined, which would end the process with an error
    for _ in range(2 * len(MODES)):
        os.wait()
    """
)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What the two ranks of each mode said."""
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "worker.py"
    script.write_text(WORKER)
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    workers = subprocess.Popen([sys.executable, str(script), str(folder), json.dumps(MODES)], text=True, **pipes)
    said = [workers.stdout.readline() for _ in range(2 * len(MODES))]
    end = workers.communicate(timeout=200)
    assert all(said) and workers.returncode == 0, end
    return {(mode, rank): answer for mode, rank, answer in map(json.loads, said)}


@pytest.mark.covers("F3.50")
def test_all_ranks_take_the_plan_of_the_least_memory(answers):
    first, second = answers["same", 0], answers["same", 1]
    assert not {"failed", "error"} & {*first, *second}, (first, second)
    assert first["alone"] > second["alone"]
    assert first["together"] == second["together"] == second["alone"]
    assert first["saved"] == second["saved"] and first["backward"] == second["backward"]
    assert first["strategy"].endswith("as rank 1 decided") and "rank" not in second["strategy"]


@pytest.mark.covers("F3.50")
def test_ranks_with_different_graphs_are_told(answers):
    for rank in range(2):
        assert "another joint graph" in answers["differ", rank].get("error", ""), answers["differ", rank]


@pytest.mark.covers("F3.50")
def test_each_rank_keeps_its_own_budget_where_they_ask_each_other_for_the_same(answers):
    first, second = answers["own", 0], answers["own", 1]
    assert not {"failed", "error"} & {*first, *second}, (first, second)
    assert first["together"] == first["alone"] > second["together"] == second["alone"]
    assert "rank" not in first["strategy"] + second["strategy"]


@pytest.mark.covers("F3.50")
def test_what_ranks_gather_again_is_one_decision_whatever_their_budgets(answers):
    first, second = answers["own gathers", 0], answers["own gathers", 1]
    assert not {"failed", "error"} & {*first, *second}, (first, second)
    assert first["alone"] > second["alone"]
    assert first["together"] == second["together"] == second["alone"]
    again = [sum("all_gather" in target for target in each["backward"]) for each in (first, second)]
    assert again == [4, 4] or again == [3, 3], again
    assert first["strategy"].endswith("as rank 1 decided") and "rank" not in second["strategy"]


@pytest.mark.covers("F3.50")
@pytest.mark.parametrize(("mode", "its_own"), [("fails", "Broken: "), ("refuses", "InvalidJointGraphError: ")])
def test_a_rank_that_fails_tells_the_others_at_once(answers, mode, its_own):
    other, failed = answers[mode, 0], answers[mode, 1]
    assert failed.get("error", "").startswith(its_own), failed
    assert other.get("error", "").startswith("PartitionError: "), other
    assert f"rank 1 could not partition it: {failed['error']}" in other["error"]
    assert other["seconds"] < 200


@pytest.mark.covers("F3.50")
@pytest.mark.parametrize("mode", ["never comes", "dies"])
def test_a_rank_that_does_not_come_is_named_after_the_timeout(answers, mode):
    error = answers[mode, 0].get("error", "")
    assert error.startswith("PartitionError: rank 1 did not say within 3 s what it would save"), answers[mode, 0]
    assert answers[mode, 0]["seconds"] >= 3


@pytest.mark.covers("F3.50")
def test_a_store_that_is_gone_is_a_typed_error():
    class Gone:
        def __getattr__(self, name):
            def call(*_):
                raise torch.distributed.DistNetworkError("connection reset")

            return call

    exchange = Exchange(Gone(), "partition", 0, (0, 1), 1.0)
    with pytest.raises(PartitionError, match="store can't be reached: connection reset"):
        exchange.answers({"graph": "a"})


@pytest.mark.covers("F3.50")
def test_records_of_all_ranks_arrive_in_each_of_several_exchanges():
    """Ranks of one process, since a store does not care: each reads what all have said, three times over. Only the
    records of the last exchange stay."""
    store = torch.distributed.HashStore()

    def rank(number):
        earlier = (None, "round 0", "round 1")
        exchanges = [Exchange(store, f"round {turn}", number, range(3), 60.0, earlier[turn]) for turn in range(3)]
        return [exchange.answers({"rank": number, "turn": turn}) for turn, exchange in enumerate(exchanges)]

    with ThreadPoolExecutor(3) as pool:
        said = list(pool.map(rank, range(3)))
    wanted = [[{"rank": number, "turn": turn} for number in range(3)] for turn in range(3)]
    assert said == [wanted] * 3
    kept = [[bool(store.get(f"round {turn}/rank {number}")) for number in range(3)] for turn in range(3)]
    assert kept == [[False] * 3, [False] * 3, [True] * 3]
