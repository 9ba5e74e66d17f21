"""Random loop IR programs: generated code against the reference interpreter, for several vector widths."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.ir.random_programs import random_inputs, random_program
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

RELATIVE = {torch.float64: 1e-12, torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def same_strides(value: torch.Tensor | int) -> torch.Tensor | int:
    """A copy with gaps and all, as ``clone`` does not make it."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(value)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("bits", [128, 256, 512])
@pytest.mark.parametrize("seed", range(25))
@pytest.mark.covers("F5d.3", "F5d.4")
def test_a_random_program_gives_what_the_interpreter_gives(seed: int, bits: int) -> None:
    if bits > host_machine().vector_bits:
        bits = host_machine().vector_bits
        seed += 1000  # this machine has narrower vectors: more programs on what it has
    target = host_machine() if bits == host_machine().vector_bits else generic_machine(bits)
    program = random_program(seed)
    inputs = random_inputs(program, seed)
    want = interpret_program(program, [same_strides(i) for i in inputs])
    got = bind_program(generate(program, target))([same_strides(i) for i in inputs])
    for ours, reference in zip(got, want, strict=True):
        if not isinstance(reference, torch.Tensor):
            assert ours == reference
        elif reference.dtype.is_floating_point:
            tolerance = RELATIVE[reference.dtype]
            torch.testing.assert_close(ours, reference, rtol=tolerance, atol=tolerance / 2, equal_nan=True)
        else:
            assert torch.equal(ours, reference)
