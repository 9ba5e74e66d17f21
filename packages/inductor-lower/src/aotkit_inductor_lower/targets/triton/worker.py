"""What compiles one kernel, from plain data to plain data: in this process, or as a program of its own in others.

The file is run by its path and imports nothing of this package, which would bring torch: Triton's compiler needs none.

Note [Worker processes]
    Most of a compile by Triton runs under Python's lock, so threads do not share it out over processors. A worker is
    ``python -P worker.py``: no fork, which would take the parent's CUDA context along, and no ``multiprocessing``,
    which runs the user's script once more. Requests come in on its standard input and answers go out on what was its
    standard output, each as JSON behind its length. It ends when its input does, when its parent is gone, and after
    a time without work.
"""

from __future__ import annotations

import hashlib
import json
import linecache
import os
import struct
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["Job", "Made", "compile_job", "define", "read_message", "write_message"]

Job = Mapping[str, Any]  # text, name, signature, constexprs, aligned, options, arch
Made = dict[str, Any]  # name, code (in hexadecimal digits), ptx, shared, warps, scratch

ALIGNED = 16  # bytes that each aligned pointer is a multiple of
PARSED = 8  # times that a kernel's text is parsed at most, less one
LONGEST_START = 120.0  # seconds until the imports are done
_LENGTH = struct.Struct("<Q")


def define(text: str, name: str, namespace: dict[str, Any]) -> Any:
    """Run a kernel's text; its lines can be looked up, as Triton does."""
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    filename = f"<aotkit kernel {name} {digest}>"
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    namespace["__name__"] = "aotkit_kernels"  # Triton tells its own functions from others by their module
    exec(compile(text, filename, "exec"), namespace)
    return namespace[name]


def jit_namespace() -> dict[str, Any]:
    """What kernels for a device have in scope."""
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
    from triton.runtime.jit import JITFunction

    return {"triton": triton, "tl": tl, "libm": libdevice, "jit": JITFunction}


def compile_job(job: Job) -> Made:
    """Compile one kernel with Triton, whose errors are not caught."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = define(job["text"], job["name"], jit_namespace())
    aligned = {(k,): [["tt.divisibility", ALIGNED]] for k in job["aligned"]}
    source = ASTSource(function, dict(job["signature"]), dict(job["constexprs"]), attrs=aligned)
    target, options = GPUTarget("cuda", job["arch"], 32), dict(job["options"])
    made = _parsed_again(lambda: triton.compile(source, target=target, options=options))
    meta = made.metadata
    return {
        "name": meta.name,
        "code": made.asm["cubin"].hex(),
        "ptx": made.asm["ptx"],
        "shared": meta.shared,
        "warps": meta.num_warps,
        "scratch": meta.global_scratch_size + meta.profile_scratch_size,
    }


def identify() -> str:
    """What Triton calls itself in the names of what it keeps."""
    from triton.runtime import cache

    key = getattr(cache, "triton_key", None)
    return "" if key is None else str(key())


def _parsed_again(compiled: Callable[[], Any]) -> Any:
    """What Triton makes, tried again where Python 3.11 could not parse the kernel: its parser counts how deep it is for
    all threads together, and complains (``SystemError``) if two of them parsed at once."""
    for _ in range(PARSED):
        try:
            return compiled()
        except SystemError:
            continue
    return compiled()


def write_message(stream: IO[bytes], value: object) -> None:
    """One value that JSON has a form for."""
    data = json.dumps(value).encode()
    left = memoryview(_LENGTH.pack(len(data)) + data)
    while left:
        left = left[stream.write(left) :]


def read_message(stream: IO[bytes]) -> Any:
    """One value. Raises ``EOFError`` where the other side is gone, and ``ValueError`` for what it did not write."""
    (length,) = _LENGTH.unpack(_exactly(stream, _LENGTH.size))
    if length >> 40:
        raise ValueError("this is no message of a worker's")
    return json.loads(_exactly(stream, length))


def _exactly(stream: IO[bytes], count: int) -> bytes:
    found = bytearray()
    while len(found) < count:
        part = stream.read(count - len(found))
        if not part:
            raise EOFError("the other side of the pipe is closed")
        found += part
    return bytes(found)


class _Watch:
    """Ends the process where nobody needs it any more, or where its imports hang."""

    def __init__(self, parent: int, idle: float) -> None:
        self._parent, self._idle = parent, idle
        self.started, self.since = False, time.monotonic()
        self.busy = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while os.getppid() == self._parent:
            waited = time.monotonic() - self.since
            if not self.busy and waited > (self._idle if self.started else LONGEST_START):
                break
            time.sleep(min(1.0, self._idle / 4))
        os._exit(0 if self.started else 3)


def _identify_quickly() -> None:
    """Triton names what it keeps by the contents of its library, 400 MB, which takes longer than a kernel. In this
    process, which compiles with the library as it was installed, size and time of change stand for them."""
    import triton
    from triton.runtime import cache

    root = Path(triton.__file__).parent
    names = (path for part in ("compiler", "backends", "language", "runtime") for path in (root / part).rglob("*.py"))
    digest = hashlib.sha256()
    for path in sorted(names):
        digest.update(path.read_bytes())
    for path in sorted((root / "_C").glob("libtriton*")):
        found = path.stat()
        digest.update(f"{path} {found.st_size} {found.st_mtime_ns}".encode())
    key = f"{triton.__version__}-aotkit-{digest.hexdigest()}"
    if hasattr(cache, "triton_key"):
        cache.triton_key = lambda: key


def _made_ready() -> list[str]:
    try:
        jit_namespace()
        _identify_quickly()
    except Exception as error:  # noqa: BLE001  # the parent does without
        return [f"{type(error).__name__}: {error}"]
    return ["ready"]


def _answer(job: Job) -> tuple[str, object]:
    begin = sum(os.times()[:4])  # with programs that Triton starts
    try:
        made = compile_job(job)
    except Exception as error:  # noqa: BLE001  # goes to the parent, which raises
        return "error", [str(error), traceback.format_exc()]
    return "made", made | {"seconds": sum(os.times()[:4]) - begin}


def _leave_standard_streams() -> None:
    """Whatever is printed is no answer, and programs that Triton starts hold no end of a pipe of the parent's."""
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    try:
        os.dup2(2, 1)
    except OSError:  # the parent has no standard error
        os.dup2(nothing, 1)
    os.close(nothing)


def main() -> None:
    """Answer requests. Arguments: the parent's process, and after how many seconds without work to end."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the parent, which closes the pipe
    requests, answers = os.fdopen(os.dup(0), "rb", 0), os.fdopen(os.dup(1), "wb", 0)
    _leave_standard_streams()
    watch = _Watch(int(sys.argv[1]), float(sys.argv[2]))
    try:
        sys.path[:] = read_message(requests)
        write_message(answers, _made_ready())
        while True:
            watch.since, watch.started, watch.busy = time.monotonic(), True, False
            job = read_message(requests)
            watch.busy = True
            write_message(answers, _answer(job))
    except (EOFError, BrokenPipeError):
        return


if __name__ == "__main__":
    main()
