"""Kernel objects on disk: the adapter between inductor-lower's object store and aotkit-cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from aotkit_cache import ArtifactCache, CacheError, CacheKey, CacheWarning, environment_parts, make_key, open_cache
from aotkit_cache.stores import DistributedStore

from .._notices import warn_user
from ..recorder import Recorder
from .collectives import RANKS_ARE_NO_PROCESSES
from .sources import replaced_sources

__all__ = ["CachedObjects", "open_graph_cache", "store_of_ranks"]


@dataclass(frozen=True, slots=True)
class CachedObjects:
    """Object code by the digest of what it was generated from (text, target, pass pipeline)."""

    cache: ArtifactCache

    def get(self, digest: str) -> bytes | None:
        """The object file, or ``None``."""
        if replaced_sources(again=True):
            return None
        entry = self.cache.get(_key(digest))
        return None if entry is None else entry.sections["object"]

    def put(self, digest: str, data: bytes) -> None:
        """Keep an object file."""
        if not replaced_sources(again=True):
            self.cache.put(_key(digest), {"object": data}, {})


def _key(digest: str) -> CacheKey:
    return make_key(kernels=digest, **environment_parts())


def open_graph_cache(recorder: Recorder, ranks: DistributedStore | None = None) -> ArtifactCache | None:
    """The cache in the default directory, told to ``recorder``; None, with a warning, if it can't be used.

    ``ranks``: a store that the ranks of the job have in common.
    """
    try:
        return open_cache(observer=recorder, shared=ranks)
    except CacheError as error:
        warn_user(f"nothing is kept between processes: {error}", CacheWarning)
        return None


def store_of_ranks(timeout: float) -> DistributedStore | None:
    """Over the store of the initialized process group, if this process is one of several ranks. ``timeout``: seconds
    to wait for another rank's compile."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() < 2:
        return None
    if distributed.get_backend() in RANKS_ARE_NO_PROCESSES:
        return None
    return DistributedStore(distributed.distributed_c10d._get_default_store(), lock_timeout=timeout)
