"""Joint graphs for the tests: by hand from a function, or as torch's own aot_function hands them to a partitioner."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx


def joint_of(fn, *inputs, tracing_mode="fake"):
    """A joint graph of ``fn`` (tensors in, tuple of tensors or tensor out) with gradients for all float inputs."""
    outputs = fn(*inputs)
    flat = outputs if isinstance(outputs, tuple) else (outputs,)
    differentiable = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]

    def joint(primals, tangents):
        result = fn(*primals)
        result = result if isinstance(result, tuple) else (result,)
        wanted = [primals[i] for i in differentiable]
        active = [(r, t) for r, t in zip(result, tangents, strict=True) if r.requires_grad]
        grads = torch.autograd.grad([r for r, _ in active], wanted, [t for _, t in active], allow_unused=True)
        return [*result, *grads]

    tangents = [torch.ones_like(output).detach() for output in flat]
    gm = make_fx(joint, tracing_mode=tracing_mode)(list(inputs), tangents)
    if any(node.op == "call_function" and getattr(node.target, "_schema", None) and node.target._schema.is_mutable
           for node in gm.graph.nodes):  # fmt: skip
        with torch.no_grad():
            gm = make_fx(torch.func.functionalize(gm), tracing_mode=tracing_mode)(list(inputs), tangents)
    names = [f"primals_{i + 1}" for i in range(len(inputs))] + [f"tangents_{i + 1}" for i in range(len(flat))]
    for node, name in zip(gm.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
        node._rename(name)
    gm.recompile()
    return gm, len(flat)


def captured_by_torch(module, *inputs, dynamic=False):
    """The joint graph that torch's aot_module hands to its partitioner, and the keyword arguments it passes."""
    from functorch.compile import aot_module, min_cut_rematerialization_partition, nop

    got = []

    def keep(joint, joint_inputs, **kwargs):
        got.append((joint, kwargs))
        return min_cut_rematerialization_partition(joint, joint_inputs, **kwargs)

    output = aot_module(module, nop, nop, partition_fn=keep, dynamic=dynamic)(*inputs)
    output.sum().backward()
    module.zero_grad()
    return got[0]


@pytest.fixture(name="joint_of", scope="session")
def _joint_of():
    return joint_of


@pytest.fixture(name="captured_by_torch", scope="session")
def _captured_by_torch():
    return captured_by_torch
