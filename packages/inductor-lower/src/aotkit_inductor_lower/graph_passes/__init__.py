"""Passes over the FX graph before lowering. One file per pass, run in a fixed order on a copy of the graph."""

from .runner import GRAPH_PASSES, GraphPass, pass_names, run_graph_passes

__all__ = ["GRAPH_PASSES", "GraphPass", "pass_names", "run_graph_passes"]
