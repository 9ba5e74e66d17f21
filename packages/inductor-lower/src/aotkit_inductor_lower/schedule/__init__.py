"""From one nest per op to few kernels: inlining, fusion, local temporaries, order."""

from .driver import schedule_program
from .library_calls import choose_library_calls
from .records import FusionRecord
from .split import split_reductions

__all__ = ["FusionRecord", "choose_library_calls", "schedule_program", "split_reductions"]
