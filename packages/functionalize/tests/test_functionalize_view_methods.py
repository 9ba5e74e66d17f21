"""The plainest operation for a view, and how a view is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from aotkit_functionalize import Unsupported
from aotkit_functionalize.aliases import view_spec
from aotkit_functionalize.symbols import tensor_meta
from aotkit_functionalize.view_methods import view_method

CASES: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor], str, tuple[int, ...]]] = {
    "flat": (lambda: torch.rand(3, 4), lambda x: x.view(-1), "view", ()),
    "itself": (lambda: torch.rand(3, 4), lambda x: x.view(3, 4), "view", ()),
    "sizes of one": (lambda: torch.rand(3, 4), lambda x: x.unsqueeze(1), "view", ()),
    "scalar": (lambda: torch.rand(()), lambda x: x.view(1), "view", ()),
    "empty": (lambda: torch.rand(0, 4), lambda x: x.view(4, 0), "as_strided", ()),
    "transposed": (lambda: torch.rand(3, 4), lambda x: x.t(), "permute", (1, 0)),
    "permuted": (lambda: torch.rand(2, 3, 4), lambda x: x.permute(2, 0, 1), "permute", (2, 0, 1)),
    "back": (lambda: torch.rand(2, 3, 4).permute(1, 2, 0), lambda x: x.permute(2, 0, 1), "permute", (2, 0, 1)),
    "expanded": (lambda: torch.rand(3, 1), lambda x: x.expand(3, 5), "expand", ()),
    "expanded in front": (lambda: torch.rand(3), lambda x: x.expand(2, 3), "expand", ()),
    "expanded of gaps": (lambda: torch.rand(3, 1, 8)[..., ::2], lambda x: x.expand(3, 2, 4), "expand", ()),
    "part": (lambda: torch.rand(3, 4), lambda x: x[:2], "as_strided", ()),
    "part at an offset": (lambda: torch.rand(3, 4), lambda x: x[1:], "as_strided", ()),
    "gaps": (lambda: torch.rand(3, 4), lambda x: x[:, ::2], "as_strided", ()),
    "diagonal": (lambda: torch.rand(3, 3), lambda x: x.diagonal(), "as_strided", ()),
    "equal strides": (lambda: torch.rand(1, 1, 4)[:, :, :1], lambda x: x.transpose(0, 2), "as_strided", ()),
    "equal strides, other sizes": (
        lambda: torch.rand(6).as_strided((2, 3), (1, 1)),
        lambda x: x.transpose(0, 1),
        "as_strided",
        (),
    ),
    "fewer dimensions": (lambda: torch.rand(3, 1, 4).transpose(0, 2), lambda x: x[:, 0], "as_strided", ()),
    "repeats nothing": (lambda: torch.rand(4, 3).t(), lambda x: x.expand(3, 4), "permute", (0, 1)),
    "another type": (lambda: torch.rand(4), lambda x: x.view(torch.int32), "as_strided", ()),
}


@pytest.mark.parametrize("name", CASES)
def test_the_plainest_operation_gives_the_view(name: str) -> None:
    make, take, method, order = CASES[name]
    base = make()
    view = take(base)
    spec = view_spec(view, base, requires_grad=False)
    assert view_method(tensor_meta(base), spec) == (method, order)
    if view.dtype != base.dtype:
        return
    if method == "as_strided":
        taken = base.as_strided(spec.sizes, spec.strides, base.storage_offset() + spec.offset_delta)
    elif method == "permute":
        taken = base.permute(order)
    else:
        taken = getattr(base, method)(spec.sizes)
    assert taken.data_ptr() == view.data_ptr() and torch.equal(taken, view)


def test_symbols_and_strides_that_are_no_views_stay_with_as_strided() -> None:
    base = torch.rand(3, 4)
    meta, spec = tensor_meta(base), view_spec(base.t(), base, requires_grad=False)
    assert view_method(replace(meta, sizes=("s0", 4)), spec) == ("as_strided", ())
    assert view_method(meta, replace(spec, sizes=("s0", 3))) == ("as_strided", ())
    assert view_method(meta, replace(spec, strides=("s0", 4))) == ("as_strided", ())
    assert view_method(meta, replace(spec, offset_delta="s0")) == ("as_strided", ())
    assert view_method(meta, replace(spec, dtype="int32")) == ("as_strided", ())
    assert view_method(meta, replace(spec, sizes=(4, 4), strides=(1, 1))) == ("as_strided", ())


def test_a_view_is_measured_from_where_its_base_begins() -> None:
    storage = torch.rand(40)
    base = storage[8:32].view(4, 6)
    spec = view_spec(base[1:, 2:], base, requires_grad=True, under_no_grad=True, detached=True, own_version=True)
    assert (spec.dtype, spec.sizes, spec.strides, spec.offset_delta) == ("float32", (3, 4), (6, 1), 8)
    assert spec.requires_grad and spec.under_no_grad and spec.detached and spec.own_version
    assert (spec.conj, spec.neg) == (False, False)
    plain = view_spec(base, base, requires_grad=False)
    assert not (plain.requires_grad or plain.under_no_grad or plain.detached or plain.own_version)


def test_a_view_of_other_elements_is_measured_in_its_own() -> None:
    base = torch.rand(12)[4:]
    assert view_spec(base.view(torch.int32), base, requires_grad=False).offset_delta == 0
    assert view_spec(base.view(torch.float64)[1:], base, requires_grad=False).offset_delta == 1
    assert view_spec(base.view(torch.int16)[3:], base, requires_grad=False).offset_delta == 3
    odd = torch.rand(12)[1:]
    with pytest.raises(Unsupported, match=r"viewed as torch\.float64"):
        view_spec(torch.rand(6, dtype=torch.float64), odd, requires_grad=False)


def test_bits_of_a_view_are_its_own_or_those_given() -> None:
    z = torch.rand(3, dtype=torch.complex64)
    spec = view_spec(z.conj(), z, requires_grad=False)
    assert (spec.conj, spec.neg) == (True, False)
    spec = view_spec(torch._neg_view(z), z, requires_grad=False)
    assert (spec.conj, spec.neg) == (False, True)
    spec = view_spec(z, z, requires_grad=False, bits=(True, True))
    assert (spec.conj, spec.neg) == (True, True)
    meta = tensor_meta(z.conj())
    assert meta.conj and not meta.neg and "conj=True" in repr(meta) and "neg" not in repr(meta)
    assert tensor_meta(z, bits=(False, True)).neg and tensor_meta(z, requires_grad=True).requires_grad


def test_a_view_whose_dimension_of_one_has_another_stride_is_not_expanded() -> None:
    base = torch.zeros(1, 3)
    view = base.as_strided((1, 3), (0, 1))
    found = view_method(tensor_meta(base), view_spec(view, base, requires_grad=False))
    assert found == ("as_strided", ())
