"""Triton's interpreter, with what it computes again and again computed once: for the tests, which run it for minutes.

A third of its time goes to types and shapes that are equal to thousands of others, and to looking through all of
``triton.language`` for what it replaces, at each call of a function of a kernel. What is computed stays the same.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

__all__ = ["quicken"]


def quicken(patch: Any) -> bool:
    """Replace parts of the interpreter by ``patch.setattr``, if it has been imported; says whether it was.

    A version of Triton that has other parts keeps them.
    """
    interpreter, core = (sys.modules.get(f"triton.{name}") for name in ("runtime.interpreter", "language.core"))
    if interpreter is None or core is None:
        return False
    if _takes(getattr(interpreter, "_patch_builtin", None), "pkg", "builder", "scope"):
        _look_once(interpreter, core, patch)
    if _takes(getattr(interpreter, "_get_np_dtype", None), "tt_dtype"):
        _know_types(interpreter, core, patch)
    if _takes(core.tuple.__init__, "self", "args", "type") and _takes(core.tuple.__getattr__, "self", "name"):
        _name_no_tuples(core, patch)
    if _takes(core.block_type.__init__, "self", "element_ty", "shape"):
        _keep_blocks(core, patch)
    if _takes(core.tensor.__init__, "self", "handle", "type"):
        _keep_shapes(core, patch)
    return True


def _takes(function: Any, *names: str) -> bool:
    return function is not None and tuple(inspect.signature(function).parameters) == names


def _look_once(interpreter: Any, core: Any, patch: Any) -> None:
    """The builtins of a module or class have the same names at each call; those that are replaced are none any more."""
    names = dict[Any, list[str]]()

    def replace_builtins(pkg: Any, builder: Any, scope: Any) -> None:
        if pkg not in names:
            names[pkg] = [name for name, member in inspect.getmembers(pkg) if core.is_builtin(member)]
        for name in names[pkg]:
            member = getattr(pkg, name)
            if core.is_builtin(member):
                interpreter._patch_attr(pkg, name, member, builder, scope)

    patch.setattr(interpreter, "_patch_builtin", replace_builtins)


def _know_types(interpreter: Any, core: Any, patch: Any) -> None:
    """The interpreter makes its table of numpy's types each time that it looks something up there."""
    find, found = interpreter._get_np_dtype, dict[tuple[type, str], Any]()

    def known(tt_dtype: Any) -> Any:
        element = tt_dtype.element_ty if isinstance(tt_dtype, core.block_type) else tt_dtype
        key = type(element), element.name
        if key not in found:
            found[key] = find(element)
        return found[key]

    patch.setattr(interpreter, "_get_np_dtype", known)


def _name_no_tuples(core: Any, patch: Any) -> None:
    """A tuple's type, with the text of all its elements, is made when somebody asks."""
    make, look = core.tuple.__init__, core.tuple.__getattr__

    def init(self: Any, args: Any, type: Any = None) -> None:
        if type is None:
            self.values = list(args)
        else:
            make(self, args, type)

    def ask(self: Any, name: str) -> Any:
        if name == "values":
            raise AttributeError(name)
        if name != "type":
            return look(self, name)
        self.type = core._type_for_tuple_values(self.values)
        return self.type

    patch.setattr(core.tuple, "__init__", init)
    patch.setattr(core.tuple, "__getattr__", ask)


def _keep_blocks(core: Any, patch: Any) -> None:
    """Types of blocks with the same elements and sizes have the same fields."""
    make, kept = core.block_type.__init__, dict[tuple[Any, ...], dict[str, Any]]()

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if not (isinstance(element_ty, core.dtype) and isinstance(shape, list | core.tuple)):
            return make(self, element_ty, shape)
        sizes = [size.value if isinstance(size, core.constexpr) else size for size in shape]
        key = (type(element_ty), element_ty.name, getattr(element_ty, "address_space", None), *sizes, *map(type, sizes))
        if key not in kept:
            make(self, element_ty, shape)
            kept[key] = dict(vars(self))
        vars(self).update(kept[key])

    patch.setattr(core.block_type, "__init__", init)


def _keep_shapes(core: Any, patch: Any) -> None:
    """And so have tensors."""
    make, kept = core.tensor.__init__, dict[tuple[int, ...], tuple[Any, Any]]()

    def init(self: Any, handle: Any, type: Any) -> None:
        key = tuple(type.shape) if type.is_block() else ()
        if key not in kept:
            make(self, handle, type)
            kept[key] = self.shape, self.numel
        self.shape, self.numel = kept[key]
        self.handle, self.type, self.dtype = handle, type, type.scalar

    patch.setattr(core.tensor, "__init__", init)
