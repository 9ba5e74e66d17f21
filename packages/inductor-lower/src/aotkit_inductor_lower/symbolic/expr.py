"""Integer index expressions: a small canonical type for sizes, strides and addresses.

An :class:`Expr` is a sum of integer multiples of products of atoms; an atom is a :class:`Symbol` or a
:class:`Call` of ``floordiv``, ``mod``, ``min`` or ``max``. Building one canonicalises it, so two expressions
that expand to the same polynomial are equal and hash alike. Arithmetic is on mathematical integers, division
rounds towards minus infinity as in Python.

Note [Why not sympy]
    Lowering builds tens of expressions per graph node. sympy takes about 36 microseconds for each, imports in
    0.3 s and parses with ``eval``. These cover what strided addressing needs and nothing more; SymInts of the
    traced graph are converted once, where they enter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

__all__ = ["Atom", "Call", "Expr", "ExprLike", "Symbol", "SymbolKind", "floordiv", "mod", "smax", "smin", "sym", "to_expr"]


class SymbolKind(Enum):
    """What a symbol stands for. The value is the sigil it is printed with."""

    INDEX = ""  # a loop variable, in [0, its range)
    SIZE = "$"  # a dynamic size of the graph, an i64 kernel argument
    VALUE = "%"  # a computed i64 value of the kernel body (indirect addressing)


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named unknown."""

    name: str
    kind: SymbolKind = SymbolKind.INDEX

    def __str__(self) -> str:
        return self.kind.value + self.name


class Call:
    """``floordiv``, ``mod``, ``min`` or ``max`` of expressions: an atom that does not expand further."""

    __slots__ = ("args", "fn", "_hash")

    def __init__(self, fn: str, args: tuple[Expr, ...]) -> None:
        self.fn = fn
        self.args = args
        self._hash = hash((fn, args))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Call) and self._hash == other._hash and self.fn == other.fn and self.args == other.args
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        if self.fn == "floordiv":
            return f"({self.args[0]})//({self.args[1]})"
        if self.fn == "mod":
            return f"({self.args[0]})%({self.args[1]})"
        return f"{self.fn}({', '.join(map(str, self.args))})"

    def __repr__(self) -> str:
        return f"Call({self})"


Atom = Symbol | Call
Monomial = tuple[Atom, ...]
ExprLike = "Expr | int | Symbol"


class Expr:
    """A canonical integer expression. Immutable; compares and hashes by value."""

    __slots__ = ("terms", "_hash", "__dict__")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        """Use :func:`to_expr`, :func:`sym` and arithmetic instead; ``terms`` must already be canonical."""
        self.terms = terms
        self._hash = hash(terms)

    # -- queries -----------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value if this is a plain integer, else ``None``."""
        if not self.terms:
            return 0
        if len(self.terms) == 1 and not self.terms[0][0]:
            return self.terms[0][1]
        return None

    @property
    def symbol(self) -> Symbol | None:
        """The symbol if this is exactly one symbol, else ``None``."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            atom = self.terms[0][0][0]
            return atom if isinstance(atom, Symbol) else None
        return None

    @cached_property
    def symbols(self) -> frozenset[Symbol]:
        """Every symbol, also inside calls."""
        found: set[Symbol] = set()
        for monomial, _ in self.terms:
            for atom in monomial:
                if isinstance(atom, Symbol):
                    found.add(atom)
                else:
                    for arg in atom.args:
                        found |= arg.symbols
        return frozenset(found)

    def coefficient(self, symbol: Symbol) -> Expr | None:
        """``c`` with ``self == c*symbol + rest``, rest free of the symbol; ``None`` if it is not linear in it."""
        total: dict[Monomial, int] = {}
        for monomial, factor in self.terms:
            count = sum(atom == symbol for atom in monomial)
            if any(isinstance(a, Call) and any(symbol in arg.symbols for arg in a.args) for a in monomial) or count > 1:
                return None
            if count:
                rest = tuple(atom for atom in monomial if atom != symbol)
                total[rest] = total.get(rest, 0) + factor
        return _from_dict(total)

    def substitute(self, env: Mapping[Symbol, Expr]) -> Expr:
        """Replace symbols, also inside calls, and canonicalise again."""
        if not env or self.symbols.isdisjoint(env):
            return self
        result: dict[Monomial, int] = {}
        for monomial, factor in self.terms:
            product = _from_dict({(): factor})
            for atom in monomial:
                product = product * _substitute_atom(atom, env)
            for other, coefficient in product.terms:
                result[other] = result.get(other, 0) + coefficient
        return _from_dict(result)

    def evaluate(self, env: Mapping[Symbol, int]) -> int:
        """The value with every symbol given. Also works on anything with integer operators (tensors)."""
        total = 0
        for monomial, factor in self.terms:
            product = factor
            for atom in monomial:
                product = product * (env[atom] if isinstance(atom, Symbol) else _evaluate_call(atom, env))
            total = total + product
        return total

    # -- arithmetic --------------------------------------------------------------------------------

    def __add__(self, other: Expr | int | Symbol) -> Expr:
        other = to_expr(other)
        if not other.terms:
            return self
        if not self.terms:
            return other
        total = dict(self.terms)
        for monomial, factor in other.terms:
            total[monomial] = total.get(monomial, 0) + factor
        return _from_dict(total)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple((m, -f) for m, f in self.terms))

    def __sub__(self, other: Expr | int | Symbol) -> Expr:
        return self + (-to_expr(other))

    def __rsub__(self, other: Expr | int | Symbol) -> Expr:
        return to_expr(other) + (-self)

    def __mul__(self, other: Expr | int | Symbol) -> Expr:
        other = to_expr(other)
        total: dict[Monomial, int] = {}
        for left, f in self.terms:
            for right, g in other.terms:
                monomial = tuple(sorted(left + right, key=_atom_key)) if left and right else left or right
                total[monomial] = total.get(monomial, 0) + f * g
        return _from_dict(total)

    __rmul__ = __mul__

    def __floordiv__(self, other: Expr | int | Symbol) -> Expr:
        return floordiv(self, to_expr(other))

    def __mod__(self, other: Expr | int | Symbol) -> Expr:
        return mod(self, to_expr(other))

    # -- identity ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, int):
            return self.constant == other
        return isinstance(other, Expr) and self._hash == other._hash and self.terms == other.terms

    def __hash__(self) -> int:
        return self._hash

    def __bool__(self) -> bool:
        raise TypeError("an index expression has no truth value; compare .constant or use symbolic.ranges")

    def __str__(self) -> str:
        if not self.terms:
            return "0"
        text = ""
        for monomial, factor in self.terms:
            body = "*".join(_atom_text(atom) for atom in monomial)
            sign, size = ("-", -factor) if factor < 0 else ("+", factor)
            piece = body if body and size == 1 else f"{size}*{body}" if body else str(size)
            text += f" {sign} {piece}" if text else (f"-{piece}" if sign == "-" else piece)
        return text

    def __repr__(self) -> str:
        return f"Expr({self})"


def to_expr(value: Expr | int | Symbol) -> Expr:
    """An expression from an int, a symbol or an expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Symbol):
        return Expr((((value,), 1),))
    return Expr((((), int(value)),)) if value else _ZERO


