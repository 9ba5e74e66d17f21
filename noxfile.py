"""Every job of the repository as a nox session; `nox -l` lists them.

torch is installed once, into `.nox/_torch-*`, together with its own dependencies and nothing else; so are pytest,
scipy and others, each into an environment of its own. A session sees those that it asks for, through `.pth` files in
its environment. Isolation does not suffer: no package of ours is in these folders, and the `test_package` sessions
check that undeclared siblings and libraries cannot be imported. One environment has a pip, which installs into all.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

try:
    import fcntl
except ImportError:  # on Windows: run one session at a time
    fcntl = None  # type: ignore[assignment]

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.compat import paths_of  # noqa: E402
from tools.lowest import lowest_requirements  # noqa: E402
from tools.side_by_side import processors  # noqa: E402
from tools.workspace import PACKAGES, Package, load_package, load_packages, lowest_allowed, with_siblings  # noqa: E402

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["test"]
nox.options.error_on_missing_interpreters = False

os.environ["PYTHONDONTWRITEBYTECODE"] = ""  # kept whatever the environment says: processes by the hundred read it

CONSTRAINTS = str(ROOT / "tools" / "constraints.txt")
TEST_TOOLS = ("nox", "import-linter", "matplotlib", "rich")
RUN_DEPENDENCIES = ("llvmlite", "scipy", "filelock", "jinja2")  # what our sources import beside torch
BENCH_TOOLS = ("transformers", "matplotlib")

NEWEST_TORCH = "2.15"  # that the packages allow

#: Pairs of torch and Triton with which what is for CUDA is tested, without a device.
CUDA_PAIRS = (("2.11", "3.6.0"), ("2.13", "3.7.1"))

#: What is installed once and seen by the sessions that ask for it; expecttest is for torch.testing._internal.
SHARED = {
    "torch": ("torch", "numpy"),
    "pytest": ("pytest", "pytest-xdist", "hypothesis", "expecttest"),
    "transformers": ("transformers", "accelerate", "lightning"),
    "triton": ("triton",),
    "scipy": ("scipy",),
    "llvmlite": ("llvmlite",),
    "twine": ("twine",),
    "docs": ("mkdocs", "mkdocs-material", "mkdocstrings[python]"),
}

#: Thousands of modules of which sessions import a few hundred: these become byte code when they are imported.
LITTLE_OF_IT_IS_IMPORTED = ("transformers", "twine", "docs", "scipy")

#: The shared environment that has a pip: to install pip anew into each environment takes longer than all the rest.
BUILD_TOOLS = ("hatchling",)

#: What the tests of a package need beyond its declared dependencies: optional extras and their test doubles.
TEST_EXTRAS = {"cache": ("redis", "fakeredis", "fsspec")}
SHARED_TEST_EXTRAS = {"aotkit": ("transformers", "triton"), "inductor-lower": ("triton",)}

#: Files of a package's tests that the `integration` session runs, from the same wheels.
RUN_BY_INTEGRATION = {"aotkit": ("test_aotkit_from_outside.py",)}

#: Packages whose tests take minutes: several processes share them.
LONG = ("aotkit", "inductor-lower", "partition")

#: Sessions that `nox -s test` runs side by side. The longest come first, so that no processor is idle at the end; the
#: two that need no torch come while it is installed.
TEST_SESSIONS = (
    "test_package(aotkit)",
    "lint",
    "docs",
    "test_package(inductor-lower)",
    "integration",
    "library_paths",
    "tools",
    "types",
    *(f"test_package({name})" for name in PACKAGES if name not in ("aotkit", "inductor-lower")),
    "wheels",
    "sdists",
    "api",
)

#: Sessions that `nox -s system` runs side by side: first the one whose single process takes longest.
SYSTEM_SESSIONS = ("emulated_kernels", "system_tests", "emulated_levels")

#: Not emulated by qemu: tests that take long, of tile registers, which it has not, of levels, since each would be the
#: emulated one, and of several threads, whose memory this processor keeps in order.
NOT_EMULATED = ("all_orientations_and_types", "many_rows_are_products_in_tile", "levels_of_x86", "on_vectors_without",
                "on_one_thread_and_on_two", "cut_into_blocks")  # fmt: skip
#: Where this processor is not its own: cases of which smaller ones have all kinds of kernels, and which take a minute.
TOO_LARGE_TO_EMULATE = ("several_blocks",)

#: Settings under which torch and its libraries compute by other code, as on other processors: the numeric tests must
#: pass under each of them. A processor without AVX-512 has it neither in torch's own loops nor in oneDNN's; on the
#: oldest ones MKL, too, is left with the code that runs everywhere.
LIBRARY_PATHS = (
    {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    {"ATEN_CPU_CAPABILITY": "default", "MKL_CBWR": "COMPATIBLE"},
)

#: The files of tests that compare results of library calls, or of eager's own loops, with those of kernels.
NUMERIC_TESTS = {
    "inductor-lower": (
        "cpu_ops",
        "graph_passes_freeze",
        "graph_passes_fuse_attention",
        "graph_passes_channels_last",
        "graph_passes_rewrites",
        "lowering_extern",
        "lowering_reductions",
        "lowering_special",
        "loop_passes_choose_library_calls",
        "sweep",
        "targets_interpreter",
    ),
    "partition": ("random",),
    "aotkit": ("cross_entropy", "expanded_views", "freezing", "operator_classes", "saved_tensors"),
}

#: Tests of kernels that also run on an emulated 64-bit ARM processor: together every kind of kernel. Left out is what
#: counts the roundings of longer vectors. On the levels of x86-64 the quicker ones run again.
EMULATED = (
    *("cpu_kinds", "cpu_ops", "cpu_random", "cpu_kernels", "cpu_math", "cpu_products", "cpu_few_rows"),
    *("lowering_scans", "long_sorts", "packed_products", "attention"),
)
EMULATED_LEVELS = dict.fromkeys(("x86-64", "x86-64-v2", "x86-64-v3"), ("cpu_random", "cpu_kinds"))
#: Tests of kernels for processors with vectors of 512 bits, which run here on shorter ones (`tools/emulation/wide.py`):
#: by processor, files and which of their tests. Together every kind of kernel that ARM has not.
EMULATED_WIDE: dict[str, tuple[tuple[str, ...], str]] = {
    "skylake-avx512": (
        ("cpu_product_ways", "cpu_tails", "cpu_math"),
        "(computes and bytes) or unknown_sizes_are_whole or gelu_by_erf",
    ),
    "znver4": (
        ("cpu_product_ways", "attention"),
        "(computes and (digits or pairs or bytes)) or small_gradients",
    ),
    "sapphirerapids": (
        ("cpu_product_ways", "cpu_tile_registers", "attention"),
        "(computes and registers) or as_torch_is_told or before_and_after or large_scores or small_gradients",
    ),
}
#: With `-- --whole`, all tests of these files instead.
WIDE_WHOLE = (
    *("cpu_kinds", "cpu_ops", "cpu_kernels", "cpu_math", "cpu_vectors", "cpu_products", "cpu_few_rows", "cpu_tails"),
    *("cpu_product_ways", "cpu_tile_registers", "cpu_windows", "cpu_interiors", "cpu_spaced_loads", "attention"),
    *("attention_forms", "packed_products", "packed_constants", "int8_products", "scaled_groups", "few_rows_of_halves"),
)


# --- environments -----------------------------------------------------------------------------------------------


def base_environment(session: nox.Session, name: str, requirements: tuple[str, ...]) -> Path:
    """A virtual environment of its own under `.nox/`, made once and kept as long as its requirements stay the same."""
    tag = f"{sys.implementation.cache_tag}"
    home = ROOT / ".nox" / f"_{name}-{tag}"
    wanted = hashlib.sha256("\n".join([*requirements, Path(CONSTRAINTS).read_text()]).encode()).hexdigest()
    stamp = home / "requirements.sha256"
    with one_at_a_time(home.with_suffix(".lock")):
        if not stamp.exists() or stamp.read_text() != wanted:
            shutil.rmtree(home, ignore_errors=True)
            python = str(executables(home) / "python")
            if name == "build":
                session.run(sys.executable, "-m", "venv", str(home), external=True)
                session.run(python, "-m", "pip", "install", "-q", "-c", CONSTRAINTS, *requirements, external=True)
            else:
                session.run(sys.executable, "-m", "venv", "--without-pip", str(home), external=True)
                compiled = ("--no-compile",) if name in LITTLE_OF_IT_IS_IMPORTED else ()
                pip(session, "install", "-q", *compiled, "-c", CONSTRAINTS, *requirements, python=python)
            stamp.write_text(wanted)
    return home


def pip(session: nox.Session, *arguments: str, python: str | None = None, silent: bool = False) -> str:
    """Run pip for the session's environment or for that of an interpreter; neither needs to have a pip."""
    python = python or str(Path(session.bin) / "python")
    own = str(executables(base_environment(session, "build", BUILD_TOOLS)) / "python")
    options = ("--python", python, "--disable-pip-version-check")
    return str(session.run(own, "-m", "pip", *options, *arguments, external=True, silent=silent))


