"""The walks over loop IR and kernel IR: each gives what the text shows and changes nothing else."""

from __future__ import annotations

import dataclasses

import pytest

from aotkit_inductor_lower.ir import (
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Range,
    Reduce,
    Stage,
    Store,
)
from aotkit_inductor_lower.ir.walk import (
    access_at,
    accesses,
    definitions,
    expressions,
    flat_map,
    instructions,
    loads,
    map_expressions,
    map_nest,
    operands,
    placed,
    ranges_within,
    reduces,
    rename,
    stores,
    substitute,
    used_values,
    value_types,
    with_buffers,
)
from aotkit_inductor_lower.kernel_ir.nodes import Loop
from aotkit_inductor_lower.kernel_ir.walk import accesses_within, map_instructions
from aotkit_inductor_lower.symbolic import Symbol, SymbolKind, sym, to_expr

I0, R0 = sym("i0"), sym("r0")
PLACE = sym("place", SymbolKind.VALUE)
LOAD = Load("x", "src", (I0, R0), DType.F32, mask="inside", other=-0.0)
STORE = Store("dst", (PLACE, I0), "x", "add", mask="inside")
FIRST = (
    Index("at", I0 + 3, DType.I64),
    CheckedIndex("place", "at", to_expr(8)),
    Const("inside", True, DType.BOOL),
)
SECOND = (LOAD, Compute("y", "mul", ("x", "x"), DType.F32), Reduce("sum", "sum", "y", DType.F32))
NEST = LoopNest(
    "nest",
    (Range("i0", to_expr(4)),),
    (Stage((), FIRST), Stage((Range("r0", to_expr(5)),), SECOND), Stage((), (STORE,))),
)
ALL: tuple[Instr, ...] = (*FIRST, *SECOND, STORE)


def test_a_nest_and_a_kernel_have_the_same_instructions() -> None:
    assert instructions(NEST.stages) == list(ALL)
    kernel = (*FIRST, Loop("r0", to_expr(5), (Loop("r1", to_expr(2), SECOND),)), STORE)
    assert instructions(kernel) == list(ALL)
    assert [[loop.symbol for loop in loops] for loops, _ in accesses_within(kernel)] == [["r0", "r1"], []]
    assert placed(NEST.stages)[3] == (1, 0, LOAD)
    assert [r.symbol for r in ranges_within(NEST)] == ["i0", "r0"]


def test_kinds_and_buffers() -> None:
    assert loads(ALL) == loads(ALL, "src") == [LOAD]
    assert stores(ALL, "dst") == [STORE]
    assert stores(ALL, "src") == loads(ALL, "dst") == []
    assert accesses(ALL) == [LOAD, STORE]
    assert [i.result for i in reduces(ALL)] == ["sum"]


def test_values() -> None:
    assert list(definitions(ALL)) == ["at", "place", "inside", "x", "y", "sum"]
    assert "place" not in value_types(ALL)
    assert value_types(ALL)["inside"] is DType.BOOL
    assert sorted(operands(STORE)) == ["inside", "place", "x"]
    assert operands(LOAD) == ("inside",)
    assert used_values(ALL) == {"at", "inside", "place", "x", "y"}


def test_expressions_come_in_order_and_positions_last() -> None:
    place = Reduce("best", "argmax", "x", DType.I64, position=R0)
    assert expressions((place, *ALL)) == [I0 + 3, I0, R0, PLACE, I0, R0]


def test_an_unchanged_instruction_is_the_same_object() -> None:
    assert all(map_expressions(i, lambda e: e) is i for i in ALL)
    assert all(with_buffers(i, {"other": "new"}) is i for i in ALL)


@pytest.mark.parametrize("instr", [LOAD, STORE, FIRST[0], SECOND[2]])
def test_a_substitution_touches_expressions_only(instr: Instr) -> None:
    changed = substitute(instr, {Symbol("i0"): R0 + 1})
    for field in dataclasses.fields(instr):
        if field.init and field.name not in ("indices", "expr"):
            assert getattr(changed, field.name) is getattr(instr, field.name)
    assert not any(Symbol("i0") in e.symbols for e in expressions((changed,)))


def test_a_moved_load_keeps_its_mask_and_negative_zero() -> None:
    moved = access_at(LOAD, "elsewhere", (R0,))
    assert moved == Load("x", "elsewhere", (R0,), DType.F32, mask="inside", other=-0.0)
    assert with_buffers(STORE, {"dst": "new"}) == dataclasses.replace(STORE, buffer="new")


def test_renaming_reaches_masks_and_indices() -> None:
    names = {name: f"{name}_2" for name in definitions(ALL)}
    renamed = [rename(i, names) for i in ALL]
    assert list(definitions(renamed)) == list(names.values())
    assert used_values(renamed) == {names[name] for name in used_values(ALL)}
    assert [rename(i, {new: old for old, new in names.items()}) for i in renamed] == list(ALL)


def test_maps() -> None:
    assert map_nest(NEST, lambda i: i) == NEST
    kernel = (Loop("r0", to_expr(5), SECOND), STORE)
    assert map_instructions(kernel, lambda i: with_buffers(i, {"src": "new"}))[0].body[0].buffer == "new"  # type: ignore[union-attr]
    assert flat_map(SECOND, lambda i: () if i is LOAD else (i, i)) == tuple(i for i in SECOND[1:] for _ in range(2))
