"""Machines that kernels are written for, one folder each. :mod:`.select` tells which one a graph is for.

``LOADERS`` names, per target, the module whose function ``load`` makes functions of this process of a compiled program.
Loading one imports no target: neither its renderer nor what it knows of machines to compile for.
"""

from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["LOADERS"]

LOADERS: Mapping[str, str] = MappingProxyType(
    {
        "cpu": f"{__name__}.cpu.load",
        "interpreter": f"{__name__}.interpreter.load",
        "triton": f"{__name__}.triton.load",
    }
)
