"""Dumps as files: a folder for each graph, numbered files in it, and pages that list them.

Nothing is ever written over: a second graph of the same name, of another process or of a later run, gets a folder with
a number of its own (``graph0``, ``graph0.1``).
"""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

__all__ = ["DumpFolder"]

_SUFFIXES = {"ir": ".ir", "passes": ".ir"}
_KNOWN = frozenset({".py", ".ir", ".ll", ".ttir", ".json", ".txt"})
_STYLE = (
    ":root{color-scheme:light dark}body{font:16px/1.6 system-ui,sans-serif;max-width:60rem;margin:2rem auto;"
    "padding:0 1rem}code{overflow-wrap:anywhere}li{margin:.2rem 0}"
)


class DumpFolder:
    """Where the dumps of one graph go. ``graph`` is its name, or empty for what belongs to none; ``about`` is told on
    the page. The folder is made by the first file. Safe under threads and processes."""

    def __init__(self, root: str | os.PathLike[str], graph: str = "", about: Mapping[str, str] | None = None) -> None:
        self.root, self.graph, self.about = Path(root), graph, dict(about or {})
        self.path: Path | None = None
        self._names: list[str] = []
        self._lock = threading.Lock()

    def write(self, name: str, kind: str, text: str) -> None:
        """Write the next file. ``name`` may begin with that of the graph, and may end in the suffix of its language."""
        short = name.removeprefix(f"{self.graph}-") if self.graph else name
        stem, suffix = os.path.splitext(short)
        if suffix not in _KNOWN:
            stem, suffix = short, _SUFFIXES.get(kind, ".txt")
        safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in stem)
        with self._lock:
            folder = self.path or self._make()
            self._write_new(folder, safe, suffix, text)
            _replace(folder / "index.html", _page(self.graph or folder.name, self.about, self._names))

    def _make(self) -> Path:
        self.root.mkdir(parents=True, exist_ok=True)
        self.path = _own_folder(self.root, self.graph) if self.graph else self.root
        if self.graph:
            (self.path / "about.json").write_text(json.dumps({"graph": self.graph, **self.about}, indent=1) + "\n")
            self._names.append("about.json")
            _replace(self.root / "index.html", _front_page(self.root))
        return self.path

    def _write_new(self, folder: Path, stem: str, suffix: str, text: str) -> None:
        """Into a file that is not there yet: where there is no folder of one graph's own, others may write, too."""
        for number in itertools.count(len(self._names) - bool(self.graph)):
            name = f"{number:02d}_{stem}{suffix}"
            try:
                with (folder / name).open("x") as file:
                    file.write(text)
            except FileExistsError:
                continue
            self._names.append(name)
            return


def _own_folder(root: Path, graph: str) -> Path:
    for number in itertools.count():
        path = root / (f"{graph}.{number}" if number else graph)
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise AssertionError  # there is always a next number


def _front_page(root: Path) -> str:
    """The folders of graphs, in the order in which they were made, with the user's line that each begins at."""
    found = list(root.glob("*/about.json"))
    items = []
    for path in sorted(found, key=lambda path: path.stat().st_mtime_ns):
        name = path.parent.name
        line = json.loads(path.read_text()).get("first line", "")
        items.append((f"{name}/index.html", name, line))
    return _listing("Compiled graphs", {}, items)


def _page(title: str, about: Mapping[str, str], names: Sequence[str]) -> str:
    return _listing(title, about, [(name, name, "") for name in names])


def _listing(title: str, about: Mapping[str, str], rows: Sequence[tuple[str, str, str]]) -> str:
    """``rows``: address, name, and what is said beside it."""
    from html import escape  # not in each process that compiles nothing

    lines = [f"<p>{escape(name)}: <code>{escape(value)}</code></p>" for name, value in about.items() if value]
    items = [
        f'<li><a href="{escape(address)}">{escape(name)}</a> <code>{escape(more)}</code></li>'
        for address, name, more in rows
    ]
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>\n"
        + "\n".join([*lines, "<ul>", *items, "</ul>"])
        + "\n</html>\n"
    )


def _replace(path: Path, text: str) -> None:
    """Readers, and writers of the same page in other processes, never meet half a page."""
    making = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    making.write_text(text)
    making.replace(path)
