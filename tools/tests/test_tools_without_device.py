"""Traffic and times of kernels, found without a device; both pipelines over fake CUDA tensors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

from tools.without_device import facts, stages, table
from tools.without_device.kernels import Call, Choice, Graph, Launch, distinct_bytes
from tools.without_device.traffic import Access, Argument, Traced, namespace, trace

ROWS = """
def columns(x, out, BLOCK, ROWS):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    total = tl.full([BLOCK, 4], 0.0, tl.float32)
    for start in tl.range(0, ROWS, 4):
        row = (start + tl.arange(0, 4))[None, :]
        total = total + tl.load(x + (at + 512 * row), (at < 512) & (row < ROWS), other=0.0).to(tl.float32)
    tl.store(out + at, tl.sum(total, 1)[:, None], at < 512)
"""


def columns(block: int, rows: int = 64) -> Traced:
    """Columns of a matrix of bfloat16 with 512 columns are summed, ``block`` in each program instance."""
    arguments = {"x": Argument("x", 2, 512 * rows, True), "out": Argument("out", 4, 512, True)}
    return trace(defined(ROWS, "columns"), arguments, (512 // block,), {"BLOCK": block, "ROWS": rows})


def defined(text: str, name: str) -> Any:
    def define(tl: Any) -> Any:
        names = namespace(tl)
        exec(text, names)
        return names[name]

    return define


@pytest.mark.parametrize(("block", "waste"), [(1, 16), (4, 4), (16, 1), (64, 1)])
def test_a_sector_counts_as_often_as_instances_ask_for_parts_of_it(block: int, waste: int) -> None:
    traced = columns(block)
    assert traced.programs == 512 // block
    assert traced.bytes_of("load") == waste * 512 * 64 * 2
    read = next(a for a in traced.accesses if a.kind == "load")
    assert (read.needed, read.run) == (512 * 64 * 2, 2 * block)


def test_some_iterations_of_a_long_loop_stand_for_all() -> None:
    assert columns(16, rows=4000).bytes_of("load") == pytest.approx(512 * 4000 * 2)


def test_what_all_instances_read_counts_once() -> None:
    text = "def scale(x, w, out):\n    at = tl.program_id(0) * 64 + tl.arange(0, 64)\n"
    text += "    tl.store(out + at, tl.load(x + at) * tl.load(w + tl.arange(0, 64)))\n"
    memory = {n: Argument(n, 4, size, True) for n, size in (("x", 64000), ("w", 64), ("out", 64000))}
    traced = trace(defined(text, "scale"), memory, (1000,), {})
    assert traced.bytes_of("load") == 64000 * 4 + 64 * 4 and traced.bytes_of("store") == 64000 * 4


def test_pieces_that_the_device_copies_are_counted() -> None:
    text = "def product(a, b, out):\n"
    text += "    left = tl.make_tensor_descriptor(a, [100, 96], [96, 1], [64, 32])\n"
    text += "    right = tl.make_tensor_descriptor(b, [96, 64], [64, 1], [32, 64])\n"
    text += "    row = tl.program_id(0) * 64\n"
    text += "    acc = tl.full([64, 64], 0.0, tl.float32)\n"
    text += "    for k in tl.range(0, 96, 32, flatten=True):\n"
    text += "        acc = tl.dot(left.load([row, k]), right.load([k, 0]), acc)\n"
    text += "    at = row + tl.arange(0, 64)[:, None]\n"
    text += "    tl.store(out + (at * 64 + tl.arange(0, 64)[None, :]), acc, at < 100)\n"
    memory = {n: Argument(n, 2, size, True) for n, size in (("a", 9600), ("b", 6144), ("out", 6400))}
    traced = trace(defined(text, "product"), memory, (2,), {})
    loads = {a.argument: a.needed for a in traced.accesses if a.kind == "load"}
    assert loads == {"a": 19200, "b": 12288} and traced.bytes_of("store") == 12800


PTX = """
	.loc	1 12 30
	ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	.loc	1 14 5
	ld.global.b16 { %rs1 }, [ %rd2 + 0 ];
	@%p1 ld.global.L1::evict_last.v2.b32 { %r5, %r6 }, [ %rd2 + 0 ];
	st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
