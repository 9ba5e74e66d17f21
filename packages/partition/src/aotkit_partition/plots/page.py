"""The report as one HTML page, with its plots, styles and scripts inside."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from ..__about__ import __version__
from ..partition import Partition
from ..report import PartitionReport, format_bytes
from .cut import cut_svg
from .front import format_seconds, front_svg
from .memory import memory_svg

_STYLE = """
:root{--ink:#1c2430;--soft:#5a6675;--line:#e3e7ec;--paper:#fff;--page:#f5f7f9;--accent:#2f6fdf}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa6b5;--line:#2c3440;--paper:#171c24;--page:#10141a;
--accent:#7fb0ff}}
*{box-sizing:border-box}body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}h1{font-size:24px;margin:0}h2{font-size:18px;margin:0 0 10px}
.lead{color:var(--soft);margin:4px 0 20px}section{background:var(--paper);border:1px solid var(--line);
border-radius:10px;padding:18px;margin:18px 0}.cards{display:flex;flex-wrap:wrap;gap:12px}.card{flex:1 1 150px;
background:var(--paper);border:1px solid var(--line);border-radius:10px;padding:12px 16px}.card b{display:block;
font-size:22px;font-weight:600}.card span{color:var(--soft);font-size:13px}.scroll{overflow:auto;max-height:640px}
.picture svg{display:block;width:100%;height:auto}.cut{max-height:960px;overflow:auto}
.scroll,.cut{background:linear-gradient(var(--paper),var(--paper)) bottom/100% 28px no-repeat local,
linear-gradient(transparent,var(--line)) bottom/100% 18px no-repeat scroll}
.narrow{display:none}.narrow svg{max-width:460px;margin:0 auto}
table{border-collapse:collapse;width:100%;font-size:13.5px}
th,td{text-align:left;padding:5px 10px;border-bottom:1px solid var(--line);vertical-align:top}
td:not(:first-child):not(.number){overflow-wrap:anywhere;min-width:6em}th{cursor:pointer;
position:sticky;top:0;background:var(--paper)}th:hover{color:var(--accent)}td.number,th.number{text-align:right}td.number{
font-variant-numeric:tabular-nums;white-space:nowrap}code{font:13px ui-monospace,monospace}input{font:inherit;
padding:5px 10px;border:1px solid var(--line);border-radius:6px;background:var(--page);color:var(--ink);
margin-bottom:10px;width:260px}.hidden{display:none}footer{color:var(--soft);font-size:13px}
@media(max-width:820px){.wide{display:none}.narrow{display:block}main{padding:20px 12px 40px}section{padding:14px 12px}
table{font-size:12.5px}th,td{padding:5px 4px}td.number{padding-left:8px}}
"""

_SCRIPT = """
for (const table of document.querySelectorAll('table')) {
  const body = table.tBodies[0], box = table.closest('section').querySelector('input');
  const value = (row, column) => row.cells[column].dataset.value ?? row.cells[column].textContent;
  [...table.tHead.rows[0].cells].forEach((head, column) => head.addEventListener('click', () => {
    const up = head.dataset.up !== 'yes'; head.dataset.up = up ? 'yes' : 'no';
    const rows = [...body.rows].sort((a, b) => value(a, column).localeCompare(value(b, column), 'en', {numeric: true}));
    body.append(...(up ? rows : rows.reverse()));
  }));
  if (box) box.addEventListener('input', () => { for (const row of body.rows)
    row.classList.toggle('hidden', !row.textContent.toLowerCase().includes(box.value.toLowerCase())); });
}
document.body.dataset.ready = 'yes';
"""

Cell = tuple[str, float | None]  # words, and a number to sort by


def html_report(result: Partition, title: str = "Partition report") -> str:
    """A page that explains a partition: plots, what is saved, what runs twice, and what must not.

    The plots need what ``details="memory"`` and ``details="front"`` put into the report; without, they are left out.
    """
    report = result.report
    sections = []
    if report.timeline is not None:
        sections.append(_section("Memory over one step", _picture(memory_svg(report), memory_svg(report, narrow=True))))
    if report.front:
        front = _picture(front_svg(report), front_svg(report, narrow=True))
        sections.append(_section("Plans: peak memory against recomputation", front + _front_table(report)))
    sections.append(_section("The cut", _picture(cut_svg(result), cut_svg(result, narrow=True), " cut")))
    sections += [_saved_section(report), _recomputed_section(report), _bans_section(report)]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"
        f'<h1>{escape(title)}</h1>\n<p class="lead">{escape(report.strategy)}; forward {report.num_forward_ops} ops, '
        f"backward {report.num_backward_ops} ops</p>\n{_cards(report)}\n" + "\n".join(sections) + "\n"
        f"<footer>aotkit-partition {escape(__version__)}. Sizes leave the inputs out. Times are estimates, to compare "
        f"plans with.</footer>\n</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _picture(wide: str, narrow: str, kind: str = "") -> str:
    """Two drawings, of which the style shows the one that the screen has room for: words keep their size."""
    return f'<div class="picture wide{kind}">{wide}</div><div class="picture narrow{kind}">{narrow}</div>'


def _cards(report: PartitionReport) -> str:
    work = [op for op in report.recomputed if not op.is_view]
    tensors = sum(not value.is_input and value.kind == "tensor" for value in report.saved)
    cards = [(format_bytes(report.activation_bytes), f"saved for the backward in {tensors} activations")]
    if report.peak_bytes is not None:
        cards.append((format_bytes(report.peak_bytes), "peak memory"))
    if report.peak_bytes_before is not None:
        cards.append((format_bytes(report.peak_bytes_before), "peak without recomputation"))
    cards.append((str(len(work)), "ops run twice"))
    cards.append((format_seconds(report.recompute_seconds), "estimated time of recomputation"))
    return (
        '<div class="cards">'
        + "".join(
            f'<div class="card"><b>{escape(figure)}</b><span>{escape(words)}</span></div>' for figure, words in cards
        )
        + "</div>"
    )


def _section(heading: str, body: str) -> str:
    return f"<section>\n<h2>{escape(heading)}</h2>\n{body}\n</section>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], search: bool = True) -> str:
    """A table; columns in which no row has words are left out."""
    rows = list(rows)
    told = [place for place in range(len(heads)) if any(row[place][0] for row in rows)]
    heads, rows = [heads[place] for place in told], [[row[place] for place in told] for row in rows]
    lines, kinds = [], [""] * len(heads)
    for row in rows:
        kinds = ["" if key is None else ' class="number"' for _, key in row]
        cells = []
        for words, key in row:
            kind = "" if key is None else f' class="number" data-value="{key:.12g}"'
            cells.append(f"<td{kind}>{escape(words)}</td>")
        lines.append(f"<tr>{''.join(cells)}</tr>")
    if not lines:
        return "<p>Nothing.</p>"
    head = "".join(f"<th{kind}>{escape(words)}</th>" for words, kind in zip(heads, kinds, strict=True))
    box = '<input type="search" placeholder="Filter" aria-label="Filter">' if search else ""
    body = "\n".join(lines)
    return f'{box}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table></div>'


def _bytes(count: int) -> Cell:
    return format_bytes(count), float(count)


def _seconds(seconds: float) -> Cell:
    return format_seconds(seconds), seconds


def _front_table(report: PartitionReport) -> str:
    rows = (
        [
            (f"{point.label}{' (chosen)' if point.chosen and point.label != 'this partition' else ''}", None),
            _bytes(point.peak_bytes),
            _bytes(point.saved_bytes),
            _seconds(point.seconds),
        ]
        for point in report.front
    )
    return _table(("plan", "peak", "saved", "recomputation"), rows, search=False)


def _saved_section(report: PartitionReport) -> str:
    order = sorted(report.saved, key=lambda value: (value.is_input, -value.bytes))
    rows = (
        [
            (value.name, None),
            (value.op, None),
            _bytes(value.bytes),
            ("input" if value.is_input else value.kind, None),
            (value.source, None),
        ]
        for value in order
    )
    return _section("Saved values", _table(("value", "made by", "bytes", "kind", "source"), rows))


def _recomputed_section(report: PartitionReport) -> str:
    rows = (
        [(op.name, None), (op.op, None), _bytes(op.bytes), _seconds(op.seconds), (op.source, None)]
        for op in report.recomputed
        if not op.is_view
    )
    return _section("Recomputed ops", _table(("value", "op", "result", "time", "source"), rows))


def _bans_section(report: PartitionReport) -> str:
    rows = ([(ban.name, None), (ban.op, None), (ban.reason, None)] for ban in report.bans)
    return _section("Not recomputed, and why", _table(("value", "op", "reason"), rows))
