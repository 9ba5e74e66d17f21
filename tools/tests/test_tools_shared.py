"""The files that packages share: equal everywhere, and what they do."""

from __future__ import annotations

import ast
import enum
import json
import math
import random
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest
import sympy
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import aotkit_functionalize.symbols
from aotkit._size_text import (
    FUNCTIONS,
    SizeTextError,
    evaluate_tree,
    fold,
    parse_size,
    scan_size,
    symbols_in,
    write_size,
)
from aotkit.artifact import guards
from aotkit_cache._observer import SILENT
from aotkit_inductor_lower.symbolic import ComputedSizes, SymbolKind, with_computed
from aotkit_inductor_lower.symbolic import Symbol as IndexSymbol
from aotkit_inductor_lower.symbolic.text import ScanError, parse_expr
from aotkit_partition._records import Format
from aotkit_runtime_wrappers import dims
from aotkit_runtime_wrappers.errors import PlanError
from tools import vendor

CASES: dict[str, Any] = tomllib.loads((vendor.SHARED / "size_cases.toml").read_text())
SYMBOLS: Mapping[str, int] = CASES["symbols"]


def test_each_copy_is_equal_to_its_original_and_another_one_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert vendor.main(["--check"]) == 0
    original, copy = tmp_path / "original.py", tmp_path / "copy.py"
    original.write_text("x = 1\n")
    monkeypatch.setattr(vendor, "copies", lambda: [(original, copy)])
    monkeypatch.setattr(vendor, "ROOT", tmp_path)
    assert vendor.main(["--check"]) == 1 and not copy.exists() and "copy.py differs" in capsys.readouterr().out
    assert vendor.main([]) == 0 and copy.read_bytes() == original.read_bytes()
    assert vendor.main(["--check"]) == 0


def test_no_package_has_a_copy_that_is_not_compared() -> None:
    compared = {copy for _, copy in vendor.copies()}
    for name in vendor.USERS:
        assert set((vendor.ROOT / "packages").glob(f"*/src/*/{name}")) == {c for c in compared if c.name == name}


# -- sizes -----------------------------------------------------------------------------------------------------------


def in_guards(text: str) -> Any:
    return guards.evaluate(parse_size(text), SYMBOLS)


def in_dims(text: str) -> Any:
    assert dims.symbols_of([text]) <= SYMBOLS.keys()
    return dims.evaluate(text, SYMBOLS)


def in_expressions(text: str) -> Any:
    expr = parse_expr(text)
    assert all(symbol.kind is SymbolKind.INDEX for symbol in expr.symbols)
    return expr.evaluate({symbol: SYMBOLS[symbol.name] for symbol in expr.symbols})


ALL_KINDS = {"power", "comparison", "float", "rounding"}
READERS: dict[str, tuple[Callable[[str], Any], set[str], type[Exception]]] = {
    "the parser": (lambda text: evaluate_tree(parse_size(text), SYMBOLS), ALL_KINDS, ValueError),
    "guards of aotkit": (in_guards, ALL_KINDS, ValueError),
    "dimensions of runtime-wrappers": (in_dims, {"power", "rounding"}, PlanError),
    "expressions of inductor-lower": (in_expressions, set(), ScanError),
}


