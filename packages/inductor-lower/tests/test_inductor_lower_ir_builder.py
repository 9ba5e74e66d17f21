"""What the builder of loop nests shares, forwards and copies: Note [What a builder shares]."""

from __future__ import annotations

from aotkit_inductor_lower.ir import Buffer, BufferKind, Compute, DType, Load, Reduce, Store
from aotkit_inductor_lower.ir.builder import NestBuilder, loops
from aotkit_inductor_lower.ir.inlining import Inlinable
from aotkit_inductor_lower.ir.walk import computes, instructions, loads, reduces
from aotkit_inductor_lower.symbolic import Expr, Symbol, contiguous_strides, sym, to_expr

I0, I1, R0 = sym("i0"), sym("i1"), sym("r0")


def declared(name: str, *sizes: int) -> Buffer:
    extents = tuple(map(to_expr, sizes))
    return Buffer(name, "float32", extents, contiguous_strides(extents), BufferKind.TEMPORARY)


X, Y = declared("x", 4, 8), declared("y", 4, 8)
BUFFERS = {"x": X, "y": Y}


def test_equal_instructions_are_one_value_until_the_stage_ends() -> None:
    b = NestBuilder("n", loops({"i0": 4}))
    b.begin_stage(loops({"r0": 8}))
    first = b.load_from(X, [I0, R0])
    assert b.load_from(X, [I0, R0]) == first
    assert b.op("exp", first) == b.op("exp", first)
    total = b.reduce("sum", first)
    b.begin_stage(loops({"r1": 8}))
    assert b.load_from(X, [I0, R0]) != first
    b.store_to(Y, [I0, sym("r1")], total)
    assert len(loads(instructions(b.finish().stages))) == 2


def test_values_of_a_stage_without_loops_and_reductions_last() -> None:
    b = NestBuilder("n", loops({"i0": 4}))
    row = b.load_from(X, [I0, 0])
    for name in ("r0", "r1"):
        b.begin_stage(loops({name: 8}))
        assert b.load_from(X, [I0, 0]) == row
    b.reduce("max", b.load_from(X, [I0, sym("r1")]))
    assert [i.kind for i in reduces(instructions(b.finish().stages))] == ["max"]


def test_nothing_is_shared_where_that_is_asked_for() -> None:
    b = NestBuilder("n", loops({"i0": 4}), share=False)
    assert b.const(1.0, DType.F32) != b.const(1.0, DType.F32)
    assert b.index_value(to_expr(3)) != b.index_value(to_expr(3))


def test_with_declared_buffers_equal_positions_are_equal_loads() -> None:
    for buffers in (BUFFERS, None):
        b = NestBuilder("n", loops({"i0": 4}), buffers=buffers)
        assert (b.load_from(X, [0, 8 * I0]) == b.load_from(X, [I0, 0])) is (buffers is not None)


def test_a_stored_element_is_not_loaded_again() -> None:
    b = NestBuilder("n", loops({"i0": 4, "i1": 8}), buffers=BUFFERS)
    value = b.op("neg", b.load_from(X, [I0, I1]))
    b.store_to(Y, [I0, I1], value)
    assert b.load_from(Y, [I0, I1]) == value
    assert b.load_from(Y, [I0, 0]) != value
    b.store_to(X, [I0, I1], value, mode="add")
    assert b.load_from(X, [I0, I1]) != value


def test_a_copy_renames_values_and_replaces_loops() -> None:
    b = NestBuilder("n", loops({"j": 4}), buffers=BUFFERS)
    names: dict[str, str] = {}
    body = (Load("a", "x", (I0, to_expr(2)), DType.F32), Compute("b", "exp", ("a",), DType.F32))
    env: dict[Symbol, Expr] = {Symbol("i0"): sym("j")}
    b.copy((*body, Store("y", (I0, to_expr(2)), "b")), env, names)
    b.copy(body, env, names)
    (stage,) = b.finish().stages
    assert [type(i) for i in stage.body] == [Load, Compute, Store]
    assert names == {"a": "v0", "b": "v1"}
    assert loads(stage.body)[0].indices == (sym("j"), to_expr(2))


def test_a_producer_is_written_where_it_is_read_and_masked_as_its_reader() -> None:
    made = NestBuilder("make", loops({"i0": 4, "i1": 8}))
    made.store_to(Y, [I0, I1], made.op("exp", made.load_from(X, [I0, I1])))
    inlinable = {"y": Inlinable(made.finish(), (Symbol("i0"), Symbol("i1")))}
    b = NestBuilder("read", loops({"i0": 4}), buffers=BUFFERS, inlinable=inlinable)
    inside = b.op("lt", b.index_value(I0), b.const(3, DType.I64))
    first = b.load_from(Y, [I0, 1], inside, 7.0)
    assert b.load_from(Y, [I0, 1], inside, 7.0) == first
    body = instructions(b.finish().stages)
    assert [i.op for i in computes(body)] == ["lt", "exp", "where"]
    assert [(i.buffer, i.mask) for i in loads(body)] == [("x", inside.name)]


def test_of_what_is_read_under_a_mask_elements_that_exist_for_all_of_a_loop_need_none() -> None:
    buffers = {**BUFFERS, "w": Buffer("w", "float32", (to_expr(4),), (to_expr(1),), BufferKind.INPUT)}
    made = NestBuilder("make", loops({"i0": 4, "i1": 8}))
    scaled = made.op("mul", made.load_from(X, [I0, I1]), made.load_from(buffers["w"], [I0]))
    made.store_to(Y, [I0, I1], scaled)
    inlinable = {"y": Inlinable(made.finish(), (Symbol("i0"), Symbol("i1")))}

    def masks(row: Expr) -> list[tuple[str, bool]]:
        b = NestBuilder("read", loops({"i0": 4, "i1": 8}), buffers=buffers, inlinable=inlinable)
        inside = b.op("lt", b.index_value(I1), b.const(3, DType.I64))
        b.load_from(Y, [row, I1 - 1], inside, 7.0)
        return [(i.buffer, i.mask is not None) for i in loads(instructions(b.finish().stages))]

    assert masks(I0) == [("x", True), ("w", False)]
    assert masks(I0 - 1) == [("x", True), ("w", True)]  # there may be no such element
    assert masks(I0 + 1) == [("x", True), ("w", True)]


def test_whole_stages_are_copied_with_other_loops() -> None:
    b = NestBuilder("n", loops({"i0": 4}))
    b.begin_stage(loops({"r0": 8}))
    b.reduce("sum", b.load_from(X, [I0, R0]))
    nest = b.finish()
    again = NestBuilder("again", nest.outer, buffers=BUFFERS)
    again.copy_stages(nest.stages, {Symbol("r0"): sym("k")}, lambda _: loops({"k": 8}))
    (stage,) = again.finish().stages
    assert [r.symbol for r in stage.ranges] == ["k"]
    assert [type(i) for i in stage.body] == [Load, Reduce]
