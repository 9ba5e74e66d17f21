"""Which memory a tensor covers, and whether two tensors share some."""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Iterable, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .errors import AliasingChangedError, UnsupportedOverlapError
from .placed_arguments import PlacedArguments

__all__ = ["AliasCheck", "PlacedAliasCheck", "byte_range", "refuse_new_aliases", "refuse_place", "storage_id"]
__all__ += ["refuse_memory_of_several_storages", "tensors_overlap"]

_REAL = (Tensor, torch.nn.Parameter)
_FEW = 8
_ADDRESS, _SIZE, _OWN = torch.UntypedStorage.data_ptr, torch.UntypedStorage.nbytes, torch.UntypedStorage.resizable
_EXACT_LIMIT = 1 << 22  # elements that the exact comparison of interleaved tensors may enumerate


def storage_id(tensor: Tensor) -> int | None:
    """A number that tensors over the same storage share; ``None`` where there is no one storage (sparse, ...)."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrapper subclasses and the like own no memory themselves
        return None


def byte_range(tensor: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte that the elements of ``tensor`` cover, from the start of its storage."""
    if tensor.numel() == 0:
        return (0, 0)
    low: Any = tensor.storage_offset()
    high: Any = low + sum((size - 1) * stride for size, stride in zip(tensor.size(), tensor.stride(), strict=True))
    return (low * tensor.element_size(), (high + 1) * tensor.element_size())


def tensors_overlap(a: Tensor, b: Tensor) -> bool:
    """Whether ``a`` and ``b`` have a byte in common. Exact up to a few million elements, else conservative."""
    if storage_id(a) is None or storage_id(b) is None:
        return False
    apart = storage_id(a) != storage_id(b)
    if apart and (type(a) not in _REAL or type(b) not in _REAL or a.device != b.device):
        return False
    start_a, start_b = (t.untyped_storage().data_ptr() if apart else 0 for t in (a, b))
    if apart and 0 in (start_a, start_b):
        return False
    (low_a, high_a), (low_b, high_b) = byte_range(a), byte_range(b)
    if max(start_a + low_a, start_b + low_b) >= min(start_a + high_a, start_b + high_b):
        return False
    uneven = a.element_size() != b.element_size() or (start_a - start_b) % a.element_size() != 0
    if uneven or a.numel() + b.numel() > _EXACT_LIMIT:
        return True
    return bool(torch.isin(_element_bytes(a) + start_a, _element_bytes(b) + start_b).any())


def _element_bytes(tensor: Tensor) -> Tensor:
    """Where each element begins, in bytes from the start of the storage."""
    offsets = torch.tensor([tensor.storage_offset()], device="cpu")
    for size, stride in zip(tensor.size(), tensor.stride(), strict=True):
        offsets = (offsets[:, None] + torch.arange(size, device="cpu") * stride).flatten()
    return offsets * tensor.element_size()


def refuse_memory_of_several_storages(values: Iterable[Any]) -> None:
    """Raise :class:`UnsupportedOverlapError` if tensors that share memory have storages of their own.

    So have two tensors made of one array of numpy's, or of one buffer: no base covers them.
    """
    real = [value for value in values if type(value) in _REAL and storage_id(value) is not None]
    if _share_addresses(set(map(Tensor.untyped_storage, real))):
        raise UnsupportedOverlapError(
            "arguments share memory to which several storages lead (of one numpy array, say), and one of them is "
            "mutated: no common base can stand for them; pass views of one tensor, or clones"
        )


def _share_addresses(some: Set[Any], others: Set[Any] | None = None) -> bool:
    """Whether a storage of ``some`` covers memory of one of ``others``; ``None``: of another one of them."""
    found = sorted(zip(map(_ADDRESS, others or some), map(_SIZE, others or some), strict=True))
    tops = list(itertools.accumulate(itertools.starmap(operator.add, found), max))
    if others is None:
        return any(size and low and low < top for (low, size), top in zip(found[1:], tops, strict=False))
    for storage in some:
        low, size = storage.data_ptr(), storage.nbytes()
        before = bisect.bisect_left(found, (low + size,))
        if low and size and before and tops[before - 1] > low:
            return True
    return False


