"""Arguments that are read in one native pass: it sees what Python sees, whatever was done to the tensors since."""

from __future__ import annotations

import gc
import platform
import sys
import threading
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from aotkit_inductor_lower.runtime import ArgumentReader, argument_reader

#: Where there must be a reader: elsewhere torch may be built with another C++ ABI.
KNOWN = sys.platform == "linux" and platform.machine() == "x86_64" and sys.implementation.name == "cpython"

pytestmark = [
    pytest.mark.skipif(not KNOWN and argument_reader._compiled() is None, reason="torch's objects are others here"),
    pytest.mark.filterwarnings("ignore:.*resize"),
]


def tensors() -> list[Any]:
    lazy = torch.zeros(2, dtype=torch.complex64).conj()
    plain = [torch.randn(3, 4), torch.randn(6, 2).t(), torch.zeros((), dtype=torch.int64), torch.ones(2, 3, 4, 1, 2, 2)]
    half = torch.ones(4, dtype=torch.bfloat16)
    return [*plain, torch.nn.Parameter(torch.ones(5)), half, lazy, lazy.imag, torch.ones(2, requires_grad=True) * 2]


def facts(value: Any) -> tuple[Any, ...]:
    """What a reader has to see, asked from Python."""
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return (type(value),)
    sizes = value.dtype, tuple(value.shape), value.stride(), value.device
    lazy = value.is_conj(), value.is_neg(), value.is_inference()
    return (type(value), *sizes, value.requires_grad, *lazy)


def expected(values: list[Any], known: list[Any]) -> tuple[int, ...] | None:
    """The addresses of values that are as they were, and all different."""
    if [*map(facts, values)] != known or len({*map(id, values)}) < len(values):
        return None
    return tuple(value.data_ptr() for value in values)


def swap(values: list[Any], k: int) -> None:
    """Give the object another tensor, as ``load_state_dict`` may."""
    other = torch.ones(values[k].shape, dtype=values[k].dtype) * 3
    torch.utils.swap_tensors(values[k], other)


def freed_and_made_again(values: list[Any], k: int) -> None:
    """Another tensor of the same kind, probably where the old one was, object and memory."""
    shape, dtype = values[k].shape, values[k].dtype
    values[k] = None
    gc.collect()
    values[k] = torch.ones(shape, dtype=dtype)


CHANGES: dict[str, Callable[[list[Any], int], object]] = {
    "resized": lambda v, k: v[k].resize_(v[k].numel() + 1),
    "resized back": lambda v, k: v[k].resize_(100).resize_(3, 4).as_strided_((3, 4), (4, 1)),
    "storage set": lambda v, k: v[k].set_(torch.zeros(v[k].shape, dtype=v[k].dtype)),
    "storage resized": lambda v, k: v[k].untyped_storage().resize_(4096),
    "placed later in a storage": lambda v, k: v[k].set_(
        torch.zeros(99).untyped_storage(), 7, v[k].shape, v[k].stride()
    ),
    "strides set": lambda v, k: v[k].as_strided_((4, 3), (1, 4)),
    "transposed": lambda v, k: v[k].t_(),
    "data of another": lambda v, k: setattr(v[k], "data", torch.zeros(v[k].shape, dtype=v[k].dtype)),
    "data of another type": lambda v, k: setattr(v[k], "data", torch.zeros(v[k].shape, dtype=torch.int8)),
    "gradient wanted": lambda v, k: v[k].requires_grad_(),
    "no gradient wanted": lambda v, k: v[k].detach_().requires_grad_(False),
    "written to": lambda v, k: v[k].add_(1),
    "other object": lambda v, k: v.__setitem__(k, torch.zeros(v[k].shape, dtype=v[k].dtype)),
    "parameter": lambda v, k: v.__setitem__(k, torch.nn.Parameter(v[k].detach(), requires_grad=v[k].requires_grad)),
    "view": lambda v, k: v.__setitem__(k, v[k].view(v[k].shape)),
    "view of another type": lambda v, k: v.__setitem__(k, v[k].view(torch.int32)),
    "conjugated": lambda v, k: v.__setitem__(k, v[k].conj()),
    "negated": lambda v, k: v.__setitem__(k, torch._neg_view(v[k])),
    "sparse": lambda v, k: v.__setitem__(k, v[k].detach().to_sparse()),
    "on another device": lambda v, k: v.__setitem__(k, v[k].detach().to("meta")),
    "a subclass": lambda v, k: v.__setitem__(k, v[k].as_subclass(type("Own", (torch.Tensor,), {}))),
    "a number": lambda v, k: v.__setitem__(k, 3),
    "nothing": lambda v, k: v.__setitem__(k, None),
    "twice": lambda v, k: v.__setitem__(k, v[(k + 1) % len(v)]),
    "exchanged": lambda v, k: v.__setitem__(slice(0, 2), v[1::-1]),
    "swapped": swap,
    "freed and made again": freed_and_made_again,
    "lazily copied": lambda v, k: v.__setitem__(k, torch._lazy_clone(v[k].detach())),
}