def sym(name: str, kind: SymbolKind = SymbolKind.INDEX) -> Expr:
    """The expression of one symbol."""
    return to_expr(Symbol(name, kind))


def floordiv(x: Expr | int | Symbol, d: Expr | int | Symbol) -> Expr:
    """``x // d`` rounded down. Splits off multiples of ``d`` and merges nested constant divisions."""
    x, d = to_expr(x), to_expr(d)
    if d == 1:
        return x
    if x.constant == 0:
        return _ZERO
    if x.constant is not None and d.constant:
        return to_expr(x.constant // d.constant)
    quotient, rest = _split_multiples(x, d)
    if rest.constant == 0:
        return quotient
    if quotient.terms:
        return quotient + floordiv(rest, d)
    inner = rest.terms[0][0][0] if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1 else None
    if isinstance(inner, Call) and inner.fn == "floordiv":  # (x // a) // b  ->  x // (a*b)
        return floordiv(inner.args[0], inner.args[1] * d)
    return _call("floordiv", (rest, d))


def mod(x: Expr | int | Symbol, d: Expr | int | Symbol) -> Expr:
    """``x % d`` with the sign of ``d``. Drops multiples of ``d``."""
    x, d = to_expr(x), to_expr(d)
    if d == 1:
        return _ZERO
    if x.constant is not None and d.constant:
        return to_expr(x.constant % d.constant)
    _, rest = _split_multiples(x, d)
    if rest.constant == 0:
        return _ZERO
    if rest.constant is not None and d.constant:
        return to_expr(rest.constant % d.constant)
    if len(rest.terms) == 1 and rest.terms[0][1] == 1 and len(rest.terms[0][0]) == 1:
        inner = rest.terms[0][0][0]
        if isinstance(inner, Call) and inner.fn == "mod":  # (x % (k*d)) % d  ->  x % d
            _, left = _split_multiples(inner.args[1], d)
            if left.constant == 0:
                return mod(inner.args[0], d)
    return _call("mod", (rest, d))


def smin(*args: Expr | int | Symbol) -> Expr:
    """The smallest of the arguments."""
    return _min_max("min", min, args)


def smax(*args: Expr | int | Symbol) -> Expr:
    """The largest of the arguments."""
    return _min_max("max", max, args)


# -- helpers -----------------------------------------------------------------------------------------


def _min_max(fn: str, pick: Callable[[Iterable[int]], int], args: tuple[Expr | int | Symbol, ...]) -> Expr:
    exprs = {to_expr(a) for a in args}
    constants = [c for c in (e.constant for e in exprs) if c is not None]
    rest = sorted((e for e in exprs if e.constant is None), key=str)
    if not rest:
        return to_expr(pick(constants))
    if constants:
        rest.append(to_expr(pick(constants)))
    return rest[0] if len(rest) == 1 else _call(fn, tuple(rest))


def _call(fn: str, args: tuple[Expr, ...]) -> Expr:
    return Expr((((Call(fn, args),), 1),))


def _atom_text(atom: Atom) -> str:
    text = str(atom)
    return f"({text})" if isinstance(atom, Call) and atom.fn in ("floordiv", "mod") else text


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, str(atom)) if isinstance(atom, Symbol) else (1, str(atom))


