"""FX graphs as pickle-free text."""

from .document import dump_graph, graph_constants, load_graph

__all__ = ["dump_graph", "graph_constants", "load_graph"]
