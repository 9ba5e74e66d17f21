"""Every job of the repository as a nox session; `nox -l` lists them.

torch is installed once, into `.nox/_torch`, together with its own dependencies and nothing else. A session sees it
through a `.pth` file in its environment. Isolation does not suffer: no package of ours is in that folder, and the
`test_package` sessions check that undeclared siblings and libraries cannot be imported.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.workspace import PACKAGES, Package, load_package, load_packages, lowest_allowed, with_siblings  # noqa: E402

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["test"]
nox.options.error_on_missing_interpreters = False

CONSTRAINTS = str(ROOT / "tools" / "constraints.txt")
PYTEST = ("pytest", "hypothesis", "expecttest")  # the last for torch.testing._internal
TEST_TOOLS = (*PYTEST, "nox", "import-linter", "transformers", "matplotlib", "rich", "triton")
RUN_DEPENDENCIES = ("llvmlite", "scipy", "filelock")  # what our sources import beside torch
BENCH_TOOLS = ("transformers", "matplotlib")
DOCS_TOOLS = ("mkdocs", "mkdocs-material")

#: What the tests of a package need beyond its declared dependencies: optional extras and their test doubles.
TEST_EXTRAS = {
    "cache": ("redis", "fakeredis", "fsspec"),
    "aotkit": ("transformers", "triton"),
    "inductor-lower": ("triton",),
}

#: Sessions that `nox -s test` queues, in this order: the quick ones first.
TEST_SESSIONS = (
    "lint",
    "types",
    "tools",
    *(f"test_package({name})" for name in PACKAGES),
    "api",
    "docs",
    "wheels",
    "integration",
)


# --- environments -----------------------------------------------------------------------------------------------


def base_environment(session: nox.Session, name: str, requirements: tuple[str, ...]) -> Path:
    """A virtual environment of its own under `.nox/`, made once and kept as long as its requirements stay the same."""
    tag = f"{sys.implementation.cache_tag}"
    home = ROOT / ".nox" / f"_{name}-{tag}"
    wanted = hashlib.sha256("\n".join([*requirements, Path(CONSTRAINTS).read_text()]).encode()).hexdigest()
    stamp = home / "requirements.sha256"
    if not stamp.exists() or stamp.read_text() != wanted:
        shutil.rmtree(home, ignore_errors=True)
        session.run(sys.executable, "-m", "venv", str(home), external=True)
        python = str(executables(home) / "python")
        session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *requirements, external=True)
        stamp.write_text(wanted)
    return home


def executables(home: Path) -> Path:
    """The folder of an environment that holds its programs."""
    return home / ("Scripts" if os.name == "nt" else "bin")


def site_packages(python: str, session: nox.Session) -> Path:
    """Where an interpreter keeps its pure-Python packages."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(str(session.run(python, "-c", query, silent=True, external=True)).strip())


def share_torch(session: nox.Session, python: str = "python") -> None:
    """Make torch and its own dependencies importable in the session's environment without installing them again."""
    home = base_environment(session, "torch", ("torch", "numpy"))
    shared = site_packages(str(executables(home) / "python"), session)
    (site_packages(python, session) / "_shared_torch.pth").write_text(f"{shared}\n")


def install(session: nox.Session, *requirements: str) -> None:
    """`pip install` at the versions of tools/constraints.txt."""
    session.install("-q", "-c", CONSTRAINTS, *requirements)


def pytest(session: nox.Session, *arguments: str) -> None:
    """Run pytest from the repository root; the session's positional arguments come last."""
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "PYTHONDONTWRITEBYTECODE": "1"}
    session.run("pytest", "-p", "no:cacheprovider", *arguments, *session.posargs, env=env)


# --- wheels -----------------------------------------------------------------------------------------------------


def build_wheel(session: nox.Session, package: Package, source: Path, destination: Path) -> Path:
    """Build one wheel with hatchling into an empty folder and return its path."""
    builder = executables(base_environment(session, "build", ("hatchling",))) / "python"
    shutil.rmtree(destination, ignore_errors=True)
    with session.chdir(source):
        session.run(
            str(builder), "-m", "hatchling", "build", "-t", "wheel", "-d", str(destination), external=True, silent=True
        )
    (wheel,) = destination.glob("*.whl")
    session.log(f"built {wheel.name}")
    return wheel


def build_wheels(session: nox.Session, names: tuple[str, ...]) -> list[Path]:
    """Build the wheels of these packages from the checkout."""
    packages = load_packages()
    target = ROOT / "build" / "wheels"
    return [build_wheel(session, packages[name], packages[name].path, target / name) for name in names]


def lowest_sibling(session: nox.Session, package: Package, specifier: str) -> Path:
    """The wheel of a sibling at the lowest version that a range allows: from the checkout, or from its release tag."""
    lowest = lowest_allowed(specifier)
    if lowest is None or padded(lowest) == padded(package.version):
        return build_wheels(session, (package.name,))[0]
    tag = f"{package.name}-v{lowest}"
    source = Path(tempfile.mkdtemp(prefix="aotkit-lowest-"))
    archive = source / "package.tar"
    session.run("git", "archive", "-o", str(archive), tag, f"packages/{package.name}", external=True)
    shutil.unpack_archive(archive, source)
    return build_wheel(session, package, source / "packages" / package.name, source / "wheel")


