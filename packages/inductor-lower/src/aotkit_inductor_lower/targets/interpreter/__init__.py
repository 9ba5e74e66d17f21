"""Kernels that are not compiled: their text is what is kept, and the kernel IR's own interpreter runs it, on the CPU.

All up to the kernels is as for the CPU target. So where the two give different numbers, a renderer or what makes
machine code of its text is at fault, and where this one differs from eager, one of the stages before.
"""
