"""`aotkit.stages`: each stage is an object that prints, is saved and loaded, and ends in what eager mode gives."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotkit
from aotkit import CompileError, Options, PackageError, staged

F = torch.nn.functional
STAGES = ("captured", "partitioned", "lowered", "compiled")


def stage_after(captured: Any, name: str) -> Any:
    """The stage of this name, made of the first one."""
    for wanted, step in zip(STAGES[1:], ("partition", "lower", "compile"), strict=True):
        if name == wanted or STAGES.index(name) > STAGES.index(wanted):
            captured = getattr(captured, step)()
    return captured


def finished(stage: Any) -> Any:
    """The last stage, made of any."""
    for step in ("partition", "lower", "compile"):
        stage = getattr(stage, step)() if hasattr(stage, step) else stage
    return stage


def observed(call: Callable[..., Any], make: Callable[[], tuple[Any, ...]]) -> list[Any]:
    """Results, gradients, and the arguments as the call leaves them."""
    torch.manual_seed(3)
    args = make()
    results, _ = torch.utils._pytree.tree_flatten(call(*args))
    tensors = [r for r in results if isinstance(r, torch.Tensor)]
    leaves = [a for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    wanted = [r for r in tensors if r.requires_grad]
    grads: tuple[Any, ...] = ()
    if wanted and leaves:
        weights = [torch.arange(1.0, r.numel() + 1).reshape(r.shape) for r in wanted]
        grads = torch.autograd.grad(wanted, leaves, weights, allow_unused=True)
    inputs = [a.detach().clone() for a in torch.utils._pytree.tree_leaves(args) if isinstance(a, torch.Tensor)]
    return [results, grads, inputs, [r.requires_grad for r in tensors], [r._is_view() for r in tensors]]


def mlp(w: torch.Tensor, v: torch.Tensor, x: torch.Tensor) -> dict[str, Any]:
    hidden = F.gelu(x @ w)
    return {"loss": (hidden @ v).square().mean(), "parts": (hidden.sum(0), hidden.shape[0])}


def writes(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.mul_(2)
    y[0] += x.sum()
    return y.t(), x


def random(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x * 2, 0.5).exp()


def nested(pair: list[torch.Tensor], *, scale: float, more: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [pair[0] * scale + more["b"], pair[1].view(-1)]


def twice(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x * y.sin()).sum(0)


def values(*shapes: tuple[int, ...], grad: bool = True) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(shape, generator=generator).requires_grad_(grad) for shape in shapes)


def same_tensor() -> tuple[torch.Tensor, torch.Tensor]:
    (x,) = values((4, 3))
    return x, x


CASES: dict[str, tuple[Callable[..., Any], Callable[[], tuple[Any, ...]]]] = {
    "training": (mlp, lambda: values((6, 5), (5, 2), (7, 6))),
    "inference": (mlp, lambda: values((6, 5), (5, 2), (7, 6), grad=False)),
    "writes": (writes, lambda: values((3,), (4, 2), grad=False)),
    "random": (random, lambda: values((8, 8))),
    "one tensor twice": (twice, same_tensor),
    "nested": (lambda p, m: nested(p, scale=0.5, more=m), lambda: (list(values((2, 2), (2, 3))), {"b": torch.ones(2)})),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", STAGES)
@pytest.mark.parametrize("case", CASES)
def test_each_stage_saved_and_loaded_ends_in_what_eager_gives(case: str, name: str, tmp_path: Path) -> None:
    fn, make = CASES[case]
    torch.manual_seed(3)
    stage = stage_after(aotkit.stages(fn).capture(*make()), name)
    stage.save(tmp_path / "stage")
    loaded = staged.load(tmp_path / "stage")
    assert type(loaded) is type(stage) and loaded.kind == stage.kind
    assert loaded.cost() == stage.cost() and loaded.memory() == stage.memory()
    assert str(loaded) == str(stage)
    wanted = observed(fn, make)
    for run in (finished(stage), finished(loaded)):
        torch.testing.assert_close(observed(run, make), wanted)
        torch.testing.assert_close(observed(run, make), wanted)  # and once more


class Net(nn.Module):
    """Tied weights, a buffer that is written, something that differs in training."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.gelu(self.norm(self.first(x))))


