"""Graphs that were compiled before are loaded: nothing is compiled again, and nothing else changes."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import aotkit
from aotkit_cache import CacheWarning, open_cache


@pytest.fixture(autouse=True)
def _products_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


def compiled(fn: Callable[..., Any], **settings: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` as a new process would have it: nothing but the cache directory is left of earlier compiles."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = aotkit.Options(fallback="error").patch(**settings.pop("options", {}))
    return torch.compile(fn, backend=aotkit.make_backend(options, recorder), **settings), recorder


def loaded(recorder: aotkit.Recorder) -> list[object]:
    """Per graph that was loaded, which of the entries of its key."""
    return [fields["specialization"] for name, fields in recorder.events if name == "cache.loaded"]


class Model(torch.nn.Module):
    """A written buffer, dropout-free, an output that is a view of another."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.w = torch.nn.Parameter(torch.randn(8, 8, generator=generator))
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        y = torch.nn.functional.gelu(x @ self.w).softmax(-1)
        return y, y[:, ::2]


def step(model: Model, call: Callable[..., Any]) -> list[torch.Tensor]:
    x = torch.linspace(-1, 1, 32).reshape(4, 8).clone().requires_grad_()
    y, part = call(x)
    ((y * y).sum() + part.sum()).backward()
    assert x.grad is not None and model.w.grad is not None
    return [y.detach(), part.detach(), x.grad, model.w.grad, model.calls.clone()]


@pytest.mark.covers("F7.2", "F7.1", "F7.3", "F7.22")
def test_a_training_step_is_loaded_without_entering_any_stage_of_a_compile(no_compile: Callable[[], None]) -> None:
    eager = Model()
    expected = step(eager, eager)
    first = Model()
    call, recorder = compiled(first)
    y, _ = call(torch.ones(4, 8, requires_grad=True))
    assert not [e for e in open_cache().entries() if open_cache().describe(e.key)[0].meta.get("kind")]
    y.sum().backward()  # the entry of a training graph is written when its backward is compiled
    kinds = [open_cache().describe(e.key)[0].meta.get("kind") for e in open_cache().entries()]
    assert kinds.count("training") == 1
    del call, y
    no_compile()
    second = Model()
    call, recorder = compiled(second)
    for got, want in zip(step(second, call), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert loaded(recorder) == [0]
    stages = set(recorder.stage_seconds())
    assert stages == {"cache-key", "cache-read", "cache-bind"}


@pytest.mark.covers("F7.23")
def test_a_hit_reports_what_its_compile_reported(no_compile: Callable[[], None]) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() + 1).cumsum(0) @ x.T

    x = torch.linspace(0, 1, 12).reshape(3, 4)
    call, cold = compiled(f)
    want = call(x)
    no_compile()
    call, warm = compiled(f)
    assert torch.equal(call(x), want)
    before, after = cold.graphs[0].report, warm.graphs[0].report
    assert str(after) == str(before) and after.kernel_count == before.kernel_count > 0
    assert list(after.to_json()) == [*before.to_json(), "text"]


@pytest.mark.covers("F7.22")
def test_second_derivatives_of_a_loaded_graph_are_those_of_eager() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return ((x @ w).tanh() * w.sum()).sin()

    def second(call: Callable[..., Any]) -> list[torch.Tensor]:
        x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
        w = torch.linspace(0, 2, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
        first = torch.autograd.grad(call(x, w).sum(), (x, w), create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), (x, w)))

    expected = second(f)
    call, _ = compiled(f)
    call(torch.ones(2, 3, dtype=torch.float64, requires_grad=True), torch.ones(3, 4, dtype=torch.float64)).sum()
    torch._dynamo.reset()
    for _ in range(2):  # the first writes an entry if its plain backward runs
        call, recorder = compiled(f)
        x = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)
        w = torch.ones(3, 4, dtype=torch.float64, requires_grad=True)
        call(x, w).sum().backward()
    assert loaded(recorder) == [0]
    for got, want in zip(second(call), expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.covers("F7.10")
def test_entries_of_one_key_differ_by_their_guards_and_an_unfit_one_is_not_used() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] % 2 == 0:  # no node of the graph, a fact about its size
            return x * 2 + x.shape[0]
        return x * 2 + x.shape[0]

    def run(*sizes: int) -> list[object]:
        call, recorder = compiled(f, dynamic=True)
        for size in sizes:
            x = torch.linspace(0, 1, size)
            torch.testing.assert_close(call(x), f(x))
        assert len(recorder.graphs) == len({size % 2 for size in sizes})
        return loaded(recorder)

    assert run(8, 4) == []
    assert run(12, 6) == [0]
    assert run(3) == []  # the entry for even sizes was read and left
    assert run(5, 7) == [1]
    assert run(10, 9, 4, 3) == [0, 1]  # the guards came back with the entries


