"""Products of matrices: ATen's call and our kernels, interleaved, with the error of both against float64.

python -m tools.bench.products                      60 products: linear layers, forward and both gradients
python -m tools.bench.products --after gelu         with bias and gelu after each forward product
python -m tools.bench.products --after gelu --residual    and a tensor that is added before gelu
python -m tools.bench.products --packed             weights are constants, which are packed once
python -m tools.bench.products --contractions auto  only those that the choice takes are ours: what the choice is worth
python -m tools.bench.products --wide               linear layers to a vocabulary's words, forward
python -m tools.bench.products --cold               each call has other factors, which come from memory, as in a step
python -m tools.bench.products --threads 2          wall time of two threads (else processor time of one)
python -m tools.bench.products --dtype float16 --rounds 1    ATen takes seconds for some of these

ATen's call is eager's, with what comes after it as calls of their own; ours reads both factors where they lie, so that
packing is within its time. Turns follow each other at once, and the median of the ratios within a round is reported.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from tools.bench.__main__ import machine
from tools.bench.turns import begin, compared, geometric_mean

__all__ = ["LAYERS", "Case", "Row", "main", "measure"]

#: Rows, summed, columns of linear layers: of the benchmark's five models, and of the architectures' usual sizes.
LAYERS = (
    *((512, 256, 256), (512, 256, 768), (512, 256, 1024), (512, 1024, 256), (512, 256, 1000)),
    *((512, 256, 688), (512, 688, 256), (788, 256, 256), (788, 256, 1024), (788, 1024, 256)),
    *((128, 768, 768), (512, 768, 768), (512, 768, 2304), (512, 768, 3072), (512, 3072, 768)),
    *((64, 512, 512), (256, 2048, 512), (1024, 1024, 1024), (1568, 384, 1536), (2048, 256, 512)),
)
#: The same of layers that compute the scores of a vocabulary's words.
HEADS = tuple((rows, summed, 8192) for rows in (128, 512, 1024) for summed in (256, 512, 768))
HEADS = (*HEADS, (512, 256, 16384), (512, 256, 32000), (512, 768, 30522))
IN_NO_CACHE = 80 << 20  # bytes
DIRECTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "x @ w.t()": lambda x, w: F.linear(x, w),
    "g @ w": lambda g, w: g @ w,
    "g.t() @ x": lambda g, x: g.t() @ x,
}


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured of each product. ``after``: what is computed of it, with a bias before; ``residual``: a tensor
    is added, too; ``packed``: the weight is a constant; ``contractions``: as of :class:`.LowerOptions`; ``cold``: calls
    take turns with so many factors that these are in no cache."""

    after: str = ""
    residual: bool = False
    packed: bool = False
    dtype: torch.dtype = torch.float32
    contractions: Literal["auto", "generated"] = "generated"
    cold: bool = False

    def finish(self, total: torch.Tensor) -> torch.Tensor:
        """What is computed of the sum."""
        return getattr(F, self.after)(total) if self.after else total

    def __str__(self) -> str:
        added = " with a residual" * self.residual
        chosen = "; those that the choice takes" * (self.contractions == "auto")
        return (
            f"{self.dtype}; after the product: {self.after or 'nothing'}{added}{'; packed once' * self.packed}{chosen}"
            f"{'; factors from memory' * self.cold}"
        )


@dataclass(slots=True)
class Row:
    """One product: times in ms, the speed over ATen's, errors over the largest value, and whether a kernel of ours
    computed it (or ATen in our graph)."""

    layer: tuple[int, int, int]
    direction: str
    aten: float
    own: float
    ratio: float
    errors: tuple[float, float]
    generated: bool = True


def _operands(layer: tuple[int, int, int], direction: str, dtype: torch.dtype) -> list[torch.Tensor]:
    rows, summed, columns = layer
    sizes = (rows, summed), (columns, summed), (rows, columns)
    if dtype is torch.int8:
        x, w, g = (torch.randint(-128, 128, size, dtype=dtype) for size in sizes)
    else:
        x, w, g = (torch.randn(*size, dtype=dtype) for size in sizes)
    return {"x @ w.t()": [x, w], "g @ w": [g, w], "g.t() @ x": [g, x]}[direction]


