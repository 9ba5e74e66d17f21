"""Two processes that trace the same function under different names, and would choose differently, decide alike."""

import json
import subprocess
import sys
import textwrap

import pytest

WORKER = textwrap.dedent(
    """
    import json, os, sys
    import torch
    import torch.distributed as dist
    from torch.fx.experimental.proxy_tensor import make_fx
    from aotkit_partition import Extensions, PartitionError, PartitionOptions, partition

    rank, store, mode = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def joint(primals, tangents):
        value = primals[0]
        for weight in primals[1:]:
            value = torch.tanh(value @ weight) if mode != "differ" or rank == 0 else torch.sigmoid(value @ weight)
        return [value, *torch.autograd.grad([value], primals, tangents)]

    primals = [torch.randn(32, 8, requires_grad=True)] + [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    graph = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(32, 8)])
    names = [f"primals_{i + 1}" for i in range(5)] + ["tangents_1"]
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names):
        node.target = name
    if rank == 1:
        for number, node in enumerate(graph.graph.nodes):
            node._rename(f"other_{number}")
    budget = 1.0 if rank == 0 else 0.5
    options = PartitionOptions(memory_budget=budget)
    alone = partition(graph, 1, options)
    try:
        together = partition(graph, 1, options, extensions=Extensions(group=dist.group.WORLD))
    except PartitionError as error:
        print(json.dumps({"error": str(error)}))
    else:
        place = {node.name: at for at, node in enumerate(graph.graph.nodes)}
        print(json.dumps({
            "alone": alone.report.activation_bytes,
            "together": together.report.activation_bytes,
            "saved": [place[name] for name in together.saved_names],
            "backward": [str(node.target) for node in together.backward.graph.nodes if node.op == "call_function"],
            "strategy": together.report.strategy,
        }))
    sys.stdout.flush()
    sys.stdin.readline()  # the other rank may still be talking to this one
    os._exit(0)  # gloo's threads are not always joined when a process ends by itself: its failure would become ours
    """
)


def on_two_ranks(folder, mode):
    script = folder / "worker.py"
    script.write_text(WORKER)
    command = [sys.executable, str(script)]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(folder / f"store-{mode}"), mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    answers = [worker.stdout.readline() for worker in workers]
    ends = [worker.communicate("both have answered\n", timeout=200) for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), ends
    return [json.loads(answer) for answer in answers]


@pytest.mark.covers("F3.50")
def test_all_ranks_take_the_plan_of_the_least_memory(tmp_path):
    first, second = on_two_ranks(tmp_path, "same")
    assert first["alone"] > second["alone"]
    assert first["together"] == second["together"] == second["alone"]
    assert first["saved"] == second["saved"] and first["backward"] == second["backward"]
    assert first["strategy"].endswith("as rank 1 decided") and "rank" not in second["strategy"]


@pytest.mark.covers("F3.50")
def test_ranks_with_different_graphs_are_told(tmp_path):
    for answer in on_two_ranks(tmp_path, "differ"):
        assert "another joint graph" in answer["error"]
