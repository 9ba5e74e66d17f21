"""The ``aotkit`` command: look into the cache, the machine, a package or a function."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..__about__ import __version__

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status: 0, 1 for a problem that was found or met, 2 for a wrong call."""
    given = _parser().parse_args(arguments)
    try:
        status = int(given.run(given) or 0)
        sys.stdout.flush()  # here, where a pipe whose reader has left can be told from a problem
        return status
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes once more when it ends
        return 0
    except Exception as error:
        if given.debug:
            raise
        print(f"aotkit: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aotkit", description=__doc__)
    parser.add_argument("--version", action="version", version=f"aotkit {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(required=True, metavar="command")

    cache = commands.add_parser("cache", help="compiled graphs that are kept between processes")
    actions = cache.add_subparsers(required=True, metavar="action")
    _command(actions, "ls", _cache_ls, "list the entries, most recently used first")
    _command(actions, "stats", _cache_stats, "how many of which kind, and how large")
    prune = _command(actions, "prune", _cache_prune, "delete the least recently used entries")
    prune.add_argument("--megabytes", type=float, default=0.0, help="keep so much (default: nothing)")
    prune.add_argument("--unused-days", type=float, help="instead: delete what was not used for so long")
    why = _command(actions, "why", _cache_why, "why a graph was compiled: how its key differs from the nearest other")
    why.add_argument("key", nargs="?", default="", help="first digits of an entry's key (default: the newest graph)")
    for name, run, text in (
        ("export", _cache_export, "write all entries to one file"),
        ("import", _cache_import, "read such a file"),
    ):
        transfer = _command(actions, name, run, text)
        transfer.add_argument("file", type=_file, help="with a suffix or a folder, such as graphs.cache")
        transfer.add_argument("--key-file", type=Path, help="file with a secret of 16 or more characters, shared")

    runner = _command(commands, "runner", _runner, "build the library that runs packages without Python, for C and C++")
    runner.add_argument("folder", type=Path, help="where the library and its header go")
    runner.add_argument("--compiler", default="g++", help="a compiler of C++20")
    _command(commands, "doctor", _doctor, "versions, processor, libraries, health of the cache")
    explain = _command(commands, "explain", _explain, "what became of a function, or what is in a package")
    explain.add_argument("target", help="a package file, or module:function, which returns (callable, arguments)")
    explain.add_argument("--html", type=_page, help="write a page with pictures and measurements to this file, instead")
    explain.add_argument("--calls", type=int, default=10, help="how many steps to measure for the page")
    profile = _command(commands, "profile", _profile, "time, bytes and arithmetic of each kernel of one step")
    profile.add_argument("target", help="module:function, which returns (callable, arguments)")
    profile.add_argument("--calls", type=int, default=20, help="how many steps to measure")
    bench = _command(commands, "bench", _bench, "eager and compiled calls in turn")
    bench.add_argument("target", help="module:function, which returns (callable, arguments)")
    bench.add_argument("--seconds", type=float, default=5.0, help="how long to measure")
    return parser


def _command(commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str) -> Any:
    parser = commands.add_parser(name, help=text, description=text)
    parser.set_defaults(run=run)
    return parser


def _file(text: str) -> str:
    """A word alone is hardly meant to be the name of a file: ``aotkit cache export all`` would write one."""
    if not os.path.splitext(text)[1] and not os.path.dirname(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is no name of a file: it has neither a suffix nor a folder. All entries are meant anyhow; "
            f"write {text}.cache, or ./{text} if that is its name"
        )
    return text


def _page(text: str) -> str:
    """A page that a browser would not open as one is hardly meant."""
    if os.path.splitext(text)[1] not in (".html", ".htm"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end in .html")
    return text


def _progress(done: int, total: int) -> None:
    """A bar on a terminal's standard error; nothing elsewhere."""
    if not sys.stderr.isatty() or total == 0:
        return
    filled = 30 * done // total
    print(f"\r[{'#' * filled}{'.' * (30 - filled)}] {done}/{total}", end="\n" if done == total else "", file=sys.stderr)


def _cache_ls(given: argparse.Namespace) -> None:
    from aotkit_cache import open_cache

    from .cache import rows

    for row in rows(open_cache(), _progress):
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row.stat.last_used))
        noun = "kernel" if row.kernels == 1 else "kernels"
        kernels = f"{row.kernels:4} {noun}" if row.kind in ("inference", "training") else ""
        print(f"{row.stat.key[:16]}  {row.stat.size / 1e3:9.1f} kB  {used}  {row.kind:9} {kernels}".rstrip())