def test_a_module_trains_by_its_stage_and_another_one_by_the_loaded_stage(tmp_path: Path) -> None:
    (x,) = values((8, 6), grad=False)
    ours, theirs = Net(), Net()
    compiled = finished(aotkit.stages(ours).capture(x))
    compiled.save(tmp_path / "step")
    other = Net(seed=5)
    reference = Net(seed=5)
    loaded = staged.load(tmp_path / "step")
    assert isinstance(loaded, staged.Compiled)
    with pytest.raises(staged.CallError, match="bind"):
        loaded(x)
    for module, eager, run in ((ours, theirs, compiled), (other, reference, loaded.bind(other))):
        optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in (module, eager)]
        for _ in range(3):
            for step, optimizer in zip((run, eager), optimizers, strict=True):
                optimizer.zero_grad()
                step(x).square().mean().backward()
                optimizer.step()
        torch.testing.assert_close(module.state_dict(), eager.state_dict())


SCRIPT = """
import sys, torch, aotkit
from aotkit import staged
stage = staged.load("stage")
loaded = sorted(set(sys.modules) & {"torch._dynamo", "sympy", "aotkit_partition", "aotkit_aot_trace"})
for step in ("partition", "lower", "compile"):
    stage = getattr(stage, step)() if hasattr(stage, step) else stage
args = torch.load("args")
out = stage(*args)
out["loss"].backward()
torch.save([out["loss"].detach(), [a.grad for a in args]], "made")
print(",".join(loaded))
"""


@pytest.mark.parametrize("name", STAGES)
def test_another_process_goes_on_from_any_stage(name: str, tmp_path: Path, warm_python: Any) -> None:
    args = values((6, 5), (5, 2), (7, 6))
    stage_after(aotkit.stages(mlp).capture(*args), name).save(tmp_path / "stage")
    torch.save(list(args), tmp_path / "args")
    ran = warm_python.run(["-c", SCRIPT], cwd=tmp_path, only_torch=name == "compiled")
    assert ran.returncode == 0, ran.stderr[-2000:]
    if name == "compiled":
        assert ran.stdout.strip() in ("", "sympy")  # nothing that traces or compiles; torch itself may bring sympy
    loss = mlp(*args)["loss"]
    loss.backward()
    made, gradients = torch.load(tmp_path / "made")
    torch.testing.assert_close([made, *gradients], [loss.detach(), *(a.grad for a in args)])


def test_the_partition_is_chosen_between_the_stages() -> None:
    def deep(x: torch.Tensor) -> torch.Tensor:
        for _ in range(6):
            x = (x.sin() * x.cos()).exp().clamp(-2, 2)
        return x.sum()

    captured = aotkit.stages(deep).capture(*values((64, 64)))
    everything, cut = captured.partition("default"), captured.partition("min-cut")
    assert everything.memory().saved > cut.memory().saved >= 0
    assert cut.cost()["backward"].operations > everything.cost()["backward"].operations
    assert captured.partition("min-peak", memory_budget=0.9).memory().peak <= cut.memory().peak


