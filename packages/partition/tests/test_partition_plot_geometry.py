"""Plots read back: what is drawn stands where the figures of the report put it."""

import itertools
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from torch import nn

from aotkit_partition import PartitionOptions, partition
from aotkit_partition.plots import cut_svg, front_svg, html_report, memory_svg
from aotkit_partition.plots.cut import _shortened
from aotkit_partition.plots.front import format_seconds
from aotkit_partition.report import FrontPoint, format_bytes
from aotkit_partition.timeline import Allocation, MemoryTimeline

SVG = "{http://www.w3.org/2000/svg}"
aten = torch.ops.aten


def parsed(svg):
    return ElementTree.fromstring(svg)


def all_of(svg, tag):
    return list(parsed(svg).iter(f"{SVG}{tag}"))


def at(element, *names):
    return tuple(float(element.attrib[name]) for name in names)


def texts(svg):
    """words -> (x, y, anchor), the last of equal ones."""
    return {node.text: (*at(node, "x", "y"), node.attrib["text-anchor"]) for node in all_of(svg, "text")}


def hinted(svg, beginning):
    """The shapes whose hint begins so, with their hints."""
    groups = [group for group in all_of(svg, "g") if group.find(f"{SVG}title").text.startswith(beginning)]
    return [(group[0], group.find(f"{SVG}title").text) for group in groups]


def points(shape):
    return [tuple(map(float, pair)) for pair in re.findall(r"(-?[\d.]+) (-?[\d.]+)", shape.attrib["d"])]


def small():
    """A chain of two products; the backward makes the sine again."""
    graph = torch.fx.Graph()
    x, weight, grad = (graph.placeholder(name) for name in ("primals_1", "primals_2", "tangents_1"))
    one = graph.call_function(aten.mm.default, (x, weight))
    sine = graph.call_function(aten.sin.default, (one,))
    two = graph.call_function(aten.mm.default, (sine, weight))
    out = graph.call_function(aten.exp.default, (two,))
    grad = graph.call_function(aten.add.Tensor, (grad, two))
    for value in (sine, one):
        grad = graph.call_function(aten.mul.Tensor, (grad, value))
    grad = graph.call_function(aten.neg.default, (grad,))
    graph.output([out, grad, None])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(16, 16, device="meta")
    return partition(torch.fx.GraphModule(nn.Module(), graph), 1, PartitionOptions(details="front"))


@pytest.mark.parametrize(
    ("count", "words"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536, "1.5 KiB"), (1 << 20, "1.0 MiB"), (5 << 19, "2.5 MiB"),
     (1 << 30, "1.0 GiB"), (3 << 40, "3072.0 GiB")],
)  # fmt: skip
def test_bytes_in_words(count, words):
    assert format_bytes(count) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, "0 us"), (5e-8, "0.05 us"), (0.00012, "120 us"), (0.001, "1 ms"), (0.25, "250 ms"), (1.0, "1 s"),
     (90, "90 s")],
)  # fmt: skip
def test_seconds_in_words(seconds, words):
    assert format_seconds(seconds) == words


def two_timelines(loss, steps):
    """A timeline with memory of three kinds, and an earlier one with twice as much."""
    names = tuple(f"step{number}" if number != loss else "loss" for number in range(steps))
    pieces = (
        Allocation("kept", 1000, 0, steps - 2, "saved"),
        Allocation("result", 500, loss - 1, steps - 1, "output"),
        Allocation("short", 548, loss + 1, loss + 1, "temporary"),
    )
    twice = tuple(replace(piece, bytes=2 * piece.bytes) for piece in pieces)
    return MemoryTimeline(names, loss, pieces), MemoryTimeline(names, loss, twice)


