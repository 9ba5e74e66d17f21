"""An emulated process that calls compiled segments: see ``runner.c`` for what is said between the two."""

from __future__ import annotations

import struct
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from .processors import Emulated

__all__ = ["EmulationError", "Patch", "Region", "Server"]

RUNNER = Path(__file__).with_name("runner.c")


class EmulationError(RuntimeError):
    """The emulated process ended, could not load code, or code in it wrote outside of its memory."""


@dataclass(frozen=True)
class Region:
    """Memory that a segment may use: where it is in this process, and what is in it."""

    address: int
    content: bytes


@dataclass(frozen=True)
class Patch:
    """An entry of the frame that is an address: ``offset`` bytes into a region."""

    slot: int
    region: int
    offset: int


class Server:
    """One emulated process. ``folder`` is for the programs that are linked. ``loaded`` and ``called`` count what it has
    loaded and how many segments it has run."""

    def __init__(self, processor: Emulated, folder: Path) -> None:
        self._processor, self._folder = processor, folder
        self.loaded = self.called = 0
        self._libraries: dict[bytes, int] = {}
        runner = folder / f"runner-{processor.name}"
        self._compile("-O1", "-o", str(runner), str(RUNNER), "-ldl")
        command = [*processor.emulator, str(runner)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=20)

    def load(self, code: bytes) -> int:
        """Link object code and load it; gives the number to call it by. Equal code is loaded once."""
        known = self._libraries.get(code)
        if known is not None:
            return known
        self.loaded += 1
        path = self._folder / f"kernels{self.loaded}"
        path.with_suffix(".o").write_bytes(code)
        libraries = ("-lm", "-lgomp")
        self._compile("-shared", "-o", str(path.with_suffix(".so")), str(path.with_suffix(".o")), *libraries)
        name = str(path.with_suffix(".so")).encode()
        self._send(struct.pack("=II", ord("L"), len(name)) + name)
        number = self._receive_number()
        if number < 0:
            raise EmulationError(self._receive(self._receive_number()).decode())
        self._libraries[code] = number
        return number

    def call(
        self,
        library: int,
        function: str,
        threads: int,
        slots: Sequence[int],
        regions: Sequence[Region],
        patches: Sequence[Patch],
    ) -> tuple[int, list[bytes]]:
        """The status of a segment, and what it left in each region.

        Raises :class:`EmulationError` if it wrote beside a region, or if the process ended in it.
        """
        name = function.encode()
        parts = [struct.pack("=III", ord("C"), library, len(name)), name]
        parts.append(struct.pack(f"=iI{len(slots)}qI", threads, len(slots), *slots, len(regions)))
        for region in regions:
            parts += [struct.pack("=QQ", len(region.content), region.address % 4096), region.content]
        parts.append(struct.pack("=I", len(patches)))
        parts += [struct.pack("=IIQ", patch.slot, patch.region, patch.offset) for patch in patches]
        self._send(b"".join(parts))
        self.called += 1
        status, left, damaged = self._receive_number(), [], []
        for position, region in enumerate(regions):
            if self._receive_number():
                damaged.append(position)
            left.append(self._receive(len(region.content)))
        if damaged:
            raise EmulationError(f"{function} wrote outside of its memory, beside regions {damaged}")
        return status, left

    def _compile(self, *arguments: str) -> None:
        done = subprocess.run([self._processor.compiler, *arguments], capture_output=True, text=True)
        if done.returncode:
            raise EmulationError(done.stderr)

    def _send(self, request: bytes) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request)
            self._process.stdin.flush()
        except BrokenPipeError:
            self._ended()

    def _receive(self, count: int) -> bytes:
        assert self._process.stdout is not None
        found = self._process.stdout.read(count)
        if len(found) != count:
            self._ended()
        return found

    def _receive_number(self) -> int:
        (value,) = struct.unpack("=i", self._receive(4))
        return int(value)

    def _ended(self) -> None:
        code = self._process.wait(timeout=20)
        raise EmulationError(f"the emulated {self._processor.name} process ended with {code}")
