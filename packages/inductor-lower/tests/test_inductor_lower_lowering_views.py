"""Views are index maps: no kernel for the view itself, eager's values and strides."""

from __future__ import annotations

import pytest
import torch

VIEWS = {
    "view": lambda x: x.view(6, 20),
    "split view": lambda x: x.view(2, 3, 4, 5, 1),
    "reshape of a transpose": lambda x: x.transpose(0, 2).reshape(6, 20),
    "permute": lambda x: x.permute(2, 0, 1),
    "transpose": lambda x: x.transpose(0, 1),
    "select": lambda x: x.select(1, -2),
    "select of the last": lambda x: x.select(-1, 2),
    "select of the middle": lambda x: x.select(-2, -1),
    "slice": lambda x: x[1:, ::2],
    "slice of the last": lambda x: torch.ops.aten.slice(x, -1, 1, -1),
    "negative slice": lambda x: x[:, -3:-1],
    "unsqueeze": lambda x: x.unsqueeze(1).unsqueeze(-1),
    "squeeze": lambda x: x.unsqueeze(0).squeeze(0),
    "expand": lambda x: x[:, :1].expand(6, 4, 5),
    "diagonal": lambda x: x[:4].diagonal(1, 0, 1),
    "diagonal of the last": lambda x: x.diagonal(-1, -1, -2),
    "unfold": lambda x: x.unfold(2, 3, 1),
    "unfold in steps": lambda x: x.unfold(0, 3, 2),
    "unfold of the middle": lambda x: x.unfold(-2, 2, 2),
    "flip": lambda x: x.flip(0, 2),
    "roll": lambda x: x.roll((2, -1), (0, 2)),
    "repeat": lambda x: x.repeat(2, 1, 3),
    "as_strided": lambda x: x.as_strided((3, 4), (20, 2), 5),
    "as_strided with the same strides": lambda x: x.as_strided((2, 4, 5), (20, 5, 1), 40),
    "as_strided of the same": lambda x: x.as_strided((6, 4, 5), (20, 5, 1)),
    "chunk": lambda x: x.chunk(4, 2)[1],
    "last chunk": lambda x: x.chunk(3, 2)[2],
    "split": lambda x: x.split([1, 4], 2)[1],
    "third of a split": lambda x: x.split([1, 1, 2, 1], 2)[2],
    "unbind": lambda x: x.unbind(0)[3],
    "unbind of the last": lambda x: x.unbind(-1)[1],
    "split of the last": lambda x: x.split(2, -1)[1],
    "detach": lambda x: x.detach(),
}


@pytest.mark.covers("F5g.6", "F5g.7")
@pytest.mark.parametrize("name", VIEWS)
def test_a_view_read_by_code_makes_no_kernel_of_its_own(check, name):
    view = VIEWS[name]
    x = torch.arange(120.0).reshape(6, 4, 5)
    result = check(lambda x: view(x) * 2 + 1, x)
    assert result.kernels == 1 and not result.externs


@pytest.mark.covers("F5g.6")
@pytest.mark.parametrize("name", [n for n in VIEWS if n not in ("flip", "roll", "repeat", "reshape of a transpose")])
def test_a_view_that_is_returned_has_eagers_strides_and_memory(check, name):
    view = VIEWS[name]
    x = torch.arange(120.0).reshape(6, 4, 5)
    result = check(lambda x: (view(x), view(x + 1)), x)
    assert result.kernels == 1
    (first, _) = result.compiled([x])
    assert first.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", VIEWS)
def test_an_aten_call_sees_the_view_with_eagers_strides(check, name):
    view = VIEWS[name]
    x = torch.arange(120.0).reshape(6, 4, 5)
    check(lambda x: torch.logcumsumexp(view(x + 1), 0), x, aten=("logcumsumexp",))


def test_inputs_may_be_strided_and_offset(check):
    base = torch.randn(7, 9, 11)
    check(lambda x, y: (x.t() + 1, (y * 2).sum(0)), base[1:5, 2, ::3], base.transpose(0, 2)[3:, 1:])


def test_sizes_of_zero_and_one_pass_through(check):
    check(lambda x, y: (x + 1, x.sum(0), x.sum(1), y * 2, y.sum((0, 2))), torch.randn(0, 4), torch.randn(1, 5, 1))


def test_views_of_views_compose(check):
    x = torch.randn(2, 8, 12)
    result = check(lambda x: x.view(2, 8, 3, 4).permute(0, 2, 1, 3).reshape(6, 8, 4).transpose(1, 2)[:, 1:3].sum(-1), x)
    assert result.kernels == 1


def test_bits_may_be_reinterpreted_at_the_same_width(check):
    check(lambda x: x.view(torch.int32) + 0, torch.randn(9))


def test_a_size_that_its_symbols_allow_to_be_nothing_but_one_is_broadcast(check):
    x, y = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)
    check(lambda x, y: (x + y.diagonal(-1), x * y.t()[:, 1:3].sum()), x, y, mode="symbolic")


def test_a_size_that_a_guard_made_one_is_broadcast(check):
    x, y = torch.randn(6, 5, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    check(lambda x, y: (x + y[3:] * 2, x - y.view(-1)[19:]), x, y, mode="symbolic")


@pytest.mark.parametrize("size", [(13, 17), (31, 33), (17, 8), (9, 64)])
@pytest.mark.parametrize("dtype", [torch.int64, torch.float32], ids=str)
def test_a_transposed_tensor_is_reshaped_element_by_element(check, size, dtype):
    x = (torch.arange(size[0] * size[1]) % 1000).to(dtype).view(size[1], size[0]).t()
    check(lambda x: (x * 1).reshape(size[1], size[0]) + 0, x)
    check(lambda x: (x * 1).reshape(size[1], 1, size[0]).transpose(0, 2) + 0, x)
