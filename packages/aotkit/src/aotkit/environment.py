"""The one place where environment variables are read.

``AOTKIT_LOG``       comma-separated kinds to log: timing, graphs, ir, kernels, passes
``AOTKIT_DUMP``      a folder that gets a folder per graph, with a numbered file per stage
``AOTKIT_VERIFY``    ``1``: verify the IR between passes, and serialize, reload and then use the result of every stage
``AOTKIT_FUEL``      a number: how many optional rewrites may run before the rest is left out (to bisect a bad one)
``AOTKIT_DISABLE``   comma-separated names of passes to leave out
``AOTKIT_PROGRESS``  ``0``: no line on the terminal while a compile takes longer than two seconds
``AOTKIT_CACHE_DIR`` and ``AOTKIT_CACHE_KEY`` belong to ``aotkit_cache``: where entries live, and the signing key
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from .errors import UnknownOption
from .options import Options
from .recorder import LOG_KINDS

__all__ = ["Environment", "read_environment"]


@dataclass(frozen=True, slots=True)
class Environment:
    """The parsed variables."""

    log: frozenset[str] = frozenset()
    dump_dir: Path | None = None
    verify: bool = False
    fuel: int | None = None
    disable: frozenset[str] = frozenset()
    fallback: Literal["eager", "error"] = "eager"
    progress: bool = True

    def options(self) -> Options:
        """The options of a compile that says nothing else."""
        return Options(verify=self.verify, fuel=self.fuel, disable=self.disable, fallback=self.fallback)


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Parse the variables (default: the process's). Raises :class:`UnknownOption` on a value that means nothing."""
    env = os.environ if variables is None else variables
    log = _names(env.get("AOTKIT_LOG", ""))
    unknown = log - set(LOG_KINDS)
    if unknown:
        raise UnknownOption(f"AOTKIT_LOG knows {', '.join(LOG_KINDS)}; it does not know {', '.join(sorted(unknown))}")
    fuel = env.get("AOTKIT_FUEL", "")
    if fuel and not fuel.isdecimal():
        raise UnknownOption(f"AOTKIT_FUEL takes a whole number of rewrites, not {fuel!r}")
    verify = env.get("AOTKIT_VERIFY", "0") or "0"
    if verify not in ("0", "1"):
        raise UnknownOption(f"AOTKIT_VERIFY takes 0 or 1, not {verify!r}")
    progress = env.get("AOTKIT_PROGRESS", "1") or "1"
    if progress not in ("0", "1"):
        raise UnknownOption(f"AOTKIT_PROGRESS takes 0 or 1, not {progress!r}")
    fallback = env.get("AOTKIT_FALLBACK", "eager") or "eager"
    if fallback not in ("eager", "error"):
        raise UnknownOption(f"AOTKIT_FALLBACK takes eager or error, not {fallback!r}")
    dump = env.get("AOTKIT_DUMP", "")
    return Environment(
        log=log,
        dump_dir=Path(dump) if dump else None,
        verify=verify == "1",
        fuel=int(fuel) if fuel else None,
        disable=_names(env.get("AOTKIT_DISABLE", "")),
        fallback="error" if fallback == "error" else "eager",
        progress=progress == "1",
    )


def _names(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(",") if part.strip())
