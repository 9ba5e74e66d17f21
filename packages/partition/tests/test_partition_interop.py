"""Our partitioners inside torch's own aot_function: gradients equal eager, and no more bytes than with torch's."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aotkit_partition import (
    Partition,
    PartitionOptions,
    default_partition,
    min_cut_rematerialization_partition,
    partition,
)


class ResidualBlock(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(50, 16)

    def forward(self, ids):
        hidden = self.embed(ids)
        return F.log_softmax(hidden @ self.embed.weight.t(), -1)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = (q @ k.transpose(-1, -2) * 0.25).masked_fill(~mask, float("-inf"))
        return self.out(scores.softmax(-1) @ v)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        a, b = (x @ self.w).split(8, -1)
        return torch.sigmoid(a) * torch.tanh(b) + x.shape[0]


def encoder(dropout=0.0):
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=dropout, batch_first=True)


CASES = {
    "linear": (nn.Linear(8, 8), torch.randn(4, 8)),
    "mlp": (nn.Sequential(Mlp(), Mlp()), torch.randn(4, 8, 16)),
    "residual": (ResidualBlock(), torch.randn(2, 8, 6, 6)),
    "encoder": (encoder(), torch.randn(2, 6, 32)),
    "encoder with dropout": (encoder(0.1), torch.randn(2, 6, 32)),
    "attention": (Attention(), torch.randn(2, 6, 16)),
    "tied embedding": (Tied(), torch.randint(0, 50, (4, 5))),
    "gated": (Gated(), torch.randn(4, 16)),
    "group norm": (nn.Sequential(nn.Conv2d(4, 8, 3), nn.GroupNorm(2, 8), nn.SiLU()), torch.randn(2, 4, 8, 8)),
    "pooling": (
        nn.Sequential(nn.Conv2d(4, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)),
        torch.randn(2, 4, 8, 8),
    ),
    "activations": (
        nn.Sequential(nn.Linear(8, 8), nn.ELU(), nn.Hardswish(), nn.Softplus(), nn.PReLU()),
        torch.randn(3, 8),
    ),
    "recurrent": (
        nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)),
        torch.randn(3, 8),
    ),
    "bilinear": (nn.Upsample(scale_factor=2, mode="bilinear"), torch.randn(2, 3, 4, 4)),
    "mean loss": (nn.Sequential(nn.Linear(8, 1), nn.Flatten(0)), torch.randn(6, 8)),
}


def gradients(module, x, compiled):
    torch.manual_seed(3)
    output = compiled(x)
    output.square().mean().backward()
    grads = [p.grad for p in module.parameters()] + ([x.grad] if x.is_floating_point() else [])
    return [output.detach(), *grads]


def assert_equals_eager(module, x, partition_fn, dynamic=False):
    from functorch.compile import aot_module, nop

    twin = copy.deepcopy(module)
    a, b = (x.clone().requires_grad_(x.is_floating_point()) for _ in range(2))
    wanted = gradients(module, a, module)
    got = gradients(twin, b, aot_module(twin, nop, nop, partition_fn=partition_fn, dynamic=dynamic))
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.covers("F3.1", "F3.7")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("partition_fn", [min_cut_rematerialization_partition, default_partition])
@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_eager_inside_torchs_aot_function(name, partition_fn):
    module, x = CASES[name]
    assert_equals_eager(copy.deepcopy(module), x, partition_fn)


@pytest.mark.covers("F3.3", "F3.36")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("partition_fn", [min_cut_rematerialization_partition, default_partition])
@pytest.mark.parametrize("name", ["mlp", "residual", "encoder", "gated", "attention"])
def test_gradients_equal_eager_under_dynamic_shapes(name, partition_fn):
    module, x = CASES[name]
    assert_equals_eager(copy.deepcopy(module), x, partition_fn, dynamic=True)


@pytest.mark.covers("F3.17", "F3.26")
@pytest.mark.parametrize("name", ["mlp", "encoder", "residual", "gated"])
def test_gradients_equal_eager_under_aggressive_recomputation(name):
    options = PartitionOptions(
        allowlist_only=False, ban_reductions=False, ban_materialized_in_backward=False, max_fusible_chain=0
    )
    fn = functools.partial(min_cut_rematerialization_partition, options=options)
    assert_equals_eager(copy.deepcopy(CASES[name][0]), CASES[name][1], fn)


def activation_bytes(forward, num_outputs):
    """Bytes of distinct storages among the saved values that no input owns."""
    owned = {
        node.meta["val"].untyped_storage()._cdata
        for node in forward.graph.find_nodes(op="placeholder")
        if isinstance(node.meta["val"], torch.Tensor)
    }
    total = 0
    for node in forward.graph.find_nodes(op="output")[0].args[0][num_outputs:]:
        value = node.meta["val"]
        if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in owned:
            owned.add(value.untyped_storage()._cdata)
            total += int(value.untyped_storage().nbytes())
    return total


@pytest.mark.covers("F3.7")
@pytest.mark.parametrize(
    "name", ["mlp", "residual", "encoder", "encoder with dropout", "attention", "group norm", "gated"]
)
def test_no_more_bytes_are_saved_than_by_torchs_partitioner(name, captured_by_torch):
    from functorch.compile import min_cut_rematerialization_partition as torchs_partitioner

    joint, kwargs = captured_by_torch(*(copy.deepcopy(item) for item in CASES[name]))
    theirs, _ = torchs_partitioner(joint, None, **kwargs)
    result = partition(joint, kwargs["num_fwd_outputs"])
    ours = activation_bytes(result.forward, kwargs["num_fwd_outputs"])
    assert 0 < ours <= activation_bytes(theirs, kwargs["num_fwd_outputs"])
    assert result.report.activation_bytes == ours


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_partition_survives_as_text(dynamic, captured_by_torch):
    joint, kwargs = captured_by_torch(encoder(0.1), torch.randn(2, 6, 32), dynamic=dynamic)
    result = partition(joint, kwargs["num_fwd_outputs"])
    again = Partition.from_json(result.to_json())
    assert again == result
    assert again.report == result.report
    assert again.saved_names == result.saved_names


def test_partitioning_is_deterministic_and_leaves_the_joint_graph_alone(captured_by_torch):
    joint, kwargs = captured_by_torch(encoder(0.1), torch.randn(2, 6, 32))
    before = str(joint.graph)
    first, second = (partition(joint, kwargs["num_fwd_outputs"]) for _ in range(2))
    assert first == second
    assert str(joint.graph) == before
