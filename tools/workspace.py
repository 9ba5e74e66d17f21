"""What the repository consists of: its packages, their dependencies, their source files.

Everything is read from the packages' own `pyproject.toml`; only standard-library modules are used, so
that any tool (and the noxfile) can import this before anything is installed.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

#: Folder names below `packages/`, in an order in which each follows what it depends on.
PACKAGES = (
    "functionalize",
    "aot-trace",
    "partition",
    "runtime-wrappers",
    "inductor-lower",
    "cudagraphs",
    "cache",
    "aotkit",
)

#: Modules that other packages and users import by name; of everything else they import a package's root only.
PUBLIC_MODULES: dict[str, tuple[str, ...]] = {
    "functionalize": ("lazy_bits", "records", "subclasses", "symbols", "tracing", "view_methods"),
    "aot-trace": ("callables", "descriptors", "export", "gradients", "graph_queries"),
    "partition": (
        "activation_offload",
        "chunk_losses",
        "donated_buffers",
        "errors",
        "graph_text",
        "measure",
        "missing_tangents",
        "one_graph",
        "plots",
        "runtime_estimate",
        "timeline",
    ),
    "runtime-wrappers": (
        "compiler_wrapper",
        "double_backward",
        "errors",
        "placed_arguments",
        "refinements",
        "schema_checks",
        "synthetic_base",
    ),
    "inductor-lower": (
        "driver",
        "errors",
        "graph_partition",
        "graph_passes.freeze",
        "graph_passes.known_types",
        "graph_passes.model_blocks",
        "launch_plan.codec",
        "launch_plan.facts",
        "launch_plan.parts",
        "launch_plan.program_text",
        "memory.freed",
        "options",
        "report",
        "runtime",
        "memory.huge_pages",
        "targets.cpu",
    ),
    "cudagraphs": ("drivers", "plan", "split", "trees"),
    "cache": ("sealed", "stores"),
    "aotkit": ("attention", "huge_pages", "hugging_face", "link", "saved", "staged"),
}


@dataclass(frozen=True, slots=True)
class Package:
    """One package as its `pyproject.toml` declares it."""

    name: str
    path: Path
    distribution: str
    dependencies: tuple[str, ...]
    extras: tuple[str, ...]

    @property
    def import_name(self) -> str:
        """The flat import name: `aot-trace` is imported as `aotkit_aot_trace`."""
        return import_name(self.name)

    @property
    def source(self) -> Path:
        """The folder that holds the import package."""
        return self.path / "src" / self.import_name

    @property
    def version(self) -> str:
        """The version in `__about__.py`."""
        text = (self.source / "__about__.py").read_text(encoding="utf-8")
        match = re.search(r'^__version__(?:\s*:\s*\w+)?\s*=\s*"([^"]+)"', text, re.MULTILINE)
        if match is None:
            raise ValueError(f'{self.source / "__about__.py"} holds no line `__version__ = "..."`')
        return match.group(1)

    def siblings(self) -> dict[str, str]:
        """The other packages of this repository that it declares, as folder name -> version range."""
        found = {}
        for requirement in self.dependencies:
            name, specifier = split_requirement(requirement)
            folder = folder_of_distribution(name)
            if folder is not None:
                found[folder] = specifier
        return found

    def third_party(self) -> tuple[str, ...]:
        """Names of the declared distributions that are not ours, normalized."""
        names = (split_requirement(requirement)[0] for requirement in self.dependencies)
        return tuple(name for name in names if folder_of_distribution(name) is None)


def import_name(folder: str) -> str:
    """The import name of the package in `packages/<folder>`."""
    return "aotkit" if folder == "aotkit" else "aotkit_" + folder.replace("-", "_")


def folder_of_distribution(distribution: str) -> str | None:
    """`aotkit-partition` -> `partition`; None for a distribution that is not ours."""
    if distribution == "aotkit":
        return "aotkit"
    folder = distribution.removeprefix("aotkit-")
    return folder if folder != distribution and folder in PACKAGES else None


def split_requirement(requirement: str) -> tuple[str, str]:
    """`"torch>=2.11,<2.16 ; marker"` -> `("torch", ">=2.11,<2.16")`, the name normalized."""
    match = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[[^\]]*\])?\s*([^;@]*)", requirement)
    if match is None:
        raise ValueError(f"cannot read the requirement {requirement!r}")
    return re.sub(r"[-_.]+", "-", match.group(1)).lower(), match.group(2).strip()


def lowest_allowed(specifier: str) -> str | None:
    """The version after `>=` in a range, or None where the range has no lower end."""
    match = re.search(r">=\s*([0-9][^,\s]*)", specifier)
    return match.group(1) if match else None


def load_package(folder: str, root: Path = ROOT) -> Package:
    """Read `packages/<folder>/pyproject.toml`."""
    path = root / "packages" / folder
    with open(path / "pyproject.toml", "rb") as stream:
        project = tomllib.load(stream)["project"]
    return Package(
        name=folder,
        path=path,
        distribution=project["name"],
        dependencies=tuple(project.get("dependencies", ())),
        extras=tuple(project.get("optional-dependencies", {})),
    )


def load_packages(root: Path = ROOT) -> dict[str, Package]:
    """All packages by folder name."""
    return {folder: load_package(folder, root) for folder in PACKAGES}


def with_siblings(folder: str, packages: dict[str, Package]) -> tuple[str, ...]:
    """The package and, before it, every package of ours that it needs, also indirectly."""
    needed: set[str] = set()

    def add(name: str) -> None:
        if name not in needed:
            needed.add(name)
            for sibling in packages[name].siblings():
                add(sibling)

    add(folder)
    return tuple(name for name in PACKAGES if name in needed)


def dependents(folder: str, packages: dict[str, Package]) -> tuple[str, ...]:
    """The packages that need this one, also indirectly, itself left out."""
    return tuple(name for name in PACKAGES if name != folder and folder in with_siblings(name, packages))


def source_files(root: Path = ROOT) -> Iterator[Path]:
    """Every Python file of `packages/*/src`, sorted."""
    for folder in PACKAGES:
        yield from sorted((root / "packages" / folder / "src").rglob("*.py"))
