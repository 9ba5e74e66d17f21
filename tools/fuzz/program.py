"""A program of the fuzzer: plain Python text, which eager runs as it stands and which also becomes an FX graph."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["HELPER", "Program", "values"]

HELPER = '''\
def values(shape, k, dtype=torch.float32):
    """Distinct, harmless numbers; `k` tells tensors apart."""
    count = torch.Size(shape).numel()
    numbers = torch.sin(torch.arange(count, dtype=torch.float64) * 1.7 + k + 0.3)
    if dtype.is_complex:
        numbers = torch.complex(numbers, numbers.flip(0) - 0.5)
    return (numbers * 5 if dtype is torch.int64 else numbers).to(dtype).view(shape).clone()
'''
_scope: dict[str, Any] = {"torch": torch}
exec(HELPER, _scope)
values: Callable[..., torch.Tensor] = _scope["values"]


@dataclass(frozen=True, slots=True)
class Program:
    """One program.

    Attributes:
        setup: statements that make the inputs; every name they bind is compared afterwards.
        inputs: names of the function's arguments, in order. A name may occur twice.
        body: statements of the function; a ``with torch.no_grad():`` block is one statement.
        outputs: expressions that the function returns.
        afterwards: a statement that the caller runs on `inputs` and `outputs` before the gradients are taken.
        dynamic: compile with symbolic sizes.
        ignored: outputs that the gradient does not start from.
        training: the function is called with grad mode on.
        entry: what compiles it: ``graph`` (a captured FX graph, as Dynamo hands it over), ``function``
            (the Python function itself), ``dynamo`` (``torch.compile``).
    """

    setup: tuple[str, ...]
    inputs: tuple[str, ...]
    body: tuple[str, ...]
    outputs: tuple[str, ...]
    afterwards: str | None = None
    dynamic: bool = False
    ignored: tuple[int, ...] = ()
    training: bool = True
    entry: str = "graph"

    def parameters(self) -> tuple[str, ...]:
        """Names of the function's parameters: those of the inputs, a repeated one with a number."""
        return tuple(n if n not in self.inputs[:i] else f"{n}_{i}" for i, n in enumerate(self.inputs))

    def source(self) -> str:
        """The function ``f`` as Python text."""
        lines = [line for statement in self.body for line in statement.splitlines()]
        returned = ", ".join(self.outputs)
        return "\n".join(
            [f"def f({', '.join(self.parameters())}):", *(f"    {x}" for x in lines), f"    return [{returned}]"]
        )

    def script(self) -> str:
        """A script that stands alone: what a bug report holds."""
        called = {"dynamo": f"torch.compile(f, backend='aotkit', dynamic={self.dynamic})"}.get(
            self.entry, f"aotkit.aot_function(f, compiler, dynamic={self.dynamic}), its {self.entry}"
        )
        calls = [f"# f stands for {called}", f"outputs = f({', '.join(self.inputs)})"]
        if not self.training:
            calls = [calls[0], "with torch.no_grad():", f"    {calls[1]}"]
        after = [] if self.afterwards is None else [f"inputs = [{', '.join(self.inputs)}]", self.afterwards]
        return "\n".join(["import torch", HELPER, *self.setup, self.source(), *calls, *after])

    def make(self, shift: float = 0.0) -> dict[str, Any]:
        """Run the setup: every name it binds, in order; ``shift`` gives other values."""
        return run_setup(self.setup, shift)

    def function(self) -> Callable[..., list[Any]]:
        """The Python function ``f``."""
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source(), "<fuzz program>", "exec"), scope)
        return scope["f"]

    def graph(self) -> torch.fx.GraphModule:
        """The function as an FX graph with in-place calls and grad-mode switches, as Dynamo makes it.

        Blocks under ``no_grad`` end in the grad mode that is on now.
        """
        return _GraphMaker().run(self.source())


def run_setup(setup: Sequence[str], shift: float = 0.0) -> dict[str, Any]:
    """Execute setup statements and return the names they bind."""

    def shifted(shape: Any, k: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return values(shape, k + shift, dtype)

    scope: dict[str, Any] = {"torch": torch, "values": shifted}
    known = {*scope, "__builtins__"}
    exec("\n".join(setup), scope)
    return {name: value for name, value in scope.items() if name not in known}


_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Gt: operator.gt,
    ast.NotEq: operator.ne,
    ast.USub: operator.neg,
}


class _GraphMaker:
    """Translates the small part of Python that programs are written in to FX nodes."""

    def __init__(self) -> None:
        self.graph = torch.fx.Graph()
        self.names: dict[str, Any] = {"torch": torch}

    def run(self, source: str) -> torch.fx.GraphModule:
        (function,) = ast.parse(source).body
        assert isinstance(function, ast.FunctionDef)
        for parameter in function.args.args:
            self.names[parameter.arg] = self.graph.placeholder(parameter.arg)
        for statement in function.body:
            self.statement(statement)
        return torch.fx.GraphModule(torch.nn.Module(), self.graph)

    def statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]):
                self.names[name] = self.value(node.value)
            case ast.Assign(targets=[ast.Subscript(value=target, slice=index)]):
                arguments = (self.value(target), self.value(index), self.value(node.value))
                self.graph.call_function(operator.setitem, arguments)
            case ast.Expr():
                self.value(node.value)
            case ast.With():
                self.graph.call_function(torch._C._set_grad_enabled, (False,))
                for inner in node.body:
                    self.statement(inner)
                self.graph.call_function(torch._C._set_grad_enabled, (torch.is_grad_enabled(),))
            case ast.Return():
                assert node.value is not None
                self.graph.output(self.value(node.value))
            case ast.Pass():
                pass
            case _:
                raise NotImplementedError(ast.unparse(node))

    def value(self, node: ast.AST) -> Any:
        match node:
            case ast.Name(id=name):
                return self.names[name]
            case ast.Constant():
                return node.value
            case ast.Tuple() | ast.List():
                items = [self.value(item) for item in node.elts]
                return tuple(items) if isinstance(node, ast.Tuple) else items
            case ast.Slice():
                return slice(*(None if p is None else self.value(p) for p in (node.lower, node.upper, node.step)))
            case ast.Attribute():
                return self.apply(getattr, self.value(node.value), node.attr)
            case ast.UnaryOp():
                return self.apply(_OPERATORS[type(node.op)], self.value(node.operand))
            case ast.BinOp():
                return self.apply(_OPERATORS[type(node.op)], self.value(node.left), self.value(node.right))
            case ast.Compare(ops=[op], comparators=[right]):
                return self.apply(_OPERATORS[type(op)], self.value(node.left), self.value(right))
            case ast.Subscript():
                return self.apply(operator.getitem, self.value(node.value), self.value(node.slice))
            case ast.Call():
                return self.call(node)
        raise NotImplementedError(ast.unparse(node))

    def apply(self, function: Any, *arguments: Any) -> Any:
        if any(isinstance(a, torch.fx.Node) for a in arguments):
            return self.graph.call_function(function, arguments)
        return function(*arguments)

    def call(self, node: ast.Call) -> torch.fx.Node:
        arguments = tuple(self.value(a) for a in node.args)
        keywords = {str(k.arg): self.value(k.value) for k in node.keywords}
        assert isinstance(node.func, ast.Attribute)
        owner = self.value(node.func.value)
        if isinstance(owner, torch.fx.Node):
            return self.graph.call_method(node.func.attr, (owner, *arguments), keywords)
        return self.graph.call_function(getattr(owner, node.func.attr), arguments, keywords)