@contextmanager
def one_at_a_time(lock: Path) -> Iterator[None]:
    """Wait until no other session is in a block with this lock."""
    if fcntl is None:
        yield
        return
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def executables(home: Path) -> Path:
    """The folder of an environment that holds its programs."""
    return home / ("Scripts" if os.name == "nt" else "bin")


def site_packages(python: str, session: nox.Session) -> Path:
    """Where an interpreter keeps its pure-Python packages."""
    query = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(str(session.run(python, "-c", query, silent=True, external=True)).strip())


def share(session: nox.Session, *names: str, python: str = "python") -> None:
    """Make the shared libraries of these names importable in an environment without installing them again."""
    destination = site_packages(python, session)
    for name in names:
        home = base_environment(session, name, SHARED[name])
        shared = site_packages(str(executables(home) / "python"), session)
        (destination / f"_shared_{name}.pth").write_text(f"{shared}\n")


def install(session: nox.Session, *requirements: str) -> None:
    """`pip install` at the versions of tools/constraints.txt."""
    pip(session, "install", "-q", "-c", CONSTRAINTS, *requirements)


def pytest(session: nox.Session, *arguments: str, workers: int = 0, share_by: str = "worksteal", **env: str) -> None:
    """Run pytest from the repository root; the session's positional arguments come last.

    ``workers`` processes share the tests, unless there are positional arguments, which are for one who looks closely;
    ``share_by="loadfile"`` leaves each file to one of them. The tests that took longest are listed at the end.
    """
    env = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **env}
    parallel = ("-n", str(workers), "--dist", share_by) if workers > 1 and not session.posargs else ()
    slowest = ("--durations=15", "--durations-min=4")
    command = ("python", "-m", "pytest", "-p", "no:cacheprovider", *slowest)
    session.run(*command, *arguments, *parallel, *session.posargs, env=env)


