"""Departures from eager that are meant: each with its reason, which docs/limits.md gives users too."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .compare import Difference, Wrong
from .execute import observe
from .program import Call, Sample, values_of

__all__ = ["KNOWN", "Departure", "excused"]

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True, slots=True)
class Departure:
    """``ops`` and ``entry`` are patterns: of an operator that the sample must call, in place or not, and of the way
    to compile.

    ``what`` is the pattern of a difference other than in values. ``elements`` tells of wrong elements which it
    explains, and must explain all of them; it is also given the tensors and numbers of the operator's call, as doubles.
    """

    ops: str
    what: str
    reason: str
    entry: str = ""
    elements: Callable[[Wrong, Tensors], torch.Tensor | bool] | None = None


# -- of wrong elements -------------------------------------------------------------------------------------------


def _largest(operands: Tensors) -> float:
    """The largest magnitude that is finite."""
    return max((float(t.abs().nan_to_num(0.0, 0.0, 0.0).max()) for t in operands if t.numel()), default=0.0)


def _most(dtype: torch.dtype) -> float:
    """The largest number of the type that elements are computed in."""
    return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).max


def _squares_overflow(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Eager's result is nan, or ours is what an infinite variance, or a deviation of 0, makes of numbers: the bias."""
    biases = torch.cat([t.flatten().double() for t in operands[1:]] or [torch.zeros(0, dtype=torch.float64)])
    ends = ~wrong.got.isfinite() | (wrong.got == 0) | torch.isin(wrong.got.double(), biases)
    return (wrong.want.isnan() | ends) & (2 * _largest(operands[:2]) > _most(wrong.want.dtype) ** 0.5)


