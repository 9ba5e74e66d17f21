"""Whether kernels can run on torch's own threads."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from ...native import ensure_llvm, symbol_address

__all__ = ["RUNTIME", "why_one_thread"]

#: What kernels call of the OpenMP runtime.
RUNTIME = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")


def why_one_thread(told: str | None = None, find: Callable[[str], object] = symbol_address) -> str:
    """Why generated kernels use one thread with this build of torch; empty if they can use torch's threads.

    ``told`` is what ``torch.__config__.parallel_info()`` says, ``find`` looks a function of this process up. A build
    whose operators run on a pool of another kind may have an OpenMP runtime in its process all the same, of NumPy's
    or oneDNN's: kernels would then run on threads that ``torch.set_num_threads`` does not know, so it is not entered.
    """
    ensure_llvm()
    pool = re.search(r"ATen parallel backend:\s*(.+)", torch.__config__.parallel_info() if told is None else told)
    if pool is not None and pool[1].strip().lower() != "openmp":
        return f"this torch runs its operators on another pool of threads than OpenMP's ({pool[1].strip()})"
    missing = [name for name in RUNTIME if not find(name)]
    if missing:
        return f"the OpenMP runtime of this torch has no {', '.join(missing)}"
    return ""
