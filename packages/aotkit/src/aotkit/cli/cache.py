"""The cache from outside: what is in it, why a graph was not, and entries as a file."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from aotkit_cache import ArtifactCache, CacheError, CacheKey, Transfer, explain, open_cache
from aotkit_cache.stores import EntryStat

from ..recorder import Recorder

__all__ = ["CacheRow", "load_cache", "rows", "save_cache", "why"]

Progress = Callable[[int, int], None]


def _silent(done: int, total: int) -> None:
    """No progress is shown."""


def save_cache(
    path: str | os.PathLike[str],
    *,
    recorder: Recorder | None = None,
    signing_key: bytes | str | None = None,
    progress: Progress = _silent,
) -> Transfer:
    """Write compiled graphs of the cache to one file, to ship to another machine of the same kind.

    Args:
        recorder: only what the compiles that it watched read or wrote; by default everything.
        signing_key: at least 16 secret bytes, or characters, that the other machine is told too; by default the
            cache's own, which another machine has only if both set ``AOTKIT_CACHE_KEY``.

    Returns what was written and what was left out, and why. Raises ``aotkit_cache.CacheError``.
    """
    keys: Iterable[str] | None = None
    if recorder is not None:
        events = [(name, fields) for name, fields in recorder.events if name in ("cache.hit", "cache.put")]
        keys = list(dict.fromkeys(str(fields["key"]) for _, fields in events))
    return open_cache().export_entries(path, keys=keys, signing_key=signing_key, progress=progress)


def load_cache(
    path: str | os.PathLike[str], *, signing_key: bytes | str | None = None, progress: Progress = _silent
) -> Transfer:
    """Put what :func:`save_cache` wrote into the cache. Entries that were not signed with the key are left out."""
    return open_cache().import_entries(path, signing_key=signing_key, progress=progress)


@dataclass(frozen=True, slots=True)
class CacheRow:
    """One entry for a listing. ``kind``: inference, training, kernels, or why it can't be read."""

    stat: EntryStat
    kind: str
    kernels: int


def rows(cache: ArtifactCache, progress: Progress = _silent) -> list[CacheRow]:
    """All entries, most recently used first."""
    found = []
    entries = cache.entries()
    for number, stat in enumerate(entries):
        progress(number, len(entries))
        try:
            entry, _ = cache.describe(stat.key)
        except CacheError as error:
            found.append(CacheRow(stat, str(error), 0))
            continue
        kernels = 0
        for part in ("forward", "backward"):
            kernels += _kernels(entry.meta.get(part))
        found.append(CacheRow(stat, str(entry.meta.get("kind", "kernels")), kernels))
    progress(len(entries), len(entries))
    return found


def _kernels(described: Any) -> int:
    """Of a graph of an entry, or of the parts that are recorded of it."""
    if not isinstance(described, dict):
        return 0
    parts = described.get("recorded", {}).get("parts", [described])
    return sum(int(part.get("report", {}).get("kernel_count", 0)) for part in parts)


def why(cache: ArtifactCache, digest: str = "") -> str:
    """Why a graph was compiled although others were there: how its key differs from the most similar older one.

    ``digest``: the first digits of an entry's key; by default the newest graph. Raises ``CacheError`` if there is none.
    """
    graphs = [row.stat for row in rows(cache) if row.kind in ("inference", "training")]
    graphs.sort(key=lambda stat: stat.last_used, reverse=True)
    chosen = next((stat for stat in graphs if stat.key.startswith(digest)), None)
    if chosen is None:
        raise CacheError(f"no compiled graph in the cache has a key that begins with {digest!r}")
    own = _key(cache, chosen.key)
    others = [_key(cache, stat.key) for stat in graphs if stat.key != chosen.key]
    if not others:
        return f"{chosen.key[:12]} is the only graph in the cache: there was nothing it could have been"
    nearest = min(others, key=lambda other: _distance(own, other))
    return f"{chosen.key[:12]} and the entry most like it, {nearest.digest[:12]}:\n{explain(nearest, own)}"


def _key(cache: ArtifactCache, digest: str) -> CacheKey:
    entry, _ = cache.describe(digest)
    return CacheKey.from_json(json.loads(zlib.decompress(entry.sections["key"])))


def _distance(a: CacheKey, b: CacheKey) -> tuple[int, int]:
    """Parts that differ, and places in them."""
    one, two = dict(a.parts), dict(b.parts)
    differing = [name for name in one.keys() | two.keys() if one.get(name) != two.get(name)]
    return len(differing), len(explain(a, b).splitlines())
