"""Programs written out, and what a pass makes of them: `tests/cases/loop/<pass>/*.ir`, and `kernel` for the kernel IR.

A file begins with what is run and what its result must look like::

    # run: fuse-kernels            names of passes, comma-separated; --target NAME: what they choose for;
                                   --contractions generated: products of matrices are nests, where the target has these
    # check: TEXT                  stands in the result, behind what the check before it found
    # check-not: TEXT              stands nowhere in the result
    # check-count 2: TEXT          so many lines hold it

The program is interpreted on random inputs before and after, so no case passes by its text alone; kernels on random
memory, with 5 for each size that is not known.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives  # defines the operators

from aotkit_inductor_lower import LowerOptions, interpret_program, parse_program, print_program
from aotkit_inductor_lower.__main__ import main
from aotkit_inductor_lower.driver import LOOP_LEVEL, LOOP_PASSES
from aotkit_inductor_lower.ir import Buffer, BufferKind
from aotkit_inductor_lower.ir.random_programs import random_inputs
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.kernel_ir.interpret import interpret_kernel
from aotkit_inductor_lower.kernel_ir.nodes import Kernel
from aotkit_inductor_lower.kernel_ir.parse import parse_module
from aotkit_inductor_lower.kernel_ir.print import print_module
from aotkit_inductor_lower.kernel_ir.verify import verify_module
from aotkit_inductor_lower.kernel_passes.normal_form import NORMAL_FORM
from aotkit_inductor_lower.ops.dtypes import to_torch_dtype
from aotkit_inductor_lower.passes import PassContext, run_passes
from aotkit_inductor_lower.targets.select import named_target

CASES = Path(__file__).parent / "cases" / "loop"
FILES = sorted(CASES.rglob("*.ir"))
KERNELS = sorted((CASES.parent / "kernel").rglob("*.ir"))
ZEN = named_target("cpu:znver4")
ELEMENTS = 256  # of each memory of a kernel: more than any case reaches


def header(text: str) -> list[tuple[str, str]]:
    lines = [line[1:].strip() for line in text.splitlines() if line.startswith("#")]
    return [(key.strip(), value.strip()) for key, _, value in (line.partition(":") for line in lines)]


def body_of(text: str) -> str:
    """The text without its first lines."""
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("#"))


def expect(text: str, checks: list[tuple[str, str]]) -> None:
    position = 0
    for key, wanted in checks:
        if key == "check":
            found = text.find(wanted, position)
            assert found >= 0, f"no {wanted!r} in\n{text[position:]}"
            position = found + len(wanted)
        elif key == "check-not":
            assert wanted not in text, f"{wanted!r} in\n{text}"
        else:
            word, number = key.split()
            assert word == "check-count", key
            count = sum(wanted in line for line in text.splitlines())
            assert count == int(number), f"{count} times {wanted!r} in\n{text}"


def constant(buffer: Buffer) -> torch.Tensor:
    """A tensor for a constant of a program, laid out as it says. Constants never change (``pack_constants``)."""
    sizes, strides = ([int(each.constant or 0) for each in axes] for axes in (buffer.sizes, buffer.strides))
    generator = torch.Generator().manual_seed(len(buffer.name))
    value = torch.empty_strided(sizes, strides, dtype=getattr(torch, buffer.dtype))
    return value.copy_(torch.randn(sizes, generator=generator))


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    """A group of one process, for the collectives of some cases."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def _is_large(buffer: Buffer) -> bool:
    """Whether one draw of numbers for it has all kinds of them."""
    return math.prod(size.constant or 1 for size in buffer.sizes) > 1 << 14


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pass_makes_of_a_program_what_its_file_says_and_changes_no_result(path: Path) -> None:
    text = path.read_text()
    (_, names), *checks = header(text)
    known = {each.name: each for each in LOOP_PASSES}
    names, _, contractions = names.partition("--contractions")
    names, _, target = names.partition("--target")
    passes = [known[name.strip()] for name in names.split(",")]
    assert path.parent.name in names and checks
    before = parse_program(body_of(text))
    verify_program(before)
    constants = {buffer.name: constant(buffer) for buffer in before.buffers if buffer.kind is BufferKind.CONSTANT}
    options = LowerOptions(verify=True, contractions=contractions.strip() or "auto", pack_constants=bool(constants))
    ctx = PassContext.of(options, target=named_target(target.strip()) if target else ZEN)
    ctx.constants.update(constants)
    after = run_passes(passes, before, ctx, LOOP_LEVEL)
    expect(print_program(after), checks)
    for seed in range(1 if any(_is_large(buffer) for buffer in before.buffers) else 3):
        mine, theirs = random_inputs(before, seed), random_inputs(before, seed)
        for got, want in zip(
            [*interpret_program(after, mine, ctx.constants), *mine],
            [*interpret_program(before, theirs, constants), *theirs],
            strict=True,
        ):
            if not torch.equal(got, want):
                torch.testing.assert_close(got, want, equal_nan=True)


