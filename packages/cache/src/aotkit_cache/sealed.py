"""One signed block of bytes: sections and metadata that travel by themselves, outside of a store.

    data = seal({"object": code}, {"symbol": "main"}, signing_key)
    unseal(data, signing_key).sections["object"]

The layout is that of an entry (Note [Envelope]). Without a key the signature proves only that nothing was damaged.
"""

from __future__ import annotations

from collections.abc import Mapping

from .entry import Entry, JsonValue, RejectedEntry, decode_entry, encode_entry
from .key import make_key
from .signing import Signer

__all__ = ["RejectedEntry", "seal", "unseal"]

_ADDRESS = make_key(kind="sealed")
_NO_SECRET = b"aotkit-cache: sealed without a key, which tells damage and nothing else"


def seal(sections: Mapping[str, bytes], meta: Mapping[str, JsonValue], signing_key: bytes | str | None = None) -> bytes:
    """The block. Raises ``TypeError`` for sections or metadata that an entry can't hold, ``CacheError`` for a key that
    is none."""
    return encode_entry(_ADDRESS, sections, meta, _signer(signing_key))


def unseal(data: bytes, signing_key: bytes | str | None = None) -> Entry:
    """What was sealed with the same key. Raises :class:`RejectedEntry`: nothing is parsed before the signature
    holds."""
    return decode_entry(_ADDRESS.digest, data, _signer(signing_key))


def _signer(signing_key: bytes | str | None) -> Signer:
    return Signer(_NO_SECRET if signing_key is None else signing_key)
