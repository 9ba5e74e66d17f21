"""Servers and a browser for the system tests; what is missing is a failure, not a skip."""

from __future__ import annotations

import contextlib
import functools
import html
import http.server
import json
import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

ROOT = Path(__file__).resolve().parents[3]
BROWSER_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--enable-logging=stderr",
)


def program(*names: str) -> str:
    """The path of the first of these programs that is there."""
    for name in names:
        found = shutil.which(name)
        if found is not None:
            return found
    pytest.fail(f"none of {', '.join(names)} is installed; `python -m tools.system_packages` installs them as root")


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without writing a log line per request: those of the site, and the page that looks at widths."""

    def translate_path(self, path: str) -> str:
        """The file of an address."""
        if path.startswith("/_widths.html"):
            return str(Path(__file__).parent / "widths.html")
        return super().translate_path(path)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


class SearchesNothing(QuietHandler):
    """The same with an index of no words: each page that opens reads the whole one, which takes half of its time."""

    def do_GET(self) -> None:
        """Answer with a file, or with the head of the index."""
        if not self.path.startswith("/search/search_index.json"):
            return super().do_GET()
        index = json.loads(Path(self.translate_path(self.path)).read_text(encoding="utf-8"))
        answer = json.dumps({**index, "docs": []}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)


@contextlib.contextmanager
def served(handler: type[QuietHandler], folder: Path) -> Iterator[str]:
    """The files of a folder on a free port of 127.0.0.1; yields the address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(folder))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def _built() -> Path:
    folder = ROOT / "build" / "site"
    assert (folder / "index.html").is_file(), "build the site first: nox -s docs"
    return folder


@pytest.fixture(scope="session")
def site() -> Iterator[str]:
    """The address of the built documentation site."""
    with served(QuietHandler, _built()) as address:
        yield address


@pytest.fixture(scope="session")
def site_without_words() -> Iterator[str]:
    """The address of the same site, whose search finds nothing."""
    with served(SearchesNothing, _built()) as address:
        yield address


@pytest.fixture
def browse(tmp_path: Path) -> Callable[..., str]:
    """Open an address in headless Chromium and return the DOM after its scripts ran; optionally take a picture."""
    chromium = program("chromium", "chromium-browser", "google-chrome")

    def open_page(
        address: str,
        screenshot: Path | None = None,
        milliseconds: int = 5000,
        size: str = "1200,900",
        dark: bool = False,
    ) -> str:
        profile = tmp_path / f"profile-{time.monotonic_ns()}"
        action = "--dump-dom" if screenshot is None else f"--screenshot={screenshot}"
        time_given = f"--virtual-time-budget={milliseconds}"  # of the page's own clock, which waits for no one
        flags = (*BROWSER_FLAGS, time_given, f"--user-data-dir={profile}", f"--window-size={size}", action)
        flags += ("--blink-settings=preferredColorScheme=0",) * dark
        done = subprocess.run(
            [chromium, *flags, address], capture_output=True, text=True, timeout=400, stdin=subprocess.DEVNULL
        )
        assert done.returncode == 0, done.stderr[-2000:]
        said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
        assert not [line for line in said if re.search("Uncaught|Failed to|Refused to|ERROR:CONSOLE", line)], said
        return done.stdout

    return open_page


Looked = dict[str, Any]


@pytest.fixture
def boxes(tmp_path: Path, browse: Callable[..., str]) -> Callable[..., Looked]:
    """Have ``boxes.html`` look at pages, which it gets as files, at three widths; if dark, at their colours in one."""
    folder = tmp_path / "looked-at"
    folder.mkdir()
    shutil.copy(Path(__file__).parent / "boxes.html", folder)

    def look(pages: Sequence[Path], dark: bool = False) -> Looked:
        for page in pages:
            shutil.copy(page, folder / page.name)
        with served(QuietHandler, folder) as address:
            widths = "900&only=colours" if dark else quote("400 900 1600")  # nothing else differs in the dark
            asked = f"pages={quote(' '.join(page.name for page in pages))}&widths={widths}"
            dom = browse(f"{address}/boxes.html?{asked}", milliseconds=60_000, size="1700,1000", dark=dark)
        found = re.search(r'<pre id="result">(.*?)</pre>', dom, re.DOTALL)
        assert found is not None, dom[:500]
        looked: Looked = json.loads(html.unescape(found.group(1)))
        assert "error" not in looked, looked["error"]
        return looked

    return look


@pytest.fixture
def redis_port(tmp_path: Path) -> Iterator[int]:
    """A Redis server of its own on loopback, without persistence; yields its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(tmp_path)]
    with open(tmp_path / "redis.log", "w") as log:
        server = subprocess.Popen([program("redis-server"), *arguments], stdout=log, stderr=log)
        try:
            wait_for_port(port, server)
            yield port
        finally:
            server.terminate()
            server.wait(timeout=20)


def wait_for_port(port: int, server: subprocess.Popen[bytes]) -> None:
    """Return when something listens on the port; fail when the server ended or nothing came up."""
    for _ in range(200):
        assert server.poll() is None, "redis-server ended"
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    pytest.fail("redis-server did not start listening within ten seconds")
