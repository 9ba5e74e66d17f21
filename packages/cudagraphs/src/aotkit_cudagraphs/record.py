"""Make one recording at its place in the tree."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from .driver import DeviceDriver
from .eligibility import check_outputs
from .liveness import Layout, Slot
from .placement import PathTensor, Place, Placement, describe
from .pool import Pool
from .reasons import CaptureError, CudagraphSkipped, SkipKind, SkipReason
from .static_inputs import buffer_like, expanded_dims
from .tree import Node, NodeInput, NodeOutput, Source
from .user_lines import user_line_of


@dataclass(frozen=True, slots=True)
class Site:
    """Where a recording is made.

    Attributes:
        parent: the recording before it in the path; None at the start of a step.
        pool: its memory.
        survivors: slots of the path in use by others than the call itself.
    """

    parent: Node | None
    pool: Pool
    survivors: frozenset[Slot]


@dataclass(slots=True)
class _Arguments:
    """What the callable gets during the capture, and how to recognize it afterwards."""

    values: list[Any]
    inputs: list[NodeInput]
    homes: list[_Home]


@dataclass(frozen=True, slots=True)
class _Home:
    """A storage that was there before the capture: an input's (from which byte on), or a slot's."""

    storage: StorageWeakRef
    index: int = -1
    start: int = 0
    slot: Slot | None = None
    layout: Layout | None = None  # of an input, as the callable gets it


def record_node(
    function: Any,
    call: Callable[[list[Any]], Any],
    given: Sequence[Any],
    placement: Placement,
    site: Site,
    driver: DeviceDriver,
) -> Node:
    """Record `call` for inputs placed like these.

    Note [Memory during a recording]
    The callable's arguments own their memory: a buffer for a copied input, the block of an input in the path that
    nobody else needs. So what it drops it can use again, and so can later recordings. What others still hold
    (`site.survivors`) is held here until the end.

    Args:
        function: whose recording it is (`Node.function`).
        call: runs the callable on a list of inputs, which it may empty.
        given: the call's inputs; entries in memory of the path may be None.
        placement: of these inputs.
        site: where.
        driver: the device.

    Raises:
        CudagraphSkipped: it can't be recorded; nothing that was written remains.
        PoolBusy: the pool can't be brought into the state that recording here needs.
    """
    pool = site.pool
    wanted = [*site.survivors, *(place.slot for place in placement.path_inputs.values())]
    owners = pool.resume(site.parent.state if site.parent else pool.empty_state, wanted)
    arguments = _arguments(given, placement, owners, pool, driver)
    held = [owners[slot] for slot in site.survivors]
    homes = arguments.homes + [_Home(StorageWeakRef(owners[slot]), slot=slot) for slot in site.survivors]
    owners.clear()
    graph, result = _capture(call, arguments.values, pool, driver)
    arguments.values.clear()
    leaves, structure = pytree.tree_flatten(result)
    del result
    state = driver.checkpoint(pool.handle)
    reasons = check_outputs(leaves, driver.device) or _leak(pool, leaves, held)
    if reasons:
        raise CudagraphSkipped(reasons)
    outputs, slots = _describe_outputs(function, leaves, homes, pool, driver)
    flat = next((kind for kind in (list, tuple) if structure == pytree.tree_flatten(kind(leaves))[1]), None)
    del leaves, held
    driver.live_blocks(pool.handle)  # so that what the allocator frees is free before anything is replayed
    for slot in slots:
        slot.settle()
    return Node(
        function=function,
        key=placement.key,
        parent=site.parent,
        inputs=tuple(arguments.inputs),
        outputs=outputs,
        structure=flat or structure,
        slots=slots,
        survivors=site.survivors,
        state=state,
        graph=graph,
        pool=pool,
        added_bytes=pool.attribute_growth(),
        label=describe(given, placement),
    )


def _arguments(
    given: Sequence[Any], placement: Placement, owners: dict[Slot, Any], pool: Pool, driver: DeviceDriver
) -> _Arguments:
    """Tensors for the callable: its own where inputs are in the path or copied."""
    made = _Arguments([], [], [])
    for index, (value, place) in enumerate(zip(given, placement.places, strict=True)):
        if place is Place.PATH:
            known = placement.path_inputs[index]
            made.values.append(known.layout.on(owners[known.slot]))
            made.inputs.append(NodeInput(place))
            made.homes.append(_Home(StorageWeakRef(owners[known.slot]), slot=known.slot))
        elif place is Place.COPIED:
            with driver.use_stream(pool.stream), driver.use_pool(pool.handle):
                buffer = buffer_like(value.detach())
            made.values.append(buffer)
            made.inputs.append(NodeInput(place, _unowned(buffer, pool, driver), expanded_dims(value)))
            made.homes.append(_Home(StorageWeakRef(buffer.untyped_storage()), index, layout=Layout.of(buffer)))
        elif place is Place.STATIC:
            made.values.append(value.detach())
            made.inputs.append(NodeInput(place, address=value.data_ptr()))
            start = int(value.storage_offset()) * value.element_size()
            layout = Layout.of(value)
            made.homes.append(_Home(StorageWeakRef(value.untyped_storage()), index, start, layout=layout))
        else:
            made.values.append(value)
            made.inputs.append(NodeInput(place))
    return made


def _unowned(buffer: torch.Tensor, pool: Pool, driver: DeviceDriver) -> torch.Tensor:
    storage = buffer.untyped_storage()
    if storage.nbytes() == 0:
        return buffer
    return Layout.of(buffer).on(driver.storage_at(pool.handle, storage.data_ptr(), storage.nbytes()))


def _capture(call: Callable[[list[Any]], Any], values: list[Any], pool: Pool, driver: DeviceDriver) -> tuple[Any, Any]:
    outer = driver.current_stream()
    driver.wait_event(pool.stream, driver.record_event(outer))
    try:
        with driver.preserve_rng(), torch.no_grad():
            return driver.capture(lambda: call(values), pool=pool.handle, stream=pool.stream)
    except CaptureError as error:
        reason = SkipReason(SkipKind.CAPTURE_FAILED, str(error), user_line_of(error))
        raise CudagraphSkipped((reason,)) from None
    finally:
        driver.wait_event(outer, driver.record_event(pool.stream))


def _leak(pool: Pool, leaves: Sequence[Any], held: Sequence[torch.UntypedStorage]) -> tuple[SkipReason, ...]:
    known = {leaf.untyped_storage().data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)}
    leaked = pool.leaked(known | {storage.data_ptr() for storage in held})
    if not leaked:
        return ()
    text = (
        f"{len(leaked)} tensors ({sum(leaked.values())} bytes) made while recording are neither results nor gone: "
        "the next recording would be given their memory"
    )
    return (SkipReason(SkipKind.LEAKED_MEMORY, text),)


def _describe_outputs(
    function: Any,
    leaves: Sequence[Any],
    homes: Sequence[_Home],
    pool: Pool,
    driver: DeviceDriver,
) -> tuple[tuple[NodeOutput, ...], tuple[Slot, ...]]:
    """Tell for each result whose memory it is in, and make slots for what is new."""
    blocks = driver.live_blocks(pool.handle)
    # By the storage's identity: an address may have been given to a result after its first owner let go of it.
    known = {home.storage.cdata: home for home in reversed(homes) if not home.storage.expired()}
    fresh: dict[int, dict[int, torch.Tensor]] = {}
    for leaf, value in enumerate(leaves):
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            if storage._cdata not in known and storage.nbytes() and storage.data_ptr() in blocks:
                fresh.setdefault(storage.data_ptr(), {})[leaf] = value
    slots = {address: pool.make_slot(function, address, tensors) for address, tensors in fresh.items()}
    outputs = tuple(_describe_output(value, known, slots) for value in leaves)
    return outputs, tuple(slots.values())


def _describe_output(value: Any, known: dict[int, _Home], slots: dict[int, Slot]) -> NodeOutput:
    if not isinstance(value, torch.Tensor):
        return NodeOutput(Source.VALUE, value)
    storage, layout = value.untyped_storage(), Layout.of(value)
    if storage.nbytes() == 0:
        return NodeOutput(Source.EMPTY, value.detach())
    if storage._cdata in known:
        home = known[storage._cdata]
        if home.slot is not None:
            return NodeOutput(Source.PATH, PathTensor(home.slot, layout), home.slot)
        distance = layout.offset * value.element_size() - home.start
        whole = home.layout is not None and home.layout.describes(value)
        return NodeOutput(Source.INPUT, layout, index=home.index, distance=distance, whole=whole)
    if storage.data_ptr() in slots:
        return NodeOutput(Source.NEW, layout, slots[storage.data_ptr()])
    return NodeOutput(Source.OUTSIDE, value.detach())