@pytest.mark.parametrize("changed", CHANGES, ids=lambda name: name.replace(" ", "_"))
def test_a_change_is_seen(changed: str) -> None:
    """After each change a reader says what Python says; what the change is for is seen in at least one tensor."""
    seen = 0
    for k in range(len(tensors())):
        values = tensors()
        known = [*map(facts, values)]
        reader = ArgumentReader.of(values)
        assert reader is not None
        before = reader.read(tuple(values))
        assert before is not None and before.addresses == tuple(v.data_ptr() for v in values) and before.moved == ()
        try:
            with torch.no_grad():
                CHANGES[changed](values, k)
        except (RuntimeError, TypeError):
            continue  # nothing that can be done to this tensor
        wanted = expected(values, known)
        found = reader.read(tuple(values))
        assert (None if found is None else found.addresses) == wanted
        if found is not None:
            assert found.before == before.addresses
            assert found.moved == tuple(j for j in range(len(values)) if found.addresses[j] != found.before[j])
        seen += 1
    assert seen


@pytest.mark.parametrize("seed", range(10))
def test_many_changes_in_turn(seed: int) -> None:
    """A reader is as right after refusals and moves as it was in the beginning."""
    random, values = Random(seed), tensors()
    known, reader = [*map(facts, values)], ArgumentReader.of(values)
    assert reader is not None
    answers = set()
    for _ in range(80):
        for _ in range(random.choice((0, 1, 1, 3))):
            k = random.randrange(len(values))
            try:
                with torch.no_grad():
                    CHANGES[random.choice([*CHANGES])](values, k)
            except (RuntimeError, TypeError, AttributeError):
                continue
        wanted, found = expected(values, known), reader.read(tuple(values))
        assert (None if found is None else found.addresses) == wanted
        answers.add(found is None)
        if found is None and random.random() < 0.7:
            values = tensors()
    assert answers == {True, False}


def test_there_is_a_reader_for_plain_tensors_and_parameters() -> None:
    assert ArgumentReader.of([torch.ones(2), torch.nn.Parameter(torch.ones(3, 4)), torch.zeros(0)]) is not None


def test_more_or_fewer_tensors_are_others() -> None:
    values = tensors()
    reader = ArgumentReader.of(values)
    assert reader is not None
    assert reader.read(tuple(values[:-1])) is None and reader.read((*values, torch.ones(1))) is None
    assert reader.read(()) is None and reader.read(tuple(values)) is not None


@pytest.mark.parametrize("other", [3, None, torch.zeros(2, device="meta"), torch.eye(2).to_sparse()])
def test_there_is_no_reader_for_what_has_no_address(other: Any) -> None:
    assert ArgumentReader.of([torch.ones(2), other]) is None
    assert ArgumentReader.of([]) is None


def test_one_tensor_twice_has_no_reader() -> None:
    value = torch.ones(2)
    assert ArgumentReader.of([value, value]) is None


def test_a_torch_whose_tensors_look_otherwise_has_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_reader, "_keys", lambda value: 1234567)
    assert argument_reader.places() is None
    monkeypatch.undo()
    monkeypatch.setattr(argument_reader, "_word", lambda address, offset: 0)
    assert argument_reader.places() is None


def test_a_torch_without_its_c_interface_has_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(argument_reader, "_IMPORTS", ("aoti_torch_no_such_function",))
    assert argument_reader._compiled.__wrapped__() is None


def test_threads_read_at_once() -> None:
    """Each of them has tensors of its own, which move between its calls."""
    values = tensors()
    known, reader = [*map(facts, values)], ArgumentReader.of(values)
    assert reader is not None
    wrong: list[Any] = []

    def run(seed: int) -> None:
        random, own = Random(seed), tensors()
        for _ in range(300):
            k = random.randrange(4)
            own[k] = own[k].clone(memory_format=torch.preserve_format)
            found = reader.read(tuple(own))
            addresses = expected(own, known)
            if found is None or found.addresses != addresses:
                wrong.append((found, addresses))
            elif found.before and len(found.before) == len(own):
                moved = tuple(j for j in range(len(own)) if found.before[j] != found.addresses[j])
                wrong.extend([(found, moved)] * (moved != found.moved))

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_nothing_is_kept_alive() -> None:
    """A reader remembers where tensors were, and not the tensors."""
    import weakref

    values = [torch.ones(1000), torch.ones(2)]
    reader = ArgumentReader.of(values)
    assert reader is not None
    reader.read(tuple(values))
    gone = weakref.ref(values[0])
    del values
    gc.collect()
    assert gone() is None
