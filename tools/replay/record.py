"""Compile the corpus and keep the texts: one line of JSON per case in a journal, so that a run can be cut off."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from aotkit_inductor_lower import LowerOptions, compile_graph
from tools.conformance.journal import Emit, read_journal, work_through

from .corpus import Captured, Case, capture

__all__ = ["PROCESSORS", "record", "texts_of"]

#: The host's own processor, and the kernels that a CUDA device gets (as Triton source).
PROCESSORS = ("host", "triton-interpreter")


class Texts:
    """The observer of a compile: keeps what is printed of each stage, in order."""

    def __init__(self) -> None:
        """Nothing is kept yet."""
        self.kept: list[tuple[str, str]] = []

    @contextmanager
    def stage(self, _name: str, /) -> Iterator[None]:
        """Stages are not timed here."""
        yield

    def event(self, _name: str, _fields: Mapping[str, object], /) -> None:
        """Events hold no text of a program."""

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """Keep the text of one product; not what single passes made of it, which follows from the others."""
        if kind == "passes":
            return
        self.kept.append((f"{kind} {name}", text()))


def texts_of(graph: Captured, processor: Any, *, verify: bool = False) -> dict[str, str]:
    """The printed programs and kernels of one graph for one processor, or the message with which it was refused.

    ``verify``: every level is verified and read back from its text after each pass that changed it.
    """
    texts, options = Texts(), LowerOptions(processor=processor, verify=verify)
    error = ""
    try:
        compile_graph(copy.deepcopy(graph.module), options=options, observer=texts)
    except Exception as caught:  # noqa: BLE001  # a refusal is part of what must not change
        error = f"{type(caught).__name__}: {caught}"
    found = {f"{number} {name}": text for number, (name, text) in enumerate(texts.kept)}
    return {**found, "refused": error} if error else found


def record(
    cases: Sequence[Case],
    journal: Path,
    processors: Sequence[str] = PROCESSORS,
    chunk: int = 100,
    *,
    verify: bool = False,
) -> None:
    """Work through the cases that the journal does not hold yet, in child processes."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def check(part: Sequence[Any], emit: Emit) -> None:
        torch._dynamo.config.capture_scalar_outputs = True
        torch._dynamo.config.capture_dynamic_output_shape_ops = True
        for case in part:
            emit(case, {})
            emit(case, _outcome(case, processors, verify))

    journal.parent.mkdir(parents=True, exist_ok=True)
    work_through(cases, journal, check, chunk=chunk)  # type: ignore[arg-type]


def _outcome(case: Case, processors: Sequence[str], verify: bool) -> dict[str, Any]:
    try:
        graphs = capture(case)
    except Exception as error:  # noqa: BLE001  # the same on both sides, and nothing of ours
        return {"kind": "absent", "reason": f"{type(error).__name__}: {error}"[:300]}
    texts = {
        f"{graph.part}, {processor}, {name}": text
        for graph in graphs
        for processor in processors
        for name, text in texts_of(graph, processor, verify=verify).items()
    }
    return {"kind": "recorded", "texts": texts}


def read(journal: Path) -> dict[str, dict[str, str]]:
    """Case to the name of a text to the text."""
    return {key: entry.get("texts", {}) for key, entry in read_journal(journal).items()}
