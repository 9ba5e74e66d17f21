"""A quickened interpreter of Triton computes what it computed before, and replaces nothing that has other arguments."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from .conftest import Run

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import types
import pytest, torch, triton
import triton.language as tl
from triton.runtime import interpreter
from triton.language import core
from tools.triton_interpreter import quicken

@interpreter.InterpretedFunction
def half(value, n: tl.constexpr):
    return value.to(tl.bfloat16).to(tl.float32) * 0.5 + tl.arange(0, n)[None, :]

@interpreter.InterpretedFunction
def kernel(x, out, rows, m: tl.constexpr, n: tl.constexpr):
    row = tl.program_id(0) * m + tl.arange(0, m)
    at = row[:, None] * n + tl.arange(0, n)[None, :]
    value = half(tl.load(x + at, mask=row[:, None] < rows, other=1.0), n)
    tl.store(out + at, tl.dot(value, tl.trans(value)) - tl.minimum(value, 0.5) + (row % 3)[:, None])

def run():
    out = torch.zeros(8, 4)
    kernel[(2,)](torch.linspace(-2, 3, 32).reshape(8, 4), out, 7, m=4, n=4)
    block = core.block_type(core.pointer_type(tl.float16), [2, core.constexpr(8)])
    halves = core.block_type(tl.float16, [2, 8])
    told = [str(block), block.numel, [*block.shape], str(block.shape.type), block == halves]
    for shape in ([2.0, 8], [3], []):
        with pytest.raises(Exception) as error:
            core.block_type(tl.float16, shape)
        told.append((type(error.value), str(error.value)))
    handle = interpreter.TensorHandle(interpreter.np.zeros((2, 8), "uint64"), block.element_ty)
    tensor = core.tensor(handle, block)
    told += [str(tensor.type), str(tensor.numel), str(tensor.shape), str(tensor.shape.type), str(tensor.dtype)]
    told += [interpreter._get_np_dtype(each) for each in (block, tl.bfloat16, tl.int1, block.element_ty)]
    return out, told

first, told = run()
with pytest.MonkeyPatch.context() as patch:
    assert quicken(patch) and core.tensor.__init__.__module__ == "tools.triton_interpreter"
    for _ in range(2):
        again, told_again = run()
        assert torch.equal(first, again) and told == told_again, (told, told_again)
core.tensor.__init__ = lambda self, handle: None
with pytest.MonkeyPatch.context() as patch:
    kept = core.tensor.__init__
    assert quicken(patch) and core.tensor.__init__ is kept
print("the same")
"""


def test_results_and_types_are_the_same(forked: Run) -> None:
    pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    done = forked([sys.executable, "-c", PROGRAM], cwd=ROOT)
    assert done.stdout.strip() == "the same", done.stderr