def test_workers() -> int:
    """How many processes share the tests of one session, among those that run beside it.

    Each of them imports torch and collects all tests for itself, so they are no more than there are processors.
    """
    return max(1, min(processors(), 4) // int(os.environ.get("SESSIONS_AT_ONCE", "1")))


# --- wheels -----------------------------------------------------------------------------------------------------


def build_wheel(session: nox.Session, package: Package, source: Path, destination: Path) -> Path:
    """Build one wheel with hatchling into an empty folder and return its path."""
    builder = executables(base_environment(session, "build", BUILD_TOOLS)) / "python"
    shutil.rmtree(destination, ignore_errors=True)
    with session.chdir(source):
        session.run(
            str(builder), "-m", "hatchling", "build", "-t", "wheel", "-d", str(destination), external=True, silent=True
        )
    (wheel,) = destination.glob("*.whl")
    session.log(f"built {wheel.name}")
    return wheel


def build_wheels(session: nox.Session, names: tuple[str, ...]) -> list[Path]:
    """The wheels of these packages of the checkout."""
    packages = load_packages()
    return [kept_wheel(session, packages[name]) for name in names]


def digest_of(*places: Path) -> str:
    """Of all files there, in folders too, and of their names."""
    found = [path for place in places for path in (place.rglob("*") if place.is_dir() else (place,))]
    digest = hashlib.sha256()
    for path in sorted(path for path in found if path.is_file() and "__pycache__" not in path.parts):
        digest.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def kept_wheel(session: nox.Session, package: Package) -> Path:
    """The wheel of the checkout, built again only when a file of the package has changed."""
    target = ROOT / "build" / "wheels" / f"{package.name}-{digest_of(package.path)[:16]}"
    with one_at_a_time(target.parent / f"{package.name}.lock"):
        if not target.is_dir():
            for old in target.parent.glob(f"{package.name}-{'[0-9a-f]' * 16}"):
                shutil.rmtree(old)
            making = target.parent / f"{package.name}.making"
            build_wheel(session, package, package.path, making)
            making.rename(target)
    (wheel,) = target.glob("*.whl")
    return wheel


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
    if any(site_packages("python", session).glob("aotkit*.dist-info")):
        pip(session, "install", "-q", "--force-reinstall", "--no-deps", *paths)
    install(session, *paths, *extra)


def install_everything(session: nox.Session, *extra: str) -> None:
    """The shared torch, scipy and llvmlite, the eight wheels and further requirements."""
    share(session, "torch", "scipy", "llvmlite")
    install_wheels(session, build_wheels(session, PACKAGES), *extra)


# --- sessions ---------------------------------------------------------------------------------------------------

session_without_pip = nox.session(venv_params=["--without-pip"])


@session_without_pip
def demo(session: nox.Session) -> None:
    """Compile and train a small BERT on the CPU and print how it went."""
    install_everything(session, "transformers", "rich")
    session.run("python", str(ROOT / "tools" / "demo.py"), *session.posargs)


@nox.session(venv_backend="none")
def test(session: nox.Session) -> None:
    """Everything that runs without Debian packages and without a GPU, side by side; `-- --jobs 1` for one by one."""
    session.run(sys.executable, "-m", "tools.side_by_side", *session.posargs, *TEST_SESSIONS, external=True)


@session_without_pip
@nox.parametrize("package", [nox.param(name, id=name) for name in PACKAGES])
def test_package(session: nox.Session, package: str) -> None:
    """A package's tests where only its declared dependencies are installed, its siblings at their lowest version."""
    packages = load_packages()
    wheels = build_wheels(session, (package,))
    declared = packages[package].siblings()
    for name in with_siblings(package, packages):
        if name != package:
            wheels.append(lowest_sibling(session, packages[name], declared.get(name, "")))
    libraries = {name for each in with_siblings(package, packages) for name in packages[each].third_party()}
    share(session, "torch", "pytest", *sorted(libraries & SHARED.keys()), *SHARED_TEST_EXTRAS.get(package, ()))
    install_wheels(session, wheels, *TEST_EXTRAS.get(package, ()))
    pip(session, "check")
    isolation = () if session.posargs else ("tools/isolation", "--package", package)
    workers = test_workers() if package in LONG else 0
    elsewhere = (f"--ignore=packages/{package}/tests/{name}" for name in RUN_BY_INTEGRATION.get(package, ()))
    pytest(session, *isolation, f"packages/{package}/tests", "-q", *elsewhere, workers=workers)


@session_without_pip
def library_paths(session: nox.Session) -> None:
    """Half of the numeric tests once more, each in one of the ways in which torch and its libraries compute on other
    processors; `nox -s sweeps` runs each in all of them."""
    install_everything(session)
    share(session, "pytest", "transformers", "triton")
    numeric_tests(session)


def numeric_tests(session: nox.Session, *, whole: bool = False) -> None:
    """A quarter of them, in turn, under each of `LIBRARY_PATHS`, or the ``whole`` under each."""
    files = [
        f"packages/{package}/tests/test_{load_package(package).import_name.removeprefix('aotkit_')}_{name}.py"
        for package, names in NUMERIC_TESTS.items()
        for name in names
    ]
    probe = "import torch; print(torch.backends.cpu.get_cpu_capability())"
    own = str(session.run("python", "-c", probe, silent=True)).strip()
    simple = own == "DEFAULT"
    # No library has a say in what is refused, nor in a hash of bits or in when memory is freed.
    chosen = ("-k", "not refused and not hash and not dies")
    failed = []
    for number, setting in enumerate(LIBRARY_PATHS):
        part = ("--whole",) if whole or simple else ("--part", str(number), str(2 * len(LIBRARY_PATHS)))
        if setting["ATEN_CPU_CAPABILITY"] == "avx2" and own in ("DEFAULT", "AVX2"):
            continue  # torch would run into instructions that the processor does not have, or run what it runs anyway
        words = " ".join(f"{name}={value}" for name, value in setting.items())
        session.log(words)
        try:
            pytest(session, *files, "-q", *chosen, *part, workers=test_workers(), **setting)
        except nox.command.CommandFailed:
            failed.append(words)
    if failed:
        session.error("failed under " + ", ".join(failed))


@session_without_pip
def tools(session: nox.Session) -> None:
    """Tests of the repository's own tools, which use the packages' sources as they lie here."""
    share(session, *SHARED)
    install(session, *TEST_TOOLS, *RUN_DEPENDENCIES)
    session.env["PYTHONPATH"] = os.pathsep.join(str(p.path / "src") for p in load_packages().values())
    pytest(session, "tools/tests", "-q", "--ignore", "tools/tests/system", workers=test_workers())


@session_without_pip
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
        ("python", "-m", "tools.check_platforms"),
        ("python", "-m", "tools.vendor", "--check"),
        ("python", "-m", "tools.features", "page", "--check"),
        ("python", "-m", "tools.conformance", "coverage", "--check"),
        ("python", "-m", "tools.compat", "page", "--check"),
    )
    failed = []
    for check in checks:
        if not run_ok(session, *check, env={"PYTHONPATH": sources}):
            failed.append(" ".join(check))
    if failed:
        session.error("failed: " + "; ".join(failed))


