"""A script that shows a wrong result: the graph of Dynamo that is wrong by itself, and its inputs."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..artifact.package_file import read_package, write_package
from ..backend import BackendFn
from ..errors import PackageError

__all__ = ["SeenGraph", "UnwritableGraph", "count_operators", "read_tensors", "seeing", "write_repro"]


class UnwritableGraph(Exception):
    """A graph that has no text which runs elsewhere."""


@dataclass
class SeenGraph:
    """A graph of Dynamo and copies of what it was called with first."""

    graph: torch.fx.GraphModule
    inputs: list[Any] | None = None


def seeing(backend: BackendFn, seen: list[SeenGraph]) -> BackendFn:
    """``backend``; what it compiles, and the first arguments, are appended to ``seen``."""

    def compile_graph(gm: torch.fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        kept = SeenGraph(copy.deepcopy(gm))
        seen.append(kept)
        compiled = backend(gm, example_inputs)

        def run(*args: Any) -> Any:
            if kept.inputs is None:
                kept.inputs = [_copied(value) for value in args]
            return compiled(*args)

        return run

    return compile_graph


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


_SCRIPT = '''"""{title}

Written by aotkit.find_culprit. It compiles the part of a graph that is wrong, stage by stage, and compares with eager
mode.
"""

from pathlib import Path

import torch

import aotkit
from aotkit.reports.repro import read_tensors
{imports}
attributes, inputs = read_tensors(Path(__file__).with_suffix(".tensors"))


class Graph(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name, tensor in attributes.items():
            self.register_buffer(name, tensor)

{code}

STAGES = [
{settings}
]

for what, options in STAGES:
    try:
        said = aotkit.compare(Graph(), *inputs, options=aotkit.Options().patch(**options))
    except Exception as error:
        inner = getattr(error, "inner_exception", None) or error  # without what Dynamo puts around it
        said = f"raises {{type(inner).__name__}}: {{str(inner).strip().splitlines()[0]}}"
    print(f"{{what:45}} {{said}}")
'''


def write_repro(path: Path, found: SeenGraph, title: str, wrong: dict[str, Any], right: dict[str, Any]) -> None:
    """Write the script to ``path``, inputs beside it (``.tensors``). ``wrong`` and ``right``: options to compile with.

    Raises :class:`UnwritableGraph`.
    """
    attributes = _attributes(found.graph)
    code = found.graph.graph.python_code("self")
    used = {name: value for name, value in code.globals.items() if re.search(rf"\b{re.escape(name)}\b", code.src)}
    imports = "".join(f"{_import(name, value)}\n" for name, value in used.items() if value is not torch)
    settings = "\n".join(f"    {each!r}," for each in _settings(wrong, right))
    _write_tensors(path.with_suffix(".tensors"), attributes, found.inputs or [])
    body = "\n".join(f"    {line}" if line.strip() else "" for line in code.src.strip().splitlines())
    path.write_text(_SCRIPT.format(title=title.replace('"""', "'''"), imports=imports, code=body, settings=settings))


def _settings(wrong: dict[str, Any], right: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """Words and options, from the first stage to the whole compile; the options of the user's are in all of them."""
    stages: list[tuple[str, dict[str, Any]]] = [
        ("only Dynamo:", {"capture": False}),
        ("captured, computed by ATen:", {"lowering": "none"}),
        ("lowered, no optional rewrite:", {"fuel": 0}),
        ("all rewrites, kernels interpreted:", {"processor": "interpreter"}),
    ]
    found = [(words, {**wrong, **options, "fallback": "error"}) for words, options in stages]
    found.append(("as it was compiled:", {**wrong, "fallback": "error"}))
    return found + [("with what is to blame left out:", right)] * bool(right)


def count_operators(found: SeenGraph) -> int:
    """How many operators a graph calls."""
    return sum(node.op in ("call_function", "call_method") for node in found.graph.graph.nodes)


def _write_tensors(path: Path, attributes: dict[str, torch.Tensor], inputs: list[Any]) -> None:
    """In the file format of packages; numbers among the inputs, and what safetensors does not tell, in its manifest."""
    named = {f"attribute {name}": value for name, value in attributes.items()}
    named |= {f"input {i}": value for i, value in enumerate(inputs) if isinstance(value, torch.Tensor)}
    if not all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in named.values()):
        raise UnwritableGraph("a tensor of it is of a class of its own")
    manifest = {
        "tensors": {name: [list(t.stride()), str(t.device), t.requires_grad] for name, t in named.items()},
        "inputs": [None if isinstance(value, torch.Tensor) else value for value in inputs],
    }
    try:
        write_package(path, manifest, {}, {name: value.detach().cpu() for name, value in named.items()}, None)
    except (PackageError, TypeError) as error:
        raise UnwritableGraph(str(error)) from error


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """What a script of :func:`write_repro` needs: the graph's own tensors by name, and its inputs."""
    manifest, _, stored = read_package(path, None)
    found = {}
    for name, (stride, device, requires_grad) in manifest["tensors"].items():
        value = stored[name]
        made = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=device).copy_(value)
        found[name] = made.requires_grad_(requires_grad)
    attributes = {name.removeprefix("attribute "): t for name, t in found.items() if name.startswith("attribute ")}
    inputs = [found.get(f"input {i}", value) for i, value in enumerate(manifest["inputs"])]
    return attributes, inputs


def _attributes(graph: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    if graph.graph.find_nodes(op="call_module"):
        raise UnwritableGraph("it calls modules, whose code is not in it")
    found = {}
    for node in graph.graph.find_nodes(op="get_attr"):
        value: Any = getattr(graph, str(node.target), None)
        if not isinstance(value, torch.Tensor):
            raise UnwritableGraph(f"it holds {node.target}, which is no tensor")
        found[str(node.target)] = value.detach()
    return found


def _import(name: str, value: Any) -> str:
    """The line that makes ``name`` what it is in the code of a graph."""
    if isinstance(value, ModuleType):
        return f"import {value.__name__} as {name}"
    if isinstance(value, float):
        return f'{name} = float("{value}")' if not math.isfinite(value) else f"{name} = {value!r}"
    if value is type(None):
        return f"{name} = type(None)"
    home, qualified = getattr(value, "__module__", ""), getattr(value, "__qualname__", "")
    if value is getattr(torch, qualified or "-", None):
        home = "torch"
    if not home or "<" in qualified or "." in qualified:
        raise UnwritableGraph(f"it calls {name}, which can't be imported")
    return f"from {home} import {qualified} as {name}"
