"""The machines that kernels are written for. A target renders, assembles and loads; it never walks a graph."""
