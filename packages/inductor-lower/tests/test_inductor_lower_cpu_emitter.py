"""The text that the emitter makes of arithmetic, vectors and loops: literals are folded, nothing is computed twice."""

from __future__ import annotations

import pytest

from aotkit_inductor_lower.targets.cpu.render.emitter import Carried, Emitter, Ssa, imm

A, B = Ssa("%a", "i64"), Ssa("%b", "i64")


def emitted(make) -> tuple[str, list[str]]:
    """What ``make(emitter)`` gives, and the lines that it took."""
    em = Emitter({})
    value = make(em)
    return value.text, [line.strip() for line in em.lines()]


@pytest.mark.parametrize(
    ("make", "value"),
    [
        (lambda em: em.add(imm(3), imm(4)), "7"),
        (lambda em: em.add(A, imm(0)), "%a"),
        (lambda em: em.add(imm(0), A), "%a"),
        (lambda em: em.sub(imm(3), imm(4)), "-1"),
        (lambda em: em.sub(A, imm(0)), "%a"),
        (lambda em: em.mul(imm(3), imm(-4)), "-12"),
        (lambda em: em.mul(A, imm(0)), "0"),
        (lambda em: em.mul(imm(0), A), "0"),
        (lambda em: em.mul(A, imm(1)), "%a"),
        (lambda em: em.mul(imm(1), A), "%a"),
        (lambda em: em.unsigned("udiv", imm(17), imm(5)), "3"),
        (lambda em: em.unsigned("urem", imm(17), imm(5)), "2"),
        (lambda em: em.unsigned("udiv", A, imm(1)), "%a"),
        (lambda em: em.unsigned("urem", A, imm(1)), "0"),
        (lambda em: em.minimum(imm(3), imm(4)), "3"),
        (lambda em: em.maximum(imm(3), imm(4)), "4"),
        (lambda em: em.round_down(imm(17), 5), "15"),
        (lambda em: em.splat(A, 1), "%a"),
        (lambda em: em.splat(imm(5), 4), "splat (i64 5)"),
        (lambda em: em.splat(imm(-5), 2), "splat (i64 -5)"),
        (lambda em: em.pack([A]), "%a"),
        (lambda em: em.lane(A, 0, "i64"), "%a"),
    ],
)
def test_what_is_known_takes_no_instruction(make, value: str) -> None:
    assert emitted(make) == (value, [])


@pytest.mark.parametrize(
    ("make", "lines"),
    [
        (lambda em: em.add(A, imm(2)), ["add i64 %a, 2"]),
        (lambda em: em.add(A, imm(1)), ["add i64 %a, 1"]),
        (lambda em: em.sub(imm(0), A), ["sub i64 0, %a"]),
        (lambda em: em.sub(A, imm(-1)), ["sub i64 %a, -1"]),
        (lambda em: em.mul(A, imm(2)), ["mul i64 %a, 2"]),
        (lambda em: em.mul(A, imm(-1)), ["mul i64 %a, -1"]),
        (lambda em: em.unsigned("udiv", A, imm(8)), ["udiv i64 %a, 8"]),
        (
            lambda em: em.unsigned("udiv", A, B),
            ["call i64 @llvm.umax.i64(i64 %b, i64 1)", "udiv i64 %a, %t1"],
        ),
        (lambda em: em.minimum(A, imm(4)), ["call i64 @llvm.smin.i64(i64 %a, i64 4)"]),
        (lambda em: em.maximum(imm(4), A), ["call i64 @llvm.smax.i64(i64 4, i64 %a)"]),
        (
            lambda em: em.splat(A, 2),
            [
                "insertelement <2 x i64> poison, i64 %a, i64 0",
                "shufflevector <2 x i64> %t1, <2 x i64> poison, <2 x i32> zeroinitializer",
            ],
        ),
        (lambda em: em.add(em.mul(A, B), em.mul(A, B)), ["mul i64 %a, %b", "add i64 %t1, %t1"]),
    ],
)
def test_what_is_not_known_is_computed_once(make, lines: list[str]) -> None:
    value, found = emitted(make)
    assert found == [f"%t{k + 1} = {line}" for k, line in enumerate(lines)] and value == f"%t{len(lines)}"


def test_literals_are_told_from_values() -> None:
    assert (imm(7).constant, imm(-7).constant, A.constant) == (7, -7, None)
    assert Ssa("0x7FF0", "double").constant is None and Ssa("poison", "i64").constant is None


@pytest.mark.parametrize(("low", "high", "step", "bodies", "loops"), [
    (0, 0, 1, 0, 0), (5, 3, 1, 0, 0), (0, 1, 1, 1, 0), (0, 8, 8, 1, 0), (0, 9, 8, 1, 1), (3, 4, 8, 1, 0),
    (0, 2, 1, 1, 1),
])  # fmt: skip
def test_loops_of_no_or_one_iteration_are_none(low: int, high: int, step: int, bodies: int, loops: int) -> None:
    em, places = Emitter({}), []

    def body(index: Ssa, carried: list[Ssa]) -> list[Ssa]:
        places.append(index.text)
        return [em.add(carried[0], A)]

    (result,) = em.loop(imm(low), imm(high), step, [Carried("i64", B)], body)
    text = "\n".join(em.lines())
    assert len(places) == bodies and text.count("phi i64") == 2 * loops
    if not bodies:
        assert result == B
    elif not loops:
        assert places == [str(low)] and "add i64 %b, %a" in text
    else:
        assert f", {step}" in text and "br i1" in text


def test_what_a_loop_does_not_change_is_computed_before_it() -> None:
    em = Emitter({})

    def body(index: Ssa, carried: list[Ssa]) -> list[Ssa]:
        em.effect(f"use {em.mul(A, B).text} {em.add(index, A).text}")
        return []

    em.loop(imm(0), imm(9), 1, [], body)
    lines = [line.strip() for line in em.lines()]
    before, header, inside = (
        next(at for at, line in enumerate(lines) if part in line) for part in ("mul i64 %a, %b", "phi", "use")
    )
    assert before < header < inside
