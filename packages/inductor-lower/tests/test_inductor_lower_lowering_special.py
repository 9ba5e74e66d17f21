"""Rarer elementwise functions: every type, eager's rounding points, no ATen call."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions

aten = torch.ops.aten

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def numbers(*shape, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def generated(check, f, *args, **options):
    result = check(f, *args, table=decompositions(), **options)
    assert not result.externs
    return result


@pytest.mark.parametrize("scale", [1.0, 1e19, 3e38], ids=str)
def test_the_first_product_of_a_cross_product_is_not_rounded(scale):
    generator = torch.Generator().manual_seed(0)
    a, b = ((torch.rand(300, 3, generator=generator) * 2 - 1) * scale for _ in range(2))
    graph = make_fx(torch.linalg.cross, decompositions(), tracing_mode="fake")(a, b)
    (result,) = compile_graph(graph, [a, b])([a, b])
    after, last = ([1, 2, 0], [2, 0, 1])
    whole = a[:, after].double() * b[:, last].double() - (a[:, last] * b[:, after]).double()
    torch.testing.assert_close(result, whole.float(), rtol=2e-7, atol=0, equal_nan=True)


def test_a_cross_product_of_two_types_is_refused_as_in_eager_mode():
    a, b = torch.rand(4, 3), torch.arange(12, dtype=torch.uint8).view(4, 3)
    graph = make_fx(torch.linalg.cross, decompositions(), tracing_mode="fake")(a, b)
    with pytest.raises(RuntimeError, match="expected scalar type"):
        compile_graph(graph, [a, b])([a, b])


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


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int64], ids=str)
def test_products_with_a_logarithm_equal_eager(check, dtype):
    edges = torch.tensor([0.0, 1.0, 2.0, -1.0, 3.0] + [float("nan"), float("inf"), 0.3] * dtype.is_floating_point)
    a, b = torch.cartesian_prod(edges, edges).to(dtype).unbind(1)
    check(lambda a, b: (torch.xlogy(a, b), torch.xlogy(2.1, b), torch.xlogy(a, 0.3)), a, b)


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

    layout = torch.contiguous_format if how == "nearest" else torch.channels_last
    values = numbers(2, 3, 5, 4, dtype=dtype), numbers(2, 3, 10, 8, dtype=dtype, seed=1)
    generated(check, f, *(value.contiguous(memory_format=layout) for value in values))


@pytest.mark.covers("F5g.8")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("order", [0, 0.5, 1, 2, 3, -1, float("inf"), float("-inf")])
def test_norms_of_every_order_equal_eager(check, dtype, order):
    x = numbers(4, 9, dtype=dtype)
    generated(check, lambda x: torch.linalg.vector_norm(x, order, dim=1), x)
    generated(check, lambda x: torch.linalg.vector_norm(x, order, dim=(0, 1), keepdim=True), x.t())


SPECIAL = {
    "i0": torch.special.i0,
    "i0e": torch.special.i0e,
    "i1": torch.special.i1,
    "i1e": torch.special.i1e,
    "modified_i0": torch.special.modified_bessel_i0,
    "modified_i1": torch.special.modified_bessel_i1,
    "modified_k0": torch.special.modified_bessel_k0,
    "modified_k1": torch.special.modified_bessel_k1,
    "scaled_k0": torch.special.scaled_modified_bessel_k0,
    "scaled_k1": torch.special.scaled_modified_bessel_k1,
    "erfinv": torch.erfinv,
    "erfcx": torch.special.erfcx,
    "ndtri": torch.special.ndtri,
    "digamma": torch.digamma,
    "polygamma": lambda x: torch.polygamma(0, x),
    "angle": torch.angle,
}
POLES = [0.0, -0.0, 1.0, 0.5, 2.0, 8.0, 1e-30, 1e30, 50.0, 800.0, float("inf"), float("-inf"), float("nan"), 1 - 1e-9]


@pytest.mark.parametrize("name", ["modified_i1", "scaled_k0", "ndtri"])
def test_a_function_that_eager_mode_has_no_halves_of_is_left_to_it(name):
    x = torch.tensor([0.25, 0.5], dtype=torch.bfloat16)
    graph = make_fx(lambda x: SPECIAL[name](x), tracing_mode="fake")(x)
    with pytest.raises(NotImplementedError, match="not implemented for 'BFloat16'"):
        compile_graph(graph)([x])


def test_every_term_of_the_series_of_digamma_counts(check):
    x = torch.tensor([0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 5.5, 20.0], dtype=torch.float64)
    generated(check, torch.digamma, torch.cat([x, 1.5 - x]), tolerance=2e-14)


@pytest.mark.covers("F5g.1")
@pytest.mark.parametrize("name", SPECIAL)
def test_functions_without_a_library_form_equal_eager_in_double(check, name):
    wide = numbers(300, dtype=torch.float64)
    x = torch.cat([torch.tensor(POLES, dtype=torch.float64), wide, wide.sigmoid(), wide.exp(), wide * 8 + 0.01])
    result = generated(check, SPECIAL[name], x, tolerance=1e-12)
    assert result.kernels == 1
    # Eager's own float32 loses some digits; its float64 of the same numbers does not.
    single = x.float()
    (found,) = check(SPECIAL[name], single, table=decompositions(), tolerance=1e-3).compiled([single.clone()])
    torch.testing.assert_close(found, SPECIAL[name](single.double()).float(), rtol=3e-7, atol=0, equal_nan=True)
    generated(check, SPECIAL[name], torch.arange(1, 9))


def test_a_huge_gradient_of_elu_at_minus_infinity_is_nan_as_in_eager_mode(check):
    grad, x = torch.tensor([3e37, 1.0, 3e37]), torch.tensor([float("-inf"), float("-inf"), 1.0])
    found = []
    for args in ((1e12, 0.1, 0.5, False), (1.0, 1.0, 1.0, False), (1e12, 0.1, 0.5, True)):
        check(lambda g, x, args=args: aten.elu_backward(g, *args, x), grad, x)
        found.append(aten.elu_backward(grad, *args, x)[0].isnan())
    assert found == [True, False, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_bounds_of_a_logits_gradient_are_rounded_to_its_type(check, dtype):
    bounds = torch.tensor([0.1, 1e-3], dtype=dtype)
    x = torch.cat([bounds, 1 - bounds, bounds * 1.01, bounds * 0.99, torch.tensor([0.5, 1.0, 2.0, -0.05])] * 4)
    x = x.to(dtype)

    def gradients(grad, x):
        return tuple(aten.logit_backward(grad, x, eps) for eps in (0.1, 1e-3, -0.1, None))

    check(gradients, torch.ones_like(x), x, table=decompositions())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("op", [aten.hardshrink_backward, aten.softshrink_backward], ids=str)
def test_the_bound_of_a_shrunk_halfs_gradient_is_rounded_to_its_type(check, op, dtype):
    x = torch.tensor([0.1, -0.1, 0.3, -0.3, 0.7, 0.0, 1.0, float("nan")] * 8, dtype=dtype)
    check(lambda g, x: (op(g, x, 0.1), op(g, x, 0.3)), torch.ones_like(x), x)


def test_operands_of_another_type_than_halves_are_rounded_first(check):
    x, whole = numbers(40, dtype=torch.float16), torch.tensor([100000, 257, 2049, 70001, 3] * 8, dtype=torch.int32)
    wide = torch.tensor(257.3)

    def logarithms(x, whole, wide):
        return torch.xlogy(x, whole), torch.xlogy(wide, x.abs()), torch.special.xlog1py(x, whole)

    def products(x, whole, wide):
        return torch.addcmul(x, whole, x), torch.addcmul(wide, x, x, value=2), torch.addcdiv(x, whole, x)

    check(logarithms, x, whole, wide)
    check(products, x, whole, wide)
