"""Guarded specializations of a function: it is compiled again for arguments that no earlier compile was made for.

Note [What a specialization is for]
    A compiled graph has baked in the structure of the arguments, the dtypes, sizes and strides of tensors, the values
    of everything else, and the state of autograd and autocast. Each is part of the key of its specialization, so
    another combination is compiled instead of being silently wrong. With symbolic sizes the key has no sizes; what the
    graph assumes about them is its guard, an expression over the arguments that is evaluated at each call.
"""

from __future__ import annotations

import itertools
import operator
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

from aotkit_aot_trace import DataDependent
from aotkit_functionalize.subclasses import is_subclass, sizes_and_tensors, subclass_key
from aotkit_functionalize.tracing import fake_twin
from aotkit_runtime_wrappers import AliasingChangedError

from ..artifact.torch_state import default_device, is_watched
from .alias_specializations import MOST_ALIAS_PATTERNS
from .bugs import describe_bug, is_bug, raise_bug, raised_by_user, tell
from .context import CompileContext
from .run import compile_and_bind

__all__ = [
    "Specializations",
    "compile_variable",
    "example_fakes",
    "flat_function",
    "flatten_call",
    "next_name",
    "rebuilder",
]
__all__ += ["structure_of", "with_constants"]

_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter))
_LEAVES = _PLAIN | {int, float, bool, str, type(None)}
_numbers = itertools.count()  # names only; a counter cannot change what is compiled


def next_name() -> str:
    """A name for the graphs of one compile, unique in this process: ``model__3``."""
    return f"model__{next(_numbers)}"


@dataclass(frozen=True, slots=True, eq=False)
class _Specialization:
    run: Callable[[list[Any]], Any]
    result: Any
    holds: Callable[[Sequence[Any]], bool] | None


class _EagerSpecialization:
    """The function itself, where the compile failed by a bug of ours; its ``result`` is known after a call."""

    holds = None

    def __init__(self, function: Callable[..., Any], result: Callable[[], Any]) -> None:
        self.run: Callable[[list[Any]], Any] = lambda args: function(*args)
        self._result = result

    @property
    def result(self) -> Any:
        return self._result()


@dataclass(frozen=True, slots=True)
class Specializations:
    """Compiled versions of one function; see Note [What a specialization is for]. Safe under threads.

    ``flatten_for(key)`` makes, for a new specialization, the flat function to capture and something that tells the
    structure of its result. ``context()`` gives the settings of one compile.
    """

    flatten_for: Callable[[Any], tuple[Callable[..., Any], Callable[[], Any]]]
    context: Callable[[], CompileContext]
    dynamic: bool
    num_static: int
    compiled: dict[Any, list[Any]]
    lock: Any
    line: str = ""

    @staticmethod
    def of(
        flatten_for: Callable[[Any], tuple[Callable[..., Any], Callable[[], Any]]],
        context: Callable[[], CompileContext],
        *,
        dynamic: bool,
        num_static: int,
        line: str = "",
    ) -> Specializations:
        """No specialization compiled yet. ``line``: where the function is written."""
        return Specializations(flatten_for, context, dynamic, num_static, {}, threading.RLock(), line)

    def call(self, flat: list[Any], structure: Any) -> tuple[Any, Any]:
        """The flat results for flat arguments, and their structure; ``structure`` is that of the arguments. Under a
        mode of the user's, which sees each operation and may change it, the function itself is called."""
        if is_watched():
            function, result = self.flatten_for(structure)
            return function(*flat), result()
        key = (structure, _specialized_to(flat, self.dynamic, self.num_static))
        for specialization in self.compiled.get(key, ()):
            if specialization.holds is None or specialization.holds(flat):
                try:
                    return specialization.run(list(flat)), specialization.result
                except AliasingChangedError:
                    return self._call_another(key, flat, [specialization])
        return self._call_another(key, flat, [])

    def _call_another(self, key: Any, flat: list[Any], tried: list[_Specialization]) -> tuple[Any, Any]:
        """With a specialization that was not tried, compiled if need be. See Note [Other aliases at run time]."""
        while True:
            specialization = self._find(key, flat, tried)
            if specialization is None:
                with self.lock:
                    specialization = self._find(key, flat, tried) or self._compile(key, flat)
            try:
                return specialization.run(list(flat)), specialization.result
            except AliasingChangedError:  # raised before anything ran
                tried.append(specialization)
                if len(tried) > MOST_ALIAS_PATTERNS:
                    raise

    def _find(self, key: Any, flat: list[Any], tried: Sequence[_Specialization]) -> _Specialization | None:
        for specialization in self.compiled.get(key, ()):
            if specialization not in tried and (specialization.holds is None or specialization.holds(flat)):
                return specialization
        return None

    def _compile(self, key: Any, flat: list[Any]) -> _Specialization:
        function, result = self.flatten_for(key[0])
        ctx = self.context()
        try:
            run, holds = compile_variable(function, flat, ctx, dynamic=self.dynamic, num_static=self.num_static)
        except Exception as error:
            if not is_bug(error) or raised_by_user(error):
                raise
            if ctx.options.fallback == "error":
                raise_bug(error, self.line)
            reason = describe_bug(error, self.line)
            return self._eager(key, function, result, lambda: tell(reason, ctx.recorder))
        specialization = _Specialization(run, result(), holds)
        self.compiled.setdefault(key, []).append(specialization)
        return specialization

    def _eager(
        self, key: Any, function: Callable[..., Any], result: Callable[[], Any], notify: Callable[[], None]
    ) -> Any:
        """See Note [Internal errors]. What the function raises by itself is no such error, and it is compiled again."""
        specialization = _EagerSpecialization(function, result)

        def first(args: list[Any]) -> Any:
            outputs = function(*args)
            notify()
            specialization.run = lambda args: function(*args)
            self.compiled.setdefault(key, []).append(specialization)
            return outputs

        specialization.run = first
        return specialization


