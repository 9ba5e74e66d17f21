"""How often a call enters the OpenMP runtime, counted at run time."""

from __future__ import annotations

import json
from typing import Any

import pytest

from aotkit_inductor_lower.targets.cpu import host_machine

_SCRIPT = """
import ctypes, json
import torch, torch.nn.functional as F
from llvmlite import binding

torch.set_num_threads(2)
kind = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
real, seen = kind(("GOMP_parallel", ctypes.CDLL(None))), []

def region(body, data, threads, flags):
    seen.append(threads)
    real(body, data, threads, flags)

counted = kind(region)
from torch.fx.experimental.proxy_tensor import make_fx
from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.ir import BufferKind
from aotkit_inductor_lower.targets.cpu import host_machine
host_machine()
binding.add_symbol("GOMP_parallel", ctypes.cast(counted, ctypes.c_void_p).value)

programs = {
    "softmax": lambda x: (x.softmax(-1),),
    "log_softmax": lambda x: (torch.log_softmax(x * 3, -1),),
    "softmax and norm": lambda x: (F.layer_norm(x.softmax(-1), (x.shape[-1],), eps=1e-12),),
    "columns": lambda x: (x.softmax(0),),
}
found = {}
for name, f in programs.items():
    x = torch.randn(256, 1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    compiled = compile_graph(make_fx(f, decompositions(), tracing_mode="fake")(x))
    seen.clear()
    (y,) = compiled([x])
    torch.testing.assert_close(y, f(x)[0])
    rows = [b.name for b in compiled.program.buffers if b.kind is BufferKind.SCRATCH]
    found[name] = [list(seen), compiled.report().kernel_count, len(rows)]
print(json.dumps(found))
"""


@pytest.mark.covers("F5h.11")
def test_a_softmax_with_what_follows_is_one_parallel_region_with_its_rows_in_local_buffers(warm_python: Any) -> None:
    assert host_machine().threads
    done = warm_python.run(["-c", _SCRIPT])
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    regions, kernels, rows = found["softmax"]
    assert (regions, kernels, rows) == ([2], 1, 1)  # the exponentials of a row are kept beside the threads
    assert found["log_softmax"][:2] == [[2], 1]
    assert found["softmax and norm"] == [[2], 1, 2]
    assert len(found["columns"][0]) == found["columns"][1]  # a region per kernel, never one per stage