def refuse_place(tensor: Tensor, name: str, offset: int, nbytes: int) -> None:
    """Raise :class:`AliasingChangedError` if a graph that counts elements from the start of the tensor's storage was
    captured for a tensor that begins elsewhere in it; ``RuntimeError``, as in eager, if the storage is too short."""
    held = tensor.untyped_storage().nbytes()
    if held < nbytes:
        raise RuntimeError(
            f"as_strided() of input {name} is out of bounds: the view ends at byte {nbytes} of a storage of {held}"
        )
    if tensor.storage_offset() != offset:
        raise AliasingChangedError(
            f"as_strided() counts from the start of the storage of input {name}, which begins at element "
            f"{tensor.storage_offset()} of it and began at {offset} when the graph was captured. Capture the function "
            "again with these inputs"
        )


def refuse_new_aliases(
    mutated: Sequence[Tensor], others: Sequence[Tensor], mutated_names: str, other_names: str
) -> None:
    """Raise :class:`AliasingChangedError` if a tensor of ``mutated`` overlaps one of ``others``, or another of its own.

    The common case, no common storage at all, is one pass over storages.
    """
    # A storage is one Python object for as long as it lives, so sets of them compare storages.
    storages, beyond = (set(map(Tensor.untyped_storage, tensors)) for tensors in (mutated, others))
    if len(storages) == len(mutated) and storages.isdisjoint(beyond):
        # Memory that torch did not allocate (and so can't resize), as an array of numpy's, may have several storages.
        if not mutated or type(mutated[0]) not in _REAL or (all(map(_OWN, storages)) and all(map(_OWN, beyond))):
            return
        if not (beyond and _share_addresses(storages, beyond)) and not _share_addresses(storages):
            return
    _compare_in_detail(mutated, others, mutated_names.split(), other_names.split())


class _Passed(NamedTuple):
    """What passed: the addresses, and the memory that is written, as first bytes in order and the furthest end up to
    each."""

    addresses: tuple[int, ...] = ()
    lows: Sequence[int] = ()
    tops: Sequence[int] = ()


class AliasCheck:
    """:func:`refuse_new_aliases` for tensors whose sizes and strides are the same in all calls: where all of them lie
    where they lay in the last call that passed, they share no more memory than they did.

    A step of a language model has hundreds of weights and caches, and comparing addresses takes a tenth of the time of
    comparing storages. Where a few that are not written to lie elsewhere (the next word), these few are looked at. Safe
    under threads: what is kept is replaced as a whole.
    """

    __slots__ = ("_passed",)

    def __init__(self) -> None:
        self._passed = _Passed()

    def __call__(
        self, mutated: Sequence[Tensor], others: Sequence[Tensor], mutated_names: str, other_names: str
    ) -> None:
        """Raises what :func:`refuse_new_aliases` raises."""
        if type(mutated[0]) not in _REAL:  # fake ones, in a call of torch's own tracers
            refuse_new_aliases(mutated, others, mutated_names, other_names)
            return
        passed, count = self._passed, len(mutated)
        addresses = (*map(Tensor.data_ptr, mutated), *map(Tensor.data_ptr, others))
        if addresses == passed.addresses:
            return
        moved = _differing(addresses, passed.addresses)
        some = [others[k - count] for k in moved[:_FEW] if k >= count]
        if any(k < count for k in moved) or not _lie_apart(passed, zip(*_memory(some), strict=True), len(moved)):
            refuse_new_aliases(mutated, others, mutated_names, other_names)
            passed = _memory_of(mutated)
        if 0 not in addresses:  # of tensors without elements, or without memory
            self._passed = _Passed(addresses, passed.lows, passed.tops)