@nox.session(venv_backend="none")
def vendor(session: nox.Session) -> None:
    """Copy the files of tools/shared into the packages that use them."""
    session.run(sys.executable, "-m", "tools.vendor", *session.posargs, external=True)


def run_ok(session: nox.Session, *command: str, env: dict[str, str]) -> bool:
    """Run a command to its end and say whether it succeeded, so that one failure does not hide the next."""
    try:
        session.run(*command, env=env)
    except nox.command.CommandFailed:
        return False
    return True


@session_without_pip
def types(session: nox.Session) -> None:
    """mypy over the sources of all packages and over the tools."""
    share(session, "torch")
    install(session, "mypy", "filelock", "jinja2", "rich")
    for name in PACKAGES:
        if not load_package(name).source.is_dir():
            session.error(f"packages/{name} has no source folder")
    sources = (f"packages/{name}/src" for name in PACKAGES)
    kept = ("--cache-dir", os.devnull) if os.environ.get("CI") else ()  # written for the next run, which CI has not
    session.run("mypy", *kept, *sources, "tools", "--exclude", "tools/(tests|isolation|integration)/")


@session_without_pip
def api(session: nox.Session) -> None:
    """Public names and signatures against the committed snapshots; `-- --update` writes them."""
    install_everything(session)
    session.run("python", "-m", "tools.check_api", *session.posargs)


