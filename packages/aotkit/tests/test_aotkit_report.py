"""The HTML report: what stands in it, for compiles that work, fall back and fail."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import aotkit
from aotkit.reports.page.collect import collect
from aotkit.reports.page.kernels import cards_of
from aotkit.reports.page.layers import Layer, layers_of
from aotkit.reports.page.render import _ms
from aotkit.reports.page.texts import Budget, llvm_of, nest_of, source_at, triton_of
from aotkit_inductor_lower.errors import LoweringError
from aotkit_inductor_lower.launch_plan.facts import memory_of


@pytest.fixture(autouse=True)
def _as_a_user_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")


class Block(nn.Module):
    """A product, a kernel over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(nn.functional.gelu(self.linear(x)) + x)  # a line of the user's


class Net(nn.Module):
    """Two blocks, which share their kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


class Page(html.parser.HTMLParser):
    """Words of a page, names of elements that can be led to, addresses, and elements that load something."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.words, self.names, self.links, self.loads = "", set[str](), list[str](), list[str]()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.names.add(found.get("id") or "")
        self.links += [found["href"] or ""] if tag == "a" else []
        if tag in ("script", "img", "iframe", "link") and found.get("href") != "data:,":
            self.loads.append(tag)

    def handle_data(self, data: str) -> None:
        self.words += data


OPTIONS = aotkit.Options(cache=False, contractions="aten")


@pytest.fixture(scope="module")
def found() -> Any:
    torch.manual_seed(0)
    return collect(Net(), (torch.randn(16, 32, requires_grad=True),), {}, OPTIONS, 3)


@pytest.mark.covers("F8.12")
def test_a_page_shows_kernels_with_code_and_lines_layers_memory_and_stages(tmp_path: Path) -> None:
    net, x = Net(), torch.randn(16, 32)
    path = aotkit.report(net, x, path=tmp_path / "report.html", calls=3, options=OPTIONS)
    page = Page(path)
    assert not page.loads and "http" not in re.sub(r"<[^>]*>", "", path.read_text()).split("Graphs and the code")[0]
    assert path.stat().st_size < 300_000
    assert {link.removeprefix("#") for link in page.links} <= page.names, "each link leads somewhere"
    for words in (
        "a line of the user's",
        "define internal i32 @kernel_",
        "loop native_layer_norm",
        "saved for the backward",
    ):
        assert words in page.words
    for stage in ("capture", "partition", "lower", "bind"):
        assert stage in page.words
    assert "matrix products are left to ATen" in page.words and "LayerNorm" in page.words
    assert "Nothing runs eagerly" in page.words
    assert all(parameter.grad is None for parameter in net.parameters())


def test_launches_of_one_function_are_one_card_whose_times_are_measured(found: Any) -> None:
    cards = cards_of(found)
    norms = [card for card in cards if "native_layer_norm" in str(card.ops) and card.graph.endswith("-forward")]
    assert [len(card.names) for card in norms] == [2] and norms[0].calls == 2
    assert "a line of the user's" in str(norms[0].sources)
    assert [title for title, _ in norms[0].texts] == ["Loops", "Kernel", "LLVM"]
    assert found.profile is not None and all(card.ms is not None for card in cards)
    assert sum(card.ms or 0 for card in cards) == pytest.approx(found.profile.kernels_ms)
    assert sum(card.share or 0 for card in cards) == pytest.approx(1)


@pytest.mark.parametrize(("processor", "code"), [("triton-interpreter", "Triton"), ("interpreter", "Kernel")])
def test_kernels_of_other_targets_have_their_code_and_their_times(processor: Any, code: str) -> None:
    options = OPTIONS.patch(processor=processor)
    found = collect(Net(), (torch.randn(4, 32),), {}, options, 1)
    kernels = [card for card in cards_of(found) if card.is_kernel]
    assert kernels and all(card.ms is not None and card.texts[-1][0] == code for card in kernels)
    assert {card.names[0] for card in cards_of(found) if not card.is_kernel} == {"aten.addmm", "aten.mm"}
    if code == "Triton":
        texts = [card.texts[-1][1] for card in kernels]
        assert all("@jit\ndef " in text and "if __name__" not in text for text in texts)


