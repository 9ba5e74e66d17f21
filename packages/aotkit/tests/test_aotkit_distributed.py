"""Two processes on this machine: data-parallel and fully sharded models, compiled, train as they do in eager mode."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")


class Net(nn.Module):
    """A class of its own: Dynamo does not compile torch's containers as such."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.last = (
            *(nn.Linear(8, 32), nn.Linear(32, 32)),
            *(nn.LayerNorm(32), nn.Linear(32, 8)),
        )

    def forward(self, x):
        return self.last(self.norm(self.second(torch.nn.functional.gelu(self.first(x)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def data_parallel(net):
    """Buckets so small that there are two, and Dynamo cuts the graph where gradients are exchanged."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 1 << 10
    return nn.parallel.DistributedDataParallel(net, bucket_cap_mb=2**-8)


def fully_sharded(net):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in net.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def train(net, run, rank):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        loss = run(torch.randn(4, 8)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in net.parameters()]
    return [torch.stack(losses), *(p.detach() for p in whole)]


def worker(folder: str) -> None:
    """Two processes of which one has imported for both; what each has done is a line on their common output."""
    import aotkit

    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    importlib.import_module("torch.distributed.fsdp")
    rank = int(os.fork() == 0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    warnings.simplefilter("error", aotkit.EagerFallback)
    for wrap in (data_parallel, fully_sharded):
        torch._dynamo.reset()
        recorder = aotkit.Recorder()
        expected_net = wrap(model())
        expected = train(expected_net, expected_net, rank)
        net = wrap(model())
        got = train(net, torch.compile(net, backend="aotkit", options={"observer": recorder}), rank)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        forwards = [g.name for g in recorder.graphs if g.name.endswith("-forward")]
        assert len(forwards) >= 2, forwards
        os.write(1, f"{rank} {wrap.__name__}\n".encode())
    os.read(0, 1)  # until it is closed: the other rank may still be talking to this one
    os._exit(0)  # gloo's threads are not always joined when a process ends by itself: its failure would become ours


@pytest.mark.covers("F4.33", "F8.9")
def test_two_processes_train_as_in_eager_with_parallel_data_and_with_sharded_parameters(tmp_path: Path):
    command = [sys.executable, __file__, str(tmp_path)]
    pipes = dict.fromkeys(["stdin", "stdout", "stderr"], subprocess.PIPE)
    workers = subprocess.Popen(command, text=True, start_new_session=True, **pipes)
    try:
        answers = sorted(workers.stdout.readline() for _ in range(4))
        end = workers.communicate(timeout=300)
        assert answers == [f"{rank} {name}\n" for rank in range(2) for name in ("data_parallel", "fully_sharded")], end
    finally:
        with contextlib.suppress(ProcessLookupError):  # both have ended
            os.killpg(workers.pid, signal.SIGKILL)


if __name__ == "__main__":
    worker(sys.argv[1])
