"""Put the pages of the documentation site together in build/docs, where mkdocs builds it from.

mkdocs does not accept a configuration file inside its own folder of pages, and the site shows more than docs/: each
package's README and changelog belong to the package and are copied in here, with their relative links adjusted. Pages
of the API reference name what is public, of which mkdocstrings shows the docstrings. `<!-- picture: NAME -->` and
`<!-- charts: NAME NAME -->` in a page become pictures of docs/assets, with the colours of the site.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tools.workspace import PACKAGES, PUBLIC_MODULES, ROOT, import_name


def without_relative_links(text: str) -> str:
    """Keep the words of links that only make sense inside the repository."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|mailto:)[^)\s]+\)", r"\1", text)


def inlined(path: Path, kind: str = "") -> str:
    """The picture as a part of a page: without colours of its own."""
    svg = re.sub(r"<style>.*?</style>\n", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return f'<div class="picture{kind}">{svg.strip()}</div>'


def with_pictures(text: str, assets: Path) -> str:
    """A page with its pictures. Raises ``FileNotFoundError`` for one that there is not."""

    def picture(found: re.Match[str]) -> str:
        wide, tall = (assets / f"{found.group(1)}{suffix}.svg" for suffix in ("", "-tall"))
        return inlined(wide, " wide") + "\n" + inlined(tall, " tall")

    def charts(found: re.Match[str]) -> str:
        inside = "\n".join(inlined(assets / f"{name}.svg") for name in found.group(1).split())
        return f'<div class="charts">\n{inside}\n</div>'

    text = re.sub(r"<!-- picture: (\S+) -->", picture, text)
    return re.sub(r"<!-- charts: (.*?) -->", charts, text)


def reference_page(name: str) -> str:
    """The public names of a package, for mkdocstrings."""
    module = import_name(name)
    about = "The names of the package's root, then its modules that are public by name."
    parts = [f"# {module}\n\n{about}\n"]
    parts += [f"## {name}\n\n::: {name}\n" for name in (module, *(f"{module}.{p}" for p in PUBLIC_MODULES[name]))]
    return "\n".join(parts)


def stage(root: Path, destination: Path) -> int:
    """Write `mkdocs.yml` and `pages/` into an empty folder; returns the number of pages."""
    shutil.rmtree(destination, ignore_errors=True)
    pages = destination / "pages"
    pages.mkdir(parents=True)
    for name in ("mkdocs.yml", "hooks.py"):
        shutil.copy(root / "docs" / name, destination / name)
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file() and path.name not in ("mkdocs.yml", "hooks.py"):
            target = pages / path.relative_to(root / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                text = with_pictures(path.read_text(encoding="utf-8"), root / "docs" / "assets")
                target.write_text(text, encoding="utf-8")
            else:
                shutil.copy(path, target)
    (pages / "reference").mkdir(exist_ok=True)
    security = (root / "SECURITY.md").read_text(encoding="utf-8")
    (pages / "security.md").write_text(security, encoding="utf-8")
    (pages / "packages").mkdir(exist_ok=True)
    for name in PACKAGES:
        (pages / "reference" / f"{name}.md").write_text(reference_page(name), encoding="utf-8")
        readme = (root / "packages" / name / "README.md").read_text(encoding="utf-8")
        changelog = (root / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8")
        changes = re.sub(r"^(#+) ", r"#\1 ", changelog, flags=re.MULTILINE)
        text = f"{without_relative_links(readme).rstrip()}\n\n{without_relative_links(changes)}"
        (pages / "packages" / f"{name}.md").write_text(text, encoding="utf-8")
    return len(list(pages.rglob("*.md")))


def main() -> int:
    """Stage the site of this checkout."""
    count = stage(ROOT, ROOT / "build" / "docs")
    print(f"staged {count} pages in build/docs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