def padded(version: str) -> tuple[int, ...]:
    """`0.1` and `0.1.0` are the same release."""
    numbers = [int(part) for part in version.split(".") if part.isdigit()]
    return tuple(numbers + [0] * (3 - len(numbers)))


def install_wheels(session: nox.Session, wheels: list[Path], *extra: str) -> None:
    """Install our wheels (again, where they are there already) and then what they declare."""
    paths = [str(wheel) for wheel in wheels]
    session.install("-q", "--force-reinstall", "--no-deps", *paths)
    install(session, *paths, *extra)


def install_everything(session: nox.Session, *extra: str) -> None:
    """The shared torch, the eight wheels and further requirements."""
    share_torch(session)
    install_wheels(session, build_wheels(session, PACKAGES), *extra)


# --- sessions ---------------------------------------------------------------------------------------------------


@nox.session
def demo(session: nox.Session) -> None:
    """Compile and train a small BERT on the CPU and print how it went."""
    install_everything(session, "transformers", "rich")
    session.run("python", str(ROOT / "tools" / "demo.py"), *session.posargs)


@nox.session(venv_backend="none")
def test(session: nox.Session) -> None:
    """Everything that runs without Debian packages and without a GPU."""
    for name in TEST_SESSIONS:
        session.notify(name)


@nox.session
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def test_package(session: nox.Session, package: str) -> None:
    """A package's tests where only its declared dependencies are installed, its siblings at their lowest version."""
    packages = load_packages()
    wheels = build_wheels(session, (package,))
    declared = packages[package].siblings()
    for name in with_siblings(package, packages):
        if name != package:
            wheels.append(lowest_sibling(session, packages[name], declared.get(name, "")))
    share_torch(session)
    install_wheels(session, wheels, *PYTEST, *TEST_EXTRAS.get(package, ()))
    session.run("python", "-m", "pip", "check")
    if not session.posargs:
        pytest(session, "tools/isolation", "-q", "--package", package)
    pytest(session, f"packages/{package}/tests", "-q")


@nox.session
def tools(session: nox.Session) -> None:
    """Tests of the repository's own tools, which use the packages' sources as they lie here."""
    share_torch(session)
    install(session, *TEST_TOOLS, *RUN_DEPENDENCIES)
    session.env["PYTHONPATH"] = os.pathsep.join(str(p.path / "src") for p in load_packages().values())
    pytest(session, "tools/tests", "-q", "--ignore", "tools/tests/system")


@nox.session
def lint(session: nox.Session) -> None:
    """Style, import contracts, forbidden imports, sizes, and whether generated files are up to date."""
    install(session, "ruff", "import-linter")
    sources = os.pathsep.join(str(load_package(name).path / "src") for name in PACKAGES)
    checks = (
        ("ruff", "check", "."),
        ("ruff", "format", "--check", "--diff", "tools", "noxfile.py"),
        ("lint-imports", "--no-cache"),
        ("python", "-m", "tools.check_forbidden_imports"),
        ("python", "-m", "tools.check_sizes"),
        ("python", "-m", "tools.features", "page", "--check"),
        ("python", "-m", "tools.conformance", "coverage", "--check"),
    )
    failed = []
    for check in checks:
        if not run_ok(session, *check, env={"PYTHONPATH": sources}):
            failed.append(" ".join(check))
    if failed:
        session.error("failed: " + "; ".join(failed))


def run_ok(session: nox.Session, *command: str, env: dict[str, str]) -> bool:
    """Run a command to its end and say whether it succeeded, so that one failure does not hide the next."""
    try:
        session.run(*command, env=env)
    except nox.command.CommandFailed:
        return False
    return True


@nox.session
def types(session: nox.Session) -> None:
    """mypy over the sources of all packages and over the tools."""
    share_torch(session)
    install(session, "mypy", "filelock", "rich")
    for name in PACKAGES:
        if not load_package(name).source.is_dir():
            session.error(f"packages/{name} has no source folder")
    session.run("mypy", *(f"packages/{name}/src" for name in PACKAGES))
    session.run("mypy", "tools", "--exclude", "tools/(tests|isolation|integration)/")


