"""Elements at a kink: which of them a backend had on the other side, and what they do not excuse."""

from __future__ import annotations

import numpy
import torch
import torch.nn.functional as F

from tools.bench.numerics import Values, compare
from tools.bench.run import Measurement
from tools.bench.table import cells
from tools.bench.ties import Tie, Watch, candidates, taken

NEAREST = 1e-9


def parameters(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    drawn = [torch.randn(16, 8), torch.randn(8, 8) / 3, torch.randn(8, 4) / 3]
    x, first, second = (each.double() for each in drawn)
    # The first activation of the first row is all but 0: float32 cannot say on which side it is.
    first[:, 0] += x[0] * ((NEAREST - (x[0] @ first)[0]) / x[0].square().sum())
    return [each.to(dtype).requires_grad_() for each in (x, first, second)]


def step(watch: Watch, dtype: torch.dtype = torch.float64) -> Values:
    x, first, second = parameters(dtype)
    with watch:
        F.relu6(F.relu(x @ first) @ second + 1).square().sum().backward()
    return {f"grad:{name}": each.grad.numpy() for name, each in zip("xab", (x, first, second), strict=True)}


def found() -> list[Tie]:
    exact, rounded = Watch(), Watch()
    step(exact)
    step(rounded, torch.float32)
    return candidates(exact, rounded)


def test_an_element_that_float32_cannot_place_is_a_candidate() -> None:
    nearest = found()[0]
    assert (nearest.call, nearest.element, nearest.kink) == (0, 0, 0.0)
    exact = Watch()
    step(exact)
    assert exact.kinks == [(0.0,), (0.0, 6.0)]


def test_gradients_of_the_other_side_are_as_exact_as_eagers_once_the_reference_is_there() -> None:
    reference, ties = step(Watch()), found()
    noise = numpy.random.default_rng(0)
    other = {name: g * (1 + 1e-7 * noise.standard_normal(g.shape)) for name, g in step(Watch([ties[0]])).items()}
    assert not compare(other, reference, reference).ok
    sides = taken(ties, step, reference, {"other": other, "eager": reference})
    assert sides == {"other": [ties[0]], "eager": []}
    report = compare(other, reference, step(Watch(sides["other"])), reference, len(sides["other"]))
    assert report.ok
    row = Measurement("net", "train", "other", accuracy=report.to_json())
    assert cells(row)[-1] == "yes, 1 tie"


def test_wrong_gradients_are_no_ties() -> None:
    reference, ties = step(Watch()), found()
    wrong = {name: g * 1.01 for name, g in step(Watch([ties[0]])).items()}
    half = {name: (g + reference[name]) / 2 for name, g in step(Watch([ties[0]])).items()}
    for values in (wrong, half):
        sides = taken(ties, step, reference, {"wrong": values})["wrong"]
        assert not compare(values, reference, step(Watch(sides)), reference).ok
    assert taken([], step, reference, {"wrong": wrong}) == {"wrong": []}


def test_limits_of_hardtanh_are_kinks_however_they_are_given() -> None:
    watch = Watch()
    with watch:
        F.hardtanh(torch.zeros(2), 0.0, 6.0)
        F.hardtanh(torch.zeros(2), max_val=3.0)
    assert watch.kinks == [(0.0, 6.0), (-1.0, 3.0)]
