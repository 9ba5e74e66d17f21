"""Put the pages of the documentation site together in build/docs, where mkdocs builds it from.

mkdocs does not accept a configuration file inside its own folder of pages, and the site shows more than docs/: each
package's README and changelog belong to the package and are copied in here, with their relative links adjusted.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from tools.workspace import PACKAGES, ROOT


def without_relative_links(text: str) -> str:
    """Keep the words of links that only make sense inside the repository."""
    return re.sub(r"\[([^\]]+)\]\((?!https?:|#|mailto:)[^)\s]+\)", r"\1", text)


def stage(root: Path, destination: Path) -> int:
    """Write `mkdocs.yml` and `pages/` into an empty folder; returns the number of pages."""
    shutil.rmtree(destination, ignore_errors=True)
    pages = destination / "pages"
    pages.mkdir(parents=True)
    shutil.copy(root / "docs" / "mkdocs.yml", destination / "mkdocs.yml")
    for path in sorted((root / "docs").rglob("*")):
        if path.is_file() and path.name != "mkdocs.yml":
            target = pages / path.relative_to(root / "docs")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (pages / "packages").mkdir(exist_ok=True)
    for name in PACKAGES:
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
