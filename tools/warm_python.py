"""Python processes for tests that need one of their own: forks of one that has imported torch and the compiler.

A process of a test spends four of its five seconds on imports. A server imports once for all tests of a session and
becomes each of them by a fork. It does nothing else before, so that a process finds what a fresh one finds, with more
modules imported. There are two servers, used in turn, which differ in the seed of Python's hashes: what one process
stores, the next one reads with sets in another order, as if both had been started anew.

A test of what is imported needs a process that starts from nothing. So does one that sets a variable that an import
reads: :class:`WarmPython` sees to that itself.

A process that comes to its end without an error leaves it at that: see :func:`_end`. One with ``only_torch`` ends as a
started one does, with all that the interpreter takes apart.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import gc
import importlib
import io
import itertools
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import threading
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

#: What is imported before the forks. A module that another torch does not have is left out.
COMPILER = (
    *("torch._dynamo", "torch._dynamo.precompile_context", "torch._dynamo.repro.after_dynamo"),
    *("torch._dynamo.backends.inductor", "torch._inductor.compiler_bisector"),
    *("torch._functorch._aot_autograd.graph_compile", "torch._inductor.sizevars", "torch.export._trace"),
    *("torch.nn.attention.flex_attention", "torch.distributed.tensor.experimental._attention"),
    *("torch._dynamo.backends.distributed", "torch._dynamo.dce_extra_outputs", "torch._subclasses.schema_check_mode"),
    *("aotkit.backend", "aotkit.artifact.lookup", "aotkit.driver.graph_compiler", "aotkit.driver.bind"),
    *("aotkit.frontend.fake_calls", "aotkit_inductor_lower.driver"),
    *("aotkit_inductor_lower.targets.cpu.generate", "aotkit_inductor_lower.targets.cpu.load"),
)

#: Variables that are read while something is imported, by their beginnings.
READ_BY_IMPORTS = (
    *("PYTHON", "LD_", "LC_", "LANG", "TORCH", "PYTORCH", "TRITON", "CUDA", "XLA"),
    *("OMP_", "MKL_", "KMP_", "GOMP_", "ATEN_", "ONEDNN_", "DNNL_", "NUMEXPR", "OPENBLAS"),
)

#: Of these, those that are read at each use, those that torch's logs are set up by, which is done again in a fork.
READ_LATER = ("PYTHONPATH", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
READ_BY_LOGS = ("TORCH_LOGS", "TORCH_LOGS_OUT", "TORCH_LOGS_FORMAT", "TORCH_TRACE")
HASH_SEEDS = ("1", "2")

#: Windows has no forks, and libraries of macOS do not work behind one: all processes are started there.
_FORKS = sys.platform.startswith("linux")


class WarmPython:
    """Starts Python as ``subprocess.run`` does; most of the processes are forks of a server."""

    def __init__(self, modules: Sequence[str] = COMPILER, seeds: Sequence[str] = HASH_SEEDS) -> None:
        self._modules, self._env = tuple(modules), dict(os.environ)
        self._servers: dict[tuple[tuple[str, ...], str], _Server] = {}
        self._seeds = itertools.cycle(seeds)

    def run(
        self,
        arguments: Sequence[str],
        *,
        cwd: str | Path | None = None,
        env: Mapping[str, str] | None = None,
        timeout: float = 300,
        only_torch: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """``python ARGUMENTS`` with its output as text; ``env`` replaces the variables of this process.

        ``arguments`` begin with ``-c``, ``-m`` or a script, before which ``-B`` may stand. Raises
        `subprocess.TimeoutExpired` after ``timeout`` seconds. With ``only_torch`` nothing but torch is imported yet.
        """
        env, folder = dict(os.environ if env is None else env), str(cwd or Path.cwd())
        command = [sys.executable, *arguments]
        if not _FORKS or _read_by_imports(env) != _read_by_imports(self._env):
            return subprocess.run(
                command, cwd=folder, env=env, capture_output=True, text=True, timeout=timeout, check=False
            )
        which = (("torch",) if only_torch else self._modules, next(self._seeds))
        if which not in self._servers:
            self._servers[which] = _Server(which[0], {**self._env, "PYTHONHASHSEED": which[1]})
        server = self._servers[which]
        asked = {"arguments": list(arguments), "cwd": folder, "env": env, "whole": only_torch}
        code, out, err = server.run(asked, command, timeout)
        return subprocess.CompletedProcess(command, code, out, err)

    def close(self) -> None:
        """End the servers."""
        for server in self._servers.values():
            server.close()


def _read_by_imports(variables: Mapping[str, str]) -> dict[str, str]:
    """Those that are set: empty ones count for nothing."""
    elsewhere = (*READ_LATER, *READ_BY_LOGS)
    found = {name: value for name, value in variables.items() if name.startswith(READ_BY_IMPORTS) and value}
    return {name: value for name, value in found.items() if name not in elsewhere}


class _Server:
    """The process that imports."""

    def __init__(self, modules: Sequence[str], env: Mapping[str, str]) -> None:
        command = [sys.executable, __file__, *modules]
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._read = b""

    def run(self, asked: Mapping[str, Any], command: Sequence[str], timeout: float) -> tuple[int, str, str]:
        """The exit code of a process and what it has written, as soon as nobody can write there any more."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked).encode() + b"\n")
        self._process.stdin.flush()
        process = int(self._answer(None, command))
        try:
            answer = self._answer(timeout, command)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process, signal.SIGKILL)
            self._answer(None, command)
            raise
        code, out, err = json.loads(answer)
        return code, out, err

    def _answer(self, timeout: float | None, command: Sequence[str]) -> bytes:
        """The next line of the server's output."""
        assert self._process.stdout is not None
        while b"\n" not in self._read:
            if not select.select([self._process.stdout], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(list(command), timeout or 0)
            more = os.read(self._process.stdout.fileno(), 4096)
            if not more:
                raise RuntimeError(f"the process that forks ended with {self._process.wait()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


# --- in the server ----------------------------------------------------------------------------------------------


def _serve(modules: Sequence[str]) -> dict[str, Any] | None:
    """Fork for each line of the input; gives the request in the forked process, and nothing at the end."""
    del sys.path[0]  # the folder of this file
    for name in modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    if "torch._dynamo" in sys.modules:
        _measure_nothing()
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # as in the tests themselves: see `pytest_collection_finish` in conftest.py
    for line in sys.stdin:
        pipes = [os.pipe(), os.pipe()]
        process = os.fork()
        if process == 0:
            asked: dict[str, Any] = json.loads(line)
            for number, (_, end) in enumerate(pipes, start=1):
                os.dup2(end, number)
            for end in (end for pipe in pipes for end in pipe):
                os.close(end)
            return asked
        print(process, flush=True)
        written = _read(pipes)
        _, status = os.waitpid(process, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)  # what it started and left behind
        texts = [text.decode(errors="replace").replace("\r\n", "\n") for text in written]
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)
    return None


def _measure_nothing() -> None:
    """What the fixture `guards_are_not_timed` does for tests, for processes: see there."""
    dynamo: Any = sys.modules["torch._dynamo"]
    dynamo.config.run_gc_after_compile = False
    dynamo.guards.profile_guard_manager = lambda *_: 0.0
    for settings in ("_get_dynamo_config_for_logging", "_scrubbed_inductor_config_for_logging"):
        if hasattr(dynamo.utils, settings):
            setattr(dynamo.utils, settings, lambda: None)


def _read(pipes: Sequence[tuple[int, int]]) -> list[bytes]:
    """What is written to the pipes until nobody can write to them any more."""
    found = {ours: b"" for ours, _ in pipes}
    for _, theirs in pipes:
        os.close(theirs)
    waiting = set(found)
    while waiting:
        for ours in select.select(list(waiting), [], [])[0]:
            more = os.read(ours, 1 << 16)
            found[ours] += more
            if not more:
                waiting.remove(ours)
                os.close(ours)
    return list(found.values())


def _become(asked: Mapping[str, Any]) -> None:
    """What the operating system and the interpreter do at a start: a session, variables, where modules lie."""
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False), encoding="utf-8")
    given = {entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry}
    library = [entry for entry in sys.path if entry not in given]
    logs = [os.environ.get(name) for name in READ_BY_LOGS]
    os.environ.clear()
    os.environ.update(asked["env"])
    os.chdir(asked["cwd"])
    wanted = [str(Path(entry).absolute()) for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    sys.path[:] = ["", *wanted, *library]
    importlib.invalidate_caches()
    if "torch" in sys.modules and logs != [os.environ.get(name) for name in READ_BY_LOGS]:
        internal = sys.modules["torch._logging"]._internal
        internal.LOG_TRACE_HANDLER = None  # of the folder that the server was given
        internal._init_logs()


def _execute(arguments: Sequence[str]) -> None:
    """Run ``-c CODE``, ``-m MODULE`` or a script, as ``__main__``."""
    first, *rest = arguments
    if first == "-B":
        sys.dont_write_bytecode = True
        first, *rest = rest
    if first == "-m":
        sys.argv[:], sys.path[0] = rest, str(Path.cwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    main = types.ModuleType("__main__")
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if first == "-c":
        sys.argv[:], sys.path[0] = ["-c", *rest[1:]], ""
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:], sys.path[0] = [first, *rest], str(Path(first).resolve().parent)
        main.__file__ = first
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, vars(main))


def _end() -> None:
    """End as the interpreter does, but leave the modules as they are: to take thousands of them apart is half of the
    time of a process that compiles a small function."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(0)


if __name__ == "__main__":
    _this = sys.modules["__main__"]  # kept: its names are still used when another module has its place
    _asked = _serve(sys.argv[1:])
    if _asked is not None:
        _become(_asked)
        _execute(_asked["arguments"])
        if not _asked["whole"]:
            _end()