def _term_key(term: tuple[Monomial, int]) -> tuple[int, tuple[tuple[int, str], ...]]:
    return (0 if term[0] else 1, tuple(_atom_key(atom) for atom in term[0]))


def _from_dict(total: Mapping[Monomial, int]) -> Expr:
    """Drop zeros, rejoin quotient and remainder pairs, sort."""
    terms = {m: f for m, f in total.items() if f}
    if len(terms) > 1 and any(isinstance(a, Call) and a.fn == "mod" for m in terms for a in m):
        terms = _rejoin(terms)
    if len(terms) <= 1:
        return Expr(tuple(terms.items()))
    return Expr(tuple(sorted(terms.items(), key=_term_key)))


def _rejoin(terms: dict[Monomial, int]) -> dict[Monomial, int]:
    """``d*(x//d) + x%d -> x`` and ``c*((x//c)%b) + x%c -> x%(b*c)``, with any common factor."""
    for monomial, factor in terms.items():
        for position, atom in enumerate(monomial):
            if not (isinstance(atom, Call) and atom.fn == "mod"):
                continue
            x, d = atom.args
            others = monomial[:position] + monomial[position + 1 :]
            scale = Expr(((others, factor),))
            for partner, joined in _partners(x, d, terms):
                wanted = scale * d * partner
                if len(wanted.terms) == 1 and terms.get(wanted.terms[0][0]) == wanted.terms[0][1]:
                    rest = {m: f for m, f in terms.items() if m not in (monomial, wanted.terms[0][0])}
                    for m, f in (scale * joined).terms:
                        rest[m] = rest.get(m, 0) + f
                    return dict(_from_dict(rest).terms)
    return terms


def _partners(x: Expr, d: Expr, terms: Mapping[Monomial, int]) -> Iterable[tuple[Expr, Expr]]:
    yield floordiv(x, d), x
    quotient = floordiv(x, d)
    for monomial in terms:
        for atom in monomial:
            if isinstance(atom, Call) and atom.fn == "mod" and atom.args[0] == quotient:
                yield to_expr_call(atom), mod(x, atom.args[1] * d)


def to_expr_call(atom: Call) -> Expr:
    return Expr((((atom,), 1),))


def _split_multiples(x: Expr, d: Expr) -> tuple[Expr, Expr]:
    """``(q, r)`` with ``x == q*d + r``, taking every term that ``d`` (a constant or one product) divides."""
    if len(d.terms) != 1:
        return (to_expr(1), _ZERO) if x == d else (_ZERO, x)
    divisor, unit = d.terms[0]
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, factor in x.terms:
        reduced = _divide_monomial(monomial, divisor)
        if reduced is None or unit == 0:
            rest[monomial] = rest.get(monomial, 0) + factor
            continue
        whole, left = divmod(factor, unit)
        if left == 0:
            quotient[reduced] = quotient.get(reduced, 0) + whole
        elif not monomial and not divisor:
            quotient[()] = quotient.get((), 0) + whole
            rest[()] = rest.get((), 0) + left
        else:
            rest[monomial] = rest.get(monomial, 0) + factor
    return _from_dict(quotient), _from_dict(rest)


def _divide_monomial(monomial: Monomial, divisor: Monomial) -> Monomial | None:
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)


def _substitute_atom(atom: Atom, env: Mapping[Symbol, Expr]) -> Expr:
    if isinstance(atom, Symbol):
        return env[atom] if atom in env else to_expr(atom)
    args = tuple(arg.substitute(env) for arg in atom.args)
    return _BUILD[atom.fn](*args)


def _evaluate_call(atom: Call, env: Mapping[Symbol, int]) -> int:
    values = [arg.evaluate(env) for arg in atom.args]
    if atom.fn == "floordiv":
        return values[0] // values[1]
    if atom.fn == "mod":
        return values[0] % values[1]
    return (min if atom.fn == "min" else max)(values)


_ZERO = Expr(())
_BUILD: dict[str, Callable[..., Expr]] = {"floordiv": floordiv, "mod": mod, "min": smin, "max": smax}
