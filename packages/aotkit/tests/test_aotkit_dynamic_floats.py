"""Python floats that change from call to call: one compile serves all values, in kernels and in ATen calls."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import aotkit

VALUES = (0.5, 0.25, 3.75, 1e300, 1e-45, -1.5, -0.0)
ODD = (math.inf, -math.inf, math.nan, 7, 0, True)


RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Compiled:
    """``fn`` compiled with floats as symbols; refusals raise. ``compiles``: how often Dynamo asked for one."""

    def __init__(self, fn: Callable[..., Any], dynamic: bool | None = True) -> None:
        torch._dynamo.reset()
        self.compiles = 0
        self.recorder = aotkit.Recorder()
        options = aotkit.Options(fallback="error", rng="eager")
        self.backend = aotkit.make_backend(options, self.recorder)
        self.run = torch.compile(fn, backend=self._compile, dynamic=dynamic, fullgraph=True)

    def _compile(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        self.compiles += 1
        return self.backend(graph, examples)

    def __call__(self, *args: Any) -> Any:
        with torch._dynamo.config.patch(specialize_float=False):
            return self.run(*args)

    def aten_calls(self) -> list[str]:
        return [extern.target for record in self.recorder.graphs for extern in record.report.externs]


def assert_same(compiled: Compiled, fn: Callable[..., Any], x: torch.Tensor, value: Any, **exact: float) -> None:
    results = []
    for run in (compiled, fn):
        leaf = x.detach().clone().requires_grad_(x.is_floating_point())
        result = run(leaf, value)
        gradient = torch.autograd.grad(result.sum(), leaf)[0] if result.requires_grad else None
        results.append((result.detach(), gradient))
    torch.testing.assert_close(results[0], results[1], equal_nan=True, **exact)
    assert results[0][0].stride() == results[1][0].stride()


ARITHMETIC: dict[str, Callable[..., torch.Tensor]] = {
    "multiply": lambda x, y: x * y,
    "add": lambda x, y: x + y,
    "subtract": lambda x, y: x - y,
    "subtract from": lambda x, y: y - x,
    "divide": lambda x, y: x / y if y else x * 2,
    "divide by": lambda x, y: y / x,
    "scaled sum": lambda x, y: torch.add(x, x * 2, alpha=y) if x.is_floating_point() else x + y,
    "compare": lambda x, y: torch.where(x < y, x * 2, x),
}
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    ("name", "dtype"),  # there is no difference of bools
    [(n, d) for n in ARITHMETIC for d in DTYPES if not (d is torch.bool and n.startswith("subtract"))],
    ids=str,
)
def test_arithmetic_with_a_float_has_eagers_bits_for_every_value_after_one_compile(
    name: str, dtype: torch.dtype
) -> None:
    fn = ARITHMETIC[name]
    x = torch.tensor([1.0, 2.0, 3.0, 0.0, 1.5, 77.0, 1000.0, 0.125]).to(dtype)
    compiled = Compiled(fn)
    for value in VALUES[:2] if name == "scaled sum" else VALUES[:-1]:  # eager refuses scales beyond the type's range
        assert_same(compiled, fn, x, value, rtol=0, atol=0)
    assert compiled.compiles == 1 and not compiled.aten_calls()
    for value in (-0.0, 4, 0) if name == "scaled sum" else (-0.0, *ODD[:5]):
        assert_same(compiled, fn, x, value, rtol=0, atol=0)


FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "softshrink": lambda x, y: F.softshrink(x, y),
    "hardshrink": lambda x, y: F.hardshrink(x, y),
    "leaky relu": lambda x, y: F.leaky_relu(x, y),
    "elu": lambda x, y: F.elu(x, y),
    "celu": lambda x, y: F.celu(x, y),
    "threshold": lambda x, y: F.threshold(x, 0.1, y),
    "softplus": lambda x, y: F.softplus(x, y),
    "clamp": lambda x, y: x.clamp(-y, y),
    "full": lambda x, y: x + torch.full((4, 1), y, dtype=x.dtype),
    "masked fill": lambda x, y: x.masked_fill(x > 0, y),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "lerp": lambda x, y: torch.lerp(x, x * 2, y),
    "addcmul": lambda x, y: torch.addcmul(x, x, x, value=y),
    "addmm": lambda x, y: torch.addmm(x[:, :4], x, x.t(), beta=y, alpha=y + 1),
    "power": lambda x, y: x.abs() ** y,
    "a tensor of it": lambda x, y: x * torch.tensor(y),
    "fmod": lambda x, y: torch.fmod(x, y),
    "remainder": lambda x, y: x % y,
    "floor divide": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "sizes too": lambda x, y: x * (y / x.shape[0]) + x.shape[1] * y,
    "several": lambda x, y: (x * y + 1 / y).sigmoid() * (y * y - 1),
    "sine of it": lambda x, y: x * math.sin(y),
    "pad": lambda x, y: F.pad(x, (1, 2), value=y),
    "huber": lambda x, y: F.huber_loss(x, x * 0, delta=y),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None], x[None], x[None], scale=y),
    "norm": lambda x, y: F.layer_norm(x, (9,), eps=y),
    "range": lambda x, y: torch.arange(0, 3, y, dtype=x.dtype).sum() * x,
    "a size of it": lambda x, y: x.sum() + torch.ones(int(y * 4), dtype=x.dtype),
    "condition": lambda x, y: x * 2 if y > 0.6 else x * y,
    "dropout": lambda x, y: x + 0 * F.dropout(x, min(y, 0.5)),
}
# torch's C++ code or Python asks for the number; Dynamo's own backends compile again for these, and most others.
SPECIALISED = {"celu", "lerp", "power", "pad", "huber", "attention", "norm", "range", "a size of it", "dropout"}
SPECIALISED |= {"condition"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_a_float_equal_eager_for_every_value(name: str) -> None:
    fn = FUNCTIONS[name]
    x = torch.linspace(-2, 2, 36, dtype=torch.float64).view(4, 9)
    compiled = Compiled(fn)
    for value in (0.5, 0.75) if name in SPECIALISED else (0.5, 0.25, 0.75, 1.5):  # for each of these a compile
        assert_same(compiled, fn, x, value)
    assert compiled.compiles == 1 or name in SPECIALISED, compiled.compiles
    if name == "range" and RELEASE >= (2, 15):  # whose fake kernel counts steps by their sign
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="holds Piecewise, which has no integer"):
            compiled(x, 2)
        return
    assert_same(compiled, fn, x, 2)  # an integer where a float came before


def test_a_zero_that_a_power_needs_to_know_keeps_its_sign_elsewhere() -> None:
    def fn(x: torch.Tensor, y: float) -> torch.Tensor:
        return torch.stack([x**y, x / y, x / -y, torch.full_like(x, y)])

    compiled = Compiled(fn, dynamic=None)
    x = torch.tensor([1.0, -2.0, 3.0])
    for value in (2.0, 3.0, 0.0, -0.0):  # the last two of one compile
        torch.testing.assert_close(compiled(x, value), fn(x, value))
        assert compiled(x, value)[3].signbit().all() == (math.copysign(1, value) < 0)


def test_a_float_goes_through_an_operator_that_no_kernel_knows() -> None:
    library = torch.library.Library("aotkit_floats_test", "FRAGMENT")
    library.define("scaled(Tensor x, float by) -> Tensor")
    library.impl("scaled", lambda x, by: x * by, "CPU")
    library.impl("scaled", lambda x, by: torch.empty_like(x), "Meta")

    def fn(x: torch.Tensor, y: float) -> torch.Tensor:
        return torch.ops.aotkit_floats_test.scaled(x * y, y + x.shape[0]) * y

    compiled = Compiled(fn)
    x = torch.linspace(-2, 2, 7)
    for value in (0.5, -0.25, 1e30):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x, value), fn(x, value))


@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_bound_that_a_tensor_holds_may_be_nan() -> None:
    def fn(x: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
        number = bound.item()
        low, high = x.clamp(min=number), x.clamp(max=number)
        return torch.stack([low, high, x.clamp(number, 1.0), torch.clamp_min(x, number), torch.clamp_max(x, number)])

    compiled = Compiled(fn)
    for value in (0.5, math.nan, -0.0):
        assert_same(compiled, fn, torch.tensor([0.1, -2.0, math.nan, math.inf, 0.0]), torch.tensor(value))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: x.masked_fill(x > 2, n),
        lambda x, n: torch.full_like(x, n) + x,
        lambda x, n: x.scatter(0, torch.tensor([1]), n),
        lambda x, n: x.clamp(max=n),
    ],
    ids=["masked_fill", "full_like", "scatter", "clamp"],
)
def test_a_number_that_does_not_fit_the_type_is_refused_when_it_comes(fn: Callable[..., Any], dtype: Any) -> None:
    compiled, x = Compiled(fn), torch.tensor([1, 2, 3], dtype=dtype)
    for number in (5, -3):
        torch.testing.assert_close(compiled(x, number), fn(x, number))
    with pytest.raises(RuntimeError, match="without overflow"):
        compiled(x, 70000)
    assert compiled.compiles == 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: torch.add(x, x, alpha=n),
        lambda x, n: torch.rsub(x, x, alpha=n),
        lambda x, n: torch.addcmul(x, x, x, value=n),
    ],
    ids=["add", "rsub", "addcmul"],
)
def test_a_factor_that_does_not_fit_integers_is_refused_when_it_comes(fn: Callable[..., Any]) -> None:
    compiled, x = Compiled(fn), torch.tensor([1, 2, 3], dtype=torch.int8)
    for number in (5, -3):
        torch.testing.assert_close(compiled(x, number), fn(x, number))
    with pytest.raises(RuntimeError, match="without overflow"):
        compiled(x, 300)
    assert compiled.compiles == 1


def test_floats_are_automatically_dynamic_after_their_first_value() -> None:
    def fn(x: torch.Tensor, y: float) -> torch.Tensor:
        return F.softshrink(x.sin(), y) * y

    compiled = Compiled(fn, dynamic=None)
    x = torch.linspace(-2, 2, 30)
    for value in (0.5, 0.25, 0.125, 0.75):
        assert_same(compiled, fn, x, value)
    assert compiled.compiles == 2


def test_a_float_and_sizes_that_depend_on_data_in_one_graph() -> None:
    def fn(x: torch.Tensor, y: float) -> torch.Tensor:
        return (x[x > 0] * y).sum() + F.softshrink(x, y)

    x = torch.linspace(-2, 2, 30, dtype=torch.float64)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = Compiled(fn)
        for value in (0.5, 0.25):
            assert_same(compiled, fn, x + value, value)
    assert compiled.compiles == 1


def test_a_warm_start_knows_which_floats_an_entry_is_for(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path))

    def fn(x: torch.Tensor, y: float) -> torch.Tensor:
        return F.elu(x, y) + torch.ones(int(y * 4), 1, dtype=x.dtype)

    x = torch.linspace(-2, 2, 30, dtype=torch.float64)
    for _ in range(2):
        compiled = Compiled(fn)
        for value in (0.5, 0.25, 0.6, 0.75):
            assert_same(compiled, fn, x, value)


DRAWN: dict[str, Callable[[torch.Tensor], Any]] = {
    "added": lambda x: x + random.uniform(10, 20),
    "half": lambda x: x.bfloat16() * random.uniform(0, 1) + random.randint(1, 5),
    "integers": lambda x: x.long() * random.uniform(0, 1),
    "returned": lambda x: (x * 2, random.uniform(0, 1)),
    "double": lambda x: x.double() + random.uniform(0, 1),
    "filled": lambda x: x.masked_fill(x > 0, random.uniform(0, 1)),
}


def simplified(graph: torch.fx.GraphModule, examples: Any) -> Any:
    return aotkit.aot_module_simplified(graph, examples, aotkit.compile_fx_inner)


@pytest.mark.parametrize("backend", ["aotkit", aotkit.compile_fx, simplified], ids=["backend", "fx", "simplified"])
def test_floats_that_the_program_draws(backend: Any) -> None:
    """They are traced as tensors of the default type, and passed as tensors of float64; types are those of numbers."""
    torch._dynamo.reset()

    def several(x: torch.Tensor) -> list[Any]:
        return [fn(x) for fn in DRAWN.values()]

    x = torch.linspace(-1, 1, 5).requires_grad_()
    results = []
    for run in (several, torch.compile(several, backend=backend, fullgraph=True)):
        run(x)
        random.seed(3)
        for _ in range(2):
            result = run(x)
            (gradient,) = torch.autograd.grad(result[0].sum() + result[1].float().sum(), x)
            results.append([*result, gradient])
    torch.testing.assert_close(results[2:], results[:2], rtol=0, atol=0)
