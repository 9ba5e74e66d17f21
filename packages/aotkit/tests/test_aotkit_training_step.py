"""A whole training step, optimizer included, against eager, in this process and in a second one."""

from __future__ import annotations

import copy
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotkit

NETS = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(6, 12), nn.Linear(12, 3)
        self.bn = nn.BatchNorm1d(6)
    def forward(self, x):
        return self.narrow(torch.tanh(self.wide(self.bn(x))))

def make():
    torch.manual_seed(0)
    return Net().double()  # so that what Adam divides by is no rounding noise

def batch(number=0):
    torch.manual_seed(number)
    return torch.randn(8, 6, dtype=torch.float64), torch.randint(0, 3, (8,))

def loss(model, x, y):
    logits = model(x)
    return nn.functional.cross_entropy(logits, y), logits.argmax(1)
"""
exec(NETS)  # the same definitions here and in a second process
make, batch, loss = globals()["make"], globals()["batch"], globals()["loss"]

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_change_model_and_optimizer_as_eager_does(name: str) -> None:
    model, eager = make(), make()
    optimizer, theirs = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](eager.parameters())
    schedule, other = (torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, theirs))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for number in range(4):
        found, labels = step(*batch(number))
        expected, their_labels = loss(eager, *batch(number))
        expected.backward(), theirs.step(), theirs.zero_grad()
        schedule.step(), other.step()
        torch.testing.assert_close(found, expected.detach())
        assert torch.equal(labels, their_labels)
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-6, atol=1e-9)
    ours, theirs_state = optimizer.state_dict()["state"], theirs.state_dict()["state"]
    for index, kept in theirs_state.items():
        for key, value in kept.items():
            if value is not None:
                torch.testing.assert_close(ours[index][key], value, rtol=1e-6, atol=1e-9)
    # eager can go on from there: everything is where it would be
    loss(model, *batch())[0].backward()
    optimizer.step()


def test_a_second_process_steps_from_a_file_with_the_same_bits(tmp_path: Path, warm_python: Any) -> None:
    (tmp_path / "nets.py").write_text(NETS)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}

    def python(script: str) -> Any:
        begin = "import json, sys, torch\nbefore = {*sys.modules}\nimport aotkit\nfrom nets import *\n"
        program, asks = begin + textwrap.dedent(script), "sys.modules" in script
        done = warm_python.run(["-c", program], cwd=tmp_path, env=environment, only_torch=asks)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    python("""
    model = make()
    step = aotkit.saved.compile_step(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loss, batch())
    step.save("step.aotkit", signing_key="0123456789abcdef")
    losses = [step(*batch(number))[0] for number in range(3)]
    torch.save([losses, model.state_dict()], "first")
    print("[]")
    """)
    never, same = python("""
    step = aotkit.saved.load_step("step.aotkit", signing_key="0123456789abcdef")
    model = make()
    step.bind(model)
    losses = [step(*batch(number))[0] for number in range(3)]
    names = ("torch._dynamo", "torch.fx.experimental", "sympy", "aotkit_aot_trace", "aotkit_partition")
    never = [n for n in {*sys.modules} - before if n.startswith(names)]  # torch itself imports some of these
    expected, state = torch.load("first")
    same = [torch.equal(a, b) for a, b in zip([*losses, *model.state_dict().values()], [*expected, *state.values()])]
    print(json.dumps([never, same]))
    """)
    assert never == [] and len(same) > 8 and all(same)
    again = python("""
    tensors, header, at = make().state_dict(), {}, 0
    data = b""
    for name, value in tensors.items():  # a safetensors file, by hand
        raw = value.numpy().tobytes()
        header[name] = {"dtype": {"float64": "F64", "int64": "I64"}[str(value.dtype)[6:]], "shape": list(value.shape),
                        "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    open("weights.safetensors", "wb").write(len(text).to_bytes(8, "little") + text + data)
    step = aotkit.saved.load_step("step.aotkit", signing_key="0123456789abcdef").use_weights("weights.safetensors")
    losses = [step(*batch(number))[0] for number in range(3)]
    expected, state = torch.load("first")
    same = [torch.equal(a, b) for a, b in zip(losses, expected)]
    print(json.dumps([*same, *(torch.equal(step.weights[name], value) for name, value in state.items())]))
    """)
    assert len(again) > 8 and all(again)


def test_what_a_step_was_not_compiled_for_is_refused(tmp_path: Path) -> None:
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())
    x, y = batch()
    with pytest.raises(aotkit.GuardError, match="argument 0 has the size 7"):
        step(x[:7], y[:7])
    with pytest.raises(aotkit.GuardError, match="argument 0 has the dtype"):
        step(x.float(), y)
    optimizer.param_groups[0]["weight_decay"] = 0.5
    with pytest.raises(aotkit.GuardError, match="weight_decay of group 0"):
        step(x, y)
    optimizer.param_groups[0]["weight_decay"] = 1e-2
    model.eval()
    with pytest.raises(aotkit.GuardError, match="another training mode"):
        step(x, y)
    model.train()
    step.save(tmp_path / "step", signing_key="0123456789abcdef")
    with pytest.raises(aotkit.PackageError, match="another signing key"):
        aotkit.saved.load_step(tmp_path / "step")
    loaded = aotkit.saved.load_step(tmp_path / "step", signing_key="0123456789abcdef")
    with pytest.raises(aotkit.GuardError, match="no weights yet"):
        loaded(x, y)
    with pytest.raises(aotkit.GuardError, match="the step was compiled for AdamW"):
        loaded.bind(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(aotkit.GuardError, match="not such a one"):
        loaded.bind(nn.Linear(3, 4))
    fresh = make()
    with pytest.raises(aotkit.CompileError, match="take one step with it first"):
        aotkit.saved.compile_step(fresh, torch.optim.NAdam(fresh.parameters()), loss, batch())


def test_gradients_are_clipped_where_they_are_there() -> None:
    model, eager = make(), make()
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=1.0) for m in (model, eager))

    def clip(parameters: list[torch.Tensor]) -> None:
        torch.nn.utils.clip_grad_norm_(parameters, 0.01, foreach=False)

    step = aotkit.saved.compile_step(model, optimizer, loss, batch(), gradients=clip)
    step(*batch())
    loss(eager, *batch())[0].backward()
    clip(list(eager.parameters()))
    theirs.step()
    torch.testing.assert_close(model.state_dict(), eager.state_dict())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.compiler.is_compiling() or x.max() < 7  # no value can be looked at in a capture
        result: torch.Tensor = self.head(self.embed(x))
        return result


def test_a_parameter_of_two_names_is_one_and_gets_both_gradients(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Tied()
    eager = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, eager))
    x = torch.tensor([1, 2, 2, 6])
    step = aotkit.saved.compile_step(model, optimizer, lambda model, x: model(x).square().sum(), (x,))
    step.save(tmp_path / "step")
    step(x)
    eager(x).square().sum().backward()
    theirs.step()
    assert model.head.weight is model.embed.weight
    torch.testing.assert_close(model.embed.weight, eager.embed.weight)
    untied = copy.deepcopy(model)
    untied.head.weight = nn.Parameter(untied.head.weight.detach().clone())
    with pytest.raises(aotkit.GuardError, match=r"head\.weight"):
        aotkit.saved.load_step(tmp_path / "step").bind(untied)
    weights = {"head.weight": model.head.weight.detach().clone()}
    alone = aotkit.saved.load_step(tmp_path / "step").use_weights(weights)
    assert torch.equal(alone(x), step(x))


def _eager_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    optimizer.zero_grad()
    found: torch.Tensor = loss(model, *batch(number))[0]
    found.backward()
    optimizer.step()
    optimizer.zero_grad()
    return found.detach()


def _load_another_state(optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for kept in state["state"].values():
        kept["exp_avg"] = kept["exp_avg"] * 3 + 0.1
    optimizer.load_state_dict(state)


def test_a_state_that_is_loaded_or_cleared_is_the_one_that_is_used() -> None:
    model, eager = make(), make()
    optimizer, theirs = OPTIMIZERS["adam"](model.parameters()), OPTIMIZERS["adam"](eager.parameters())
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())
    for number, change in enumerate((_load_another_state, lambda o: o.state.clear(), lambda o: None)):
        torch.testing.assert_close(step(*batch(number))[0], _eager_step(eager, theirs, number))
        change(optimizer), change(theirs)
    torch.testing.assert_close(step(*batch(4))[0], _eager_step(eager, theirs, 4))
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(optimizer.state_dict()["state"], theirs.state_dict()["state"], rtol=1e-6, atol=1e-9)


def test_a_parameter_that_has_no_state_yet_begins_with_zeros() -> None:
    pairs = []
    for _ in range(2):
        model = make()
        optimizer = OPTIMIZERS["adam"](model.parameters())
        model.wide.requires_grad_(False)
        _eager_step(model, optimizer, 0)
        model.wide.requires_grad_(True)
        pairs.append((model, optimizer))
    (model, optimizer), (eager, theirs) = pairs
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())
    for number in range(3):
        torch.testing.assert_close(step(*batch(number))[0], _eager_step(eager, theirs, number))
    torch.testing.assert_close(model.state_dict(), eager.state_dict(), rtol=1e-6, atol=1e-9)


def test_a_state_that_does_not_begin_with_zeros_is_asked_for() -> None:
    model, fresh = make(), make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, dampening=0.5)
    _eager_step(model, optimizer, 0)
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())
    with pytest.raises(aotkit.GuardError, match="before its first step is not known"):
        step.bind(fresh, torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9, dampening=0.5))
    with pytest.raises(aotkit.GuardError, match="before its first step is not known"):
        step.bind(fresh)
    half = make()
    optimizer = torch.optim.NAdam(half.parameters())
    half.wide.requires_grad_(False)
    _eager_step(half, optimizer, 0)
    half.wide.requires_grad_(True)
    with pytest.raises(aotkit.CompileError, match="makes the state exp_avg"):
        aotkit.saved.compile_step(half, optimizer, loss, batch())


def test_what_a_step_would_leave_out_is_refused() -> None:
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = aotkit.saved.compile_step(model, optimizer, loss, batch())

    def refuses(why: str) -> None:
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(aotkit.GuardError, match=why):
            step(*batch())
        torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)

    weight = model.wide.weight
    weight.requires_grad_(False)
    refuses("does not require grad")
    weight.requires_grad_(True)
    for hook in (
        weight.register_hook(torch.zeros_like),
        weight.register_post_accumulate_grad_hook(lambda parameter: None),
        optimizer.register_step_post_hook(lambda *_: None),
        model.bn.register_forward_hook(lambda module, given, result: result * 2),
    ):
        refuses("hooks")
        with pytest.raises((aotkit.CompileError, aotkit.GuardError), match="hooks"):
            step.bind(model, optimizer)
        hook.remove()
    hook = weight.register_hook(torch.zeros_like)
    with pytest.raises(aotkit.CompileError, match="hooks for its gradient"):
        aotkit.saved.compile_step(model, optimizer, loss, batch())
    hook.remove()
    model.bn.momentum = 0.5
    refuses("the module bn has another momentum")
    model.bn.momentum = 0.1
    model.note = 3  # was not there, so it was not read
    model.wide.weight = nn.Parameter(weight.detach().clone())
    refuses("other parameters")
    model.wide.weight = weight
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    refuses("other parameters")
    optimizer.param_groups.pop()
    step(*batch())
