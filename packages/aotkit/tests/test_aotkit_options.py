"""Options, modes and environment variables."""

from __future__ import annotations

from pathlib import Path

import pytest

import aotkit
from aotkit.environment import read_environment


def test_patch_changes_one_field_and_leaves_the_original() -> None:
    base = aotkit.Options()
    assert base.patch(numerics="fast").numerics == "fast"
    assert base.numerics == "eager"


@pytest.mark.covers("F8.11")
@pytest.mark.parametrize("name, value", [("fuel", "3"), ("cache", 1), ("partitioner", "x"), ("compile_workers", -1)])
def test_wrong_value_is_refused_with_the_field_named(name: str, value: object) -> None:
    with pytest.raises(aotkit.UnknownOption, match=name):
        aotkit.Options().patch(**{name: value})


def test_environment_is_parsed_in_one_place() -> None:
    env = read_environment(
        {
            "AOTKIT_LOG": "timing, ir",
            "AOTKIT_DUMP": "d",
            "AOTKIT_VERIFY": "1",
            "AOTKIT_FUEL": "4",
            "AOTKIT_DISABLE": "a,b",
        }
    )
    assert env.log == {"timing", "ir"} and env.dump_dir == Path("d")
    assert env.verify and env.fuel == 4 and env.disable == {"a", "b"}


@pytest.mark.parametrize("variables", [{"AOTKIT_LOG": "everything"}, {"AOTKIT_FUEL": "-1"}, {"AOTKIT_VERIFY": "yes"}])
def test_meaningless_environment_value_is_refused(variables: dict[str, str]) -> None:
    with pytest.raises(aotkit.UnknownOption):
        read_environment(variables)


@pytest.mark.parametrize("kind", [Path, str])
def test_recorder_subtracts_nested_stages_and_writes_numbered_dumps(tmp_path: Path, kind: type) -> None:
    recorder = aotkit.Recorder(dump_dir=kind(tmp_path))
    with recorder.stage("outer"), recorder.stage("inner"):
        recorder.dump("a b", "ir", lambda: "text")
    recorder.dump("c", "graphs", lambda: "more")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00_a-b.ir", "01_c.txt", "index.html"]
    assert list(recorder.stage_seconds()) == ["inner", "outer"]
    assert all(seconds >= 0 for seconds in recorder.stage_seconds().values())
    assert "total" in recorder.table()