@nox.session
def api(session: nox.Session) -> None:
    """Public names and signatures against the committed snapshots; `-- --update` writes them."""
    install_everything(session)
    session.run("python", "-m", "tools.check_api", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation site, strictly, into build/site."""
    install(session, *DOCS_TOOLS)
    build_site(session)


def build_site(session: nox.Session) -> None:
    """Stage the pages and let mkdocs make the site of them."""
    session.run("python", "-m", "tools.build_docs")
    session.run("mkdocs", "build", "--strict", "-q", "-f", "build/docs/mkdocs.yml", env={"NO_MKDOCS_2_WARNING": "1"})
    session.log("the site is in build/site")


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all wheels, install them outside the checkout and use each once; partition once more, by itself."""
    share_torch(session)
    built = build_wheels(session, PACKAGES)
    with outside_environment(session, built) as python:
        session.run(python, str(ROOT / "tools" / "smoke.py"), external=True)
    alone = [wheel for wheel in built if wheel.name.startswith("aotkit_partition-")]
    with outside_environment(session, alone) as python:
        listed = str(session.run(python, "-m", "pip", "list", "--local", external=True, silent=True))
        siblings = [line for line in listed.splitlines() if line.startswith("aotkit") and "partition" not in line]
        if siblings:
            session.error(f"the partition wheel pulled {siblings}")


@contextmanager
def outside_environment(session: nox.Session, built: list[Path], *extra: str) -> Iterator[str]:
    """A fresh environment outside the checkout with these wheels, as working directory; yields its interpreter."""
    with tempfile.TemporaryDirectory(prefix="aotkit-outside-") as folder:
        session.run(sys.executable, "-m", "venv", folder, external=True)
        python = str(executables(Path(folder)) / "python")
        share_torch(session, python)
        paths = [str(wheel) for wheel in built]
        session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *paths, *extra, external=True)
        with session.chdir(folder):
            yield python


@nox.session
def integration(session: nox.Session) -> None:
    """The eight wheels outside the checkout: five architectures, the interop matrix, every README example."""
    share_torch(session)
    started = time.monotonic()
    config, suite = str(ROOT / "pyproject.toml"), str(ROOT / "tools" / "integration")
    with outside_environment(session, build_wheels(session, PACKAGES), *PYTEST, "transformers") as python:
        command = (python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", config, suite, *session.posargs)
        session.run(*command, external=True, env={"OMP_NUM_THREADS": "1"})
    session.log(f"integration took {time.monotonic() - started:.0f} s")


@nox.session
def system(session: nox.Session) -> None:
    """What needs Debian packages: a real browser on the built site and on a partition report, a real Redis."""
    install(session, *DOCS_TOOLS, *PYTEST, "redis")
    share_torch(session)
    install_wheels(session, build_wheels(session, ("cache", "partition")))
    session.run("python", "-m", "tools.system_packages", external=True)
    build_site(session)
    pytest(session, "tools/tests/system", "-m", "system")


@nox.session
def fuzz(session: nox.Session) -> None:
    """Random programs over aliasing, mutation and views; `-- --programs 5000 --lowering kernels` and so on."""
    install_everything(session)
    session.run("python", "-m", "tools.fuzz", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def fuzz_ops(session: nox.Session) -> None:
    """Operators with arguments drawn from their schemas; `-- --samples 100000 --journal FILE` goes on where it was."""
    install_everything(session, "triton")
    session.run("python", "-m", "tools.fuzz_ops", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session
def mutants(session: nox.Session) -> None:
    """Small faults in the sources, which the tests must notice; `-- run --group schedule --sample 60 --diffs`."""
    share_torch(session)
    install(session, *TEST_TOOLS, *RUN_DEPENDENCIES)
    session.run("python", "-m", "tools.mutants", *(session.posargs or ["run"]), env={"OMP_NUM_THREADS": "1"})


@nox.session
def conformance(session: nox.Session) -> None:
    """Torch's table of operators through generated kernels; a run that was cut off goes on where it was."""
    install_everything(session, "expecttest")
    journal = str(ROOT / "build" / "conformance" / "op_db.jsonl")
    session.run(
        "python", "-m", "tools.conformance", "kernels", "--journal", journal, *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@nox.session
def bench(session: nox.Session) -> None:
    """Measure eager, the incumbent and aotkit; `-- --quick` is the short form."""
    install_everything(session, *BENCH_TOOLS)
    session.run("python", "-m", "tools.bench", *session.posargs)


@nox.session(venv_params=["--system-site-packages"])
def gpu(session: nox.Session) -> None:
    """Tests marked `gpu`, figures of kernels and of recorded graphs, with the torch and triton that the machine has."""
    probe = "import importlib.util as u; print(bool(u.find_spec('torch')) and __import__('torch').cuda.is_available())"
    if str(session.run("python", "-c", probe, silent=True)).strip() != "True":
        session.skip("no CUDA device on this machine: neither GPU tests nor GPU figures were run")
    installed = build_wheels(session, PACKAGES)
    session.install("-q", "--force-reinstall", "--no-deps", *(str(wheel) for wheel in installed))
    install(session, *PYTEST, "llvmlite", "scipy", "sympy", "filelock")
    pytest(session, "packages", "-m", "gpu")
    if not session.posargs:
        session.run("python", "-m", "tools.bench.triton_kernels")
        session.run("python", "-m", "tools.bench.cudagraphs")


@nox.session
def compat(session: nox.Session) -> None:
    """All package tests on the newest torch that the packages allow (its wheel may bring gigabytes)."""
    paths = [str(wheel) for wheel in build_wheels(session, PACKAGES)]
    session.install("-q", "--upgrade", "torch>=2.11,<2.16", "numpy", *paths, *PYTEST, "transformers")
    session.run("python", "-c", "import torch; print('torch', torch.__version__)")
    pytest(session, "packages", "-q")
