"""`python -m tools.replay record JOURNAL`, `compare BEFORE AFTER`, `against COMMIT`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.workspace import PACKAGES, ROOT

__all__ = ["main"]

BUILD = ROOT / "build" / "replay"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 where something differs."""
    parser = argparse.ArgumentParser(prog="python -m tools.replay", description=(__doc__ or "").partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("record", help="compile the corpus with the sources that Python finds")
    one.add_argument("journal", type=Path)
    one.add_argument("--verify", action="store_true", help="read every level back from its text after each pass")
    two = commands.add_parser("compare", help="two recordings")
    two.add_argument("before", type=Path)
    two.add_argument("after", type=Path)
    three = commands.add_parser("against", help="record a commit and the present state, side by side, and compare")
    three.add_argument("commit")
    for command in (one, three):
        command.add_argument("--kinds", nargs="+", default=["model", "pair"], choices=["model", "pair"])
        command.add_argument("--every", type=int, default=1, help="of the table's pairs every so many-th")
    for command in (two, three):
        command.add_argument("--words", type=Path, help="TOML: old word = new word")
        command.add_argument("--shown", type=int, default=10, help="differences that are printed")
    chosen = parser.parse_args(argv)
    if chosen.command == "record":
        from .corpus import cases
        from .record import record

        record(list(cases(chosen.kinds, chosen.every)), chosen.journal, verify=chosen.verify)
        return 0
    words = tomllib.loads(chosen.words.read_text()) if chosen.words else {}
    if chosen.command == "compare":
        return report(chosen.before, chosen.after, words, chosen.shown)
    before, after = against(chosen.commit, ["--kinds", *chosen.kinds, "--every", str(chosen.every)])
    return report(before, after, words, chosen.shown)


def against(commit: str, arguments: Sequence[str]) -> tuple[Path, Path]:
    """Record both states, with the present tools, in two processes side by side; returns their journals."""
    full = subprocess.check_output(["git", "rev-parse", f"{commit}^{{commit}}"], cwd=ROOT, text=True).strip()
    tree = BUILD / full / "tree"
    if not tree.exists():
        subprocess.run(["git", "worktree", "add", "--detach", str(tree), full], cwd=ROOT, check=True)
    before, after = tree.parent / "texts.jsonl", BUILD / "present.jsonl"
    after.unlink(missing_ok=True)
    running = [_recording(root, journal, arguments) for root, journal in ((tree, before), (ROOT, after))]
    ended = [process.wait() for process in running]
    if any(ended):
        raise SystemExit("a recording failed")
    return before, after


def _recording(root: Path, journal: Path, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    sources = [str(root / "packages" / name / "src") for name in PACKAGES]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sources, str(ROOT)]), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "tools.replay", "record", str(journal), *arguments], cwd=ROOT, env=env
    )


def report(before: Path, after: Path, words: Mapping[str, str], shown: int) -> int:
    """Print the differences; 1 where there are any."""
    from .compare import differences
    from .record import read

    old, new = read(before), read(after)
    found = list(differences(old, new, words))
    for difference in found[:shown]:
        print(difference.shown(), end="\n\n")
    texts = sum(map(len, new.values()))
    print(f"{len(found)} of {texts} texts differ, in {len({d.case for d in found})} of {len(new)} cases")
    return int(bool(found) or not texts)


if __name__ == "__main__":
    sys.exit(main())
