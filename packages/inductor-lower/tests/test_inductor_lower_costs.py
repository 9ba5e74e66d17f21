"""What a report says of a kernel's bytes and arithmetic, and kernels as native calls of their own."""

from __future__ import annotations

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.launch_plan.records import CallSegment


def f(x: torch.Tensor, at: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return x * 2 + 1, x.sum(0), x[at]


def compiled(mode: str = "fake", **options: bool):
    x, at = torch.randn(100, 64), torch.tensor([3, 4])
    graph = make_fx(f, tracing_mode=mode)(x, at)
    call = compile_graph(graph, options=LowerOptions(fuse=False, verify=True, **options))
    for got, want in zip(call([x, at]), f(x, at), strict=True):
        torch.testing.assert_close(got, want)
    return call


def test_bytes_and_operations_of_a_kernel_are_those_of_its_buffers_and_bodies() -> None:
    groups = {group.nodes[-1]: group for group in compiled().report().groups}
    whole = 100 * 64 * 4
    assert (groups["add"].bytes, groups["add"].flops) == (2 * whole, 100 * 64)
    assert (groups["sum_1"].bytes, groups["sum_1"].flops) == (whole + 64 * 4, 100 * 64)
    assert groups["index"].bytes == 2 * (2 * 64 * 4) + 2 * 8 and groups["index"].flops == 0


def test_of_sizes_that_only_a_call_knows_nothing_is_said() -> None:
    groups = compiled("symbolic").report().groups
    assert all(group.bytes is None and group.flops is None for group in groups)


def test_kernels_are_native_calls_of_their_own_if_that_is_asked_for() -> None:
    together, apart = (compiled(separate_kernels=separate).compiled.plan for separate in (False, True))
    of = [[step.launches for step in plan.steps if isinstance(step, CallSegment)] for plan in (together, apart)]
    assert len(of[0]) == 1 and of[1] == [(name,) for name in of[0][0]]
    assert len({step.function for step in apart.steps if isinstance(step, CallSegment)}) == len(of[1])
