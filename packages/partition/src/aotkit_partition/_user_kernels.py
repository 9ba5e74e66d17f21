"""Triton kernels of a user's own: what they say as text, and how another process finds the same kernel.

This file is the same in every package that has it; the original is tools/shared/_user_kernels.py.

Note [Triton kernels of a user's own]
    A graph calls such a kernel by its place in a table that torch keeps in each process. What is kept between
    processes names it instead: the module and name of its function, and a digest of all that it says. That is its
    source; that of every function it calls; the values of the global variables and of the variables of enclosing
    functions that it reads; the default values and settings of its parameters; the configurations of its autotuner and
    its heuristics and hooks, with what these read; and Triton's version. Whatever else it reads has no text, and then
    it has no name either.

    Nothing of a kernel is kept: it is found among those that torch's table has (Dynamo puts them there while it
    traces) or in its module, if that is imported, and is only used if it says the same. Nothing is imported for it.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import json
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["KernelName", "NoKernelText", "constants_from_json", "constants_to_json", "find_kernel", "kernel_name"]
__all__ += ["kernel_text", "table_of_kernels"]

_KNOWN_MODULES = ("triton", "torch", "math")
_SETTINGS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
_NUMBERS = (bool, int, float, str)


class NoKernelText(Exception):
    """A kernel, or what it is given, has no text."""


@dataclass(frozen=True, slots=True)
class KernelName:
    """What names a kernel in any process.

    Attributes:
        module: in which its function is defined.
        name: of its function.
        digest: of all that it says.
        configs: JSON text of the configurations that Dynamo put around a kernel which its module has without them.
    """

    module: str
    name: str
    digest: str
    configs: str = ""


def table_of_kernels() -> Any:
    """torch's table of the kernels that graphs of this process call."""
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    return kernel_side_table


def kernel_name(kernel: Any) -> KernelName:
    """The name of a kernel. Raises :class:`NoKernelText` if it has none."""
    digest = _digest(kernel)
    function = _innermost(kernel).fn
    return KernelName(function.__module__, function.__qualname__, digest, _plain_configs(kernel))


def find_kernel(name: KernelName) -> Any:
    """The kernel of this process that says what the one of that name said. Raises ``LookupError`` without one."""
    same_name = False
    for kernel in filter(_is_kernel, [*table_of_kernels().id_to_kernel.values(), *_of_module(name)]):
        function = _innermost(kernel).fn
        if (function.__module__, function.__qualname__) != (name.module, name.name):
            continue
        same_name = True
        try:
            if _digest(kernel) == name.digest:
                return kernel
        except NoKernelText:
            continue
    what = f"the Triton kernel {name.module}.{name.name}"
    if same_name:
        raise LookupError(f"{what} has changed, or what it calls or reads has")
    raise LookupError(f"{what} is not in this process; import {name.module} first")


def kernel_text(kernel: Any) -> str:
    """All that a kernel says. Raises :class:`NoKernelText` where it reads what has no text."""
    if not _is_kernel(kernel):
        raise NoKernelText(f"a graph launches a {_kind(kernel)}")
    try:
        return "\n".join([f"triton {sys.modules['triton'].__version__}", *_Text(set()).kernel(kernel)])
    except AttributeError as error:  # another version's autotuner: what it adds may matter
        raise NoKernelText(f"this Triton's kernels have another form: {error}") from error


def constants_to_json(constants: Mapping[str, Any]) -> str:
    """What a kernel is given beside tensors and sizes, as text. Raises :class:`NoKernelText` where there is none."""
    return json.dumps({name: _write(value) for name, value in constants.items()}, allow_nan=True)


def constants_from_json(text: str) -> dict[str, Any]:
    """The inverse of :func:`constants_to_json`. Raises ``LookupError`` for a kernel or type that is not here."""
    return {name: _read(form) for name, form in json.loads(text).items()}


def _digest(kernel: Any) -> str:
    return hashlib.sha256(kernel_text(kernel).encode()).hexdigest()


def _innermost(kernel: Any) -> Any:
    """The compiled function within autotuners and heuristics."""
    while not isinstance(kernel.fn, types.FunctionType):
        kernel = kernel.fn
    return kernel


def _plain_configs(kernel: Any) -> str:
    """The configurations of an autotuner around a function that could be put together again."""
    if not hasattr(kernel, "configs") or kernel.fn is not _innermost(kernel):
        return ""
    hooks = (kernel.reset_to_zero, kernel.restore_value, kernel.user_defined_pre_hook, kernel.user_defined_post_hook)
    if any(hooks) or any(config.pre_hook is not None for config in kernel.configs):
        return ""
    try:
        rows = [
            [{name: _write(value) for name, value in config.kwargs.items()}, [getattr(config, s) for s in _SETTINGS]]
            for config in kernel.configs
        ]
        return json.dumps([rows, list(kernel.keys)])
    except (NoKernelText, TypeError, AttributeError):
        return ""


