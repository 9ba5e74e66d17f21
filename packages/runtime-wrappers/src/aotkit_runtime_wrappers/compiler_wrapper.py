"""What stands around a compiler, in two halves: one before the compile, one around what came out of it.

Note [State of a wrapper]
    A wrapper often has to remember, from what it saw before the compile, what to do after it. If it kept that in
    itself, two compiles at once would mix. So ``pre_compile`` returns it beside the function and the arguments, and
    ``post_compile`` of the same compile is given it back; a wrapper that holds nothing else serves any number of
    compiles, from any number of threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .errors import CallingConventionError

__all__ = ["CompilerWrapper", "compile_wrapped"]

Compiler = Callable[[Any, list[Any]], Callable[..., Any]]


class CompilerWrapper:
    """Changes what a compiler gets and wraps what it returns; a subclass overrides the half that it needs.

    The compiler may be one of whole functions or one of single graphs: then ``fn`` is the graph. The names of the
    two methods are those of the wrappers of torch's AOTAutograd; see Note [State of a wrapper] for the difference.
    """

    def pre_compile(self, fn: Any, flat_args: list[Any], /) -> tuple[Any, list[Any], Any]:
        """What to compile instead of ``fn`` of ``flat_args``, and what :meth:`post_compile` has to know."""
        return fn, flat_args, None

    def post_compile(self, compiled: Callable[..., Any], state: Any, /) -> Callable[..., Any]:
        """What to call instead of ``compiled``; ``state`` is what :meth:`pre_compile` returned in this compile.

        Returning ``compiled`` itself costs nothing per call.
        """
        return compiled


def compile_wrapped(
    compiler: Compiler, fn: Any, flat_args: Sequence[Any], wrappers: Sequence[CompilerWrapper]
) -> Callable[..., Any]:
    """``compiler(fn, flat_args)`` with ``wrappers`` around it, the first one outermost.

    ``pre_compile`` runs in the order of ``wrappers``, each on what the one before it returned; ``post_compile`` in
    reverse order. So a call goes through the wrappers in their order, and through each where its own change of the
    arguments is in force. Raises what a wrapper or the compiler raises (then no ``post_compile`` runs, or no further
    one), and :class:`.CallingConventionError` for a half that does not return what it should.
    """
    args, states = list(flat_args), []
    for wrapper in wrappers:
        prepared = wrapper.pre_compile(fn, args)
        if not isinstance(prepared, tuple) or len(prepared) != 3:
            raise CallingConventionError(
                f"{type(wrapper).__name__}.pre_compile must return the function, the flat arguments and the state for "
                f"post_compile; it returned a {type(prepared).__name__}"
            )
        fn, args = prepared[0], list(prepared[1])
        states.append(prepared[2])
    compiled = _callable(compiler(fn, args), "the compiler")
    for wrapper, state in zip(reversed(wrappers), reversed(states), strict=True):
        compiled = _callable(wrapper.post_compile(compiled, state), f"{type(wrapper).__name__}.post_compile")
    return compiled


def _callable(value: Any, who: str) -> Callable[..., Any]:
    if not callable(value):
        raise CallingConventionError(f"{who} must return a callable; it returned a {type(value).__name__}")
    result: Callable[..., Any] = value
    return result
