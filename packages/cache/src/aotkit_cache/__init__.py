"""A content-addressed, signed, pickle-free cache for compiled artifacts.

    key = make_key(graph=graph_text, options=options, **environment_parts())
    cache = open_cache()
    entry = cache.get_or_compute(key, lambda: ({"object": compile_it()}, {"symbol": "main"}))
    entry.sections["object"], entry.meta["symbol"]

The kinds of stores are in the module `stores`.
"""

from .__about__ import __version__ as __version__
from .artifact_cache import ArtifactCache, CacheStats
from .entry import Entry
from .errors import CacheError, CacheWarning, Uncacheable
from .explain import explain
from .key import CacheKey, make_key
from .location import default_cache_dir, environment_parts, fresh_cache, open_cache
from .signing import key_from_text
from .transfer import Transfer

__all__ = [
    "ArtifactCache",
    "CacheError",
    "CacheKey",
    "CacheStats",
    "CacheWarning",
    "Entry",
    "Transfer",
    "Uncacheable",
    "default_cache_dir",
    "environment_parts",
    "explain",
    "fresh_cache",
    "key_from_text",
    "make_key",
    "open_cache",
]
