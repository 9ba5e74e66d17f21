"""`dump_graph` and `load_graph`: an FX graph as versioned JSON text, without pickle.

Layout of a document::

    {"format": "aotkit-graph", "version": 1, "process": null,
     "strings": [...],                     stack traces and module paths, each once
     "symbols": {"s0": {...}},             symbols with range and example value
     "values": [["int", expr, hint], ...], SymInts, SymFloats, SymBools
     "graph": {"name": ..., "nodes": [...], "constants": {...}, "modules": {"body_0": {...}}}}

A node is ``{"op", "name", "target", "args", "kwargs", "val", "meta"}``. ``meta`` keeps what is listed in
``node_meta.py``; other metadata does not travel.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.graph import _PyTreeCodeGen

from .._torch_compat import lazy_graph_module, new_fake_mode, without_modes
from .._user_kernels import NoKernelText, constants_to_json, kernel_name, table_of_kernels
from ..errors import GraphFormatError, UnserializableGraphError
from .node_meta import MetaReader, MetaWriter
from .symbols import SymbolReader, SymbolWriter
from .targets import PROCESS_LOCAL_TARGETS, find_target, target_name
from .tensors import WRITTEN_TYPES, MetadataReader, MetadataWriter, read_constant, write_constant
from .values import ValueReader, ValueWriter

FORMAT = "aotkit-graph"
VERSION = 1

# Identifies this process in documents that refer to its side tables.
_PROCESS = uuid.uuid4().hex


def dump_graph(
    gm: torch.fx.GraphModule, *, extra_targets: Mapping[str, Callable[..., Any]] | None = None, flat: bool = False
) -> str:
    """Write ``gm`` as JSON text.

    Args:
        gm: what ``make_fx`` makes: ATen, prims, symbolic-size and higher-order ops, nested GraphModules, constants.
        extra_targets: further Python functions the graph may call, by the name to write.
        flat: write a module that takes nested inputs all the same; read back, it takes and returns flat lists.

    Returns:
        The text. Real constants of more than 64 KiB are written without their data; see :func:`graph_constants`.

    Raises:
        UnserializableGraphError: a target, argument, value or attribute that has no pickle-free text.
    """
    writer = _GraphWriter(extra_targets, flat)
    graph = writer.graph(gm)
    document = {
        "format": FORMAT,
        "version": VERSION,
        "process": _PROCESS if writer.process_local else None,
        "strings": writer.meta.strings,
        "symbols": writer.symbols.symbols,
        "values": writer.symbols.rows,
        "graph": graph,
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False)


def load_graph(
    text: str,
    fake_mode: FakeTensorMode | None = None,
    *,
    constants: Mapping[str, torch.Tensor] | None = None,
    extra_targets: Mapping[str, Callable[..., Any]] | None = None,
    describe_missing: bool = False,
) -> torch.fx.GraphModule:
    """Rebuild the module that :func:`dump_graph` wrote, with fake tensors in ``node.meta['val']``.

    Args:
        text: the document.
        fake_mode: makes the fake tensors. With the mode of the original compile, symbolic sizes are the original
            symbols, found by name. Without one, a fresh mode with a fresh shape environment declares them anew.
        constants: tensors for attributes by qualified name (see :func:`graph_constants`); they win over inline data,
            and are needed for constants of more than 64 KiB.
        extra_targets: the functions given to :func:`dump_graph`.
        describe_missing: put fake tensors where constants did not travel; enough to analyse the graph, not to run it.

    Raises:
        GraphFormatError: not such a text, a newer version, an operator or constant this process lacks.
    """
    try:
        document = json.loads(text)
    except ValueError as error:
        raise GraphFormatError(f"the text is no JSON ({error}); expected what dump_graph returned.") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise GraphFormatError(f"the text is JSON but no graph: its 'format' is not '{FORMAT}'.")
    if document.get("version") != VERSION:
        raise GraphFormatError(
            f"the graph was written in version {document.get('version')} of the format; this package reads version "
            f"{VERSION}. Write it again with the installed package."
        )
    if document["process"] not in (None, _PROCESS):
        raise GraphFormatError(
            "the graph calls user-defined Triton kernels that read what has no text, so they go by their place in a "
            "table of the process that wrote it. Trace it again in this process."
        )
    mode = fake_mode if fake_mode is not None else new_fake_mode()
    # In the middle of a compile fake and proxy modes are active; they would see (and slow down) every tensor made here.
    with without_modes():
        reader = _GraphReader(document, mode, constants or {}, extra_targets, describe_missing)
        return reader.graph(document["graph"], "")


def graph_constants(gm: torch.fx.GraphModule) -> dict[str, torch.Tensor]:
    """The tensor attributes that the graph reads, nested modules included, by qualified name."""
    found: dict[str, torch.Tensor] = {}
    for node in gm.graph.nodes:
        if node.op != "get_attr":
            continue
        value = _attribute(gm, str(node.target))
        if isinstance(value, torch.Tensor):
            found[str(node.target)] = value
        elif isinstance(value, torch.fx.GraphModule):
            found.update({f"{node.target}.{name}": tensor for name, tensor in graph_constants(value).items()})
    return found


def _attribute(gm: torch.nn.Module, path: str) -> Any:
    value: Any = gm
    for part in path.split("."):
        if not hasattr(value, part):
            raise UnserializableGraphError(f"the graph reads the attribute '{path}', which its module does not have.")
        value = getattr(value, part)
    return value


class _GraphWriter:
    def __init__(self, extra_targets: Mapping[str, Callable[..., Any]] | None, flat: bool) -> None:
        self._flat = flat
        self.symbols = SymbolWriter()
        self.meta = MetaWriter(self.symbols)
        self.process_local = False
        self._extra_targets = extra_targets
        self._values = ValueWriter(self.symbols, extra_targets)
        self._tensors = MetadataWriter(self.symbols)
        self._targets: dict[Any, str] = {}

    def graph(self, gm: torch.fx.GraphModule) -> dict[str, Any]:
        if isinstance(gm.graph._codegen, _PyTreeCodeGen) and not self._flat:
            raise UnserializableGraphError(
                "the module takes nested inputs, which the text does not describe. Flatten them (tree_flatten) before "
                "tracing, or dump with flat=True to get a module of flat inputs back."
            )
        written: dict[str, Any] = {"name": gm._get_name(), "nodes": [], "constants": {}, "modules": {}}
        for node in gm.graph.nodes:
            written["nodes"].append(self._node(node))
            if node.op in ("get_attr", "call_module"):
                self._attribute(gm, node, written)
        return written

    def _node(self, node: torch.fx.Node) -> dict[str, Any]:
        self._values.node = node.name
        row: dict[str, Any] = {"op": node.op, "name": node.name}
        if node.op == "call_function":
            row["target"] = self._target(node)
        elif node.target != node.name and node.op != "output":
            row["target"] = node.target
        if node.args:
            row["args"] = [self._values.write(argument) for argument in node.args]
        if node.kwargs:
            row["kwargs"] = {name: self._values.write(argument) for name, argument in node.kwargs.items()}
        if row.get("target") in PROCESS_LOCAL_TARGETS:
            self._name_kernel(node, row["kwargs"])
        if "val" in node.meta and not _passes_by(node):
            row["val"] = self._tensors.write(node.meta["val"], node.name)
        kept = self.meta.write(node)
        if kept:
            row["meta"] = kept
        return row

    def _target(self, node: torch.fx.Node) -> str:
        name = self._targets.get(node.target)
        if name is None:
            name = self._targets[node.target] = target_name(node.target, self._extra_targets, node.name)
        return name

    def _name_kernel(self, node: torch.fx.Node, row: dict[str, Any]) -> None:
        """See Note [Triton kernels of a user's own]; where one has no name, the text is for this process."""
        table = table_of_kernels()
        try:
            kernel = kernel_name(table.get_kernel(row["kernel_idx"]))
            constants = constants_to_json(table.get_constant_args(row["constant_args_idx"]))
        except NoKernelText:
            self.process_local = True
            return
        row["kernel_idx"] = {"kernel": [kernel.module, kernel.name, kernel.digest, kernel.configs]}
        row["constant_args_idx"] = {"kernel_constants": constants}

    def _attribute(self, gm: torch.fx.GraphModule, node: torch.fx.Node, written: dict[str, Any]) -> None:
        path = str(node.target)
        value = _attribute(gm, path)
        if path in written["modules"] or path in written["constants"]:
            return
        if isinstance(value, torch.fx.GraphModule):
            written["modules"][path] = self.graph(value)
        elif isinstance(value, torch.Tensor):
            written["constants"][path] = write_constant(value, self._tensors, path)
        else:
            raise UnserializableGraphError(
                f"the graph uses the attribute '{path}', a {type(value).__module__}.{type(value).__qualname__}; only "
                "tensors and GraphModules can be written as text.",
                node.name,
            )


def _passes_by(node: torch.fx.Node) -> bool:
    """An argument that is neither tensor nor number, and that nothing reads: the mesh of distributed tensors, say."""
    return node.op == "placeholder" and not node.users and not isinstance(node.meta["val"], WRITTEN_TYPES)


class _GraphReader:
    def __init__(
        self,
        document: dict[str, Any],
        fake_mode: FakeTensorMode,
        constants: Mapping[str, torch.Tensor],
        extra_targets: Mapping[str, Callable[..., Any]] | None,
        describe_missing: bool,
    ) -> None:
        self._describe_missing = describe_missing
        self._symbols = SymbolReader(document["symbols"], document["values"], fake_mode)
        self._tensors = MetadataReader(self._symbols, fake_mode)
        self._meta = MetaReader(document["strings"], self._symbols)
        self._constants = constants
        self._extra_targets = extra_targets
        self._targets: dict[str, Callable[..., Any]] = {}

    def graph(self, written: dict[str, Any], prefix: str) -> torch.fx.GraphModule:
        root = torch.nn.Module()
        graph = torch.fx.Graph()
        nodes: dict[str, torch.fx.Node] = {}
        values = ValueReader(self._symbols, self._extra_targets, nodes)
        for row in written["nodes"]:
            self._node(graph, row, nodes, values)
        for path, module in written["modules"].items():
            _set_attribute(root, path, self.graph(module, f"{prefix}{path}."))
        for path, constant in written["constants"].items():
            _set_attribute(root, path, self._constant(f"{prefix}{path}", constant))
        return lazy_graph_module(root, graph, written["name"])

    def _node(
        self, graph: torch.fx.Graph, row: dict[str, Any], nodes: dict[str, torch.fx.Node], values: ValueReader
    ) -> None:
        name, op = row["name"], row["op"]
        target: Any = row.get("target", "output" if op == "output" else name)
        if op == "call_function":
            target = self._targets.get(row["target"])
            if target is None:
                target = self._targets[row["target"]] = find_target(row["target"], self._extra_targets)
        args = tuple(values.read(argument) for argument in row.get("args", ()))
        kwargs = {key: values.read(argument) for key, argument in row.get("kwargs", {}).items()}
        node = graph.create_node(op, target, args, kwargs, name=name)
        if node.name != name:
            node._rename(name)  # a name that fx would not choose itself, such as one it takes for reserved
        nodes[name] = node
        if "val" in row:
            node.meta["val"] = self._tensors.read(row["val"])
        if "meta" in row:
            self._meta.read(row["meta"], node)

    def _constant(self, path: str, written: dict[str, Any]) -> torch.Tensor:
        given = self._constants.get(path)
        if given is not None:
            return given
        constant = read_constant(written, self._tensors)
        if constant is None and self._describe_missing:
            return self._tensors.read(written["meta"])  # type: ignore[no-any-return]
        if constant is None:
            raise GraphFormatError(
                f"the constant '{path}' was too big to travel inside the text. Pass it in "
                "constants=graph_constants(original_module) to load_graph."
            )
        return constant


def _set_attribute(root: torch.nn.Module, path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for part in parents:
        if not hasattr(root, part):
            root.add_module(part, torch.nn.Module())
        root = getattr(root, part)
    if isinstance(value, torch.nn.Module):
        root.add_module(last, value)
    elif isinstance(value, torch.nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)
