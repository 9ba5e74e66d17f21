"""Finding torch's libraries and their functions on each platform, as far as their names tell."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import pytest

from aotkit_inductor_lower import native
from aotkit_inductor_lower.errors import UnsupportedGraphError

FILES = {
    "linux": ["libtorch_cpu.so", "libgomp-a34b3233.so.1", "libtorch_python.so", "libc10.so"],
    "darwin": ["libtorch_cpu.dylib", "libomp.dylib", "libtorch_python.dylib", "libc10.dylib"],
    "win32": ["torch_cpu.dll", "libiomp5md.dll", "torch_cpu.lib", "torch_python.dll", "c10.dll"],
}


@pytest.mark.parametrize("platform", FILES)
def test_the_libraries_of_a_platform_are_found_by_its_names(platform: str, tmp_path: Path) -> None:
    for name in [name for names in FILES.values() for name in names]:
        (tmp_path / name).touch()
    found = {path.name for path in native.library_files(tmp_path, platform)}
    assert found == set(FILES[platform][:2])


def test_an_unknown_system_is_taken_for_one_like_linux(tmp_path: Path) -> None:
    (tmp_path / "libtorch_cpu.so").touch()
    assert native.library_files(tmp_path, "freebsd14") == [tmp_path / "libtorch_cpu.so"]


def test_torch_here_has_the_library_that_the_table_names() -> None:
    import torch

    found = native.library_files(Path(torch.__file__).parent / "lib", sys.platform)
    assert any("torch_cpu" in path.name for path in found)


def test_a_function_that_no_library_has_is_missing_on_windows_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_table_of_all_functions(_name: Any) -> Any:
        raise TypeError("LoadLibrary() argument 1 must be str, not None")  # as there

    assert native.symbol_address("malloc")
    monkeypatch.setattr(ctypes, "CDLL", no_table_of_all_functions)
    monkeypatch.setattr(sys, "platform", "win32")
    assert native.symbol_address("no such function") == 0


def test_an_older_llvm_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of llvmlite 0.44 reads no pointers without a type, and those of 0.45 to 0.47 end the process on some
    kernels. Another package's installation may have brought them."""
    monkeypatch.setattr(native.llvm, "llvm_version_info", (20, 1, 8))
    native._initialise.cache_clear()
    with pytest.raises(UnsupportedGraphError, match=r"LLVM 20\.1\.8.*install llvmlite 0\.48 or newer"):
        native.ensure_llvm()
    monkeypatch.undo()
    native.ensure_llvm()
