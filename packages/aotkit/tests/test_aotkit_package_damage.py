"""Packages that were damaged or made for something else: a typed error each, or the same results; never others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import aotkit
import aotkit.artifact.records as records
import aotkit_inductor_lower.launch_plan.codec as codec
from aotkit.driver import package
from aotkit_runtime_wrappers import plan

KEY = "a key of sixteen or more"


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).eval()


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder, x = tmp_path_factory.mktemp("packages"), torch.ones(3, 8)
    aotkit.aot_compile(model(), (x,), folder / "plain")
    aotkit.aot_compile(model(), (x,), folder / "signed", signing_key=KEY)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def place(data: bytes, chance: random.Random) -> int:
    """As often near the end, where the directory is, as anywhere."""
    return chance.randrange(len(data)) if chance.random() < 0.5 else len(data) - 1 - chance.randrange(800)


@pytest.mark.parametrize("kind", ["plain", "signed"])
def test_of_200_damaged_packages_each_is_refused_or_gives_the_same(
    files: dict[str, bytes], kind: str, tmp_path: Path, damaged: Callable[..., bytes]
) -> None:
    chance, x, refused = random.Random(18), torch.ones(3, 8), 0
    (tmp_path / "whole").write_bytes(files[kind])
    wanted = aotkit.load(tmp_path / "whole")(x)
    for _ in range(200):
        (tmp_path / "file").write_bytes(damaged(files[kind], chance, place(files[kind], chance)))
        try:
            loaded = aotkit.load(tmp_path / "file", signing_key=KEY if kind == "signed" else None)
        except aotkit.PackageError:
            refused += 1
        else:  # fields of a zip archive that nobody reads
            assert torch.equal(loaded(x), wanted)
    assert refused > 120


def test_a_changed_weight_is_noticed_unless_that_is_not_wanted(files: dict[str, bytes], tmp_path: Path) -> None:
    first = model()[0].weight.detach().numpy().tobytes()
    at = files["plain"].index(first)
    changed = bytearray(files["plain"])
    changed[at + 2] ^= 1
    (tmp_path / "file").write_bytes(changed)
    with pytest.raises(aotkit.PackageError, match="the checksum of its weights differs"):
        aotkit.load(tmp_path / "file")
    loaded = aotkit.load(tmp_path / "file", check_weights=False)
    assert not torch.equal(loaded.weights["0.weight"], model()[0].weight)


def test_the_runner_in_c_reads_the_formats_that_are_written() -> None:
    """Whoever gives a format a new number looks at what the runner makes of the change."""
    folder = Path(aotkit.__file__).parent / "runner"
    text = "".join(path.read_text() for path in sorted(folder.glob("*.cpp")))
    numbers = {
        name: int(value)
        for name, value in re.findall(r"\b(ARTIFACT_FORMAT|PLAN_FORMAT|MANIFEST_FORMAT|FORMAT) = (\d+)", text)
    }
    assert numbers == {
        "ARTIFACT_FORMAT": records.ARTIFACT_FORMAT,
        "PLAN_FORMAT": plan._FORMAT.version,
        "MANIFEST_FORMAT": package.MANIFEST_FORMAT,
        "FORMAT": codec.FORMAT,
    }