def _product(direction: str, dtype: torch.dtype) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """The product of a direction; of bytes in 32 bits, and that as float32."""
    plain = DIRECTIONS[direction]

    def of_bytes(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        if x.dtype is not torch.int8:  # the true one
            return plain(x, w)
        left, right = _factors(direction, (x, w))
        return torch._int_mm(left, right).float()

    return of_bytes if dtype is torch.int8 else plain


def measure(
    layer: tuple[int, int, int],
    direction: str,
    rounds: int,
    clock: Callable[[], float],
    case: Case,
) -> Row:
    """One product in interleaved turns."""
    product, args = _product(direction, case.dtype), _operands(layer, direction, case.dtype)
    result = product(*args)
    if case.after:
        args.append(torch.randn(result.shape[-1], dtype=result.dtype))
    if case.residual:
        args.append(torch.randn_like(result))

    def program(a: torch.Tensor, b: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
        return case.finish(sum(added, product(a, b)))

    def eager() -> torch.Tensor:
        if not case.after or case.dtype is torch.int8:
            return case.finish(sum(args[2:], product(*args[:2])))
        return case.finish(sum(args[3:], torch.addmm(args[2], *_factors(direction, args))))

    own, given = _compiled(program, args, case)
    if case.cold:
        copies = itertools.cycle([[x.clone() for x in args[:2]] for _ in range(_count_in_memory(args))])
        times = compared(lambda: product(*next(copies)), lambda: own([*next(copies), *given[2:]]), rounds, clock)
    else:
        times = compared(eager, lambda: own(list(given)), rounds, clock)
    true = program(*(x.double() for x in args))
    off = [float((got.double() - true).abs().max() / true.abs().max()) for got in (program(*args), own(list(given))[0])]
    return Row(layer, direction, *times, (off[0], off[1]), generated=not own.report().externs)


def _count_in_memory(args: Sequence[torch.Tensor]) -> int:
    """Copies of the factors that are together larger than caches of the last level."""
    return max(3, -(-IN_NO_CACHE // sum(x.nbytes for x in args[:2])))


def _compiled(
    program: Callable[..., torch.Tensor], args: list[torch.Tensor], case: Case
) -> tuple[CompiledGraph, list[torch.Tensor]]:
    """Kernels of the program, and what they are given: all but the weight, where that is a constant."""
    given, traced = args, program
    if case.packed:
        given, weight = [args[0], *args[2:]], args[1]
        traced = lambda a, *added: program(a, weight, *added)  # noqa: E731
    graph = make_fx(traced, tracing_mode="fake", _allow_non_fake_inputs=True)(*given)
    options = LowerOptions(contractions=case.contractions, check_inputs=False, pack_constants=case.packed)
    own = compile_graph(graph, options=options)
    assert isinstance(own, CompiledGraph)
    left = bool(own.report().externs)
    assert case.contractions == "auto" or not left, "not generated"
    assert left or not case.packed or all(name.endswith("_packed") for name in own.constants), "not packed"
    return own, given


def _factors(direction: str, args: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    left, right = args[:2]
    return (left.t() if direction == "g.t() @ x" else left), (right.t() if direction == "x @ w.t()" else right)


def main() -> int:
    """Returns 1 if an error is more than 1.3 times ATen's, and 2e-7."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.products", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--after", choices=("", "gelu", "relu", "silu"), default="")
    parser.add_argument("--only", default="", help="a part of the direction")
    parser.add_argument("--residual", action="store_true", help="a tensor is added before what comes after")
    parser.add_argument("--packed", action="store_true", help="weights are constants")
    parser.add_argument("--contractions", choices=("auto", "generated"), default="generated")
    parser.add_argument("--cold", action="store_true", help="factors come from memory (of products with nothing after)")
    parser.add_argument("--wide", action="store_true", help="scores of vocabularies")
    parser.add_argument("--dtype", choices=("float32", "float16", "bfloat16", "int8"), default="float32")
    chosen = parser.parse_args()
    if chosen.cold and (chosen.after or chosen.residual or chosen.packed):
        parser.error("--cold is of products alone")
    dtype = getattr(torch, chosen.dtype)
    case = Case(chosen.after, chosen.residual, chosen.packed, dtype, chosen.contractions, chosen.cold)
    only = "x @ w.t()" if chosen.wide else chosen.only
    directions = [name for name in DIRECTIONS if only in name and ("w" in name or not case.packed)]
    clock = begin(chosen.threads)
    print(f"{machine()}; threads: {chosen.threads}; {case}\n")
    print("| rows, summed, columns | product | by | ATen ms | ours ms | ours GFLOP/s | x ATen | error ATen | error |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|")
    found: list[Row] = []
    for layer in HEADS if chosen.wide else LAYERS:
        for direction in directions:
            row = measure(layer, direction, chosen.rounds, clock, case)
            found.append(row)
            speed = 2e-6 * math.prod(layer) / row.own
            numbers = f"{row.aten:.3f} | {row.own:.3f} | {speed:.0f} | {row.ratio:.2f}"
            by = "us" if row.generated else "ATen"
            print(
                f"| {layer} | `{direction}` | {by} | {numbers} | {row.errors[0]:.1e} | {row.errors[1]:.1e} |",
                flush=True,
            )
    print()
    for direction in directions:
        ratios = [row.ratio for row in found if row.direction == direction]
        print(f"{direction}: geometric mean {geometric_mean(ratios):.2f}, least {min(ratios):.2f}")
    print(f"all: geometric mean {geometric_mean([row.ratio for row in found]):.2f}")
    return int(any(row.errors[1] > 1.3 * row.errors[0] + 2e-7 for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
