"""A tag releases one package, if its version, its changelog and its archives agree."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tools.release import archives_of, main, problems, read_tag
from tools.workspace import PACKAGES, ROOT, load_package

DATED = "# Changelog\n\n## [0.1.0] - 2026-11-30\n"


@pytest.mark.parametrize("tag", ["partition-0.2.0", "nothing-v0.2.0", "partition-v0.2", "v0.2.0", "partition-v0.2.0-x"])
def test_a_tag_that_names_no_package_or_no_version_is_refused(tag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="no tag of a release"):
        read_tag(tag)
    assert main([tag, "--check"]) == 1 and "no tag of a release" in capsys.readouterr().out


def test_each_package_has_a_tag() -> None:
    for name in PACKAGES:
        assert read_tag(f"{name}-v1.2.3") == (name, "1.2.3")
    assert read_tag("inductor-lower-v1.2.3rc1") == ("inductor-lower", "1.2.3rc1")


def test_version_and_changelog_have_to_agree_with_the_tag() -> None:
    package = load_package("partition")
    assert problems(package, package.version, DATED.replace("0.1.0", package.version)) == []
    (version,) = problems(package, "9.9.9", DATED.replace("0.1.0", "9.9.9"))
    assert "the tag says 9.9.9" in version
    (heading,) = problems(package, package.version, "# Changelog\n\n## [Unreleased]\n")
    assert "no heading" in heading
    (date,) = problems(package, package.version, DATED.replace("2026-11-30", "unreleased"))
    assert "no date" in date


def test_siblings_without_a_range_are_told_of() -> None:
    package = load_package("aotkit")
    loose = replace(package, dependencies=("aotkit-cache>=0.1",))
    found = problems(loose, package.version, DATED.replace("0.1.0", package.version))
    assert any("give a range" in each for each in found)


def test_only_the_archives_of_the_package_are_uploaded(tmp_path: Path) -> None:
    dist = tmp_path / "dist"
    dist.mkdir()
    package = load_package("aot-trace")
    for name in ("aotkit_aot_trace", "aotkit"):
        for suffix in ("-py3-none-any.whl", ".tar.gz"):
            (dist / f"{name}-{package.version}{suffix}").write_text("")
    assert [path.name for path in archives_of(package, package.version, dist)] == [
        f"aotkit_aot_trace-{package.version}-py3-none-any.whl",
        f"aotkit_aot_trace-{package.version}.tar.gz",
    ]
    (dist / f"aotkit_aot_trace-{package.version}.tar.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"tar\.gz"):
        archives_of(package, package.version, dist)


def test_the_workflow_publishes_what_this_tool_chose_and_stores_no_token() -> None:
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    assert "tools.release" in text and "id-token: write" in text and "environment: release" in text
    assert "secrets." not in text and "password" not in text
    assert text.index("nox -s wheels sdists") < text.index("gh-action-pypi-publish")
