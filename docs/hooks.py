"""A hook of mkdocs: what docstrings write for Sphinx becomes what a reader wants to see."""

from __future__ import annotations

import re
from typing import Any

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc|obj|ref):<code>[~.!]*([^<]*)</code>")


def _last(found: re.Match[str]) -> str:
    """``~.errors.CodegenError`` is shown as ``CodegenError``; a dotted name that is meant whole, as it is."""
    short = found.group(0).partition("<code>")[2].startswith("~")
    name = found.group(1).rpartition(".")[2] if short else found.group(1)
    return f"<code>{name}</code>"


def on_page_content(html: str, **_page: Any) -> str:
    """Roles become plain names, and the double colon before a block of code goes away."""
    html = _ROLE.sub(_last, html)
    return re.sub(r"<p>::</p>", "", html).replace("::</p>", ":</p>")
