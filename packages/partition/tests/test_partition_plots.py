"""Plots, the HTML report and the command line."""

import itertools
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_partition import Partition, PartitionOptions, PartitionReport, dump_graph, load_graph, partition
from aotkit_partition.command import count_forward_outputs, main
from aotkit_partition.errors import GraphFormatError, UnserializableGraphError
from aotkit_partition.graph_text import graph_constants
from aotkit_partition.plots import cut_svg, front_svg, html_report, memory_svg
from aotkit_partition.report import format_bytes

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(name="example", scope="module")
def _example(captured_by_torch):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True)
    joint, kwargs = captured_by_torch(nn.Sequential(layer, nn.Linear(32, 8)), torch.randn(8, 40, 32))
    count = kwargs["num_fwd_outputs"]
    return (
        joint,
        count,
        partition(joint, count, PartitionOptions(strategy="min-peak", memory_budget=0.7, details="front")),
    )


def hints(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}title")]


def words(svg):
    return [node.text for node in ElementTree.fromstring(svg).iter(f"{SVG}text")]


@pytest.mark.covers("F3.42", "F3.55")
def test_the_memory_plot_shows_both_peaks_and_what_fills_memory(example):
    report = example[2].report
    svg = memory_svg(report)
    assert hints(svg)[0] == f"memory over time, peak {format_bytes(report.peak_bytes)}"
    assert f"without recomputation: peak {format_bytes(report.peak_bytes_before)}" in hints(svg)
    kinds = {"outputs", "saved", "forward only", "gradients", "temporaries"}
    assert kinds <= set(words(svg)) and {"forward", "loss", "backward"} <= set(words(svg))
    at_peak = next(hint for hint in hints(svg) if "; alive: " in hint)
    assert report.timeline.live_at(report.timeline.peak_step)[0].name in at_peak
    heights = [float(c.attrib["cy"]) for c in ElementTree.fromstring(svg).iter(f"{SVG}circle")]
    share = report.peak_bytes / max(report.peak_bytes, report.peak_bytes_before)
    assert heights == [pytest.approx(338 - 270 * share, abs=0.1)], "the peak is drawn to scale"


@pytest.mark.covers("F3.42")
def test_the_front_plot_has_a_point_per_plan_and_fills_the_chosen_one(example):
    report = example[2].report
    circles = list(ElementTree.fromstring(front_svg(report)).iter(f"{SVG}circle"))
    assert len(circles) == len(report.front) >= 3
    filled = [circle for circle in circles if circle.attrib["fill"] == "var(--saved)"]
    assert len(filled) == 1
    xs = [float(circle.attrib["cx"]) for circle in circles]
    ys = [float(circle.attrib["cy"]) for circle in circles]
    assert xs == sorted(xs) and ys[0] < ys[-1], "more memory to the right, less time further down"
    words = {"".join(text.itertext()) for text in ElementTree.fromstring(front_svg(report)).iter(f"{SVG}text")}
    assert {"peak memory", "estimated time of recomputation"} <= words


@pytest.mark.covers("F3.54")
def test_the_cut_plot_shows_every_op_and_every_saved_value(example):
    result = example[2]
    svg = cut_svg(result)
    ops = [node for side in (result.forward, result.backward) for node in side.graph.nodes if "call" in node.op]
    boxes = [hint for hint in hints(svg) if " = " in hint]
    assert len(boxes) == len(ops)
    assert any("aten.addmm" in hint or "aten.mm" in hint for hint in boxes)
    curves = list(ElementTree.fromstring(svg).iter(f"{SVG}path"))
    assert len(curves) == len(result.saved_names)
    again = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}rect") if node.attrib["fill"] == "var(--again)"]
    assert len(again) == 1 + len(result.report.recomputed) > 1  # and one in the legend


@pytest.mark.covers("F3.54")
def test_the_cut_of_a_deep_graph_names_what_crosses_and_what_there_is_room_for():
    def deep(primals, tangents):
        value, weight = primals
        for _ in range(150):
            value = torch.tanh(value @ weight) * 2
        return [value, *torch.autograd.grad([value], primals, tangents)]

    primals = [torch.randn(8, 8, requires_grad=True), torch.randn(8, 8, requires_grad=True)]
    graph = make_fx(deep, tracing_mode="fake")(primals, [torch.ones(8, 8)])
    for node, name in zip(
        graph.graph.find_nodes(op="placeholder"), ("primals_1", "primals_2", "tangents_1"), strict=True
    ):
        node.target = node.name = name
    result = partition(graph, 1)
    svg = cut_svg(result)
    named = [node for node in ElementTree.fromstring(svg).iter(f"{SVG}text") if node.attrib.get("font-size")]
    ops = [node for side in (result.forward, result.backward) for node in side.graph.nodes if "call" in node.op]
    assert len(ops) > 1000 and len(named) > 300
    places = {}
    for node in named:
        places.setdefault(node.attrib["x"], []).append(float(node.attrib["y"]))
    for side in places.values():
        side.sort()
        assert all(lower - upper > 10.9 for upper, lower in itertools.pairwise(side)), "no name lies over another"
    assert {node.text for node in named} >= set(result.saved_names) - {"primals_1", "primals_2"}


def test_plots_of_a_report_without_the_figures_are_refused(example):
    joint, count, _ = example
    report = partition(joint, count, PartitionOptions(details="decisions")).report
    with pytest.raises(ValueError, match='details="memory"'):
        memory_svg(report)
    with pytest.raises(ValueError, match='details="front"'):
        front_svg(report)