def compile_variable(
    function: Callable[..., Any],
    flat: Sequence[Any],
    ctx: CompileContext,
    *,
    dynamic: bool,
    num_static: int,
) -> tuple[Callable[[list[Any]], Any], Callable[[Sequence[Any]], bool] | None]:
    """Compile ``function`` with everything but tensors and symbolic integers at the values of ``flat``.

    Returns a boxed callable of all flat arguments, and whether it may be called with given ones, as far as their sizes
    are concerned.
    """
    mode, fakes = example_fakes(flat, dynamic=dynamic, num_static=num_static)
    function, variable = with_constants(function, flat, fakes)
    ctx = replace(ctx, fake_mode=mode)
    examples = [flat[i] for i in variable]
    try:
        run = compile_and_bind(function, [fakes[i] for i in variable], examples, ctx)
    except DataDependent:
        if mode.shape_env is not None:
            raise
        # Numbers read from tensors need symbols, which cost tracing time and so are not there from the start.
        mode = FakeTensorMode(shape_env=ShapeEnv())
        fakes = [_fake(v, mode, i, False) for i, v in enumerate(flat)]
        ctx = replace(ctx, fake_mode=mode)
        run = compile_and_bind(function, [fakes[i] for i in variable], examples, ctx)
    boxed: Callable[[list[Any]], Any] = run.boxed  # type: ignore[attr-defined]
    holds = _size_check(mode.shape_env if dynamic else None, [fakes[i] for i in variable], variable)
    if len(variable) == len(flat):
        return boxed, holds

    def select(args: list[Any]) -> Any:
        args[:] = [args[i] for i in variable]
        return boxed(args)

    return select, holds


def _size_check(
    shape_env: ShapeEnv | None, fakes: list[Any], variable: Sequence[int]
) -> Callable[[Sequence[Any]], bool] | None:
    # The graph may have been captured over the tensors that arguments are views of.
    views = [i for i, f in zip(variable, fakes, strict=True) if isinstance(f, torch.Tensor) and f._base is not None]
    bases: list[Any] = [f._base for f in fakes if isinstance(f, torch.Tensor) and f._base is not None]
    likes = [*fakes, *bases]

    def parts(values: Sequence[Any]) -> list[Any]:
        return [part for value, like in zip(values, likes, strict=True) for part in sizes_and_tensors(value, like)]

    guards = "" if shape_env is None else _guards(shape_env, parts(likes))
    if not guards or shape_env is None:
        return None

    def holds(flat: Sequence[Any]) -> bool:
        found = [flat[i]._base for i in views]
        if any(base is None or base.dim() != fake.dim() for base, fake in zip(found, bases, strict=True)):
            return False
        try:
            return bool(shape_env.evaluate_guards_expression(guards, parts([*(flat[i] for i in variable), *found])))
        except ZeroDivisionError:  # what a size of these divides was never 0 in the graph
            return False

    return holds


def _guards(shape_env: ShapeEnv, placeholders: Sequence[Any]) -> str:
    """What :meth:`ShapeEnv.evaluate_guards_expression` takes. torch's own function for it joins guards by ``and``
    without parentheses, so that one with ``or`` in it makes those before it optional."""
    from torch._dynamo.source import LocalSource  # imports all of Dynamo

    sources: list[Any] = [LocalSource(f"t{i}") for i in range(len(placeholders))]
    guards = shape_env.produce_guards(placeholders, sources, ignore_static=False)
    return " and ".join(f"({guard})" for guard in guards)


def with_constants(
    function: Callable[..., Any], flat: Sequence[Any], fakes: Sequence[Any]
) -> tuple[Callable[..., Any], list[int]]:
    """``function`` of tensors and symbolic integers alone, and the positions of those among the flat arguments."""
    variable = [i for i, v in enumerate(fakes) if isinstance(v, torch.Tensor | torch.SymInt)]
    return (_Partial(function, flat, variable) if len(variable) < len(flat) else function), variable


