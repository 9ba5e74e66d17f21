"""The benchmark: its error measure, its table, and one small run from end to end."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
import traceback
from pathlib import Path
from typing import IO, Any

import numpy
import pytest
import torch

from tools.bench import compile_time, worker
from tools.bench.__main__ import main
from tools.bench.memory import peak_tensor_mb
from tools.bench.models import MODELS, MORE, make_batch, make_model
from tools.bench.numerics import compare, relative_errors
from tools.bench.profiles import eager_kinds, kind_of, kinds_of, profile_of
from tools.bench.run import Measurement
from tools.bench.table import acceptance, table

REFERENCE = {"grad:a": numpy.array([3.0, 4.0]), "grad:b": numpy.array([1e-9]), "output:y": numpy.array([1.0])}


def test_the_error_is_relative_to_the_reference() -> None:
    errors = relative_errors({**REFERENCE, "grad:a": numpy.array([3.0, 4.5], dtype=numpy.float32)}, REFERENCE)
    assert errors["grad:a"] == pytest.approx(0.1)
    assert errors["output:y"] == 0.0


def test_a_tiny_tensor_is_measured_against_all_tensors_of_its_kind() -> None:
    errors = relative_errors({**REFERENCE, "grad:b": numpy.array([2e-9])}, REFERENCE)
    assert errors["grad:b"] == pytest.approx(1e-9 / (1e-4 * 5.0), rel=1e-6)


@pytest.mark.parametrize("wrong", [numpy.array([1.0, math.nan]), numpy.array([1.0]), None])
def test_a_missing_misshapen_or_not_finite_tensor_has_infinite_error(wrong: numpy.ndarray | None) -> None:
    values = {name: value for name, value in {**REFERENCE, "grad:a": wrong}.items() if value is not None}
    assert relative_errors(values, REFERENCE)["grad:a"] == math.inf
    assert compare(values, REFERENCE, REFERENCE).out_of_bounds == ("grad:a",)


def test_a_backend_is_compared_with_three_times_eagers_own_error() -> None:
    eager = {**REFERENCE, "output:y": numpy.array([1.0 + 1e-5])}
    allowed = {**REFERENCE, "output:y": numpy.array([1.0 + 3.5e-5])}
    beyond = {**REFERENCE, "output:y": numpy.array([1.0 + 3.7e-5])}
    assert compare(allowed, eager, REFERENCE).ok
    assert compare(beyond, eager, REFERENCE).out_of_bounds == ("output:y",)


def test_a_gradient_that_eager_does_not_have_is_reported() -> None:
    assert compare({**REFERENCE, "grad:new": numpy.array([0.0])}, REFERENCE, REFERENCE).out_of_bounds == ("grad:new",)


def test_peak_memory_counts_what_lives_at_the_same_time() -> None:
    def step() -> None:
        for _ in range(3):  # one after the other: 4 MiB at once, not 12
            torch.empty(2**20)

    assert peak_tensor_mb(step) == pytest.approx(4.0, abs=0.1)


def test_peak_memory_counts_what_is_kept_between_steps() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        if not kept:
            kept.append(torch.empty(2**20))
        torch.empty(2**19)

    assert peak_tensor_mb(step) == pytest.approx(6.0, abs=0.1)


@pytest.mark.parametrize("name", [*MODELS, *MORE])
def test_each_model_trains_and_is_equal_in_every_process(name: str) -> None:
    model, batch = make_model(name), make_batch(name, quick=True)
    again = make_model(name).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in model.state_dict().items())
    model(**batch).loss.backward()
    without = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert without == [] or name in ("bert", "vit"), without


def row(backend: str, **figures: object) -> Measurement:
    return Measurement("bert", "train", backend, **figures)  # type: ignore[arg-type]


def test_missed_figures_are_named() -> None:
    exact = {"ok": False, "out_of_bounds": ["grad:w"], "largest": {"grad": 1.0}, "largest_eager": {"grad": 0.1}}
    rows = [row("inductor", first_call_s=30.0), row("aotkit", first_call_s=11.0, speedup=0.9, accuracy=exact)]
    sentences = acceptance(rows)
    assert len(sentences) == 3
    assert "grad:w" in sentences[0] and "0.900x eager" in sentences[1] and "0.37" in sentences[2]
    assert acceptance([row("inductor", first_call_s=30.0), row("aotkit", first_call_s=9.0, speedup=1.0)]) == []


def test_the_table_shows_a_failed_backend() -> None:
    assert "failed" in table([row("aotkit", error="no")]).splitlines()[1]


class Fork:
    """In the place of `subprocess.Popen` in `tools.bench.run`: a worker that need not import all anew."""

    def __init__(self, command: list[str], *, stderr: IO[str], env: dict[str, str], **_: object) -> None:
        (asked, ask), (answered, answer) = os.pipe(), os.pipe()
        self.process = os.fork()
        if self.process == 0:
            for opened, number in ((asked, 0), (answer, 1), (stderr.fileno(), 2)):
                os.dup2(opened, number)
            os.closerange(3, 4096)
            os.environ.update(env)
            sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
            try:
                os._exit(worker.main(command[command.index("tools.bench.worker") + 1 :]))
            except BaseException:  # noqa: BLE001  # the parent finds it in the worker's log
                traceback.print_exc()
                os._exit(1)
        os.close(asked)
        os.close(answer)
        self.stdin, self.stdout = os.fdopen(ask, "w"), os.fdopen(answered)

    def wait(self, timeout: float = 0) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


@pytest.mark.nightly("what it puts together is tested in parts")
@pytest.mark.slow
@pytest.mark.sample(1)
@pytest.mark.parametrize("forked", [True, False])
def test_a_quick_run_writes_results_and_plots_and_says_which_backend_failed(
    forked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if forked:
        importlib.import_module("torch._dynamo")
        monkeypatch.setattr("tools.bench.run.subprocess.Popen", Fork)
    backends = ["eager", "eager_noexcept", "no_such_backend"]  # the second is compiled by nothing but Dynamo
    arguments = ["--quick", "--rounds", "1", "--seconds", "0.05", "--models", "gpt2", "--modes", "train"]
    assert main([*arguments, "--backends", *backends, "--out", str(tmp_path)]) == 1
    data = json.loads((tmp_path / "results.json").read_text())
    eager, compiled, missing = data["rows"]
    assert "no_such_backend" in missing["error"] and missing["steady_ms"] is None
    assert "FAILED gpt2 train no_such_backend" in capsys.readouterr().err
    assert eager["error"] is None and eager["speedup"] == 1.0 and eager["steady_ms"] > 0
    assert compiled["accuracy"]["ok"] and compiled["accuracy"]["tensors"] > 20
    assert compiled["first_call_s"] > 0 and compiled["steady_ms"] > 0 and compiled["peak_tensor_mb"] > 1
    assert (tmp_path / "results.png").stat().st_size > 10_000
    assert "<svg" in (tmp_path / "results.svg").read_text()


def test_a_small_functions_first_call_is_taken_apart_into_stages_and_the_rest(fork_in: Any) -> None:
    fork_in(compile_time)
    found = compile_time.measure("gelu_residual", "aotkit", fresh=1)
    assert 0 < found["own"] < found["first"]
    assert {"trace", "schedule", "codegen", "bind"} <= set(found["table"])
    assert {"beyond", "beyond_cpu", "own_cpu", "first_cpu"} <= set(found)


@pytest.mark.nightly("test_aotkit_profile.py profiles a training step")
def test_a_profile_of_a_models_training_step_has_rows_of_both_directions() -> None:
    found = profile_of("vit", 2, quick=True)
    assert {row.graph.rpartition("-")[2] for row in found.rows} == {"forward", "backward"}
    assert found.explained == pytest.approx(found.kernels_ms / found.watched_ms * found.watching) and found.watching > 0
    own, eager = kinds_of(found), eager_kinds("vit", 2, quick=True)
    assert sum(own.values()) == pytest.approx(found.kernels_ms) and min(*own.values(), *eager.values()) > 0


def test_rows_of_a_profile_are_products_attention_or_the_rest() -> None:
    products = ["aten::addmm", "aten.mm.out", "aten::mkldnn_convolution", "aten.convolution_backward.default"]
    assert {kind_of(name) for name in products} == {"products"}
    assert kind_of("aten::_scaled_dot_product_flash_attention_for_cpu_backward") == "attention"
    assert kind_of("attention_backward_default", ours=True) == "attention"
    assert kind_of("convolution_1_start", ours=True) == kind_of("aten::native_layer_norm") == "rest"