def test_what_a_stage_says_about_itself() -> None:
    w, x = torch.randn(4, 2, requires_grad=True), torch.randn(8, 4)
    captured = aotkit.stages(lambda w, x: (x @ w).sin()).capture(w, x)
    assert captured.cost()["joint"].flops == 2 * 8 * 4 * 2 * 2  # once forward, once backward
    assert captured.memory() == staged.Memory(arguments=(8 + 32) * 4, results=16 * 4)
    compiled = finished(captured)
    cost = compiled.cost()
    assert cost["forward"].flops == cost["backward"].flops == 2 * 8 * 4 * 2
    assert cost["forward"].kernels == 1 and cost["forward"].aten_calls == 1
    assert cost["forward"].kernel_bytes == 2 * 16 * 4
    assert compiled.memory().code > 0
    assert "aten.mm" in str(captured) and "loop sin" in str(captured.partition().lower())
    assert "w" not in repr(captured).split(":")[0] and len(repr(compiled)) < 100


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda w, x: (w, x[:4]), r"captured for argument 1: float32\[8, 4\], and was called with .*\[4, 4\]"),
        (lambda w, x: (w, x.double()), "float64"),
        (lambda w, x: (w, x.t().contiguous().t()), r"strides \(1, 8\) in place of \(4, 1\)"),
        (lambda w, x: (w.detach(), x), "with grad"),
        (lambda w, x: (w, x.clone().requires_grad_()), "with grad"),
        (lambda w, x: (w, 3), "has to be a tensor"),
        (lambda w, x: (w,), "2 values here, not 1"),
        (lambda w, x: (w, torch.complex(x, x).conj().imag), "negated"),
    ],
)
def test_another_call_is_refused(change: Callable[..., Any], says: str) -> None:
    w, x = torch.randn(4, 2, requires_grad=True), torch.randn(8, 4)
    compiled = finished(aotkit.stages(lambda w, x: x @ w).capture(w, x))
    with pytest.raises(staged.CallError, match=says):
        compiled(*change(w, x))


def test_who_is_whom_and_the_state_of_torch_are_part_of_a_call() -> None:
    (x,) = values((4, 3))
    y = x.detach().clone().requires_grad_()
    two, one = (finished(aotkit.stages(twice).capture(x, other)) for other in (y, x))
    for run, other in ((two, x), (one, y)):
        with pytest.raises(staged.CallError, match="one tensor, or are two"):
            run(x, other)
    with torch.no_grad(), pytest.raises(staged.CallError, match="gradients"):
        two(x, y)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(staged.CallError, match="autocast"):
        two(x, y)
    with torch.device("meta"), pytest.raises(staged.CallError, match="default device"):
        two(x, y)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(staged.CallError, match="deterministic"):
            two(x, y)
    finally:
        torch.use_deterministic_algorithms(False)
    net = Net()
    run = finished(aotkit.stages(net).capture(torch.ones(4, 6)))
    net.eval()
    with pytest.raises(staged.CallError, match="training mode"):
        run(torch.ones(4, 6))
    with pytest.raises(staged.CallError, match="no such module"):
        run.bind(nn.Linear(6, 6))


def test_a_zero_with_a_sign_is_another_constant() -> None:
    run = finished(aotkit.stages(lambda x, c: x.new_full((2,), 1.0) / c).capture(torch.ones(1), 0.0))
    assert run(torch.ones(1), 0.0).tolist() == [float("inf")] * 2
    with pytest.raises(staged.CallError, match=r"-0\.0"):
        run(torch.ones(1), -0.0)


def test_views_that_were_not_known_to_overlap_are_refused() -> None:
    base = torch.zeros(6)
    run = finished(aotkit.stages(lambda a, b: a.add_(1) + b).capture(torch.zeros(4), torch.zeros(4)))
    with pytest.raises(staged.CallError, match="share memory"):
        run(base[:4], base[2:])
    assert base.tolist() == [0] * 6


def test_second_derivatives_are_refused() -> None:
    (x,) = values((3,))
    run = finished(aotkit.stages(lambda x: (x**3).sum()).capture(x))
    (first,) = torch.autograd.grad(run(x), x, create_graph=True)
    torch.testing.assert_close(first.detach(), 3 * x.detach() ** 2)
    with pytest.raises(RuntimeError, match="differentiate"):
        torch.autograd.grad(first.sum(), x)


def test_a_result_that_is_not_used_gets_no_gradient() -> None:
    x, y = values((3,), (3,))
    run = finished(aotkit.stages(lambda x, y: (x * 2, y.exp())).capture(x, y))
    first, _ = run(x, y)
    assert torch.autograd.grad(first.sum(), [x, y], allow_unused=True)[0].tolist() == [2, 2, 2]


