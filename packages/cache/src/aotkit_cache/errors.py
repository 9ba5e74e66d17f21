"""What the cache raises and warns."""


class CacheError(Exception):
    """A store could not do what was asked.

    The message says what was asked, why it failed and what to do. `ArtifactCache` turns it into a miss
    (or an unwritten entry) with one `CacheWarning`; only direct users of a store see it raised.
    """


class Uncacheable(Exception):
    """A key ingredient has no canonical text, so no key that is safe to share can be made.

    Attributes:
        reason: which ingredient, what it is, and what to do about it.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class CacheWarning(UserWarning):
    """An entry or a store could not be used; the caller went on as if the cache were empty."""
