"""Graphs that are compiled in parts (higher-order operators, sizes that depend on data) are loaded like any other."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._higher_order_ops import cond, while_loop
from torch._higher_order_ops.effects import _register_effectful_op
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._library.effects import EffectType

import aotkit
from aotkit.artifact import key
from aotkit.artifact.records import CompiledGraph
from aotkit_cache import CacheWarning, open_cache
from aotkit_runtime_wrappers import DoubleBackwardError

# Eager traces higher-order operators with Dynamo, which looks at the gradients of what it is given.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:invoke_subgraph traced multiple backward graphs"),
]

whole_graphs = torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)


@pytest.fixture(autouse=True)
def _products_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


def branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return cond(x.sum() > 0, lambda x, w: (x @ w).sin() + 1, lambda x, w: (x @ w).cos() * 2, (x, w)) * 3


def branches_in_branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    def inner(x: torch.Tensor) -> torch.Tensor:
        return cond(x[0, 0] > -2, lambda x: x.exp() * 2, lambda x: x.sin(), (x,)).cumsum(0)

    return cond(x.sum() > 0, inner, lambda x: x * 2, (x + w.sum(),)) - 1


def with_constants(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    scale = torch.tensor([1.0, 2.0, 3.0], dtype=x.dtype)
    y = cond(x.sum() > 0, lambda x, s: x * s, lambda x, s: x - s, (x @ w, scale))
    return y * scale + scale.sum()


def written_and_viewed(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    with torch.no_grad():
        w.mul_(2)
    y = cond(w.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x * w[0],))
    return y, y[:, ::2], w.t(), x


def loop(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    start = torch.tensor(0)
    return while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, (y * 1.5).sin()), (start, x.detach() @ w.detach()))


def loop_with_gradients(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    start = torch.tensor(0)
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, (y * 1.5).sin()), (start, x @ w))[1].cos()


def running(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    last, every = scan(lambda c, row: (c * 0.5 + row @ w, c.sin() + row), torch.zeros_like(x[0]), x)
    return last * 2, every.exp()


def rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return mapped(lambda row, w: (row @ w).tanh(), x, w).cumsum(0)


@torch.compiler.nested_compile_region
def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return (x @ w).tanh() + 1


def regions(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return layer(layer(x, w), w).sum(0)


def positive(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x[x > 0].exp() * w.sum()


def positions(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
    at = torch.nonzero(x > 0)
    return at * 2, x[at[:, 0], at[:, 1]] @ torch.ones(len(at), dtype=x.dtype) + w.sum()


def as_many_as(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    count = int((x > 0).sum().item())
    torch._check(count <= 100)
    return torch.ones(count, dtype=x.dtype) * (x.sum() + w.prod()) / (count + 0.5)


def cut(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    sizes = torch.tensor([1, x.shape[0] - 1]).tolist()
    return [part.exp() @ w for part in x.split(sizes)]


def counted_branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.cos(), (x[x > -3],)).sum() * w


PROGRAMS = {
    fn.__name__: fn
    for fn in (
        branches, branches_in_branches, with_constants, written_and_viewed, loop, loop_with_gradients, running, rows,
        regions, positive, positions, as_many_as, cut, counted_branches,
    )
}  # fmt: skip
# torch 2.11 takes what the backward of such a scan is given for views of each other, and refuses it.
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)
INFERENCES = {"loop", "running"} if OLD else {"loop"}


def values(rows: int = 4, *, gradients: bool, sign: float = 1.0) -> list[torch.Tensor]:
    x = torch.linspace(-1, 2, rows * 3, dtype=torch.float64).reshape(rows, 3) * sign
    w = torch.linspace(0.1, 1, 9, dtype=torch.float64).reshape(3, 3).clone()
    return [x.clone().requires_grad_(gradients), w.requires_grad_(gradients)]


def observed(call: Callable[..., Any], args: Sequence[torch.Tensor]) -> list[Any]:
    """Results with their strides, gradients, what became of the arguments, and who shares memory with whom."""
    results = call(*args)
    results = list(results) if isinstance(results, tuple | list) else [results]
    everything = [*args, *results]
    storages = [t.untyped_storage()._cdata for t in everything]
    facts: list[Any] = [[t.detach().clone() for t in everything], [t.stride() for t in results]]
    facts.append([storages.index(s) for s in storages])
    losses = [(t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in results if t.requires_grad]
    leaves = [a for a in args if a.requires_grad]
    facts.append(list(torch.autograd.grad(sum(losses), leaves, allow_unused=True)) if losses else [])
    return facts


def assert_same(got: list[Any], want: list[Any]) -> None:
    for mine, theirs in zip(got, want, strict=True):
        assert [isinstance(v, torch.Tensor) for v in mine] == [isinstance(v, torch.Tensor) for v in theirs]
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(a, torch.Tensor):
                torch.testing.assert_close(a, b)
            else:
                assert a == b


def compiled(fn: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` as a new process would have it: nothing but the cache directory is left of earlier compiles."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = aotkit.Options(fallback="error").patch(**settings.pop("options", {}))
    made = torch.compile(fn, backend=aotkit.make_backend(options, recorder), fullgraph=True, **settings)
    return made, recorder


def told(recorder: aotkit.Recorder, name: str) -> list[Any]:
    return [fields for event, fields in recorder.events if event == name]


def cases() -> list[Any]:
    return [
        pytest.param(name, gradients, id=f"{name}-{'training' if gradients else 'inference'}")
        for name in PROGRAMS
        for gradients in (False, True)
        if not (gradients and name in INFERENCES)
    ]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("name", "gradients"), cases())
def test_a_graph_in_parts_is_loaded_without_entering_any_stage(
    name: str, gradients: bool, no_compile: Callable[[], None]
) -> None:
    fn = PROGRAMS[name]
    with whole_graphs:
        wanted = [observed(fn, values(gradients=gradients, sign=sign)) for sign in (1.0, -1.0)]
        call, recorder = compiled(fn)
        for sign, want in zip((1.0, -1.0), wanted, strict=True):
            assert_same(observed(call, values(gradients=gradients, sign=sign)), want)
        assert told(recorder, "cache.bypass") == [] and told(recorder, "cache.loaded") == []
        no_compile()
        call, recorder = compiled(fn)
        for sign, want in zip((1.0, -1.0), wanted, strict=True):
            assert_same(observed(call, values(gradients=gradients, sign=sign)), want)
    assert [fields["specialization"] for fields in told(recorder, "cache.loaded")] == [0]
    assert set(recorder.stage_seconds()) == {"cache-key", "cache-read", "cache-bind"}


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", sorted(PROGRAMS.keys() - {"running", "loop", "loop_with_gradients", "rows"}))
def test_with_sizes_known_at_run_time_only(name: str, no_compile: Callable[[], None]) -> None:
    fn = PROGRAMS[name]

    def run() -> aotkit.Recorder:
        call, recorder = compiled(fn, dynamic=True)
        for size in (4, 7, 5):
            assert_same(observed(call, values(size, gradients=True)), observed(fn, values(size, gradients=True)))
        return recorder

    with whole_graphs:
        first = run()
        assert told(first, "cache.bypass") == []
        no_compile()
        again = run()
    assert len(told(again, "cache.loaded")) == 1 and all(graph.loaded for graph in again.graphs)


def test_a_hit_reports_what_its_compile_reported(no_compile: Callable[[], None]) -> None:
    x, w = values(gradients=False)
    call, cold = compiled(branches)
    call(x, w)
    no_compile()
    call, warm = compiled(branches)
    call(x, w)
    before, after = cold.graphs[0].report, warm.graphs[0].report
    assert str(after) == str(before) and after.kernel_count == before.kernel_count > 0


def test_a_hit_shows_the_plans_and_kernels_of_all_parts(tmp_path: Path) -> None:
    texts = []
    for number in (0, 1):
        torch._dynamo.reset()
        recorder = aotkit.Recorder(dump_dir=tmp_path / str(number))
        backend = aotkit.make_backend(aotkit.Options(fallback="error"), recorder)
        torch.compile(branches, backend=backend, fullgraph=True)(*values(gradients=False))
        (plan,) = (tmp_path / str(number)).rglob("*plan.json")
        texts.append(plan.read_text())
        code = "".join(path.read_text() for path in sorted((tmp_path / str(number)).rglob("*.ll")))
        parts = json.loads(plan.read_text())["record"]["parts"]
        assert len(parts) >= 3 and all(part["program"]["steps"] for part in parts)
        assert code.count("target triple") == len(parts)
    assert told(recorder, "cache.loaded") and texts[0] == texts[1]


def test_second_derivatives_that_a_compile_refuses_a_loaded_graph_refuses_as_well() -> None:
    with whole_graphs:
        for loaded in (0, 1):
            call, recorder = compiled(positive)
            call(*values(gradients=True)).sum().backward()
            assert len(told(recorder, "cache.loaded")) == loaded
            x, w = values(gradients=True)
            (first,) = torch.autograd.grad(call(x, w).sum(), x, create_graph=True)
            with pytest.raises(DoubleBackwardError, match="depends on the elements of a tensor"):
                first.sum().backward()


def test_what_is_refused_at_a_size_is_refused_by_the_loaded_graph() -> None:
    def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        size = k.item()
        torch._check(size >= 2)
        torch._check(size <= 4)
        return x[:size] * 2

    with whole_graphs:
        for loaded in (0, 1):
            call, recorder = compiled(fn)
            torch.testing.assert_close(call(torch.ones(5), torch.tensor(3)), torch.full((3,), 2.0))
            with pytest.raises(RuntimeError):
                call(torch.ones(5), torch.tensor(1))
            assert len(told(recorder, "cache.loaded")) == loaded


def test_another_bound_on_a_size_is_another_entry() -> None:
    def bounded(most: int) -> Callable[..., Any]:
        def fn(x: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
            size = k.item()
            torch._check(size <= most)
            return x[:size] * 2

        return fn

    with whole_graphs:
        for most in (4, 2):
            call, recorder = compiled(bounded(most))
            call(torch.ones(5), torch.tensor(2))
            assert told(recorder, "cache.loaded") == []
        with pytest.raises(RuntimeError):
            call(torch.ones(5), torch.tensor(3))


LIBRARY = torch.library.Library("aotkit_warm_parts", "FRAGMENT")
LOG: list[float] = []


def _note(x: torch.Tensor) -> torch.Tensor:
    LOG.append(float(x.sum()))
    return x.clone()


LIBRARY.define("note(Tensor x) -> Tensor")
LIBRARY.impl("note", _note, "CPU")
LIBRARY.impl("note", torch.clone, "Meta")


def test_ordered_effects_of_a_loaded_graph_happen_once_and_in_order(no_compile: Callable[[], None]) -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        torch.ops.aotkit_warm_parts.note(x * 2)  # its result is not used: it must happen all the same
        return torch.ops.aotkit_warm_parts.note(x) * 3

    handle = _register_effectful_op(torch.ops.aotkit_warm_parts.note.default, EffectType.ORDERED)
    try:
        for loaded in (0, 1):
            call, recorder = compiled(fn, options={"cacheable": {"aotkit_warm_parts.note@1"}})
            LOG.clear()
            torch.testing.assert_close(call(torch.ones(3)), torch.full((3,), 3.0))
            assert LOG == [6.0, 3.0] and len(told(recorder, "cache.loaded")) == loaded
            no_compile()
    finally:
        handle.destroy()


PROCESS = """
import json, sys
import torch, aotkit
from torch._higher_order_ops import cond, while_loop
from torch._higher_order_ops.effects import _register_effectful_op
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._library.effects import EffectType
torch._dynamo.config.capture_scalar_outputs = torch._dynamo.config.capture_dynamic_output_shape_ops = True

