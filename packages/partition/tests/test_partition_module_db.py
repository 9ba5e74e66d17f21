"""Modules of torch's own module database, trained through torch's aot_module with our partitioner."""

import copy
import functools

import pytest
import torch

from aotkit_partition import PartitionOptions, min_cut_rematerialization_partition

pytest.importorskip("expecttest", reason="torch's own list of modules needs expecttest, which is missing")
from torch.testing._internal.common_modules import module_db

# One row per family; recurrent cells, attention, convolutions, norms, poolings, activations, losses, embeddings.
NAMES = [
    "nn.Linear",
    "nn.Bilinear",
    "nn.Conv1d",
    "nn.Conv2d",
    "nn.Conv3d",
    "nn.ConvTranspose2d",
    "nn.BatchNorm1d",
    "nn.BatchNorm2d",
    "nn.GroupNorm",
    "nn.LayerNorm",
    "nn.RMSNorm",
    "nn.InstanceNorm2d",
    "nn.LocalResponseNorm",
    "nn.AvgPool2d",
    "nn.MaxPool2d",
    "nn.AdaptiveAvgPool2d",
    "nn.GELU",
    "nn.SiLU",
    "nn.ELU",
    "nn.Hardswish",
    "nn.Softplus",
    "nn.PReLU",
    "nn.GLU",
    "nn.LogSoftmax",
    "nn.Softmax",
    "nn.Tanhshrink",
    "nn.CrossEntropyLoss",
    "nn.MSELoss",
    "nn.Embedding",
    "nn.GRUCell",
    "nn.RNNCell",
    "nn.TransformerEncoderLayer",
]


def samples(info):
    """The first sample of a module whose inputs are tensors and whose output is one or several."""
    torch.manual_seed(0)
    for sample in info.module_inputs_func(info, "cpu", torch.float32, requires_grad=True, training=True):
        forward = sample.forward_input
        if forward is None or forward.kwargs or not all(isinstance(x, torch.Tensor) for x in forward.args):
            continue
        made = sample.constructor_input
        module = info.module_cls(
            *made.args, **{**made.kwargs, "dtype": torch.float32} if _takes_dtype(info) else made.kwargs
        )
        return module.train(), forward.args
    return None


def _takes_dtype(info):
    import inspect

    return "dtype" in inspect.signature(info.module_cls.__init__).parameters


def trained(module, run, inputs):
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    torch.manual_seed(3)
    output = run(*inputs)
    flat = [o for o in (output if isinstance(output, tuple) else (output,)) if isinstance(o, torch.Tensor)]
    sum((o.square().sum() for o in flat if o.requires_grad), torch.zeros(())).backward()
    grads = [p.grad for p in module.parameters()] + [x.grad for x in inputs if x.requires_grad]
    return [*(o.detach() for o in flat), *(b.clone() for b in module.buffers()), *grads]


@pytest.mark.covers("F3.7")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("options", [PartitionOptions(), PartitionOptions(strategy="min-peak")], ids=["cut", "peak"])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_a_module_equal_eager(name, options):
    from functorch.compile import aot_module, nop

    info = next(row for row in module_db if row.name == name)
    module, inputs = samples(info)
    twin = copy.deepcopy(module)
    fn = functools.partial(min_cut_rematerialization_partition, options=options)
    wanted = trained(module, module, inputs)
    got = trained(twin, aot_module(twin, nop, nop, partition_fn=fn), inputs)
    assert len(got) == len(wanted) > 1
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other)


def test_more_than_twenty_modules_are_covered():
    assert len(NAMES) >= 30 and set(NAMES) <= {info.name for info in module_db}
