"""Entries of the cache among torch's cache artifacts: ``torch.compiler.save_cache_artifacts`` and its counterpart.

Note [Entries among torch's artifacts]
    What a process compiled or loaded is told to torch's list, as the entry is stored: signed with the key of this
    user's cache, or with ``AOTKIT_CACHE_KEY``. Another process believes an entry only if it has the same key; any
    other is left out with one notice, and its graph is compiled. Nothing of an entry is parsed before that. The class
    is registered when ``torch.compiler._cache`` is there, which is with torch itself.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from .._notices import warn_user

if TYPE_CHECKING:
    from aotkit_cache import ArtifactCache, CacheKey

__all__ = ["ARTIFACT_TYPE", "make_artifact_class", "record_entry"]

ARTIFACT_TYPE = "aotkit"


def record_entry(cache: ArtifactCache, key: CacheKey) -> None:
    """Tell torch's list of what this process compiled or loaded about the entry under ``key``."""
    module: Any = sys.modules.get("torch.compiler._cache")
    factory = getattr(module, "CacheArtifactFactory", None)
    if factory is None or ARTIFACT_TYPE not in factory._artifact_types:
        return
    from aotkit_cache import CacheError

    try:
        data = cache.envelope(key)
    except CacheError:  # the lookup has warned of this store
        return
    if data is not None:
        module.CacheArtifactManager.record_artifact(ARTIFACT_TYPE, key.digest, data)


def make_artifact_class(module: Any) -> type:
    """The class of our entries, made of that in torch's ``module`` and registered there."""

    class CachedGraph(module.CacheArtifact):  # type: ignore[misc, name-defined]
        """One entry; ``content`` is its signed envelope."""

        @staticmethod
        def type() -> str:
            """Names the kind among torch's."""
            return ARTIFACT_TYPE

        def populate_cache(self) -> None:
            """Put the entry into the cache of this process, or say why not."""
            from aotkit_cache import CacheError, CacheWarning, open_cache  # importing aotkit imports no other package

            try:
                open_cache().accept(self.content)
            except CacheError as error:
                warn_user(
                    f"an entry among torch's cache artifacts is left out, and what it is for is compiled: {error}. Set "
                    "AOTKIT_CACHE_KEY to the same secret where artifacts are saved and where they are loaded.",
                    CacheWarning,
                )

    registered: type = module.CacheArtifactFactory.register(CachedGraph)
    return registered
