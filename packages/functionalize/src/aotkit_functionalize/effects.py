"""Operations whose order is part of what the function does (printing, calls into objects): their tokens.

Note [Tokens are made where they are first needed]
    The functional mode gives each such operation a token and takes a new one back, so that the next one depends on
    it. Tokens never cross the border of the captured graph: a chain begins with ``prims._make_token`` at its first
    operation and ends with ``prims._sink_tokens``, which keeps it alive. Forward and backward have a chain each.
    Because a token is made on demand, one run suffices: nobody has to know beforehand that there are any.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["TokenChain", "finish_tokens", "ordered_effects"]


class TokenChain(dict[Any, torch.Tensor]):
    """The current token of each kind of effect; one that is asked for exists."""

    def __contains__(self, kind: object) -> bool:
        return True

    def __missing__(self, kind: Any) -> torch.Tensor:
        with compat.below_functionalization():
            token: torch.Tensor = torch.ops.prims._make_token.default()
        self[kind] = token
        return token


def _chain() -> TokenChain | None:
    mode = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FUNCTIONAL)
    tokens = None if mode is None else mode._tokens
    return tokens if isinstance(tokens, TokenChain) else None


def ordered_effects() -> tuple[str, ...]:
    """Names of the kinds of effects that have occurred since the functional layer was entered or finished."""
    chain = _chain()
    return () if chain is None else tuple(sorted(str(getattr(kind, "value", kind)) for kind in chain))


def finish_tokens() -> None:
    """End the chains: what comes next (the backward) begins its own."""
    chain = _chain()
    if not chain:
        return
    last = [compat.unwrap_inner(compat.inner_wrapper(t)) if _wrapped(t) else t for t in chain.values()]
    with compat.below_functionalization(), compat.disable_functional_mode():
        torch.ops.prims._sink_tokens.default(last)
    chain.clear()


def _wrapped(token: torch.Tensor) -> bool:
    return compat.is_inner_wrapper(compat.inner_wrapper(token))
