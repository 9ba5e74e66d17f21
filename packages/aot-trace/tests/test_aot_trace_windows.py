"""Operations that sum overlapping windows of their own accord, compared with eager, and writes that still can't."""

from __future__ import annotations

import pytest
import torch

from aotkit_aot_trace import TraceOptions, capture
from aotkit_functionalize import OverlappingWrite


def windows(x):
    return x.unfold(0, 4, 2).sin().sum()


def spectrum(*sizes):
    return [torch.randn(*sizes, dtype=torch.complex64, requires_grad=True)]


def there_and_back(x):
    window = torch.ones(8)
    return [torch.istft(torch.stft(x, 8, 2, window=window, return_complex=True), 8, 2, window=window)]


def half_spectrum(x):
    return [torch._fft_c2r(torch.fft.rfft(x, dim=1).transpose(1, 2), [2], 2, x.shape[1])]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [torch.func.grad(windows)(x)],
        lambda x: [torch.ops.aten.unfold_backward(x.reshape(4, 3), [9], 0, 3, 2)],
        lambda x: [torch.ops.aten.unfold_backward(x.reshape(4, 3), [19], 0, 3, 5)],
    ],
    ids=["gradient", "overlapping", "with gaps"],
)
def test_windows_are_summed_by_gradients_and_by_the_operator_itself(fn, check):
    check(fn, lambda: [torch.randn(12, requires_grad=True)])


@pytest.mark.parametrize(
    ("sizes", "width", "settings"),
    [
        ((2, 5, 7), 6, {"hop_length": 3, "length": 20}),
        ((5, 7), 8, {"center": False, "normalized": True, "length": 40}),
        ((2, 8, 3), 8, {"onesided": False, "return_complex": True}),
        ((8, 3), 8, {"onesided": False}),
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:The length of signal is shorter")
def test_a_signal_is_put_together_from_its_frames(sizes, width, settings, check):
    def fn(x, w):
        return [torch.istft(x, 8, win_length=width, window=w, **settings)]

    kind = torch.complex64 if "return_complex" in settings else torch.float32
    check(fn, lambda: [*spectrum(*sizes), torch.linspace(0.5, 1, width).to(kind).requires_grad_()])


@pytest.mark.filterwarnings("ignore:A window was not provided")
def test_without_a_window_frames_are_added_up(check):
    check(lambda x: [torch.istft(x, 8)], lambda: spectrum(5, 3))


def test_windows_that_leave_a_sample_out_are_an_error_of_the_call():
    captured = capture(lambda x, w: [torch.istft(x, 8, 4, window=w)], [*spectrum(5, 7), torch.ones(8)])
    targets = [str(node.target) for node in captured.graph.graph.nodes]
    assert "aten._assert_async.msg" in targets
    with pytest.raises(RuntimeError, match="window overlap"):
        torch.istft(*spectrum(5, 7), 8, 4, window=torch.zeros(8))
    with pytest.raises(RuntimeError, match="expected the frequency dimension"):
        capture(lambda x: [torch.istft(x, 8, 4)], spectrum(4, 7))


@pytest.mark.parametrize("fn", [there_and_back, half_spectrum])
def test_the_gradient_of_a_spectrum_may_be_one_that_was_written_to(fn, check):
    check(fn, lambda: [torch.randn(*((2, 8, 5) if fn is half_spectrum else (20,)), requires_grad=True)])


def test_a_write_before_windows_are_summed_is_still_refused(layer):
    def fn(x):
        y = x.clone()
        y.unfold(0, 4, 2).mul_(2)
        return [torch.func.grad(windows)(y)]

    with pytest.raises(OverlappingWrite, match="made by unfold"):
        capture(fn, [torch.ones(10)], options=TraceOptions(layer=layer))