@pytest.mark.parametrize("case", CASES["case"], ids=lambda case: case["text"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_gives_the_value_or_refuses_the_kind(reader: str, case: Mapping[str, Any]) -> None:
    read, kinds, error = READERS[reader]
    if "kind" in case and case["kind"] not in kinds:
        with pytest.raises(error):
            read(case["text"])
        return
    assert read(case["text"]) == case["value"] == eval(case["text"].strip(), {**vars(math)}, dict(SYMBOLS))


@pytest.mark.parametrize("text", CASES["refused"]["texts"])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_what_is_no_size(reader: str, text: str) -> None:
    read, _, error = READERS[reader]
    with pytest.raises(error):
        read(text)


@pytest.mark.parametrize("case", CASES["case"], ids=lambda case: case["text"])
def test_the_text_of_a_tree_is_what_python_would_write(case: Mapping[str, Any]) -> None:
    tree = parse_size(case["text"])
    text = write_size(tree)
    assert parse_size(text) == tree
    assert ast.unparse(ast.parse(case["text"].strip(), mode="eval")) == case["python"]
    if case.get("kind") != "comparison":  # where `ast` writes more parentheses than are needed
        assert text == case["python"]
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        assert symbols_in(tree) == names - FUNCTIONS


def random_text(draw: random.Random, depth: int) -> str:
    kind = draw.randrange(8) if depth else 0
    if kind == 0:
        return draw.choice(["s0", "s1", "s2", str(draw.randint(0, 5))])
    if kind == 1:
        return f"-({random_text(draw, depth - 1)})"
    if kind == 2:
        return f"({random_text(draw, depth - 1)})"
    if kind == 3:
        return f"{draw.choice(['min', 'max'])}({random_text(draw, depth - 1)},{random_text(draw, depth - 1)})"
    return f"{random_text(draw, depth - 1)}{draw.choice(['+', ' - ', '*', ' // ', '%'])}{random_text(draw, depth - 1)}"


def test_random_texts_mean_what_they_mean_in_python_and_are_read_back_from_their_trees() -> None:
    draw, read = random.Random(0), 0
    for _ in range(2000):
        text = random_text(draw, 4)
        try:
            tree = parse_size(text)
        except SizeTextError as error:  # a divisor that is 0 is refused as a text
            assert "division by zero" in str(error)
            with pytest.raises(ZeroDivisionError):
                eval(text, {}, dict(SYMBOLS))
            continue
        assert parse_size(write_size(tree)) == tree, text
        try:
            expected = eval(text, {}, dict(SYMBOLS))
        except ZeroDivisionError:
            continue
        read += 1
        assert evaluate_tree(tree, SYMBOLS) == expected == eval(write_size(tree), {}, dict(SYMBOLS)), text
    assert read > 1000


def test_a_tree_becomes_what_a_reader_makes_of_it() -> None:
    tree = parse_size("$s0*4 % %v1")
    assert tree == ("%", ("*", "$s0", 4), "%v1") and symbols_in(tree) == {"$s0", "%v1"}
    assert fold(tree, str.upper, lambda sign, operands: f"({sign} {operands[0]} {operands[1]})") == "(% (* $S0 4) %V1)"
    assert scan_size("loop r0 < 64*i0 + 3 lanes", 10) == (("+", ("*", 64, "i0"), 3), 19)
    assert scan_size("a < b") == ("a", 1)
    with pytest.raises(ValueError, match="column 6: expected the end of the expression, found '& 2'"):
        parse_size("s0*3 & 2")


def test_sizes_of_captured_graphs_are_written_in_the_language() -> None:
    from sympy import Symbol
    from torch.utils._sympy.functions import FloorDiv, Max, Mod

    a, b = Symbol("s0", integer=True, positive=True), Symbol("s1", integer=True, positive=True)
    for expr in (
        a * b + 1,
        FloorDiv(a - 3, b),
        Mod(a, b) * 2 - a**2,
        Max(a, b, 2) * -1,
        FloorDiv(a, 2) * FloorDiv(b, 2),
    ):
        text = aotkit_functionalize.symbols._text(expr)
        assert evaluate_tree(parse_size(text), SYMBOLS) == int(expr.subs({a: 7, b: 3}))


FLOATS: Mapping[str, Callable[[Any], Any]] = {
    "scaled": lambda n: math.trunc(n * 1.7),
    "scaled down": lambda n: math.floor(n * 0.7),
    "scaled up": lambda n: math.ceil(n * 0.3),
    "rounded": lambda n: round(n * 0.1),
    "halves": lambda n: round(n / 2) + round(n / 4),
    "quotient": lambda n: math.trunc(n / 3.3) + math.ceil(n / 7),
    "of a quotient": lambda n: math.trunc(n / 3 * 2.0) + math.floor(100 / (n + 1) * n),
    "moved": lambda n: math.trunc(n * 0.3 - 9.7),
    "root": lambda n: math.ceil(n**0.5) + round(n**0.5),
    "power": lambda n: math.floor(n**0.75),
    "limited": lambda n: math.trunc(torch.sym_min(n * 1.3, 1000.0)),
    "nested": lambda n: math.trunc(math.trunc(n * 1.7) * 0.3) * 2 + n,
}
LARGE = (2**31 - 1, 2**31, 2**31 + 1, 10**12 + 7, 2**52 - 1, 2**52 + 1, 2**53 - 1, 2**53)


def in_size_texts(expression: Any) -> Callable[[int], int]:
    text = aotkit_functionalize.symbols._text(expression)
    return lambda n: dims.evaluate(text, {"s0": n})


def in_stored_guards(expression: Any) -> Callable[[int], int]:
    tree = json.loads(json.dumps(guards.tree_of(expression, {"s0": "d0"})))
    return lambda n: guards.evaluate(tree, {"d0": n})


def in_computed_sizes(expression: Any) -> Callable[[int], int]:
    sizes = ComputedSizes()
    expr = sizes.convert(expression, str, lambda part: True)
    symbol = IndexSymbol("s0", SymbolKind.SIZE)
    return lambda n: expr.evaluate(with_computed(sizes.texts.items(), {symbol: n}))


@pytest.mark.parametrize("language", [in_size_texts, in_stored_guards, in_computed_sizes])
@pytest.mark.parametrize("name", FLOATS)
def test_sizes_that_are_computed_with_floats_are_those_of_python(name: str, language: Callable[..., Any]) -> None:
    function = FLOATS[name]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    how = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    n = mode.from_tensor(torch.empty(13), symbolic_context=how, source=ConstantSource("x")).shape[0]
    value = language(function(n).node.expr.subs(n.node.expr, sympy.Symbol("s0", integer=True, positive=True)))
    for size in (*range(400), *range(1000, 10**6, 9973), *LARGE):
        assert value(size) == function(size), size


# -- records ---------------------------------------------------------------------------------------------------------


class Kind(enum.Enum):
    A = "first"
    B = "second"


@dataclass(frozen=True, slots=True)
class Leaf:
    flag: bool = False


@dataclass(frozen=True, slots=True)
class Base:
    """Abstract: held through its subclasses."""

    count: int


@dataclass(frozen=True, slots=True)
class One(Base):
    name: str = ""


@dataclass(frozen=True, slots=True)
class Two(Base):
    leaf: Leaf | None = None


@dataclass(frozen=True, slots=True)
class Tree:
    count: int
    ratio: float = 0.0
    sizes: tuple[int | str, ...] = ()
    kind: Kind = Kind.A
    child: Tree | None = None
    either: Leaf | Two | str | None = None
    named: Mapping[str, float] = field(default_factory=dict)
    pair: tuple[int, str] | None = None
    mode: Literal["fast", 1] = "fast"
    listed: list[bytes] = field(default_factory=list)
    steps: tuple[Base, ...] = ()
    live: Any = field(default=None, compare=False, metadata={"stored": False})


class Hex:
    def to_raw(self, value: bytes, /) -> Any:
        return {"hex": value.hex()}

    def from_raw(self, raw: Any, /) -> bytes:
        return bytes.fromhex(raw["hex"])


FORMAT = Format(Tree, "tree", 3, members={Base: (One, Two)}, own={bytes: Hex()})
FULL = Tree(
    1, -0.0, (1, "s0"), Kind.B, Tree(2), Two(3, Leaf(True)), {"a": float("inf"), "b": 1.5}, (1, "z"), 1, [b"ab"],
    (One(1, "x"), Two(2)), live=object(),
)  # fmt: skip


def test_a_record_with_everything_survives_as_text() -> None:
    text = FORMAT.to_text(FULL)
    read = FORMAT.from_text(text)
    assert read == FULL and repr(read) == repr(replace(FULL, live=None)) and FORMAT.to_text(read) == text
    assert FORMAT.to_text(Tree(1)) == '{"format":"tree","record":{"count":1},"version":3}'
    nan = FORMAT.from_text(FORMAT.to_text(Tree(1, float("nan"))))
    assert nan.ratio != nan.ratio


def head(record: str, version: int = 3) -> str:
    return f'{{"format": "tree", "version": {version}, "record": {record}}}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "this is no tree"),
        ("{", "this is no tree"),
        ('{"format": "shrub", "version": 3, "record": {"count": 1}}', "this is no tree"),
        (head('{"count": 1}', 2), "has version 2, and this release reads version 3"),
        (head("null"), "None stands where a Tree should"),
        (head("{}"), "missing 1 required positional argument"),
        (head('{"count": 1, "size": 2}'), "a Tree has no field 'size'"),
        (head('{"count": 1, "live": 2}'), "a Tree has no field 'live'"),
        (head('{"count": "1"}'), "Tree.count: '1' is none of bool, int"),
        (head('{"count": 1, "kind": "C"}'), "Tree.kind: 'C' is no Kind"),
        (head('{"count": 1, "ratio": {"float": "1"}}'), "Tree.ratio"),
        (head('{"count": 1, "mode": true}'), "Tree.mode: True is none of 'fast', 1"),
        (head('{"count": 1, "pair": [1]}'), "Tree.pair: .* is no list of 2"),
        (head('{"count": 1, "sizes": {"0": 1}}'), "Tree.sizes: .* is no list"),
        (head('{"count": 1, "sizes": [1.5]}'), "Tree.sizes: 1.5 is none of bool, int, str"),
        (head('{"count": 1, "named": [1]}'), "Tree.named: .* is no mapping of strings"),
        (head('{"count": 1, "child": {"count": null}}'), "Tree.child: Tree.count: None is none of"),
        (head('{"count": 1, "either": {"flag": true}}'), "Tree.either: .* is none of Leaf, Two"),
        (head('{"count": 1, "steps": [{"record": "Base", "count": 1}]}'), "Tree.steps: .* is none of One, Two"),
    ],
)
def test_what_this_version_did_not_write_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORMAT.from_text(text)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (Tree("1"), "the tree can't be written: Tree.count: '1' is none of bool, int"),  # type: ignore[arg-type]
        (Tree(1, steps=(Base(1),)), "a Base is none of One, Two"),
        (Tree(1, sizes=[1]), "Tree.sizes: .* is no tuple"),  # type: ignore[arg-type]
        (Tree(1, child=Leaf()), "Tree.child: <?.*Leaf"),  # type: ignore[arg-type]
        (Leaf(), "a Leaf stands where a Tree should"),
    ],
)
def test_a_record_that_is_not_of_its_types_is_not_written(record: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FORMAT.to_text(record)


def test_a_format_raises_what_its_package_raises() -> None:
    with pytest.raises(LookupError, match="this is no leaf"):
        Format(Leaf, "leaf", 1, error=LookupError).from_text("1")


@dataclass(frozen=True, slots=True)
class Unclear:
    value: tuple[int, ...] | list[str] = ()
    other: object = None


def test_types_without_a_form_are_a_mistake_in_the_class() -> None:
    with pytest.raises(TypeError, match="can't be told apart"):
        Format(Unclear, "unclear", 1).to_text(Unclear((1,)))
    with pytest.raises(TypeError, match="records have no form for"):
        Format(Unclear, "unclear", 1).to_text(Unclear(other=1))


def test_the_silent_observer_asks_for_no_text() -> None:
    with SILENT.stage("a"):
        SILENT.event("b", {})
        SILENT.dump("c", "graphs", lambda: pytest.fail("asked for"))
    assert repr(SILENT) == "SILENT"
