"""Strides of elementwise results where torch's fake kernels give others than eager: dimensions of size one with strides
of their own, no elements, decompositions whose last step sees other operands.

Note [How eager lays out an elementwise result]
    Operands that are all contiguous, or all channels_last, give such a result; operands of one shape that all have the
    same dense strides hand them on. Otherwise the dimensions are sorted by the operands' strides, the first operand
    that tells two dimensions apart deciding, and laid out in that order. Numbers in the place of a tensor count as
    operands of another shape. An operand of another type than the common one is converted first, on the CPU, and its
    copy is dense: where it repeats elements along several dimensions, the copy tells these apart.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["elementwise_operators", "elementwise_strides", "with_eager_strides"]

aten = torch.ops.aten
Strides = tuple[int, ...]
Layout = tuple[Strides, Strides]  # sizes and strides

_TAGGED = """
__lshift__ __rshift__ __xor__ abs acos acosh add addcdiv addcmul angle asin asinh atan atan2 atanh bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min clip
copysign cos cosh deg2rad digamma div elu eq erf erfc erfinv exp exp2 expm1 floor fmax fmin fmod frac gcd ge gelu
gelu_backward gt hardshrink hardsigmoid hardtanh heaviside hypot i0 igamma igammac isnan isneginf isposinf lcm le
leaky_relu lerp lgamma log log10 log1p log2 logaddexp logaddexp2 logical_and logical_not logical_or logical_xor
logit logit_backward lt maximum minimum mish mul nan_to_num ne neg nextafter polygamma pow rad2deg reciprocal relu
relu6 remainder round rsqrt rsub selu sgn sigmoid sigmoid_backward sign signbit silu silu_backward sin sinc sinh
softplus softshrink special_airy_ai special_bessel_j0 special_bessel_j1 special_bessel_y0 special_bessel_y1
special_chebyshev_polynomial_t special_chebyshev_polynomial_u special_chebyshev_polynomial_v
special_chebyshev_polynomial_w special_entr special_erfcx special_hermite_polynomial_h special_hermite_polynomial_he
special_i0e special_i1 special_i1e special_laguerre_polynomial_l special_legendre_polynomial_p special_log_ndtr
special_modified_bessel_i0 special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1
special_ndtri special_scaled_modified_bessel_k0 special_scaled_modified_bessel_k1 special_spherical_bessel_j0
special_xlog1py special_zeta sqrt square sub tan tanh tanh_backward threshold threshold_backward true_divide trunc
where xlogy
"""
_LOSSES = {  # elementwise unless they are reduced, and which argument says so
    "mse_loss": 2,
    "smooth_l1_loss": 2,
    "huber_loss": 2,
    "binary_cross_entropy": 3,
}
_ACTIVATIONS = "elu hardsigmoid hardswish hardtanh leaky_relu mish softplus"
_BACKWARDS = tuple(f"{name}_backward" for name in _ACTIVATIONS.split())
_UNTAGGED = ("floor_divide", "hardswish", "polar", "complex", *_LOSSES, *_BACKWARDS)
# The input's dense strides stay as they are.
_LIKE_INPUT = frozenset(("deg2rad", "rad2deg", "nan_to_num", "hardtanh", "relu6", "binary_cross_entropy", "huber_loss"))
_UNCONVERTED = frozenset(("polar", "complex"))  # whose operands have another type than the result
_REVERSED = frozenset(("threshold_backward", "leaky_relu_backward"))  # whose operands eager takes in the other order
# Of whose results torch's fake kernels tell other strides where sizes are symbols; of the others they are right.
_OTHERS_OF_SYMBOLS = frozenset(
    (
        *("floor_divide", "polar", "complex", "copysign", "heaviside", "logaddexp", "logaddexp2", "logical_and"),
        *("logical_or", "logical_xor", "logit_backward", "special_xlog1py", "threshold_backward", "xlogy"),
    )
)
_LOG_SOFTMAX = aten._log_softmax_backward_data.default
_SCATTERS = (aten.select_scatter.default, aten.slice_scatter.default, aten.diagonal_scatter.default)


@dataclass(frozen=True, slots=True)
class _Elementwise:
    """An elementwise operator, and the positions at which a number stands for a tensor."""

    op: Any
    numbers: frozenset[int]

    @staticmethod
    def of(op: Any) -> _Elementwise | None:
        schema = op._schema
        if schema.is_mutable or len(schema.returns) != 1:
            return None
        if op is aten.polygamma.default:
            return _Elementwise(op, frozenset())
        places = [k for k, a in enumerate(schema.arguments) if a.name in ("self", "other", "x", "n")]
        return _Elementwise(op, frozenset(places))

    @property
    def name(self) -> str:
        """Without the overload."""
        return str(self.op).split(".")[1]

    @property
    def differs_with_symbols(self) -> bool:
        """Whether torch's fake kernels tell other strides of results whose sizes are symbols."""
        if self.op in (aten.pow.Scalar, aten.div.Tensor_mode, aten.div.Scalar_mode):
            return True
        return self.name in _BACKWARDS or self.name in _OTHERS_OF_SYMBOLS

    def strides(self, layouts: Sequence[Layout]) -> Strides:
        """The result's, for operands of these sizes and strides."""
        if self.op is aten.pow.Scalar:
            return _row_major(layouts[-1][0])
        whole = layouts[0][0] == torch.broadcast_shapes(*(sizes for sizes, _ in layouts))  # else eager resizes it
        if self.name in _LIKE_INPUT and whole and _dense(*layouts[0]):
            return layouts[0][1]
        return elementwise_strides(layouts[::-1] if self.name in _REVERSED else layouts)


