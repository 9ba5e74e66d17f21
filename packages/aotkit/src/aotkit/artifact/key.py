"""The cache key of one graph of Dynamo: everything that decides what a compile makes of it.

Note [What is part of the key]
    A cache hit must be what a compile here and now would give, so each thing that a stage looks at is in the key: the
    graph node by node, inputs as far as they are described by metadata, options, the state of torch that tracing or
    code generation reads, versions and the machine. Names of nodes and symbols are numbered anew, so that two graphs
    that differ in names only share a key; stack traces are left out: they decide nothing but messages. So are module
    paths; but collectives are joined within a block of the model, so where there may be some it is told which nodes are
    of one block.
    What has no canonical text (a user's function, a generator, a subclass) makes the graph uncacheable, with a reason.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import lru_cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from aotkit_cache import Uncacheable, environment_parts
from aotkit_functionalize.subclasses import placement_to_raw
from aotkit_inductor_lower.targets.cpu import compilers, host_machine

from .._user_kernels import NoKernelText, constants_to_json, kernel_name, table_of_kernels
from ..options import Options
from .collectives import collectives_of, groups_of_inputs
from .custom_ops import COLLECTIVES, TORCHS_OWN
from .distributed_tensors import describe_mesh, is_mesh, state_of_distributed_tensors
from .guards import Names
from .records import ARTIFACT_FORMAT
from .sources import replaced_sources, sources_digest
from .torch_state import cuda_capabilities, torch_state

__all__ = ["describe_inputs", "graph_key", "graph_lines"]

# Options that change no result.
_NOT_OUTPUT = frozenset(
    {
        "backward_ahead",
        "cache",
        "compare_ranks",
        "compile_workers",
        "fallback",
        "rank_timeout",
        "share_compiles",
        "verify",
    }
)

# Their bodies are graphs, which are written out, and they call them as they are.
_HIGHER_ORDER = frozenset(
    (
        *("cond", "while_loop", "while_loop_stack_output", "scan", "map", "map_impl", "invoke_subgraph", "wrap"),
        "tag_activation_checkpoint",
        *("autograd_function_apply", "wrap_with_set_grad_enabled", "wrap_with_autocast", "wrap_activation_checkpoint"),
    )
)
# They take a kernel, and what it is given, by their places in a table of this process.
_LAUNCHERS = frozenset(("higher_order.triton_kernel_wrapper_mutation", "higher_order.triton_kernel_wrapper_functional"))
# A collective names its group, and the size of it where that decides anything.
_KNOWN_OPERATORS = TORCHS_OWN | COLLECTIVES
_MODULES = frozenset({"torch", "_operator", "operator", "math", "builtins", "_functools"})
# Metadata that a stage reads of Dynamo's nodes.
_META = ("recompute", "ac_graph_id", "custom", "memory_budget", "partitioner_tag")
_NAMED = (torch.dtype, torch.device, torch.layout, torch.memory_format)


def graph_lines(gm: torch.fx.GraphModule, allowed: Mapping[str, str]) -> list[str]:
    """One line per node of ``gm`` and of the graphs that it calls. ``allowed``: see ``Options.cacheable``.

    Raises :class:`Uncacheable` with the node that has no canonical text.
    """
    return list(_Writer(gm, allowed).lines(""))


@dataclass(slots=True)
class _Writer:
    gm: torch.fx.GraphModule
    allowed: Mapping[str, str]

    def lines(self, indent: str) -> Iterator[str]:
        numbers: dict[torch.fx.Node, str] = {}
        attributes: dict[str, int] = {}
        for number, node in enumerate(self.gm.graph.nodes):
            numbers[node] = f"%{number}"
            op, target = node.op, node.target
            if op == "call_function":
                name = self._target(target, node)
            elif op == "call_method":
                name = f".{target}"
            elif op in ("placeholder", "output"):
                name = op
            else:
                name = yield from self._attribute(node, attributes, indent)
            args = ", ".join([self._text(a, numbers, node) for a in node.args]) if op != "placeholder" else ""
            launched = _launched(node) if name in _LAUNCHERS else {}
            kwargs = "".join(
                f", {k}={launched.get(k) or self._text(v, numbers, node)}" for k, v in sorted(node.kwargs.items())
            )
            meta = "".join(f" {key}={node.meta[key]!r}" for key in _META if node.meta.get(key) is not None)
            yield f"{indent}%{number} = {name}({args}{kwargs}){meta}"

    def _attribute(self, node: torch.fx.Node, attributes: dict[str, int], indent: str) -> Generator[str, None, str]:
        value: Any = self.gm
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, torch.fx.GraphModule):
            if node.op == "get_attr" or not indent:
                if value.meta.get("_checkpoint_context_fn") is not None:
                    yield f"{indent}policy {_hash_of(value.meta['_checkpoint_context_fn'], node)}"
                yield f"{indent}graph:"
                yield from _Writer(value, self.allowed).lines(indent + "  ")
                return "graph"
        elif isinstance(value, torch.Tensor) and not indent and node.op == "get_attr":
            # It becomes an input of the compiled graph; see lift_attributes.
            return f"attribute{attributes.setdefault(str(node.target), len(attributes))}"
        raise Uncacheable(
            f"node {node.name} reads the attribute {node.target} ({type(value).__name__}), whose contents no key names"
        )

    def _target(self, target: Any, node: torch.fx.Node) -> str:
        if isinstance(target, (OpOverload, OpOverloadPacket)):
            name = target._schema.name if isinstance(target, OpOverload) else target._qualified_op_name
            if name.split("::")[0] not in _KNOWN_OPERATORS and name.replace("::", ".") not in self.allowed:
                raise Uncacheable(
                    f"node {node.name} calls the custom operator {name.replace('::', '.')}, whose code no version of "
                    "torch names; list it in the option 'cacheable' with a version of your own"
                )
            return f"{target} {self.allowed.get(name.replace('::', '.'), '')}".rstrip()
        if isinstance(target, HigherOrderOperator):
            name = f"higher_order.{target.name()}"
            if target.name() in _HIGHER_ORDER or name in _LAUNCHERS:
                return name
            raise Uncacheable(f"node {node.name} calls the higher-order operator {target.name()}, which is not cached")
        known = _function_name(target)
        if known is not None and known in self.allowed:
            return f"{known} {self.allowed[known]}"
        if known is None or known.split(".")[0] not in _MODULES:
            shown = known or f"{type(target).__name__} {getattr(target, '__name__', '')}"
            raise Uncacheable(
                f"node {node.name} calls {shown}, which is no function of torch or Python; list it in the option "
                "'cacheable' with a version of your own"
            )
        return known

    def _text(self, value: Any, numbers: Mapping[torch.fx.Node, str], node: torch.fx.Node) -> str:
        kind = type(value)
        if kind is torch.fx.Node:
            return numbers[value]
        if value is None or value is Ellipsis or kind in (bool, int, float, complex, str):
            return repr(value)
        if kind is tuple or kind is torch.Size:
            return f"({', '.join([self._text(item, numbers, node) for item in value])},)"
        if isinstance(value, list):  # immutable_list too
            return f"[{', '.join([self._text(item, numbers, node) for item in value])}]"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{k!r}: {self._text(v, numbers, node)}' for k, v in value.items())}}}"
        if isinstance(value, _NAMED):
            return str(value) if not isinstance(value, torch.device) else f"device {value}"
        if kind is slice:
            parts = (value.start, value.stop, value.step)
            return f"slice({', '.join(self._text(part, numbers, node) for part in parts)})"
        if isinstance(value, enum.Enum):
            return f"{kind.__module__}.{kind.__qualname__}.{value.name}"
        if callable(value) and not isinstance(value, torch.nn.Module):
            return self._target(value, node)
        if (placement := placement_to_raw(value)) is not None:
            return repr(placement)
        raise Uncacheable(
            f"node {node.name} has an argument of type {kind.__module__}.{kind.__qualname__}, which has no text"
        )


def _launched(node: torch.fx.Node) -> dict[str, str]:
    """What stands for the places of the kernel that a call launches; see Note [Triton kernels of a user's own]."""
    table, given = table_of_kernels(), dict(node.kwargs)
    try:
        return {
            "kernel_idx": repr(kernel_name(table.get_kernel(given["kernel_idx"]))),
            "constant_args_idx": constants_to_json(table.get_constant_args(given["constant_args_idx"])),
        }
    except NoKernelText as error:
        raise Uncacheable(f"node {node.name}: {error}, which has no text") from error


def _hash_of(function: Any, node: torch.fx.Node) -> str:
    given = getattr(function, "cache_hash", None)
    if not isinstance(given, str | int):
        raise Uncacheable(
            f"node {node.name} checkpoints with a policy of the user's; give its context_fn an attribute 'cache_hash' "
            "that changes with the policy"
        )
    return repr(given)


@lru_cache(maxsize=4096)
def _function_name(function: Any) -> str | None:
    """A name under which importable code finds this very function, or ``None``."""
    owner = getattr(function, "__objclass__", None)
    module = owner.__module__ if owner is not None else getattr(function, "__module__", None)
    simple = getattr(function, "__name__", None)
    if simple is None:
        return None
    qualified = getattr(function, "__qualname__", simple)
    for home in (module, "torch", "torch._C._nn", "torch._C"):
        if home not in sys.modules:
            continue
        for path in (qualified, simple):
            found: Any = sys.modules[home]
            for part in path.split("."):
                found = getattr(found, part, None)
            if found is function:
                return f"{home}.{path}"
    return None


def describe_inputs(values: Sequence[Any], fakes: Sequence[Any], names: Names, allowed: Mapping[str, str]) -> list[Any]:
    """What a compile knows of the graph's inputs; symbols are numbered into ``names`` as they are met.

    ``fakes``: per input its symbolic twin, or ``None`` for one that is compiled for the sizes that it has. ``allowed``:
    see ``Options.cacheable``.
    Raises :class:`Uncacheable` for what has more to it than that.
    """
    describe = _Inputs(names, allowed).describe
    return [describe(v, f, str(i)) for i, (v, f) in enumerate(zip(values, fakes, strict=True))]


@dataclass(slots=True)
class _Inputs:
    names: Names
    allowed: Mapping[str, str]
    storages: dict[int, int] = field(default_factory=dict)
    meshes: dict[int, int] = field(default_factory=dict)

    def describe(self, value: Any, fake: Any, where: str) -> Any:
        names, storages = self.names, self.storages
        if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
            return {"symbol": names.text(value)}
        if is_mesh(value):
            return self._mesh(value)
        if not isinstance(value, torch.Tensor):
            return value  # plain data has a canonical text, anything else has none
        kind = type(value)
        if kind is not torch.Tensor and kind is not torch.nn.Parameter:
            return self._subclass(value, fake, where)
        described = _tensor(value, fake, names)
        number = getattr(fake, "item_memo", None)
        if isinstance(number, torch.SymFloat):
            described["number"] = names.text(number)
        described["parameter"] = kind is torch.nn.Parameter
        if value.layout is torch.strided:
            storage = value.untyped_storage()
            # Who shares memory with whom decides which inputs are one.
            described["memory"] = storages.setdefault(storage._cdata, len(storages)) if storage.nbytes() else None
        base = value._base
        if base is not None:
            described["base"] = _tensor(base, None if fake is None else fake._base, names)
        return described

    def _mesh(self, mesh: Any) -> Any:
        """A mesh, written out where it is met first: all parameters of a model have the same."""
        if id(mesh) in self.meshes:
            return {"mesh": self.meshes[id(mesh)]}
        self.meshes[id(mesh)] = len(self.meshes)
        return describe_mesh(mesh)

    def _subclass(self, value: Any, fake: Any, where: str) -> Any:
        """A wrapper: its class by name and version, its context, and what it holds."""
        from aotkit_functionalize import Unsupported
        from aotkit_functionalize.subclasses import encode_class, encode_context

        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if not hasattr(kind, "__tensor_flatten__"):
            raise Uncacheable(f"input {where} is a {name}, which does not tell what it is made of")
        if name not in self.allowed and not name.startswith("torch."):
            raise Uncacheable(
                f"input {where} is a {name}, whose code no version of torch names; list it in the option 'cacheable' "
                "with a version of your own"
            )
        if fake is not None and not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            raise Uncacheable(f"input {where} is a {name} with sizes that are known at run time only")
        if value._base is not None:
            raise Uncacheable(f"input {where} is a {name} that is a view")
        attributes, context = value.__tensor_flatten__()
        try:
            written = [encode_class(kind), self.allowed.get(name, ""), encode_context(kind, context)]
        except Unsupported as error:
            raise Uncacheable(f"input {where}: {error}") from error
        inside = [[a, self.describe(getattr(value, a), None, f"{where}.{a}")] for a in attributes]
        outside = _tensor(value, None, self.names)
        outside["parameter"] = isinstance(value, torch.nn.Parameter)
        return {"subclass": written, "inside": inside, "outside": outside}


def _tensor(value: torch.Tensor, fake: Any, names: Names) -> dict[str, Any]:
    sized = value if fake is None else fake
    strided = value.layout is torch.strided
    numbers = (*sized.shape, *((*sized.stride(), sized.storage_offset()) if strided else ()))
    if fake is None or not any(isinstance(n, torch.SymInt) for n in numbers):
        shape, strides = tuple(sized.shape), tuple(sized.stride()) if strided else ()
        offset: Any = sized.storage_offset() if strided else 0
    else:
        dims = [names.text(n) if isinstance(n, torch.SymInt) else n for n in numbers]
        shape, strides = tuple(dims[: value.dim()]), tuple(dims[value.dim() : -1])
        offset = dims[-1]
    return {
        "dtype": str(value.dtype),
        "device": str(value.device),
        "layout": str(value.layout),
        "shape": shape,
        "stride": strides,
        "offset": offset,
        "requires_grad": value.requires_grad,
        "leaf": value.is_leaf,
        "bits": (value.is_conj(), value.is_neg(), value.is_inference()),
    }


def graph_key(
    gm: torch.fx.GraphModule, args: Sequence[Any], twins: Sequence[Any], options: Options, names: Names
) -> dict[str, Any]:
    """All parts of the key but the ranges of symbols. Raises :class:`Uncacheable`."""
    allowed = dict(entry.partition("@")[::2] for entry in options.cacheable)
    chosen = {f.name: getattr(options, f.name) for f in fields(options) if f.name not in _NOT_OUTPUT}
    graph = "\n".join(graph_lines(gm, allowed))
    if doubt := replaced_sources():
        raise Uncacheable(doubt)
    return {
        "inputs": describe_inputs(args, twins, names, allowed),
        "graph": graph,
        "blocks": _blocks(gm, args),
        "distributed_tensors": state_of_distributed_tensors(args, graph, allowed),
        "options": chosen,
        **{f"state.{name}": value for name, value in torch_state().items()},
        **environment_parts(),
        "env.target": str(host_machine()),
        "env.compilers": compilers(),
        "env.cuda": cuda_capabilities("device cuda" in graph),
        "env.sources": sources_digest(),
        "format": ARTIFACT_FORMAT,
    }


def _blocks(gm: torch.fx.GraphModule, args: Sequence[Any]) -> list[int]:
    """For each node the number of the block that it is of, where there may be collectives."""
    if not collectives_of(gm) and next(groups_of_inputs(args), None) is None:
        return []
    from aotkit_inductor_lower.graph_passes.model_blocks import block_of  # a stage of a compile

    graphs = [module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule)]
    numbers = {"": 0}
    return [numbers.setdefault(block_of(node), len(numbers)) for graph in graphs for node in graph.nodes]
