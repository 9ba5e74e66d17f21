"""What ops are written with: instructions on values of any lane count, the math library, the error status."""

from __future__ import annotations

from collections.abc import Sequence

from ....ir import DType
from ..machine import Machine
from .emitter import Emitter, Ssa, vector_type
from .types import literal, register_type, width

__all__ = ["Ops"]


class Ops:
    """What ops emit through: the function being built, the target, and the error status."""

    def __init__(self, emitter: Emitter, target: Machine) -> None:
        self.em = emitter
        self.target = target
        self.uses_status = False
        self._flags: list[Ssa] = []

    def lanes(self, value: Ssa) -> int:
        """Lane count of a value."""
        return int(value.type[1 : value.type.index(" ")]) if value.type[0] == "<" else 1

    def const(self, value: float | int | bool, dtype: DType, like: Ssa) -> Ssa:
        """A literal in every lane of ``like``."""
        return self.em.splat(Ssa(literal(value, dtype), register_type(dtype)), self.lanes(like))

    def typed(self, scalar: str, like: Ssa) -> str:
        """The type with ``scalar`` elements and as many lanes as ``like``."""
        return vector_type(scalar, self.lanes(like))

    def op(self, text: str, a: Ssa, b: Ssa) -> Ssa:
        """A two-operand instruction of the operands' type."""
        return self.em.pure(a.type, f"{text} {a.typed}, {b.text}", a, b)

    def compare(self, text: str, a: Ssa, b: Ssa) -> Ssa:
        """``icmp``/``fcmp``: one bit per lane."""
        return self.em.pure(self.typed("i1", a), f"{text} {a.typed}, {b.text}", a, b)

    def select(self, condition: Ssa, a: Ssa, b: Ssa) -> Ssa:
        """``condition ? a : b`` lane by lane."""
        return self.em.pure(a.type, f"select {condition.typed}, {a.typed}, {b.typed}", condition, a, b)

    def convert(self, text: str, a: Ssa, scalar: str) -> Ssa:
        """A conversion instruction to elements of ``scalar``."""
        to = self.typed(scalar, a)
        return a if to == a.type else self.em.pure(to, f"{text} {a.typed} to {to}", a)

    def intrinsic(self, name: str, *args: Ssa) -> Ssa:
        """An LLVM intrinsic overloaded on the type of its first argument."""
        lanes, scalar = self.lanes(args[0]), args[0].type.strip("<>").split()[-1]
        mangled = {"float": "f32", "double": "f64"}.get(scalar, scalar)
        symbol = f"llvm.{name}.{f'v{lanes}' if lanes > 1 else ''}{mangled}"
        self.em.declare(symbol, args[0].type, [a.type for a in args])
        return self.em.pure(args[0].type, f"call {args[0].type} @{symbol}({', '.join(a.typed for a in args)})", *args)

    def flag(self, condition: Ssa, code: int) -> None:
        """Set error bit ``code`` in the kernel's status where any lane of ``condition`` is true, by :meth:`set_flags`
        at the latest."""
        self.uses_status = True
        condition = self.any(condition)
        bit = self.em.pure("i32", f"select {condition.typed}, i32 {code}, i32 0", condition)
        self._flags.append(bit)

    @property
    def flags_are_set(self) -> bool:
        """Whether nothing was flagged since :meth:`set_flags`."""
        return not self._flags

    def set_flags(self) -> None:
        """Set in the kernel's status what was flagged since. Bits from loops outside are put together there."""
        if not self._flags:
            return
        first, *rest = sorted(self._flags, key=lambda bit: bit.depth)
        self._flags.clear()
        for bit in rest:
            first = self.em.pure("i32", f"or i32 {first.text}, {bit.text}", first, bit)
        old = self.em.here("i32", "load i32, ptr %status")
        new = self.em.here("i32", f"or i32 {old.text}, {first.text}")
        self.em.effect(f"store {new.typed}, ptr %status")

    def any(self, condition: Ssa) -> Ssa:
        """Whether a lane of ``condition`` is true."""
        return self._over_lanes("or", condition)

    def all(self, condition: Ssa) -> Ssa:
        """Whether all lanes of ``condition`` are true."""
        return self._over_lanes("and", condition)

    def _over_lanes(self, op: str, condition: Ssa) -> Ssa:
        lanes = self.lanes(condition)
        if lanes == 1:
            return condition
        symbol = f"llvm.vector.reduce.{op}.v{lanes}i1"
        self.em.declare(symbol, "i1", [condition.type])
        return self.em.pure("i1", f"call i1 @{symbol}({condition.typed})", condition)

    # -- math library ------------------------------------------------------------------------------------

    def math(self, name: str, args: Sequence[Ssa], dtype: DType) -> Ssa:
        """A transcendental function: the vector math library where it has it, else libm lane by lane."""
        symbol = self.target.vector_function(name, "f32" if dtype is DType.F32 else "f64")
        scalar, lanes = register_type(dtype), self.lanes(args[0])
        if symbol is None:
            return self.libm(name, args, dtype)
        native = self.target.lanes(width(dtype))
        if lanes == native:
            return self._call(symbol, vector_type(scalar, native), args)
        if lanes == 1:
            wide = [self._in_first_lane(a, scalar, native) for a in args]
            return self.em.lane(self._call(symbol, vector_type(scalar, native), wide), 0, scalar)
        if lanes < native:
            picks = [*range(lanes), *[0] * (native - lanes)]
            wide = [self.em.shuffle(a, Ssa("poison", a.type), scalar, picks) for a in args]
            whole = self._call(symbol, vector_type(scalar, native), wide)
            return self.em.shuffle(whole, Ssa("poison", whole.type), scalar, range(lanes))
        half = lanes // 2
        parts = [
            self.math(name, [self.em.shuffle(a, Ssa("poison", a.type), scalar, picks) for a in args], dtype)
            for picks in (range(half), range(half, lanes))
        ]
        return self.em.shuffle(parts[0], parts[1], scalar, range(lanes))

    def _call(self, symbol: str, type_: str, args: Sequence[Ssa]) -> Ssa:
        self.em.declare(symbol, type_, [type_] * len(args))
        return self.em.pure(type_, f"call {type_} @{symbol}({', '.join(a.typed for a in args)})", *args)

    def _in_first_lane(self, value: Ssa, scalar: str, lanes: int) -> Ssa:
        type_ = vector_type(scalar, lanes)
        return self.em.pure(type_, f"insertelement {type_} zeroinitializer, {value.typed}, i64 0", value)

    def libm(self, name: str, args: Sequence[Ssa], dtype: DType) -> Ssa:
        """A libm function, lane by lane."""
        scalar, lanes = register_type(dtype), self.lanes(args[0])
        symbol = name + ("f" if dtype is DType.F32 else "")
        results = []
        for lane in range(lanes):
            picked = [self.em.lane(a, lane, scalar) for a in args]
            results.append(self._call(symbol, scalar, picked))
        return self.em.pack(results)