@pytest.mark.covers("F3.42")
@pytest.mark.parametrize(("loss", "steps"), [(1, 4), (4, 8), (6, 9)])
@pytest.mark.parametrize("compared", [False, True])
def test_memory_is_stacked_to_scale_over_both_halves_of_a_step(loss, steps, compared):
    timeline, before = two_timelines(loss, steps)
    report = replace(small().report, timeline=timeline, before=before if compared else None)
    svg = memory_svg(report)
    highest, left, right, top, bottom = (4096 if compared else 2048), 78, 940, 68, 338

    def place(step):
        middle = left + 0.4 * (right - left)
        if step <= loss:
            return left + (middle - left) * step / loss
        return middle + (right - middle) * (step - loss) / (steps - loss)

    def height(count):
        return bottom - (bottom - top) * count / highest

    def drawn(amounts):
        corners = [(place(step + end), height(count)) for step, count in enumerate(amounts) for end in (0, 1)]
        return [pytest.approx(corner, abs=0.01) for corner in corners]

    def bytes_of(*kinds):
        return [sum(a.bytes for a in timeline.live_at(step) if a.kind in kinds) for step in range(steps)]

    stacks = [("outputs", (), ("output",)), ("saved", ("output",), ("output", "saved")),
              ("temporaries", ("output", "saved"), ("output", "saved", "temporary"))]  # fmt: skip
    for words, under, upto in stacks:
        ((shape, _),) = hinted(svg, f"{words}: at most")
        assert points(shape) == [*drawn(bytes_of(*upto)), *reversed(drawn(bytes_of(*under)))]
        assert words in texts(svg)
    assert "gradients" not in texts(svg) and ("without recomputation" in texts(svg)) == compared
    if compared:
        ((shape, hint),) = hinted(svg, "without recomputation")
        assert points(shape) == drawn(before.live_bytes) and hint.endswith("peak 4.0 KiB")
    for share in range(5):
        x, y, anchor = texts(svg)[format_bytes(highest * share / 4)]
        assert x < left and anchor == "end" and y == pytest.approx(height(highest * share / 4), abs=6)
    grid = [at(line, "y1", "y2") for line in all_of(svg, "line") if line.attrib.get("class") == "grid"]
    assert grid == [pytest.approx((height(highest * share / 4),) * 2, abs=0.01) for share in range(5)]
    (axis,) = [at(line, "x1", "x2", "y1", "y2") for line in all_of(svg, "line") if line.attrib.get("class") == "axis"]
    assert axis == pytest.approx((place(loss), place(loss), top, bottom))
    assert left < texts(svg)["forward"][0] < place(loss) < texts(svg)["backward"][0] < right
    keys = [node.attrib["fill"] for node in all_of(svg, "rect")]
    assert keys == ["var(--output)", "var(--saved)", "var(--temporary)"]
    faint = {node.text for node in all_of(svg, "text") if node.attrib.get("class") == "faint"}
    assert faint == {"loss", *(format_bytes(highest * share / 4) for share in range(5))}
    (dot,) = all_of(svg, "circle")
    assert at(dot, "cx", "cy") == pytest.approx((place(loss + 1.5), height(2048)), abs=0.01)
    x, y, anchor = texts(svg)[f"peak 2.0 KiB at step{loss + 1}"]
    assert y + 4 < top, "no line of the plot reaches the label"
    assert anchor == "middle" and left < x < right and abs(x - at(dot, "cx")[0]) < 90


