"""The bytes of one entry: a signed envelope around named binary sections.

Note [Envelope]
    magic        8 bytes   b"AOTKITCE"
    version      u32       of this layout
    key id       8 bytes   names the signing key, see Signer
    total        u64       bytes of the whole entry
    manifest     u64       bytes of the manifest
    manifest     JSON      {"key": {...}, "digest", "meta", "sections": {name: [offset, length, sha256]}}
    sections     bytes     offsets count from the end of the manifest
    signature    32 bytes  HMAC-SHA256 over everything before it
Integers are little endian. Nothing past the fixed header is looked at before the signature holds: not even the JSON
parser sees foreign bytes. The digest in the manifest must be the one asked for, otherwise a genuine entry
renamed to another key would be believed. The section hashes let tools check or share a single section; a read that
checked the signature need not check them again.
"""

from __future__ import annotations

import enum
import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from .errors import CacheError
from .key import CacheKey
from .signing import SIGNATURE_BYTES, Signer

JsonValue = None | bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"]

FORMAT_VERSION = 1
_MAGIC = b"AOTKITCE"
_HEADER = struct.Struct("<8sI8sQQ")
_MAX_PART_TEXT = 2000


class MissReason(enum.Enum):
    """Why a lookup gave nothing; the value is the sentence shown to people."""

    ABSENT = "no such entry"
    NOT_AN_ENTRY = "the stored bytes are not a cache entry"
    VERSION = "the entry has another format version"
    TRUNCATED = "the entry is cut short or has bytes added"
    FOREIGN_KEY = "the entry was signed with another signing key"
    DAMAGED = "the signature does not match: the entry was damaged or changed"
    WRONG_ADDRESS = "the entry belongs to another cache key"
    STORE = "the store could not be read"


class RejectedEntry(CacheError):
    """Stored bytes that are not a usable entry.

    Attributes:
        reason: one of `MissReason`.
    """

    def __init__(self, reason: MissReason) -> None:
        super().__init__(reason.value)
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Entry:
    """What was stored under a key.

    Attributes:
        digest: digest of the key.
        sections: name to contents.
        meta: JSON object that came with them.
    """

    digest: str
    sections: Mapping[str, bytes]
    meta: Mapping[str, JsonValue]

    @property
    def size(self) -> int:
        """Bytes of all sections together."""
        return sum(len(data) for data in self.sections.values())


def encode_entry(key: CacheKey, sections: Mapping[str, bytes], meta: Mapping[str, JsonValue], signer: Signer) -> bytes:
    """The envelope; equal arguments give equal bytes.

    Raises:
        TypeError: a section is not bytes, or `meta` is not JSON (NaN and infinities included).
    """
    table: dict[str, tuple[int, int, str]] = {}
    offset = 0
    for name, data in sections.items():
        if not isinstance(name, str) or not isinstance(data, bytes):
            raise TypeError(f"sections map str to bytes, but {name!r} is {type(data).__name__}")
        table[name] = (offset, len(data), hashlib.sha256(data).hexdigest())
        offset += len(data)
    manifest = {
        "digest": key.digest,
        "key": {name: _abbreviate(text) for name, text in key.parts},
        "meta": dict(meta),
        "sections": table,
    }
    try:
        # ASCII output: lone surrogates (odd file names) survive a round trip.
        text = json.dumps(manifest, separators=(",", ":"), allow_nan=False).encode("ascii")
    except (ValueError, TypeError) as error:
        raise TypeError(f"entry metadata must be plain JSON: {error}") from error
    total = _HEADER.size + len(text) + offset + SIGNATURE_BYTES
    body = b"".join([_HEADER.pack(_MAGIC, FORMAT_VERSION, signer.key_id, total, len(text)), text, *sections.values()])
    return body + signer.sign(body)


def decode_entry(digest: str, data: bytes, signer: Signer) -> Entry:
    """The entry in `data`, if it is whole, signed with our key, and stored for `digest`.

    Raises:
        RejectedEntry: with the reason why not.
    """
    manifest, start = _open_envelope(data, signer)
    if manifest["digest"] != digest:
        raise RejectedEntry(MissReason.WRONG_ADDRESS)
    sections = {
        name: data[start + offset : start + offset + length]
        for name, (offset, length, _) in manifest["sections"].items()
    }
    return Entry(digest, sections, manifest["meta"])


def entry_digest(data: bytes, signer: Signer) -> str:
    """The key digest that a whole entry signed with our key was stored for. Raises :class:`RejectedEntry`."""
    digest: str = _open_envelope(data, signer)[0]["digest"]
    return digest


def resign(data: bytes, signer: Signer) -> bytes:
    """A checked entry signed with another key; nothing else of it changes."""
    magic, version, _, total, manifest_length = _HEADER.unpack_from(data)
    body = _HEADER.pack(magic, version, signer.key_id, total, manifest_length) + data[_HEADER.size : -SIGNATURE_BYTES]
    return body + signer.sign(body)


def stored_key_parts(data: bytes, signer: Signer) -> dict[str, str]:
    """The key parts written in an entry, long texts abbreviated (to tell why a lookup missed it)."""
    parts: dict[str, str] = _open_envelope(data, signer)[0]["key"]
    return parts


def _open_envelope(data: bytes, signer: Signer) -> tuple[dict, int]:  # type: ignore[type-arg]
    """Check the fixed header and the signature; return the manifest and where the sections start."""
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise RejectedEntry(MissReason.NOT_AN_ENTRY)
    _, version, key_id, total, manifest_length = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise RejectedEntry(MissReason.VERSION)
    start = _HEADER.size + manifest_length
    if total != len(data) or start + SIGNATURE_BYTES > total:
        raise RejectedEntry(MissReason.TRUNCATED)
    if key_id != signer.key_id:
        raise RejectedEntry(MissReason.FOREIGN_KEY)
    view = memoryview(data)
    if not signer.matches(view[-SIGNATURE_BYTES:], view[:-SIGNATURE_BYTES]):
        raise RejectedEntry(MissReason.DAMAGED)
    return json.loads(data[_HEADER.size : start]), start


def _abbreviate(text: str) -> str:
    """Long parts (graph texts) stay recognizable without doubling the entry's size."""
    if len(text) <= _MAX_PART_TEXT:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
    return json.dumps(f"{text[: _MAX_PART_TEXT // 2]}... {len(text)} characters, sha256 {digest}")
