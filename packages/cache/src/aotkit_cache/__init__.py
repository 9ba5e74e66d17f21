"""A content-addressed, signed, pickle-free cache for compiled artifacts.

    key = make_key(graph=graph_text, options=options, **environment_parts())
    cache = open_cache()
    entry = cache.get_or_compute(key, lambda: ({"object": compile_it()}, {"symbol": "main"}))
    entry.sections["object"], entry.meta["symbol"]

Stores with extra dependencies are in their own modules: `aotkit_cache.fsspec_store.FsspecStore`,
`aotkit_cache.redis_store.RedisStore`.
"""

from .__about__ import __version__ as __version__
from .artifact_cache import ArtifactCache, CacheStats
from .disk import DiskStore
from .entry import Entry
from .errors import CacheError, CacheWarning, Uncacheable
from .explain import explain
from .key import CacheKey, make_key
from .location import default_cache_dir, environment_parts, open_cache
from .store import MemoryStore, Store
from .tiered import TieredStore

__all__ = [
    "ArtifactCache",
    "CacheError",
    "CacheKey",
    "CacheStats",
    "CacheWarning",
    "DiskStore",
    "Entry",
    "MemoryStore",
    "Store",
    "TieredStore",
    "Uncacheable",
    "default_cache_dir",
    "environment_parts",
    "explain",
    "make_key",
    "open_cache",
]