@pytest.mark.parametrize("details", ["decisions", "memory", "front"])
def test_the_page_is_whole_and_loads_nothing(example, details):
    joint, count, _ = example
    result = partition(joint, count, PartitionOptions(details=details))
    page = html_report(result, "A <b>title</b>")
    assert "A &lt;b&gt;title&lt;/b&gt;" in page and "<b>title" not in page
    for loaded in ("http://", "https://", "src=", "href=", "@import", "url("):
        assert loaded not in page.replace('xmlns="http://www.w3.org/2000/svg"', "")
    pictures = {"decisions": 1, "memory": 2, "front": 3}[details]
    assert page.count("<svg") == 2 * pictures, "one of each for wide screens, one for narrow ones"
    for value in result.report.saved:
        assert f"<td>{value.name}</td>" in page
    for ban in result.report.bans:
        assert ban.name in page and ban.op in page


def test_a_partition_with_all_figures_survives_as_text(example):
    result = example[2]
    again = Partition.from_json(result.to_json())
    assert again == result and html_report(again) == html_report(result)


def test_a_graph_of_thousands_of_ops_still_draws():
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    value = x
    for _ in range(1500):
        value = graph.call_function(torch.ops.aten.sin.default, (value,))
    graph.output([value, graph.call_function(torch.ops.aten.mul.Tensor, (tangent, value))])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(16, device="meta")
    result = partition(torch.fx.GraphModule(nn.Module(), graph), 1, PartitionOptions(details="front"))
    page = html_report(result)
    assert len(page) < 2_000_000 and page.count("<svg") == 6


def test_the_forward_outputs_of_a_file_are_found(example):
    joint, count, _ = example
    assert count_forward_outputs(joint) == count
    assert count_forward_outputs(load_graph(dump_graph(joint))) == count


def test_the_command_writes_report_plots_and_graphs(example, tmp_path, capsys):
    joint, count, _ = example
    source = tmp_path / "graph.json"
    source.write_text(dump_graph(joint))
    out = {name: tmp_path / name for name in ("out.html", "out.json", "out.txt", "fw.json", "bw.json")}
    common = [str(source), "--strategy", "min-peak", "--budget", "0.7", "--quiet"]
    everything = [
        "--plots",
        str(tmp_path / "p"),
        "--forward",
        str(out["fw.json"]),
        "--backward",
        str(out["bw.json"]),
    ]
    assert main([*common, "--report", str(out["out.html"]), *everything]) == 0
    assert main([*common, "--report", str(out["out.json"]), "--num-fwd-outputs", str(count)]) == 0
    assert main([*common, "--report", str(out["out.txt"])]) == 0
    assert capsys.readouterr().out.startswith("partition by min-peak within 0.7")
    expected = partition(joint, count, PartitionOptions(strategy="min-peak", memory_budget=0.7, details="front"))
    assert out["out.html"].read_text().startswith("<!doctype html>") and "graph.json" in out["out.html"].read_text()
    report = PartitionReport.from_json(out["out.json"].read_text())
    assert report.peak_bytes == expected.report.peak_bytes and report.front
    assert out["out.txt"].read_text().startswith("partition by min-peak")
    assert {path.name for path in (tmp_path / "p").iterdir()} == {"memory.svg", "front.svg", "cut.svg"}
    for path in (tmp_path / "p").iterdir():
        ElementTree.fromstring(path.read_text())
    forward = load_graph(out["fw.json"].read_text())
    assert str(forward.graph) == str(expected.forward.graph)
    assert len(load_graph(out["bw.json"].read_text()).graph.nodes) == len(expected.backward.graph.nodes)


def test_the_command_runs_as_a_module_and_refuses_in_words(tmp_path, capsys):
    source = tmp_path / "graph.json"
    source.write_text("{}")
    command = [sys.executable, "-m", "aotkit_partition", str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1 and done.stderr.startswith("aotkit_partition: ") and "Traceback" not in done.stderr
    assert main([str(tmp_path / "no.json")]) == 1 and "no.json" in capsys.readouterr().err


def test_a_graph_with_nested_inputs_or_large_constants_can_be_partitioned_from_its_file(tmp_path):
    from torch.fx.experimental.proxy_tensor import make_fx

    big = torch.randn(200, 200)

    def joint(primals, tangents):
        out = torch.sin(primals[0] @ big)
        return [out, *torch.autograd.grad([out], primals, tangents)]

    x = torch.randn(200, 200, requires_grad=True)
    graph = make_fx(joint, tracing_mode="real")([x], [torch.ones(200, 200)])
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), ("primals_1", "tangents_1"), strict=True):
        node.target = name
    with pytest.raises(UnserializableGraphError, match="flat=True"):
        dump_graph(graph)
    text = dump_graph(graph, flat=True)
    with pytest.raises(GraphFormatError, match="too big"):
        load_graph(text)
    assert load_graph(text, describe_missing=True).graph.find_nodes(op="get_attr")
    (tmp_path / "graph.json").write_text(text)
    assert main([str(tmp_path / "graph.json"), "--report", str(tmp_path / "out.html"), "--quiet"]) == 0
    flat = load_graph(text, constants=graph_constants(graph))
    ones = torch.ones(200, 200)
    for got, wanted in zip(flat(x, ones), joint([x], [ones]), strict=True):
        torch.testing.assert_close(got, wanted)