def test_what_has_no_stages_is_refused() -> None:
    with pytest.raises(TypeError, match="can't be called"):
        aotkit.stages(3)  # type: ignore[arg-type]
    with pytest.raises(CompileError, match="cudagraphs"):
        aotkit.stages(torch.sin, options=Options(cudagraphs=True))
    with pytest.raises(CompileError, match="PosixPath"):
        aotkit.stages(lambda x, y: x).capture(torch.ones(2), Path("."))
    with pytest.raises(CompileError, match="refused"):
        aotkit.stages(lambda x: x * 2 if x.sum() > 0 else x).capture(torch.ones(2))
    with pytest.raises(ZeroDivisionError):
        aotkit.stages(lambda x: x * (1 // 0)).capture(torch.ones(2))

    def pieces(x: torch.Tensor) -> Any:
        return torch.cond(torch.tensor(True), lambda x: x.sin(), lambda x: x.cos(), (x,))

    with pytest.raises(CompileError, match="in pieces"):
        aotkit.stages(pieces).capture(torch.ones(2)).partition().lower()


def test_a_closed_over_tensor_is_refused() -> None:
    layer = nn.Linear(3, 3)
    with pytest.raises(CompileError, match="not one of its arguments"):
        aotkit.stages(lambda x: layer(x).sum()).capture(torch.ones(2, 3))


def test_files_that_are_no_stage_or_not_signed_are_refused(tmp_path: Path) -> None:
    captured = aotkit.stages(torch.sin).capture(torch.ones(3))
    captured.save(tmp_path / "signed", signing_key="a secret of many characters")
    assert isinstance(staged.load(tmp_path / "signed", signing_key="a secret of many characters"), staged.Captured)
    with pytest.raises(PackageError, match="signed"):
        staged.load(tmp_path / "signed", signing_key="another secret of characters")
    with pytest.raises(PackageError, match=r"aotkit\.staged\.load"):
        aotkit.load(tmp_path / "signed")
    aotkit.aot_compile(nn.Linear(2, 2), (torch.ones(1, 2),), tmp_path / "package")
    with pytest.raises(PackageError, match=r"aotkit\.load"):
        staged.load(tmp_path / "package")
    (tmp_path / "text").write_text(json.dumps({}))
    with pytest.raises(PackageError, match="no package"):
        staged.load(tmp_path / "text")


def test_large_constants_travel_with_the_stage(tmp_path: Path) -> None:
    numbers = [float(i) for i in range(20_000)]  # 80 kB: more than the text of a graph holds
    stage = aotkit.stages(lambda x: x + torch.tensor(numbers)).capture(torch.ones(20_000))
    for name in STAGES:
        stage_after(stage, name).save(tmp_path / name)
        found = finished(staged.load(tmp_path / name))(torch.ones(20_000))
        torch.testing.assert_close(found, torch.arange(1.0, 20_001))


def test_no_stage_changes_the_one_before() -> None:
    captured = aotkit.stages(mlp).capture(*values((6, 5), (5, 2), (7, 6)))
    before = str(captured)
    partitioned = captured.partition()
    middle = str(partitioned)
    lowered = partitioned.lower()
    last = str(lowered)
    lowered.compile()
    assert (str(captured), str(partitioned), str(lowered)) == (before, middle, last)


def test_options_travel_with_every_stage(tmp_path: Path) -> None:
    options = Options(disable=frozenset({"fuse-kernels", "inline-producers"}), memory_budget=0.5, separate_kernels=True)
    (x,) = values((8, 8))
    captured = aotkit.stages(lambda x: (x.sin() + x.cos()).exp().sum(), options=options).capture(x)
    plain = finished(aotkit.stages(lambda x: (x.sin() + x.cos()).exp().sum()).capture(x))
    for name in STAGES:
        stage_after(captured, name).save(tmp_path / name)
        loaded = staged.load(tmp_path / name)
        assert getattr(loaded, "options", None) == options or loaded.partitioned.options == options
        assert finished(loaded).cost()["forward"].kernels > plain.cost()["forward"].kernels


def test_a_stage_may_be_called_by_many_threads() -> None:
    (x,) = values((64, 64))
    run = finished(aotkit.stages(lambda x: (x.softmax(-1) @ x).sum()).capture(x))
    (wanted,) = torch.autograd.grad(run(x), x)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: torch.autograd.grad(run(x), x)[0], range(32)))
    assert all(torch.equal(each, wanted) for each in found)
