"""Entries of a cache as one file, to take along to another machine.

Note [Export file]
    magic      8 bytes   b"AOTKITCX"
    version    u32       of this layout
    count      u64       entries that follow
    per entry  u64       bytes of its envelope, then the envelope (Note [Envelope]); its digest is inside
Envelopes are signed with the key of the export, not that of the cache: a per-user key never leaves its directory, so
machines that exchange files share a secret. An import believes an entry as a lookup does (whole, genuine, from the key
it was told) and signs it anew with its own cache's key. A file of which anything is cut off is refused before the
first entry is kept.
"""

from __future__ import annotations

import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from .entry import MissReason, RejectedEntry, decode_entry, entry_digest, resign
from .errors import CacheError
from .private_files import write_temporary
from .signing import Signer
from .store import Store, peek

__all__ = ["Transfer", "export_entries", "import_entries"]

_MAGIC = b"AOTKITCX"
_VERSION = 1
_HEADER = struct.Struct("<8sIQ")
_LENGTH = struct.Struct("<Q")

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What became of the entries of an export or import.

    Attributes:
        keys: digests of the entries written to the file or kept in the cache.
        refused: (reason, count) of those left out: damaged, of another signing key, ...
    """

    keys: tuple[str, ...]
    refused: tuple[tuple[str, int], ...]

    def __str__(self) -> str:
        reasons = "".join(f"; {count} left out: {reason}" for reason, count in self.refused)
        return f"{len(self.keys)} entries{reasons}"


def export_entries(
    store: Store, own: Signer, other: Signer, path: str | os.PathLike[str], keys: Iterable[str], progress: Progress
) -> Transfer:
    """Write the entries of ``store`` under ``keys``, signed anew with ``other``, to a new file at ``path``."""
    done: list[str] = []
    refused: Counter[str] = Counter()
    wanted = list(dict.fromkeys(keys))
    target = Path(path).absolute()
    try:
        temporary = write_temporary(target.parent, b"")
        try:
            with open(temporary, "r+b", buffering=1 << 20) as file:
                file.write(_HEADER.pack(_MAGIC, _VERSION, 0))
                for number, key in enumerate(wanted):
                    progress(number, len(wanted))
                    envelope, reason = _envelope(store, own, other, key)
                    if envelope is None:
                        refused[reason] += 1
                        continue
                    file.write(_LENGTH.pack(len(envelope)))
                    file.write(envelope)
                    done.append(key)
                file.seek(0)
                file.write(_HEADER.pack(_MAGIC, _VERSION, len(done)))
            os.replace(temporary, target)
        finally:
            Path(temporary).unlink(missing_ok=True)  # gone already where the rename took place
    except OSError as error:
        raise CacheError(f"can't write the export {target}: {error}") from error
    progress(len(wanted), len(wanted))
    return Transfer(tuple(done), tuple(refused.items()))


def _envelope(store: Store, own: Signer, other: Signer, key: str) -> tuple[bytes | None, str]:
    """The entry under ``key`` signed with ``other``, or why there is none."""
    data = peek(store, key)
    if data is None:
        return None, MissReason.ABSENT.value
    try:
        decode_entry(key, data, own)
    except RejectedEntry as error:
        return None, error.reason.value
    return resign(data, other), ""


def import_entries(
    store: Store, own: Signer, other: Signer, path: str | os.PathLike[str], progress: Progress
) -> Transfer:
    """Keep the entries of the file at ``path`` that were signed with ``other``, signed anew with ``own``."""
    try:
        with open(path, "rb") as file:
            places = _places(file, os.fstat(file.fileno()).st_size)
            done: list[str] = []
            refused: Counter[str] = Counter()
            for number, (offset, length) in enumerate(places):
                progress(number, len(places))
                file.seek(offset)
                data = file.read(length)
                try:
                    digest = entry_digest(data, other)
                except RejectedEntry as error:
                    refused[error.reason.value] += 1
                    continue
                store.put(digest, resign(data, own))
                done.append(digest)
            progress(len(places), len(places))
    except OSError as error:
        raise CacheError(f"can't read the export {os.fspath(path)}: {error}") from error
    return Transfer(tuple(done), tuple(refused.items()))


def _places(file: BinaryIO, size: int) -> list[tuple[int, int]]:
    """Offset and length of each envelope, if the file is whole."""
    header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise CacheError("this file is no export of a compile cache")
    _, version, count = _HEADER.unpack(header)
    if version != _VERSION:
        raise CacheError(f"this export has format {version}; this version reads format {_VERSION}: export it again")
    places = []
    offset = _HEADER.size
    for _ in range(count):
        file.seek(offset)
        raw = file.read(_LENGTH.size)
        if len(raw) < _LENGTH.size:
            break
        (length,) = _LENGTH.unpack(raw)
        places.append((offset + _LENGTH.size, length))
        offset += _LENGTH.size + length
    if len(places) != count or offset != size:
        raise CacheError("this export is cut short or has bytes added; nothing was imported")
    return places