def test_every_operator_is_in_its_module_and_in_the_box_of_its_kernel(found: Any) -> None:
    cards = cards_of(found)
    whole = layers_of(found, cards)
    assert list(whole.parts) == ["blocks.0", "blocks.1"]
    first = whole.parts["blocks.0"]
    assert [part.kind for part in first.parts.values()] == ["Linear", "LayerNorm"]
    (box,) = first.boxes["forward"]
    assert box.sort == "kernel" and box.ops == ["gelu", "add"]
    anchors = {card.anchor for card in cards}
    boxes = [b for layer in _every(whole) for side in layer.boxes.values() for b in side]
    assert {b.sort for b in boxes} == {"kernel", "aten", "view"}
    assert all(b.anchor in anchors for b in boxes if b.sort != "view")
    assert whole.ms == pytest.approx(sum(card.ms or 0 for card in cards), rel=0.05)


def test_modules_of_torch_alone_have_their_operators_forward_and_backward() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16))
    found = collect(model, (torch.randn(4, 8),), {}, OPTIONS, 0)
    cards = cards_of(found)
    whole = layers_of(found, cards)
    assert [(part.kind, sorted(part.boxes)) for part in whole.parts.values()] == [
        ("Linear", ["backward", "forward"]),
        ("GELU", ["backward", "forward"]),
        ("LayerNorm", ["backward", "forward"]),
    ]
    assert whole.boxes == {}
    (norm,) = [card for card in cards if card.graph.endswith("-forward") and card.is_kernel]
    assert norm.modules == ["1 GELU", "2 LayerNorm"]


def _every(layer: Layer) -> list[Layer]:
    return [layer, *(inner for part in layer.parts.values() for inner in _every(part))]


def test_memory_is_what_the_plans_hold(found: Any) -> None:
    programs, (partition,) = found.watcher.programs, found.watcher.partitions.values()
    forward, backward = programs.values()
    over = memory_of(forward, backward, [None if value.is_input else value.name for value in partition.saved])
    last, first = over.moments[over.backward - 1], over.moments[over.backward]
    assert last.bytes["saved"] == first.bytes["saved"] == partition.activation_bytes > 0
    assert over.moments[-1].bytes["saved"] == 0, "the backward frees what was saved for it"
    gradients = sum(p.numel() * 4 for p in Net().parameters()) + 16 * 32 * 4
    assert gradients <= over.moments[-1].bytes["result"] + over.moments[-1].bytes["call result"]
    assert over.peak.total == max(moment.total for moment in over.moments)
    assert all(sum(size for _, size in moment.largest) <= moment.total for moment in over.moments)
    inference = memory_of(forward)
    assert inference.backward == len(inference.moments) and inference.moments[-1].bytes["saved"] == 0


