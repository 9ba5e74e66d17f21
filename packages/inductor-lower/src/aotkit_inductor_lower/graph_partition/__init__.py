"""Graphs with calls that no launch plan can hold: compiled in pieces around these calls.

Note [Compiled in pieces]
    A launch plan is data: kernels and ATen calls over buffers whose sizes follow from the inputs' sizes. A higher-order
    operator takes functions, a token orders effects, ``.item()`` gives a number that no input's size tells. Such calls
    stay nodes of an FX graph, and every stretch of ordinary nodes between two of them becomes one compiled graph that
    this FX graph calls. Sizes that depend on data are ordinary size symbols of the pieces that come after the call
    that makes them. Branches and loop bodies are compiled in the same way, once per distinct subgraph.
"""

from __future__ import annotations

from .run import PiecewiseGraph, compile_pieces
from .split_ops import needs_pieces

__all__ = ["PiecewiseGraph", "compile_pieces", "needs_pieces"]