class PlacedAliasCheck:
    """:class:`AliasCheck` where the tensors are all arguments of a call, whose addresses are known."""

    __slots__ = ("_lengths", "_mutated", "_others", "_passed", "_written")

    def __init__(self, mutated: Sequence[int], others: Sequence[int]) -> None:
        self._mutated, self._others = tuple(mutated), tuple(others)
        self._written = frozenset(mutated)
        self._passed = _Passed()
        self._lengths: tuple[int, ...] = ()

    def __call__(self, args: PlacedArguments) -> None:
        """Raises what :func:`refuse_new_aliases` raises, for the arguments ``in0``, ``in1``, .."""
        passed, addresses = self._passed, args.addresses
        if addresses is None:
            self._compare(args)
            return
        if addresses is passed.addresses or addresses == passed.addresses:
            return
        moved = (
            args.moved if args.before and args.before is passed.addresses else _differing(addresses, passed.addresses)
        )
        ranges = [(addresses[k], addresses[k] + self._lengths[k]) for k in moved[:_FEW]] if self._lengths else []
        if not self._written.isdisjoint(moved) or not _lie_apart(passed, ranges, len(moved)):
            self._compare(args)
            passed = _memory_of([args[k] for k in self._mutated])
            self._lengths = tuple(top - low for low, top in map(byte_range, args))
            if 0 in addresses:
                return
        self._passed = _Passed(addresses, passed.lows, passed.tops)  # what moved doesn't begin at 0, nor did the rest

    def _compare(self, args: Sequence[Tensor]) -> None:
        mutated, others = self._mutated, self._others
        names = (" ".join(f"in{k}" for k in places) for places in (mutated, others))
        refuse_new_aliases([args[k] for k in mutated], [args[k] for k in others], *names)


def _differing(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    """Where two lists of addresses differ: everywhere, if there is none of the other."""
    if len(now) != len(before):
        return tuple(range(len(now)))
    return tuple(k for k, (one, other) in enumerate(zip(now, before, strict=True)) if one != other)


def _lie_apart(passed: _Passed, moved: Iterable[tuple[int, int]], count: int) -> bool:
    """Whether only a few tensors that are not written to have moved, and where they begin and end nothing is
    written. ``moved``: these places, of all that moved if they are few."""
    if count > _FEW or not passed.addresses:
        return False
    for low, top in moved:
        before = bisect.bisect_left(passed.lows, top)  # so many begin before it ends
        if low == 0 or (before and passed.tops[before - 1] > low):
            return False
    return True


def _memory_of(mutated: Sequence[Tensor]) -> _Passed:
    ranges = sorted(zip(*_memory(mutated), strict=True))
    tops = list(itertools.accumulate((top for _, top in ranges), max))
    return _Passed((), [low for low, _ in ranges], tops)


def _memory(tensors: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Addresses of the first byte of each tensor, and of the one past its last."""
    lows = [tensor.data_ptr() for tensor in tensors]
    lengths = [top - low for low, top in map(byte_range, tensors)]
    return lows, [low + length for low, length in zip(lows, lengths, strict=True)]


def _compare_in_detail(
    mutated: Sequence[Tensor], others: Sequence[Tensor], mutated_names: list[str], other_names: list[str]
) -> None:
    tensors, names, count = [*mutated, *others], [*mutated_names, *other_names], len(mutated)
    for i, near in enumerate(_in_the_same_bytes(tensors)[:count]):
        for k in sorted(near, key=lambda k: (k < count, k)):
            if k > i and tensors_overlap(tensors[i], tensors[k]):
                name = names[k]
                raise AliasingChangedError(
                    f"input {mutated_names[i]} is mutated by this graph and now shares memory with input {name}, which "
                    "it did not when the graph was captured; results would be wrong. Capture the function again with "
                    "these inputs, or pass a clone of one of them"
                )


def _in_the_same_bytes(tensors: Sequence[Tensor]) -> list[list[int]]:
    """For each tensor those whose bytes, from the first to the last, meet its own: by going from low addresses to high
    ones, as hundreds of parts of one memory would take long to compare each with each. All others, if one has no
    address."""
    if not all(type(tensor) in _REAL and storage_id(tensor) is not None for tensor in tensors):
        return [[k for k in range(len(tensors)) if k != m] for m in range(len(tensors))]
    lows, tops = _memory(tensors)
    found: list[list[int]] = [[] for _ in tensors]
    reaching: list[int] = []
    for k in sorted(range(len(tensors)), key=lows.__getitem__):
        reaching = [m for m in reaching if tops[m] > lows[k]]
        for m in reaching:
            found[m].append(k)
            found[k].append(m)
        reaching.append(k)
    return found
