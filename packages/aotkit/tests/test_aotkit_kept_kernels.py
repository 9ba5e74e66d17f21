"""Graphs that launch Triton kernels of the user's own are kept between processes: by what the kernels say.

Kernels run as in the tests of such kernels: Triton's interpreter stands for a device."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import aotkit
from aotkit._user_kernels import (
    NoKernelText,
    constants_from_json,
    constants_to_json,
    find_kernel,
    kernel_name,
    table_of_kernels,
)

triton = pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
import triton.language as tl  # noqa: E402

Tensor = torch.Tensor

SOURCE = """
import torch, triton
import triton.language as tl

OFFSET = tl.constexpr(1)
UNUSED = [object()]

@triton.jit
def helper(x, by):
    return x * by

@triton.jit
def kernel(x_ptr, out_ptr, n, BY: tl.constexpr = 2, BLOCK: tl.constexpr = 16):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    tl.store(out_ptr + at, helper(x, BY) + OFFSET, mask=at < n)

tuned = triton.autotune([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})], key=["n"])(
    triton.heuristics({"BY": lambda args: 2})(kernel)
)

def f(x):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BY=2, BLOCK=16)
    return out.sin() + 1

def g(x):
    out = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BY=2, BLOCK=16, num_warps=2)
    return out.sin() + 1

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return f(x)
    @staticmethod
    def backward(ctx, gradient):
        return f(gradient)
"""
EDITS = {
    "the kernel": ("+ OFFSET", "- OFFSET"),
    "what it calls": ("x * by", "x * by * by * by"),
    "a constant": ("constexpr(1)", "constexpr(5)"),
    "a default": ("BY: tl.constexpr = 2", "BY: tl.constexpr = 7"),
}


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """``kernels(old, new)``: the module with that edit, in place of the one that was imported before."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)

    def imported(old: str = "", new: str = "") -> ModuleType:
        assert old in SOURCE
        (tmp_path / "kept_kernels.py").write_text(SOURCE.replace(old, new))
        sys.modules.pop("kept_kernels", None)
        importlib.invalidate_caches()
        table_of_kernels().reset_table()
        torch._dynamo.reset()
        return importlib.import_module("kept_kernels")

    return imported


def value() -> Tensor:
    """In float64."""
    return torch.linspace(-1, 1, 40, dtype=torch.float64)


def compiled(fn: Callable[..., Any], **options: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    """``fn`` in one graph."""
    recorder = aotkit.Recorder()
    backend = aotkit.make_backend(aotkit.Options(fallback="error", **options), recorder)
    return torch.compile(fn, backend=backend, fullgraph=True), recorder


def loads(recorder: aotkit.Recorder) -> int:
    """How many graphs came from the cache; none may be such as is not kept."""
    names = [name for name, _ in recorder.events]
    assert "cache.bypass" not in names
    return names.count("cache.loaded")


@pytest.mark.parametrize("name", ["f", "g"])
@pytest.mark.covers("F7.5")
def test_a_graph_with_kernels_is_loaded_and_one_with_changed_kernels_is_compiled(
    name: str,
    kernels: Callable[..., ModuleType],
    launched: list[Any],
) -> None:
    for edit in ("", *EDITS):
        for already in range(2):
            module = kernels(*EDITS.get(edit, ()))
            run, recorder = compiled(getattr(module, name))
            torch.testing.assert_close(run(value()), getattr(module, name)(value()))
            assert loads(recorder) == already, edit


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # Dynamo's own
def test_a_gradient_by_a_kernel_is_loaded_too(
    kernels: Callable[..., ModuleType],
    launched: list[Any],
    no_compile: Callable[[], None],
) -> None:
    for already in range(2):
        module = kernels()
        run, recorder = compiled(lambda x, module=module: module.Function.apply(x.cos()).exp())
        x, y = (value().requires_grad_() for _ in range(2))
        run(x).sum().backward()
        assert loads(recorder) == already
        module.Function.apply(y.cos()).exp().sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
        no_compile()


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_graphs_with_kernels_read_back_as_they_were_written(
    kernels: Callable[..., ModuleType],
    launched: list[Any],
) -> None:
    """In the verify mode each stage goes on with what was written and read back."""
    module = kernels()
    run, _ = compiled(lambda x: module.Function.apply(x.cos()).exp(), verify=True)
    x, y = (value().requires_grad_() for _ in range(2))
    run(x).sum().backward()
    module.Function.apply(y.cos()).exp().sum().backward()
    torch.testing.assert_close(x.grad, y.grad)


@pytest.mark.parametrize("name", ["f", "g"])
def test_a_saved_function_finds_its_kernels_in_their_module_and_refuses_others(
    name: str,
    kernels: Callable[..., ModuleType],
    launched: list[Any],
    tmp_path: Path,
) -> None:
    module = kernels()
    path = tmp_path / "f.aotkit"
    want = getattr(module, name)(value())
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(getattr(module, name), (value(),)), path)
    kernels()
    torch.testing.assert_close(aotkit.saved.load_compiled_function(path)(value()), want)
    for edit in EDITS.values():
        kernels(*edit)
        with pytest.raises(aotkit.PackageError, match=r"kept_kernels\.kernel has changed"):
            aotkit.saved.load_compiled_function(path, check_sources=False)
    kernels()
    del sys.modules["kept_kernels"]
    with pytest.raises(aotkit.PackageError, match="import kept_kernels first"):
        aotkit.saved.load_compiled_function(path)


