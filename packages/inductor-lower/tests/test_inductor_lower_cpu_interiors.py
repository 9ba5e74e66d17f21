"""The interior of an image, where windows need no masks: the same bits as at the edges, and eager's values."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions, lower_graph, schedule_program
from aotkit_inductor_lower.ir import Compute, Const, DType, Index, Instr
from aotkit_inductor_lower.kernel_ir.interiors import interior
from aotkit_inductor_lower.symbolic import sym
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

F = torch.nn.functional
BITS = {"x86-64": 128, "x86-64-v3": 256, "x86-64-v4": 512}
PROCESSORS = [name for name, bits in BITS.items() if bits <= host_machine().vector_bits]
Function = Callable[..., Any]


def conditions(*rows: tuple[str, Any, int]) -> list[Instr]:
    """``index ge number`` and ``index lt number``."""
    body: list[Instr] = []
    for k, (op, place, number) in enumerate(rows):
        body += [Index(f"i{k}", place, DType.I64), Const(f"n{k}", number, DType.I64)]
        body.append(Compute(f"c{k}", op, (f"i{k}", f"n{k}"), DType.BOOL))
    return body


def test_the_interior_is_where_every_condition_holds() -> None:
    x, y, r = sym("x"), sym("y"), sym("r")
    (x_,), (y_,), (r_,) = x.symbols, y.symbols, r.symbols
    whole = {x_: (0, 55), y_: (0, 9)}
    body = conditions(("ge", x - 1, 0), ("lt", x + 1, 56), ("ge", 2 * y + r - 1, 0), ("lt", 2 * y + r - 1, 18))
    assert interior(body, whole, {r_: 2}) == {x_: (1, 54), y_: (1, 8)}
    assert interior(body[:6], whole, {}) == {x_: (1, 54)}
    assert interior(conditions(("ge", 9 - y, 3)), whole, {}) == {y_: (0, 6)}
    assert interior(conditions(("ge", x + y, 3), ("lt", x // 2, 3)), whole, {}) == {}  # of two, and no multiple
    assert interior(conditions(("lt", x, 28), ("ge", x, 28)), whole, {}) == {}  # nowhere
    assert interior(conditions(("ge", 2 * y + r - 1, 0)), whole, {}) == {}  # of a loop without a known end


def depthwise(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.relu6(F.conv2d(x, w, padding=1, groups=x.shape[1]))


def pooled(x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    found = torch.ops.aten.max_pool2d_with_indices(x, [3, 3], [2, 2], [1, 1])
    return *found, F.avg_pool2d(x, 3, 1, 1), F.max_pool2d(x, (1, 5), 1, (0, 2))


def padded(x: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return F.pad(F.silu(x), (0, 1, 2, 1)), F.pad(x * 2, (3, 0, 0, 0), value=1.5), F.pad(x, (2, 2, 1, 1), mode="reflect")


def compiled(f: Function, args: list[Any], processor: str) -> Any:
    options = LowerOptions(contractions="generated", verify=True, redzones=True, processor=processor)  # type: ignore[arg-type]
    return compile_graph(make_fx(lambda *a: f(*a), decompositions())(*args), options=options)(list(args))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("sizes", [(2, 3, 5, 33), (1, 2, 3, 16), (1, 5, 2, 3), (2, 40, 9, 11)])
@pytest.mark.parametrize("f", [depthwise, pooled, padded])
@pytest.mark.parametrize("last", [False, True])
def test_edges_and_interior_equal_eager(f: Function, sizes: tuple[int, ...], last: bool, processor: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last) if last else x
    args = [x, torch.randn((sizes[1], 1, 3, 3), generator=generator)]
    want, got = f(*args), compiled(f, args, processor)
    for a, b in zip(got, want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_an_infinite_weight_meets_no_padding_at_any_edge(processor: str) -> None:
    x, w = torch.zeros(1, 2, 5, 33), torch.full((2, 1, 3, 3), float("inf"))
    x[0, 1] = 1.0
    (got,) = compiled(depthwise, [x, w], processor)
    assert got[0, 0].isnan().all() and (got[0, 1] == 6.0).all()


@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize(
    "f",
    [lambda x: F.pad(x, (1, 0))[..., :64] * 2 - x, lambda x: F.avg_pool2d(x, 3, 1, 1)],
    ids=["neighbours", "windows"],
)
def test_what_lies_between_the_edges_is_read_without_a_mask(f: Function, bits: int) -> None:
    """Masks of AVX-512 cost nothing: there is one version there."""
    graph = make_fx(f, decompositions(), tracing_mode="fake")(torch.randn(2, 3, 40, 64))
    program, _ = schedule_program(lower_graph(graph))
    text = generate(program, generic_machine(bits), keep_text=True).text
    blocks = [block for block in re.split(r"\n\S+:\n", text) if "x float>, ptr" in block or "masked.load" in block]
    plain = [block for block in blocks if "@llvm.masked.load" not in block]
    assert len(plain) < len(blocks) and bool(plain) == (bits != 512)
