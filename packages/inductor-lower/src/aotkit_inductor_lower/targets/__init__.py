"""Machines that kernels are written for, one folder each. :mod:`.select` tells which one a graph is for."""
