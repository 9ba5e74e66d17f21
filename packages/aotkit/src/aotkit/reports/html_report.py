"""One HTML page on what became of a function."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..environment import read_environment
from ..frontend.structured_trace import is_tracing, publish_artifact
from ..options import Options

__all__ = ["report"]


def report(
    fn: Callable[..., Any],
    *args: Any,
    path: str | Path = "report.html",
    calls: int = 10,
    options: Options | None = None,
    **kwargs: Any,
) -> Path:
    """Compile ``fn`` for these arguments, measure it, and write one HTML page to ``path``; returns the path.

        aotkit.report(model, batch, path="report.html")

    The page shows the graph as layers of the user's modules, every kernel with its code, its lines and its time, memory
    over one step, the stages of the compile, and what was refused or runs eagerly, and why. It loads nothing from
    elsewhere. A compile that fails has a page, too: as far as it came, and the error. ``calls`` steps are measured;
    with 0 nothing is, and the step runs only as often as it takes to compile it.

    Compiled for these very sizes, and not kept in the cache; Dynamo is reset. Gradients are computed but not
    accumulated into ``.grad``; anything else ``fn`` does to its arguments happens, at each of its calls.
    Raises ``TypeError`` if ``fn`` can't be called, and what it raises in eager mode.
    """
    from .page.collect import collect
    from .page.render import html_of

    if not callable(fn):
        raise TypeError(f"report takes a function or a module, and its arguments; {fn!r} can't be called")
    chosen = (options or read_environment().options()).patch(cache=False)
    target, page = Path(path), html_of(collect(fn, args, kwargs, chosen, calls))
    target.write_text(page, encoding="utf-8")
    if is_tracing():
        publish_artifact("report.html", lambda: page)
    return target