def branches(x, w):
    with torch.no_grad():
        w.add_(1)
    y = cond(x.sum() > 0, lambda x, w: (x @ w).sin() + 1, lambda x, w: (x @ w).cos() * 2, (x, w.sin()))
    return y * 3, y[:, ::2]
def loop(x, w):
    return while_loop(lambda i, y: i < 5, lambda i, y: (i + 1, (y * 1.5).sin()), (torch.tensor(0), x.detach()))
def running(x, w):
    return scan(lambda c, row: (c * 0.5 + row @ w, c.sin() + row), torch.zeros_like(x[0]), x)
def rows(x, w):
    return mapped(lambda row, w: (row @ w).tanh(), x, w).cumsum(0)
def counted(x, w):
    return (x[x > 0] / 4).exp() * w.sum() + torch.ones(int((x > 0).sum().item()))

def inputs():
    return torch.linspace(-1, 2, 12).reshape(4, 3).requires_grad_(), torch.linspace(0, 1, 9).reshape(3, 3)
OLD = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 12)  # see OLD beside this text
def run(call, gradients):
    x, w = inputs()
    x = x if gradients else x.detach()
    found = call(x, w)
    found = list(found) if isinstance(found, (tuple, list)) else [found]
    losses = [t.cos().sum() for t in found if t.requires_grad]
    grads = torch.autograd.grad(sum(losses), x) if losses else ()
    return [t.detach() for t in (*found, *grads, w)]