def _nan_given(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Nan, or 0 where eager hands the gradient on, at as many places as a tensor has nan."""
    most = max((t.numel() for t in operands), default=0)  # of which the others are broadcast to
    given = any(t.numel() and int(t.isnan().sum()) * (most // t.numel()) >= wrong.want.numel() for t in operands)
    return (wrong.got.isnan() & ~wrong.want.isnan() & any(bool(t.isnan().any()) for t in operands)) | (
        (wrong.got == 0) & given
    )


def _huge_quotient(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    divisor = operands[-1].abs()
    least = float(divisor[divisor > 0].min()) if bool((divisor > 0).any()) else 1.0
    huge = max(1.0, _largest(operands)) / min(1.0, least) > 2.0**16 or any(bool(t.isinf().any()) for t in operands)
    return wrong.want.isnan() & wrong.got.isfinite() & huge


def _exponential_overflows(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """A quotient of two infinite exponentials, where one minus its inverse has a number."""
    product = operands[0].double() * operands[1].double()
    overflows = product.abs().nan_to_num(0.0).max() > (700 if wrong.want.dtype is torch.float64 else 80)
    return wrong.want.isnan() & wrong.got.isfinite() & overflows


def _equal_numbers(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Rounding errors of one sign: a partial sum takes up to 128 numbers, in eager mode 16. Each number is there at
    least as often."""
    if wrong.true is None or len(operands) != 1 or not wrong.want.dtype.is_floating_point:
        return False
    numbers, counts = operands[0].unique(return_counts=True)
    if len(numbers) > 1 and int(counts.min()) < 128:
        return False
    total = wrong.true.abs() if len(numbers) == 1 else operands[0].abs().sum()
    return (wrong.got.double() - wrong.true).abs() <= 128 * torch.finfo(wrong.want.dtype).eps / 2 * total


def _equal_gradients(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """The same of gradients that are summed, and multiplied by the exponential of the result."""
    grad, result = operands[:2]
    least_often = int(grad.unique(return_counts=True)[1].min()) if grad.numel() else 0
    if wrong.true is None or not wrong.want.dtype.is_floating_point or least_often < 128:
        return False
    bound = 128 * torch.finfo(wrong.want.dtype).eps / 2 * grad.abs().sum() * result.exp().max()
    return (wrong.got.double() - wrong.true).abs() <= bound


def _no_score(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Of queries or keys that are not finite: scores are infinities of both signs, or nan, also in float64."""
    return wrong.want.is_floating_point() and any(not bool(t.isfinite().all()) for t in operands[:2])


def _query_overlaps_itself(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Rows and columns of the query are equally far apart."""
    steps = [step for size, step in zip(operands[0].shape, operands[0].stride(), strict=True) if size > 1]
    return len(set(steps)) < len(steps)


def _bias_alone(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Doubles off by what a product of the numbers and the largest reciprocal deviation is off, which is subtracted."""
    if wrong.want.dtype is not torch.float64 or wrong.true is None:
        return False
    epsilon = float(operands[-1].abs().min())
    bound = 4 * 2.0**-52 * _largest(operands[:1]) / max(epsilon, 1e-30) ** 0.5
    return (wrong.got - wrong.true).abs() <= bound


def _scales_are_spread(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """The weight or the bias has elements that do not lie side by side."""
    return any(t.dim() == 1 and not t.is_contiguous() for t in operands[1:])


def _sign_of_nan(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    few = any(int(t.isnan().sum()) >= wrong.want.numel() for t in operands)
    return few & ((wrong.got == -wrong.want) if wrong.want.dtype.is_floating_point else torch.tensor(True))


def _bits_of_nan(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Integers that differ in the bit that is the sign of a nan, as many of them."""
    if wrong.want.dtype.is_floating_point or wrong.want.dtype.is_complex or wrong.want.dtype is torch.bool:
        return False
    few = any(int(t.isnan().sum()) >= wrong.want.numel() for t in operands)
    return few & ((wrong.want ^ wrong.got) == (torch.ones_like(wrong.want) << (8 * wrong.want.element_size() - 1)))


def _beyond_710(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Finite beyond 710, up to the logarithm of twice the largest number."""
    if not wrong.want.dtype.is_floating_point:
        return False
    finite = (wrong.got.abs() >= math.cosh(710.0) * (1 - 1e-12)) & wrong.got.isfinite()
    return finite & wrong.want.isinf() & any(bool((t.abs() >= 710.0).any()) for t in operands)


def _neither_is_finite(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Both are infinite or nan."""
    return ~wrong.want.isfinite() & ~wrong.got.isfinite()


def _infinite_mean(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    return wrong.want.isnan() & wrong.got.isinf()


def _order_of_a_sum(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """A sum that overflows on the way, in one order or in every one; float64 has a number."""
    total = sum(float(t.abs().nan_to_num(0.0, 0.0, 0.0).sum()) for t in operands)
    overflows = total > _most(wrong.want.dtype)
    if wrong.true is None or not overflows:
        return False
    return ~wrong.got.isfinite() & (wrong.true.isfinite() | ~wrong.want.isfinite())


def _order_of_a_product(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """A product that overflows, or becomes 0 or denormal, on the way."""
    sizes = operands[0].abs().log2() if operands else torch.zeros(0)
    sizes = sizes[sizes.isfinite()]
    info = torch.finfo(torch.float64 if wrong.want.dtype is torch.float64 else torch.float32)
    high, low = float(sizes.clamp(min=0).sum()), float(sizes.clamp(max=0).sum())
    beyond = high > math.log2(info.max) or low < math.log2(info.tiny)
    beyond |= bool(operands) and not bool(operands[0].isfinite().all())
    least = torch.minimum(*((t if t.is_complex() else t.double()).abs() for t in (wrong.want, wrong.got)))
    return (~(wrong.want.isfinite() & wrong.got.isfinite()) | (least < info.tiny)) & beyond


def _derivative_of_a_product(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """By one of several zeros, or by a factor that is not finite, where eager divides by it; beside such factors."""
    x = operands[0]
    zeros = wrong.got.isnan() & (wrong.want == 0) & bool((x == 0).sum() > 1)
    return (zeros | (wrong.want.isnan() & wrong.got.isfinite())) & bool(not x.isfinite().all())


def _as_exact_as_the_mean(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Multiples of the distance from the mean, which is off by some units of the numbers themselves."""
    if wrong.true is None or wrong.want.dtype not in (torch.float32, torch.float64) or not operands[0].numel():
        return False
    x = operands[0]
    off = (x - x.mean()).abs()
    near = float(off[off > 0].min()) if bool((off > 0).any()) else 1.0
    share = 8 * torch.finfo(wrong.want.dtype).eps * _largest([x]) / near
    return (wrong.got.double() - wrong.true).abs() <= share * wrong.true.abs()


def _product_on_the_way(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Of so many factors that those before or after one have a product beyond the type's range, or near its least."""
    if not wrong.want.dtype.is_floating_point:
        return False
    sizes = operands[0].abs().log2()
    sizes, info = sizes[sizes.isfinite()], torch.finfo(wrong.want.dtype)
    return bool(sizes.clamp(min=0).sum() > math.log2(info.max)) or bool(sizes.clamp(max=0).sum() < math.log2(info.tiny))


def _cancelled(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Off by no more than a unit or two of 1, times what that is multiplied by."""
    if wrong.true is None or wrong.want.dtype not in (torch.float32, torch.float64):
        return False
    *grad, x = operands[:2]
    bound = 2 * torch.finfo(wrong.want.dtype).eps * max(1.0, min(_largest([x]), 6.0)) * max(1.0, _largest(grad))
    return (wrong.got.double() - wrong.true).abs() <= bound


def _overflows(wrong: Wrong, operands: Tensors) -> bool:
    """Whether the type that results have is too small for what the operands add up to."""
    if not (wrong.want.is_floating_point() or wrong.want.is_complex()):
        return False
    total = sum(float(t.abs().nan_to_num(0.0, 0.0, 0.0).sum()) for t in operands)
    return total > torch.finfo(wrong.want.dtype).max or any(bool(t.isinf().any()) for t in operands)


def _order_of_gradients(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Infinite or nan, where eager is not finite either or float64 has a number."""
    if wrong.true is None or not _overflows(wrong, operands):
        return False
    return ~wrong.got.isfinite() & (wrong.true.isfinite() | ~wrong.want.isfinite())


def _order_where_broadcast(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """The gradient of what was broadcast is a sum."""
    broadcast = any(t.numel() > wrong.want.numel() for t in operands)
    return broadcast and _order_of_gradients(wrong, operands)


def _order_in_a_norm(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Gradients of norms multiply, too: statistics, weights and numbers; eager has none where that overflows."""
    if not wrong.want.dtype.is_floating_point:
        return False
    products = _largest(operands) * _largest(operands) > _most(wrong.want.dtype)
    return _order_of_gradients(wrong, operands) | (~wrong.want.isfinite() & products)


def _order_in_a_matrix_product(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Neither is finite, and sums of products (of complex numbers every one, where a part is infinite) overflow."""
    neither = ~wrong.got.isfinite() & ~wrong.want.isfinite()
    if wrong.want.is_complex():
        return neither & _overflows(wrong, operands)
    first, second, *_ = *sorted((_largest([t]) for t in operands if t.dim()), reverse=True), 0.0, 0.0
    terms = max((n for t in operands for n in t.shape), default=1)
    return neither & wrong.want.is_floating_point() & (first * max(second, 1.0) * terms > _most(wrong.want.dtype))


def _upsampled(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Of numbers that overflow when they are added up: in another order; or off by no more than the weight of the
    largest of them is, which is the difference of two places in the image."""
    if wrong.true is None or not wrong.want.is_floating_point():
        return False
    eps = torch.finfo(torch.float64 if wrong.want.dtype is torch.float64 else torch.float32).eps
    places = 4 * max(4, *(size for t in operands[:1] for size in t.shape))  # four neighbours in each direction
    near = (wrong.got.double() - wrong.true).abs() <= eps * places * _largest(operands[:1])
    return near | _order_of_gradients(wrong, operands)


def _running_variance(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Doubles, of which eager's mean is off by half a unit per element, and its variance by a part of one. A variance
    is taken into the running one, which may cancel most of it."""
    if wrong.want.dtype is not torch.float64:
        return False
    count, mean = operands[0].numel(), operands[0].numel() * 2.0**-53 * _largest(operands[:1])
    running = [t.abs() for t in operands[1:] if t.dim() == 1 and t.shape == wrong.want.shape][-1:]

    def near(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
        size = torch.stack([want.abs(), *running]).amax(0)
        return (got - want).abs() <= count * 2.0**-55 * size + mean * mean

    return near(wrong.got, wrong.want) | near(wrong.got**2, wrong.want**2)


def _order_of_doubles(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Doubles that are added up one by one in eager mode, in parts here: nothing more exact tells which is right."""
    if wrong.want.dtype is not torch.float64:
        return False
    return (wrong.got - wrong.want).abs() <= operands[0].numel() * 2.0**-52 * wrong.want.abs()


def _rounded_exponent(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """``x ** y`` moves by the share ``log(x) * (y - rounded y)``, and more than that where ``y`` rounds to 0."""
    if not wrong.want.dtype.is_floating_point:
        return False
    exponent = float(operands[-1])
    near = float(torch.tensor(exponent, dtype=wrong.want.dtype))
    nothing = (wrong.got == 1) & (exponent != 0 and near == 0)
    for power in (exponent, exponent - 1):  # of the derivative; whole when rounded: below 0 there is a power, then
        whole = float(torch.tensor(power, dtype=wrong.want.dtype))
        nothing |= ~wrong.want.isfinite() & (power != whole and whole == round(whole))
    if wrong.true is None:
        return nothing
    sizes = operands[0].abs().log()
    share = _largest([sizes]) * abs(exponent - near) + 4 * torch.finfo(wrong.want.dtype).eps
    return nothing | ((wrong.got.double() - wrong.true).abs() <= share * wrong.true.abs())


def _logit_in_the_tail(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Infinities of either sign, and 0 for a nan that is given, in a rest that is no vector."""
    given = sum(int(t.isnan().sum()) for t in operands) >= int(wrong.want.isnan().sum())
    rest = len(wrong.want) < 64 and given
    return (wrong.want.isinf() & wrong.got.isinf()) | (wrong.want.isnan() & (wrong.got == 0) & rest)


def _infinity_given(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    return _infinite_mean(wrong, operands) & any(bool(t.isinf().any()) for t in operands)


def _least_denormal(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """A logarithm of 1 and the least number there is: 0, times a number; times infinity nan."""
    if not wrong.want.dtype.is_floating_point:
        return False
    tiny = 1.5e-45 if wrong.want.dtype is torch.float32 else 5e-324
    infinite = any(bool(t.isinf().any()) for t in operands) and any(bool((t.abs() == tiny).any()) for t in operands)
    largest = _largest(operands[:1])
    near = (wrong.got - wrong.want).abs() <= 2 * tiny * max(1.0, min(largest, 2.0**10))
    near |= (wrong.got == 0) & (wrong.want.abs() <= tiny * largest)
    return near | (wrong.got.isnan() & wrong.want.isinf() & infinite)


def _zero_of_digamma(wrong: Wrong, operands: Tensors) -> torch.Tensor | bool:
    """Doubles that are right to eleven digits of 1, or of what they are."""
    if wrong.want.dtype is not torch.float64:
        return False
    return (wrong.got - wrong.want).abs() <= 1e-12 * wrong.want.abs().clamp(min=1.0)


def _far_places(wrong: Wrong, operands: Tensors) -> bool:
    """Of places so far from the image that no number near them is a fraction of a pixel."""
    if not wrong.want.dtype.is_floating_point:
        return False
    eps = torch.finfo(torch.float64 if wrong.want.dtype is torch.float64 else torch.float32).eps
    far = int((operands[1].abs() * eps > 0.5).sum()) * operands[0].shape[1]
    return far >= wrong.want.numel()


KNOWN = (
    Departure(
        r"aten\.(elu|celu|selu|hardswish|hardshrink|softshrink|hardtanh|relu6)",
        "",
        "gradients at nan are those of eager's vectors, not of its last few elements",
        elements=_nan_given,
    ),
    Departure(
        r"aten\.(fmod|remainder)",
        "",
        "remainders are exact where eager's vectors give nan for huge quotients",
        elements=_huge_quotient,
    ),
    Departure(
        r"aten\.(native_)?(layer|group)_norm\.|aten\._?(native_)?batch_norm",
        "",
        "squares overflow, and eager subtracts one infinite sum from another",
        elements=_squares_overflow,
    ),
    Departure(
        r"aten\.((nan)?(sum|mean)|trace|_?(adaptive_)?avg_pool\dd|nll_loss(2d|_nd)?(_forward)?)\.",
        "",
        "whether a sum that overflows on the way is infinite or nan hangs on the order in which it is added up",
        elements=_order_of_a_sum,
    ),
    Departure(
        r"aten\.(nan)?(sum|mean)\.",
        "",
        "of many equal numbers all rounding errors have one sign, and eager's partial sums are shorter",
        elements=_equal_numbers,
    ),
    Departure(
        r"aten\._log_softmax_backward_data\.",
        "",
        "of many equal numbers all rounding errors have one sign, and eager's partial sums are shorter",
        elements=_equal_gradients,
    ),
    Departure(
        r"aten\.(special_)?logit(_backward)?\.",
        "",
        "at -0.0 and nan the gradient is that of eager's vectors, not of its last few elements",
        elements=_logit_in_the_tail,
    ),
    Departure(
        r"aten\.soft_margin_loss",
        "",
        "the gradient of a large margin is a number, where eager divides one infinite exponential by another",
        elements=_exponential_overflows,
    ),
    Departure(
        r"aten\.((reflection|replication)_pad\dd|_(log_)?softmax"
        r"|(adaptive_)?(max|avg)_pool\dd(_with_indices)?)_backward(_data)?\.",
        "",
        "whether a gradient that overflows on the way is infinite or nan hangs on the order in which it is added up",
        elements=_order_of_gradients,
    ),
    Departure(
        r"aten\.\w+\.(Tensor|Tensor_Tensor|default)$",
        "",
        "whether a gradient that overflows on the way is infinite or nan hangs on the order in which it is added up",
        entry="training",
        elements=_order_where_broadcast,
    ),
    Departure(
        r"aten\.native_(layer|group)_norm_backward\.",
        "",
        "whether a gradient that overflows on the way is infinite or nan hangs on the order in which it is added up",
        elements=_order_in_a_norm,
    ),
    Departure(
        r"aten\.(native_)?(layer|group)_norm\.",
        "",
        "whether a gradient that overflows on the way is infinite or nan hangs on the order in which it is added up",
        entry="training",
        elements=_order_of_gradients,
    ),
    Departure(
        r"aten\.(native_)?(layer|group)_norm\.",
        "",
        "an infinite gradient of a norm leaves infinities and nan: in eager mode by the sign of each number, here by"
        " the sign of its distance from the mean",
        entry="training",
        elements=_neither_is_finite,
    ),
    Departure(
        r"aten\._?upsample_",
        "",
        "weights are as exact as places in the image; where neighbours overflow on the way, the order decides",
        elements=_upsampled,
    ),
    Departure(
        r"aten\.(bmm|mm|addmm|baddbmm|addbmm|linear|matmul|mv|addmv|dot|vdot|ger|addr)\.",
        "",
        "libraries multiply and add in several orders, which differ where a sum overflows on the way",
        elements=_order_in_a_matrix_product,
    ),
    Departure(
        r"aten\.((std|var)(_mean)?|_?(native_)?(batch|layer|group)_norm\w*)\.",
        "",
        "eager's running variance of doubles rounds with every element; two passes are more exact",
        elements=_running_variance,
    ),
    Departure(
        r"aten\.(norm|linalg_vector_norm|dist|_euclidean_dist|cdist)\.",
        "",
        "eager adds powers of doubles one by one; sums of parts are more exact",
        elements=_order_of_doubles,
    ),
    Departure(
        r"aten\.scaled_dot_product_attention\.",
        "",
        "a score that is no number: eager's kernel for float16 and bfloat16 gives what was in memory",
        elements=_no_score,
    ),
    Departure(
        r"aten\.scaled_dot_product_attention\.",
        "",
        "the result is laid out as the query, and eager's kernel writes rows without a stride: in a query that overlaps"
        " itself columns may come first, and its numbers go to other places, some of them are never written",
        elements=_query_overlaps_itself,
    ),
    Departure(
        r"aten\.native_group_norm\.default",
        "",
        "called by itself, eager's kernel reads weight and bias as if their elements lay side by side, also beyond"
        " their end (group_norm copies them first)",
        elements=_scales_are_spread,
    ),
    Departure(
        r"aten\.native_(layer|group)_norm\.",
        "",
        "eager's doubles are a difference of two products, which is not 0 where a number is the mean",
        elements=_bias_alone,
    ),
    Departure(
        r"aten\.(hardsigmoid|hardswish|hardtanh|elu|leaky_relu|threshold|softplus|hardshrink|softshrink)_backward\.",
        r"strides: \(1, \d+\) in eager, \(\d+, 1\) compiled",
        "of sizes that are symbols torch's fake kernels do not ask a second operand where the first overlaps itself",
        entry="dynamic",
    ),
    Departure(
        r"aten\.(special_)?xlog1py\.",
        "",
        "log1p of the least number there is is 0, in eager mode not where a scalar is one",
        elements=_least_denormal,
    ),
    Departure(
        r"aten\.pow\.Tensor_Scalar",
        "",
        "an exponent is rounded to the type of the tensor, in eager mode not for the last few elements",
        elements=_rounded_exponent,
    ),
    Departure(
        r"aten\.(native_)?(layer|group)_norm\.|aten\._?(native_)?batch_norm",
        "",
        "infinities of one sign have an infinite mean, and an infinite weight an infinite product; eager's are"
        " differences, which are nan",
        elements=_infinity_given,
    ),
    Departure(
        r"aten\.prod\.",
        "",
        "whether a product that overflows on the way is infinite, nan or 0 hangs on the order of its factors",
        elements=_order_of_a_product,
    ),
    Departure(
        r"aten\.prod\.",
        "",
        "eager divides the product by each factor, or looks for zeros first; here the other factors are multiplied",
        entry="training",
        elements=_derivative_of_a_product,
    ),
    Departure(
        r"aten\.(std|var)(_mean)?\.",
        "",
        "the gradient is a multiple of the distance from the mean, and as exact as the mean is",
        entry="training",
        elements=_as_exact_as_the_mean,
    ),
    Departure(
        r"aten\.prod\.",
        "",
        "the factors before and after each are multiplied in the tensor's type; eager divides the whole product",
        entry="training",
        elements=_product_on_the_way,
    ),
    Departure(
        r"aten\.gelu(_backward)?\.",
        "",
        "below -3, 1 + erf(x) keeps few digits, in eager mode too",
        elements=_cancelled,
    ),
    Departure(
        ".*",
        "only eager raises: .*(not (yet )?(implemented|supported|currently supported)|Unsupported input type"
        "|does not support automatic differentiation for outputs with complex dtype)",
        "eager lacks a kernel for the type",
    ),
    Departure(
        r"aten\.",
        r"only eager raises: (grad_input must be contiguous|tensor does not have a device|Found dtype \w+ but)",
        "eager's own derivative fails for the layout, without a weight or for a mixture of types",
    ),
    Departure(
        r"aten\.(ne|eq|lt|le|gt|ge|logical_\w+)_\.",
        r"only eager raises: isDifferentiableType\(grad.scalar_type\(\)\) INTERNAL ASSERT",
        "eager writes a comparison in place into integers and asks for its gradient",
    ),
    Departure(".*", "only eager raises: .*INTERNAL ASSERT FAILED", "eager fails at an assertion of its own"),
    Departure(
        r"aten\.(max|min)\.default",
        r"only eager raises: (max|min)\(\): Expected reduction dim to be specified",
        "what nobody uses, because it is overwritten, is not computed, and raises nothing",
    ),
    Departure(
        r"aten\.(copy\.default|\w+_scatter\.)",
        "strides: ",
        "a copy with gaps between its elements is dense after a write in place",
        "function|training|dynamic|dynamo",
    ),
    Departure(
        r"aten\.grid_sampler_2d\.",
        "",
        "a place far from the image is reflected exactly; eager loses it when it divides",
        elements=_far_places,
    ),
    Departure(
        r"aten\.(polygamma|digamma)\.",
        "",
        "near a zero of it, digamma keeps few digits, in eager mode too",
        elements=_zero_of_digamma,
    ),
    Departure(r"aten\.view\.dtype", "", "the sign of a nan", elements=_bits_of_nan),
    Departure(
        r"aten\.(cosh|sinh)\.",
        "",
        "beyond 710 there are numbers left; eager's vectors give infinity",
        elements=_beyond_710,
    ),
    Departure(
        r"aten\.index_reduce\.",
        r"only eager raises: index_fill_\(\): Expected dtype int64 for index",
        "eager's derivative takes no indices of 32 bits",
        "training",
    ),
    Departure(
        r"aten\.(squeeze|unsqueeze|t|transpose|swapaxes|swapdims)_\.",
        r"only eager raises: one of the variables needed for gradient computation has been modified by an inplace",
        "a change of shape in place, which eager takes for a write, changes nothing that a gradient needs",
        "training",
    ),
    Departure(
        r"aten\.as_strided\.",
        r"only compiled raises: setStorage: .* out of bounds for storage of size 0",
        "an empty result has no memory, in eager mode that of the argument that it is a copy of",
    ),
    Departure(r"aten\.(signbit|copysign)", "", "the sign of a nan", elements=_sign_of_nan),
    Departure(
        r"aten\.(std|var)_mean",
        "",
        "the mean of infinities of one sign is infinite; eager's, which is made of differences, is nan",
        elements=_infinite_mean,
    ),
    Departure(r"aten\._safe_softmax", "only eager raises: expected scalar type", "eager's gradient forgets the cast"),
    Departure(".*", "only eager raises: ZeroDivisionError", "devices divide integers by zero to any result", "triton"),
    Departure(
        ".*",
        "only eager raises: (could not (create a primitive|construct a memory descriptor)|itensor_view_from_dense)",
        "oneDNN does not take these strides, or types",
    ),
    Departure(
        r"aten\.clamp\.Tensor",
        r"only eager raises: output with shape \[[^]]*\] doesn't match the broadcast shape",
        "eager's derivative fails for an upper bound of more dimensions than the tensor and the lower bound",
        "training",
    ),
    Departure(".*", r"strides of ones: ", "no element is addressed with the stride of a dimension of size one"),
)


def excused(sample: Sample, difference: Difference, again: bool = False) -> str | None:
    """The reason why a difference is no failure, or ``None``."""
    text = difference.detail if difference.kind == "error" else f"{difference.kind}: {difference.detail}"
    for departure in KNOWN:
        calls = [call for call in sample.calls if _names(departure, call.op)]
        if not calls or not re.match(departure.entry, sample.entry):
            continue
        if departure.elements is None:
            fits = re.match(departure.what, text) is not None
        else:
            fits = difference.wrong is not None and _explained(sample, difference.wrong, departure, calls, again)
        if fits:
            return departure.reason
    return None


def _names(departure: Departure, op: str) -> bool:
    """Whether a departure is about an operator, or about that of which it is the form in place."""
    return any(re.match(departure.ops, name) for name in (op, re.sub(r"(?<!_)_\.", ".", op)))


def _explained(sample: Sample, wrong: Wrong, departure: Departure, calls: Sequence[Call], again: bool) -> bool:
    """Whether all wrong elements are what the departure makes of the arguments of one of the calls."""
    assert departure.elements is not None
    for operands in _operands(sample, calls, again):
        if bool(torch.as_tensor(departure.elements(wrong, operands)).all()):
            return True
    return False


def _operands(sample: Sample, calls: Sequence[Call], again: bool) -> Iterator[Tensors]:
    """The tensors that each call is given, in eager mode."""
    every = replace(sample, outputs=tuple(ref for call in sample.calls for ref in call.outputs), entry="function")
    results = observe(every, every.function(), again).results
    values: dict[str, Any] = results | {
        t.name: t.make(again) for t in sample.tensors
    }  # not as calls in place leave them
    values |= {n.name: n.second if again else n.first for n in sample.numbers}
    for call in calls:
        parts = {r: [results[repr(ref)] for ref in c.outputs] for c in sample.calls if c.parts for r in [c.result]}
        given = [values_of(arg, values | parts) for arg in (*call.args, *(v for _, v in call.kwargs))]
        flat = [item for arg in given for item in (arg if isinstance(arg, list) else [arg])]
        numbers = [torch.tensor(t, dtype=torch.float64) if isinstance(t, float) else t for t in flat if _is_number(t)]
        tensors = [t.detach() if isinstance(t, torch.Tensor) else torch.tensor(t) for t in numbers]
        yield [t.to(torch.complex128).abs() if t.is_complex() else _in_double(t) for t in tensors]


def _in_double(t: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor where they are in its memory: it may overlap itself, which a copy does not."""
    if t.is_neg() or t.numel() == 0:
        return t.double()
    reach = 1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True))
    return t.as_strided((reach,), (1,)).double().as_strided(t.shape, t.stride(), 0)


def _is_number(arg: Any) -> bool:
    return isinstance(arg, torch.Tensor | int | float) and not isinstance(arg, bool)
