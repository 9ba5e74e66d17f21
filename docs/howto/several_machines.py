"""A model whose layers gather their parameters from all ranks, trained compiled and in eager mode, on any machines.

The command that starts it is on the page "Several processes"; alone it runs with one process.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import aotkit  # noqa: F401  # registers the backend

if "RANK" in os.environ:
    dist.init_process_group("gloo")
else:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
RANK, RANKS, GROUP = dist.get_rank(), dist.get_world_size(), dist.group.WORLD.group_name
torch.set_num_threads(1)


def gathered(shard):
    """The whole parameter; its gradient is summed over the ranks, and each gets its part."""
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(shard, RANKS, GROUP))


class Sharded(nn.Module):
    """Layers of which each rank keeps some rows."""

    def __init__(self, width=64, layers=4):
        super().__init__()
        torch.manual_seed(0)
        whole = [torch.randn(width, width, dtype=torch.float64) / width**0.5 for _ in range(layers)]
        self.shards = nn.ParameterList(w.chunk(RANKS)[RANK].clone() for w in whole)

    def forward(self, x):
        for shard in self.shards:
            x = torch.tanh(x @ gathered(shard))
        return x


def train(model, run):
    """Losses of some steps, each rank with data of its own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 / RANKS)
    losses = []
    for step in range(5):
        torch.manual_seed(100 * step + RANK)
        optimizer.zero_grad()
        loss = run(torch.randn(32, 64, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


eager, model = Sharded(), Sharded()
compiled = torch.compile(model, backend="aotkit", options={"share_compiles": True, "fallback": "error"})
want, got = train(eager, eager), train(model, compiled)
torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-12, atol=1e-12)
for mine, its in zip(model.parameters(), eager.parameters(), strict=True):
    torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-12)
os.write(1, f"rank {RANK} of {RANKS}: as in eager mode, the last loss is {got[-1]:.6f}\n".encode())
dist.barrier()
dist.destroy_process_group()