recorder = aotkit.Recorder()
options = aotkit.Options(fallback="error")
digits = []
for fn in (branches, loop, running, rows, counted):
    call = torch.compile(fn, backend=aotkit.make_backend(options, recorder), fullgraph=True)
    gradients = not (OLD and fn is running)
    got, want = run(call, gradients), run(fn, gradients)
    torch.testing.assert_close(got, want)
    digits.append([t.double().tolist() for t in got])
stages = ("aotkit_aot_trace", "aotkit_partition", "aotkit_inductor_lower.driver", "aotkit_inductor_lower.lowering")
stages += ("aotkit_inductor_lower.graph_partition", "aotkit_inductor_lower.report", "aotkit.driver.compile")
print(json.dumps({
    "loaded": len([name for name, _ in recorder.events if name == "cache.loaded"]),
    "bypass": [fields for name, fields in recorder.events if name == "cache.bypass"],
    "stages": sorted(recorder.stage_seconds()),
    "modules": [name for name in stages if name in sys.modules],
    "digits": digits,
}))
"""


def test_a_second_process_loads_what_the_first_compiled(tmp_path: Path, warm_python: Any) -> None:
    def process(**how: bool) -> dict[str, Any]:
        environment = {**os.environ, "AOTKIT_CACHE_DIR": str(tmp_path / "kept"), "AOTKIT_VERIFY": "0"}
        (tmp_path / "program.py").write_text(PROCESS)
        done = warm_python.run(["program.py"], cwd=tmp_path, env=environment, **how)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)  # type: ignore[no-any-return]

    first, second = process(), process(only_torch=True)
    assert (first["loaded"], first["bypass"]) == (0, [])
    assert (second["loaded"], second["bypass"]) == (5, [])
    assert second["stages"] == ["cache-bind", "cache-key", "cache-read"] and second["modules"] == []
    assert second["digits"] == first["digits"]


def test_damaged_entries_are_compiled_again() -> None:
    x, w = values(gradients=False)
    want = branches(x, w)
    chance = random.Random(18)
    for _ in range(12):
        compiled(branches)[0](x, w)
        for path in (open_cache().store.directory / "entries").rglob("*"):
            if path.is_file():
                data = bytearray(path.read_bytes())
                at = chance.randrange(len(data))
                data[at] ^= 1 << chance.randrange(8)
                path.write_bytes(data if chance.random() < 0.7 else data[:at])
        call, recorder = compiled(branches)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.testing.assert_close(call(x, w), want)
        assert told(recorder, "cache.loaded") == []
        assert CacheWarning in [warning.category for warning in said]


def _targets(raw: Any) -> list[dict[str, Any]]:
    if isinstance(raw, list):
        return [found for item in raw for found in _targets(item)]
    if not isinstance(raw, dict):
        return []
    return [raw] * ("target" in raw and "sections" not in raw) + [f for item in raw.values() for f in _targets(item)]


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "another version": lambda raw: raw.update(version=99),
    "a function that is in no table": lambda raw: _targets(raw)[0].update(target="builtins.eval"),
    "an operator that is not there": lambda raw: _targets(raw)[0].update(target="aten.no_such_operator.default"),
    "a value that is not there yet": lambda raw: raw["record"]["plan"].update(steps=[]),
    "a part that is not there": lambda raw: raw["record"].update(parts=[]),
    "no plan": lambda raw: raw["record"].pop("plan"),
    "a keyword that is code": lambda raw: _targets(raw)[0].update(kwargs=[["x=print(1), y", {"record": "Plain"}]]),
}


@pytest.mark.parametrize("how", FORGED)
def test_an_entry_that_does_not_hold_together_is_compiled_again(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written with the right signature, as by a bug or by somebody who has the key."""
    x, w = values(gradients=False)
    want = branches(x, w)
    whole = CompiledGraph.program_text

    def forged(graph: CompiledGraph) -> str:
        raw = json.loads(whole(graph))
        FORGED[how](raw)
        return json.dumps(raw)

    with monkeypatch.context() as patched:
        patched.setattr(CompiledGraph, "program_text", forged)
        compiled(branches)[0](x, w)
    call, recorder = compiled(branches)
    with pytest.warns(CacheWarning, match="can't be used"):
        torch.testing.assert_close(call(x, w), want)
    assert told(recorder, "cache.loaded") == []
    call, recorder = compiled(branches)  # it was replaced
    torch.testing.assert_close(call(x, w), want)
    assert len(told(recorder, "cache.loaded")) == 1


def test_what_differs_in_a_branch_or_in_the_environment_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def with_factor(factor: float) -> Callable[..., Any]:
        def fn(x: torch.Tensor) -> torch.Tensor:
            return cond(x.sum() > 0, lambda x: x.sin() * factor, lambda x: x.cos(), (x,))

        return fn

    def loads(factor: float) -> bool:
        call, recorder = compiled(with_factor(factor))
        x = torch.linspace(-1, 2, 12)
        torch.testing.assert_close(call(x), with_factor(factor)(x))
        return bool(told(recorder, "cache.loaded"))

    assert [loads(2.0), loads(3.0), loads(2.0), loads(3.0)] == [False, False, True, True]
    real = key.environment_parts()
    others: dict[str, Any] = {"environment_parts": {**real, "env.torch": "2.99"}, "host_machine": "another processor"}
    for name, other in others.items():
        with monkeypatch.context() as patched:
            patched.setattr(key, name, lambda other=other: other)
            assert [loads(2.0), loads(2.0)] == [False, True]
    assert loads(2.0)
