"""Kernel objects on disk: the adapter between inductor-lower's object store and aotkit-cache."""

from __future__ import annotations

from dataclasses import dataclass

from aotkit_cache import ArtifactCache, CacheError, CacheKey, CacheWarning, environment_parts, make_key, open_cache

from .._notices import warn_user
from ..recorder import Recorder

__all__ = ["CachedObjects", "open_graph_cache"]


@dataclass(frozen=True, slots=True)
class CachedObjects:
    """Object code by the digest of what it was generated from (text, target, pass pipeline)."""

    cache: ArtifactCache

    def get(self, digest: str) -> bytes | None:
        """The object file, or ``None``."""
        entry = self.cache.get(_key(digest))
        return None if entry is None else entry.sections["object"]

    def put(self, digest: str, data: bytes) -> None:
        """Keep an object file."""
        self.cache.put(_key(digest), {"object": data}, {})


def _key(digest: str) -> CacheKey:
    return make_key(kernels=digest, **environment_parts())


def open_graph_cache(recorder: Recorder) -> ArtifactCache | None:
    """The cache in the default directory, told to ``recorder``; None, with a warning, if it can't be used."""
    try:
        return open_cache(observer=recorder)
    except CacheError as error:
        warn_user(f"nothing is kept between processes: {error}", CacheWarning)
        return None
