"""Building the text of one LLVM function: SSA names, loops, and hoisting done while emitting.

Note [Hoisting by construction]
    Every pure instruction goes into the shallowest open loop in which all its operands exist, and equal
    instructions of one loop are emitted once. So address arithmetic, broadcasts and row-scope values land
    outside the inner loop without any LLVM pass. The lines of a loop are kept apart until it closes; what is
    hoisted meanwhile is appended to the enclosing block, which dominates the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ....ir import Origin

__all__ = ["Carried", "Emitter", "Ssa", "imm", "origin_comment", "vector_type"]


class Ssa(NamedTuple):
    """A value in LLVM text: ``%t3`` or a literal, its type, and the loop depth at which it exists."""

    text: str
    type: str
    depth: int = 0

    @property
    def typed(self) -> str:
        """As an operand with its type, ``float %t3``."""
        return f"{self.type} {self.text}"

    @property
    def constant(self) -> int | None:
        """The value of an integer literal."""
        return int(self.text) if self.text.lstrip("-").isdigit() else None


class Carried(NamedTuple):
    """A loop-carried value: its type and its value before the first iteration."""

    type: str
    initial: Ssa


class _Scope:
    __slots__ = ("cse", "lines")

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.cse: dict[str, Ssa] = {}


def imm(value: int, type_: str = "i64") -> Ssa:
    """An integer literal."""
    return Ssa(str(value), type_)


def vector_type(scalar: str, lanes: int) -> str:
    """``<8 x float>``; the scalar type itself for one lane."""
    return scalar if lanes == 1 else f"<{lanes} x {scalar}>"


class Emitter:
    """Text of one function body. ``declarations``: what the module needs beside its kernels, by name."""

    def __init__(self, declarations: dict[str, str]) -> None:
        self.declarations = declarations
        self._scopes = [_Scope()]
        self._counter = 0
        self.label = "entry"

    @property
    def depth(self) -> int:
        """The current loop depth; 0 is the function's entry."""
        return len(self._scopes) - 1

    def lines(self) -> list[str]:
        """The body's lines so far; every loop must be closed."""
        assert len(self._scopes) == 1
        return self._scopes[0].lines

    def fresh(self, hint: str = "t") -> str:
        """A name not used before, without the sigil."""
        self._counter += 1
        return f"{hint}{self._counter}"

    def declare(self, symbol: str, result: str, parameters: Sequence[str]) -> None:
        """Ask for ``declare result @symbol(parameters)``."""
        self.declarations[symbol] = f"declare {result} @{symbol}({', '.join(parameters)})"

    def define(self, symbol: str, text: str) -> None:
        """Ask for a function of the module's own, ``@symbol``, whose whole text is given."""
        self.declarations[symbol] = text

    def comment(self, text: str) -> None:
        """A comment line at the current place."""
        self._scopes[-1].lines.append(f"  ; {text}")

    # -- instructions ------------------------------------------------------------------------------------

    def pure(self, type_: str, text: str, *operands: Ssa) -> Ssa:
        """A value without side effects, hoisted as far as its operands allow."""
        depth = max((operand.depth for operand in operands), default=0)
        return self._value(type_, text, depth, reuse=True)

    def here(self, type_: str, text: str) -> Ssa:
        """A value that must be computed at the current place (loads that may not move, calls)."""
        return self._value(type_, text, self.depth, reuse=False)

    def effect(self, text: str) -> None:
        """An instruction without a result."""
        self._scopes[-1].lines.append(f"  {text}")

    def _value(self, type_: str, text: str, depth: int, *, reuse: bool) -> Ssa:
        scope = self._scopes[depth]
        if reuse:
            known = scope.cse.get(text)
            if known is not None:
                return known
        self._counter += 1
        value = Ssa(f"%t{self._counter}", type_, depth)
        scope.lines.append(f"  {value.text} = {text}")
        if reuse:
            scope.cse[text] = value
        return value

    # -- i64 arithmetic with literals folded ---------------------------------------------------------------

    def add(self, a: Ssa, b: Ssa) -> Ssa:
        """``a + b`` on i64."""
        x, y = a.constant, b.constant
        if x is not None and y is not None:
            return imm(x + y)
        if x == 0:
            return b
        return a if y == 0 else self.pure("i64", f"add i64 {a.text}, {b.text}", a, b)

    def sub(self, a: Ssa, b: Ssa) -> Ssa:
        """``a - b`` on i64."""
        x, y = a.constant, b.constant
        if x is not None and y is not None:
            return imm(x - y)
        return a if y == 0 else self.pure("i64", f"sub i64 {a.text}, {b.text}", a, b)

    def mul(self, a: Ssa, b: Ssa) -> Ssa:
        """``a * b`` on i64."""
        x, y = a.constant, b.constant
        if x is not None and y is not None:
            return imm(x * y)
        if x == 0 or y == 0:
            return imm(0)
        if x == 1:
            return b
        return a if y == 1 else self.pure("i64", f"mul i64 {a.text}, {b.text}", a, b)

    def unsigned(self, op: str, a: Ssa, b: Ssa) -> Ssa:
        """``udiv`` or ``urem`` of non-negative i64; a zero divisor (an empty range) counts as one."""
        x, y = a.constant, b.constant
        if x is not None and y:
            return imm(x // y if op == "udiv" else x % y)
        if y == 1:
            return a if op == "udiv" else imm(0)
        if y is None:
            self.declare("llvm.umax.i64", "i64", ("i64", "i64"))
            b = self.pure("i64", f"call i64 @llvm.umax.i64(i64 {b.text}, i64 1)", b)
        return self.pure("i64", f"{op} i64 {a.text}, {b.text}", a, b)

    def square_root(self, a: Ssa) -> Ssa:
        """Of a non-negative i64 below 2**52, rounded down: a float's root of a square is exact, and no other one is
        rounded up to an integer."""
        self.declare("llvm.sqrt.f64", "double", ("double",))
        number = self.pure("double", f"uitofp i64 {a.text} to double", a)
        root = self.pure("double", f"call double @llvm.sqrt.f64(double {number.text})", number)
        return self.pure("i64", f"fptoui double {root.text} to i64", root)

    def minimum(self, a: Ssa, b: Ssa) -> Ssa:
        """The smaller of two signed i64."""
        x, y = a.constant, b.constant
        if x is not None and y is not None:
            return imm(min(x, y))
        self.declare("llvm.smin.i64", "i64", ("i64", "i64"))
        return self.pure("i64", f"call i64 @llvm.smin.i64(i64 {a.text}, i64 {b.text})", a, b)

    def maximum(self, a: Ssa, b: Ssa) -> Ssa:
        """The larger of two signed i64."""
        x, y = a.constant, b.constant
        if x is not None and y is not None:
            return imm(max(x, y))
        self.declare("llvm.smax.i64", "i64", ("i64", "i64"))
        return self.pure("i64", f"call i64 @llvm.smax.i64(i64 {a.text}, i64 {b.text})", a, b)

    def round_down(self, a: Ssa, step: int) -> Ssa:
        """The largest multiple of ``step`` that is at most ``a`` (non-negative)."""
        return self.sub(a, self.unsigned("urem", a, imm(step)))

    def element(self, type_: str, pointer: Ssa, offset: Ssa) -> Ssa:
        """The address of the element ``offset`` elements behind a pointer."""
        text = f"getelementptr {type_}, ptr {pointer.text}, i64 {offset.text}"
        return pointer if offset.constant == 0 else self.pure("ptr", text, pointer, offset)

    def aligned(self, pointer: Ssa, alignment: int) -> Ssa:
        """The first address from ``pointer`` on that is a multiple of a power of two."""
        place = self.here("i64", f"ptrtoint ptr {pointer.text} to i64")
        above = self.here("i64", f"add i64 {place.text}, {alignment - 1}")
        line = self.here("i64", f"and i64 {above.text}, {-alignment}")
        return self.here("ptr", f"inttoptr i64 {line.text} to ptr")

    # -- vectors -----------------------------------------------------------------------------------------

    def splat(self, value: Ssa, lanes: int) -> Ssa:
        """A scalar in every lane."""
        if lanes == 1:
            return value
        type_ = vector_type(value.type, lanes)
        if value.text[0] != "%":
            return Ssa(f"splat ({value.typed})", type_)
        first = self.pure(type_, f"insertelement {type_} poison, {value.typed}, i64 0", value)
        return self.pure(
            type_, f"shufflevector {type_} {first.text}, {type_} poison, <{lanes} x i32> zeroinitializer", first
        )

    def lane(self, vector: Ssa, index: int, scalar: str) -> Ssa:
        """One lane of a vector."""
        if "x" not in vector.type:
            return vector
        return self.pure(scalar, f"extractelement {vector.typed}, i64 {index}", vector)

    def pack(self, scalars: Sequence[Ssa]) -> Ssa:
        """A vector of the scalars."""
        if len(scalars) == 1:
            return scalars[0]
        type_ = vector_type(scalars[0].type, len(scalars))
        result = Ssa("poison", type_)
        for index, scalar in enumerate(scalars):
            result = self.pure(type_, f"insertelement {result.typed}, {scalar.typed}, i64 {index}", result, scalar)
        return result

    def shuffle(self, a: Ssa, b: Ssa, scalar: str, mask: Sequence[int]) -> Ssa:
        """Lanes of ``a`` followed by ``b`` picked by ``mask``; one lane gives a scalar."""
        if len(mask) == 1 and "x" in a.type:
            return self.lane(a, mask[0], scalar)
        type_ = vector_type(scalar, len(mask))
        picks = ", ".join(f"i32 {m}" for m in mask)
        return self.pure(type_, f"shufflevector {a.typed}, {b.typed}, <{len(mask)} x i32> <{picks}>", a, b)

    # -- branches ----------------------------------------------------------------------------------------

    def choose(
        self,
        condition: Ssa,
        type_: str | None,
        then: Callable[[], Ssa | None],
        otherwise: Callable[[], Ssa | None],
    ) -> Ssa | None:
        """``then()`` where the bit holds, else ``otherwise()``: only one of them runs. The value is of ``type_``; with
        ``None`` they are for their effects. What one emits here is not reused outside of it."""
        name, scope = self.fresh("if_"), self._scopes[-1]
        known = dict(scope.cse)
        scope.lines.append(f"  br i1 {condition.text}, label %{name}.then, label %{name}.else")
        ends: list[tuple[Ssa | None, str]] = []
        for side, make in (("then", then), ("else", otherwise)):
            scope.lines.append(f"{name}.{side}:")
            self.label = f"{name}.{side}"
            value = make()
            ends.append((value, self.label))
            scope.lines.append(f"  br label %{name}.join")
            scope.cse = dict(known)
        scope.lines.append(f"{name}.join:")
        self.label = f"{name}.join"
        if type_ is None:
            return None
        incoming = ", ".join(f"[ {value.text}, %{label} ]" for value, label in ends if value is not None)
        return self._value(type_, f"phi {type_} {incoming}", self.depth, reuse=False)

    # -- loops -------------------------------------------------------------------------------------------

    def loop(
        self,
        low: Ssa,
        high: Ssa,
        step: int,
        carried: Sequence[Carried],
        body: Callable[[Ssa, list[Ssa]], list[Ssa]],
        hint: str = "i",
    ) -> list[Ssa]:
        """``for index in range(low, high, step)``; ``body`` maps the carried values to the next ones.

        Gives the carried values after the loop. No loop is emitted where the trip count is known to be 0 or 1.
        """
        start, stop = low.constant, high.constant
        known = start is not None and stop is not None
        if known and start >= stop:  # type: ignore[operator]
            return [c.initial for c in carried]
        if known and start + step >= stop:  # type: ignore[operator]
            return body(low, [c.initial for c in carried])
        name = self.fresh(hint + "_")
        scope = _Scope()
        self._scopes.append(scope)
        depth = self.depth
        before, self.label = self.label, f"{name}.loop"
        index = Ssa(f"%{name}", "i64", depth)
        phis = [Ssa(f"%{name}.c{k}", c.type, depth) for k, c in enumerate(carried)]
        following = body(index, phis)
        latch = self.label
        self._scopes.pop()
        results = self._close_loop(
            name, before, latch, (low, high, step), (carried, phis, following), scope.lines, known
        )
        self.label = f"{name}.done"
        return results

    def _close_loop(
        self,
        name: str,
        before: str,
        latch: str,
        bounds: tuple[Ssa, Ssa, int],
        values: tuple[Sequence[Carried], list[Ssa], list[Ssa]],
        body: list[str],
        runs: bool,
    ) -> list[Ssa]:
        low, high, step = bounds
        carried, phis, following = values
        lines = self._scopes[-1].lines
        if runs:
            lines.append(f"  br label %{name}.loop")
        else:
            lines.append(f"  %{name}.any = icmp slt i64 {low.text}, {high.text}")
            lines.append(f"  br i1 %{name}.any, label %{name}.loop, label %{name}.done")
        lines.append(f"{name}.loop:")
        lines.append(f"  %{name} = phi i64 [ {low.text}, %{before} ], [ %{name}.next, %{latch} ]")
        for c, phi, after in zip(carried, phis, following, strict=True):
            lines.append(f"  {phi.text} = phi {c.type} [ {c.initial.text}, %{before} ], [ {after.text}, %{latch} ]")
        lines.extend(body)
        lines.append(f"  %{name}.next = add i64 %{name}, {step}")
        lines.append(f"  %{name}.more = icmp slt i64 %{name}.next, {high.text}")
        lines.append(f"  br i1 %{name}.more, label %{name}.loop, label %{name}.done")
        lines.append(f"{name}.done:")
        depth = self.depth
        results = []
        for k, (c, after) in enumerate(zip(carried, following, strict=True)):
            if runs:
                results.append(Ssa(after.text, c.type, depth if after.text[0] == "%" else 0))
                continue
            name_out = f"%{name}.out{k}"
            lines.append(f"  {name_out} = phi {c.type} [ {c.initial.text}, %{before} ], [ {after.text}, %{latch} ]")
            results.append(Ssa(name_out, c.type, depth))
        return results


def origin_comment(origin: Origin) -> str:
    """A comment at the end of a line: the ATen ops and the last of the user's lines."""
    ops = ", ".join(origin.ops[:8])
    line = origin.line.strip().splitlines()[-1].strip() if origin.line.strip() else ""
    text = " | ".join(part for part in (ops, line) if part)
    return f" ; {text}" if text else ""
