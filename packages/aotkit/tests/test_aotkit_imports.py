"""What a compile loads: only what it uses."""

from __future__ import annotations

import json
from typing import Any

SCRIPT = """
import json, sys, torch
import aotkit
options = {"cache": False, "fallback": "error"}
def compiled(x):
    return torch.compile(lambda x: (x * 2).sin().sum(), backend="aotkit", options=options)(x)
def loaded():
    names = ("scipy", "scipy.optimize", "aotkit_cudagraphs", "aotkit_partition")
    return [name for name in names if name in sys.modules]
compiled(torch.ones(3))
inference = loaded()
torch._dynamo.reset()
compiled(torch.ones(3, requires_grad=True)).backward()
print(json.dumps([inference, loaded()]))
"""


def test_a_compile_loads_no_solver_and_no_recordings_that_it_does_not_use(warm_python: Any) -> None:
    ran = warm_python.run(["-c", SCRIPT])
    assert ran.returncode == 0, ran.stderr[-2000:]
    inference, training = json.loads(ran.stdout.splitlines()[-1])
    assert "aotkit_partition" in inference  # it was compiled
    assert not {"scipy", "scipy.optimize", "aotkit_cudagraphs"} & {*inference, *training}
