"""Where the cache is, and the only place that reads environment variables."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ._observer import SILENT, Observer
from .artifact_cache import ArtifactCache
from .disk import DiskStore
from .distributed_store import DistributedStore
from .private_files import absolute, private_directory
from .signing import key_from_text, user_key
from .store import Store
from .tiered import TieredStore


@dataclass(frozen=True, slots=True)
class Environment:
    """What the environment says about the cache.

    Attributes:
        directory: AOTKIT_CACHE_DIR, else XDG_CACHE_HOME/aotkit, else ~/.cache/aotkit.
        signing_key: from AOTKIT_CACHE_KEY, a secret shared by a team (at least 16 characters); None if unset.
    """

    directory: Path
    signing_key: bytes | str | None = field(repr=False)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the variables (of this process unless given). Empty values count as unset.

    Raises:
        CacheError: AOTKIT_CACHE_KEY is set but too short to be a secret, or this user has no home directory.
    """
    variables = os.environ if variables is None else variables
    secret = variables.get("AOTKIT_CACHE_KEY")
    directory = variables.get("AOTKIT_CACHE_DIR")
    if directory:
        path = absolute(directory)
    else:
        base = variables.get("XDG_CACHE_HOME") or ""
        # The XDG specification says to ignore relative paths.
        path = (Path(base) if os.path.isabs(base) else absolute("~/.cache")) / "aotkit"
    return Environment(path, key_from_text(secret) if secret else None)


def default_cache_dir() -> Path:
    """Where the cache lives unless told otherwise: AOTKIT_CACHE_DIR, XDG_CACHE_HOME/aotkit or ~/.cache/aotkit."""
    return read_environment().directory


def open_cache(
    directory: str | os.PathLike[str] | None = None,
    *,
    signing_key: bytes | str | None = None,
    max_bytes: int | None = 4 << 30,
    shared: Store | None = None,
    observer: Observer = SILENT,
) -> ArtifactCache:
    """The artifact cache in a directory, with a remote store behind it if one is given.

    Args:
        directory: `default_cache_dir()` if not given.
        signing_key: AOTKIT_CACHE_KEY if not given, else a per-user key made in the directory.
        max_bytes: cap of the directory; least recently used entries go first.
        shared: a store shared with other users or machines (`FsspecStore`, `RedisStore`), written in the background, or
            with the other ranks of a job (`DistributedStore`), which may be waiting for the entry. Ranks on several
            machines need AOTKIT_CACHE_KEY, or refuse each other's entries.
        observer: told about hits, misses and puts.

    Raises:
        CacheError: the directory can't be used or belongs to another user, or the signing key is unusable.
        ValueError: `shared` without a key that the others have too.
    """
    environment = read_environment()
    signing_key = signing_key or environment.signing_key
    of_ranks = isinstance(shared, DistributedStore)  # of one user; where machines differ, entries are refused
    if shared is not None and signing_key is None and not of_ranks:
        raise ValueError(
            "a shared store needs a signing key that its other users have too: "
            "pass signing_key= or set AOTKIT_CACHE_KEY"
        )
    disk = DiskStore(directory or environment.directory, max_bytes=max_bytes)
    store: Store = disk if shared is None else TieredStore([disk, shared], background_writes=not of_ranks)
    return ArtifactCache(store, signing_key or user_key(disk.directory), observer=observer)


def own_signing_key() -> bytes | str:
    """What entries of the default cache are signed with: AOTKIT_CACHE_KEY, else the key of this user in its directory,
    which is made on first use.

    Raises:
        CacheError: the directory or the key can't be used.
    """
    environment = read_environment()
    return environment.signing_key or user_key(private_directory(environment.directory))


@contextlib.contextmanager
def fresh_cache(*, delete: bool = True) -> Iterator[Path]:
    """Context in which this process, and the processes it starts, use an empty cache of their own.

    It is a folder inside the default directory, on the same disk and as private; gives its path. For measurements of
    first compiles, and to look at what one program writes (`delete=False` leaves the folder there). It sets
    AOTKIT_CACHE_DIR, so all threads are concerned.

    Raises:
        CacheError: the default directory can't be used.
    """
    before = os.environ.get("AOTKIT_CACHE_DIR")
    folder = Path(tempfile.mkdtemp(prefix="fresh-", dir=private_directory(default_cache_dir())))
    os.environ["AOTKIT_CACHE_DIR"] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ["AOTKIT_CACHE_DIR"]
        else:
            os.environ["AOTKIT_CACHE_DIR"] = before
        if delete:
            shutil.rmtree(folder, ignore_errors=True)  # another process may still write to it


def environment_parts() -> dict[str, str]:
    """Key parts that name this installation: pass them to every `make_key(**environment_parts(), ...)`.

    They say which torch build, Python and kind of machine an artifact is for. Code generators add what they depend on
    themselves, such as CPU features or the version of their compiler.
    """
    import torch  # costs a second where a tool only lists the cache

    return {
        "env.torch": f"{torch.__version__} {torch.version.git_version}",
        "env.python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "env.system": f"{platform.system()} {platform.machine()}",
        "env.cpu_capability": torch.backends.cpu.get_cpu_capability(),
    }