def test_arguments_that_share_memory_are_another_entry(no_compile: Callable[[], None]) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return x + y

    def apart() -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(4), torch.zeros(4)

    def together() -> tuple[torch.Tensor, torch.Tensor]:
        base = torch.zeros(6)
        return base[:4], base[2:]

    for make in (apart, together):
        call, _ = compiled(f)
        args, eager = make(), make()
        torch.testing.assert_close(call(*args), f(*eager))
    no_compile()
    for make in (apart, together):
        call, recorder = compiled(f)
        args, eager = make(), make()
        torch.testing.assert_close(call(*args), f(*eager))
        torch.testing.assert_close(args, eager)
        assert loaded(recorder) == [0]


def test_a_backward_that_was_compiled_under_other_settings_is_not_kept() -> None:
    """The key names those of the forward, where another process may have them all along."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sin().sum()

    for changes, kept in ((True, []), (False, []), (False, [0])):
        call, recorder = compiled(fn)
        x = torch.ones(4, requires_grad=True)
        loss = call(x)
        torch.use_deterministic_algorithms(changes)
        try:
            loss.backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert loaded(recorder) == kept
        reasons = [str(fields["reason"]) for name, fields in recorder.events if name == "cache.bypass"]
        assert [("other settings" in reason) for reason in reasons] == [True] * changes


@pytest.mark.covers("F7.11", "F7.12", "F7.13")
def test_custom_operators_are_kept_only_under_a_version_of_the_users() -> None:
    @torch.library.custom_op("aotkit_warm::triple", mutates_args=())
    def triple(x: torch.Tensor) -> torch.Tensor:
        return x * 3

    triple.register_fake(torch.empty_like)

    def f(x: torch.Tensor) -> torch.Tensor:
        return triple(x) + 1

    x = torch.arange(4.0)
    call, recorder = compiled(f)
    assert torch.equal(call(x), f(x))
    (reason,) = [fields["reason"] for name, fields in recorder.events if name == "cache.bypass"]
    assert "custom operator aotkit_warm.triple" in str(reason) and "option 'cacheable'" in str(reason)
    seen = []
    for version in ("1", "1", "2"):
        call, recorder = compiled(f, options={"cacheable": {f"aotkit_warm.triple@{version}"}})
        assert torch.equal(call(x), f(x))
        seen.append(len(loaded(recorder)))
    assert seen == [0, 1, 0]


class Scaled(torch.Tensor):
    """A wrapper of a user's, with a number as its context."""

    inner: torch.Tensor
    scale: float

    @staticmethod
    def __new__(cls, inner: torch.Tensor, scale: float) -> Scaled:
        """Looks like its inner tensor."""
        make: Any = torch.Tensor._make_wrapper_subclass
        self: Scaled = make(cls, inner.shape, dtype=inner.dtype, device=inner.device, requires_grad=inner.requires_grad)
        self.inner, self.scale = inner, scale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        """One tensor."""
        return ["inner"], self.scale

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], scale: float, size: Any, stride: Any) -> Scaled:
        """The inverse."""
        return Scaled(inner["inner"], scale)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are those of the scaled values, scaled back."""
        (scale,) = {a.scale for a in args if isinstance(a, Scaled)}
        out = func(*(a.inner * scale if isinstance(a, Scaled) else a for a in args), **(kwargs or {}))
        return Scaled(out / scale, scale)


@pytest.mark.covers("F7.8")
def test_graphs_of_tensor_subclasses_are_loaded_by_class_context_and_what_is_inside(
    no_compile: Callable[[], None],
) -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).sin()

    def values(make: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
        w = torch.linspace(-1, 1, 12, dtype=torch.float64).view(4, 3)
        return [
            make(torch.linspace(0, 1, 8, dtype=torch.float64).view(2, 4)).requires_grad_(),
            make(w).requires_grad_(),
        ]

    def run(make: Callable[[torch.Tensor], torch.Tensor], allowed: str | None = None) -> list[object]:
        call, recorder = compiled(f, options={"cacheable": {allowed} if allowed else set()})
        got, want = values(make), values(make)
        for fn, args in ((call, got), (f, want)):
            fn(*args).sum().backward()
        for a, b in zip([call(*got), *(t.grad for t in got)], [f(*want), *(t.grad for t in want)], strict=True):
            assert type(a) is type(b)
            for name in a.__tensor_flatten__()[0]:
                torch.testing.assert_close(getattr(a, name), getattr(b, name))
        reasons = [str(fields["reason"]) for name, fields in recorder.events if name == "cache.bypass"]
        return loaded(recorder) or reasons

    def two(t: torch.Tensor) -> torch.Tensor:
        return TwoTensor(t, t * 2)

    def nested(t: torch.Tensor) -> torch.Tensor:
        return TwoTensor(TwoTensor(t, t + 1), TwoTensor(t * 2, t))

    (reason,) = run(lambda t: Scaled(t, 2.0))
    name = f"{Scaled.__module__}.Scaled"
    assert f"a {name}, whose code no version of torch names" in str(reason)
    ways = [
        (two, None),
        (nested, None),
        (lambda t: Scaled(t, 2.0), f"{name}@1"),
        (lambda t: Scaled(t, 3.0), f"{name}@1"),
    ]
    for way in ways:
        assert run(*way) == []
    assert run(lambda t: Scaled(t, 2.0), f"{name}@2") == []  # another version
    no_compile()
    for way in ways:
        assert run(*way) == [0]


def damaged(how: str) -> None:
    for path in (open_cache().store.directory / "entries").rglob("*"):
        if path.is_file():
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 16
            path.write_bytes(data if how == "flipped" else data[: len(data) // 3])


@pytest.mark.covers("F7.14", "F7.15")
@pytest.mark.parametrize("how", ["flipped", "cut"])
def test_a_damaged_entry_is_compiled_again_with_one_warning(how: str) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        return x.exp() - 1

    x = torch.linspace(0, 1, 5)
    call, _ = compiled(f)
    want = call(x)
    damaged(how)
    call, recorder = compiled(f)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert torch.equal(call(x), want)
    assert [w.category for w in said if w.category is CacheWarning] == [CacheWarning]
    assert loaded(recorder) == []
    call, recorder = compiled(f)  # it was replaced
    assert torch.equal(call(x), want) and loaded(recorder) == [0]


def test_a_cache_that_cannot_be_used_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "file"))
    call, _ = compiled(lambda x: x + 1)
    with pytest.warns(CacheWarning, match="nothing is kept between processes"):
        assert torch.equal(call(torch.zeros(2)), torch.ones(2))


LOAD = """
import sys
import torch
import aotkit
assert not any(name.split(".")[:2] == ["torch", "_dynamo"] for name in sys.modules), "import aotkit is not lazy"
assert [name for name in sys.modules if name.startswith("aotkit_")] == []
from aotkit.artifact.records import Artifact
from aotkit.driver.bind import bind
from aotkit_cache import open_cache
cache = open_cache()
(entry,) = [e for e, _ in (cache.describe(s.key) for s in cache.entries()) if e.meta.get("kind") == "training"]
call = bind(Artifact.from_sections(entry.sections, entry.meta))
x, w = torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)
(y,) = call([x, w])
y.sum().backward()
assert torch.allclose(y.detach(), (x @ w.detach()).cos())
assert torch.allclose(w.grad, torch.full((3, 3), 2 * -torch.tensor(3.0).sin().item()))
loaded = [name for name in sys.modules if name.split(".")[0] in ("sympy", "scipy", "transformers")]
loaded += [name for name in sys.modules if name.startswith(("torch._dynamo.", "torch._inductor"))]
loaded += [name for name in sys.modules if name.startswith(("aotkit_aot_trace", "aotkit_partition"))]
parts = ("lowering", "graph_passes", "graph_partition", "loop_passes", "kernel_passes", "driver", "memory.build_plan")
parts += ("targets.cpu.render.kernel", "targets.cpu.module", "targets.cpu.generate")
parts += ("ir.nodes", "ir.instructions", "launch_plan.parts", "launch_plan.functions", "runtime.parts")
loaded += [f"aotkit_inductor_lower.{part}" for part in parts if f"aotkit_inductor_lower.{part}" in sys.modules]
print(loaded)
ours = [m.__file__ for n, m in sys.modules.items() if n.startswith("aotkit") and getattr(m, "__file__", None)]
print("\\n".join(ours))
"""


@pytest.mark.covers("F7.29")
def test_loading_imports_no_compiler_and_runs_nothing_that_was_stored(warm_python: Any) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return (x @ w).cos()

    call, _ = compiled(f)
    call(torch.ones(2, 3), torch.ones(3, 3, requires_grad=True)).sum().backward()
    done = warm_python.run(["-c", LOAD], only_torch=True)
    assert done.returncode == 0, done.stderr
    first, *files = done.stdout.splitlines()
    assert first == "[]", f"a hit imports {first}"
    assert len(files) > 50
    for file in files:
        for node in ast.walk(ast.parse(Path(file).read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [ast.unparse(node.func)] if isinstance(node, ast.Call) else []
            assert not set(names) & {"pickle", "marshal", "shelve", "dill", "eval", "torch.load", "load_module"}, file


def test_the_key_of_a_graph_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is asked for when an entry is looked for, computed, written and noted, and takes milliseconds."""
    from aotkit.artifact import lookup

    made = []

    def make(**parts: Any) -> Any:
        made.append(original(**parts))
        return made[-1]

    original = lookup.make_key
    monkeypatch.setattr(lookup, "make_key", make)
    call, _ = compiled(lambda x: (x * 3).sin().sum())
    call(torch.ones(3, requires_grad=True)).backward()
    assert len(made) == 1
    torch._dynamo.reset()
    call, again = compiled(lambda x: (x * 3).sin().sum())
    call(torch.ones(3, requires_grad=True)).backward()
    assert len(made) == 2 and made[0] == made[1] and loaded(again)
