"""What Dynamo gives a backend and gets from it: compile ids, its context, graphs that write, resets."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._guards import CompileContext, TracingContext

import aotkit
from aotkit.driver import process
from aotkit.driver.process import collections_put_off, put_full_collections_off_while_tracing


def compiled(fn: Callable[..., Any], recorder: aotkit.Recorder, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(fn, backend="aotkit", options={"fallback": "error", "observer": recorder, **options})


@pytest.mark.covers("F8.4")
def test_logs_and_events_name_dynamos_compile() -> None:
    seen: list[tuple[str, bool]] = []

    class Watching(aotkit.Recorder):
        def event(self, name: str, fields: Any, /) -> None:
            seen.append((str(CompileContext.current_compile_id()), TracingContext.try_get() is not None))
            super().event(name, fields)

    stream = io.StringIO()
    recorder = Watching(log=frozenset({"timing"}), stream=stream)
    call = compiled(lambda x: x.sin() + 1, recorder)
    for size in (3, 4):  # the second compile of the same function
        torch.testing.assert_close(call(torch.ones(size)), torch.ones(size).sin() + 1)
    begun = [fields for name, fields in recorder.events if name == "compile.begin"]
    ids = [fields["compile_id"] for fields in begun]
    assert len(set(ids)) == 2 and all(identity in {i for i, _ in seen} for identity in ids)
    assert all(context for _, context in seen)  # Dynamo's tracing context is there throughout
    text = stream.getvalue()
    for identity in ids:
        assert f"seconds per stage of {identity}" in text
    assert str(ids[0]).endswith("/0") and str(ids[1]).endswith("/1")
    without = aotkit.Recorder()
    gm = torch.fx.symbolic_trace(lambda x: (x + 1,))
    aotkit.make_backend(aotkit.Options(), without)(gm, [torch.ones(2)])
    name, fields = without.events[0]
    assert name == "compile.begin" and fields["compile_id"] == ""  # nobody's compile


@pytest.mark.covers("F8.5")
@pytest.mark.parametrize("mode, copies, results", [("default", 1, 1), ("aot-eager", 0, 2)])
def test_an_inference_writes_to_its_inputs_in_generated_code_and_behind_the_graph_that_aten_runs(
    mode: str, copies: int, results: int, tmp_path: Path
) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        return x + 1

    recorder = aotkit.Recorder(dump_dir=tmp_path)
    x = torch.arange(4.0)
    torch.testing.assert_close(compiled(f, recorder, mode=mode)(x), torch.arange(4.0) * 2 + 1)
    torch.testing.assert_close(x, torch.arange(4.0) * 2)
    (captured,) = [path.read_text() for path in tmp_path.glob("*/*") if "captured" in path.name]
    assert captured.count("aten.copy_") == copies
    (returned,) = [line for line in captured.splitlines() if line.strip().startswith("return ")]
    assert len([part for part in returned.strip(" ()").removeprefix("return (").split(",") if part.strip()]) == results


class Watching(aotkit.Recorder):
    """Notes by stage whether garbage is collected."""

    def __init__(self) -> None:
        super().__init__()
        self.collects: dict[str, bool] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.collects[name] = gc.isenabled()
        with super().stage(name):
            yield


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_is_collected_while_a_graph_is_compiled(enabled: bool) -> None:
    was, recorder = gc.isenabled(), Watching()
    try:
        (gc.enable if enabled else gc.disable)()
        x = torch.randn(8, requires_grad=True)
        run = torch.compile(lambda a: a.sin().sum(), backend=aotkit.make_backend(aotkit.Options(cache=False), recorder))
        y = run(x)
        assert gc.isenabled() is enabled
        assert {"trace", "codegen"} <= recorder.collects.keys() and not any(recorder.collects.values())
        recorder.collects.clear()
        y.backward()
        assert gc.isenabled() is enabled
        assert "codegen" in recorder.collects and not any(recorder.collects.values())
    finally:
        (gc.enable if was else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_a_load_puts_collections_off_and_leaves_the_collector_as_it_was(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(ValueError, match="inside"), collections_put_off():
            assert not gc.isenabled()
            raise ValueError("inside")
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def _circle() -> list[object]:
    made: list[object] = []
    made.append(made)
    return made


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is collected by itself, and what is is by Python's own thresholds; afterwards all is as the tests'
    settings have it, which freeze."""
    monkeypatch.setattr(process, "_frozen_by_others", [])
    was, frozen, thresholds = gc.isenabled(), gc.get_freeze_count(), gc.get_threshold()
    gc.disable()
    gc.set_threshold(700, 10, 10)
    yield
    gc.set_threshold(*thresholds)
    (gc.freeze if frozen else gc.unfreeze)()
    (gc.enable if was else gc.disable)()


