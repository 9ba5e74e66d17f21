"""Run inside a `test_package` environment: it must hold what the package declares, and nothing else of ours."""

from __future__ import annotations

import importlib.util
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
from tools.workspace import PACKAGES, import_name, load_packages, with_siblings  # noqa: E402

sys.path.remove(str(ROOT))

#: Distribution -> import name of libraries of which each belongs to one or two packages.
HEAVY = {"llvmlite": "llvmlite", "scipy": "scipy", "transformers": "transformers", "redis": "redis"}

#: What a package's tests may import beyond its declared dependencies; the same table as in the noxfile.
TEST_ONLY = {"cache": {"redis"}, "aotkit": {"transformers"}}


@pytest.fixture
def package(request: pytest.FixtureRequest) -> str:
    return request.config.getoption("--package")


def test_siblings_that_the_package_does_not_declare_cannot_be_imported(package: str) -> None:
    allowed = with_siblings(package, load_packages())
    for name in PACKAGES:
        found = importlib.util.find_spec(import_name(name)) is not None
        assert found == (name in allowed), f"{import_name(name)} importable: {found}, declared: {name in allowed}"


def test_the_package_is_the_installed_wheel_and_not_the_checkout(package: str) -> None:
    spec = importlib.util.find_spec(import_name(package))
    assert spec is not None and spec.origin is not None
    assert Path(spec.origin).is_relative_to(sys.prefix)
    assert not Path(spec.origin).is_relative_to(ROOT / "packages")


def test_libraries_that_the_package_does_not_declare_cannot_be_imported(package: str) -> None:
    packages = load_packages()
    declared = {name for sibling in with_siblings(package, packages) for name in packages[sibling].third_party()}
    for distribution, module in HEAVY.items():
        if distribution not in declared | TEST_ONLY.get(package, set()):
            assert importlib.util.find_spec(module) is None, f"{module} is importable but not declared"


def test_every_distribution_of_ours_is_a_declared_one(package: str) -> None:
    packages = load_packages()
    allowed = {packages[name].distribution for name in with_siblings(package, packages)}
    ours = {d.metadata["Name"] for d in distributions() if d.metadata["Name"].startswith("aotkit")}
    assert ours == allowed


def test_no_test_tool_but_pytest_and_hypothesis_is_there(package: str) -> None:
    for module in ("nox", "ruff", "mypy", "hatchling", "mkdocs", "importlinter"):
        assert importlib.util.find_spec(module) is None, f"{module} is importable in an isolated environment"