@session_without_pip
def docs(session: nox.Session) -> None:
    """Build the documentation site, strictly, into build/site."""
    share(session, "docs")
    build_site(session)


def build_site(session: nox.Session, *, again: bool = True) -> None:
    """Stage the pages and let mkdocs make the site of them; not ``again`` if it was made of these files before."""
    stamp, folders = ROOT / "build" / "site.sha256", (ROOT / "docs", ROOT / "packages", ROOT / "tools")
    with one_at_a_time(ROOT / ".nox" / "site.lock"):
        digest = digest_of(*folders, *ROOT.glob("*.md"))
        if not again and stamp.is_file() and stamp.read_text() == digest:
            return
        stamp.unlink(missing_ok=True)
        session.run("python", "-m", "tools.build_docs")
        command = ("python", "-m", "mkdocs", "build", "--strict", "-q", "-f", "build/docs/mkdocs.yml")
        session.run(*command, env={"NO_MKDOCS_2_WARNING": "1"})
        stamp.write_text(digest)
        session.log("the site is in build/site")


@session_without_pip
def wheels(session: nox.Session) -> None:
    """Build all wheels, and sdists, into build/dist; look at what stands in them, install the wheels outside the
    checkout and use each once; partition once more, by itself; see that `aotkit[cuda]` brings Triton."""
    built = build_wheels(session, PACKAGES)
    builder = str(executables(base_environment(session, "build", BUILD_TOOLS)) / "python")
    dist = ROOT / "build" / "dist"
    session.run(builder, "-m", "tools.archives", str(dist), *map(str, built), external=True)
    share(session, "twine")
    session.run("python", "-m", "twine", "check", "--strict", *map(str, sorted(dist.iterdir())))
    with outside_environment(session, built) as python:
        session.run(python, str(ROOT / "tools" / "smoke.py"), external=True)
    alone = [wheel for wheel in built if wheel.name.startswith("aotkit_partition-")]
    with outside_environment(session, alone, "scipy") as python:
        listed = pip(session, "list", "--local", python=python, silent=True)
        siblings = [line for line in listed.splitlines() if line.startswith("aotkit") and "partition" not in line]
        if siblings:
            session.error(f"the partition wheel pulled {siblings}")
    with outside_environment(session, built, "triton", "scipy", "llvmlite") as python:
        # What is there already is not downloaded: of a missing Triton pip would say so, as of a missing sibling.
        (aotkit,) = (wheel for wheel in built if wheel.name.startswith("aotkit-"))
        pip(session, "install", "-q", "--no-index", f"{aotkit}[cuda]", python=python)
        session.run(
            python, "-c", "import triton, aotkit; print('aotkit[cuda]: triton', triton.__version__)", external=True
        )


