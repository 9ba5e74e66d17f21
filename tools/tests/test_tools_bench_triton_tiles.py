"""The bench of tiles: its kernels compile, and each alternative has the text and the whole blocks of the choice."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from aotkit_inductor_lower.kernel_passes.linearize import extents_of
from aotkit_inductor_lower.targets.triton import compile_kernel, kernels_of
from tools.bench import triton_tiles


def test_it_says_so_where_there_is_no_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert triton_tiles.main([]) == 0
    assert "no CUDA device" in capsys.readouterr().out


@pytest.mark.parametrize("case", triton_tiles.CASES, ids=lambda case: case.name)
def test_alternatives_run_the_same_text_in_other_blocks_without_a_rest(case: triton_tiles.Case) -> None:
    found = triton_tiles.compiled(case, interpreted=True)
    extents = extents_of(found.scheduled.buffers)
    for kernel in kernels_of(found.program):
        first, *others = triton_tiles.alternatives(kernel.source)
        assert first is kernel.source and {argument.name for argument in first.arguments} <= extents.keys()
        assert len({source.config for source in others}) == len(others) >= 3
        for source in others:
            assert source.text == first.text and source.config != first.config
            width = dict(source.config.blocks)["XBLOCK"]
            assert all(size.constant % width == 0 for size, block in source.grid if block == "XBLOCK")


def test_an_alternative_compiles() -> None:
    found = triton_tiles.compiled(triton_tiles.CASES[0], interpreted=True)
    (kernel,) = kernels_of(found.program)
    *_, last = triton_tiles.alternatives(kernel.source)
    assert compile_kernel(last, 90).threads == 32 * last.config.num_warps
