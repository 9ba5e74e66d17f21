"""Compiles that are saved: by torch's own API and in files of ours, used by a second process as a user would."""

from __future__ import annotations

import json
import os
import textwrap
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit
from aotkit.artifact.values import NoForm
from aotkit.torch_api.save_compiled import _check_helpers

MODELS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide, self.narrow = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)
        self.act = nn.functional.gelu
        self.scale = 0.5
    def forward(self, x):
        return x + self.scale * self.narrow(self.act(self.wide(self.norm(x))))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(2))
        self.bn = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 4)
    def forward(self, x, labels=None, *, factor=1.0):
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.bn(x)) * factor
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

def make():
    torch.manual_seed(0)
    return Net()

def batch(rows=6):
    torch.manual_seed(rows)
    return torch.randn(rows, 16), torch.randint(0, 4, (rows,))

def steps(call, model, count=3):
    for number in range(count):  # by hand: torch's optimizers import Dynamo when they are made
        loss = call(model, *batch())["loss"]
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients):
                parameter -= 0.1 * gradient
    return [loss.detach(), *(p.detach().clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
"""


@pytest.fixture
def python(tmp_path: Path, warm_python: Any) -> Any:
    (tmp_path / "nets.py").write_text(MODELS)
    environment = {**os.environ, "AOTKIT_CACHE_DIR": str(tmp_path / "cache")}

    def run(script: str) -> Any:
        """The last line that the script prints, as JSON; it runs in a process of its own.

        Where it asks what is imported, nothing but torch was imported before.
        """
        environment["PYTHONPATH"] = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        program, asks = textwrap.dedent(script), "sys.modules" in script
        done = warm_python.run(["-c", program], cwd=tmp_path, env=environment, only_torch=asks)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


SAVE_TRAINING = """
import json, torch, aotkit, nets
torch._dynamo.config.enable_aot_compile = True  # off before torch 2.12
compiled = {call}
{save}
torch.save(nets.steps(compiled, nets.make()), "first")
eager = nets.steps(lambda model, *args: model(*args), nets.make())
for a, b in zip(torch.load("first"), eager): torch.testing.assert_close(a, b)
print("[]")
"""
LOAD_TRAINING = """
import json, sys, torch, aotkit
before = set(sys.modules)
import nets
{load}
found = nets.steps(compiled, nets.make())
same = [torch.equal(a, b) for a, b in zip(torch.load("first"), found, strict=True)]
new = sorted(set(sys.modules) - before)
print(json.dumps([all(same), len(same), new]))
"""
TORCHS = "torch.compile(nets.make(), fullgraph=True, backend='aotkit').forward.aot_compile((nets.batch(), {}))"
OURS = "aotkit.saved.compile_to_save(nets.make(), nets.batch())"
COMPILERS = ("aotkit_aot_trace", "aotkit_partition", "aotkit_inductor_lower.driver", "scipy")


def test_a_training_step_saved_by_torch_is_loaded_by_torch(python: Any) -> None:
    python(SAVE_TRAINING.format(call=TORCHS, save="compiled.save_compiled_function('net.pt')"))
    same, count, new = python(
        LOAD_TRAINING.format(
            load="with open('net.pt', 'rb') as file:\n    compiled = torch.compiler.load_compiled_function(file)"
        )
    )
    assert same and count > 15
    assert not {name for name in new if name.startswith(COMPILERS)}


def test_modules_that_dynamo_reads_under_its_own_names_are_found_by_torchs_loader(python: Any) -> None:
    """Dynamo makes an OrderedDict by a name for ``collections`` that torch's file does not explain."""
    records = """
        from collections import OrderedDict
        def f(x):
            found = OrderedDict()
            found["twice"], found["sum"] = x * 2, x.sum()
            return found
        """
    python(f"open('records.py', 'w').write({textwrap.dedent(records)!r}); print('[]')")
    python(
        """
        import torch, aotkit, records
        compiled = aotkit.saved.compile_to_save(records.f, (torch.ones(3, requires_grad=True),))
        compiled.save_compiled_function("records.pt")
        print("[]")
        """
    )
    kind, twice, gradient = python(
        """
        import json, torch, aotkit, records
        with open("records.pt", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file, f_globals=vars(records))
        x = torch.full((3,), 5.0, requires_grad=True)
        found = loaded(x)
        found["sum"].backward()
        print(json.dumps([type(found).__name__, found["twice"].tolist(), x.grad.tolist()]))
        """
    )
    assert (kind, twice, gradient) == ("OrderedDict", [10.0] * 3, [1.0] * 3)


@pytest.mark.parametrize("call", [TORCHS, OURS], ids=["aot_compile", "compile_to_save"])
def test_a_training_step_in_our_file_runs_without_dynamo_and_gives_the_same_bits(python: Any, call: str) -> None:
    python(SAVE_TRAINING.format(call=call, save="aotkit.saved.save_compiled_function(compiled, 'net.aotkit')"))
    same, count, new = python(LOAD_TRAINING.format(load="compiled = aotkit.saved.load_compiled_function('net.aotkit')"))
    assert same and count > 15
    never = ("torch._dynamo", "torch.fx.experimental.proxy_tensor", "torch._inductor", "sympy", *COMPILERS)
    assert not {name for name in new if name.startswith(never)}


EAGER_COLLECTOR = """
import gc, json, torch, nets, aotkit
compiled = aotkit.saved.compile_to_save(nets.Block(16), (torch.randn(6, 16),))
aotkit.saved.save_compiled_function(compiled, "net.aotkit")
load = aotkit.saved.load_compiled_function
collections = []
gc.callbacks.append(lambda phase, info: collections.append(info["generation"]))
gc.set_threshold(50, 1, 1)
kept = [[] for _ in range(200)]
before = len(collections)
collections.clear()
loaded = load("net.aotkit")
within = len(collections)
kept += [[] for _ in range(200)]
print(json.dumps([before, within, len(collections), gc.isenabled()]))
"""


def test_nothing_is_collected_while_a_file_is_loaded(python: Any) -> None:
    """One look through all objects of a process with torch's models in it takes longer than a load."""
    before, within, after, enabled = python(EAGER_COLLECTOR)
    assert before > 0 and within <= 2 < after and enabled  # what is due happens as soon as the load returns


def test_a_module_with_a_list_of_modules_is_saved_with_every_torch(python: Any) -> None:
    """Dynamo asks whether the list has an iterator; torch before 2.12 writes that down in another form."""
    python("""
    import torch, aotkit, nets
    compiled = aotkit.saved.compile_to_save(nets.make(), nets.batch(), {"factor": 1.0})
    aotkit.saved.save_compiled_function(compiled, "net.aotkit")
    print("[]")
    """)
    same = python("""
    import json, torch, aotkit, nets
    loaded = aotkit.saved.load_compiled_function("net.aotkit")
    model, eager = nets.make(), nets.make()
    torch.testing.assert_close(loaded(model, *nets.batch(), factor=1.0), eager(*nets.batch()))
    torch.testing.assert_close(dict(model.named_buffers()), dict(eager.named_buffers()))
    print(len(list(model.buffers())))
    """)
    assert same == 3


FUNCTION = """
import torch
CALLS = []
def function(x, n, table, flag=True, *, t=1.5):
    y = (x * n + table["a"][0]) @ table["w"]
    table["out"] = y
    if flag:
        y = y.sin() * t
    parts = x.new_ones(int(x.shape[0] * 0.7) + round(x.shape[0] ** 0.5))
    return {"r": y, "l": [x.shape[0], "k", (y.sum(0),)]}, torch.arange(x.shape[0]), parts
def arguments(rows):
    torch.manual_seed(rows)
    return torch.randn(rows, 4), 3, {"a": [torch.randn(4)], "w": torch.randn(4, 5, requires_grad=True)}
"""


@pytest.mark.parametrize("way", ["torch", "ours"])
def test_sizes_numbers_structures_and_side_effects_are_as_eager_has_them(python: Any, tmp_path: Path, way: str) -> None:
    (tmp_path / "functions.py").write_text(FUNCTION)
    python(f"""
    import torch, aotkit
    from functions import *
    torch._dynamo.config.enable_aot_compile = True  # off before torch 2.12
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aotkit").aot_compile((arguments(6), {{}}))
    if {way!r} == "torch": compiled.save_compiled_function("function")
    else: aotkit.saved.save_compiled_function(compiled, "function")
    print("[]")
    """)
    found = python(f"""
    import json, sys, torch, aotkit
    from functions import *
    if {way!r} == "torch":
        with open("function", "rb") as file:
            loaded = torch.compiler.load_compiled_function(file, f_globals=function.__globals__)
    else: loaded = aotkit.saved.load_compiled_function("function")
    for rows, t in ((6, 1.5), (7, 1.5), (2, 2.5)):
        ours, eager = arguments(rows), arguments(rows)
        found, expected = loaded(*ours, t=t), function(*eager, t=t)
        assert found[0]["l"].pop(1) == expected[0]["l"].pop(1) == "k"
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(ours[2]["out"], eager[2]["out"])
        found[0]["r"].square().sum().backward(), expected[0]["r"].square().sum().backward()
        torch.testing.assert_close(ours[2]["w"].grad, eager[2]["w"].grad)
    print(json.dumps("torch._dynamo" in sys.modules))
    """)
    assert found == (way == "torch")


def test_calls_that_were_not_compiled_are_refused_by_name(python: Any, tmp_path: Path) -> None:
    (tmp_path / "functions.py").write_text(FUNCTION)
    python("""
    import torch, aotkit, nets
    from functions import *
    torch._dynamo.config.enable_aot_compile = True  # off before torch 2.12
    f = torch.compile(function, fullgraph=True, dynamic=True, backend="aotkit").aot_compile((arguments(6), {}))
    aotkit.saved.save_compiled_function(f, "function")
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(nets.make(), nets.batch()), "net")
    print("[]")
    """)
    texts = python("""
    import json, torch, aotkit, nets
    from functions import *
    def refused(call, *args, **kwargs):
        try: call(*args, **kwargs)
        except aotkit.GuardError as error: return str(error)
        return "not refused"
    f, texts = aotkit.saved.load_compiled_function("function"), []
    x, n, table = arguments(6)
    texts.append(refused(f, x.double(), n, table))
    texts.append(refused(f, x[:1], n, table))
    texts.append(refused(f, x, n, {**table, "w": table["w"].detach()}))
    texts.append(refused(f, x, n, table, False))
    texts.append(refused(f, x, 2.5, table))
    texts.append(refused(f, x, n, {**table, "b": x}))
    with torch.no_grad(): texts.append(refused(f, x, n, table))
    texts.append(refused(f, x, n, table, t=float("nan")))
    net, model = aotkit.saved.load_compiled_function("net"), nets.make()
    net(model, *nets.batch())
    texts.append(refused(net, model.eval(), *nets.batch()))
    model.train().blocks[1].act = torch.tanh
    other = nets.make(); other.blocks[1].act = torch.tanh
    texts.append(refused(net, other, *nets.batch()))
    other = nets.make(); other.blocks[0].scale = 0.25
    texts.append(refused(net, other, *nets.batch()))
    other = nets.make(); other.blocks[0].register_forward_hook(lambda *a: None)
    texts.append(refused(net, other, *nets.batch()))
    texts.append(refused(net, nets.make(), *nets.batch(7)))
    print(json.dumps(texts))
    """)
    wanted = [
        "x has the dtype torch.float64",
        "the size of x in dimension 0 is 1",
        "table['w'] has the requires_grad False",
        "flag is False, and was compiled for True",
        "n is a builtins.float",
        "table has the keys ['a', 'w', 'b']",
        "whether gradients are on differs",
        "t is a NaN",
        "training is False",
        "blocks.1.act is <built-in method tanh",
        "blocks.0.scale is 0.25, and was compiled for",
        "_forward_hooks holds 1 items",
        "has the size 7 in dimension 0, and it was compiled for 6",
    ]
    assert [want for want, text in zip(wanted, texts, strict=True) if want not in text] == [], texts


def test_a_second_derivative_and_what_belongs_to_a_process_are_refused_with_what_to_do(tmp_path: Path) -> None:
    def cube(x: torch.Tensor) -> torch.Tensor:
        return (x * x * x).sum()

    x = torch.randn(3, requires_grad=True)
    compiled = aotkit.saved.compile_to_save(cube, (x,))
    aotkit.saved.save_compiled_function(compiled, tmp_path / "cube")
    loaded = aotkit.saved.load_compiled_function(tmp_path / "cube")
    (first,) = torch.autograd.grad(loaded(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"[sS]econd derivative|twice"):
        torch.autograd.grad(first.sum(), x)
    with pytest.raises(TypeError, match="aot_compile"):
        aotkit.saved.save_compiled_function(cube, tmp_path / "cube")
    frozen = aotkit.Options(freezing=True)
    with pytest.raises(Exception, match="'freezing' is for graphs of one process"):
        aotkit.saved.compile_to_save(cube, (x.detach(),), options=frozen)
    with pytest.raises(aotkit.PackageError, match="can't read"):
        aotkit.saved.load_compiled_function(tmp_path / "nothing")


DYNAMO: Any = None  # the name of its helpers in what it generates


def read_in_place() -> object:
    return DYNAMO.record_pregraph_bytecode_enter()


def read_from_a_variable() -> object:
    held = DYNAMO
    return held.record_pregraph_bytecode_exit(held.another_one())


@pytest.mark.parametrize(("code", "refused"), [(read_in_place, False), (read_from_a_variable, True)])
def test_helpers_of_dynamo_that_the_loader_has_not_are_found_behind_a_variable(code: Any, refused: bool) -> None:
    """As torch 2.15 writes them."""
    with pytest.raises(NoForm, match="helper another_one at run time") if refused else nullcontext():
        _check_helpers(code.__code__, "DYNAMO")


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: float = 1.5, *, by: float = 2.0) -> torch.Tensor:
        return (x + y) * by


def test_arguments_that_were_left_to_their_defaults_have_to_be_again(tmp_path: Path) -> None:
    model, x = Scaled(), torch.ones(3)
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(model, (x,)), tmp_path / "scaled")
    loaded = aotkit.saved.load_compiled_function(tmp_path / "scaled")
    assert torch.equal(loaded(model, x), model(x))
    with pytest.raises(aotkit.GuardError, match="the keys \\['by'\\]"):
        loaded(model, x, by=3.0)