@session_without_pip
def sdists(session: nox.Session) -> None:
    """Install all packages from their sdists alone, outside the checkout, and use each once."""
    builder = str(executables(base_environment(session, "build", BUILD_TOOLS)) / "python")
    sources, made = ROOT / "build" / "sdists", ROOT / "build" / "from-sdists"
    for folder in (sources, made):
        shutil.rmtree(folder, ignore_errors=True)
    for package in load_packages().values():
        with session.chdir(package.path):
            command = (builder, "-m", "hatchling", "build", "-t", "sdist", "-d", str(sources))
            session.run(*command, external=True, silent=True)
    archives = map(str, sorted(sources.glob("*.tar.gz")))
    options = ("--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q", "-w", str(made))
    session.run(builder, "-m", "pip", "wheel", *options, *archives, external=True)
    with outside_environment(session, sorted(made.glob("*.whl"))) as python:
        session.run(python, str(ROOT / "tools" / "smoke.py"), external=True)


@contextmanager
def outside_environment(session: nox.Session, built: list[Path], *shared: str) -> Iterator[str]:
    """A fresh environment outside the checkout with these wheels, as working directory; yields its interpreter."""
    with tempfile.TemporaryDirectory(prefix="aotkit-outside-") as folder:
        session.run(sys.executable, "-m", "venv", "--without-pip", folder, external=True)
        python = str(executables(Path(folder)) / "python")
        share(session, "torch", *shared, python=python)
        paths = [str(wheel) for wheel in built]
        pip(session, "install", "-q", "-c", CONSTRAINTS, *paths, python=python)
        with session.chdir(folder):
            yield python


