"""The bench of products of few rows: each is one kernel of ours, or ATen's call, and other tiles have its text."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from aotkit_inductor_lower.targets.triton import compile_kernel
from tools.bench import triton_rows


def test_it_says_so_where_there_is_no_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_rows.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("case", triton_rows.CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("rows", [1, 8])
def test_a_product_is_one_kernel_whose_text_other_tiles_share(case: triton_rows.Case, rows: int) -> None:
    source = triton_rows.source_of(case, rows)
    assert source is not None and {a.name: a.written for a in source.arguments} == {"x_1": 0, "weight_1": 0, "mm": 1}
    others = list(triton_rows.alternatives(source))
    assert all(other.text == source.text and other.config != source.config for other in others)
    assert len(others) >= (3 if "RBLOCK" not in dict(source.config.blocks) else 0)


def test_other_tiles_compile() -> None:
    source = triton_rows.source_of(triton_rows.CASES[1], 1)
    assert source is not None
    *_, last = triton_rows.alternatives(source)
    assert compile_kernel(last, 90).threads == 32 * last.config.num_warps
