"""From one nest per op to few kernels: inlining, fusion, local temporaries, order."""

from .driver import schedule_program
from .records import FusionRecord

__all__ = ["FusionRecord", "schedule_program"]
