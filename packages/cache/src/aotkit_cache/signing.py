"""The secret that entries are signed with."""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import stat
from pathlib import Path

from .errors import CacheError
from .private_files import check_owner, write_temporary

SIGNATURE_BYTES = 32
KEY_ID_BYTES = 8
_KEY_FILE = "signing.key"
_MIN_KEY_BYTES = 16


class Signer:
    """Signs and checks with one key (HMAC-SHA256): bytes, or a text as in AOTKIT_CACHE_KEY. The key appears in no repr,
    error or entry. Raises `CacheError` for what is no key."""

    __slots__ = ("_template", "key_id")

    def __init__(self, key: bytes | str) -> None:
        if isinstance(key, str):
            key = key_from_text(key)
        elif not isinstance(key, bytes | bytearray | memoryview):
            raise CacheError(f"a signing key is bytes, or a text of 16 or more characters, not {type(key).__name__}")
        if len(key) < _MIN_KEY_BYTES:
            raise CacheError(f"a signing key needs at least {_MIN_KEY_BYTES} bytes, this one has {len(key)}")
        self._template = hmac.new(key, digestmod=hashlib.sha256)
        # Lets a reader tell "signed by someone else" from "damaged"; reveals nothing about the key.
        self.key_id = self.sign(b"aotkit-cache key id")[:KEY_ID_BYTES]

    def sign(self, *chunks: bytes | memoryview) -> bytes:
        """The signature over the concatenated chunks."""
        state = self._template.copy()
        for chunk in chunks:
            state.update(chunk)
        return state.digest()

    def matches(self, signature: bytes | memoryview, *chunks: bytes | memoryview) -> bool:
        """Whether `signature` is the one over the chunks (compared in constant time)."""
        return hmac.compare_digest(bytes(signature), self.sign(*chunks))


def key_from_text(text: str) -> bytes:
    """A signing key from a shared secret in text form, as in AOTKIT_CACHE_KEY (at least 16 characters)."""
    if len(text.strip()) < _MIN_KEY_BYTES:
        raise CacheError(f"the shared signing key needs at least {_MIN_KEY_BYTES} characters; see AOTKIT_CACHE_KEY")
    return hashlib.sha256(b"aotkit-cache shared key\0" + text.strip().encode()).digest()


def user_key(directory: Path) -> bytes:
    """The per-user key kept in `directory`, made on first use (32 random bytes, mode 0600).

    Raises:
        CacheError: the file belongs to someone else, others can read it, or it holds something else.
    """
    path = directory / _KEY_FILE
    try:
        if not path.exists():
            _create(path)
        text = _read(path)
    except OSError as error:
        raise CacheError(f"can't read or make the signing key {path}: {error}") from error
    try:
        key = bytes.fromhex(text.decode("ascii").strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise CacheError(f"the signing key {path} is damaged; delete it to get a new one (entries are then recomputed)")
    return key


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0))
    try:
        status = os.fstat(descriptor)
        check_owner(status, path)
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise CacheError(
                f"others may read the signing key {path}, so it proves nothing; delete it to get a new one"
            )
        return os.read(descriptor, 4096)
    finally:
        os.close(descriptor)


def _create(path: Path) -> None:
    """Publish a new key. A hard link fails where the name exists, so of several processes one wins for all."""
    temporary = write_temporary(path.parent, secrets.token_hex(32).encode() + b"\n")
    try:
        os.link(temporary, path)
    except FileExistsError:
        return  # another process was first; its key counts
    finally:
        os.unlink(temporary)