@pytest.mark.usefixtures("collector")
def test_what_a_load_makes_is_old_and_what_a_compile_makes_is_young() -> None:
    gc.unfreeze()
    with collections_put_off():
        loaded = _circle()
    with collections_put_off(keeps=False):
        compiled = _circle()
    young = {id(each) for each in gc.get_objects(generation=0)}
    assert id(loaded) not in young and id(compiled) in young


@pytest.mark.usefixtures("collector")
def test_what_somebody_has_frozen_stays_frozen() -> None:
    gc.freeze()
    frozen = gc.get_freeze_count()
    with collections_put_off():
        made = _circle()
    left = gc.get_freeze_count()  # other tests' objects among them die when nobody holds them any more
    assert frozen // 2 < left <= frozen and made[0] is made and process._frozen_by_others


class _Held:
    """Garbage that only a collection finds, once nobody holds it."""

    def __init__(self) -> None:
        self.itself = self


def _old_garbage() -> weakref.ref[_Held]:
    held = _Held()
    gc.collect()  # it is of the oldest generation now
    return weakref.ref(held)


def _collects_everything_by_itself() -> bool:
    """Whether Python does, when a process has made more objects than it had."""
    seen: list[str] = []

    def note(phase: str, info: dict[str, Any]) -> None:
        if phase == "stop" and info["generation"] == 2:
            seen.append(phase)

    enough = 4 * len(gc.get_objects()) // 3 + 100_000  # of which the youngest are counted 700 at a time, ten times ten
    gc.callbacks.append(note)
    gc.enable()
    made: list[list[None]] = []
    while not seen and len(made) < enough:
        made.append([])
    gc.disable()
    gc.callbacks.remove(note)
    return bool(seen)


@pytest.mark.usefixtures("collector")
def test_full_collections_wait_while_dynamo_compiles_and_at_no_other_time() -> None:
    torch._dynamo.reset()
    put_full_collections_off_while_tracing()
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    found: dict[str, bool] = {}

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        garbage = _old_garbage()
        found["by itself"] = _collects_everything_by_itself()
        found["alive"] = garbage() is not None
        gc.collect()
        found["alive after a call"] = garbage() is not None
        return gm.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(3))
    assert found == {"by itself": False, "alive": True, "alive after a call": False}
    assert gc.get_threshold() == before and frozen // 2 <= gc.get_freeze_count() <= frozen
    garbage = _old_garbage()
    assert _collects_everything_by_itself() and garbage() is None


@pytest.mark.usefixtures("collector")
def test_thresholds_that_somebody_sets_while_dynamo_compiles_stay() -> None:
    torch._dynamo.reset()
    put_full_collections_off_while_tracing()

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        gc.set_threshold(5000, 20, 30)
        return gm.forward

    # From torch 2.15 on Dynamo puts collections off as well, and sets back whatever is there.
    torchs = {"gc_gen2_threshold_during_compile": None}
    with torch._dynamo.config.patch({k: v for k, v in torchs.items() if hasattr(torch._dynamo.config, k)}):
        torch.compile(lambda x: x + 2, backend=backend)(torch.ones(3))
    assert gc.get_threshold() == (5000, 20, 30)


def test_the_first_compile_has_asked_dynamo_and_every_later_one_asks_again() -> None:
    from torch._dynamo.callback import callback_handler

    torch._dynamo.reset()
    assert not callback_handler.start_callbacks
    run = torch.compile(lambda x: x * 2, backend="aotkit")
    for size in (3, 4):  # the second compile finds that it was asked
        torch.testing.assert_close(run(torch.ones(size)), torch.full((size,), 2.0))
    assert len(callback_handler.start_callbacks) == len(callback_handler.end_callbacks) == 1
