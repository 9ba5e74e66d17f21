"""Passes over the loop IR, from one nest per op to few kernels. One file each, in the order of :mod:`..driver`."""
