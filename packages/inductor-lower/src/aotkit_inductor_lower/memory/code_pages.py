"""Memory that the code of a library takes, given back when the code is not needed for a while.

Note [Pages of the compiler's code]
    The code of LLVM that a compile runs through stays in the process's resident memory, tens of megabytes, until the
    system needs memory elsewhere. A process that has compiled its model and trains counts as that much larger. The
    pages are those of a file that nobody has written to, so the process can hand them back at any time; the next
    compile finds them in the system's cache again, at a page fault for every 16 of them.
"""

from __future__ import annotations

from pathlib import Path

from .huge_pages import system_madvise

__all__ = ["release_code_pages", "unwritten"]

_MADV_DONTNEED = 4  # Linux's number
_MAPPINGS = Path("/proc/self/maps")


def unwritten(library: str, mappings: str) -> list[tuple[int, int]]:
    """The pages of files whose name holds ``library`` that the process can't have written to: addresses and bytes.

    They are code and constants. Of a file's parts that can only be read, the last before one that can be written to is
    left out: the loader fills tables in there, and closes them.

    Args:
        library: a part of the file's name.
        mappings: the text of ``/proc/self/maps``.
    """
    found: list[tuple[int, int]] = []
    last_read_only: list[tuple[int, int]] = []
    for line in mappings.splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) < 6 or library not in Path(fields[5]).name:
            continue
        first, past = (int(address, 16) for address in fields[0].split("-"))
        if "w" in fields[1]:
            last_read_only = []
        elif fields[1].startswith("r"):
            found += last_read_only
            last_read_only = []
            (found if "x" in fields[1] else last_read_only).append((first, past - first))
    return found


def release_code_pages(library: str) -> int:
    """Hand back the pages with code and constants of ``library``, a part of its file's name.

    See Note [Pages of the compiler's code]. Other threads may run that code meanwhile. Returns how many bytes of them
    the library has; 0 where the system has no such call, or no such library is loaded.
    """
    madvise = system_madvise()
    if madvise is None or not _MAPPINGS.exists():
        return 0
    parts = unwritten(library, _MAPPINGS.read_text())
    return sum(nbytes for first, nbytes in parts if madvise(first, nbytes, _MADV_DONTNEED) == 0)
