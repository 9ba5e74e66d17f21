"""A sample of torch's table of operators through pass-through compilers; the whole table is a command."""

from __future__ import annotations

import pytest
import torch

from tools.conformance.op_db import VARIANTS, check_operator, entries, main

pytestmark = pytest.mark.filterwarnings("ignore")

SAMPLE = sorted(entries())[1::9]


@pytest.mark.parametrize("name", SAMPLE)
def test_an_operator_of_the_table_is_as_in_eager_or_refused(name: str) -> None:
    outcome = check_operator(entries()[name], torch.float32)
    assert outcome.kind in ("equal", "refused", "absent", "eager raises"), outcome.reason


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64, torch.bfloat16])
def test_every_variant_and_dtype_is_run(variant: str, dtype: torch.dtype) -> None:
    assert check_operator(entries()["mul"], dtype, variant).kind == "equal"


def test_a_wrong_result_and_a_wrong_gradient_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    info = entries()["sin"]
    monkeypatch.setattr("aotkit.aot_function", lambda fn, *_, **__: lambda *args: fn(*args) + 1)
    assert check_operator(info, torch.float32).reason.startswith("outputs")
    monkeypatch.setattr("aotkit.aot_function", lambda fn, *_, **__: lambda x, *args: fn(x.detach(), *args) + x - x)
    assert check_operator(info, torch.float32).reason.startswith("gradients")
    monkeypatch.setattr("aotkit.aot_function", lambda fn, *_, **__: lambda x, *args: fn(x, *args).t())
    assert check_operator(info, torch.float32).reason.startswith("outputs are")


def test_the_command_counts_and_keeps_outcomes(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "outcomes.json"
    assert main(["--only", "sin", "equal", "--dtypes", "float32", "int64", "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "float32    equal         1" in printed and "refused    2" in printed
    assert file.read_text().count('"kind"') == 4
