"""How the loops of a kernel are put in order, merged and split, and which of them goes into vectors.

A kernel is written as its loops: those of the grid, then in brackets those of its body. ``96*2`` is the loop in the
lanes, two vectors per step, ``31*1^`` one whose rest is under a mask, see Note [Masked tails]; ``64~`` the other loop
of a tile, see Note [Tiles]. In front stand the lanes of a vector, 1 where there are no vectors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import decompositions, lower_graph, schedule_program
from aotkit_inductor_lower.ir import LoopNest
from aotkit_inductor_lower.kernel_ir.nodes import Kernel, Loop
from aotkit_inductor_lower.kernel_ir.walk import perfect_nests
from aotkit_inductor_lower.kernel_passes.normal_form import kernel_of
from aotkit_inductor_lower.targets.cpu import generic_machine
from aotkit_inductor_lower.targets.cpu.map_loops import map_loops, version_loops

F = torch.nn.functional


def t(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(*sizes, dtype=dtype)


def chain(x: Tensor, count: int) -> Tensor:
    for k in range(count):
        x = x * 1.5 if k % 2 else x + 0.5
    return x


LONG = torch.int64
AT = torch.zeros(17, dtype=LONG)
COLORS = t(2, 16, 8, 8).to(memory_format=torch.channels_last)

# name -> (function, its tensors, nests with vectors of 512 bits, and of 256 bits)
CASES: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, str]] = {
    "elementwise": (lambda x: x * 2 + 1, (t(30, 50),), "16: 1500*1^", "8: 1500*1"),
    "elementwise, tiny": (lambda x: x * 2 + 1, (t(3),), "16: 3*2", "8: 3*2"),
    "elementwise, whole vectors": (lambda x: x * 2 + 1, (t(48),), "16: 48*1", "8: 48*2"),
    "elementwise, much": (
        lambda x: ((x * 2 + 1) * x - 3) * x * x + x.abs() * 5 - x / 7 + x.sqrt() + x.floor(), (t(30, 50),),
        "16: 1500*1^",
        "8: 1500*1",
    ),
    "dear": (lambda x: x.exp(), (t(64, 64),), "16: 4096*1", "8: 4096*1"),
    "a bias of rows": (lambda x, b: x + b, (t(40, 96), t(96),), "16: 40 96*2", "8: 40 96*2"),
    "a bias of columns": (lambda x, b: x + b, (t(40, 96), t(40, 1),), "16: 40 96*2", "8: 40 96*2"),
    "a short bias": (lambda x, b: x + b, (t(96, 5), t(5),), "16: 96 5*2^", "8: 96*2 5"),
    "a bias of groups": (lambda x, b: x + b, (t(8, 6, 80), t(6, 1),), "16: 8 6 80*1", "8: 8 6 80*2"),
    "transposed": (lambda x: x.t().contiguous(), (t(64, 48),), "16: 48*16 64~", "8: 48*8 64~"),
    "transposed, three": (lambda x: x.t().contiguous(), (t(64, 3),), "16: 3 64*2", "8: 3 64*2"),
    "transposed, fifteen": (lambda x: x.t().contiguous(), (t(64, 15),), "16: 15 64*2", "8: 15*8 64~"),
    "transposed, sixteen": (lambda x: x.t().contiguous(), (t(16, 16),), "16: 16*16 16~", "8: 16*8 16~"),
    "transposed and dear": (lambda x: x.t().exp().contiguous().tanh().sin(), (t(64, 48),), "16: 48 64*1", "8: 48 64*1"),
    "transposed and added": (lambda x, y: x.t() + y, (t(64, 48), t(48, 64),), "16: 64~ 48*16", "8: 64~ 48*8"),
    "transposed bytes": (lambda x: x.t().contiguous(), (t(80, 80, dtype=torch.uint8),), "64: 80 80*1^", "32: 80 80*2"),
    "transposed in a batch": (
        lambda x: x.transpose(1, 2).contiguous(), (t(5, 32, 40),),
        "16: 5 40*16 32~",
        "8: 5 40*8 32~",
    ),
    "every second": (lambda x: x[:, ::2] + 1, (t(40, 96),), "16: 1920*2", "8: 1920*2"),
    "every second of rows": (lambda x, y: x[:, ::2] + y, (t(40, 96), t(48),), "16: 40 48*1", "8: 40 48*2"),
    "every twentieth of rows": (lambda x, y: x[:, ::20] + y, (t(40, 960), t(40, 1),), "16: 40 48*1", "8: 40 48*2"),
    "backwards": (lambda x: x.flip(1) + 1, (t(40, 96),), "16: 40 96*2", "8: 40 96*2"),
    "sums of rows": (lambda x: x.sum(1), (t(40, 96),), "16: 40 [96*2]", "8: 40 [96*2]"),
    "sums of long rows": (lambda x: x.sum(1), (t(9, 4096),), "16: 9 [4096*4]", "8: 9 [4096*4]"),
    "sums of rows of three": (lambda x: x.sum(1), (t(400, 3),), "16: 400*1 [3]", "8: 400*2 [3]"),
    "sums of rows of twenty": (lambda x: x.sum(1), (t(400, 20),), "16: 400 [20*1^]", "8: 400 [20*2]"),
    "sums of rows of nineteen": (lambda x: x.sum(1), (t(400, 19),), "16: 400 [19*1]", "8: 400 [19*2]"),
    "sums of columns": (lambda x: x.sum(0), (t(40, 96),), "16: 96*6 [40]", "8: 96*4 [40]"),
    "sums of few columns": (lambda x: x.sum(0), (t(40, 6),), "16: 6*4^ [40]", "8: 6 [40*1]"),
    "sums of columns and a rest": (lambda x: x.sum(0), (t(40, 33),), "16: 33*2 [40]", "8: 33*4 [40]"),
    "two sums of columns": (lambda x: (x.sum(0), (x * x).sum(0)), (t(40, 64),), "16: 64*4 [40]", "8: 64*8 [40]"),
    "sums of the middle": (lambda x: x.sum(1), (t(6, 40, 7),), "16: 6 7*4^ [40]", "8: 6 7*4^ [40]"),
    "sums of the ends": (lambda x: x.sum((0, 2)), (t(6, 40, 7),), "16: 40*2^ [6 7]", "8: 40*5 [6 7]"),
    "sums over all pairs": (  # a row of whole vectors rather than one with a mask
        lambda x, y: (x[:, :, None] * y[:, None, :]).sum((1, 2)), (t(40, 20), t(40, 64)),
        "16: 40 [20 64*2]",
        "8: 40 [20 64*2]",
    ),
    "sums of what is dear": (lambda x: x.exp().sum(0), (t(40, 96),), "16: 96*1 [40]", "8: 96*1 [40]"),
    "long sums of much": (
        lambda x, y: (x * y + x.abs() * y - x.floor() * (y + 3) + y.sqrt()).sum(1), (t(9, 4096), t(9, 4096),),
        "16: 9 [4096*2]",
        "8: 9 [4096*2]",
    ),
    "softmax": (lambda x: x.softmax(1), (t(40, 96),), "16: 40 [96*2] [96*1] [96*2]", "8: 40 [96*2] [96*1] [96*2]"),
    "softmax of thirty-one": (
        lambda x: x.softmax(1), (t(40, 31),),
        "16: 40 [31*1^] [31*1^] [31*1^]",
        "8: 40 [31*1] [31*1] [31*1]",
    ),
    "softmax of five": (lambda x: x.softmax(1), (t(400, 5),), "16: 400*1 [5] [5] [5]", "8: 400*1 [5] [5] [5]"),
    "softmax of nine": (lambda x: x.softmax(1), (t(400, 9),), "16: 400*1 [9] [9] [9]", "8: 400*1 [9] [9] [9]"),
    "softmax of columns": (lambda x: x.softmax(0), (t(5, 400),), "16: 400*1 [5] [5] [5]", "8: 400*1 [5] [5] [5]"),
    "a norm of rows": (
        lambda x, w, b: F.layer_norm(x, (96,), w, b), (t(40, 96), t(96), t(96),),
        "16: 40 [96*2] [] [96*2] [] [96*2]",
        "8: 40 [96*2] [] [96*2] [] [96*2]",
    ),
    "running sums of rows": (lambda x: x.cumsum(1), (t(40, 96),), "1: 40 [96]", "1: 40 [96]"),
    "running sums of long rows": (lambda x: x.cumsum(1), (t(40, 4096),), "1: 40 [4096]", "1: 40 [4096]"),
    "running sums of columns": (lambda x: x.cumsum(0), (t(40, 96),), "16: 96*6 [40]", "8: 96*4 [40]"),
    "places of maxima": (lambda x: x.argmax(1), (t(40, 96),), "16: 40 [96*2]", "8: 40 [96*2]"),
    "gathered rows": (lambda x, i: x[i], (t(40, 96), AT,), "16: 17 96*2", "8: 17 96*2"),
    "gathered columns": (lambda x, i: x[:, i], (t(40, 96), AT,), "16: 40 17*1", "8: 40 17*2"),
    "rows added at places": (
        lambda x, i, s: x.index_add(0, i, s), (t(40, 96), AT, t(17, 96),),
        "16: 3840*2; 16: 17 96*2",
        "8: 3840*2; 8: 17 96*2",
    ),
    "whole division": (lambda x, y: x // y, (t(100, dtype=LONG), t(100, dtype=LONG),), "8: 100*1", "4: 100*1"),
    "halves": (lambda x: x * 2, (t(100, dtype=torch.bfloat16),), "16: 100*2^", "8: 100*2"),
    "doubles": (lambda x: x * 2, (t(100, dtype=torch.float64),), "8: 100*2^", "4: 100*1"),
    "bytes": (lambda x: x + 1, (t(300, dtype=torch.uint8),), "64: 300*2^", "32: 300*1"),
    "windows": (lambda x: F.avg_pool2d(x, 2), (t(2, 3, 8, 32),), "16: 24 16*1 [2 2]", "8: 24 16*2 [2 2]"),
    "windows over colors": (lambda x: F.max_pool2d(x, 2), (COLORS,), "16: 8 4 16*1 [2 2]", "8: 8 4 16*2 [2 2]"),
    "exchanged rows": (
        lambda x: x.view(4, 10, 96).transpose(0, 1).reshape(40, 96) + 1, (t(40, 96),),
        "16: 10 4 96*2",
        "8: 10 4 96*2",
    ),
    "a transpose that is reshaped": (lambda x: x.t().reshape(60, 64) * 2, (t(40, 96),), "16: 60 64*2", "8: 60 64*2"),
    "repeated": (lambda x: x.repeat(3, 2), (t(10, 64),), "16: 3 10 2 64*2", "8: 3 10 2 64*2"),
    "joined": (
        lambda x, y: torch.cat([x, y], 1), (t(40, 32), t(40, 48),),
        "16: 40 32*2; 16: 40 48*1",
        "8: 40 32*2; 8: 40 48*2",
    ),
    "bools": (lambda x: x.logical_not(), (t(300, dtype=torch.bool),), "64: 300*2^", "32: 300*1"),
    "bools and floats": (lambda x: x.isnan(), (t(300),), "16: 300*2^", "8: 300*1"),
    "bytes and doubles": (
        lambda x, y: x * y, (t(300, dtype=torch.uint8), t(300, dtype=torch.float64),),
        "8: 300*1^",
        "4: 300*1",
    ),
    "a constant": (lambda x: torch.full((300,), 2.0), (t(3),), "16: 300*2^", "8: 300*1"),
    "positions": (lambda x: torch.arange(300) * 2, (t(3),), "8: 300*1^", "4: 300*1"),
    "masked borders": (lambda x: F.pad(x, (3, 5)), (t(40, 96),), "16: 40 104*2^", "8: 40 104*1"),
    "repeated rows": (lambda x: x.repeat_interleave(4, 0) + 1, (t(40, 96),), "16: 40 4 96*2", "8: 40 4 96*2"),
    "places by remainders": (
        lambda x: x.view(8, 12, 10).permute(2, 0, 1).reshape(40, 24) + 1, (t(960),),
        "16: 10 96*2",
        "8: 10*8 96~",
    ),
    "one row": (lambda x: x + 1, (t(1, 96),), "16: 96*2", "8: 96*2"),
    "one column": (lambda x: x.t() + 1, (t(96, 1),), "16: 96*2", "8: 96*2"),
    "copied into a slice": (
        lambda x, y: y.slice_scatter(x, 0, 3, 13), (t(10, 96), t(40, 96),),
        "16: 40 96*2",
        "8: 40 96*2",
    ),
    "ten operations": (lambda x: chain(x, 10), (t(64, 64),), "16: 4096*2", "8: 4096*2"),
    "eleven operations": (lambda x: chain(x, 11), (t(64, 64),), "16: 4096*1", "8: 4096*1"),
    "sums of rows of six operations": (lambda x: chain(x, 6).sum(1), (t(9, 4096),), "16: 9 [4096*4]", "8: 9 [4096*4]"),
    "sums of rows of seven operations": (
        lambda x: chain(x, 7).sum(1), (t(9, 4096),),
        "16: 9 [4096*2]",
        "8: 9 [4096*2]",
    ),
    "sums of columns of nine operations": (lambda x: chain(x, 9).sum(0), (t(40, 96),), "16: 96*6 [40]", "8: 96*4 [40]"),
    "sums of columns of ten operations": (lambda x: chain(x, 10).sum(0), (t(40, 96),), "16: 96*2 [40]", "8: 96*2 [40]"),
    "sums of columns of twenty-seven operations": (
        lambda x: chain(x, 27).sum(0), (t(40, 96),),
        "16: 96*2 [40]",
        "8: 96*2 [40]",
    ),
    "sums of columns of twenty-eight operations": (
        lambda x: chain(x, 28).sum(0), (t(40, 96),),
        "16: 96*1 [40]",
        "8: 96*1 [40]",
    ),
    "sums of rows of 512": (lambda x: x.sum(1), (t(9, 512),), "16: 9 [512*4]", "8: 9 [512*4]"),
    "sums of rows of 448": (lambda x: x.sum(1), (t(9, 448),), "16: 9 [448*2]", "8: 9 [448*4]"),
    "sums of rows of 192": (lambda x: x.sum(1), (t(9, 192),), "16: 9 [192*2]", "8: 9 [192*2]"),
    "transposed doubles": (
        lambda x: x.t().contiguous(), (t(40, 36, dtype=torch.float64),),
        "8: 36*8 40~",
        "4: 36*4 40~",
    ),
    "transposed doubles, narrow": (
        lambda x: x.t().contiguous(), (t(40, 12, dtype=torch.float64),),
        "8: 12*8 40~",
        "4: 12 40*2",
    ),
    "transposed after fourteen operations": (
        lambda x: chain(x.t(), 14).contiguous(), (t(64, 48),),
        "16: 48~ 64*16",
        "8: 48~ 64*8",
    ),
    "transposed after twenty-two operations": (
        lambda x: chain(x.t(), 22).contiguous(), (t(64, 48),),
        "16: 48~ 64*16",
        "8: 48~ 64*8",
    ),
    "transposed after twenty-three operations": (
        lambda x: chain(x.t(), 23).contiguous(), (t(64, 48),),
        "16: 48 64*1",
        "8: 48 64*1",
    ),
    "a weight of sixty-three groups": (
        lambda x, w: x.softmax(2) * w, (t(30, 63, 80), t(63, 1)),
        "16: 1890 [80*1] [80*1] [80*1]",
        "8: 1890 [80*2] [80*1] [80*2]",
    ),
    "a weight of sixty-four groups": (
        lambda x, w: x.softmax(2) * w, (t(30, 64, 80), t(64, 1)),
        "16: 30 64 [80*1] [80*1] [80*1]",
        "8: 30 64 [80*2] [80*1] [80*2]",
    ),
    "a weight of groups of sixty-three": (
        lambda x, w: x.softmax(2) * w, (t(30, 20, 63), t(20, 1)),
        "16: 600 [63*1^] [63*1^] [63*1^]",
        "8: 600 [63*1] [63*1] [63*1]",
    ),
    "a weight of groups of sixty-four": (
        lambda x, w: x.softmax(2) * w, (t(30, 20, 64), t(20, 1)),
        "16: 600 [64*2] [64*1] [64*2]",
        "8: 600 [64*2] [64*1] [64*2]",
    ),
    "sorted rows": (lambda x: x.sort(1)[0], (t(40, 8),), "16: 40*1 [8] [] [8]", "8: 40*1 [8] [] [8]"),
    "gathered in rows": (
        lambda x, i: x.exp().gather(1, i), (t(40, 24), torch.zeros(40, 24, dtype=LONG)),
        "16: 40*16 24~",
        "8: 40 24*1",
    ),
    "gathered columns of twenty-four": (
        lambda x, i: x[:, i], (t(40, 96), torch.zeros(24, dtype=LONG)),
        "16: 40 24*1",
        "8: 40 24*1",
    ),
    "running sums and their double": (lambda x: (x.cumsum(1), x + 1), (t(40, 96),), "1: 40 [96]", "1: 40 [96]"),
    "a row and its places": (
        lambda x: (x - x.amax(1, keepdim=True), x.argmin(1)), (t(40, 96),),
        "16: 40 [96*2] [] [96*2]",
        "8: 40 [96*2] [] [96*2]",
    ),
    "sums of gathered rows": (
        lambda x, i: x[i].sum(1), (t(40, 96), torch.zeros(400, dtype=LONG)),
        "16: 400 [96*2]",
        "8: 400 [96*2]",
    ),
    "turned pairs": (lambda x: x.view(40, 48, 2).flip(2).view(40, 96) * 2, (t(40, 96),), "16: 1920*2 2", "8: 1920*2 2"),
}  # fmt: skip

# With sizes that are known at run time only, here a, b, ...; behind "short" the plan for when the loop is short.
DYNAMIC: dict[str, tuple[Callable[..., Any], tuple[Tensor, ...], str, str]] = {
    "elementwise": (lambda x: x * 2, (t(30, 50),), "16: a*b*2^", "8: a*b*2"),
    "a bias of rows": (lambda x, b: x + b, (t(30, 50), t(50),), "16: a b*2^", "8: a b*2"),
    "sums of rows": (lambda x: x.sum(1), (t(30, 50),), "16: a [b*2]", "8: a [b*2]"),
    "sums of columns": (lambda x: x.sum(0), (t(30, 50),), "16: b*2^ [a]", "8: b*2 [a]"),
    "sums of the ends": (lambda x: x.sum((0, 2)), (t(6, 40, 7),), "16: b [a c*2]", "8: b [a c*2]"),
    "transposed": (lambda x: x.t().contiguous(), (t(30, 50),), "16: b*16 a~", "8: b*8 a~"),
    "windows": (
        lambda x: F.avg_pool2d(x, 2), (t(2, 16, 8, 9),),
        "16: a*b c // 2 d // 2*2^ [2 2]",
        "8: a*b c // 2 d // 2*2 [2 2]",
    ),
    "windows of ones": (
        lambda x: F.avg_pool2d(x, 3, 1, 1), (t(2, 16, 8, 9),),
        "16: a*b c d*2^ [3 3]",
        "8: a*b c d*2 [3 3]",
    ),
    "softmax": (lambda x: x.softmax(1), (t(30, 50),), "16: a [b*2] [b*1] [b*2]", "8: a [b*2] [b*1] [b*2]"),
    "rows of sixty-four": (lambda x: (x.view(-1, 64) + 1).sum(1), (t(192),), "16: a // 64 [64*2]", "8: a // 64 [64*2]"),
}  # fmt: skip


def shown(kernel: Kernel) -> str:
    """The loops of a kernel with the vectors that their maps put them into."""
    lanes = 1

    def text(loop: Loop) -> str:
        nonlocal lanes
        map_ = loop.map
        if map_.kind == "lanes":
            lanes = map_.width
            return f"{loop.extent}*{map_.interleave}" + "^" * (map_.tail == "masked")
        return f"{loop.extent}" + "~" * (map_.kind == "tile")

    outer = " ".join(map(text, kernel.grid))
    inner = [f"[{' '.join(map(text, nest.loops))}]" for nest in perfect_nests(kernel)]
    return f"{lanes}: " + " ".join([outer, *inner]).removesuffix(" []")


def plans(f: Callable[..., Any], tensors: tuple[Tensor, ...], bits: int, mode: str = "fake") -> str:
    """What is shown of all nests of a function."""
    program, _ = schedule_program(lower_graph(make_fx(f, decompositions(), tracing_mode=mode)(*tensors)))
    buffers, target, found = {b.name: b for b in program.buffers}, generic_machine(bits), []
    for step in program.steps:
        if isinstance(step, LoopNest):
            kernel = version_loops(map_loops(kernel_of(step, buffers), target), target)
            found.append(", short ".join(map(shown, (kernel, *(version for _, version in kernel.versions)))))
    text = "; ".join(found)
    for symbol, name in zip(dict.fromkeys(source[0] for source in program.symbol_sources), "abcd", strict=False):
        text = text.replace(f"${symbol}", name)
    return text


@pytest.mark.parametrize("name", CASES)
def test_loops_are_merged_and_put_into_vectors(name: str) -> None:
    f, tensors, wide, narrow = CASES[name]
    assert (plans(f, tensors, 512), plans(f, tensors, 256)) == (wide, narrow)


@pytest.mark.parametrize("name", DYNAMIC)
def test_loops_of_unknown_sizes_are_put_into_vectors(name: str) -> None:
    f, tensors, wide, narrow = DYNAMIC[name]
    assert (plans(f, tensors, 512, "symbolic"), plans(f, tensors, 256, "symbolic")) == (wide, narrow)
