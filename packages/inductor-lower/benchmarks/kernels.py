"""Generated kernels against eager: run time and compile time of typical fused groups.

    python benchmarks/kernels.py [--threads N] [--only NAME] [--text]

Each case is measured interleaved with eager on the same inputs, results preallocated by neither side.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from aotkit_inductor_lower import bind_program
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.targets.cpu.generate import generate

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Case:
    """One group: IR text of its nests, inputs, outputs (for their layout) and eager's way."""

    name: str
    nests: str
    inputs: dict[str, torch.Tensor]
    outputs: dict[str, torch.Tensor]
    eager: Callable[..., object]

    def text(self) -> str:
        """The program's IR text."""
        lines = ["aotkit-ir 2", f"program {self.name}", *(f"input {n}" for n in self.inputs)]
        for tensors, kind in ((self.inputs, "input"), (self.outputs, "output")):
            for name, t in tensors.items():
                sizes, strides = ", ".join(map(str, t.shape)), ", ".join(map(str, t.stride()))
                lines.append(f"buffer {name} : {str(t.dtype)[6:]}[{sizes}] strides [{strides}] {kind} on cpu")
        return "\n".join(lines) + self.nests.rstrip() + f"\nreturn {', '.join(self.outputs)}\n"


def bias_gelu() -> Case:
    x, b = torch.randn(512, 1024), torch.randn(1024)
    nests = """
loop bias_gelu(i0 < 512, i1 < 1024):
  stage():
    %x = load x[i0, i1] : f32
    %b = load b[i1] : f32
    %h = add %x, %b : f32
    %c = const 0.7071067811865476 : f32
    %s = mul %h, %c : f32
    %e = erf %s : f32
    %one = const 1.0 : f32
    %f = add %e, %one : f32
    %half = const 0.5 : f32
    %g = mul %h, %half : f32
    %o = mul %g, %f : f32
    store o[i0, i1] = %o
"""
    return Case("bias_gelu", nests, {"x": x, "b": b}, {"o": x}, lambda x, b: torch.nn.functional.gelu(x + b))


def bias_gelu_tanh() -> Case:
    x, b = torch.randn(512, 1024), torch.randn(1024)
    nests = """
loop bias_gelu_tanh(i0 < 512, i1 < 1024):
  stage():
    %x = load x[i0, i1] : f32
    %b = load b[i1] : f32
    %h = add %x, %b : f32
    %h2 = mul %h, %h : f32
    %h3 = mul %h2, %h : f32
    %c = const 0.044715 : f32
    %s = mul %h3, %c : f32
    %u = add %h, %s : f32
    %k = const 0.7978845608028654 : f32
    %v = mul %u, %k : f32
    %t = tanh %v : f32
    %one = const 1.0 : f32
    %f = add %t, %one : f32
    %half = const 0.5 : f32
    %g = mul %h, %half : f32
    %o = mul %g, %f : f32
    store o[i0, i1] = %o
"""
    eager = lambda x, b: torch.nn.functional.gelu(x + b, approximate="tanh")  # noqa: E731
    return Case("bias_gelu_tanh", nests, {"x": x, "b": b}, {"o": x}, eager)


def silu_mul() -> Case:
    x, y = torch.randn(512, 1024), torch.randn(512, 1024)
    nests = """
loop silu_mul(i0 < 512, i1 < 1024):
  stage():
    %x = load x[i0, i1] : f32
    %y = load y[i0, i1] : f32
    %s = sigmoid %x : f32
    %a = mul %x, %s : f32
    %o = mul %a, %y : f32
    store o[i0, i1] = %o
"""
    eager = lambda x, y: torch.nn.functional.silu(x) * y  # noqa: E731
    return Case("silu_mul", nests, {"x": x, "y": y}, {"o": x}, eager)


SOFTMAX = """
loop softmax({outer}):
  stage(r0 < {n}):
    %v0 = load x[{at}, r0] : f32
    %v1 = reduce max %v0 : f32
  stage(r1 < {n}):
    %v2 = load x[{at}, r1] : f32
    %v3 = sub %v2, %v1 : f32
    %v4 = exp %v3 : f32
    store y[{at}, r1] = %v4
    %v5 = reduce sum %v4 : f32
  stage(r2 < {n}):
    %v6 = load y[{at}, r2] : f32
    %v9 = div %v6, %v5 : f32
    store y[{at}, r2] = %v9
"""


