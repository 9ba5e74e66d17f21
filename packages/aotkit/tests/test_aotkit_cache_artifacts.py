"""Entries of the cache among torch's own cache artifacts: they travel signed, and only genuine ones are kept."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import json, sys, warnings, torch, aotkit
def f(x): return (x.sin() * x).sum()
def run(options=None):
    recorder = aotkit.Recorder()
    x = torch.linspace(0, 1, 64, requires_grad=True)
    torch.compile(f, backend=aotkit.make_backend(aotkit.Options(), recorder))(x).backward()
    torch.testing.assert_close(x.grad, x.detach().cos() * x.detach() + x.detach().sin())
    return [name for name, _ in recorder.events if name.startswith("cache")]
"""
SAVE = """
run()
data, info = torch.compiler.save_cache_artifacts()
open("artifacts", "wb").write(data)
print(json.dumps(info.artifacts["aotkit"]))
"""
LOAD = """
data = open("artifacts", "rb").read()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    {change}
    info = torch.compiler.load_cache_artifacts(data)
told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
print(json.dumps([info.artifacts["aotkit"], run(), told]))
"""


@pytest.fixture
def python(tmp_path: Path, warm_python: Any) -> Any:
    def run(script: str, cache: str, key: str = "a secret of the whole team") -> Any:
        environment = {**os.environ, "AOTKIT_CACHE_DIR": str(tmp_path / cache), "AOTKIT_CACHE_KEY": key}
        done = warm_python.run(["-c", PROGRAM + textwrap.dedent(script)], cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_torchs_artifacts_take_our_entries_to_another_cache(python: Any) -> None:
    keys = python(SAVE, "one")
    loaded, events, told = python(LOAD.format(change="pass"), "two")
    assert len(keys) == 1 and loaded == keys and told == []
    assert events == ["cache.hit", "cache.loaded"]
    # What a second process loaded is among its own artifacts.
    assert python(SAVE, "two") == keys


@pytest.mark.parametrize("what", ["forged", "foreign"])
def test_an_entry_that_is_not_genuine_is_left_out_with_one_notice(python: Any, what: str) -> None:
    python(SAVE, "one")
    forge = """
    from torch.compiler._cache import CacheArtifactManager as Manager, CacheArtifactFactory as Factory
    ours = Manager.deserialize(data)["aotkit"][0]
    content = bytearray(ours.content)
    content[len(content) // 2] ^= 1
    Manager.record_artifact("aotkit", ours.key, bytes(content))  # torch's own checksum is right again
    data = Manager.serialize()[0]
    Manager.clear()
    """
    change = textwrap.indent(textwrap.dedent(forge), "    ").strip() if what == "forged" else "pass"
    key = "a secret of the whole team" if what == "forged" else "a secret of somebody else"
    _, events, told = python(LOAD.format(change=change), "two", key)
    assert events[0] == "cache.miss" and "cache.loaded" not in events
    assert len(told) == 1 and ("damaged or changed" if what == "forged" else "another signing key") in told[0]


def test_importing_aotkit_before_torch_registers_as_well(python: Any) -> None:
    script = """
    import subprocess
    code = "import sys, aotkit; early = 'torch' in sys.modules; import torch; from torch.compiler._cache import *; "
    code += "print([early, 'aotkit' in CacheArtifactFactory._artifact_types, 'torch._dynamo' in sys.modules])"
    print(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.lower().strip())
    """
    assert python(script, "one") == [False, True, False]
