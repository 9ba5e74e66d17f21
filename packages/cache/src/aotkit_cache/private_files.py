"""Files and directories that belong to one user only.

Note [Private by construction]
A cache holds code that will run, so whoever can write it can run code as its reader. Entries are signed; the
directory and the signing key are the other half: both must belong to the current user, nobody else may read the key
or write the directory. Modes are set explicitly after creation, because the process's umask can only take bits away.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from .errors import CacheError

_TAG_NAME = "CACHEDIR.TAG"
# The signature line is fixed by the Cache Directory Tagging Specification, so that backup tools skip the directory.
_TAG_TEXT = "Signature: 8a477f597d28d172789f06886806bc55\n# Cache of compiled artifacts, made by aotkit-cache.\n"


def current_user() -> int | None:
    """Effective user id, or None on systems without such ids."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def check_owner(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    """Refuse what belongs to another user (`CacheError`)."""
    user = current_user()
    if user is not None and status.st_uid != user:
        raise CacheError(
            f"{os.fspath(path)} belongs to user {status.st_uid}, not to the current user {user}; compiled code from "
            "another user is never loaded. Point AOTKIT_CACHE_DIR to a directory of your own"
        )


def absolute(path: str | os.PathLike[str]) -> Path:
    """`path` with its home directory written out, from the root (`CacheError` if there is no such place)."""
    try:
        return Path(path).expanduser().absolute()
    except (OSError, RuntimeError) as error:  # no working directory, no home: a container's user may have none
        raise CacheError(f"{os.fspath(path)} names no place: {error}; set AOTKIT_CACHE_DIR") from error


def private_directory(path: Path) -> Path:
    """Make `path` a 0700 directory of the current user, or check that it is one; return it.

    Raises:
        CacheError: it belongs to someone else, is no directory, can't be written where it has to be (a full disk), or
            holds other things and is open to others.
    """
    try:
        _make_or_adopt(path)
        tag = path / _TAG_NAME
        if not tag.exists():
            write_atomically(tag, _TAG_TEXT.encode())
    except OSError as error:
        raise CacheError(f"can't create or use the cache directory {path}: {error}") from error
    return path


def _make_or_adopt(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True)
        path.chmod(0o700)
    except FileExistsError:
        _adopt(path)


def _adopt(path: Path) -> None:
    status = os.stat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise CacheError(f"the cache directory {path} is not a directory")
    check_owner(status, path)
    if stat.S_IMODE(status.st_mode) & 0o077 == 0:
        return
    # Tightening a directory that holds other things (a home directory, say) would surprise its users.
    if not (path / _TAG_NAME).exists() and any(path.iterdir()):
        raise CacheError(
            f"{path} holds files that are not aotkit's and is open to other users, so it can't be made a private "
            f"cache directory; choose a new or empty one, for example {path / 'aotkit'}"
        )
    path.chmod(0o700)


def write_temporary(directory: str | os.PathLike[str], data: bytes) -> str:
    """Write `data` to a new 0600 file with a hidden name in `directory`; return its path."""
    path = os.path.join(os.fspath(directory), f".tmp-{secrets.token_hex(12)}")
    # Windows has neither the first nor modes of open files; without the second it would write line ends of its own.
    more = getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | more, 0o600)
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            if hasattr(os, "fchmod"):
                os.fchmod(descriptor, 0o600)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
    except BaseException:
        os.unlink(path)
        raise
    return path


def write_atomically(path: Path, data: bytes) -> None:
    """Replace `path` by a 0600 file that holds `data`; readers see the old or the new file, never a part."""
    temporary = write_temporary(path.parent, data)
    try:
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
