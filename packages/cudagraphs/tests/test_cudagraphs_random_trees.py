"""Random programs over trees of recordings, and bugs planted in the package that they must find."""

import contextlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import aotkit_cudagraphs.manager as manager_module
import aotkit_cudagraphs.record as record_module
from aotkit_cudagraphs.liveness import LiveSlots, Slot
from aotkit_cudagraphs.manager import TreeManager
from aotkit_cudagraphs.placement import Key, Place
from aotkit_cudagraphs.simulated_driver import SimulatedDriver
from aotkit_cudagraphs.steps import Path as TreePath
from aotkit_cudagraphs.tree import Node

_spec = importlib.util.spec_from_file_location("tree_fuzz", Path(__file__).with_name("tree_fuzz.py"))
tree_fuzz = importlib.util.module_from_spec(_spec)
sys.modules["tree_fuzz"] = tree_fuzz
_spec.loader.exec_module(tree_fuzz)


@pytest.mark.covers("F6.6", "F6.8", "F6.9", "F6.12", "F6.17", "F6.25", "F6.26", "F6.28", "F6.29")
@pytest.mark.parametrize("first", range(0, 200, 25))
def test_random_programs_give_plain_results_in_the_memory_that_the_model_predicts(first):
    recordings = sum(tree_fuzz.run_program(seed).recordings for seed in range(first, first + 25))
    assert recordings > 10, "programs that record nothing prove nothing"


def plant(monkeypatch, target, name, make):
    """Replace `target.name` by `make(original)`."""
    monkeypatch.setattr(target, name, make(getattr(target, name)))


def results_of_other_steps_are_ignored(patch):
    plant(patch, TreeManager, "_is_way_clear", lambda original: lambda self, pool, given, live=None: True)


def views_do_not_count_as_uses(patch):
    def settle(self):
        self._uses = self._references = 1 << 30

    plant(patch, Slot, "settle", lambda original: settle)


def results_of_the_path_are_not_protected(patch):
    plant(patch, TreeManager, "_live_in_path", lambda original: lambda self, live: frozenset())


def the_child_of_another_state_is_replayed(patch):
    def matching(self, siblings, addresses, live):
        return next((node for node in siblings if node.is_in_place(addresses)), None)

    plant(patch, TreeManager, "_matching", lambda original: matching)


def moved_static_inputs_are_not_noticed(patch):
    plant(patch, Node, "is_in_place", lambda original: lambda self, addresses: True)


def integers_are_not_part_of_the_key(patch):
    def place_inputs(*args):
        placement = original(*args)
        return replace(placement, key=Key((int, 0) if part[:1] == (int,) else part for part in
                                            (p if isinstance(p, tuple) else (p,) for p in placement.key)))  # fmt: skip

    original = manager_module.place_inputs
    patch.setattr(manager_module, "place_inputs", place_inputs)


def copied_inputs_are_not_copied_again(patch):
    original = Node.__post_init__

    def without_first_copy(self):
        original(self)
        self.copies = self.copies[1:]

    patch.setattr(Node, "__post_init__", without_first_copy)


def the_allocation_state_of_the_parent_is_not_restored(patch):
    def record_node(function, call, given, placement, site, driver):
        node = original(function, call, given, placement, site, driver)
        node.state = site.pool.empty_state
        return node

    original = manager_module.record_node
    patch.setattr(manager_module, "record_node", record_node)


def results_leak(patch):
    hoard = []

    def hand_out(original):
        def hand_out_and_hold(self, slots):
            slots = list(slots)
            hoard.extend(slot.bases[slot.leaves[0]].detach() for slot in slots if not slot.copied)
            original(self, slots)

        return hand_out_and_hold

    plant(patch, LiveSlots, "hand_out", hand_out)


def results_that_share_memory_get_a_slot_each(patch):
    def describe_outputs(function, leaves, homes, pool, driver):
        outputs, slots = original(function, leaves, homes, pool, driver)
        outputs = tuple(
            replace(output, source=record_module.Source.OUTSIDE, value=output.slot.bases[leaf].clone())
            if output.source is record_module.Source.NEW and leaf
            else output
            for leaf, output in enumerate(outputs)
        )
        return outputs, slots

    original = record_module._describe_outputs
    patch.setattr(record_module, "_describe_outputs", describe_outputs)


def random_numbers_are_drawn_twice(patch):
    def capture(self, fn, *, pool, stream):
        found = original(self, fn, pool=pool, stream=stream)
        torch.rand(1)
        return found

    original = SimulatedDriver.capture
    patch.setattr(SimulatedDriver, "capture", capture)
    patch.setattr(SimulatedDriver, "preserve_rng", lambda self: contextlib.nullcontext())


def written_copies_are_not_refused(patch):
    plant(patch, TreeManager, "_written_reasons", lambda original: lambda self, function, given, placement: ())


def paths_do_not_end_with_their_step(patch):
    def begin_step(self):
        slots = self._path.slots
        original(self)
        self._path = TreePath(slots=slots)

    original = TreeManager._begin_step
    patch.setattr(TreeManager, "_begin_step", begin_step)


def inputs_that_come_back_are_not_watched(patch):
    def find(self):
        live = [slot for slot in self._handed if slot.is_live()]
        self._ever = getattr(self, "_ever", set()) | (set(self._handed) - set(live))
        self._handed = dict.fromkeys(slot for slot in live if slot not in self._ever)
        return list(self._handed)

    patch.setattr(LiveSlots, "find", find)


def buffers_are_not_in_the_pool(patch):
    def arguments(given, placement, owners, pool, driver):
        made = original(given, placement, owners, pool, driver)
        for index, place in enumerate(placement.places):
            if place is Place.COPIED:
                made.values[index] = made.values[index].clone()
        return made

    original = record_module._arguments
    patch.setattr(record_module, "_arguments", arguments)


BUGS = [
    results_of_other_steps_are_ignored,
    views_do_not_count_as_uses,
    results_of_the_path_are_not_protected,
    the_child_of_another_state_is_replayed,
    moved_static_inputs_are_not_noticed,
    integers_are_not_part_of_the_key,
    copied_inputs_are_not_copied_again,
    the_allocation_state_of_the_parent_is_not_restored,
    results_leak,
    results_that_share_memory_get_a_slot_each,
    random_numbers_are_drawn_twice,
    written_copies_are_not_refused,
    paths_do_not_end_with_their_step,
    inputs_that_come_back_are_not_watched,
    buffers_are_not_in_the_pool,
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_found(bug, monkeypatch):
    bug(monkeypatch)
    for seed in range(100):
        try:
            tree_fuzz.run_program(seed)
        except Exception:  # noqa: BLE001 - whatever the symptom, it is found
            return
    pytest.fail("100 random programs ran as if nothing were wrong")
