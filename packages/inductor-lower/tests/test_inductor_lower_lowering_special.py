"""Rarer elementwise functions: every type, eager's rounding points, no ATen call."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower import decompositions

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def numbers(*shape, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def generated(check, f, *args, **options):
    result = check(f, *args, table=decompositions(), **options)
    assert not result.externs
    return result


@pytest.mark.covers("F5g.1")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_cross_products_round_their_halves_as_eager(check, dtype):
    a, b = numbers(5, 3, 7, dtype=dtype), numbers(5, 3, 7, dtype=dtype, seed=1)
    result = generated(check, lambda a, b: torch.linalg.cross(a, b, dim=1), a, b)
    assert result.kernels == 1
    generated(check, lambda a, b: torch.cross(a, b, dim=-1), a.transpose(1, 2), b[:1].transpose(1, 2))


@pytest.mark.covers("F5g.2")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mode", ["trunc", "floor"])
def test_rounded_division_of_halves_rounds_where_eager_does(check, dtype, mode):
    edges = torch.tensor([0.0, -0.0, 1.0, -1.0, 3.0, -7.0, 1e-3, float("inf"), float("-inf"), float("nan")])
    a, b = torch.cartesian_prod(edges, edges).to(dtype).unbind(1)
    a, b = torch.cat([a, numbers(200, dtype=dtype, scale=90.0)]), torch.cat([b, numbers(200, dtype=dtype, seed=1)])
    generated(check, lambda a, b: torch.div(a, b, rounding_mode=mode), a, b)


@pytest.mark.covers("F5g.3")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_neighbour_of_a_half_is_eagers(check, dtype):
    tiny, largest = torch.finfo(dtype).smallest_normal, torch.finfo(dtype).max
    edges = torch.tensor([0.0, -0.0, tiny, -tiny, 1.0, -1.0, largest, float("inf"), float("-inf"), float("nan")])
    a, b = torch.cartesian_prod(edges, edges).to(dtype).unbind(1)
    a, b = torch.cat([a, numbers(64, dtype=dtype)]), torch.cat([b, numbers(64, dtype=dtype, seed=1)])
    generated(check, torch.nextafter, a.contiguous(), b.contiguous())


@pytest.mark.covers("F5g.13")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_halves_are_added_up_at_computed_places_as_by_eager(check, dtype):
    x, source = numbers(6, 5, dtype=dtype), numbers(6, 5, dtype=dtype, seed=1)
    places = torch.randint(0, 6, (6, 5), generator=torch.Generator().manual_seed(2))
    generated(check, lambda x, i, s: x.scatter_add(0, i, s), x, places, source)
    generated(check, lambda x, i, s: x.index_add(0, i, s), x, places[:, 0], source)
    generated(check, lambda x, i, s: x.index_add(0, i, s), x[0], places[:5, 0] % 5, source[0])
    for how in ("sum", "prod", "mean", "amin", "amax"):
        generated(check, lambda x, i, s, how=how: x.scatter_reduce(0, i, s, how), x, places, source)
        generated(
            check, lambda x, i, s, how=how: x.scatter_reduce(1, i, s, how, include_self=False), x, places % 5, source
        )


@pytest.mark.covers("F5g.14")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("how", ["nearest", "bilinear", "bicubic"])
def test_gradients_of_upsampled_halves_are_added_up_in_single_precision(check, dtype, how):
    def f(x, g):
        x = x.detach().requires_grad_()
        y = torch.nn.functional.interpolate(x, scale_factor=2, mode=how)
        return torch.autograd.grad(y, x, g)[0]

    generated(check, f, numbers(2, 3, 5, 4, dtype=dtype), numbers(2, 3, 10, 8, dtype=dtype, seed=1))


@pytest.mark.covers("F5g.8")
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, float("inf"), float("-inf")])
def test_norms_of_every_order_equal_eager(check, dtype, order):
    x = numbers(4, 9, dtype=dtype)
    generated(check, lambda x: torch.linalg.vector_norm(x, order, dim=1), x)
    generated(check, lambda x: torch.linalg.vector_norm(x, order, dim=(0, 1), keepdim=True), x.t())