def softmax_large() -> Case:
    x = torch.randn(2048, 2048)
    nests = SOFTMAX.format(outer="i0 < 2048", n=2048, at="i0")
    return Case("softmax_large", nests, {"x": x}, {"y": x}, lambda x: torch.softmax(x, -1))


def softmax_heads() -> Case:
    x = torch.randn(8, 4, 128, 128)
    nests = SOFTMAX.format(outer="i0 < 8, i1 < 4, i2 < 128", n=128, at="i0, i1, i2")
    return Case("softmax_heads", nests, {"x": x}, {"y": x}, lambda x: torch.softmax(x, -1))


def layer_norm() -> Case:
    x, w, b = torch.randn(512, 256), torch.randn(256), torch.randn(256)
    nests = """
loop layer_norm(i0 < 512):
  stage(r0 < 256):
    %v0 = load x[i0, r0] : f32
    %v1 = reduce sum %v0 : f32
  stage():
    %n = const 256.0 : f32
    %mean = div %v1, %n : f32
  stage(r1 < 256):
    %v2 = load x[i0, r1] : f32
    %v3 = sub %v2, %mean : f32
    %v4 = mul %v3, %v3 : f32
    %v5 = reduce sum %v4 : f32
  stage():
    %var = div %v5, %n : f32
    %eps = const 1e-05 : f32
    %v6 = add %var, %eps : f32
    %rstd = rsqrt %v6 : f32
    store mean[i0, 0] = %mean
    store rstd[i0, 0] = %rstd
  stage(r2 < 256):
    %v7 = load x[i0, r2] : f32
    %v8 = sub %v7, %mean : f32
    %v9 = mul %v8, %rstd : f32
    %w = load w[r2] : f32
    %b = load b[r2] : f32
    %v10 = mul %v9, %w : f32
    %v11 = add %v10, %b : f32
    store y[i0, r2] = %v11
"""
    eager = lambda x, w, b: torch.ops.aten.native_layer_norm(x, [256], w, b, 1e-5)  # noqa: E731
    outputs = dict(zip(("y", "mean", "rstd"), eager(x, w, b), strict=True))
    return Case("layer_norm", nests, {"x": x, "w": w, "b": b}, outputs, eager)


def column_sum() -> Case:
    x = torch.randn(512, 1024)
    nests = """
loop column_sum(i0 < 1024):
  stage(r0 < 512):
    %a = load x[r0, i0] : f32
    %s = reduce sum %a : f32
  stage():
    store o[i0] = %s
"""
    return Case("column_sum", nests, {"x": x}, {"o": x.sum(0)}, lambda x: x.sum(0))


def full_sum() -> Case:
    x = torch.randn(1024, 1024)
    nests = """
loop full_sum():
  stage(r0 < 1024, r1 < 1024):
    %a = load x[r0, r1] : f32
    %s = reduce sum %a : f32
  stage():
    store o[] = %s
"""
    return Case("full_sum", nests, {"x": x}, {"o": x.sum()}, lambda x: x.sum())


def relu_backward() -> Case:
    g, y = torch.randn(512, 1024), torch.randn(512, 1024).relu()
    nests = """
loop relu_backward(i0 < 512, i1 < 1024):
  stage():
    %y = load y[i0, i1] : f32
    %z = const 0.0 : f32
    %m = le %y, %z : bool
    %g = load g[i0, i1] : f32
    %o = where %m, %z, %g : f32
    store o[i0, i1] = %o
"""
    eager = lambda g, y: torch.ops.aten.threshold_backward(g, y, 0)  # noqa: E731
    return Case("relu_backward", nests, {"g": g, "y": y}, {"o": g}, eager)


def transpose_copy() -> Case:
    x = torch.randn(1024, 1024)
    nests = """
loop transpose_copy(i0 < 1024, i1 < 1024):
  stage():
    %a = load x[i1, i0] : f32
    store o[i0, i1] = %a
"""
    return Case("transpose_copy", nests, {"x": x}, {"o": x}, lambda x: x.t().contiguous())


def heads_copy() -> Case:
    x = torch.randn(4, 128, 8, 64)
    nests = """
loop heads_copy(i0 < 4, i1 < 8, i2 < 128, i3 < 64):
  stage():
    %a = load x[i0, i2, i1, i3] : f32
    store o[i0, i1, i2, i3] = %a
"""
    want = x.transpose(1, 2).contiguous()
    return Case("heads_copy", nests, {"x": x}, {"o": want}, lambda x: x.transpose(1, 2).contiguous())


