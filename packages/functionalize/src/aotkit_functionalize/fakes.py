"""Plain fake tensors for a run of the function."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ._torch_compat import fakes_other_attributes, snapshot_fake
from .errors import Unsupported
from .lazy_bits import has_lazy_bits, lazy_bits, with_lazy_bits, without_lazy_bits
from .subclasses.meta import is_subclass, rebuild, tensors_inside

__all__ = ["fake_arguments", "fake_twin"]


def fake_twin(value: torch.Tensor, mode: FakeTensorMode, *, static: bool) -> torch.Tensor:
    """A fake tensor as autograd sees ``value``: it requires grad, and is a leaf, if ``value`` does and is.

    Raises:
        Unsupported: a subclass that holds something other than tensors, where torch makes no fakes of these.
    """
    if is_subclass(value) and not fakes_other_attributes():
        _check_attributes("a tensor", value)
    if value.is_leaf or not value.requires_grad:
        return mode.from_tensor(value, static_shapes=static)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch looks at .grad, and warns about that of a tensor that is no leaf
        return mode.from_tensor(value, static_shapes=static)


def fake_arguments(
    flat_args: Sequence[Any],
    *,
    fake_mode: FakeTensorMode | None = None,
    dynamic: bool = False,
    keep_bits: bool = False,
) -> tuple[FakeTensorMode, list[Any]]:
    """Fake, detached versions of flat arguments and the mode they belong to.

    Fake arguments keep their mode. Real tensors are converted under ``fake_mode`` or a new mode; their sizes
    are symbols if ``dynamic``, else constants. Other values are passed through. Lazy bits are taken off, see Note
    [Lazy bits], unless ``keep_bits``: for a graph that is going to be called with tensors that have them.

    Raises:
        Unsupported: tensor subclasses that cannot be taken apart, or fake tensors of several modes.
    """
    mode = fake_mode
    for index, arg in enumerate(flat_args):
        if isinstance(arg, FakeTensor):
            mode = _one_mode(index, mode, arg)
        elif isinstance(arg, torch.Tensor) and type(arg) not in (torch.Tensor, torch.nn.Parameter):
            if not is_subclass(arg):
                raise Unsupported(
                    f"input {index} is a tensor subclass ({type(arg).__name__})",
                    "only plain tensors and traceable wrapper subclasses can be captured",
                    "Give the class __tensor_flatten__ and __tensor_unflatten__, or pass a plain tensor",
                )
            if not fakes_other_attributes():
                _check_attributes(f"input {index}", arg)
            for inside in tensors_inside(arg):
                mode = _one_mode(index, mode, inside) if isinstance(inside, FakeTensor) else mode
    if mode is None:
        mode = FakeTensorMode(shape_env=ShapeEnv())  # static sizes need one as well: for sizes that depend on data
    plain = [_fake_argument(arg, mode, dynamic) for arg in flat_args]
    return mode, plain if keep_bits else [_without_bits(value, mode) for value in plain]


def _check_attributes(what: str, arg: Any) -> None:
    """Raise for an attribute that is no tensor, where torch makes no fakes of such subclasses."""
    for name in arg.__tensor_flatten__()[0]:
        inner = getattr(arg, name)
        if not isinstance(inner, torch.Tensor):
            raise Unsupported(
                f"{what}, a {type(arg).__name__}, holds in {name} a {type(inner).__name__} that is no tensor",
                f"torch {torch.__version__} makes no fake tensors of such classes",
                "Use torch 2.12 or newer",
            )
        if is_subclass(inner):
            _check_attributes(what, inner)


def _without_bits(value: Any, mode: FakeTensorMode) -> Any:
    if type(value) is not FakeTensor or not has_lazy_bits(value):
        return value
    with mode, torch.inference_mode(False), torch.no_grad():
        return without_lazy_bits(value)


def _one_mode(index: int, mode: FakeTensorMode | None, fake: FakeTensor) -> FakeTensorMode:
    if mode is not None and fake.fake_mode is not mode:
        raise Unsupported(
            f"input {index} is a fake tensor of another mode than the arguments before it",
            "sizes of two modes cannot be related",
            "Make all fake arguments under one FakeTensorMode",
        )
    return fake.fake_mode


def _fake_argument(arg: Any, mode: FakeTensorMode, dynamic: bool) -> Any:
    if not is_subclass(arg):
        return _fake(arg, mode, dynamic)
    if not all(isinstance(inside, FakeTensor) for inside in tensors_inside(arg)):
        with torch.no_grad():
            arg = mode.from_tensor(arg.detach(), static_shapes=not dynamic)
    leaves = [_without_bits(_fake(inside, mode, dynamic), mode) for inside in tensors_inside(arg)]
    with mode, torch.inference_mode(False), torch.no_grad():
        return rebuild(arg, iter(leaves))


def _fake(arg: Any, mode: FakeTensorMode, dynamic: bool) -> Any:
    if not isinstance(arg, torch.Tensor):
        return arg
    with torch.no_grad():
        # Detached first: torch would look at the .grad of the tensor, and warn about that of a non-leaf.
        fake = arg if isinstance(arg, FakeTensor) else mode.from_tensor(arg.detach(), static_shapes=not dynamic)
    if not fake.is_inference() and not fake.requires_grad:
        return fake  # as it is: Dynamo's fakes of Python floats remember the symbol that .item() gives
    if not fake.is_inference():
        with torch.inference_mode(False), torch.no_grad():
            return snapshot_fake(fake)  # what detach() gives, without its way through the mode: models have hundreds
    with mode, torch.inference_mode(False), torch.no_grad():
        # An inference tensor has neither a version counter nor views with a base; its twin over the same storage does.
        twin = torch.empty(0, dtype=fake.dtype, device=fake.device)
        twin.set_(fake.untyped_storage(), fake.storage_offset(), fake.shape, fake.stride())
        return with_lazy_bits(twin, *lazy_bits(fake))
