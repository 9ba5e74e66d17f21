"""The command that runs random products, convolutions and attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tools.fuzz import layers
from tools.fuzz.layer_programs import Input, LayerProgram, make_program


def test_a_slice_of_the_random_programs_equals_eager(capsys: pytest.CaptureFixture[str]) -> None:
    assert layers.main(["--programs", "2", "--seed", "20"]) == 0
    assert "2 programs" in capsys.readouterr().out


def test_a_number_gives_the_same_program_and_most_numbers_another() -> None:
    assert make_program(3) == make_program(3)
    programs = [make_program(number) for number in range(60)]
    assert len({program.source for program in programs}) == 60
    text = "".join(map(str, programs))
    for word in (
        "F.linear",
        " @ ",
        "F.conv2d",
        "conv_transpose2d",
        "scaled_dot_product",
        "int8_",
        "autocast",
        "frozen",
    ):
        assert word in text


def _program(*lines: str, fill: str = "normal", low: torch.dtype = torch.float32) -> LayerProgram:
    inputs = (Input("x", (8, 16), fill=fill), Input("w", (16, 16), weight=True, scale=0.25))
    return LayerProgram(lines, inputs, low, training=True, autocast=False, frozen=False, dynamic=False)


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (lambda r: r * (1 + 1e-4), "error"),
        (lambda r: torch.where(r == r.max(), torch.nan, r), "nan for"),
        (lambda r: r.double(), "torch.float64"),
        (lambda r: r.t().contiguous().t(), "strides"),
    ],
)
def test_a_backend_that_is_wrong_is_found(wrong: Any, text: str) -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [wrong(each) for each in graph(*args)]

    kind, why = layers.outcome(_program("return [F.linear(x, w)]"), 0, backend)
    assert kind == "mismatch" and text in why


def test_a_wrong_gradient_is_found() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(_: Any, *grads: torch.Tensor) -> torch.Tensor:
            return grads[0] * 1.001

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [Wrong.apply(each) for each in graph(*args)]

    kind, why = layers.outcome(_program("return [F.linear(x, w)]"), 0, backend)
    assert kind == "mismatch" and why.startswith("gradient of ")


def test_the_type_of_the_program_is_what_bounds_the_error() -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        return lambda *args: [each * (1 + 1e-3) for each in graph(*args)]

    assert layers.outcome(_program("return [F.linear(x, w)]"), 0, backend)[0] == "mismatch"
    assert layers.outcome(_program("return [F.linear(x, w)]", low=torch.bfloat16), 0, backend)[0] == "equal"


def test_what_eager_refuses_and_what_we_refuse_are_told_apart() -> None:
    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        raise layers.aotkit.CompileError("not this one")

    assert layers.outcome(_program("return [x @ x]"), 0)[0] == "eager"
    assert layers.outcome(_program("return [x @ w]"), 0, backend) == ("refused", "not this one")
