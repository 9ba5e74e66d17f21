"""Random programs: valid, printable, reproducible, and varied enough to be worth running."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from aotkit_inductor_lower.ir import (
    BufferKind,
    CheckedIndex,
    Compute,
    DType,
    Index,
    Load,
    LoopNest,
    Program,
    Reduce,
    Store,
)
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program


@pytest.mark.sample(40)
@pytest.mark.parametrize("seed", range(60))
def test_a_random_program_verifies_prints_and_runs(seed: int) -> None:
    program = random_program(seed)
    assert parse_program(print_program(program)) == program
    assert random_program(seed) == program
    inputs = random_inputs(program, seed)
    first, second = interpret_program(program, inputs), interpret_program(program, inputs)
    for a, b in zip(first, second, strict=True):
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        assert difference(a, b, exact=True) is None


def test_a_dynamic_program_runs_at_several_sizes() -> None:
    dynamic = [p for p in map(random_program, range(60)) if p.symbol_sources]
    assert len(dynamic) > 5
    changed = 0
    for program in dynamic[:8]:
        runs = [interpret_program(program, random_inputs(program, seed)) for seed in range(4)]
        changed += len({tuple(tuple(o.shape) for o in run if isinstance(o, torch.Tensor)) for run in runs}) > 1
    assert changed >= 4, "most outputs have a dynamic size"


def _features(program: Program) -> set[str]:
    found = {f"dtype {b.dtype}" for b in program.buffers}
    found |= {"row"} if any(b.kind is BufferKind.SCRATCH for b in program.buffers) else set()
    found |= {"dynamic"} if program.symbol_sources else set()
    for nest in program.steps:
        assert isinstance(nest, LoopNest)
        found.add(f"{len(nest.outer)} outer")
        found.add(f"{len(nest.stages)} stages")
        for instr in (i for s in nest.stages for i in s.body):
            if isinstance(instr, Compute):
                found.add(f"op {instr.op}")
            elif isinstance(instr, Reduce):
                found.add(f"reduce {instr.kind}")
            elif isinstance(instr, Store):
                found.add(f"store {instr.mode}")
            elif isinstance(instr, Load) and instr.mask is not None:
                found.add("masked load")
            elif isinstance(instr, CheckedIndex | Index):
                found.add(type(instr).__name__)
    return found


def test_the_programs_cover_the_language() -> None:
    counted = Counter(f for seed in range(250) for f in _features(random_program(seed)))
    for dtype in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool"):
        assert counted[f"dtype {dtype}"] > 5, dtype
    for kind in ("sum", "prod", "min", "max", "any", "all", "argmin", "argmax"):
        assert counted[f"reduce {kind}"], kind
    for feature in (
        "row",
        "dynamic",
        "masked load",
        "CheckedIndex",
        "Index",
        "store add",
        "store set",
        "0 outer",
        "3 outer",
    ):
        assert counted[feature], feature
    assert len([f for f in counted if f.startswith("op ")]) > 50


def test_exact_programs_hold_no_approximate_op() -> None:
    for seed in range(100):
        assert not {"op exp", "op tanh", "op sin", "op erf"} & _features(
            random_program(seed, RandomOptions(exact_only=True))
        )


def test_dtypes_can_be_restricted() -> None:
    options = RandomOptions(dtypes=(DType.F32,), dynamic=False)
    for seed in range(30):
        program = random_program(seed, options)
        assert not program.symbol_sources
        loaded = {b.dtype for b in program.buffers if b.name.startswith("in") and not b.name.startswith("index")}
        assert loaded <= {"float32"}


def test_a_difference_is_described() -> None:
    a = torch.tensor([1.0, 2.0, float("nan"), 0.0])
    assert difference(a, torch.tensor([1.0, 2.0, float("nan"), -0.0]), exact=True) is None
    assert difference(a, a * (1 + 1e-7)) is None
    assert "1 of 4 elements, first at (1,): 2.0 against 3.0" in (difference(a, a + torch.tensor([0, 1, 0, 0])) or "")
    assert difference(torch.tensor([1]), torch.tensor([2])) is not None
    assert "against" in (difference(a, a.double()) or "")
