"""A content-addressed, signed, pickle-free cache for compiled artifacts.

    key = make_key(graph=graph_text, options=options, **environment_parts())
    cache = open_cache()
    entry = cache.get_or_compute(key, lambda: ({"object": compile_it()}, {"symbol": "main"}))
    entry.sections["object"], entry.meta["symbol"]

The kinds of stores are in the module `stores`. What a name needs is imported when it is asked for: who loads a file of
its own from elsewhere needs the errors only.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .__about__ import __version__ as __version__

if TYPE_CHECKING:
    from .artifact_cache import ArtifactCache, CacheStats
    from .entry import Entry
    from .errors import CacheError, CacheWarning, Uncacheable
    from .explanation import explain
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

_HOMES = {
    name: home
    for home, names in {
        "artifact_cache": ("ArtifactCache", "CacheStats"),
        "entry": ("Entry",),
        "errors": ("CacheError", "CacheWarning", "Uncacheable"),
        "explanation": ("explain",),
        "key": ("CacheKey", "make_key"),
        "location": ("default_cache_dir", "environment_parts", "fresh_cache", "open_cache"),
        "signing": ("key_from_text",),
        "transfer": ("Transfer",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
