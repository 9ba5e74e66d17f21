"""The faults: for each place in a source file, what may be put there instead.

Left out is what no test of behaviour can see or should: docstrings, annotations, messages (all below `raise`,
f-strings), `__repr__` and `__str__`, logging, decorators, `assert` statements and `zip(strict=...)`, which state what
is so anyway, and blocks for type checkers.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

__all__ = ["Site", "mutate", "sites"]


@dataclass(frozen=True, slots=True)
class Site:
    """A place of a file and the fault to put there: the ``choice``-th that `operator` has for node number ``index``."""

    index: int
    choice: int
    operator: str
    line: int
    first_line: int  # of the statement, or of the head of a compound one
    last_line: int
    function: str  # qualified name; empty at module level
    in_function: bool  # not run when the module is imported, as far as the syntax tells
    before: str
    after: str


Choice = tuple[str, Callable[[], list[ast.AST]]]  # name, and what takes the node's place (statements may be several)

_COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.BitXor: ast.BitOr,
}
_CALLS = {
    "min": "max",
    "max": "min",
    "any": "all",
    "all": "any",
    "sorted": "list",
    "reversed": "list",
    "ceil": "floor",
    "floor": "ceil",
    "abs": "",  # dropped
}
_SYMMETRIC = {"min", "max", "gcd", "isinstance", "issubclass", "hasattr", "zip"}
_COMMUTATIVE = {"add", "mul", "fadd", "fmul", "eq", "ne", "and", "or", "xor", "bitwise_and", "bitwise_or", "logical_or"}
_SILENT_FUNCTIONS = {"__repr__", "__str__"}
_TABLE = 8  # numbers that make a table
_STATEMENT_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sites(tree: ast.Module) -> Iterator[Site]:
    """Every fault of a file, in order. The tree is not changed."""
    for index, place in enumerate(_places(tree)):
        for choice, (operator, _) in enumerate(_choices(place)):
            before, after = _texts(place, choice)
            if before != after:
                first, last = _lines(place.statement)
                yield Site(
                    index, choice, operator, place.node.lineno, first, last,  # type: ignore[attr-defined]
                    place.function, place.in_function, before, after,
                )  # fmt: skip


def mutate(tree: ast.Module, site: Site) -> ast.Module:
    """A copy of the tree with the fault in it."""
    changed = copy.deepcopy(tree)
    for index, place in enumerate(_places(changed)):
        if index == site.index:
            _replace(place, site.choice)
            return ast.fix_missing_locations(changed)
    raise ValueError(f"the tree has no place {site.index}")


@dataclass(frozen=True, slots=True)
class _Place:
    node: ast.AST
    parent: ast.AST
    field: str
    position: int | None  # in the parent's list
    statement: ast.stmt
    function: str
    in_function: bool
    returns_value: bool  # the function around it


def _places(tree: ast.Module) -> Iterator[_Place]:
    """Nodes that may be mutated, before their children."""
    yield from _walk(tree, _Place(tree, tree, "", None, ast.Pass(), "", False, False))


def _walk(parent: ast.AST, above: _Place) -> Iterator[_Place]:
    for field, value in ast.iter_fields(parent):
        if _is_left_out(parent, field):
            continue
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for position, node in children:
            if not isinstance(node, ast.AST) or _is_silent(node) or _is_one_of_many(parent, position):
                continue
            function, inside, returns = above.function, above.in_function, above.returns_value
            if isinstance(parent, (*_STATEMENT_FUNCTIONS, ast.ClassDef)) and field == "body":
                function = f"{function}.{parent.name}" if function else parent.name
            if isinstance(parent, (*_STATEMENT_FUNCTIONS, ast.Lambda)) and field == "body":
                inside = True
                returns = isinstance(parent, ast.Lambda) or _returns_value(parent)
            statement = node if isinstance(node, ast.stmt) else above.statement
            place = _Place(node, parent, field, position, statement, function, inside, returns)
            if isinstance(node, ast.expr | ast.stmt):
                yield place
            yield from _walk(node, place)


def _is_left_out(parent: ast.AST, field: str) -> bool:
    if field in ("annotation", "returns", "decorator_list", "type_params", "bases"):
        return True
    return isinstance(parent, ast.Subscript) and field == "ctx"


def _is_silent(node: ast.AST) -> bool:
    """What no test should look at, see the docstring of the module."""
    match node:
        case ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Global() | ast.Nonlocal():
            return True
        case ast.FunctionDef(name=name):
            return name in _SILENT_FUNCTIONS
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
        case ast.Expr(value=ast.Constant()):
            return True
        case ast.Assign(targets=[ast.Name(id="__all__" | "__slots__")]):
            return True
        case ast.AnnAssign(annotation=ast.Name(id="TypeAlias")):
            return True
        case ast.Call(func=ast.Name(id="TypeVar" | "cast" | "NewType")):
            return True
        case ast.Call(func=ast.Attribute(value=ast.Name(id="logging" | "log" | "logger" | "warnings"))):
            return True
        case ast.keyword(arg="strict"):
            return True
    return False


def _is_one_of_many(parent: ast.AST, position: int | None) -> bool:
    """A number in a long table, if it is not the first: one mutant tells whether anybody looks at the table."""
    if not isinstance(parent, ast.Tuple | ast.List) or len(parent.elts) <= _TABLE or not position:
        return False
    return all(isinstance(item, ast.Constant | ast.UnaryOp) for item in parent.elts)


def _returns_value(function: ast.AST) -> bool:
    """Whether a `return` of the function has a value, or it is a generator."""
    return any(
        (isinstance(node, ast.Return) and node.value is not None) or isinstance(node, ast.Yield | ast.YieldFrom)
        for node in ast.walk(function)
    )


def _choices(place: _Place) -> Iterator[Choice]:
    node = place.node
    if isinstance(place.parent, ast.Raise):
        return  # messages; the statement as a whole may be removed
    if isinstance(node, ast.stmt):
        yield from _statement_choices(place, node)
    elif isinstance(node, ast.expr) and not _below_raise(place):
        yield from _expression_choices(node)
        if _is_condition(place) and not isinstance(node, ast.UnaryOp | ast.Compare):
            yield "negate condition", lambda: [ast.UnaryOp(ast.Not(), copy.deepcopy(node))]


def _below_raise(place: _Place) -> bool:
    return isinstance(place.statement, ast.Raise)


def _is_condition(place: _Place) -> bool:
    parent = place.parent
    if place.field == "test" and isinstance(parent, ast.If | ast.While | ast.IfExp):
        return True
    return place.field == "ifs" and isinstance(parent, ast.comprehension)


def _expression_choices(node: ast.expr) -> Iterator[Choice]:
    match node:
        case ast.Compare(ops=ops):
            for at, op in enumerate(ops):
                for other in _COMPARISONS[type(op)]:
                    yield "comparison", partial(_compared, node, at, other)
        case ast.BinOp(op=arithmetic) if type(arithmetic) in _ARITHMETIC:
            if not _is_text(node.left) and not _is_text(node.right):
                yield "arithmetic", lambda: [_with(node, "op", None, _ARITHMETIC[type(arithmetic)]())]
        case ast.BoolOp(op=op, values=values):
            yield "and/or", lambda: [_with(node, "op", None, ast.Or() if isinstance(op, ast.And) else ast.And())]
            for at in range(len(values)):
                yield "drop operand", partial(_without, node, at)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            if not isinstance(operand, ast.Constant):
                yield "drop unary", lambda: [copy.deepcopy(operand)]
        case ast.Constant(value=bool() as value):
            yield "constant", lambda: [ast.Constant(not value)]
        case ast.Constant(value=int() | float() as number):
            yield "constant", lambda: [ast.Constant(number + 1)]
            yield "constant", lambda: [ast.Constant(number - 1)]
        case ast.Call():
            yield from _call_choices(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _call_choices(node: ast.Call) -> Iterator[Choice]:
    name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
    if isinstance(node.func, ast.Name | ast.Attribute) and name in _CALLS:
        instead = _CALLS[name]
        if not instead and node.args:
            yield "drop call", lambda: [copy.deepcopy(node.args[0])]
        elif instead and (isinstance(node.func, ast.Name) or name in ("ceil", "floor")):
            yield "other function", lambda: [_renamed(node, instead)]
    if name in _SYMMETRIC or any(isinstance(arg, ast.Starred) for arg in node.args):
        return
    first = node.args[0] if node.args else None  # op("add", a, b) is a way to write an operator, too
    commutes = isinstance(first, ast.Constant) and first.value in _COMMUTATIVE
    for at in range(len(node.args) - 1):
        if _are_alike(node.args[at], node.args[at + 1]) and not (commutes and at == 1):
            yield "swap arguments", partial(_swapped, node, at)


def _are_alike(left: ast.expr, right: ast.expr) -> bool:
    """Whether a mix-up of the two would not simply be a type error: both of one form, and neither a context."""
    if type(left) is not type(right) or ast.dump(left) == ast.dump(right):
        return False
    if isinstance(left, ast.Constant) and isinstance(right, ast.Constant):
        return type(left.value) is type(right.value)
    contexts = {"self", "ctx", "node", "dtype"}
    return not any(isinstance(arg, ast.Name) and arg.id in contexts for arg in (left, right))


def _statement_choices(place: _Place, node: ast.stmt) -> Iterator[Choice]:
    match node:
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise() | ast.Delete():
            yield "remove statement", lambda: [ast.Pass()]
        case ast.Assign(targets=[ast.Subscript() | ast.Attribute()]):
            yield "remove statement", lambda: [ast.Pass()]
        case ast.Continue():
            yield "break/continue", lambda: [ast.Break()]
        case ast.Break():
            yield "break/continue", lambda: [ast.Continue()]
        case ast.Return(value=ast.expr() as value) if not _is_none(value):
            yield "return None", lambda: [ast.Return(ast.Constant(None))]
        case ast.Return(value=None):
            yield "remove statement", lambda: [ast.Pass()]
    if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC and not _is_text(node.value):
        yield "arithmetic", lambda: [_with(node, "op", None, _ARITHMETIC[type(node.op)]())]
    starts = place.field == "body" and isinstance(place.parent, _STATEMENT_FUNCTIONS) and place.in_function
    if starts and not place.returns_value and isinstance(place.parent, _STATEMENT_FUNCTIONS):
        first = next(statement for statement in place.parent.body if not _is_silent(statement))
        if node is first and not isinstance(node, ast.Return | ast.Raise | ast.Pass):
            yield "early return", lambda: [ast.Return(None), copy.deepcopy(node)]


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _with(node: ast.AST, field: str, at: int | None, value: ast.AST) -> ast.AST:
    changed = copy.deepcopy(node)
    if at is None:
        setattr(changed, field, value)
    else:
        getattr(changed, field)[at] = value
    return changed


def _compared(node: ast.Compare, at: int, op: type[ast.cmpop]) -> list[ast.AST]:
    return [_with(node, "ops", at, op())]


def _without(node: ast.BoolOp, at: int) -> list[ast.AST]:
    left = [copy.deepcopy(value) for place, value in enumerate(node.values) if place != at]
    return [left[0] if len(left) == 1 else ast.BoolOp(copy.deepcopy(node.op), left)]


def _renamed(node: ast.Call, name: str) -> ast.AST:
    changed = copy.deepcopy(node)
    if isinstance(changed.func, ast.Name):
        changed.func.id = name
    elif isinstance(changed.func, ast.Attribute):
        changed.func.attr = name
    if name == "list":
        changed.keywords = []
    return changed


def _swapped(node: ast.Call, at: int) -> list[ast.AST]:
    changed = copy.deepcopy(node)
    changed.args[at], changed.args[at + 1] = changed.args[at + 1], changed.args[at]
    return [changed]


def _replace(place: _Place, choice: int) -> None:
    new = list(_choices(place))[choice][1]()
    for node in new:
        ast.copy_location(node, place.node)
    value = getattr(place.parent, place.field)
    if place.position is None:
        setattr(place.parent, place.field, new[0])
    else:
        value[place.position : place.position + 1] = new


def _texts(place: _Place, choice: int) -> tuple[str, str]:
    """The head of the statement before and after: what a diff shows."""
    before = _head(place.statement)
    if isinstance(place.node, ast.stmt):
        after = "\n".join(_head(node) for node in list(_choices(place))[choice][1]() if isinstance(node, ast.stmt))
        return before, after
    value = getattr(place.parent, place.field)
    (new,) = list(_choices(place))[choice][1]()
    if place.position is None:
        setattr(place.parent, place.field, new)
    else:
        value[place.position] = new
    after = _head(place.statement)
    if place.position is None:
        setattr(place.parent, place.field, place.node)
    else:
        value[place.position] = place.node
    return before, after


def _head(statement: ast.stmt) -> str:
    """The text of a simple statement, or that of a compound one up to its body."""
    if not hasattr(statement, "body"):
        return ast.unparse(statement)
    short = copy.copy(statement)
    for field in ("body", "orelse", "handlers", "finalbody", "cases", "decorator_list"):
        if getattr(short, field, None):
            setattr(short, field, [ast.Pass()] if field == "body" else [])
    return ast.unparse(short).removesuffix("pass").strip()


def _lines(statement: ast.stmt) -> tuple[int, int]:
    """First and last line of the statement or of its head."""
    body = getattr(statement, "body", None)
    if not isinstance(body, list) or not body:
        return statement.lineno, statement.end_lineno or statement.lineno
    return statement.lineno, max(statement.lineno, body[0].lineno - 1)
