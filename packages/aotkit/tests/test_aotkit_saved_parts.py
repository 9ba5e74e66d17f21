"""Graphs that are compiled in parts, in files: saved functions, training steps and packages, in a second process."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit
from aotkit_cache.sealed import seal, unseal
from aotkit_runtime_wrappers.errors import BackwardCompileError

PROGRAMS = """
import torch
from torch import nn
from torch._higher_order_ops import while_loop
from torch._higher_order_ops.scan import scan

class Held(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-0.5, 1, 9).reshape(3, 3))
        self.register_buffer("calls", torch.zeros(1))

class Branches(Held):
    def forward(self, x):
        self.calls.add_(1)
        y = torch.cond(x.sum() > 0, lambda x: (x @ self.w).sin() + 1, lambda x: (x @ self.w).cos() * 2, (x,)) * 3
        return y, y[:, ::2]

class Running(Held):
    def forward(self, x):
        last, rows = scan(lambda c, row: (c * 0.5 + row @ self.w, c.sin() + row), torch.zeros_like(x[0]), x)
        return last * 2, rows

class Positive(Held):
    def forward(self, x):
        at = torch.nonzero(x > 0)
        return x[at[:, 0], at[:, 1]].exp() * self.w.sum(), at

class Counted(Held):
    def forward(self, x):
        count = (x > 0).sum().item()
        torch._check(count <= 100)
        return torch.ones(count) * (self.w.sum() + x.sum())

MODELS = {cls.__name__: cls for cls in (Branches, Running, Positive, Counted)}
# torch 2.11 takes what the backward of such a scan is given for views of each other, and refuses it.
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
TRAINED = {name: cls for name, cls in MODELS.items() if name != "Running" or not OLD}

def inputs(sign=1.0, rows=4):
    return (torch.linspace(-1, 2, rows * 3).reshape(rows, 3) * sign).requires_grad_()

