"""Where compiled programs are kept, and under which digest."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import torch

from ..__about__ import __version__
from ..native import code_generator

__all__ = ["ObjectStore", "compilers", "program_digest"]


class ObjectStore(Protocol):
    """Keeps compiled programs by digest."""

    def get(self, digest: str) -> bytes | None:
        """What was put, or ``None``."""

    def put(self, digest: str, data: bytes) -> None:
        """Keep."""


def program_digest(target: str, text: str) -> str:
    """The digest under which a compiled program is kept: of its ``text``, what it was compiled for, and with what."""
    parts = (_generator_digest(), torch.__version__, compilers(), target, text)
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()


@cache
def compilers() -> str:
    """The versions of the compilers that kept code comes from: another one may cure a fault of this one.

    Triton's is read of its source, since importing it takes longer than a cache hit.
    """
    found = find_spec("triton")
    source = None if found is None or found.origin is None else Path(found.origin)
    text = source.read_text(encoding="utf-8") if source is not None and source.is_file() else ""
    version = re.search(r"""^__version__ = ['"]([^'"]+)""", text, re.MULTILINE)
    return f"{code_generator()}, Triton {version.group(1) if version else hashlib.sha256(text.encode()).hexdigest()}"


@cache
def _generator_digest() -> str:
    """Digest of this package's own sources, so that no object outlives the code that generated it.

    A version number would do for releases; in a checkout it would serve yesterday's bug today.
    """
    sources = hashlib.sha256(__version__.encode())
    for path in sorted(Path(__file__).parent.parent.rglob("*.py")):
        sources.update(path.read_bytes())
    return sources.hexdigest()