@functools.cache
def elementwise_operators() -> tuple[_Elementwise, ...]:
    """All of them."""
    found = [_Elementwise.of(getattr(aten, name).default) for name in _UNTAGGED]
    for name in _TAGGED.split():
        packet = getattr(aten, name, None)
        if packet is not None:
            overloads = [getattr(packet, overload) for overload in packet.overloads()]
            found += [_Elementwise.of(op) for op in overloads if torch.Tag.pointwise in op.tags]
    return tuple(each for each in found if each is not None)


def with_eager_strides(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with operators whose results get eager's strides: all elementwise ones, and some others."""
    mine = {each.op: functools.partial(_run, each, table.get(each.op)) for each in elementwise_operators()}
    log_sigmoid = functools.partial(_log_sigmoid, table.get(aten.log_sigmoid_forward.default))
    into = {op: functools.partial(_scattered, op, table.get(op)) for op in _SCATTERS}
    rows = functools.partial(_gradient_of_log_softmax, table.get(_LOG_SOFTMAX))
    outer = functools.partial(_outer, table.get(aten.addr.default))
    others = {aten.log_sigmoid_forward.default: log_sigmoid, _LOG_SOFTMAX: rows, aten.addr.default: outer}
    others[aten.angle.default] = functools.partial(_angle, mine[aten.angle.default], table.get(aten.angle.default))
    return {**table, **mine, **into, **others}


def _run(which: _Elementwise, decompose: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    operands = _operands(which, args, kwargs)
    if operands is None and which.differs_with_symbols and _has_symbols(args):
        return _of_symbolic_sizes(which, decompose, args, kwargs)
    result = NotImplemented if decompose is None else decompose(*args, **kwargs)
    if operands is None or (result is not NotImplemented and not _has_layout(result)):
        return result
    if result is not NotImplemented:
        wanted = which.strides(_as_read(which, operands, result.dtype))
        if result.stride() == wanted:
            return result
        memory = aten.empty_strided.default(result.shape, wanted, dtype=result.dtype, device=result.device)
        return aten.copy.default(memory, result)

    def fake() -> Any:
        value = which.op(*args, **kwargs)
        if not _has_layout(value):
            return value
        wanted = which.strides(_as_read(which, operands, value.dtype))
        return value if value.stride() == wanted else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(which.op, args, fake, kwargs)


def _of_symbolic_sizes(which: _Elementwise, decompose: Callable[..., Any] | None, args: Any, kwargs: Any) -> Any:
    """Laid out as a sum of the operands, of which torch's fake kernel is right."""
    operands = [
        value
        for place, value in enumerate((*args, *kwargs.values()))
        if isinstance(value, torch.Tensor) or place in which.numbers
    ]
    with compat.untraced():
        if which.op is aten.pow.Scalar:
            wanted = operands[-1].new_empty(operands[-1].shape).stride()
        else:
            wanted = torch.add(*(operands[::-1] if which.name in _REVERSED else operands)).stride()
    if decompose is not None:
        result = decompose(*args, **kwargs)
        if result is not NotImplemented:
            if str(result.stride()) == str(wanted):  # comparing symbols would add guards
                return result
            memory = aten.empty_strided.default(result.shape, wanted, dtype=result.dtype, device=result.device)
            return aten.copy.default(memory, result)

    def fake() -> Any:
        value = which.op(*args, **kwargs)
        return value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(which.op, args, fake, kwargs)


def _log_sigmoid(decompose: Callable[..., Any] | None, x: Any) -> Any:
    """Of a contiguous copy, as in eager mode."""
    if _layout(x) is not None and not x.is_contiguous():
        x = x.contiguous()
        return aten.log_sigmoid_forward.default(x) if decompose is None else decompose(x)
    return NotImplemented if decompose is None else decompose(x)


def _angle(elementwise: Callable[..., Any], decompose: Callable[..., Any] | None, x: Any) -> Any:
    """Of complex numbers it is contiguous in eager mode, which makes the result first and then computes into it."""
    if not x.is_complex() or not _has_layout(x) or torch._prims_common.is_contiguous_or_false(x):
        return elementwise(x)
    if decompose is not None:
        result = decompose(x)
        return result if result is NotImplemented else result.contiguous()

    def fake() -> Any:
        value = aten.angle.default(x)
        return value.new_empty(value.shape)

    return compat.record_operator(aten.angle.default, (x,), fake)


def _gradient_of_log_softmax(decompose: Callable[..., Any] | None, *args: Any) -> Any:
    """Contiguous in eager mode, whatever the gradient is that it is given."""
    if _layout(args[0]) is None or args[0].is_contiguous():
        return NotImplemented if decompose is None else decompose(*args)
    if decompose is not None:
        return decompose(*args).contiguous()
    return compat.record_operator(_LOG_SOFTMAX, args, lambda: _LOG_SOFTMAX(*args).contiguous())


def _outer(decompose: Callable[..., Any] | None, x: Any, a: Any, b: Any, **kwargs: Any) -> Any:
    """``addr``: eager mode lays its result out by ``x`` even where ``beta`` is 0 and torch's fake kernel forgets it."""
    layouts = [_layout(value) for value in (x, a.unsqueeze(1), b)]
    known = [layout for layout in layouts if layout is not None]
    if kwargs.get("beta", 1) != 0 or len(known) < len(layouts):
        return NotImplemented if decompose is None else decompose(x, a, b, **kwargs)
    wanted = elementwise_strides(known)
    if decompose is not None:
        result = decompose(x, a, b, **kwargs)
        if result is NotImplemented or result.stride() == wanted:
            return result
        return aten.copy.default(result.new_empty_strided(result.shape, wanted), result)

    def fake() -> Any:
        value = aten.addr.default(x, a, b, **kwargs)
        return value if value.stride() == wanted else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(aten.addr.default, (x, a, b), fake, kwargs)


def _scattered(op: Any, decompose: Callable[..., Any] | None, x: Any, *args: Any, **kwargs: Any) -> Any:
    """A copy of ``x`` with something in a part of it."""
    if decompose is not None or not _has_layout(x):
        return NotImplemented if decompose is None else decompose(x, *args, **kwargs)

    def fake() -> Any:
        value = op(x, *args, **kwargs)
        wanted = compat.scattered_strides(x, value)
        return value if value.stride() == wanted else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(op, (x, *args), fake, kwargs)


def _has_layout(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _operands(which: _Elementwise, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[tuple[Any, Layout]] | None:
    """The operands that decide on the result's strides; ``None`` where fake kernels are right, or sizes are symbols."""
    reduced = _LOSSES.get(which.name)
    if reduced is not None and (args[reduced] if len(args) > reduced else kwargs.get("reduction")) != 0:
        return None
    operands: list[tuple[Any, Layout]] = []
    plain = True
    for place, value in enumerate((*args, *kwargs.values())):
        if isinstance(value, torch.Tensor):
            layout = _layout(value)
            if layout is None:
                return None
            plain = plain and layout[1] == _row_major(layout[0])
            operands.append((value, layout))
        elif place in which.numbers and isinstance(value, int | float | complex):
            operands.append((value, ((), ())))
    return None if plain else operands


def _as_read(which: _Elementwise, operands: Sequence[tuple[Any, Layout]], result: torch.dtype) -> list[Layout]:
    """How the operands lie when eager computes: those of another dtype are converted first, which leaves no gaps."""
    layouts = [layout for _, layout in operands]
    if which.name in _UNCONVERTED:
        return layouts
    values = [value for value, _ in operands]
    if result is torch.bool:  # of a comparison; the operands' own type
        result = torch.result_type(*values) if len(values) == 2 else result
    for place, (value, layout) in enumerate(operands):
        condition = which.name == "where" and place == 0
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu" or condition or _dense(*layout):
            continue
        if value.dtype != result:
            layouts[place] = layout[0], elementwise_strides([layout])
    return layouts


def _layout(value: torch.Tensor) -> Layout | None:
    """Sizes and strides, if the tensor has strides and no lazy bits, and all of it is known."""
    if value.layout is not torch.strided or value.is_neg() or value.is_conj():
        return None
    sizes, strides = tuple(value.shape), tuple(value.stride())
    return (sizes, strides) if all(type(number) is int for number in (*sizes, *strides)) else None


def _has_symbols(args: Sequence[Any]) -> bool:
    tensors = [value for value in args if isinstance(value, torch.Tensor)]
    if not all(map(_has_layout, tensors)):
        return False
    return not all(type(n) is int for value in tensors for n in (*value.shape, *value.stride()))


def elementwise_strides(layouts: Sequence[Layout]) -> Strides:
    """Strides of an elementwise result of operands with these sizes and strides.

    See Note [How eager lays out an elementwise result].
    """
    shape = torch.broadcast_shapes(*(sizes for sizes, _ in layouts))
    if all(sizes == shape for sizes, _ in layouts):
        known = _handed_on(shape, [strides for _, strides in layouts])
        if known is not None:
            return known
    operands = [_broadcast(layout, shape) for layout in layouts]
    order = list(range(len(shape)))[::-1]  # fastest first
    for end in range(1, len(shape)):
        place = end
        for before in range(end - 1, -1, -1):
            ahead = _compare(order[before], order[place], shape, operands)
            if ahead < 0:
                break
            if ahead > 0:
                order[before], order[place] = order[place], order[before]
                place = before
    if order == list(range(len(shape)))[::-1]:
        return _row_major(shape)
    result = [0] * len(shape)
    step = 1
    for dim in order:
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def _handed_on(shape: Strides, strides: Sequence[Strides]) -> Strides | None:
    """What operands of one shape hand on as they are."""
    if all(_follows(shape, own, range(len(shape))[::-1]) for own in strides):
        return _row_major(shape)
    if len(shape) == 4 and all(_follows(shape, own, (1, 3, 2, 0)) for own in strides):
        return _channels_last(shape)
    first = strides[0]
    return first if all(own == first for own in strides) and _dense(shape, first) else None


def _follows(shape: Strides, strides: Strides, order: Sequence[int]) -> bool:
    """Whether the strides are dense in this order, fastest first."""
    step = 1
    for dim in order:
        if shape[dim] == 1:
            continue
        if strides[dim] != step and 0 not in shape:
            return False
        step *= shape[dim]
    return True


def _dense(shape: Strides, strides: Strides) -> bool:
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] > 1, strides[dim]))
    return _follows(shape, strides, order)


def _row_major(shape: Strides) -> Strides:
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _channels_last(shape: Strides) -> Strides:
    _, channels, rows, columns = shape
    return rows * columns * channels, 1, columns * channels, channels


def _broadcast(layout: Layout, shape: Strides) -> Strides:
    """Strides for every dimension of ``shape``, 0 where the operand repeats."""
    sizes, strides = layout
    missing = len(shape) - len(sizes)
    dims = zip(sizes, strides, shape[missing:], strict=True)
    own = (0 if size == 1 != wide else stride for size, stride, wide in dims)
    return (*(0,) * missing, *own)


def _compare(a: int, b: int, shape: Strides, operands: Sequence[Strides]) -> int:
    """Above zero if ``b`` moves faster than ``a``, below if slower, zero if no operand tells."""
    for strides in operands:
        if strides[a] == 0 or strides[b] == 0:
            continue
        if strides[a] != strides[b]:
            return 1 if strides[a] > strides[b] else -1
        if shape[a] > shape[b]:
            return 1
    return 0