@session_without_pip
def integration(session: nox.Session) -> None:
    """The eight wheels outside the checkout: five architectures, the interop matrix, the examples of every page, what a
    new user does, and logs and messages as a user meets them."""
    config, suite = str(ROOT / "pyproject.toml"), str(ROOT / "tools" / "integration")
    folder = ROOT / "packages" / "aotkit" / "tests"
    outside = [str(folder / name) for name in RUN_BY_INTEGRATION["aotkit"]]
    shared = ("scipy", "llvmlite", "pytest", "transformers")
    workers = 0 if session.posargs else test_workers()
    parallel = ("-n", str(workers), "--dist", "worksteal") if workers > 1 else ()
    with outside_environment(session, build_wheels(session, PACKAGES), *shared) as python:
        command = (python, "-m", "pytest", "-p", "no:cacheprovider", "-q", "-c", config, suite, *outside, *parallel)
        session.run(*command, *session.posargs, external=True, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def system(session: nox.Session) -> None:
    """What needs Debian packages, in three sessions side by side, since a browser waits more than it computes;
    `-- --jobs 1` for one after the other."""
    system_packages(session)
    jobs = ("--jobs", str(len(SYSTEM_SESSIONS)), *session.posargs)
    session.run(sys.executable, "-m", "tools.side_by_side", *jobs, *SYSTEM_SESSIONS, external=True)


def system_packages(session: nox.Session) -> None:
    """Install what is missing, while no other session does: apt takes one at a time."""
    with one_at_a_time(ROOT / ".nox" / "system-packages.lock"):
        session.run(sys.executable, "-m", "tools.system_packages", external=True)


@session_without_pip
def system_tests(session: nox.Session) -> None:
    """A real browser on the built site and on reports, a real Redis, and packages that run from C."""
    share(session, "pytest", "docs", "transformers")
    install_everything(session, "redis", "tlparse")
    system_packages(session)
    build_site(session, again=False)  # the session `docs` may have done it
    pytest(session, "tools/tests/system", "-m", "system", workers=2, share_by="loadfile")  # files share what they start


@session_without_pip
def emulated_kernels(session: nox.Session) -> None:
    """Every kind of kernel for 64-bit ARM under emulation; `-- --whole` for all cases of sampled products."""
    share(session, "pytest")
    install_everything(session)
    system_packages(session)
    emulate(session, "aarch64", EMULATED, "--every-kind")


@session_without_pip
def emulated_levels(session: nox.Session) -> None:
    """Kernels for levels of x86-64 under emulation, and for processors with AVX-512 and AMX on shorter vectors;
    `-- --whole` for all tests of the latter."""
    share(session, "pytest")
    install_everything(session)
    for processor, (names, which) in EMULATED_WIDE.items():
        names, which = (WIDE_WHOLE, "") if "--whole" in session.posargs else (names, which)
        emulate(session, processor, names, "--every-kind", which=which)
    system_packages(session)
    for level, names in EMULATED_LEVELS.items():
        emulate(session, level, names)


def emulate(session: nox.Session, processor: str, names: tuple[str, ...], *options: str, which: str = "") -> None:
    """Run tests of the CPU target with kernels for another processor, on that processor, which is emulated; ``which``:
    of those for one of `EMULATED_WIDE`."""
    files = [f"packages/inductor-lower/tests/test_inductor_lower_{name}.py" for name in names]
    plugin = ("-p", "tools.emulation.plugin", "--emulate", processor, *options)
    if processor in EMULATED_WIDE:  # the plugin knows what is left out
        pytest(session, *plugin, *files, "-q", *(("-k", which) if which else ()))
        return
    left_out = (*NOT_EMULATED, *(() if "--whole" in session.posargs else TOO_LARGE_TO_EMULATE))
    pytest(session, *plugin, *files, "-q", "-k", " and ".join(f"not {name}" for name in left_out))


@session_without_pip
def emulated_demo(session: nox.Session) -> None:
    """The demo on an emulated 64-bit ARM processor, with our wheels and torch's; `-- FOLDER` keeps its downloads."""
    folder, *options = session.posargs or ["build/emulated"]
    wheels = [str(wheel) for wheel in build_wheels(session, PACKAGES)]
    python = executables(base_environment(session, "build", BUILD_TOOLS)) / "python"
    session.run(str(python), "-m", "tools.emulation.whole", folder, *wheels, *options, external=True)


@session_without_pip
def fuzz(session: nox.Session) -> None:
    """Random programs over aliasing, mutation and views; `-- --programs 5000 --lowering kernels` and so on."""
    install_everything(session)
    session.run("python", "-m", "tools.fuzz", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@session_without_pip
def fuzz_ops(session: nox.Session) -> None:
    """Operators with arguments drawn from their schemas; `-- --samples 100000 --journal FILE` goes on where it was."""
    install_everything(session, "triton")
    session.run("python", "-m", "tools.fuzz_ops", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@session_without_pip
def sweeps(session: nox.Session) -> None:
    """What is left out at each push: tests marked `nightly`, those marked `sample` with all parameters, all of aotkit
    in the verify mode, all stages of what inductor-lower compiles, and the numeric tests on all library paths."""
    install_everything(session, *TEST_TOOLS, *TEST_EXTRAS["cache"])
    share(session, *SHARED)
    whole = [f"packages/{name}/tests" for name in ("aotkit", "inductor-lower")]
    others = [f"packages/{name}/tests" for name in PACKAGES if f"packages/{name}/tests" not in whole]
    marked = "(sample or nightly) and not gpu and not system"
    elsewhere = (f"--ignore=packages/aotkit/tests/{name}" for name in RUN_BY_INTEGRATION["aotkit"])
    pytest(session, *whole, *elsewhere, "-q", "--whole", workers=test_workers())
    pytest(session, *others, "-q", "--whole", "-m", marked, workers=test_workers())
    sources = os.pathsep.join(str(p.path / "src") for p in load_packages().values())  # as they lie here, for our tools
    suites = ("tools/tests", "tools/integration")
    pytest(session, *suites, "-q", "--whole", "-m", marked, workers=test_workers(), PYTHONPATH=sources)
    numeric_tests(session, whole=True)


@session_without_pip
def mutants(session: nox.Session) -> None:
    """Small faults in the sources, which the tests must notice; `-- run --group loop-passes --sample 60 --diffs`."""
    share(session, *SHARED)
    install(session, *TEST_TOOLS, *RUN_DEPENDENCIES)
    session.run("python", "-m", "tools.mutants", *(session.posargs or ["run"]), env={"OMP_NUM_THREADS": "1"})


@session_without_pip
def replay(session: nox.Session) -> None:
    """What is generated for the models and torch's table of operators, against a commit; `-- against COMMIT`."""
    install_everything(session, *BENCH_TOOLS, "triton", "expecttest")
    session.run("python", "-m", "tools.replay", *(session.posargs or ["against", "HEAD"]), env={"OMP_NUM_THREADS": "1"})


@session_without_pip
def conformance(session: nox.Session) -> None:
    """Torch's table of operators through generated kernels; a run that was cut off goes on where it was."""
    install_everything(session, "expecttest")
    journal = str(ROOT / "build" / "conformance" / "op_db.jsonl")
    session.run(
        "python", "-m", "tools.conformance", "kernels", "--journal", journal, *session.posargs,
        env={"OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@session_without_pip
def bench(session: nox.Session) -> None:
    """Measure eager, Inductor and aotkit; `-- --quick` is the short form."""
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
    install(session, *SHARED["pytest"], "llvmlite", "scipy", "sympy", "filelock")
    session.run("python", "-m", "tools.gpu_tests", *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "tools.bench.triton_kernels")
        session.run("python", "-m", "tools.bench.cudagraphs")


@session_without_pip
def lowest(session: nox.Session) -> None:
    """A part of the tests of packages that have libraries beside torch, with the lowest versions that they declare."""
    share(session, "torch", "pytest")
    pip(session, "install", "-q", *lowest_requirements(), "fakeredis")
    pip(session, "install", "-q", "--force-reinstall", "--no-deps", *map(str, build_wheels(session, PACKAGES)))
    for package in ("cache", "partition", "inductor-lower"):
        pytest(session, *paths_of(package, everything=False), "-q")


def install_with_torch(session: nox.Session, version: str, *more: str) -> None:
    """The packages' wheels and what their tests need, with a torch that is not the pinned one."""
    loose = Path(session.create_tmp()) / "constraints.txt"
    pinned = Path(CONSTRAINTS).read_text().splitlines()
    loose.write_text("\n".join(line for line in pinned if not line.startswith(("torch==", "triton=="))))
    wheels = [str(wheel) for wheel in build_wheels(session, PACKAGES)]
    tools = (*SHARED["pytest"], *SHARED["transformers"], *TEST_EXTRAS["cache"], *more)
    pip(session, "install", "-q", "-c", str(loose), f"torch=={version}.*", "numpy", *tools, *wheels)
    pip(session, "install", "-q", "--force-reinstall", "--no-deps", *wheels)


@session_without_pip
@nox.parametrize("torch,triton", CUDA_PAIRS, ids=[f"torch-{torch}" for torch, _ in CUDA_PAIRS])
def cuda(session: nox.Session, torch: str, triton: str) -> None:
    """What is for CUDA, without a device: Triton's interpreter, compiled kernels, recordings on a simulated driver."""
    install_with_torch(session, torch, f"triton=={triton}")
    folders = [ROOT / "packages" / name / "tests" for name in ("aotkit", "inductor-lower")]
    files = [path for folder in folders for path in sorted(folder.glob("test_*.py"))]
    chosen = [str(path) for path in files if "triton" in path.name or path.name == "test_aotkit_cudagraphs.py"]
    pytest(session, "-q", "packages/cudagraphs", *chosen)


@session_without_pip
def compat(session: nox.Session) -> None:
    """A part of every suite with another torch, into docs/versions.md; `-- 2.11`, `-- 2.15 --all` for whole suites.

    The Python is the one that nox runs with. torch's wheel may bring gigabytes (README, "CPU-only torch").
    """
    version, *options = session.posargs or [NEWEST_TORCH]
    install_with_torch(session, version)
    session.run("python", "-m", "tools.compat", "run", *options, env={"OMP_NUM_THREADS": "1"})
    session.run("python", "-m", "tools.compat", "page")
