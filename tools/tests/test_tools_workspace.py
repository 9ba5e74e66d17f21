"""The packages as their own files declare them, and which of them a change concerns."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tools import changed_packages
from tools.changed_packages import affected
from tools.workspace import (
    PACKAGES,
    ROOT,
    Package,
    dependents,
    folder_of_distribution,
    load_packages,
    lowest_allowed,
    split_requirement,
    with_siblings,
)

ALLOWED_SIBLINGS = {
    "functionalize": set(),
    "aot-trace": {"functionalize"},
    "partition": set(),
    "runtime-wrappers": {"functionalize"},
    "inductor-lower": set(),
    "cudagraphs": set(),
    "cache": set(),
    "aotkit": set(PACKAGES) - {"aotkit"},
}


@pytest.fixture(scope="module")
def packages() -> dict[str, Package]:
    return load_packages()


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_declares_exactly_the_siblings_that_the_design_allows(
    name: str, packages: dict[str, Package]
) -> None:
    assert set(packages[name].siblings()) == ALLOWED_SIBLINGS[name]


@pytest.mark.parametrize("name", PACKAGES)
def test_siblings_are_declared_by_a_range_with_both_ends(name: str, packages: dict[str, Package]) -> None:
    for sibling, specifier in packages[name].siblings().items():
        assert lowest_allowed(specifier) is not None, f"{sibling}{specifier} has no lowest version"
        assert "<" in specifier.replace(">=", ""), f"{sibling}{specifier} has no upper end"


@pytest.mark.parametrize("name", PACKAGES)
def test_a_package_is_complete(name: str, packages: dict[str, Package]) -> None:
    package = packages[name]
    assert package.distribution == ("aotkit" if name == "aotkit" else f"aotkit-{name}")
    assert package.version
    for path in (package.path / "README.md", package.path / "CHANGELOG.md", package.source / "py.typed"):
        assert path.is_file(), f"{path.relative_to(ROOT)} is missing"
    assert list((package.path / "tests").glob("test_*.py"))


def test_test_files_have_unique_names() -> None:
    names = [path.name for folder in PACKAGES for path in (ROOT / "packages" / folder / "tests").rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=2.11,<2.16", ("torch", ">=2.11,<2.16")),
        ("fsspec[s3] >= 2023 ; python_version > '3.8'", ("fsspec", ">= 2023")),
        ("Some_Name", ("some-name", "")),
    ],
)
def test_requirements_are_split_into_name_and_range(requirement: str, expected: tuple[str, str]) -> None:
    assert split_requirement(requirement) == expected


def test_lowest_allowed_version_of_a_range() -> None:
    assert lowest_allowed(">=0.1,<0.2") == "0.1"
    assert lowest_allowed("<0.2") is None


def test_distributions_of_others_are_not_ours() -> None:
    assert folder_of_distribution("aotkit-partition") == "partition"
    assert folder_of_distribution("partition") is None
    assert folder_of_distribution("torch") is None


def test_needed_siblings_come_before_the_package(packages: dict[str, Package]) -> None:
    assert with_siblings("aot-trace", packages) == ("functionalize", "aot-trace")
    assert with_siblings("partition", packages) == ("partition",)
    assert with_siblings("aotkit", packages) == PACKAGES


def test_dependents_of_a_package(packages: dict[str, Package]) -> None:
    assert dependents("functionalize", packages) == ("aot-trace", "runtime-wrappers", "aotkit")
    assert dependents("aotkit", packages) == ()


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["packages/cache/src/aotkit_cache/key.py"], ("cache", "aotkit")),
        (["packages/functionalize/README.md"], ("functionalize", "aot-trace", "runtime-wrappers", "aotkit")),
        (["docs/index.md", "README.md"], ()),
        (["docs/index.md", "tools/constraints.txt"], PACKAGES),
        (["noxfile.py"], PACKAGES),
        (["packages/unknown/file.py"], ()),
        ([], ()),
    ],
)
def test_a_change_concerns_the_package_and_its_dependents(
    paths: list[str], expected: tuple[str, ...], packages: dict[str, Package]
) -> None:
    assert affected(paths, packages) == expected


def test_changed_files_are_those_since_the_merge_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b.example"]
        done = subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q", "-b", "main")
    (tmp_path / "a").write_text("1")
    git("add", "."), git("commit", "-qm", "one")
    git("checkout", "-qb", "branch")
    (tmp_path / "b").write_text("1")
    git("add", "."), git("commit", "-qm", "two")
    git("checkout", "-q", "main")
    (tmp_path / "c").write_text("1")
    git("add", "."), git("commit", "-qm", "three")
    git("checkout", "-q", "branch")
    monkeypatch.setattr(changed_packages, "ROOT", tmp_path)
    assert changed_packages.changed_files("main") == ["b"]
