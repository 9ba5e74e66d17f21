"""Sources that are replaced while a process runs them: it keeps nothing, and uses nothing that was kept."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aotkit
from aotkit.artifact import sources
from aotkit_cache import CacheWarning

# Each line is what is found after a change of the copied files; between them the files are read anew, as by a process
# that comes to its first key then.
SCRIPT = """
import json, os, pathlib, sys, time, warnings

import aotkit
from aotkit import _import_time
from aotkit.artifact import sources

folder = pathlib.Path(aotkit.__file__).parent
assert str(folder) == sys.argv[1], folder


def replace(name):
    path, new = folder / name, folder / "new"
    new.write_bytes(path.read_bytes() + b"# another version" * (name != "_import_time.py"))
    os.utime(new, (315532800, 315532800))  # as a wheel's, of 1980
    new.replace(path)


def look(again=False):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found.append([sources.replaced_sources(again), sources.sources_digest(), len(told)])


found = []
look()
look(True)
time.sleep(0.03)
replace("options.py")
look()  # what was read is what runs
look(True)
look(True)
sources._read.cache_clear()
look()
imported, _import_time.IMPORTED_AT = _import_time.IMPORTED_AT, time.time_ns() + 10**12  # the clock went back
sources._read.cache_clear()
look()
replace("_import_time.py")
sources._read.cache_clear()
look()
print(json.dumps(found))
"""


def test_files_that_are_replaced(tmp_path: Path) -> None:
    copied = tmp_path / "aotkit"
    shutil.copytree(Path(aotkit.__file__).parent, copied)
    os.utime(copied / "errors.py", (2**31 - 1, 2**31 - 1))  # of an archive of another time zone, and more
    paths = os.pathsep.join([str(tmp_path), *sys.path])
    command = [sys.executable, "-c", SCRIPT, str(copied)]
    printed = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, check=True, stdout=subprocess.PIPE)
    plain, again, late, noticed, twice, first, back, other = json.loads(printed.stdout)
    digest = plain[1]
    assert plain == again == late == ["", digest, 0]
    assert "options.py was replaced while" in noticed[0] and noticed[1:] == [digest, 1]
    assert twice == [noticed[0], digest, 0]  # told once
    assert "options.py is newer than this process's import" in first[0] and first[1] != digest and first[2] == 1
    assert back[0] == ""  # only by the clock
    assert "replaced since this process imported" in other[0]


def run_cached(number: float) -> tuple[list[str], int]:
    """Notices and entries of a compile."""
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        function = torch.compile(lambda x: torch.sin(x) * number, backend="aotkit")
        x = torch.randn(5)
        assert torch.allclose(function(x), torch.sin(x) * number)
    notices = [str(w.message) for w in told if issubclass(w.category, CacheWarning)]
    kept = {path.name for path in Path(os.environ["AOTKIT_CACHE_DIR"]).rglob("*") if path.is_file()}
    return notices, len(kept - {"CACHEDIR.TAG", "signing.key"})


def test_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sources._read
    try:
        for early in (True, False):  # before the first key, and behind it
            sources._tell.cache_clear()
            doubt = SimpleNamespace(doubt="they were replaced" if early else "", files=(("x.py", (1,)),), digest="d")
            monkeypatch.setattr(sources, "_read", lambda packages, doubt=doubt: doubt)
            notices, kept = run_cached(2.5 + early)
            assert kept == 0
            assert len(notices) == 1 and "replaced" in notices[0]
            assert run_cached(4.5 + early) == ([], 0)
    finally:
        sources._tell.cache_clear()
    monkeypatch.setattr(sources, "_read", real)
    notices, kept = run_cached(6.5)
    assert notices == [] and kept > 0


def test_sources_in_an_archive_are_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    archive: Any = SimpleNamespace(submodule_search_locations=[str(tmp_path / "all.zip" / "aotkit")])
    monkeypatch.setattr("importlib.util.find_spec", lambda name: archive)
    assert "in an archive" in sources._read.__wrapped__(("aotkit",)).doubt


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A package of one old module, which is imported."""
    folder = tmp_path / "a_package_of_one_module"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sources._import_time, "IMPORTED_AT", 2**62)
    importlib.import_module(folder.name)
    yield folder
    del sys.modules[folder.name]


def test_what_lies_beside_modules_and_is_none(package: Path) -> None:
    def read() -> Any:
        return sources._read.__wrapped__((package.name,))

    alone = read()
    (package / ".#module.py").symlink_to("someone@somewhere.1")  # an editor's lock
    (package / "folder.py").mkdir()
    (package / "again").symlink_to(package)
    assert read() == alone and alone.doubt == "" and len(alone.files) == 1


def test_modules_without_sources_are_not_kept(package: Path) -> None:
    (package / "__init__.py").unlink()
    assert f"{package.name} has no source" in sources._read.__wrapped__((package.name,)).doubt