def add_small() -> Case:
    x = torch.randn(64)
    nests = """
loop add_small(i0 < 64):
  stage():
    %a = load x[i0] : f32
    %b = add %a, %a : f32
    store o[i0] = %b
"""
    return Case("add_small", nests, {"x": x}, {"o": x}, lambda x: x + x)


def bfloat_residual() -> Case:
    x, y = torch.randn(512, 1024).bfloat16(), torch.randn(512, 1024).bfloat16()
    nests = """
loop bfloat_residual(i0 < 512, i1 < 1024):
  stage():
    %x = load x[i0, i1] : bf16
    %y = load y[i0, i1] : bf16
    %a = cast %x : f32
    %b = cast %y : f32
    %c = add %a, %b : f32
    %o = cast %c : bf16
    store o[i0, i1] = %o
"""
    return Case("bfloat_residual", nests, {"x": x, "y": y}, {"o": x}, lambda x, y: x + y)


def embedding() -> Case:
    w, idx = torch.randn(4000, 256), torch.randint(0, 4000, (512,))
    nests = """
loop embedding(i0 < 512, i1 < 256):
  stage():
    %i = load idx[i0] : i64
    %k = check %i < 4000
    %a = load w[%k, i1] : f32
    store o[i0, i1] = %a
"""
    return Case("embedding", nests, {"w": w, "idx": idx}, {"o": w[idx]}, lambda w, idx: w[idx])


def batch_norm_channels() -> Case:
    x = torch.randn(8, 64, 28, 28)
    nests = """
loop channel_sums(i0 < 64):
  stage(r0 < 8, r1 < 28, r2 < 28):
    %a = load x[r0, i0, r1, r2] : f32
    %s = reduce sum %a : f32
    %b = mul %a, %a : f32
    %q = reduce sum %b : f32
  stage():
    store s[i0] = %s
    store q[i0] = %q
"""
    outputs = {"s": x.sum((0, 2, 3)), "q": (x * x).sum((0, 2, 3))}
    return Case("batch_norm_channels", nests, {"x": x}, outputs, lambda x: (x.sum((0, 2, 3)), (x * x).sum((0, 2, 3))))


CASES = (
    bias_gelu,
    bias_gelu_tanh,
    silu_mul,
    softmax_large,
    softmax_heads,
    layer_norm,
    column_sum,
    full_sum,
    relu_backward,
    transpose_copy,
    heads_copy,
    add_small,
    bfloat_residual,
    embedding,
    batch_norm_channels,
)


def interleaved(ours: Callable[[], object], eager: Callable[[], object], seconds: float) -> tuple[float, float]:
    """Best seconds of each, measured in turns."""
    for _ in range(3):
        ours()
        eager()
    a: list[float] = []
    b: list[float] = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(a) < 5:
        for function, times in ((ours, a), (eager, b)):
            start = time.perf_counter()
            function()
            times.append(time.perf_counter() - start)
    return min(a), min(b)


def measure(case: Case, seconds: float) -> tuple[float, float, float, str]:
    """Seconds to compile, of our call and of eager's, and the LLVM text. Raises where the results differ."""
    program = parse_program(case.text())
    start = time.perf_counter()
    compiled = generate(program, keep_text=True)
    compiling = time.perf_counter() - start
    bound, inputs = bind_program(compiled), list(case.inputs.values())
    want = case.eager(*inputs)
    for got, expected in zip(bound(list(inputs)), want if isinstance(want, tuple) else (want,), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    ours, eager = interleaved(lambda: bound(list(inputs)), lambda: case.eager(*inputs), seconds)
    return compiling, ours, eager, compiled.llvm_text


def main() -> None:
    """Print a table of all cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=0.5, help="to measure each case for")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--text", action="store_true", help="print the LLVM text too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'case':22} {'compile ms':>10} {'aotkit us':>10} {'eager us':>10} {'speedup':>8}")
    for make in CASES:
        if options.only not in make.__name__:
            continue
        compiling, ours, eager, text = measure(make(), options.seconds)
        print(f"{make.__name__:22} {compiling * 1e3:10.1f} {ours * 1e6:10.1f} {eager * 1e6:10.1f} {eager / ours:8.2f}")
        if options.text:
            print(text)


if __name__ == "__main__":
    main()
