"""torch's own cache of guards and bytecode (``torch._dynamo.config.caching_precompile``), with our graphs in it."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

context = pytest.importorskip("torch._dynamo.precompile_context", reason="this torch keeps no guards and bytecode")
if not hasattr(context, "BackendCacheArtifact"):
    pytest.skip("this torch keeps what backends record in another form", allow_module_level=True)

FUNCTIONS = """
import torch

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return self.second(torch.nn.functional.gelu(self.first(x))) / self.calls

def in_two_graphs(x):
    y = x.sin() * 2
    torch._dynamo.graph_break()
    return (y + x).tanh()

def scale(by=3.0, *, power=2):
    return by ** power

def with_defaults(x):
    by = scale()
    torch._dynamo.graph_break()
    return x * by * scale(power=1)

def trained(call, model, sizes):
    found = []
    for rows in sizes:
        x = torch.linspace(-2, 2, rows * 8).reshape(rows, 8).requires_grad_()
        call(x).square().sum().backward()
        found.append(x.grad)
    return [*found, model.calls, *(p.grad for p in model.parameters())]
"""

PROGRAM = """
import json, logging, os, torch, aotkit
torch._dynamo.config.caching_precompile = True
from torch._dynamo import symbolic_convert
from torch._dynamo.package import DynamoCache
from functions import Model, in_two_graphs, trained, with_defaults

logging.getLogger("torch._dynamo").setLevel(logging.ERROR)
traced, run = [0], symbolic_convert.InstructionTranslator.run
def counted(self):
    traced[0] += 1
    return run(self)
symbolic_convert.InstructionTranslator.run = counted
recorder = aotkit.Recorder()

def compiled(function, dynamic=False, **options):
    backend = aotkit.make_backend(aotkit.Options(**options), recorder)
    return torch.compile(function, backend=backend, dynamic=dynamic)

def train(dynamic=False, **options):
    torch.manual_seed(0)
    model, like = Model(), Model()
    like.load_state_dict(model.state_dict())
    sizes = (6, 9) if dynamic else (6, 6)
    found = trained(compiled(model, dynamic, **options), model, sizes)
    for got, want in zip(found, trained(like, like, sizes), strict=True):
        torch.testing.assert_close(got, want)
    return found

def tell(values):
    reasons = [detail["reason"] for name, detail in recorder.events if name == "precompile.bypass"]
    print(json.dumps([traced[0], reasons, [v.detach().numpy().tobytes().hex() for v in values]]))
"""

SAVE = "\ntorch.compiler.save_cache_artifacts()\n"


@pytest.fixture
def python(tmp_path: Path, warm_python: Any) -> Any:
    """Runs the program in a process: how many frames Dynamo traced, what was not recorded and why, and bits."""
    (tmp_path / "functions.py").write_text(FUNCTIONS)

    def run(script: str) -> Any:
        (tmp_path / "program.py").write_text(PROGRAM + textwrap.dedent(script))
        folders = {"AOTKIT_CACHE_DIR": str(tmp_path / "ours"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch")}
        done = warm_python.run(["program.py"], cwd=tmp_path, env={**os.environ, **folders})
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamic", [True, False])
def test_a_second_process_trains_without_a_trace(python: Any, dynamic: bool) -> None:
    """A module, and a function of two graphs."""
    script = f"tell([*train(dynamic={dynamic}), compiled(in_two_graphs)(torch.linspace(-1, 1, 12))])"
    traced, reasons, first = python(script + SAVE)
    assert traced >= 3 and not reasons
    assert python(script) == [0, [], first]


def test_what_is_damaged_or_made_for_another_processor_is_compiled_again(python: Any) -> None:
    _, _, first = python("tell(train())" + SAVE)
    found = python("""
    from aotkit.driver import kept_by_torch
    read, found = kept_by_torch._read, []
    def damaged(key, content):
        return read(key, content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    def refused(key, content):
        raise aotkit.PackageError("no processor for it")
    for kept_by_torch._read in (damaged, refused):
        before = traced[0]
        found += train()
        assert traced[0] == before + 1
        torch._dynamo.reset()
    tell(found)
    """)
    assert found == [2, [], first * 2]


def test_what_belongs_to_one_process_is_not_recorded(python: Any) -> None:
    script = """
    from torch._dynamo.precompile_context import PrecompileContext
    found = []
    with torch.no_grad():
        for options in ({"cache": False}, {"freezing": True}, {"capture": False}, {}):
            call = compiled(Model().eval(), **options)
            call(torch.ones(2, 8))
            found.append(torch.tensor(len(PrecompileContext._backend_artifacts_by_key)))
            PrecompileContext.clear()
            torch._dynamo.reset()
    tell(found)
    """
    _, reasons, counts = python(script)
    assert "no cache" in reasons[0] and "freezing" in reasons[1] and len(reasons) == 2
    assert [int(text[:2], 16) for text in counts] == [0, 0, 0, 1]


@pytest.mark.parametrize("held_by", ["the module", "an argument"])
def test_guards_that_torch_could_not_read_back_are_not_recorded(python: Any, held_by: str) -> None:
    """torch writes of a guarded tensor's gradient only that it is missing, and a process that reads it ends in an
    error."""
    script = textwrap.dedent(f"""
    torch.manual_seed(0)
    model, x = Model(), torch.linspace(-1, 1, 16).reshape(2, 8)
    function = compiled(model)
    if "{held_by}" == "an argument":
        x.requires_grad_().square().sum().backward()
    else:
        model(x).sum().backward()
    function(x).sum().backward()
    tell([p.grad for p in model.parameters()])
    """)
    traced, reasons, first = python(script + SAVE)
    assert traced and len(reasons) == 1 and "gradient" in reasons[0]
    assert python(script) == [traced, reasons, first]


def test_numbers_of_modules_that_a_dynamic_compile_settles_are_kept(python: Any) -> None:
    """A norm's ``eps`` and ``momentum``, which Dynamo passes as tensors."""
    script = """
    torch.manual_seed(0)
    model = torch.nn.BatchNorm1d(3)
    tell([compiled(model, True, fallback="error")(torch.linspace(-1, 1, 12).view(4, 3)), model.running_mean])
    """
    traced, reasons, first = python(textwrap.dedent(script) + SAVE)
    assert traced == 1 and not reasons
    assert python(script) == [0, [], first]


def test_guards_on_defaults_are_read_back(python: Any) -> None:
    """Also those of a frame without a graph, for which no backend is called, before the first frame with one."""
    script = "tell([compiled(with_defaults)(torch.linspace(-1, 1, 12))])"
    traced, reasons, first = python(script + SAVE)
    assert traced == 3 and not reasons
    assert python(script) == [0, [], first]