"""


def test_widths_of_loads_are_read_by_line() -> None:
    assert facts.load_widths(PTX) == {12: [16], 14: [2, 8]}


def test_a_contiguous_load_of_two_bytes_a_thread_is_named() -> None:
    choice = Choice((8,), {"BLOCK": 64, "ROWS": 64}, 32, lambda: ("", b"", ""))
    memory = {"x": Argument("x", 2, 512 * 64, True), "out": Argument("out", 4, 512, True)}
    launch = Launch("", "columns", ROWS.lstrip(), defined(ROWS.lstrip(), "columns"), memory, (choice,), 10)
    accesses = trace(launch.define, memory, choice.grid, choice.constants).accesses
    (line,), others = facts.narrow_lines(launch, choice, accesses, {15: [2]})
    assert line.startswith("2 bytes: total = total + tl.load(x") and others == ()
    assert facts.narrow_lines(launch, choice, accesses, {15: [16]}) == ((), ())
    assert facts.narrow_lines(launch, choice, accesses, {14: [2]}) == ((), ())  # another line
    odd = [replace(access, start=2) for access in accesses]
    assert facts.narrow_lines(launch, choice, odd, {15: [2]}) == ((), (line,))  # no wider load could begin there


@pytest.mark.parametrize(("width", "start"), [(512, 16), (516, 8), (50257, 2)])
def test_where_rows_begin_says_how_much_can_be_loaded_at_once(width: int, start: int) -> None:
    text = f"def rows(x, out):\n    at = tl.program_id(0) * {width} + tl.arange(0, 64)\n"
    text += "    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + at), 0))\n"
    memory = {"x": Argument("x", 2, 64 * width, True), "out": Argument("out", 4, 64, True)}
    read = next(a for a in trace(defined(text, "rows"), memory, (64,), {}).accesses if a.kind == "load")
    assert (read.run, read.start) == (128, start)


def test_few_instances_take_longer_for_the_same_bytes() -> None:
    read = Access(1, "load", "x", 2, moved=1e8, needed=1e8, asked=4096, run=128)
    many, few = Traced(4000, (read,)), Traced(24, (read,))
    assert facts.expected_seconds(many, 128, 32) == facts.LAUNCH + 1e8 / facts.BANDWIDTH
    assert facts.expected_seconds(few, 128, 32) > 10 * facts.expected_seconds(many, 128, 32)
    assert facts.expected_seconds(many, 1024, 255) > facts.expected_seconds(many, 1024, 32)  # fewer fit at once


def test_a_call_counts_what_goes_in_and_comes_out_once_and_so_does_a_kernel_in_its_place() -> None:
    """Two kernels that do what one call of ATen would read its operands once together."""
    text = "def product(a, b, out):\n    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]\n"
    text += "    total = tl.dot(tl.load(a + at), tl.load(b + at))\n"
    text += "    total = tl.dot(tl.load(a + at), tl.load(b + at), total)\n"  # as behind a branch
    text += "    tl.store(out + at, total)\n"
    memory = {n: Argument(n, 2, 4096, True) for n in ("a", "b", "out")}
    choice = Choice((1,), {}, 128, lambda: ("", b"", ""))
    first = Launch("1", "product", text, defined(text, "product"), memory, (choice,))
    second = Launch("2", "product", text, defined(text, "product"), memory, (choice,), known=frozenset("a"))
    square = distinct_bytes((64, 64), (64, 1), 2)
    assert square == distinct_bytes((64, 9, 64), (64, 0, 1), 2) == 8192
    call = Call("aten.mm.default", 2.0 * square, square)
    ours = facts.graph_facts(Graph("forward", (first, second), ()), compiled=False)
    other = facts.graph_facts(Graph("forward", (), (call,)), compiled=False)
    assert [(k.read, k.written) for k in ours.kernels] == [(16384, 8192), (8192, 8192)]
    assert (ours.moved, other.moved) == (ours.called, other.called) == (40960, 24576)
    assert (other.total("read"), other.total("written")) == (16384, 8192)
    assert other.total("seconds") == ours.kernels[0].seconds == facts.LAUNCH + 24576 / facts.BANDWIDTH
    assert facts.GraphFacts.of(json.loads(json.dumps(other.data()))) == other


def test_launches_that_are_alike_are_one_row_and_the_page_compares() -> None:
    choice = Choice((512,), {"BLOCK": 1, "ROWS": 64}, 32, lambda: ("", b"", ""))
    memory = {"x": Argument("x", 2, 512 * 64, True), "out": Argument("out", 4, 512, True)}
    launch = Launch("k", "columns", ROWS, defined(ROWS, "columns"), memory, (choice,))
    called = (Call("aten.mm.default", 300.0, 100.0),)
    slow = facts.graph_facts(Graph("forward", (launch, launch), called), compiled=False)
    assert [(k.name, k.launches) for k in slow.kernels] == [("columns", 2)]
    assert facts.GraphFacts.of(json.loads(json.dumps(slow.data()))) == slow
    wide = Choice((8,), {"BLOCK": 64, "ROWS": 64}, 32, lambda: ("", b"", ""))
    other = Launch("k", "columns", ROWS, defined(ROWS, "columns"), memory, (wide, choice))
    fast = facts.graph_facts(Graph("forward", (other,), called), compiled=False)
    assert fast.kernels[0].blocks["BLOCK"] == 64  # the choice that moves less
    found = {"tiny": {"ours": [slow], "incumbent": [fast]}}
    assert table.complaints(found) == [
        "tiny forward: 3 launches and calls, the incumbent has 2",
        "tiny forward: 2.1 MB, the incumbent moves 0.1",
    ]
    text = table.page(found, {"tiny": "512 columns"}, "command", "3.7")
    assert "| tiny | 512 columns |" in text and "| tiny forward | 2 / 1 | 1 / 1 | 2.1 / 0.1 | 0.0 / 0.0 |" in text


SMALL = """
import sys
from tools.without_device.pretend import pretend, pretend_attention, pretend_for_triton

