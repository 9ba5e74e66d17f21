"""Where the buffers of a program live, and the plan that says so.

Storage classes are known before kernels are generated; the plan is built behind them, from the program, the storage and
the frame entries that the kernels use. Nothing here knows the text of a kernel.
"""
