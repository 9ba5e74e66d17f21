"""Passes over the kernels of a program, for all targets."""
