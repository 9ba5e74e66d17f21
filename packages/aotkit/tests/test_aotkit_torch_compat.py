"""What differs between versions of torch here, and which versions need it: each test fails where that changes."""

from __future__ import annotations

import copyreg
import functools
import inspect

import pytest
import torch
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource, DefaultsSource, LocalSource
from torch._guards import Guard, GuardsSet

from aotkit import _torch_compat

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def test_guards_on_attributes_are_not_found_by_torch_before_2_12() -> None:
    model = LocalSource("model")
    weight = AttrSource(model, "weight")
    sources = [model, weight, AttrSource(weight, "grad"), AttrSource(model, "bias")]

    def guards() -> GuardsSet:
        found = GuardsSet()
        for source in sources:
            found.add(Guard(source, lambda *_: None))
        return found

    def left(guards: GuardsSet) -> int:
        return len(list(guards))

    torchs = guards()
    torchs.remove_guards_with_source(weight)
    assert left(torchs) == (2 if RELEASE >= (2, 12) else 4)
    ours = guards()
    _torch_compat.remove_guards(ours, weight)
    assert {guard.originating_source for guard in ours} == {model, sources[3]}


def test_a_guard_on_an_attribute_that_is_asked_for_tells_it_apart_from_its_object_from_torch_2_12_on() -> None:
    apart = "attr" in inspect.signature(GuardBuilder.HASATTR).parameters
    assert apart == (RELEASE >= (2, 12))
    model = LocalSource("model")
    told = functools.partial(GuardBuilder.HASATTR, attr="weight")
    path: list[list[object]] = [["local", "model"]]
    assert _torch_compat.asked_attribute(Guard(model, told), path) == (path, "weight")
    as_before = Guard(AttrSource(model, "weight"), GuardBuilder.HASATTR)
    assert _torch_compat.asked_attribute(as_before, [*path, ["attr", "weight"]]) == (path, "weight")
    assert _torch_compat.asked_attribute(as_before, [*path, ["item", "weight"]]) is None


def test_aot_compile_is_offered_from_torch_2_12_on() -> None:
    def offered() -> bool:
        return hasattr(torch.compile(torch.sin, backend="eager", fullgraph=True), "aot_compile")

    assert offered() == (RELEASE >= (2, 12))
    with _torch_compat.offering_aot_compile():
        assert offered()


def test_sources_of_defaults_pickle_what_their_class_takes_from_torch_2_12_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """That these guards are then checked, test_aotkit_saved_functions.py shows."""
    monkeypatch.setattr(copyreg, "dispatch_table", dict(copyreg.dispatch_table))
    monkeypatch.delitem(copyreg.dispatch_table, DefaultsSource, raising=False)
    sources = [DefaultsSource(LocalSource("f"), 1), DefaultsSource(LocalSource("f"), "by", is_kw=True)]
    for source in sources:
        kind, written = _torch_compat.parts_of_default(source)
        assert kind(*written) == source
        assert (source.__reduce__() == (kind, written)) == (RELEASE >= (2, 12))
    _torch_compat.write_defaults_readably()
    assert (DefaultsSource in copyreg.dispatch_table) == (RELEASE < (2, 12))
