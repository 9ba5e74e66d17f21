"""Gradients of cross-entropy losses: without sums over rows, and with the same bits."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program, decompositions
from aotkit_inductor_lower.ir.walk import instructions, reduces

aten = torch.ops.aten
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
WITHOUT = frozenset(["loss-gradients"])


def gradient(reduction: str, ignored: int = -100, weighted: bool = False) -> Callable[..., Any]:
    def f(x: torch.Tensor, label: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        weight = torch.arange(1, x.shape[1] + 1, dtype=x.dtype) if weighted else None
        loss = F.cross_entropy(x, label, weight, ignore_index=ignored, reduction=reduction)
        return torch.autograd.grad(loss, [x], g.to(x.dtype).expand_as(loss) if reduction == "none" else g.to(x.dtype))

    return f


def arguments(dtype: torch.dtype, ignored: int = -100) -> list[torch.Tensor]:
    torch.manual_seed(0)
    label = torch.randint(0, 13, (7,))
    label[2] = label[5] = ignored
    return [torch.randn(7, 13, dtype=dtype) * 3, label, torch.tensor(0.7)]


def compiled(f: Callable[..., Any], args: list[torch.Tensor], **settings: Any) -> tuple[Any, int]:
    """The bound program, and how many sums of rows it has."""
    graph, options = make_fx(f, decompositions(), tracing_mode="fake")(*args), LowerOptions(**settings)
    steps = compile_to_program(graph, options=options).scheduled.steps
    sums = [i for step in steps for i in reduces(instructions(getattr(step, "stages", ()))) if i.kind == "sum"]
    return compile_graph(graph, options=options), len(sums)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_sums(dtype: torch.dtype, reduction: str) -> None:
    f, example = gradient(reduction), [*arguments(dtype)[:2], torch.tensor(0.7)]
    run, few = compiled(f, example)
    sums, many = compiled(f, example, disable=WITHOUT)
    assert few < many
    for scale in (0.7, 0.0, -0.0, float("inf"), float("nan")):
        args = [*arguments(dtype)[:2], torch.tensor(scale)]
        (got,), (want,) = run([*args]), sums([*args])
        assert (got.dtype, got.stride()) == (want.dtype, want.stride())
        assert torch.equal(got.nan_to_num(7), want.nan_to_num(7)) and torch.equal(got.signbit(), want.signbit())
        loose = {"rtol": 0.05, "atol": 0.01} if dtype.itemsize == 2 else {}
        torch.testing.assert_close(got, f(*args)[0], equal_nan=True, **loose)


@pytest.mark.parametrize("ignored", [-1, 5])
def test_labels_that_do_not_count(ignored: int) -> None:
    args = arguments(torch.float32, ignored)
    f = gradient("mean", ignored)
    torch.testing.assert_close(compiled(f, args)[0]([*args]), f(*args))


def test_logits_that_were_widened(dtype: torch.dtype = torch.bfloat16) -> None:
    """As transformers does: the loss in float32, of logits in bfloat16."""
    inner = gradient("mean")

    def f(x: torch.Tensor, label: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (inner(x.float(), label, g)[0].to(dtype),)

    args = arguments(dtype)
    (run, few), (sums, many) = compiled(f, args), compiled(f, args, disable=WITHOUT)
    assert few < many and torch.equal(run([*args])[0], sums([*args])[0])


def test_what_has_other_sums_keeps_them() -> None:
    args = arguments(torch.float32)
    f = gradient("mean", weighted=True)
    assert compiled(f, args)[1] == compiled(f, args, disable=WITHOUT)[1]
    torch.testing.assert_close(compiled(f, args)[0]([*args]), f(*args))

    def of_anything(g: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (aten._log_softmax_backward_data(g, y, 1, y.dtype),)

    pair = [torch.randn(7, 13), torch.randn(7, 13)]
    assert compiled(of_anything, pair)[1] == 1


def test_a_label_out_of_range_is_an_error() -> None:
    args = arguments(torch.float32)
    run, _ = compiled(gradient("mean"), args)
    args[1] = replace_label(args[1], 13)
    with pytest.raises(IndexError):
        run([*args])


def replace_label(label: torch.Tensor, value: int) -> torch.Tensor:
    return label.index_fill(0, torch.tensor([3]), value)