@pytest.mark.covers("F3.42")
def test_of_many_steps_the_highest_of_several_is_drawn():
    steps, loss = 2100, 700
    names = tuple(f"step{number}" for number in range(steps))
    pieces = tuple(Allocation(name, 10 + 7 * number % 90, number, number, "saved") for number, name in enumerate(names))
    report = replace(small().report, timeline=MemoryTimeline(names, loss, pieces), before=None)
    ((shape, _),) = hinted(memory_svg(report), "saved: at most")
    upper = points(shape)[: len(points(shape)) // 2]
    assert len(upper) == 2 * 420, "five steps each"
    xs = [x for x, _ in upper]
    assert xs == sorted(xs) and xs[0] == 78 and xs[-1] == 940
    amounts = [piece.bytes for piece in pieces]
    wanted = [338 - 270 * max(amounts[start : start + 5]) / max(amounts) for start in range(0, steps, 5)]
    assert [y for _, y in upper[::2]] == pytest.approx(wanted, abs=0.01) == [y for _, y in upper[1::2]]


@pytest.mark.covers("F3.42")
def test_plans_stand_at_their_peak_and_their_time_and_stairs_lead_from_one_to_the_next():
    front = (
        FrontPoint("lowest", 1024, 100, 4e-3), FrontPoint("middle", 1536, 200, 3e-3),
        FrontPoint("mine", 1800, 150, 2.5e-3, True), FrontPoint("quick", 2048, 300, 1e-3),
    )  # fmt: skip
    before = MemoryTimeline(("loss",), 0, (Allocation("all", 4096, 0, 0, "saved"),))
    svg = front_svg(replace(small().report, front=front, before=before))
    left, right, top, bottom = 78, 920, 28, 328

    def place(peak, seconds):
        return (left + (right - left) * peak / 4096, bottom - (bottom - top) * seconds / 4e-3)

    for point in front:
        ((dot, hint),) = hinted(svg, f"{point.label}: ")
        assert at(dot, "cx", "cy") == pytest.approx(place(point.peak_bytes, point.seconds), abs=0.01)
        assert dot.attrib["fill"] == ("var(--saved)" if point.chosen else "var(--paper)")
        assert at(dot, "r")[0] >= 2 and hint.endswith(f"recomputation {format_seconds(point.seconds)}")
    others = [place(point.peak_bytes, point.seconds) for point in front if not point.chosen]
    (stairs,) = [shape for shape in all_of(svg, "path") if shape.attrib.get("stroke") == "var(--saved)"]
    corners = [c for (x1, y1), (x2, _) in itertools.pairwise(others) for c in ((x1, y1), (x2, y1))]
    assert points(stairs) == [pytest.approx(corner, abs=0.01) for corner in (*corners, others[-1])]
    ((cross, hint),) = hinted(svg, "without recomputation")
    assert points(cross)[0] == pytest.approx((right - 5, bottom - 5)) and hint.endswith("peak 4.0 KiB")
    grid = [at(line, "x1", "y1", "x2", "y2") for line in all_of(svg, "line")]
    xs, ys = [place(1024 * share, 0)[0] for share in range(5)], [place(0, 1e-3 * share)[1] for share in range(5)]
    wanted = [row for x, y in zip(xs, ys, strict=True) for row in ((left, y, right, y), (x, top, x, bottom))]
    assert grid == [pytest.approx(row, abs=0.01) for row in wanted]
    for share in range(1, 5):
        x, y, anchor = texts(svg)[f"{share}.0 KiB"]
        assert anchor == "middle" and x == pytest.approx(xs[share], abs=0.01) and y > bottom
        x, y, anchor = texts(svg)[f"{share} ms"]
        assert anchor == "end" and x < left and ys[share] < y < ys[share] + 6  # the middle of the digits at the line


@pytest.mark.covers("F3.42")
def test_plans_that_are_near_each_other_fill_the_width():
    front = (FrontPoint("lowest", 3000, 100, 4e-3), FrontPoint("highest", 4000, 300, 1e-3))
    svg = front_svg(replace(small().report, front=front, before=None))
    (low, high) = (at(hinted(svg, f"{point.label}: ")[0][0], "cx")[0] for point in front)
    assert (low, high) == pytest.approx((78 + 842 / 11, 920), abs=0.01)
    assert {"2.8 KiB", "3.9 KiB"} <= texts(svg).keys() and "0 B" not in texts(svg), "the axis tells where it begins"


@pytest.mark.parametrize("draw", [memory_svg, front_svg])
def test_a_picture_for_a_phone_is_narrow_and_none_of_its_words_overlap(draw):
    svg = draw(small().report, narrow=True)
    assert at(parsed(svg), "width")[0] == 340
    boxes = []
    for words, (x, y, anchor) in texts(svg).items():
        wide = 6.6 * len(words)
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[anchor]
        assert left > -2 and left + wide < 350, words
        boxes.append((left, left + wide, y))
    for (a, b, y), (c, d, z) in itertools.combinations(boxes, 2):
        assert abs(y - z) >= 12 or b <= c or d <= a


def test_long_names_keep_their_ends_in_a_narrow_cut():
    svg = cut_svg(small(), narrow=True)
    assert at(parsed(svg), "width")[0] == 340
    assert _shortened("native_layer_norm_backward_12", 16) == "native_…kward_12"
    assert _shortened("mul_1", 16) == "mul_1"


@pytest.mark.covers("F3.54")
def test_ops_stand_one_below_the_other_and_saved_values_lead_from_where_they_are_made_to_their_first_use():
    result = small()
    svg = cut_svg(result)
    forward = [node.name for node in result.forward.graph.nodes if node.op == "call_function"]
    backward = [node.name for node in result.backward.graph.nodes if node.op == "call_function"]
    assert len(forward) == 4 and len(backward) == 5 and set(result.saved_names) == {"mm_default", "mm_default_1"}
    width, tall = at(parsed(svg), "width")[0], 20.0 * 5
    boxes = {}
    for names, x in ((forward, 16), (backward, width - 316)):
        for name in names:
            ((box, _),) = [found for found in hinted(svg, f"{name} = ") if at(found[0], "x")[0] == x]
            boxes[name, x < 100] = at(box, "y", "height")
            assert at(box, "width")[0] == 300 and 0 < at(box, "height")[0] <= 20
    rows = [boxes[name, True][0] for name in forward]
    assert rows == [64 + 25 * place for place in range(4)], "downwards"
    rows = [boxes[name, False][0] for name in backward]
    assert rows == [64 + 20 * place for place in (4, 3, 2, 1, 0)], "upwards"
    for node in all_of(svg, "text"):
        if node.text in forward:
            x, y = at(node, "x", "y")
            top, height = boxes[node.text, x < 100]
            assert top + 8 <= y <= top + height, "the name stands in the box"
    (middle,) = [at(line, "x1", "x2", "y1", "y2") for line in all_of(svg, "line")]
    assert middle[:2] == (width / 2, width / 2) and middle[2] < 64 and middle[3] == 64 + tall
    for name, user in (("mm_default", "sin_default"), ("mm_default_1", "add_tensor")):
        ((curve, hint),) = hinted(svg, f"{name}: 1.0 KiB")
        first, *_, last = points(curve)
        assert first == pytest.approx((316, boxes[name, True][0] + 8), abs=0.01) and "aten.mm" in hint
        assert last == pytest.approx((width - 316, boxes[user, False][0] + 8), abs=0.01)
        assert float(curve.attrib["stroke-width"]) == 1.25 and "stroke-dasharray" not in curve.attrib
    fills = {node.attrib["fill"] for node in all_of(svg, "rect")}
    assert fills == {"var(--forward)", "var(--backward)", "var(--again)"}


@pytest.mark.covers("F3.54")
def test_a_saved_input_enters_above_all_ops_with_a_dashed_line():
    graph = torch.fx.Graph()
    x, grad = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    graph.output([graph.call_function(aten.sin.default, (x,)), graph.call_function(aten.mul.Tensor, (grad, x))])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(16, 16, device="meta")
    svg = cut_svg(partition(torch.fx.GraphModule(nn.Module(), graph), 1))
    ((curve, hint),) = hinted(svg, "primals_1: an input")
    assert points(curve)[0][1] < 64 and points(curve)[-1][1] == 72 and "stroke-dasharray" in curve.attrib
    assert float(curve.attrib["stroke-width"]) == 1 and hint


def test_the_page_begins_with_the_figures():
    result = small()
    cards = re.findall(r'<div class="card"><b>(.*?)</b><span>(.*?)</span></div>', html_report(result))
    report = result.report
    assert cards == [
        ("2.0 KiB", "saved for the backward in 2 activations"),
        (format_bytes(report.peak_bytes), "peak memory"),
        (format_bytes(report.peak_bytes_before), "peak without recomputation"),
        ("1", "ops run twice"),
        (format_seconds(report.recompute_seconds), "estimated time of recomputation"),
    ]


def test_a_column_in_which_no_row_has_words_is_left_out():
    result = small()
    assert not any(value.source for value in result.report.saved), "this graph has no source lines"
    assert ">source<" not in html_report(result) and ">kind<" in html_report(result)
    with_lines = replace(result.report, saved=[replace(value, source="model.py:3") for value in result.report.saved])
    assert html_report(replace(result, report=with_lines)).count(">source<") == 1


@pytest.mark.parametrize(("inputs", "opacity"), [(2, "0.75"), (60, "0.25")])
def test_the_lines_of_many_inputs_are_faint(inputs, opacity):
    graph = torch.fx.Graph()
    values = [graph.placeholder(f"primals_{place}") for place in range(1, inputs + 1)]
    grad = graph.placeholder("tangents_1")
    out = graph.call_function(aten.sin.default, (values[0],))
    graph.output([out, *(graph.call_function(aten.mul.Tensor, (grad, value)) for value in values)])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(16, 16, device="meta")
    svg = cut_svg(partition(torch.fx.GraphModule(nn.Module(), graph), 1))
    curves = [curve for curve, _ in hinted(svg, "primals_")]
    assert len(curves) == inputs and {curve.attrib["opacity"] for curve in curves} == {opacity}