pretend(), pretend_for_triton()
kept = pretend_attention()
from dataclasses import dataclass
import torch
from torch import nn
from tools.without_device import models
from tools.without_device.facts import graph_facts
from tools.without_device.incumbent import incumbent_graphs
from tools.without_device.ours import our_graphs


@dataclass(frozen=True)
class Result:
    loss: torch.Tensor


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(512), nn.Linear(512, 512)

    def forward(self, x):
        q = self.linear(self.norm(x)).view(8, 128, 8, 64).transpose(1, 2)
        y = nn.functional.scaled_dot_product_attention(q, q, q)
        return Result(nn.functional.gelu(y).float().pow(2).mean())


models.MODELS["small"] = models.Model("", Small, lambda: {"x": torch.randn(8, 128, 512, device="cuda")})
"""
BOTH = """
for graphs in PIPELINES:
    for graph in map(graph_facts, graphs("small")):
        widest = max(max(kernel.widths, default=0) for kernel in graph.kernels)
        registers = min(kernel.registers for kernel in graph.kernels)
        counts = graph.launches, len(graph.kernels), int(graph.total("needed"))
        print(graph.part, int(graph.called_read), *counts, widest, registers, *graph.calls)
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("pipeline", ["our_graphs", "incumbent_graphs"])
def test_both_pipelines_make_kernels_of_a_model_for_a_device_that_is_not_there(pipeline: str) -> None:
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-c", SMALL + BOTH.replace("PIPELINES", f"[{pipeline}]")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [line.split() for line in done.stdout.splitlines()]
    assert [row[0] for row in rows] == ["forward", "backward"]
    for part, called, launches, kernels, needed, widest, registers, *calls in rows:
        assert int(called) >= 4 * 2 * 8 * 128 * 512  # a product's rows, and three times those of attention
        assert 1 <= int(kernels) <= int(launches) <= 12 and int(widest) == 16 and int(registers) >= 8
        assert int(needed) >= 2 * 8 * 128 * 512 * 2
        attention = [call for call in calls if "flash_attention" in call]
        assert len(attention) == 1 and ("backward" in attention[0]) == (part == "backward")
        assert sum(call.startswith(("mm", "addmm", "aten.mm", "aten.addmm")) for call in calls) in (1, 2)


STAGES = """
import json
from tools.without_device.stages import compiled
print(json.dumps(compiled("small", 2)))
"""


@pytest.mark.nightly("the kernels of both pipelines are compiled in another test, their rows made in a third")
def test_stages_of_a_compile_for_a_device_that_is_not_there(tmp_path: Path) -> None:
    """Its kernels are compiled by workers that start on their own before the trace."""
    root, env = Path(__file__).resolve().parents[2], os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", SMALL + STAGES]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, timeout=600, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {"trace", "lowering", "compile-kernels", "codegen"} <= found["wall"].keys() == found["processor"].keys()
    assert 2 <= len(found["kernels"]) <= 12 and 0 < sum(found["wall"].values()) <= found["whole"] < 600


def test_a_row_of_stages_compares_turns_and_reckons_for_many_processors() -> None:
    def turn(wall: float, whole: float, kernels: list[float]) -> dict[str, Any]:
        return {
            "wall": {"compile-kernels": wall},
            "processor": {"compile-kernels": 3.5},
            "whole": whole,
            "kernels": kernels,
        }

    threads, workers = [turn(4, 8, []), turn(6, 10, [])], [turn(2, 6, [0.5, 1.5]), turn(3, 5, [0.5, 1.5])]
    cells = [cell.strip() for cell in stages.row("tiny", [threads, workers]).strip("|").split("|")]
    assert cells == ["tiny", "2", "5.00 / 2.50", "9.00 / 5.50", "0.50", "0.62", "3.50", "2.00", "1.50", "1.50"]
