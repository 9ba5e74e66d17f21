"""Kernels for other processors, run here: user-mode emulation (qemu) executes their machine code.

The object code of a program is linked for the other processor and called by a small server (``runner.c``), which the
emulator runs. Everything else of the program, its plan and its calls of ATen, runs in this process. :mod:`.plugin` runs
the CPU target's own tests that way.
"""
