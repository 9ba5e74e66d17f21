"""The adapters around a dense graph, bound into the namespace of emitted code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..boxed import BoxedCallable
from ..lazy_backward import LazyBackward
from ..overlap import refuse_new_aliases
from ..runtime import keep_values, own_outputs, wrong_count
from ..source import Source
from .call import SubclassCall
from .emit import emit_subclasses
from .runtime import ArgumentCheck, check_gradient_classes, symbolic_context, take_view, tangent_parts, witnesses

__all__ = ["AdaptedBackward", "bind_subclasses"]


class AdaptedBackward(LazyBackward):
    """The :class:`.LazyBackward` of a dense graph as one over the caller's values."""

    __slots__ = ("_adapter", "_lazy")

    def __init__(self, lazy: LazyBackward, adapter: Callable[[BoxedCallable, list[Any]], Any]) -> None:
        super().__init__(lazy.get, unreached=lazy.unreached)
        self._lazy, self._adapter = lazy, adapter

    def get(self) -> BoxedCallable:
        """The backward, compiled now if need be."""
        if self.compiled is None:
            self.compiled = self.around(self._lazy.get())
        return self.compiled

    def around(self, run: BoxedCallable) -> BoxedCallable:
        """``run``, a backward over dense tensors, inside of the adapter."""
        adapter = self._adapter

        def adapted(box: list[Any]) -> Any:
            return adapter(run, box)

        adapted._boxed_call = True  # type: ignore[attr-defined]
        return adapted


_RUNTIME: dict[str, Any] = {
    "_AdaptedBackward": AdaptedBackward,
    "_check_gradient_classes": check_gradient_classes,
    "_keep_values": keep_values,
    "_own_outputs": own_outputs,
    "_refuse_new_aliases": refuse_new_aliases,
    "_symbolic_context": symbolic_context,
    "_take_view": take_view,
    "_tangent_parts": tangent_parts,
    "_witnesses": witnesses,
    "_wrong_count": wrong_count,
}


def bind_subclasses(call: SubclassCall, namespace: dict[str, Any]) -> str:
    """The source of the adapters, which take over the compiled code of ``namespace`` when it is executed there."""
    out = Source()
    emit_subclasses(call, out)
    checks = {
        f"_check{i}": ArgumentCheck(subclass, i)
        for i, subclass in enumerate(call.boundary.inputs)
        if subclass is not None
    }
    namespace.update(_RUNTIME, _dense_forward=namespace["_forward"], **checks, **out.constants)
    return out.text