def _cache_stats(given: argparse.Namespace) -> None:
    from aotkit_cache import default_cache_dir, open_cache

    from .cache import rows

    kinds: dict[str, list[int]] = {}
    for row in rows(open_cache(), _progress):
        kinds.setdefault(row.kind, []).append(row.stat.size)
    print(f"{default_cache_dir()}: {sum(map(len, kinds.values()))} entries")
    for kind, sizes in sorted(kinds.items()):
        print(f"{len(sizes):6} {kind:10} {sum(sizes) / 1e6:10.1f} MB")


def _cache_prune(given: argparse.Namespace) -> None:
    from aotkit_cache import open_cache

    seconds = None if given.unused_days is None else given.unused_days * 86400
    gone = open_cache().prune(max_bytes=int(given.megabytes * 1e6), unused_seconds=seconds)
    print(f"deleted {len(gone)} entries, {sum(entry.size for entry in gone) / 1e6:.1f} MB")


def _cache_why(given: argparse.Namespace) -> None:
    from aotkit_cache import open_cache

    from .cache import why

    print(why(open_cache(), given.key))


def _shared_key(given: argparse.Namespace) -> bytes | None:
    from aotkit_cache import key_from_text

    return None if given.key_file is None else key_from_text(given.key_file.read_text())


def _cache_export(given: argparse.Namespace) -> None:
    from .cache import save_cache

    print(f"wrote {save_cache(given.file, signing_key=_shared_key(given), progress=_progress)}")


def _cache_import(given: argparse.Namespace) -> int:
    from .cache import load_cache

    done = load_cache(given.file, signing_key=_shared_key(given), progress=_progress)
    print(f"read {done}")
    return int(bool(done.refused))


def _doctor(given: argparse.Namespace) -> int:
    from ..reports.doctor import diagnose

    found = diagnose()
    print(found)
    return int(bool(found.problems))


def _explain(given: argparse.Namespace) -> None:
    if given.html is not None:
        if Path(given.target).is_file():
            raise ValueError(
                "a page is made of a function that is compiled for it: give module:function, not a package"
            )
        from ..reports.html_report import report

        function, arguments = _target(given.target)
        print(f"wrote {report(function, *arguments, path=given.html, calls=given.calls)}")
        return
    if Path(given.target).is_file():
        from ..driver.package import load

        package = load(given.target)
        print(package)
        print(package.variant["artifact"]["forward"]["report"]["text"])
        return
    from ..reports.explain import explain

    function, arguments = _target(given.target)
    print(explain(function, *arguments))


def _runner(given: argparse.Namespace) -> None:
    from .runner import build_runner

    print(f"wrote {build_runner(given.folder, given.compiler)}")


def _profile(given: argparse.Namespace) -> None:
    from ..reports.profile import profile

    function, arguments = _target(given.target)
    print(profile(function, *arguments, calls=given.calls))


def _bench(given: argparse.Namespace) -> None:
    import torch

    function, arguments = _target(given.target)
    compiled = torch.compile(function, backend="aotkit")
    begin = time.perf_counter()
    compiled(*arguments)
    print(f"first call {time.perf_counter() - begin:.2f} s")
    calls = {"eager": function, "aotkit": compiled}
    best = dict.fromkeys(calls, float("inf"))
    end = time.perf_counter() + given.seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            begin = time.perf_counter()
            call(*arguments)
            best[name] = min(best[name], time.perf_counter() - begin)
        _progress(int(100 * (given.seconds - max(0.0, end - time.perf_counter())) / given.seconds), 100)
    for name, seconds in best.items():
        print(f"{name:8} {seconds * 1e3:10.3f} ms  {best['eager'] / seconds:6.2f} x")


def _target(text: str) -> tuple[Callable[..., Any], Sequence[Any]]:
    """What ``module:function()`` returns; the current directory is on the path, as for ``python -m``."""
    module, _, name = text.partition(":")
    if not name:
        raise ValueError(f"{text!r} is neither a file nor of the form module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    function, arguments = getattr(importlib.import_module(module), name)()
    return function, arguments
