"""Which addresses a Triton kernel reads and writes, found by running its text over arrays of indices.

The text of a kernel is a Python function. Here it runs with a ``tl`` of our own, in which numbers that come from memory
are not known and addresses are: some of the program instances are run, and each load and store keeps the elements that
it asks for. It serves kernels of any generator, so that all are counted by one rule.

Note [What counts as traffic]
    Memory is moved in sectors of 32 bytes. An access of a program instance moves each sector that it touches once,
    however many of its iterations ask for it. Over all instances, an element that several of them read counts once (a
    cache holds it), but the waste of its sectors counts: a kernel in which each instance reads one column of a matrix
    moves the matrix as many times as a sector has columns. Accesses that read the same again, in another place of the
    text, count again.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np

__all__ = ["SECTOR", "Access", "Argument", "Traced", "trace"]

SECTOR = 32
SAMPLES = 4  # program instances that are run
ITERATIONS = 12  # of each loop


@dataclass(frozen=True, slots=True)
class Argument:
    """A pointer to memory of ``elements`` of ``itemsize`` bytes. ``floats``: what is in it is no index."""

    name: str
    itemsize: int
    elements: int
    floats: bool


@dataclass(slots=True)
class Access:
    """A load or store of the text, at ``line``. ``moved``: bytes in whole sectors, over all program instances;
    ``needed``: bytes of different elements among these; ``asked``: of all elements that an instance asks for at once,
    ``run``: of neighbours among these, at most. ``start``: all runs of a sector and more begin at multiples of so many
    bytes, 16 at most: a thread can load no more at once."""

    line: int
    kind: str
    argument: str
    itemsize: int
    moved: float = 0.0
    needed: float = 0.0
    asked: int = 0
    run: int = 0
    start: int = 16


@dataclass(frozen=True, slots=True)
class Traced:
    """What a launch moves. ``programs``: number of instances."""

    programs: int
    accesses: tuple[Access, ...]

    def bytes_of(self, kind: str) -> float:
        """Bytes that loads (``"load"``) or stores move."""
        return sum(a.moved for a in self.accesses if (a.kind == "load") == (kind == "load"))


class Array(np.ndarray[Any, Any]):
    """An array of the kernel's: numbers, as far as they are known."""

    def __array_wrap__(self, array: Any, context: Any = None, return_scalar: bool = False) -> Any:
        return np.asarray(array).view(Array)

    def to(self, dtype: Any, **_: Any) -> Array:
        if dtype.kind == "i" and self.dtype.kind == "f":
            return _array(np.nan_to_num(self).astype(np.int64))
        return self

    def broadcast_to(self, *shape: Any) -> Array:
        """As wide as ``shape``."""
        wanted = shape[0] if isinstance(shape[0], list | tuple) else shape
        return _array(np.broadcast_to(self, tuple(map(int, wanted))))


def _array(value: Any) -> Array:
    return np.asarray(value).view(Array)


@dataclass(frozen=True, slots=True)
class _Type:
    name: str
    kind: str
    itemsize: int

    def to(self, *_: Any) -> _Type:
        return self


_TYPES = {
    name: _Type(name, kind, size)
    for kind, names in {
        "f": {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8e4nv": 1, "float8e5": 1},
        "i": {"int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint64": 8, "uint32": 4, "uint16": 2, "uint8": 1},
        "b": {"int1": 1},
    }.items()
    for name, size in names.items()
}


class Pointer:
    """Elements of an argument, by their numbers."""

    def __init__(self, argument: Argument, offset: Any = 0, itemsize: int = 0) -> None:
        self.argument, self.offset, self.itemsize = argument, offset, itemsize or argument.itemsize

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.argument, self.offset + offset, self.itemsize)

    __radd__ = __add__

    def to(self, kind: Any, **_: Any) -> Pointer:
        """Its elements taken for others."""
        return Pointer(self.argument, self.offset, kind.itemsize)


@dataclass(slots=True)
class Described:
    """A matrix of which the device copies pieces: what is outside of it is not read."""

    recorder: Recorder
    base: Pointer
    shape: Sequence[int]
    strides: Sequence[int]
    block: Sequence[int]

    def load(self, places: Sequence[Any]) -> Array:
        """A piece, at a place."""
        steps = [np.arange(n, dtype=np.int64) for n in self.block]
        rows, columns = (int(place) + step for place, step in zip(places, steps, strict=True))
        inside = (rows < self.shape[0])[:, None] & (columns < self.shape[1])[None, :]
        offsets = rows[:, None] * self.strides[0] + columns[None, :] * self.strides[1]
        self.recorder.access("load", sys._getframe(1).f_lineno, self.base + offsets, inside)
        return _array(np.ones((1, 1)))


