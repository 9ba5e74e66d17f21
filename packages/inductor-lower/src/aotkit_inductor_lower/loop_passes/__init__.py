"""From one nest per op to few kernels: inlining, fusion, local temporaries, order."""

from .choose_library_calls import choose_library_calls
from .driver import schedule_program
from .split_reductions import split_reductions

__all__ = ["choose_library_calls", "schedule_program", "split_reductions"]