def _of_module(name: KernelName) -> Iterator[Any]:
    """The kernels in its module, if that is imported, and the one of its name with the configurations around it."""
    module = sys.modules.get(name.module)
    found: Any = module
    for part in name.name.split("."):
        found = getattr(found, part, None)
    yield from [found, *vars(module).values()] if module is not None else []
    triton = sys.modules.get("triton")
    if name.configs and triton is not None and _is_kernel(found):
        rows, keys = json.loads(name.configs)
        configs = [
            triton.Config(
                {key: _read(value) for key, value in kwargs.items()}, **dict(zip(_SETTINGS, settings, strict=True))
            )
            for kwargs, settings in rows
        ]
        yield triton.autotune(configs=configs, key=keys)(_innermost(found))


@dataclass(frozen=True, slots=True)
class _Text:
    """Writes kernels; ``seen``: the ids of functions that have been written."""

    seen: set[int]

    def kernel(self, kernel: Any) -> Iterator[str]:
        while not isinstance(kernel.fn, types.FunctionType):
            if hasattr(kernel, "configs"):
                yield from self._autotuner(kernel)
            else:
                yield f"heuristics {type(kernel).__name__}"
                for name, function in kernel.values.items():
                    yield from self._python(name, function)
            kernel = kernel.fn
        yield from self._function(kernel)

    def _autotuner(self, tuner: Any) -> Iterator[str]:
        yield f"autotuner {list(tuner.keys)} {tuner.reset_to_zero} {tuner.restore_value}"
        for config in tuner.configs:
            yield f"configuration {[getattr(config, setting, None) for setting in _SETTINGS]}"
            for name, value in config.kwargs.items():
                yield from self._value(name, value)
            yield from self._python("pre_hook", config.pre_hook)
        for hook in ("pre_hook", "post_hook"):
            if getattr(tuner, f"user_defined_{hook}"):
                yield from self._python(hook, getattr(tuner, hook))
        for chooser in ("perf_model", "early_config_prune"):
            yield from self._python(chooser, getattr(tuner, chooser, None))

    def _function(self, compiled: Any) -> Iterator[str]:
        """A function that Triton compiles, and all that it reads."""
        function = compiled.fn
        yield f"function {function.__module__}.{function.__qualname__}"
        if id(compiled) in self.seen:
            return
        self.seen.add(id(compiled))
        yield compiled.src
        yield from self._code(function.__code__)
        yield f"inline {getattr(compiled, 'noinline', None)}"
        for parameter in getattr(compiled, "params", ()):
            special = (getattr(parameter, s, None) for s in ("do_not_specialize", "do_not_specialize_on_alignment"))
            yield f"parameter {parameter.name} {[*special]}"
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not parameter.empty:
                yield from self._value(f"default of {name}", parameter.default)
        known = {**vars(builtins), **function.__globals__, **inspect.getclosurevars(function).nonlocals}
        yield from self._names(ast.parse(compiled.src), known)

    def _names(self, tree: ast.AST, known: Mapping[str, Any]) -> Iterator[str]:
        own = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        parameters = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}
        chains = {chain: None for node in ast.walk(tree) if (chain := _chain(node)) and chain[0] not in parameters}
        for chain in chains:
            if chain[0] not in known:
                continue
            value, rest = known[chain[0]], [*chain[1:]]
            while rest and not _has_text(value):
                value = getattr(value, rest.pop(0), None)
            if chain[0] in own and not _has_text(value):
                continue  # a variable of the function itself
            yield from self._value(".".join(chain), value)

    def _value(self, name: str, value: Any) -> Iterator[str]:
        if _is_compiled(value):
            yield name
            yield from self._function(value)
        elif isinstance(value, tuple | list):
            yield f"{name} {type(value).__name__} of {len(value)}"
            for item in value:
                yield from self._value(name, item)
        elif isinstance(value, types.FunctionType) and not _is_known(value):
            yield from self._python(name, value)
        elif _has_text(value):
            yield f"{name} {_plain_text(value)}"
        else:
            raise NoKernelText(f"a Triton kernel reads {name}, a {_kind(value)}")

    def _python(self, name: str, function: Any) -> Iterator[str]:
        """A function that runs in Python: its code, and the variables of enclosing functions that it reads."""
        if function is None:
            yield f"{name} None"
            return
        if not isinstance(function, types.FunctionType):
            raise NoKernelText(f"a Triton kernel has {name}, a {_kind(function)}")
        yield f"{name} {function.__module__}.{function.__qualname__}"
        if id(function) not in self.seen:
            self.seen.add(id(function))
            yield from self._code(function.__code__)
            for parameter, value in _defaults(function):
                yield from self._value(f"default of {parameter}", value)
            read = inspect.getclosurevars(function)
            inside = {v: function.__globals__[v] for v in _read_inside(function.__code__) if v in function.__globals__}
            for variable, value in {**inside, **read.globals, **read.nonlocals}.items():
                yield from self._value(variable, value)

    def _code(self, code: types.CodeType) -> Iterator[str]:
        yield f"code {code.co_code.hex()} {code.co_names} {code.co_varnames} {code.co_freevars}"
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield repr(constant)


