"""A differential fuzzer: random programs over aliasing, mutation, views and gradients, run by eager and by aotkit.

    python -m tools.fuzz --programs 500 --seed 0 --lowering none

See `tools/fuzz/program.py` for what a program is and `tools/fuzz/compare.py` for what is compared.
"""
