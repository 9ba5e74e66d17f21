"""The sources of what decides what a graph becomes, as a part of cache keys.

Note [Sources that are replaced]
    A version number would do for releases; in a checkout it would serve yesterday's bug today, so keys name what the
    source files hold. They are read at the first key, and the modules that run were imported before: an upgrade while a
    long job runs (``pip install -U``) may come in between, and behind the first key modules that are imported late are
    new ones. What such a process compiles is of neither version, so it uses no cache, and says so once.

    At the first key a file must not be newer than our import. Its time is that of its last change on this file system
    (``ctime``), which no installer sets: a wheel's files may be of 1980, and those that ``rsync`` or ``tar`` write as
    old as they were elsewhere. Later, before anything is written, each file must be the one that was read, by its
    place, size and time, which asks no clock; nor does the file that was imported first. All of it only looks, so it
    works where nothing can be written. Sources in an archive are not looked at: there is no cache for them, nor for
    modules that have none, as where compiled code alone was installed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from functools import lru_cache

from aotkit_cache import CacheWarning

from .. import _import_time
from .._notices import warn_user

__all__ = ["replaced_sources", "sources_digest"]

_OUR_PACKAGES = (
    "aotkit",
    "aotkit_functionalize",
    "aotkit_aot_trace",
    "aotkit_partition",
    "aotkit_runtime_wrappers",
    "aotkit_inductor_lower",
)
_COARSE = 20_000_000  # nanoseconds that the time of a file may be behind the clock


@dataclass(frozen=True, slots=True)
class _Sources:
    """The files of packages as they were when they were read. ``doubt``: why they may not be what runs."""

    digest: str
    files: tuple[tuple[str, tuple[int, ...]], ...]
    doubt: str


def sources_digest(packages: tuple[str, ...] = _OUR_PACKAGES) -> str:
    """Digest of the sources of what decides what a graph becomes, as they were at the first call."""
    return _read(packages).digest


def replaced_sources(again: bool = False) -> str:
    """Why the sources may not be those that this process runs, told to the user once; ``""`` if they are.

    ``again``: look whether they are still those that were read.
    """
    sources = _read(_OUR_PACKAGES)
    doubt = sources.doubt or (_changed(sources) if again else "")
    if doubt:
        _tell(doubt)
    return doubt


@lru_cache(maxsize=1)
def _tell(_doubt: str) -> None:
    warn_user(f"nothing is kept between processes, and nothing that was kept is used: {_doubt}", CacheWarning)


@lru_cache(maxsize=2)
def _read(packages: tuple[str, ...]) -> _Sources:
    digest, doubt = hashlib.sha256(), ""
    files: list[tuple[str, tuple[int, ...]]] = []
    for path, name in _files(packages):
        if path.endswith(os.sep):  # a folder that is none
            doubt = doubt or f"the sources of aotkit are in an archive ({path})"
            continue
        digest.update(name.encode() + b"\0")
        try:
            file = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))  # every start reads them all
        except FileNotFoundError:
            doubt = doubt or f"{path} was removed while it was to be read"
            continue
        try:
            found = os.fstat(file)
            while part := os.read(file, 1 << 20):
                digest.update(part)
        finally:
            os.close(file)
        files.append((path, _import_time.identity_of(found)))
        if _last_change(found) > _import_time.IMPORTED_AT - _COARSE:
            doubt = doubt or f"{path} is newer than this process's import of aotkit; start again to use the cache"
    if _import_time.identity(_import_time.__file__) != _import_time.FIRST_FILE:
        doubt = (
            doubt or "the files of aotkit were replaced since this process imported it; start again to use the cache"
        )
    return _Sources(digest.hexdigest(), tuple(files), doubt or _without_source(packages, {path for path, _ in files}))


def _without_source(packages: tuple[str, ...], files: Set[str]) -> str:
    """Which module runs that is of none of the files: it was installed as compiled code alone, or removed since."""
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name.partition(".")[0] in packages and file and file not in files:
            return f"the module {name} has no source there ({file})"
    return ""


def _last_change(found: os.stat_result) -> int:
    """In nanoseconds. An archive of another time zone may have set the file's own time to one that is yet to come;
    Windows keeps no other."""
    return found.st_ctime_ns if os.name == "posix" else found.st_mtime_ns


def _changed(sources: _Sources) -> str:
    for path, identity in sources.files:
        if _import_time.identity(path) != identity:
            return f"{path} was replaced while this process runs; start again to use the cache"
    return ""


def _files(packages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The path and the name of each Python file; of a package in an archive, the path alone, with a separator."""
    for package in packages:
        found = importlib.util.find_spec(package)
        assert found is not None and found.submodule_search_locations is not None
        folder = next(iter(found.submodule_search_locations))
        if os.path.isdir(folder):
            yield from _files_within(folder)
        else:
            yield folder + os.sep, ""


def _files_within(folder: str, above: Set[tuple[int, int]] = frozenset()) -> Iterator[tuple[str, str]]:
    """Those of a folder that lies in others ``above``, which a link may lead back to."""
    status = os.stat(folder)
    if (here := (status.st_dev, status.st_ino)) in above:
        return
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.endswith(".py"):
            if entry.is_file():  # some editors lock a file with a link to nothing beside it
                yield entry.path, entry.name
        elif entry.name.isidentifier() and entry.name != "__pycache__" and entry.is_dir():
            yield from _files_within(entry.path, above | {here})
