"""A differential fuzzer: random programs over aliasing, mutation, views and gradients, run by eager and by aotkit.

    python -m tools.fuzz --programs 10000 --state fuzz.jsonl --table   # graphs run as captured; resumable
    python -m tools.fuzz --programs 10000 --state fuzz.jsonl --again   # those that failed, in the present code
    python -m tools.fuzz --programs 500 --lowering kernels             # through the full backend
    python -m tools.fuzz --planted --programs 400                      # is each planted bug found?

See `tools/fuzz/program.py` for what a program is, `tools/fuzz/compare.py` for what is compared, `tools/fuzz/cells.py`
for what has to be covered, and `tools/fuzz/planted.py` for the bugs that the fuzzer itself is tested with.
"""