def test_names_of_kernels_differ_by_all_that_they_say(kernels: Callable[..., ModuleType]) -> None:
    """Of plain and of tuned ones; and what is not read does not matter."""
    edits = {
        **EDITS,
        "a configuration": ('{"BLOCK": 32}', '{"BLOCK": 64}'),
        "warps": ('{"BLOCK": 32})', '{"BLOCK": 32}, num_warps=8)'),
        "what chooses": ("lambda args: 2", "lambda args: 3"),
    }
    digests = {edit: kernel_name(kernels(*change).tuned).digest for edit, change in edits.items()}
    module = kernels()
    first = kernel_name(module.tuned)
    assert len({first.digest, *digests.values()}) == 1 + len(edits)
    assert find_kernel(first) is module.tuned
    assert kernel_name(kernels("[object()]", "[]").tuned) == first
    assert kernel_name(module.kernel).digest != first.digest


WIDTH = 2


def _chosen_by(choose: Callable[..., int]) -> Any:
    return triton.heuristics({"BY": choose})(reads_an_argument)


@triton.jit
def reads_an_argument(x_ptr, BY: tl.constexpr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, BY)


def _with_default(n: int) -> Callable[..., int]:
    return lambda args, n=n: n


def _with_keyword(n: int) -> Callable[..., int]:
    def choose(args: Any, *, n: int = n) -> int:
        return n

    return choose


def _with_global(n: int) -> Callable[..., int]:
    globals()["WIDTH"] = n
    return lambda args: max(WIDTH + i for i in range(2))


@pytest.mark.parametrize("made_with", [_with_default, _with_keyword, _with_global])
def test_names_of_kernels_differ_by_all_that_heuristics_read(made_with: Callable[[int], Callable[..., int]]) -> None:
    """Default values of parameters, and global variables that only a comprehension within reads."""
    digests = [kernel_name(_chosen_by(made_with(n))).digest for n in (2, 3, 2)]
    assert digests[0] == digests[2] != digests[1]


LIMIT = object()


@triton.jit
def reads_an_object(x_ptr):  # type: ignore[no-untyped-def]
    tl.store(x_ptr, LIMIT)


def test_a_kernel_that_reads_what_has_no_text_has_no_name() -> None:
    with pytest.raises(NoKernelText, match=r"LIMIT, a builtins\.object"):
        kernel_name(reads_an_object)
    with pytest.raises(NoKernelText, match="launches a builtins"):
        kernel_name(LIMIT)


def test_what_kernels_are_given_reads_back(kernels: Callable[..., ModuleType]) -> None:
    given = {
        "a": 1, "b": 2.5, "c": True, "d": None, "e": "text", "f": (1, [2, torch.float16]), "g": float("inf"),
        "h": tl.float32, "i": tl.constexpr(3), "j": kernels().kernel,
    }  # fmt: skip
    read = constants_from_json(constants_to_json(given))
    assert read.pop("i").value == 3 and read == {name: value for name, value in given.items() if name != "i"}
    with pytest.raises(NoKernelText, match=r"builtins\.object"):
        constants_to_json({"a": object()})
    for text in ('{"a": {"no such kind": 1}}', '{"a": {"torch": "nothing"}}', '{"a": {"kernel": ["m", "n", "d", ""]}}'):
        with pytest.raises(LookupError):
            constants_from_json(text)
