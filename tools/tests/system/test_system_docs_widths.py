"""No page of the site is wider than its column, on a phone, a tablet and a screen; pictures are whole and readable."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

pytestmark = pytest.mark.system

SITE = Path(__file__).resolve().parents[3] / "build" / "site"
WIDTHS = (400, 900, 1600)


def look(
    site: str, browse: Callable[..., str], pages: list[str], widths: tuple[int, ...], dark: bool = False
) -> dict[str, Any]:
    """What `widths.html` found."""
    asked = f"pages={quote(' '.join(pages))}&widths={quote(' '.join(map(str, widths)))}"
    given = 900 * len(pages) * len(widths) + 5000
    dom = browse(f"{site}/_widths.html?{asked}", milliseconds=given, size="1700,1000", dark=dark)
    found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
    assert found is not None, dom[:500]
    result: dict[str, Any] = json.loads(html.unescape(found.group(1)))
    return result


@pytest.mark.sample(1)
@pytest.mark.parametrize(("widths", "dark"), [(WIDTHS[::2], False), (WIDTHS[1:2], False), (WIDTHS[1:2], True)])
def test_every_page_fits_its_column(
    site_without_words: str, browse: Callable[..., str], widths: tuple[int, ...], dark: bool
) -> None:
    """On the narrowest and the widest at each push, on what lies between in the nightly run."""
    pages = sorted(str(path.relative_to(SITE)) for path in SITE.rglob("*.html") if path.name != "404.html")
    result = look(site_without_words, browse, pages, widths, dark)
    assert result["looked"] == len(pages) * len(widths) and len(pages) >= 40
    assert not result["found"], "\n".join(f"{f['page']} at {f['width']}: {f['what']}" for f in result["found"])


def test_what_does_not_fit_is_found(site: str, browse: Callable[..., str]) -> None:
    wide = SITE / "_wide.html"
    picture = '<div class="picture"><svg viewBox="0 0 100 40"><text x="90" y="20">cut off</text></svg></div>'
    inside = f'<div style="width:700px">wide</div>{picture}'
    wide.write_text(f"<!doctype html><meta charset=utf-8><body><article style=width:300px>{inside}</article>")
    try:
        says = [each["what"] for each in look(site, browse, ["_wide.html"], (400,))["found"]]
    finally:
        wide.unlink()
    assert any("the page is" in what for what in says), says
    assert any("reaches from" in what for what in says), says