@dataclass(slots=True)
class _Site:
    """Sectors and elements that one program instance has asked for at a place of the text."""

    access: Access
    elements: list[Any] = field(default_factory=list)
    totals: list[tuple[float, float]] = field(default_factory=list)
    scale: float = 1.0

    def ask(self, offsets: Any, scale: float) -> None:
        offsets, self.scale = np.unique(offsets), scale
        if offsets.size:
            self._note_runs(offsets)
        self.elements.append(offsets)

    def _note_runs(self, offsets: Any) -> None:
        access, first = self.access, not self.access.asked
        edges = np.concatenate(([-1], np.flatnonzero(np.diff(offsets) != 1), [offsets.size - 1]))
        runs = np.diff(edges) * access.itemsize
        if first:
            access.asked, access.run = offsets.size * access.itemsize, int(runs.max())
        for place in np.unique(offsets[edges[:-1] + 1][runs >= SECTOR] * access.itemsize % access.start):
            access.start = math.gcd(access.start, int(place))

    def finish(self) -> None:
        """The end of a program instance."""
        found = np.unique(np.concatenate(self.elements)) if self.elements else np.zeros(0, np.int64)
        sectors = np.unique(found * self.access.itemsize // SECTOR)
        again = self.elements and found.size == self.elements[0].size  # the same in each iteration
        scale = 1.0 if again else self.scale
        self.totals.append((scale * found.size * self.access.itemsize, scale * sectors.size * SECTOR))
        self.elements = []


class Recorder:
    """Keeps what a kernel asks for; ``tl`` is its language."""

    def __init__(self) -> None:
        self.program = (0, 0, 0)
        self.grid = (1, 1, 1)
        self.scale = 1.0  # iterations that each one stands for, of the loops around
        self.sites: dict[tuple[int, str, str], _Site] = {}
        self.random = np.random.default_rng(0)
        self.tl = _Language(self)

    def access(self, kind: str, line: int, pointer: Pointer, mask: Any) -> tuple[int, ...]:
        """Keep an access; gives its shape."""
        key = line, kind, pointer.argument.name
        site = self.sites.get(key)
        if site is None:
            site = self.sites[key] = _Site(Access(line, kind, pointer.argument.name, pointer.itemsize))
        offsets = np.asarray(pointer.offset)
        if mask is not None and mask is not True:
            offsets, mask = np.broadcast_arrays(offsets, np.asarray(mask))
            site.ask(offsets[mask.astype(bool)], self.scale)
        else:
            site.ask(offsets.ravel(), self.scale)
        return offsets.shape

    def iterations(self, *bounds: Any, **_: Any) -> Iterator[int]:
        """Those of a loop, or some that stand for all."""
        every = range(*map(int, bounds))
        outside = self.scale
        if len(every) <= ITERATIONS:
            yield from every
            return
        self.scale = outside * len(every) / ITERATIONS
        yield from (every[round(k * (len(every) - 1) / (ITERATIONS - 1))] for k in range(ITERATIONS))
        self.scale = outside

    def finish(self) -> None:
        for site in self.sites.values():
            site.finish()


class _Language:
    """What kernels use of ``triton.language``."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        for name, kind in _TYPES.items():
            setattr(self, name, kind)
        self.constexpr = int
        self.PropagateNan = SimpleNamespace(ALL=1, NONE=0)
        self.static_range = self.range = recorder.iterations

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("atomic_"):
            return self._atomic
        return _elementwise

    def pointer_type(self, kind: _Type, *_: Any) -> _Type:
        return kind

    def program_id(self, axis: int) -> Array:
        return _array(np.int64(self._recorder.program[axis]))

    def num_programs(self, axis: int) -> Array:
        return _array(np.int64(self._recorder.grid[axis]))

    def arange(self, start: int, end: int) -> Array:
        return _array(np.arange(start, end, dtype=np.int64))

    def full(self, shape: Sequence[int], value: Any, dtype: Any = None, **_: Any) -> Array:
        number = np.asarray(value)
        if getattr(dtype, "kind", "f") == "i":
            number = number.astype(np.int64)
        return _array(np.broadcast_to(number.reshape(()) if number.ndim == 0 else number, tuple(map(int, shape))))

    def zeros(self, shape: Sequence[int], dtype: Any = None, **_: Any) -> Array:
        return self.full(shape, 0, dtype)

    def load(self, pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Array:
        shape = self._recorder.access("load", sys._getframe(1).f_lineno, pointer, mask)
        if pointer.argument.floats:
            return _array(np.ones((1,) * len(shape)))
        return _array(self._recorder.random.integers(0, 1000, shape))

    def make_tensor_descriptor(
        self, base: Pointer, shape: Sequence[int], strides: Sequence[int], block: Sequence[int]
    ) -> Described:
        return Described(self._recorder, base, shape, strides, block)

    def store(self, pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
        self._recorder.access("store", sys._getframe(1).f_lineno, pointer, mask)

    def _atomic(self, pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> Any:
        self._recorder.access("atomic", sys._getframe(1).f_lineno, pointer, mask)
        return value

    def where(self, condition: Any, left: Any, right: Any) -> Any:
        if isinstance(left, Pointer):
            return left if bool(condition) else right
        return _array(np.where(condition, left, right))

    def broadcast_to(self, value: Any, shape: Sequence[int]) -> Array:
        return _array(np.broadcast_to(value, tuple(map(int, shape))))

    def cdiv(self, a: Any, b: Any) -> Any:
        return -(-a // b)

    def minimum(self, a: Any, b: Any, **_: Any) -> Array:
        return _array(np.minimum(a, b))

    def maximum(self, a: Any, b: Any, **_: Any) -> Array:
        return _array(np.maximum(a, b))

    def reshape(self, value: Any, *shape: Any) -> Array:
        wanted = tuple(map(int, shape[0] if isinstance(shape[0], list | tuple) else shape))
        return _array(
            np.broadcast_to(np.asarray(value).ravel()[:1], wanted) if value.size == 1 else value.reshape(wanted)
        )

    def sum(self, value: Any, axis: Any = None, keep_dims: bool = False, **_: Any) -> Any:
        return _along(value, axis, keep_dims)

    max = min = xor_sum = sum

    def reduce(self, value: Any, axis: Any, combine: Any, keep_dims: bool = False, **_: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(_along(v, axis, keep_dims) for v in value)
        return _along(value, axis, keep_dims)

    def associative_scan(self, value: Any, axis: Any, combine: Any, **_: Any) -> Any:
        return value

    def dot(self, a: Any, b: Any, acc: Any = None, **_: Any) -> Array:
        return _array(np.ones((1, 1)))

    def device_assert(self, *_: Any, **__: Any) -> None:
        """Nothing is known of what would be checked."""

    debug_barrier = static_assert = assume = device_assert


def _along(value: Any, axis: Any, keep_dims: bool) -> Any:
    array = np.asarray(value)
    found = array.take([0], axis=int(axis)) if keep_dims else array.take(0, axis=int(axis))
    return _array(found)


def _elementwise(*args: Any, **_: Any) -> Any:
    """A function of which only the shape matters: the first of its arguments, as wide as all are."""
    arrays = [np.asarray(a) for a in args if isinstance(a, np.ndarray | np.generic | int | float | bool)]
    return _array(np.broadcast_arrays(*arrays)[0]) if arrays else args[0]


class Helpers:
    """Device functions that a kernel calls by name: all elementwise but those given."""

    def __init__(self, **known: Callable[..., Any]) -> None:
        self.__dict__.update(known)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _elementwise


def trace(
    define: Callable[[Any], Callable[..., None]],
    arguments: Mapping[str, Argument | int],
    grid: Sequence[int],
    constants: Mapping[str, int],
) -> Traced:
    """What a launch of ``grid`` program instances moves. ``define(tl)`` gives the kernel as a Python function over that
    language; ``constants``: its compile-time numbers."""
    recorder = Recorder()
    function = define(recorder.tl)
    x, y, z = [*map(int, grid), 1, 1][:3]
    recorder.grid = x, y, z
    programs = x * y * z
    given = {n: Pointer(a) if isinstance(a, Argument) else _array(np.int64(a)) for n, a in arguments.items()}
    sampled = sorted({round(k * (programs - 1) / (SAMPLES - 1)) for k in range(SAMPLES)})
    with np.errstate(all="ignore"):
        for number in sampled:
            recorder.program = number % x, number // x % y, number // (x * y)
            function(**given, **constants)
            recorder.finish()
    sizes = {a.name: a for a in arguments.values() if isinstance(a, Argument)}
    for site in recorder.sites.values():
        _total(site, programs, sizes[site.access.argument])
    return Traced(programs, tuple(site.access for site in recorder.sites.values()))


def _total(site: _Site, programs: int, argument: Argument) -> None:
    """Over all instances; the last may be cut off, so it stands for itself."""
    *inner, last = site.totals
    useful, moved = (
        float(np.mean([t[k] for t in inner]) * (programs - 1) + last[k]) if inner else float(last[k]) for k in (0, 1)
    )
    site.access.needed = min(useful, float(argument.elements * argument.itemsize))
    site.access.moved = site.access.needed * (moved / useful) if useful else 0.0


def namespace(tl: Any, **more: Any) -> dict[str, Any]:
    """Names that a kernel's text needs beside ``tl``."""
    triton = SimpleNamespace(jit=lambda function: function, language=tl, cdiv=tl.cdiv)
    return {"tl": tl, "triton": triton, **more}
