"""The status that a segment returns: bits of errors, and above them the position of the launch that they are of."""

__all__ = ["INDEX_ERROR", "ZERO_DIVISION"]

INDEX_ERROR = 1
ZERO_DIVISION = 2
