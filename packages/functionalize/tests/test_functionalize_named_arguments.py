"""Calls whose arguments are given by name do what calls by position do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from aotkit_functionalize.named_arguments import by_position

Check = Callable[..., Any]


def _written_part(parts: Callable[[Tensor], Any]) -> Callable[[Tensor], list[Tensor]]:
    def fn(x: Tensor) -> list[Tensor]:
        whole = x * 1
        parts(whole)[1].add_(1)
        return [whole]

    return fn


CALLS: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "chunk": _written_part(lambda x: torch.unsafe_chunk(input=x, chunks=2)),
    "split": _written_part(lambda x: torch.unsafe_split(input=x, split_size=2)),
    "sizes": _written_part(lambda x: x.unsafe_split_with_sizes(split_sizes=[3, 1])),
    "windows": _written_part(lambda x: x.unfold(dimension=0, size=1, step=2)),
    "blocks": _written_part(lambda x: torch.as_strided(input=x, size=(2, 2), stride=(8, 1), storage_offset=1)),
    "reshaped": _written_part(
        lambda x: torch.reshape(input=x.t(), shape=(-1,)).unsqueeze(dim=0).expand(size=(2, -1)) * 1
    ),
    "expanded": lambda x: [x.expand(size=(2, -1, -1)), torch.broadcast_to(input=x, size=(3, 4, 4))],
    "product": lambda x: [(x * 1).addbmm_(batch1=x.expand(2, 4, 4), batch2=x.expand(2, 4, 4))],
    "elements": lambda x: [(x * 1).index_put_(indices=(x.detach() > 0,), values=x.sum())],
    "draws": lambda x: [torch.bernoulli(input=x.t(), p=0.5)],
}


@pytest.mark.parametrize("name", CALLS)
def test_arguments_by_name_equal_eager(same_as_eager: Check, name: str) -> None:
    same_as_eager(CALLS[name], lambda: [torch.linspace(-1, 1, 16).view(4, 4)])


def test_what_has_no_position_stays_a_name() -> None:
    x = torch.ones(2, 2)
    assert by_position("unsafe_chunk", (), {"input": x, "dim": 1}) == ((x,), {"dim": 1})
    assert by_position("bernoulli", (x,), {"p": 0.5, "generator": None}) == ((x, 0.5), {"generator": None})
    assert by_position("no_operator", (x,), {"p": 0.5}) == ((x,), {"p": 0.5})
