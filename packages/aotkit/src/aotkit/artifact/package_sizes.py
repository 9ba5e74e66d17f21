"""Which sizes a package takes: what the program declares, narrowed to what the compiled code is right for.

Note [Sizes of a package]
    A program declares a range for each symbol. What the compile relied on beyond that (a guard) holds for the sizes of
    the example; where it does not hold in all of the range, the compile says so in a warning, and a call with another
    size names the input, the dimension and what is allowed. torch.export begins the range of a size that was declared
    without one at 2, to leave a size of 1 open; a package begins it at 1, and at 2 only where the code relies on that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from .._notices import warn_user
from .._size_text import FUNCTIONS, Tree, fold, symbols_in
from .guards import guards_hold
from .package_symbols import Multiple

__all__ = ["declared_ranges", "narrowed", "opened", "package_text", "place", "relation_text", "size_error"]

_MOST = 4096  # sizes of a range that are looked at one by one

Range = tuple[int, int | None]


@contextmanager
def opened(shape_env: Any) -> Iterator[None]:
    """While a program is compiled: sizes without declared bounds may be 1."""
    changed = {} if shape_env is None else {s: r for s, r in shape_env.var_to_range.items() if _is_open(r)}
    for symbol, known in changed.items():
        shape_env.var_to_range[symbol] = type(known)(1, known.upper)
    try:
        if changed:
            shape_env._update_version_counter()
        yield
    finally:
        for symbol, known in changed.items():
            shape_env.var_to_range[symbol] = known
        if changed:
            shape_env._update_version_counter()


def _is_open(bounds: Any) -> bool:
    return bool(bounds.lower == 2) and _upper(bounds) is None


def _upper(bounds: Any) -> int | None:
    high = bounds.upper
    # torch writes "no bound" as an infinity of its own, or as the largest integer of a machine word.
    return int(high) if getattr(high, "is_Integer", False) and high < (1 << 62) else None


def declared_ranges(
    constraints: Mapping[Any, Any], numbers: Mapping[str, str], multiples: Sequence[Multiple] = ()
) -> dict[str, Range]:
    """By the numbers of symbols; see Note [Sizes of a package]. ``multiples``: see Note [Multiples]."""
    ranges = {
        symbol: (1 if _is_open(bounds) else int(bounds.lower), _upper(bounds)) for symbol, bounds in constraints.items()
    }
    for multiple in multiples:
        low, high = ranges[multiple.symbol]
        ranges[multiple.size] = multiple.size_for(low), None if high is None else multiple.size_for(high)
    return {numbers[str(symbol)]: bounds for symbol, bounds in ranges.items() if str(symbol) in numbers}


def narrowed(
    ranges: Mapping[str, Range],
    guards: Sequence[Any],
    arguments: Sequence[Mapping[str, Any]],
    multiples: Mapping[str, Multiple] | None = None,
) -> dict[str, Range]:
    """``ranges`` without the ends that guards on one symbol exclude. Warns of sizes that were declared and are not
    accepted, by more than a range that torch began at 2. ``multiples``: by the numbers of their sizes."""
    result: dict[str, Range] = {}
    for symbol, (low, high) in ranges.items():
        own = [guard for guard in guards if symbols_in(guard) == {symbol}]
        last = low + _MOST if high is None else min(high, low + _MOST)
        multiple = (multiples or {}).get(symbol)
        step, least = (1, 1) if multiple is None else (multiple.factor, multiple.size_for(1))
        accepted = [size for size in range(low, last + 1, step) if guards_hold(own, {symbol: size})]
        begin, end = (accepted[0], accepted[-1]) if accepted else (low, last)
        # Multiples of a number, say, go on to the end though the last size is none of them.
        apart = max((after - before for before, after in pairwise(accepted)), default=step)
        goes_on = last - end < apart
        if goes_on and high is not None:
            behind = range(high, max(low - 1, high - apart), -1)
            end = next((size for size in behind if guards_hold(own, {symbol: size})), end)
        result[symbol] = (begin, None if goes_on and high is None else end)
        missing = [size for size in range(low, last + 1, step) if size not in set(accepted)]
        if (missing or result[symbol][1] != high) and not (high is None and goes_on and missing == [least]):
            warn_user(_warning(place(symbol, arguments), (low, high), result[symbol], missing), UserWarning)
    return result


def _warning(where: str, declared: Range, taken: Range, missing: Sequence[int]) -> str:
    inside = [size for size in missing if taken[0] < size and (taken[1] is None or size < taken[1])]
    some = f" without {', '.join(map(str, inside[:5]))}{', ..' if len(inside) > 5 else ''}" if inside else ""
    return (
        f"the package takes sizes of {_range_text(taken)}{some} in {where}, and the program declares "
        f"{_range_text(declared)}: the compiled code is right for those only. Export with an example of another size "
        "for the others, or declare the range that is needed"
    )


def _range_text(bounds: Range) -> str:
    low, high = bounds
    return f"{low} or more" if high is None else f"{low} to {high}" if low != high else f"{low}"


def place(symbol: str, arguments: Sequence[Mapping[str, Any]]) -> str:
    """Where ``symbol`` is read: ``dimension 0 of x``."""
    for argument in arguments:
        if argument["symbol"] == symbol:
            return str(argument["name"])
        if symbol in argument["shape"]:
            return f"dimension {argument['shape'].index(symbol)} of {argument['name']}"
    for argument in arguments:
        if symbol in argument["stride"]:
            return f"the stride of dimension {argument['stride'].index(symbol)} of {argument['name']}"
    return "an argument"


def package_text(manifest: Mapping[str, Any], variant: Mapping[str, Any], weights: Mapping[str, Any]) -> str:
    """What a package takes and what it was made for, as a person reads it."""
    lines = [
        f"{name}: {' '.join(value) if isinstance(value, list) else value}"
        for name, value in variant["environment"].items()
    ]
    others = [other["environment"]["processor"] for other in manifest["variants"] if other is not variant]
    lines += [f"also for: {', '.join(others)}"] if others else []
    arguments = manifest["arguments"]
    for argument in arguments:
        sizes = ", ".join(map(str, argument["shape"]))
        lines.append(
            f"argument {argument['name']}: " + (f"{argument['dtype']} [{sizes}]" if argument["dtype"] else "int")
        )
    for symbol, bounds in manifest["ranges"].items():
        lines.append(f"size {symbol}, {place(symbol, arguments)}: {_range_text((bounds[0], bounds[1]))}")
    guards = variant["artifact"]["guards"]
    lines += [f"sizes with {relation_text(guard, arguments)}" for guard in guards if len(symbols_in(guard)) > 1]
    nbytes = sum(weight.numel() * weight.element_size() for weight in weights.values())
    return "\n".join([*lines, f"{len(weights)} weights, {nbytes / 1e6:.1f} MB"])


def size_error(symbol: str, size: int, bounds: Sequence[int | None], arguments: Sequence[Mapping[str, Any]]) -> str:
    """What to say of a size out of its range."""
    low, high = bounds
    return f"{place(symbol, arguments)} is {size}; the package was compiled for {_range_text((low or 0, high))}"


def relation_text(guard: Tree, arguments: Sequence[Mapping[str, Any]]) -> str:
    """A guard as words: ``dimension 0 of x == dimension 1 of y``."""
    return str(fold(guard, lambda symbol: place(symbol, arguments), _in_words))


def _in_words(operation: str, operands: Sequence[Any]) -> str:
    texts = list(map(str, operands))
    if operation == "not" or operation in FUNCTIONS:
        return f"{operation}({', '.join(texts)})"
    return f"({f' {operation} '.join(texts)})"
