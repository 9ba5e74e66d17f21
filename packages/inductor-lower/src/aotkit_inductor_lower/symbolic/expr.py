"""Integer index expressions: a small canonical type for sizes, strides and addresses.

An :class:`Expr` is a sum of integer multiples of products of atoms; an atom is a :class:`Symbol` or a
:class:`Call` of ``floordiv``, ``mod``, ``min``, ``max`` or ``isqrt``. Building one canonicalises it, so two expressions
that expand to the same polynomial are equal and hash alike. Arithmetic is on mathematical integers, division
rounds towards minus infinity as in Python. Sizes are taken to be non-negative and divisors not zero.

Note [Why not sympy]
    Lowering builds tens of expressions per graph node. sympy takes about 36 microseconds for each, imports in
    0.3 s and parses with ``eval``. These cover what strided addressing needs and nothing more; SymInts of the
    traced graph are converted once, where they enter.

Note [Atoms are their text]
    Symbol and Call are subclasses of ``str`` whose value is the canonical text. Products are tuples of such
    strings and sums are tuples of (product, factor), so hashing, equality and ordering of all of them run in C
    on cached string hashes, without an intern table, and the order of terms is the same in every process.
    Printing is injective, which makes equal text the same as equal structure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from .terms import Symbol, SymbolKind, common_factor, divide_monomial, sum_text

__all__ = [
    "Atom",
    "Call",
    "Expr",
    "ExprLike",
    "Symbol",
    "SymbolKind",
    "build_call",
    "floordiv",
    "isqrt",
    "mod",
    "smax",
    "smin",
    "sym",
    "to_expr",
]


class Call(str):
    """``floordiv``, ``mod``, ``min``, ``max`` or ``isqrt`` of expressions: an atom that does not expand further."""

    __slots__ = ("args", "fn")
    fn: str
    args: tuple[Expr, ...]

    def __new__(cls, fn: str, args: tuple[Expr, ...]) -> Call:
        self = str.__new__(cls, _call_text(fn, args))
        self.fn = fn
        self.args = args
        return self

    def __getnewargs__(self) -> tuple[str, tuple[Expr, ...]]:  # type: ignore[override]
        return self.fn, self.args

    def __repr__(self) -> str:
        return f"Call({self!s})"


Atom = Symbol | Call
Monomial = tuple[Atom, ...]
Term = tuple[Monomial, int]


class Expr:
    """A canonical integer expression. Immutable; compares and hashes by value.

    ``terms``: (product of atoms, factor) pairs, sorted by the products' text, a constant last.
    """

    __slots__ = ("_calls", "_hash", "_symbols", "_text", "terms")
    terms: tuple[Term, ...]
    _calls: bool
    _hash: int | None
    _symbols: frozenset[Symbol] | None
    _text: str | None

    def __init__(self, terms: tuple[Term, ...], calls: bool = True) -> None:
        """Use :func:`to_expr`, :func:`sym` and arithmetic instead; ``terms`` must already be canonical.
        ``calls`` may be false only if no term holds a :class:`Call`."""
        self.terms = terms
        self._calls = calls
        self._hash = None
        self._symbols = None
        self._text = None

    # -- queries -----------------------------------------------------------------------------------

    @property
    def constant(self) -> int | None:
        """The value if this is a plain integer, else ``None``."""
        terms = self.terms
        if not terms:
            return 0
        if len(terms) == 1 and not terms[0][0]:
            return terms[0][1]
        return None

    @property
    def symbol(self) -> Symbol | None:
        """The symbol if this is exactly one symbol, else ``None``."""
        atom = _single_atom(self)
        return atom if isinstance(atom, Symbol) else None

    @property
    def symbols(self) -> frozenset[Symbol]:
        """Every symbol, also inside calls."""
        if self._symbols is None:
            found: set[Symbol] = set()
            for monomial, _ in self.terms:
                for atom in monomial:
                    if isinstance(atom, Symbol):
                        found.add(atom)
                    else:
                        for arg in atom.args:
                            found |= arg.symbols
            self._symbols = frozenset(found)
        return self._symbols

    def coefficient(self, symbol: Symbol) -> Expr | None:
        """``c`` with ``self == c*symbol + rest``, rest free of the symbol; ``None`` if it is not linear in it."""
        total: dict[Monomial, int] = {}
        for monomial, factor in self.terms:
            count = monomial.count(symbol)
            if count > 1:
                return None
            if self._calls and any(
                isinstance(a, Call) and any(symbol in arg.symbols for arg in a.args) for a in monomial
            ):
                return None
            if count:
                position = monomial.index(symbol)
                rest = monomial[:position] + monomial[position + 1 :]
                total[rest] = total.get(rest, 0) + factor
        return _from_dict(total, self._calls)

    def substitute(self, env: Mapping[Symbol, Expr]) -> Expr:
        """Replace symbols, also inside calls, and canonicalise again."""
        if not env or self.symbols.isdisjoint(env):
            return self
        result: dict[Monomial, int] = {}
        calls = False
        for monomial, factor in self.terms:
            product = _substitute_atom(monomial[0], env) if monomial else _ONE
            for atom in monomial[1:]:
                product = product * _substitute_atom(atom, env)
            calls = calls or product._calls
            for other, coefficient in product.terms:
                result[other] = result.get(other, 0) + coefficient * factor
        return _from_dict(result, calls)

    def evaluate(self, env: Mapping[Symbol, int]) -> int:
        """The value with every symbol given. Raises ``KeyError`` for a missing one and ``ZeroDivisionError``."""
        total = 0
        for monomial, factor in self.terms:
            product = factor
            for atom in monomial:
                product *= env[atom] if isinstance(atom, Symbol) else _evaluate_call(atom, env)
            total += product
        return total

    # -- arithmetic --------------------------------------------------------------------------------

    def __add__(self, other: Expr | int | Symbol) -> Expr:
        if isinstance(other, int):
            return _add_int(self, other)
        if not isinstance(other, Expr):
            other = to_expr(other)
        left, right = self.terms, other.terms
        if not right:
            return self
        if not left:
            return other
        if len(right) == 1 and not right[0][0]:
            return _add_int(self, right[0][1])
        total = dict(left)
        for monomial, factor in right:
            total[monomial] = total.get(monomial, 0) + factor
        return _from_dict(total, self._calls or other._calls)

    __radd__ = __add__

    def __neg__(self) -> Expr:
        return Expr(tuple([(m, -f) for m, f in self.terms]), self._calls)

    def __sub__(self, other: Expr | int | Symbol) -> Expr:
        if isinstance(other, int):
            return _add_int(self, -other)
        return self + -to_expr(other)

    def __rsub__(self, other: Expr | int | Symbol) -> Expr:
        return -self + other

    def __mul__(self, other: Expr | int | Symbol) -> Expr:
        if not isinstance(other, int):
            other = to_expr(other)
            if len(other.terms) == 1 and not other.terms[0][0]:
                other = other.terms[0][1]
        if isinstance(other, int):
            if other == 1:
                return self
            return Expr(tuple([(m, f * other) for m, f in self.terms]), self._calls) if other else _ZERO
        if len(self.terms) == 1 and not self.terms[0][0]:
            return other * self.terms[0][1]
        total: dict[Monomial, int] = {}
        for left, f in self.terms:
            for right, g in other.terms:
                monomial = tuple(sorted(left + right)) if left and right else left or right
                total[monomial] = total.get(monomial, 0) + f * g
        return _from_dict(total, self._calls or other._calls)

    __rmul__ = __mul__

    def __floordiv__(self, other: Expr | int | Symbol) -> Expr:
        return floordiv(self, other)

    def __rfloordiv__(self, other: Expr | int | Symbol) -> Expr:
        return floordiv(other, self)

    def __mod__(self, other: Expr | int | Symbol) -> Expr:
        return mod(self, other)

    def __rmod__(self, other: Expr | int | Symbol) -> Expr:
        return mod(other, self)

    # -- identity ----------------------------------------------------------------------------------

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, Expr):
            return self.terms == other.terms
        if isinstance(other, int):
            return self.constant == other
        return NotImplemented

    def __hash__(self) -> int:
        # A constant hashes like its int, because it also equals it.
        if self._hash is None:
            constant = self.constant
            self._hash = hash(self.terms if constant is None else constant)
        return self._hash

    def __bool__(self) -> bool:
        raise TypeError("an index expression has no truth value; compare .constant or use symbolic.ranges")

    def __str__(self) -> str:
        if self._text is None:
            atom = _single_atom(self)
            stripped = isinstance(atom, Call) and atom.fn in ("floordiv", "mod")
            self._text = atom[1:-1] if atom is not None and stripped else sum_text(self.terms)
        return self._text

    def __repr__(self) -> str:
        return f"Expr({self})"


ExprLike = Expr | int | Symbol


def to_expr(value: Expr | int | Symbol) -> Expr:
    """An expression from an int, a symbol or an expression."""
    if isinstance(value, Expr):
        return value
    if isinstance(value, Symbol):
        return Expr((((value,), 1),), False)
    if not isinstance(value, int):
        raise TypeError(f"an index expression is made of ints, symbols and expressions, not {type(value).__name__}")
    return Expr((((), int(value)),), False) if value else _ZERO


def sym(name: str, kind: SymbolKind = SymbolKind.INDEX) -> Expr:
    """The expression of one symbol."""
    return Expr((((Symbol(name, kind),), 1),), False)


def floordiv(x: Expr | int | Symbol, d: Expr | int | Symbol) -> Expr:
    """``x // d`` rounded down (0 if ``d`` is). Splits off multiples of ``d``, cancels factors and merges divisions."""
    x, d = to_expr(x), to_expr(d)
    divisor = d.constant
    if divisor == 0:
        return _ZERO  # the size of a loop that never runs
    if divisor == 1 or not x.terms:
        return x
    if divisor is not None and x.constant is not None:
        return to_expr(x.constant // divisor)
    quotient, rest = _split_multiples(x, d)
    if not rest.terms:
        return quotient
    if quotient.terms:
        return quotient + floordiv(rest, d)
    common = common_factor((*d.terms, *x.terms))
    if common is not None:
        return floordiv(_exact_quotient(x, common), _exact_quotient(d, common))
    inner = _single_atom(x)
    if isinstance(inner, Call) and inner.fn == "floordiv" and (divisor is None or divisor > 0):
        return floordiv(inner.args[0], inner.args[1] * d)  # (x // a) // b  ->  x // (a*b)
    return _call("floordiv", (x, d))


def mod(x: Expr | int | Symbol, d: Expr | int | Symbol) -> Expr:
    """``x % d`` with the sign of ``d``. Drops multiples of ``d`` and takes out common factors."""
    x, d = to_expr(x), to_expr(d)
    divisor = d.constant
    if divisor == 0:
        return _ZERO  # as in a quotient
    if divisor == 1:
        return _ZERO
    _, rest = _split_multiples(x, d)
    if not rest.terms:
        return _ZERO
    if divisor is not None and rest.constant is not None:
        return to_expr(rest.constant % divisor)
    common = common_factor((*d.terms, *rest.terms))
    if common is not None:  # (g*x) % (g*d)  ->  g * (x % d)
        return mod(_exact_quotient(rest, common), _exact_quotient(d, common)) * Expr((common,))
    inner = _single_atom(rest)
    if isinstance(inner, Call) and inner.fn == "mod":  # (x % (k*d)) % d  ->  x % d
        _, left = _split_multiples(inner.args[1], d)
        if not left.terms:
            return mod(inner.args[0], d)
    return _call("mod", (rest, d))


def smin(*args: Expr | int | Symbol) -> Expr:
    """The smallest of the arguments."""
    return _min_max("min", args)


def smax(*args: Expr | int | Symbol) -> Expr:
    """The largest of the arguments."""
    return _min_max("max", args)


def isqrt(x: Expr | int | Symbol) -> Expr:
    """The square root of ``x``, which is at least 0, rounded down."""
    x = to_expr(x)
    return _call("isqrt", (x,)) if x.constant is None else to_expr(math.isqrt(x.constant))


# -- helpers -----------------------------------------------------------------------------------------


def _add_int(x: Expr, value: int) -> Expr:
    terms = x.terms
    if not value:
        return x
    if terms and not terms[-1][0]:
        value += terms[-1][1]
        return Expr((*terms[:-1], ((), value)) if value else terms[:-1], x._calls)
    return Expr((*terms, ((), int(value))), x._calls)


def _single_atom(x: Expr) -> Atom | None:
    """The atom if ``x`` is exactly one atom."""
    terms = x.terms
    if len(terms) == 1 and terms[0][1] == 1 and len(terms[0][0]) == 1:
        return terms[0][0][0]
    return None


def _min_max(fn: str, args: Iterable[Expr | int | Symbol]) -> Expr:
    pick = min if fn == "min" else max
    constants: list[int] = []
    rest: set[Expr] = set()
    pending = [to_expr(a) for a in args]
    if not pending:
        raise TypeError(f"{fn} of no index expressions")
    while pending:
        expr = pending.pop()
        constant, atom = expr.constant, _single_atom(expr)
        if constant is not None:
            constants.append(constant)
        elif isinstance(atom, Call) and atom.fn == fn:
            pending.extend(atom.args)
        else:
            rest.add(expr)
    if not rest:
        return to_expr(pick(constants))
    ordered = sorted(rest, key=str)
    if constants:
        ordered.append(to_expr(pick(constants)))
    return ordered[0] if len(ordered) == 1 else _call(fn, tuple(ordered))


def _call(fn: str, args: tuple[Expr, ...]) -> Expr:
    return Expr((((Call(fn, args),), 1),))


def _call_text(fn: str, args: tuple[Expr, ...]) -> str:
    if fn in ("floordiv", "mod"):
        left, right = (_operand_text(arg) for arg in args)
        return f"({left} // {right})" if fn == "floordiv" else f"({left} % {right})"
    return f"{fn}({', '.join(map(str, args))})"


def _operand_text(x: Expr) -> str:
    atom = _single_atom(x)
    if atom is not None:
        return str(atom)
    constant = x.constant
    return str(constant) if constant is not None and constant >= 0 else f"({x})"


def _from_dict(total: dict[Monomial, int], calls: bool = True) -> Expr:
    """Drop zeros, rejoin quotient and remainder pairs, sort with the constant last."""
    if calls and len(total) > 1:
        total = _rejoin({m: f for m, f in total.items() if f})
    constant = total.pop((), 0)
    terms = [term for term in total.items() if term[1]]
    if len(terms) > 1:
        terms.sort()
    if constant:
        terms.append(((), constant))
    return Expr(tuple(terms), calls)


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
                if _contains(terms, wanted):
                    rest = dict(terms)
                    for taken, amount in (*wanted.terms, (monomial, factor)):
                        rest[taken] = rest.get(taken, 0) - amount
                    for m, f in (scale * joined).terms:
                        rest[m] = rest.get(m, 0) + f
                    return dict(_from_dict(rest).terms)
    return terms


def _contains(terms: Mapping[Monomial, int], wanted: Expr) -> bool:
    """Whether every term of ``wanted`` but the constant is there with just that factor, and there is one."""
    return any(m for m, _ in wanted.terms) and all(terms.get(m) == f for m, f in wanted.terms if m)


def _partners(x: Expr, d: Expr, terms: Mapping[Monomial, int]) -> Iterable[tuple[Expr, Expr]]:
    quotient = floordiv(x, d)
    yield quotient, x
    for monomial in terms:
        for atom in monomial:
            if isinstance(atom, Call) and atom.fn == "mod" and atom.args[0] == quotient:
                if (d.constant or 0) < 0 or (atom.args[1].constant or 0) < 0:
                    continue
                yield Expr((((atom,), 1),)), mod(x, atom.args[1] * d)


def _split_multiples(x: Expr, d: Expr) -> tuple[Expr, Expr]:
    """``(q, r)`` with ``x == q*d + r``, taking every term that ``d`` (a constant or one product) divides, or of a sum
    all of them or none."""
    if len(d.terms) != 1:
        found, left_over = divide_by_sum(x, d)
        return (_ZERO, x) if left_over.terms else (found, _ZERO)
    divisor, unit = d.terms[0]
    quotient: dict[Monomial, int] = {}
    rest: dict[Monomial, int] = {}
    for monomial, factor in x.terms:
        reduced = divide_monomial(monomial, divisor) if divisor else monomial
        whole, left = divmod(factor, unit)
        if reduced is not None and left == 0:
            quotient[reduced] = whole
        elif not monomial and not divisor:
            quotient[()] = whole
            rest[()] = left
        else:
            rest[monomial] = factor
    if not quotient:
        return _ZERO, x
    return _from_dict(quotient, x._calls), _from_dict(rest, x._calls)


def divide_by_sum(x: Expr, d: Expr) -> tuple[Expr, Expr]:
    """``(q, r)`` with ``x == q*d + r``, as numbers are divided: by the leading term of ``d``, the one of most atoms,
    which divides no term of ``r``. The leading term of a product is that of the factors' leading terms."""
    monomial, unit = max(d.terms, key=_rank)
    rest, quotient, left_over = x, _ZERO, _ZERO
    while rest.terms:
        leading = max(rest.terms, key=_rank)
        term, reduced = Expr((leading,), x._calls), divide_monomial(leading[0], monomial)
        if reduced is None or leading[1] % unit:
            rest, left_over = rest - term, left_over + term
        else:
            part = Expr(((reduced, leading[1] // unit),), x._calls)
            rest, quotient = rest - part * d, quotient + part
        if any(_rank(other) >= _rank(leading) for other in rest.terms):
            return _ZERO, x  # quotients and remainders were joined again
    return quotient, left_over


def _rank(term: Term) -> tuple[int, Monomial]:
    return len(term[0]), term[0]


def _exact_quotient(x: Expr, common: Term) -> Expr:
    divided = {}
    for monomial, factor in x.terms:
        reduced = divide_monomial(monomial, common[0])
        assert reduced is not None
        divided[reduced] = factor // common[1]
    return _from_dict(divided, x._calls)


def _substitute_atom(atom: Atom, env: Mapping[Symbol, Expr]) -> Expr:
    if isinstance(atom, Symbol):
        found = env.get(atom)
        return to_expr(atom) if found is None else found
    args = tuple([arg.substitute(env) for arg in atom.args])
    return build_call(atom.fn, args)


def build_call(fn: str, args: Iterable[Expr]) -> Expr:
    """A call with these arguments, canonicalised again."""
    if fn in ("min", "max"):
        return _min_max(fn, args)
    if fn == "isqrt":
        return isqrt(*args)
    return floordiv(*args) if fn == "floordiv" else mod(*args)


def _evaluate_call(atom: Call, env: Mapping[Symbol, int]) -> int:
    values = [arg.evaluate(env) for arg in atom.args]
    if atom.fn == "floordiv":
        return values[0] // values[1]
    if atom.fn == "mod":
        return values[0] % values[1]
    if atom.fn == "isqrt":
        return math.isqrt(max(values[0], 0))  # an estimate may be of a size that cannot be
    return (min if atom.fn == "min" else max)(values)


_ZERO = Expr((), False)
_ONE = Expr((((), 1),), False)