class _Partial:
    """``function`` of the values at the positions ``variable``; the others are those of ``flat``."""

    def __init__(self, function: Callable[..., Any], flat: Sequence[Any], variable: Sequence[int]) -> None:
        fixed = [None if i in set(variable) else v for i, v in enumerate(flat)]
        self._function, self._fixed, self._variable = function, fixed, variable
        if hasattr(function, "preferred_layer"):
            self.preferred_layer = function.preferred_layer

    def __call__(self, *values: Any) -> Any:
        full = list(self._fixed)
        for position, value in zip(self._variable, values, strict=True):
            full[position] = value
        return self._function(*full)


def flat_function(
    fn: Callable[..., Any], spec: pytree.TreeSpec, leading: int = 0
) -> tuple[Callable[..., list[Any]], Callable[[], pytree.TreeSpec]]:
    """``fn`` of flat arguments, returning flat results, and what tells the structure of the last ones.

    The first ``leading`` arguments are passed on as they are, the others by ``spec``, the structure of args and kwargs.
    """
    out_spec: list[pytree.TreeSpec] = []

    def flat_fn(*values: Any) -> list[Any]:
        args, kwargs = pytree.tree_unflatten(list(values[leading:]), spec)
        outputs, structure = pytree.tree_flatten(fn(*values[:leading], *args, **kwargs))
        out_spec[:] = [structure]
        return outputs

    if hasattr(fn, "preferred_layer"):
        flat_fn.preferred_layer = fn.preferred_layer  # type: ignore[attr-defined]
    return flat_fn, lambda: out_spec[0]


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Any], Any]:
    """Flat arguments and the key of their structure: of plain positional arguments, which are common, their number."""
    if not kwargs:
        for value in args:
            if type(value) not in _LEAVES:
                break
        else:
            return list(args), len(args)
    return pytree.tree_flatten((args, kwargs))


def structure_of(key: Any) -> pytree.TreeSpec:
    """The structure that :func:`flatten_call` gave ``key`` for."""
    spec: pytree.TreeSpec = pytree.tree_structure(((None,) * key, {})) if isinstance(key, int) else key
    return spec


def rebuilder(spec: pytree.TreeSpec) -> Callable[[Sequence[Any]], Any]:
    """What makes a result of structure ``spec`` of flat values."""
    if spec.is_leaf():
        return operator.itemgetter(0)
    if spec.type in (tuple, list) and all(child.is_leaf() for child in spec.children()):
        return spec.type
    return lambda values: pytree.tree_unflatten(values, spec)


def example_fakes(flat: Sequence[Any], *, dynamic: bool, num_static: int = 0) -> tuple[FakeTensorMode, list[Any]]:
    """Fake tensors for a compile, and their mode: that of fake arguments if there are some, else a new one.

    With ``dynamic``, sizes of tensors and integers become symbols, but not those of the ``num_static`` first arguments.
    """
    given = next((v.fake_mode for v in flat if isinstance(v, FakeTensor)), None)
    mode = given or FakeTensorMode(shape_env=ShapeEnv())
    return mode, [_fake(v, mode, i, dynamic and i >= num_static) for i, v in enumerate(flat)]


def _fake(value: Any, mode: FakeTensorMode, position: int, dynamic: bool) -> Any:
    if isinstance(value, FakeTensor):
        return value
    if isinstance(value, torch.Tensor):
        return fake_twin(value, mode, static=not dynamic)
    if dynamic and type(value) is int and mode.shape_env is not None:
        source = torch._dynamo.source.ConstantSource(f"integer_{position}")
        symbol = mode.shape_env.create_unspecified_symbol(value, source, DimDynamic.DYNAMIC)
        return mode.shape_env.create_symintnode(symbol, hint=value, source=source)
    return value


def _specialized_to(flat: Sequence[Any], dynamic: bool, num_static: int) -> tuple[Any, ...]:
    """See Note [What a specialization is for]."""
    parts: list[Any] = [torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()]
    parts += [default_device(), torch.are_deterministic_algorithms_enabled()]
    if torch._C._is_any_autocast_enabled():
        for device in ("cpu", "cuda"):
            parts.append(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device))
    first: dict[int, int] = {}
    for index, value in enumerate(flat):
        kind = type(value)
        if kind not in _PLAIN and not isinstance(value, torch.Tensor):
            parts.append(int if dynamic and kind is int else _constant(value))
            continue
        same = first.setdefault(id(value), index)
        if same != index:
            parts.append(same)
        elif value.layout is not torch.strided:
            parts.append((kind, value.dtype, value.layout))  # refused when it is captured
        elif kind not in _PLAIN and is_subclass(value):
            parts.append(subclass_key(value, sizes=not dynamic or index < num_static))
        elif dynamic and index >= num_static:
            parts.append((kind, value.dtype, value.device, value.requires_grad, value.dim()))
        else:
            parts.append((kind, value.dtype, value.device, value.requires_grad, value.shape, value.stride()))
        if value.is_neg() or value.is_conj():
            parts.append(("lazy", value.is_neg(), value.is_conj()))
    return tuple(parts)


def _constant(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # tells 0.0 from -0.0, and a NaN from nothing
    try:
        hash(value)
    except TypeError:
        return _Same(value)
    return type(value), value


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """Equal for the very same object, which it keeps alive."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)