def test_each_loop_pass_has_cases_one_of_them_with_a_dynamic_size() -> None:
    for each in LOOP_PASSES:
        texts = [path.read_text() for path in FILES if path.parent.name == each.name]
        assert len(texts) >= 3 and any("\nsymbol $" in text for text in texts), each.name


def test_passes_without_fuel_give_back_what_they_were_given() -> None:
    for path in FILES:
        program = parse_program(body_of(path.read_text()))
        for each in LOOP_PASSES:
            if each.required:  # what later ones may rely on
                program = run_passes((each,), program, PassContext.of(target=ZEN), LOOP_LEVEL)
            else:
                ctx = PassContext.of(LowerOptions(fuel=0), target=ZEN)
                assert run_passes((each,), program, ctx, LOOP_LEVEL) == program, (path, each.name)


def test_the_command_runs_passes_on_text_and_lists_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = CASES / "write-through" / "update.ir"
    monkeypatch.setattr("sys.stdin", io.StringIO(path.read_text()))
    assert main(["inline-producers,write-through"]) == 0
    printed = capsys.readouterr()
    assert print_program(parse_program(printed.out)) == printed.out and printed.out.count("loop ") == 1
    assert "inline: " in printed.err
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(each.name in listed and each.why in listed for each in LOOP_PASSES)
    assert main(["fuse-everything"]) == 2 and "fuse-kernels" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO("aotkit-ir 2\nprogram"))
    assert main(["write-through"]) == 1


def interpreted(kernel: Kernel, seed: int) -> dict[str, torch.Tensor]:
    """What a kernel leaves in memory of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    memory = {
        param.name: (torch.rand(ELEMENTS, generator=generator) * 4).to(to_torch_dtype(param.dtype))
        for param in kernel.params
        if param.kind == "memory"
    }
    interpret_kernel(kernel, memory, dict.fromkeys(("s0", "s1"), 5))
    return memory


@pytest.mark.parametrize("path", KERNELS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_pass_makes_of_a_kernel_what_its_file_says_and_changes_no_result(path: Path) -> None:
    text = path.read_text()
    (_, name), *checks = header(text)
    assert name == path.parent.name and checks
    before = parse_module(body_of(text))
    if name != "declare-sizes":
        verify_module(before)
    (own,) = (each for each in NORMAL_FORM if each.name == name)
    after = own.run(before, PassContext.of())
    verify_module(after)
    expect(print_module(after), checks)
    for seed in range(2):
        for old, new in zip(before.kernels, after.kernels, strict=True):
            wanted, got = interpreted(old, seed), interpreted(new, seed)
            for memory, values in wanted.items():
                torch.testing.assert_close(got[memory], values, msg=f"{path.stem}: {memory}")


def test_each_kernel_pass_has_cases_one_of_them_with_a_dynamic_size() -> None:
    for each in NORMAL_FORM:
        texts = [path.read_text() for path in KERNELS if path.parent.name == each.name]
        assert len(texts) >= 3 and any("$s0" in text for text in texts), each.name


def test_the_command_makes_kernels_of_a_program_and_runs_passes_on_kernels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    program = (CASES / "write-through" / "update.ir").read_text()
    monkeypatch.setattr("sys.stdin", io.StringIO(program))
    assert main(["write-through,linearize"]) == 0
    kernels = capsys.readouterr().out
    assert print_module(parse_module(kernels)) == kernels and len(re.findall("^kernel ", kernels, re.MULTILINE)) == 2
    monkeypatch.setattr("sys.stdin", io.StringIO((CASES.parent / "kernel" / "expand-ops" / "a_sigmoid.ir").read_text()))
    assert main(["expand-ops,merge-loops"]) == 0 and "sigmoid %" not in capsys.readouterr().out
    for names, text in (("linearize,write-through", program), ("write-through", kernels)):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))
        assert main([names]) == 1 and "before linearize" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO((CASES / "choose-contractions" / "no_library.ir").read_text()))
    assert main(["fold-identities,linearize"]) == 1
    assert "contraction windows is no kernel until choose-contractions" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", io.StringIO((CASES / "choose-contractions" / "no_library.ir").read_text()))
    assert main(["choose-contractions,linearize"]) == 0 and "kernel windows" in capsys.readouterr().out
