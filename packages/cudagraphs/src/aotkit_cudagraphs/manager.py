"""Decides for each call: replay a recording, make one, or run the callable as it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ._observer import SILENT, Observer
from .driver import DeviceDriver
from .eligibility import check_inputs
from .expected import ExpectedCall, pattern_of
from .functions import Function
from .liveness import Slot
from .options import TreeOptions
from .overwritten import overwrite, overwritten_message
from .placement import Key, PathTensor, Place, Placement, place_inputs
from .pool import Pool, PoolBusy
from .reasons import CudagraphSkipped, SkipKind, SkipReason
from .record import Site, record_node
from .replay import announce_write, run_node
from .static_inputs import sharing_memory
from .steps import Path, any_live, any_slot_live
from .tree import Node
from .warm_up import result_storages, watched

MOST_UNLIKE = 16  # calls that are learned in place of others: a callable whose calls differ goes without


@dataclass(frozen=True, slots=True)
class EagerRun:
    """The callable is to run as it is.

    Attributes:
        inputs: for it.
        reasons: why, if that stays so; empty if it is only for now.
        layouts: set in the first call with such inputs, which is watched.
    """

    inputs: list[Any]
    reasons: tuple[SkipReason, ...] = ()
    layouts: tuple[object, ...] | None = None


class TreeManager:
    """Recordings of one thread on one device.

    Note [The tree]
    Nodes are recordings; a node's children are what was recorded right after it. Each call takes one step down:
    the child for this callable and these inputs, provided that (1) its static inputs are where they were, (2) of the
    path's results only those are in use that were in use when it was recorded (it may have taken the others'
    memory), and (3) no result of an earlier step is in use in its pool. Where (1) or (2) fails, or there is no child,
    one is recorded. Where (3) fails the callable runs as it is, and remembers that this result is kept: from then on it
    is handed out as a copy. If the result that is in the way stays, its pool is left to it and recordings are
    made in a new one. So no memory that someone can read is ever written by a replay.

    All methods must be called with the lock of the device held, except `run_eagerly`.
    """

    def __init__(
        self,
        driver: DeviceDriver,
        options: TreeOptions,
        notify: Callable[[str], None],
        observer: Observer = SILENT,
    ) -> None:
        self._driver = driver
        self._options = options
        self._notify = notify
        self._observer = observer
        self.functions: list[Function] = []
        self._roots: dict[tuple[Any, Key], list[Node]] = {}
        self.pools: list[Pool] = []
        self._made_pools = 0
        self._path = Path()
        self._watched: list[tuple[Function, int, StorageWeakRef]] = []
        self._marked = self._marks_are_used = False
        self._busy = False
        self.released: list[Function] = []  # callables that nobody can call any more; may be appended to at any time
        self._clock = 0
        self._last_stream: Any = None

    # -- what callers do -------------------------------------------------------------------------------

    def add(self, function: Function) -> Function:
        """Take a callable in."""
        self.functions.append(function)
        return function

    def mark_step(self) -> None:
        """The next call begins a step; from now on only marks do."""
        self._marked = self._marks_are_used = True

    def call(self, function: Function, given: list[Any]) -> Any:
        """Replay, or return an `EagerRun`, which says how to run it. Empties `given` of what it replaces."""
        if self._driver.is_capturing():  # a recording of ours, or one that the caller makes: the call is part of it
            return EagerRun(given)
        self.release()
        self._busy = True
        try:
            return self._call(function, given)
        finally:
            self._busy = False

    def _call(self, function: Function, given: list[Any]) -> Any:
        self._clock += 1
        self._begin_step_if_due(function)
        last = self._path.last
        expected = function.expected.get(last)
        if expected is not None and self._may_replay_at_once(expected, function, given):
            return self._replay(expected.node, given, expected.pattern.path_inputs, alike=True)
        placement = self._place(function, given)
        reasons = self._check(function, given, placement)
        learns = function.replays > 0 and function.unlike < MOST_UNLIKE
        function.unlike += learns
        pattern = pattern_of(given, placement) if learns else None
        for index in placement.path_inputs:
            given[index] = None  # only the caller's references count from here on
        if not reasons:
            outcome = self._find_or_record(function, given, placement)
            if isinstance(outcome, Node):
                if pattern is not None:
                    function.expected[last] = ExpectedCall(pattern, outcome)
                return self._replay(outcome, given, placement.path_inputs)
            reasons = outcome
        self._restore(given, placement.path_inputs)
        if reasons:
            self._path.ran_once(function, bool)
            function.uncaptured += 1
            function.skips.update(dict.fromkeys(reasons))
            return EagerRun(given, reasons)
        layouts = placement.layouts()
        first = layouts not in function.warm
        function.warm_ups += first
        function.blocked += not first
        return EagerRun(given, layouts=layouts)

    def run_eagerly(self, function: Function, run: EagerRun) -> tuple[Any, dict[int, str | None]]:
        """Run the callable; the result, and the inputs it wrote, where that was not known yet."""
        if run.layouts is None or run.layouts in function.warm:
            return function.call(run.inputs), {}
        return watched(function.call, run.inputs)

    def ran_eagerly(self, function: Function, run: EagerRun, result: Any, written: dict[int, str | None]) -> None:
        """Learn from a run of `run_eagerly`."""
        if run.layouts is None:
            return
        function.warm.add(run.layouts)
        for index, line in written.items():
            function.mutated.setdefault(index, line)
        storages = result_storages(result)
        self._watched += [(function, leaf, reference) for leaf, reference in storages]
        self._path.ran_once(function, any_live([reference for _, reference in storages]))
        self._path.settling = True

    def release(self) -> None:
        """Drop the callables in `released` with their recordings, unless a call is under way."""
        while self.released and not self._busy:
            function = self.released.pop()
            for node in list(function.nodes):
                if node in function.nodes:  # not dropped with one before it
                    self._drop(node)
            self.functions = [known for known in self.functions if known is not function]
            if not self.functions:
                self.reset()

    def reset(self) -> None:
        """Drop all recordings; results stay valid."""
        for pool in list(self.pools):
            self._drop_pool(pool)
        self._path = Path()
        self._watched.clear()

    # -- steps -----------------------------------------------------------------------------------------

    def _begin_step_if_due(self, function: Function) -> None:
        path = self._path
        due = self._marked or len(path.nodes) >= self._options.max_path
        if not due and not self._marks_are_used and function in path.ran and function.role != "backward":
            due = not path.awaits_backward()
            if not due:
                self._notify(
                    f"{function.name} runs again before the backward of an earlier call: the calls count as one step "
                    "and are recorded one after the other. Drop results whose backward never runs, or use mark_step()"
                )
        if due:
            self._begin_step()

    def _begin_step(self) -> None:
        self._marked = False
        self._path = Path()
        for function, leaf, reference in self._watched:
            if not reference.expired() and self._options.outputs == "survive":
                function.keep((leaf,))
        self._watched.clear()

    # -- may it be recorded ----------------------------------------------------------------------------

    def _place(self, function: Function, given: Sequence[Any]) -> Placement:
        options = self._options
        return place_inputs(given, function.static, self._path.slots(), options.alignment, options.check_static_layouts)

    def _check(self, function: Function, given: Sequence[Any], placement: Placement) -> tuple[SkipReason, ...]:
        """Reasons that do not depend on what is in use now."""
        forward = function.partner
        if forward is not None and forward.unrecordable and not forward.nodes:
            text = f"{forward.name}, the forward of {function.name}, is not recorded"
            return (SkipReason(SkipKind.FORWARD_SKIPPED, text),)
        if placement.key in function.passed:
            return self._written_reasons(function, given, placement.places) if function.mutated else ()
        layouts = placement.layouts()
        reasons = function.unrecordable.get(layouts) or self._first_reasons(function, given, placement)
        if not reasons and layouts not in function.recorded and len(function.recorded) >= self._options.max_sizes:
            text = f"{function.name} has recordings for {len(function.recorded)} other input layouts"
            reasons = (SkipReason(SkipKind.RECORDING_LIMIT, text),)
        if not reasons:
            function.passed.add(placement.key)
            return self._written_reasons(function, given, placement.places)
        return reasons

    def _first_reasons(self, function: Function, given: Sequence[Any], placement: Placement) -> tuple[SkipReason, ...]:
        options = self._options
        unusable = self._driver.unusable_reason()
        if unusable is not None:
            return (SkipReason(SkipKind.NO_CACHING_ALLOCATOR, unusable),)
        if placement.sizes and options.skip_dynamic:
            text = f"{function.name} takes the integers {placement.sizes}"
            return (SkipReason(SkipKind.DYNAMIC_SHAPES, text),)
        if placement.sizes and options.capture_sizes is not None and placement.sizes not in options.capture_sizes:
            return (SkipReason(SkipKind.SIZE_NOT_LISTED, f"{function.name} is called with {placement.sizes}"),)
        reasons = check_inputs(given, self._driver.device)
        if reasons:
            function.unrecordable[placement.layouts()] = reasons
        return reasons

    def _written_reasons(
        self, function: Function, given: Sequence[Any], places: Sequence[Place]
    ) -> tuple[SkipReason, ...]:
        """Written inputs must be worked on in place, and nothing else may be a copy of their memory."""
        written = [index for index in function.mutated if index < len(given)]
        copied = [index for index, place in enumerate(places) if place is Place.COPIED]
        lost = [index for index in written if places[index] is Place.COPIED]
        if not lost:
            lost = sharing_memory(given, copied, written)
        if not lost:
            return ()
        names = ", ".join(f"input {index}" for index in lost)
        text = f"{names} of {function.name} is written, or shares memory with one that is, but would be a copy"
        return (SkipReason(SkipKind.MUTATED_INPUT, text, function.mutated.get(lost[0])),)

    # -- find or record --------------------------------------------------------------------------------

    def _may_replay_at_once(self, expected: ExpectedCall, function: Function, given: list[Any]) -> bool:
        """Whether the call is the expected one, and may replay now; if so, ``given`` is left without inputs in memory
        of the path. See Note [Expected calls]."""
        node, path_inputs = expected.node, expected.pattern.path_inputs
        forward = function.partner
        if not expected.pattern.matches(given) or (forward is not None and not forward.nodes):
            return False
        if function.mutated and self._written_reasons(function, given, [known.place for known in node.inputs]):
            return False
        for index in path_inputs:
            given[index] = None
        last = self._path.last
        live = node.pool.live.find()
        used = live if last is None or last.pool is node.pool else last.pool.live.find()
        in_path = self._live_in_path(used)
        siblings = self._children().get((function, node.key), ())
        # Of several that could be replayed, the first is the one to take.
        fits = in_path <= node.survivors if siblings and siblings[0] is node else in_path == node.survivors
        if fits and self._path.members.issuperset(live):
            return True
        self._restore(given, path_inputs)
        return False

    def _restore(self, given: list[Any], path_inputs: Mapping[int, PathTensor]) -> None:
        """Give inputs in memory of the path back to a call that will not replay, or not yet."""
        last = self._path.last
        for index, known in path_inputs.items():
            given[index] = known.tensor()
            assert last is not None
            last.pool.live.hand_out({known.slot: None})  # it may have counted as dead meanwhile

    def _find_or_record(
        self, function: Function, given: list[Any], placement: Placement
    ) -> Node | tuple[SkipReason, ...]:
        """The recording to replay now; otherwise reasons, none if the callable only runs as it is for now."""
        last = self._path.last
        found = [] if last is None else last.pool.live.find()  # nothing is handed out before the replay
        live = self._live_in_path(found)
        siblings = self._children().get((function, placement.key), [])
        node = self._matching(siblings, placement.addresses, live)
        if node is not None:
            known = found if last is not None and node.pool is last.pool else None
            return node if self._is_way_clear(node.pool, given, known) else ()
        layouts = placement.layouts()
        if layouts not in function.warm or self._path.settling:
            return ()
        moved = bool(siblings) and not any(sibling.is_in_place(placement.addresses) for sibling in siblings)
        if not moved and function.recorded[layouts] > self._options.max_rerecords:
            text = f"{function.name} was recorded {function.recorded[layouts]} times for the same input layouts"
            return (SkipReason(SkipKind.RERECORD_LIMIT, text),)
        pool = self._pool_to_record_in()
        if not self._is_way_clear(pool, given):
            return ()
        if moved:
            self._make_room(function, siblings)
        return self._record(function, given, placement, Site(self._path.last, pool, live), count=not moved)

    def _children(self) -> dict[tuple[Any, Key], list[Node]]:
        last = self._path.last
        return self._roots if last is None else last.children

    def _matching(self, siblings: Sequence[Node], addresses: tuple[int, ...], live: frozenset[Slot]) -> Node | None:
        for node in siblings:
            if node.is_in_place(addresses) and live <= node.survivors:
                return node
        return None

    def _live_in_path(self, live: Sequence[Slot]) -> frozenset[Slot]:
        return frozenset([slot for slot in live if slot in self._path.members])

    def _is_way_clear(self, pool: Pool, given: list[Any], live: Sequence[Slot] | None = None) -> bool:
        """Whether no result from outside the path is in use in this pool. Learns from those that are. ``live``:
        those in use there, if that is known."""
        found = pool.live.find() if live is None else live
        outputs_outside_path = [slot for slot in found if slot not in self._path.members]
        if not outputs_outside_path:
            return True
        if self._options.outputs == "overwrite":
            storages = {slot.storage._cdata for slot in outputs_outside_path}
            for index, value in enumerate(given):
                if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata in storages:
                    given[index] = value.clone()  # still needed by this call
            self._take_memory(pool, outputs_outside_path)
            return True
        for slot in outputs_outside_path:
            slot.blocked += 1
            slot.owner.keep(slot.leaves)
        if max(slot.blocked for slot in outputs_outside_path) > self._options.patience:
            self._drop_pool(pool)
        return False

    def _take_memory(self, pool: Pool, slots: Sequence[Slot]) -> None:
        for slot in slots:
            for leaf, reference in zip(slot.leaves, slot.handed, strict=False):
                tensor = reference()
                message = overwritten_message(slot.owner.name, leaf, slot.owner.role == "backward")
                if tensor is not None:
                    overwrite(tensor, message)
            for node in slot.owner.nodes:
                node.kept_bases = None
            self._driver.invalidate(
                slot.renew(self._driver.storage_at(pool.handle, slot.address, slot.nbytes)), message
            )
            slot.settle()
        pool.live.forget(slots)

    def _record(
        self, function: Function, given: Sequence[Any], placement: Placement, site: Site, *, count: bool
    ) -> Node | tuple[SkipReason, ...]:
        layouts, began = placement.layouts(), time.perf_counter()
        try:
            self._order_streams()
            node = record_node(function, function.call, given, placement, site, self._driver)
        except CudagraphSkipped as skipped:
            function.unrecordable[layouts] = reasons = skipped.reasons
            function.passed.discard(placement.key)
            if any(reason.kind is SkipKind.LEAKED_MEMORY for reason in reasons):
                self._drop_pool(site.pool)
            return reasons
        except PoolBusy:
            self._drop_pool(site.pool)
            return ()
        self._attach(node, layouts, count)
        self._observer.event("cudagraphs.node", {"node": node, "seconds": time.perf_counter() - began})
        return node if self._fits(node, layouts) else function.unrecordable[layouts]

    def _attach(self, node: Node, layouts: tuple[object, ...], count: bool) -> None:
        function = node.function
        for slot in node.slots:
            slot.copied = self._options.outputs == "copy" or function.wants_copy(slot)
        function.nodes.append(node)
        self._children().setdefault((function, node.key), []).append(node)
        function.recorded[layouts] += count
        if count and function.recorded[layouts] == 1 and len(function.recorded) == self._options.warn_sizes + 1:
            self._notify(
                f"{function.name} now has a recording for each of {len(function.recorded)} input sizes; each takes "
                "time to make and memory. Pad to fewer sizes, list them in capture_sizes, or set skip_dynamic"
            )

    def _replay(
        self, node: Node, given: list[Any], path_inputs: Mapping[int, PathTensor], *, alike: bool = False
    ) -> Any:
        self._order_streams()
        node.last_use = node.pool.last_use = self._clock
        result = run_node(node, given, self._driver, remember=self._options.outputs == "overwrite", alike=alike)
        self._path.append(node)
        self._path.ran_once(node.function, any_slot_live(node))
        node.function.replays += 1
        for index in node.function.mutated:
            announce_write(given[index], path_inputs.get(index))
        given.clear()
        return result

    def _order_streams(self) -> None:
        """Memory is shared by all calls: work on another stream must wait for everything issued on the last one."""
        stream = self._driver.current_stream()
        if self._last_stream is not None and stream != self._last_stream:
            self._driver.wait_event(stream, self._driver.record_event(self._last_stream))
        self._last_stream = stream

    # -- memory ----------------------------------------------------------------------------------------

    def _pool_to_record_in(self) -> Pool:
        """The path's pool; at the start of a step the newest, unless it has its share of the memory cap."""
        last, cap = self._path.last, self._options.max_pool_bytes
        if last is not None:
            return last.pool
        if not self.pools or (cap is not None and self.pools[-1].reserved_bytes > cap // 2):
            self._made_pools += 1
            self.pools.append(Pool(self._driver, self._made_pools))
        return self.pools[-1]

    def _fits(self, node: Node, layouts: tuple[object, ...]) -> bool:
        """Keep the memory cap by dropping the pools that were not used for the longest time."""
        cap = self._options.max_pool_bytes
        if cap is None:
            return True
        node.pool.last_use = self._clock
        while sum(pool.reserved_bytes for pool in self.pools) > cap:
            pool = min(self.pools, key=lambda pool: pool.last_use)
            if pool is node.pool:
                text = f"{node.function.name} needs {node.pool.reserved_bytes} bytes with what runs before it, of {cap}"
                node.function.unrecordable[layouts] = (SkipReason(SkipKind.MEMORY_CAP, text),)
                self._drop_pool(pool)
                return False
            self._drop_pool(pool)
        return True

    def _make_room(self, function: Function, siblings: list[Node]) -> None:
        """Drop the least recently used of recordings that differ in static addresses only."""
        if len(siblings) < self._options.max_static_variants:
            return
        oldest = min(siblings, key=lambda node: node.last_use)
        function.wasted_variants += oldest.replays <= 1
        if function.wasted_variants > self._options.max_static_moves:
            latest = max(siblings, key=lambda node: node.last_use)
            moving = {
                index
                for index, (old, new) in enumerate(zip(oldest.inputs, latest.inputs, strict=True))
                if old.place is Place.STATIC and old.address != new.address
            }
            function.static = function.static.without(moving - function.mutated.keys())
        self._drop(oldest)

    def _drop(self, top: Node) -> None:
        """Take a recording and what follows it out of the tree."""
        group = self._roots if top.parent is None else top.parent.children
        for siblings in group.values():
            if top in siblings:
                siblings.remove(top)
        dropped = set(top.subtree())
        for node in dropped:
            node.function.forget(dropped)
            node.children.clear()
            node.graph = None
        if dropped.intersection(self._path.nodes):
            self._leave_path()

    def _drop_pool(self, pool: Pool) -> None:
        """Leave a pool to the results that are in use in it, and drop its recordings."""
        for siblings in list(self._roots.values()):
            for node in list(siblings):
                if node.pool is pool:
                    self._drop(node)
        self._roots = {key: siblings for key, siblings in self._roots.items() if siblings}
        self.pools = [kept for kept in self.pools if kept is not pool]
        for function in self.functions:
            function.passed.clear()  # keys hold slots
        pool.release()

    def _leave_path(self) -> None:
        """Go on outside the tree until the next step."""
        left = self._path
        self._path = Path(ran=left.ran, forwards=left.forwards, settling=True)