def test_every_kernel_of_a_step_has_its_time() -> None:
    """By how much they fall short of the step is a figure of the benchmarks: processors are shared."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(384, 384), nn.GELU(), nn.LayerNorm(384)) for _ in range(4)))
    batch = torch.randn(1024, 384)
    measured = aotkit.profile(model, batch, calls=8)
    assert 0 < measured.kernels_ms <= 1.001 * measured.watched_ms
    assert measured.kernels_ms == pytest.approx(sum(row.ms for row in measured.rows))
    assert all(row.ms > 0 and row.calls > 0 for row in measured.rows)
    least = 2 * 1024 * 384 * 384  # of a product; nobody knows it of ATen's calls, which it may be left to
    linear = [row for row in measured.rows if (row.flops or 0) >= least or re.match(r"aten\.(add)?mm\.", row.name)]
    assert sum(row.calls for row in linear) >= 11, "four layers forward, seven gradients of products"


def test_a_fallback_and_a_broken_graph_are_named(tmp_path: Path) -> None:
    def unsupported(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    with pytest.warns(aotkit.EagerFallback):
        path = aotkit.report(unsupported, torch.empty(3, device="meta"), path=tmp_path / "a.html", calls=2)
    words = Page(path).words
    assert "A graph runs eagerly" in words and "on device meta" in words and "Nothing runs eagerly" not in words

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    words = Page(aotkit.report(broken, torch.randn(8), path=tmp_path / "b.html", calls=2)).words
    assert "Graph break" in words and "graph_break" in words
    assert words.count("inference") >= 2


def test_a_compile_that_fails_has_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise LoweringError("this graph is refused <for a test>")

    monkeypatch.setattr("aotkit.driver.lower.compile_to_program", refuse)
    strict = OPTIONS.patch(fallback="error")
    path = aotkit.report(Net(), torch.randn(16, 32), path=tmp_path / "report.html", calls=2, options=strict)
    words = Page(path).words
    assert "The compile failed in the stage “lower”" in words
    assert "CompileError: graph" in words and "refused <for a test>" in words and "Traceback" in words
    assert "Captured" in words and "capture" in words, "as far as it came"
    marked = re.findall(r'class="stage failed"><summary><span class="name">(\w+)', path.read_text())
    assert marked == ["lower"], "in the timeline"
    assert "kernels, in" not in words and "until it failed" in words


def test_what_eager_mode_raises_is_raised_and_no_page_is_written(tmp_path: Path) -> None:
    def wrong(x: torch.Tensor) -> torch.Tensor:
        return x @ torch.ones(7)

    with pytest.raises(RuntimeError, match="size"):
        aotkit.report(wrong, torch.ones(3), path=tmp_path / "report.html")
    with pytest.raises(TypeError, match="takes a function or a module"):
        aotkit.report(3, path=tmp_path / "report.html")  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_parts_of_texts_are_those_of_one_kernel_only() -> None:
    text = (
        "loop mul_1(i0 < 4):\n  stage():\n    a\nloop mul(i0 < 3):\n  origin nodes []\n  stage():\n    b\nreturn mul\n"
    )
    assert nest_of(text, "mul") == "loop mul(i0 < 3):\n  stage():\n    b"
    assert nest_of(text, "mu") == ""
    code = "define i32 @kernel_a(ptr %x) {\nentry:\n}\n\ndefine i32 @kernel_ab(ptr %x) {\n  ret\n}\n"
    assert llvm_of(code, "kernel_a") == "define i32 @kernel_a(ptr %x) {\nentry:\n}"
    triton = "import x\n\n@triton.jit\ndef kernel_a(p,\n):\n    y\n\nif main:\n    kernel_a()\n"
    assert triton_of(triton, "a") == "@triton.jit\ndef kernel_a(p,\n):\n    y"
    budget = Budget(10)
    assert budget.take("12345678") == "12345678" and "AOTKIT_DUMP" in budget.take("123")
    here = source_at(f"{__file__}:1")
    assert here.place.endswith("tests/test_aotkit_report.py:1") and here.lines[0][2]
    assert source_at("nowhere.py:3: x + 1").lines == ((3, "x + 1", True),)


def test_the_command_writes_a_page(tmp_path: Path, warm_python: Any) -> None:
    (tmp_path / "mine.py").write_text("import torch\ndef example():\n    return torch.sin, (torch.randn(8),)\n")
    aot = ["-m", "aotkit", "explain", "mine:example", "--html"]
    done = warm_python.run([*aot, "page.html", "--calls", "2"], cwd=tmp_path)
    assert done.returncode == 0 and done.stdout == "wrote page.html\n", done.stderr
    assert "<title>sin, compiled by aotkit</title>" in (tmp_path / "page.html").read_text()
    done = warm_python.run([*aot, "page.txt"], cwd=tmp_path)
    assert done.returncode == 2 and "does not end in .html" in done.stderr


@pytest.mark.parametrize(
    ("value", "told"),
    [(1196.2, "1196 ms"), (83.46, "83.5 ms"), (9.68, "9.68 ms"), (0.119, "0.119 ms"), (0.0071, "0.007 ms")],
)
def test_times_have_three_digits(value: float, told: str) -> None:
    assert _ms(value) == told