def _defaults(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """What parameters are if a call leaves them out: often variables of the moment, as in ``lambda args, n=n: n``."""
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is not parameter.empty:
            yield name, parameter.default


def _read_inside(code: types.CodeType) -> Iterator[str]:
    """The global variables that functions and comprehensions within this one read."""
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from (step.argval for step in dis.get_instructions(constant) if step.opname == "LOAD_GLOBAL")
            yield from _read_inside(constant)


def _chain(node: ast.AST) -> tuple[str, ...]:
    """``a.b.c`` as a tuple; nothing for other expressions, and for names that are written."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or not isinstance(node.ctx, ast.Load):
        return ()
    return (node.id, *reversed(names))


def _is_compiled(value: Any) -> bool:
    return isinstance(getattr(value, "fn", None), types.FunctionType) and isinstance(getattr(value, "src", None), str)


def _is_kernel(value: Any) -> bool:
    """Whether this is a function that Triton compiles, within autotuners and heuristics or not."""
    while not _is_compiled(value):
        if not (hasattr(value, "configs") or hasattr(value, "values")) or not hasattr(value, "fn"):
            return False
        value = value.fn
    return True


def _is_constexpr(value: Any) -> bool:
    return type(value).__name__ == "constexpr" and type(value).__module__.startswith("triton.")


def _is_known(value: Any) -> bool:
    """Whether Triton's version, torch's or Python's names a function, a class, a module or a type of elements."""
    if isinstance(value, types.ModuleType):
        return value.__name__.split(".")[0] in _KNOWN_MODULES
    if type(value).__module__.split(".")[0] == "triton" and not callable(value):
        return True
    home = getattr(value, "__module__", None) or ""
    return callable(value) and home.split(".")[0] in (*_KNOWN_MODULES, "builtins")


def _has_text(value: Any) -> bool:
    if _is_constexpr(value):
        return _has_text(value.value)
    plain = value is None or isinstance(value, (*_NUMBERS, torch.dtype, tuple, list, types.FunctionType))
    return plain or _is_compiled(value) or _is_known(value)


def _plain_text(value: Any) -> str:
    if _is_constexpr(value):
        return f"constexpr {_plain_text(value.value)}"
    if isinstance(value, types.ModuleType):
        return f"module {value.__name__}"
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return repr(value)


def _write(value: Any) -> Any:
    if value is None or type(value) in _NUMBERS:
        return value
    if isinstance(value, tuple | list):
        return {type(value).__name__: [_write(item) for item in value]} if type(value) in (tuple, list) else _no(value)
    if isinstance(value, torch.dtype):
        return {"torch": str(value).removeprefix("torch.")}
    if _is_constexpr(value):
        return {"constexpr": _write(value.value)}
    if type(value).__name__ == "dtype" and type(value).__module__.startswith("triton."):
        return {"triton": value.name}
    if hasattr(value, "fn") and isinstance(value.fn, types.FunctionType):
        name = kernel_name(value)
        return {"kernel": [name.module, name.name, name.digest, name.configs]}
    return _no(value)


def _no(value: Any) -> Any:
    raise NoKernelText(f"a Triton kernel is given a {_kind(value)}")


def _kind(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _read(form: Any) -> Any:
    if not isinstance(form, dict):
        return form
    ((kind, body),) = form.items()
    reader = _READERS.get(kind)
    if reader is None:
        raise LookupError(f"a Triton kernel is given a value of the kind {kind!r}, which this version does not know")
    return reader(body)


def _torch_type(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise LookupError(f"this torch has no type of elements {name!r}")
    return found


def _of_triton(name: str) -> Any:
    triton = sys.modules.get("triton")
    if triton is None:
        raise LookupError("Triton is not imported in this process; import the module of the kernel first")
    return getattr(triton.language, name)


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda body: tuple(map(_read, body)),
    "list": lambda body: [*map(_read, body)],
    "torch": _torch_type,
    "constexpr": lambda body: _of_triton("constexpr")(_read(body)),
    "triton": lambda body: _of_triton("dtype")(body),
    "kernel": lambda body: find_kernel(KernelName(*body)),
}