def observed(call, model, x):
    model.w.grad = None
    found = call(x)
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    losses = [(t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in found if t.requires_grad]
    if losses:
        sum(losses).backward()
    shared = [t.untyped_storage()._cdata == found[0].untyped_storage()._cdata for t in found]
    return [t.detach().clone() for t in (*found, model.calls)], [x.grad, model.w.grad], shared
"""
names: dict[str, Any] = {}
exec(PROGRAMS, names)
MODELS, inputs, observed = names["MODELS"], names["inputs"], names["observed"]

# Eager traces higher-order operators with Dynamo, which looks at the gradients of what it is given.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture(autouse=True)
def _captured_whole(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


@pytest.fixture
def python(tmp_path: Path, warm_python: Any) -> Callable[[str], dict[str, Any]]:
    """Runs a script beside the programs, in a process of its own; gives what it prints, as JSON.

    Where it asks what is imported, nothing but torch was imported before.
    """

    def run(script: str) -> dict[str, Any]:
        (tmp_path / "programs.py").write_text(PROGRAMS)
        program = f"import json, sys\nfrom programs import *\nimport aotkit\n{script}"
        env = {**os.environ, "AOTKIT_VERIFY": "0"}
        done = warm_python.run(["-c", program], cwd=tmp_path, env=env, only_torch="sys.modules" in script)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    return run


SAVE = """
torch._dynamo.config.capture_scalar_outputs = torch._dynamo.config.capture_dynamic_output_shape_ops = True
from aotkit.saved import compile_to_save, save_compiled_function
for name, cls in TRAINED.items():
    model = cls()
    save_compiled_function(compile_to_save(model, (inputs(),)), name)
    save_compiled_function(compile_to_save(model, (inputs(),), dynamic=True), f"{name} of any size")
for name in MODELS.keys() - TRAINED.keys():
    try:
        compile_to_save(MODELS[name](), (inputs(),))
    except aotkit.CompileError as refusal:
        assert "aliasing" in str(refusal)
    else:
        raise AssertionError(name)
print(1)
"""
LOAD = """
from aotkit.saved import load_compiled_function
runs = {}
for name, cls in TRAINED.items():
    call, model = load_compiled_function(name), cls()
    runs[name] = [observed(lambda x: call(model, x), model, inputs(sign)) for sign in (1.0, -1.0)]
    call, model = load_compiled_function(f"{name} of any size"), cls()
    runs[name] += [observed(lambda x: call(model, x), model, inputs(1.0, rows)) for rows in (4, 7)]
ours = ("aotkit_aot_trace", "aotkit_partition", "aotkit_inductor_lower.driver", "aotkit_inductor_lower.lowering")
loaded = [n for n in (*ours, "torch._dynamo.symbolic_convert", "aotkit.driver.compile") if n in sys.modules]
for name, cls in TRAINED.items():
    model = cls()
    wanted = [observed(model, model, inputs(sign)) for sign in (1.0, -1.0)]
    model = cls()
    wanted += [observed(model, model, inputs(1.0, rows)) for rows in (4, 7)]
    torch.testing.assert_close(runs[name], wanted)
print(json.dumps(loaded))
"""


def test_saved_functions_train_in_a_process_that_imports_no_stage(python: Callable[[str], Any]) -> None:
    python(SAVE)
    assert python(LOAD) == []


PACK = """
from torch.export import Dim
with torch.no_grad():
    for name, cls in MODELS.items():
        aotkit.aot_compile(cls().eval(), (inputs().detach(),), name)
        shapes = ({0: Dim("rows", min=2, max=64)},)
        aotkit.aot_compile(cls().eval(), (inputs().detach(),), f"{name} of any size", dynamic_shapes=shapes)
print(1)
"""
UNPACK = """
with torch.no_grad():
    for name, cls in MODELS.items():
        for file, calls in ((name, ((1.0, 4), (-1.0, 4))), (f"{name} of any size", ((1.0, 4), (-1.0, 9)))):
            package, model = aotkit.load(file), cls().eval()
            for sign, rows in calls:
                x = inputs(sign, rows).detach()
                torch.testing.assert_close(package(x), model(x))
                torch.testing.assert_close(package.weights["calls"], model.calls)
ours = ("aotkit_aot_trace", "aotkit_partition", "aotkit_inductor_lower.driver", "aotkit_inductor_lower.lowering")
print(json.dumps([name for name in ours if name in sys.modules]))
"""


def test_packages_run_in_a_process_that_imports_no_stage(python: Callable[[str], Any]) -> None:
    python(PACK)
    assert python(UNPACK) == []


STEP = """
from aotkit.saved import compile_step
model = Branches()
loss = lambda model, x: (model(x)[0].square().mean(),)
step = compile_step(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, (inputs().detach(),))
step.save("step")
print(1)
"""
TAKE = """
from aotkit.saved import load_step
step = load_step("step")
model, eager = Branches(), Branches()
step.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
optimizer = torch.optim.SGD(eager.parameters(), lr=0.1)
for sign in (1.0, -1.0, 1.0):
    x = inputs(sign).detach()
    (got,) = step(x)
    want = eager(x)[0].square().mean()
    want.backward()
    optimizer.step()
    optimizer.zero_grad()
    torch.testing.assert_close([got, model.w.detach(), model.calls], [want.detach(), eager.w.detach(), eager.calls])
print(1)
"""


def test_a_training_step_with_branches_is_saved(python: Callable[[str], Any]) -> None:
    assert python(STEP) == python(TAKE) == 1


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("parts")
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        made = aotkit.saved.compile_to_save(function, (torch.ones(4, 3, requires_grad=True), torch.ones(3, 3)))
    aotkit.saved.save_compiled_function(made, folder / "function")
    aotkit.aot_compile(MODELS["Branches"]().eval(), (torch.ones(4, 3),), folder / "package")
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, lambda x, w: (x @ w).sin() + 1, lambda x, w: (x @ w).cos(), (x, w)) * 3


def test_of_200_damaged_files_each_is_refused_or_gives_the_same(
    files: dict[str, bytes], tmp_path: Path, damaged: Callable[..., bytes]
) -> None:
    chance, x, w = random.Random(18), torch.linspace(-1, 2, 12).reshape(4, 3), torch.ones(3, 3)
    for count in range(200):
        kind = ("function", "package")[count % 2]
        (tmp_path / "file").write_bytes(damaged(files[kind], chance))
        try:
            load = aotkit.load if kind == "package" else aotkit.saved.load_compiled_function
            loaded = load(tmp_path / "file")
        except aotkit.PackageError:
            continue
        if kind == "package":  # fields of a zip archive that nobody reads
            torch.testing.assert_close(loaded(x), MODELS["Branches"]().eval()(x))
        else:
            torch.testing.assert_close(loaded(x.clone().requires_grad_(), w), function(x, w))


def changed(files: dict[str, bytes], change: Callable[[Any], object], name: str) -> bytes:
    """The saved function with a changed program in a file whose digests are right."""
    entry = unseal(files["function"])
    (section,) = [s for s in entry.sections if s.split("/")[-1] == name]
    raw = json.loads(entry.sections[section])
    change(raw)
    return seal({**entry.sections, section: json.dumps(raw).encode()}, entry.meta)


FORGED: dict[str, Callable[[Any], object]] = {
    "version": lambda raw: raw.update(version=99),
    "no parts": lambda raw: raw["record"].update(parts=[]),
    "no steps": lambda raw: raw["record"]["plan"].update(steps=[]),
    "a function of no table": lambda raw: raw["record"]["plan"]["steps"].append(
        {"record": "CallFunction", "target": "builtins.exec", "args": [{"record": "Plain", "value": "1/0"}]}
    ),
    "an argument that is no value": lambda raw: raw["record"]["plan"]["steps"].append(
        {"record": "CallFunction", "target": "aten.sin.default", "args": [{"record": "Code", "value": "1/0"}]}
    ),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_forged_program_is_refused_before_anything_of_it_runs(
    how: str, files: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(changed(files, FORGED[how], "forward"))
    with pytest.raises(aotkit.PackageError, match="can't be"):
        aotkit.saved.load_compiled_function(tmp_path / "file")
    (tmp_path / "file").write_bytes(changed(files, FORGED[how], "backward"))  # which is read when it is asked for
    call = aotkit.saved.load_compiled_function(tmp_path / "file")
    x = torch.ones(4, 3, requires_grad=True)
    result = call(x, torch.ones(3, 3))
    torch.testing.assert_close(result, function(x, torch.ones(3, 3)))
    with pytest.raises(BackwardCompileError, match="program in parts"):
        result.sum().backward()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda environment: environment.update(torch="2.9.0"), "compiled with torch 2.9.0"),
        (lambda environment: environment["features"].append("avx9000"), "features that this one"),
    ],
)
def test_a_file_for_another_torch_or_processor_says_so(
    files: dict[str, bytes], change: Callable[[Any], object], told: str, tmp_path: Path
) -> None:
    entry = unseal(files["function"])
    meta: Any = dict(entry.meta)
    change(meta["environment"])
    (tmp_path / "file").write_bytes(seal(entry.sections, meta))
    with pytest.raises(aotkit.PackageError, match=told):
        aotkit.saved.load_compiled_function(tmp_path / "file")
