"""A module or an exported program, compiled for inference, into one file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, TensorArgument
from torch.fx import GraphModule

from aotkit_aot_trace.callables import GraphFunction
from aotkit_cache import Uncacheable
from aotkit_functionalize import Unsupported
from aotkit_inductor_lower.options import Processor

from ..artifact.custom_ops import operators_of
from ..artifact.frozen import FrozenArguments
from ..artifact.guards import Names, guards_of
from ..artifact.package_file import write_package
from ..artifact.package_sizes import declared_ranges, narrowed, opened
from ..artifact.package_symbols import Multiple, in_sizes, shown_sizes, with_sizes
from ..artifact.package_weights import overlaps_itself, shared_memory
from ..artifact.records import Artifact
from ..artifact.structure import describe_structure
from ..artifact.torch_state import outside_of_modes
from ..driver.bugs import first_line, is_bug, raise_bug
from ..driver.compile import compile_function
from ..driver.context import CompileContext
from ..driver.package import MANIFEST_FORMAT, environment_of_package
from ..driver.recordings import with_recordings
from ..driver.refusals import REFUSALS
from ..driver.stages import own_stages
from ..environment import read_environment
from ..errors import PackageError
from ..options import Options
from ..recorder import Recorder
from .exported import apart, written_graph

__all__ = ["aot_compile"]

_DEVICES = ("cpu", "cuda")
_CANT_PACK = "the compiled program can't be packed: {}"
_WEIGHTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def aot_compile(
    model: torch.nn.Module | ExportedProgram,
    args: Sequence[Any] | None,
    path: str | os.PathLike[str],
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    options: Options | Sequence[Options] | None = None,
    signing_key: bytes | str | None = None,
    recorder: Recorder | None = None,
) -> str:
    """Compile for inference and write one file, which :func:`aotkit.load` runs in a process that compiles nothing.

    Args:
        model: a module, which is exported with ``torch.export.export(model, args, kwargs, dynamic_shapes=...)``, or a
            program that was exported. Sizes that are dynamic there may vary, in their ranges, in the package.
        args: example arguments of a module; not looked at for a program.
        path: the file to write, replaced if it exists.
        options: of the compile. Several, which differ in ``processor``, are compiled one after the other into one file;
            a process takes the kernels for the highest level that its processor has.
        signing_key: at least 16 secret bytes, or characters, for files that pass through other hands; ``load`` then
            wants the same.

    Returns ``path``. Raises :class:`PackageError` for what can't be packed, :class:`CompileError` for a graph that is
    not supported; what ``torch.export`` raises passes through.
    """
    if isinstance(model, ExportedProgram):
        program = model
    else:
        own, named = apart(model, (tuple(args or ()), dict(kwargs or {})))
        with torch.no_grad():
            program = torch.export.export(model, own, named, dynamic_shapes=dynamic_shapes, strict=False)
    with outside_of_modes(), torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        return _write(program, path, options, signing_key, recorder)


def _write(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    options: Options | Sequence[Options] | None,
    signing_key: bytes | str | None,
    recorder: Recorder | None,
) -> str:
    """What was exported, whose graph says all, compiled and written."""
    written = written_graph(program)
    inputs = _inputs(program)
    inputs, multiples = _with_shown_sizes(inputs)
    _check_symbols(inputs)
    device = _device_of(inputs)
    variants: list[dict[str, Any]] = []
    sections: dict[str, bytes] = {}
    guards: list[Any] = []
    constant = set(_weights(inputs))
    for chosen in _best_first(options):
        folder = f"{chosen.processor}/" if variants else ""
        artifact = _compile(written.module, inputs, multiples, chosen, recorder or Recorder())
        packed, described = _packed(artifact)
        sections.update({f"{folder}{name}": data for name, data in packed.items()})
        constant &= _only_constants(inputs, artifact)
        guards += [guard for guard in artifact.guards if guard not in guards]
        made = environment_of_package(chosen.processor, device)
        variants.append({"folder": f"graph/{folder}".rstrip("/"), "environment": made, "artifact": described})
    weights, same = _distinct(inputs)
    kept = {same.get(name, name) for name in _weights(inputs) if name not in constant}
    gone = {name for name in _weights(inputs) if same.get(name, name) not in kept}
    weights, views = shared_memory({name: weight for name, weight in weights.items() if name not in gone})
    manifest = {
        "format": MANIFEST_FORMAT,
        "variants": variants,
        "operators": operators_of(program.graph_module, (), needs_source=False),
        "weights": _weights(inputs),
        "same": {name: first for name, first in same.items() if first not in gone},
        "gone": sorted(gone),
        "views": views,
        "devices": {name: str(w.device) for name, w in weights.items() if w.device.type != "cpu"},
        "strides": {name: list(w.stride()) for name, w in weights.items() if not w.is_contiguous()},
        **_interface(program, written.results, inputs, multiples, replace(artifact, guards=guards)),
    }
    write_package(path, manifest, sections, weights, signing_key)
    return os.fspath(path)


def _best_first(given: Options | Sequence[Options] | None) -> list[Options]:
    """What is compiled; the highest level first."""
    options = list(given) if isinstance(given, Sequence) else [given or read_environment().options()]
    levels = [one.processor for one in options]
    if not options or len(set(levels)) < len(levels):
        raise PackageError(f"a package is compiled once for each processor, and the options have {levels}")
    rank = ["interpreter", *(name for name in get_args(Processor) if name != "host"), "host"]
    ordered = sorted(options, key=lambda one: -rank.index(one.processor) if one.processor in rank else 1)
    return [one.patch(fallback="error") for one in ordered]


@dataclass(frozen=True, slots=True)
class _Input:
    """A placeholder: ``fake`` is its value in the graph, ``example`` a real one, ``weight`` its name in the package."""

    name: str
    fake: Any
    example: Any
    weight: str | None

    @property
    def is_constant(self) -> bool:
        return not isinstance(self.fake, torch.Tensor | torch.SymInt)


def _inputs(program: ExportedProgram) -> list[_Input]:
    found = []
    placeholders = program.graph_module.graph.find_nodes(op="placeholder")
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        fake = node.meta.get("val")
        if spec.kind in _WEIGHTS:
            assert spec.target is not None
            held = program.state_dict if spec.target in program.state_dict else program.constants
            example = held[spec.target]
            plain = type(example) in (torch.Tensor, torch.nn.Parameter) and example.layout is torch.strided
            if not plain or example.device.type not in _DEVICES:
                raise PackageError(
                    f"the weight {spec.target} is no plain tensor on the CPU or on CUDA, so it can't be packed"
                )
            found.append(_Input(node.name, fake, example.detach(), spec.target))
        elif spec.kind is InputKind.USER_INPUT:
            example = fake
            if isinstance(fake, torch.Tensor):
                sizes = [_hint(n) for n in (*fake.shape, *fake.stride())]
                example = torch.empty_strided(
                    sizes[: fake.dim()], sizes[fake.dim() :], dtype=fake.dtype, device=fake.device
                )
            found.append(_Input(node.name, fake, example, None))
        else:
            raise PackageError(f"the program takes {spec.kind.name.lower()} {node.name}, which can't be packed")
    _refuse_shared_bits([entry for entry in found if entry.weight is not None])
    return _tied([_with_own_elements(_without_bits(entry)) for entry in found])


def _refuse_shared_bits(weights: Sequence[_Input]) -> None:
    """A copy without bits would not see what is written to the other weight."""
    memories = [entry.example.untyped_storage().data_ptr() for entry in weights]
    for entry, memory in zip(weights, memories, strict=True):
        lazy = entry.example.is_conj() or entry.example.is_neg()
        if lazy and memory and memories.count(memory) > 1:
            raise PackageError(
                f"the weight {entry.weight} is lazily conjugated or negated and shares memory with another weight, "
                "which a package can't keep; give resolve_conj().resolve_neg() of it"
            )


def _without_bits(entry: _Input) -> _Input:
    """A file has elements, and a package's caller gives memory: neither has the bits of a lazily conjugated tensor."""
    fake = entry.fake
    if not isinstance(fake, torch.Tensor) or not (fake.is_conj() or fake.is_neg()):
        return entry
    assert isinstance(fake, FakeTensor)
    example = entry.example.resolve_conj().resolve_neg()
    with fake.fake_mode:
        strides = fake.stride() if entry.weight is None else example.stride()
        plain = torch.empty_strided(fake.shape, strides, dtype=fake.dtype, device=fake.device)
    return replace(entry, fake=plain, example=example)


def _with_own_elements(entry: _Input) -> _Input:
    """An argument whose example is expanded, or overlaps itself, is compiled as a contiguous one, to which a call's is
    copied: by the example's strides no code could read one whose elements differ."""
    fake = entry.fake
    if entry.weight is not None or not isinstance(fake, torch.Tensor):
        return entry
    if not overlaps_itself(entry.example.shape, entry.example.stride()):
        return entry
    assert isinstance(fake, FakeTensor)
    with fake.fake_mode:
        plain = torch.empty(fake.shape, dtype=fake.dtype, device=fake.device)
    return replace(entry, fake=plain, example=torch.empty_like(entry.example, memory_format=torch.contiguous_format))


def _device_of(inputs: Sequence[_Input]) -> torch.device:
    """The device that a package is for: the only CUDA device of its inputs, or the CPU."""
    devices = {entry.fake.device for entry in inputs if isinstance(entry.fake, torch.Tensor)} - {torch.device("cpu")}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise PackageError(f"the program has inputs on several devices ({found}); a package is for one of them")
    return next(iter(devices), torch.device("cpu"))


def _tied(inputs: list[_Input]) -> list[_Input]:
    """Weights that are one tensor under several names get one example, which is how a compile recognises them."""
    known: dict[Any, torch.Tensor] = {}
    result = []
    for entry in inputs:
        example = entry.example
        if entry.weight is not None and example.numel():
            key = (example.data_ptr(), example.shape, example.stride(), example.dtype)
            example = known.setdefault(key, example)
        result.append(_Input(entry.name, entry.fake, example, entry.weight))
    return result


def _hint(size: Any) -> int:
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def _compile(
    graph: GraphModule, inputs: list[_Input], multiples: Sequence[Multiple], options: Options, recorder: Recorder
) -> Artifact:
    variable = [i for i, entry in enumerate(inputs) if not entry.is_constant]
    values = [entry.fake for entry in inputs]

    def arguments(flat: Sequence[Any]) -> list[Any]:
        full = list(values)
        for position, value in zip(variable, flat, strict=True):
            full[position] = value
        return full

    weights = sum(entry.weight is not None for entry in inputs)
    recorder = recorder.of_graph("package")
    tensors = {k: inputs[i].example for k, i in enumerate(variable) if inputs[i].weight is not None}
    frozen = FrozenArguments(tensors) if options.freezing else None
    ctx = CompileContext(options, recorder, own_stages(), "package", num_static=weights, publish=False, frozen=frozen)
    ctx = with_recordings(ctx)
    function = GraphFunction(graph, arguments)
    fakes = [inputs[i].fake for i in variable]
    names, shape_env = _names(fakes)
    try:
        with torch.no_grad(), opened(shape_env):
            artifact = compile_function(function, fakes, [inputs[i].example for i in variable], ctx)
    except REFUSALS as refusal:
        raise PackageError(f"the program could not be compiled: {refusal}") from refusal
    except Exception as error:
        if is_bug(error):
            raise_bug(error, first_line(graph))
        raise
    try:
        return replace(artifact, guards=guards_of(shape_env, names, lambda expr: in_sizes(expr, multiples)))
    except Uncacheable as error:
        raise PackageError(_CANT_PACK.format(error.reason)) from error


def _packed(artifact: Artifact) -> tuple[dict[str, bytes], dict[str, Any]]:
    reason = artifact.unportable()
    if reason is not None:
        raise PackageError(_CANT_PACK.format(reason))
    try:
        return artifact.to_sections()
    except Unsupported as error:
        raise PackageError(_CANT_PACK.format(error)) from error


def _with_shown_sizes(inputs: Sequence[_Input]) -> tuple[list[_Input], list[Multiple]]:
    """See Note [Multiples]."""
    fakes = [entry.fake for entry in inputs]
    with opened(_names(entry.fake for entry in inputs if not entry.is_constant)[1]):
        multiples = shown_sizes(fakes)
        return [replace(entry, fake=with_sizes(entry.fake, multiples)) for entry in inputs], multiples


def _check_symbols(inputs: Sequence[_Input]) -> None:
    """Raise :class:`PackageError` for sizes of which no call tells the symbols: ``2 * b`` alone."""
    names, _ = _names([entry.fake for entry in inputs if not entry.is_constant])
    for entry in inputs:
        for dim, size in enumerate(entry.fake.shape) if isinstance(entry.fake, torch.Tensor) else ():
            if isinstance(size, torch.SymInt):
                symbols = sorted(map(str, size.node.expr.free_symbols))
                unknown = [symbol for symbol in symbols if names.numbers[symbol] not in names.values]
                if unknown:
                    raise PackageError(
                        f"dimension {dim} of {entry.name} has the size {size}, and {', '.join(unknown)} is the size of "
                        "no input by itself, so no call could tell it. Declare the dimension without the derived size"
                    )


def _names(fakes: Iterable[Any]) -> tuple[Names, Any]:
    names, shape_env = Names(), None
    for fake in fakes:
        for size in (*fake.shape, *fake.stride()) if isinstance(fake, torch.Tensor) else (fake,):
            if isinstance(size, torch.SymInt):
                names.text(size)
                shape_env = size.node.shape_env
    return names, shape_env


def _weights(inputs: Sequence[_Input]) -> list[str]:
    return [entry.weight for entry in inputs if entry.weight is not None]


def _only_constants(inputs: Sequence[_Input], artifact: Artifact) -> set[str]:
    """Weights that a frozen graph needs no more: not even as constants as they are."""
    named = [entry.weight for entry in inputs if not entry.is_constant]
    borrowed = [index for index in artifact.forward.constants.values() if isinstance(index, int)]
    return {str(named[index]) for index in {*artifact.frozen} - {*borrowed}}


def _distinct(inputs: list[_Input]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Weights to write, and names of those that are another one."""
    weights: dict[str, torch.Tensor] = {}
    same: dict[str, str] = {}
    first: dict[int, str] = {}
    for entry in inputs:
        if entry.weight is None:
            continue
        known = first.setdefault(id(entry.example), entry.weight)
        if known == entry.weight:
            weights[entry.weight] = entry.example
        else:
            same[entry.weight] = known
    return weights, same


def _interface(
    program: ExportedProgram,
    outputs: Sequence[Any],
    inputs: list[_Input],
    multiples: Sequence[Multiple],
    artifact: Artifact,
) -> dict[str, Any]:
    """Structures of arguments and results, sizes and ranges, as JSON."""
    names, _ = _names([entry.fake for entry in inputs if not entry.is_constant])
    users = [entry for entry in inputs if entry.weight is None]
    stand_ins = [entry.fake if entry.is_constant else _Leaf(i) for i, entry in enumerate(users)]
    nested, keywords = torch.utils._pytree.tree_unflatten(stand_ins, program.call_spec.in_spec)
    leaves: list[Any] = []
    structure = describe_structure([list(nested), dict(keywords)], lambda v: isinstance(v, _Leaf), leaves)
    if [leaf.position for leaf in leaves] != [i for i, entry in enumerate(users) if not entry.is_constant]:
        raise PackageError("the program takes its arguments in another order than their structure has them")
    constants = [_Leaf(i) if _is_value(arg) else arg.value for i, arg in enumerate(outputs)]
    result = torch.utils._pytree.tree_unflatten(constants, program.call_spec.out_spec)
    written = {info.index for info in artifact.metadata.inputs if info.mutation.value != "none"}
    variable = [i for i, entry in enumerate(inputs) if not entry.is_constant]
    arguments = [_argument(inputs[i], names, k in written) for k, i in enumerate(variable) if inputs[i].weight is None]
    declared = declared_ranges(program.range_constraints, names.numbers, multiples)
    by_number = {names.numbers[str(multiple.size)]: multiple for multiple in multiples}
    return {
        "inputs": structure,
        "outputs": _numbered(describe_structure(result, lambda v: isinstance(v, _Leaf), leaves := []), leaves),
        "arguments": arguments,
        "ranges": narrowed(declared, artifact.guards, arguments, by_number),
    }


@dataclass(frozen=True, slots=True)
class _Leaf:
    position: int


def _is_value(argument: Any) -> bool:
    return isinstance(argument, TensorArgument) or type(argument).__name__ in ("SymIntArgument", "SymBoolArgument")


def _numbered(described: Any, leaves: list[Any]) -> Any:
    """The structure with its leaves numbered by the program's outputs."""
    ((kind, body),) = described.items()
    if kind == "leaf":
        return {"leaf": leaves[body].position}
    if kind in ("tuple", "list"):
        return {kind: [_numbered(item, leaves) for item in body]}
    if kind == "dict":
        return {kind: [[key, _numbered(item, leaves)] for key, item in body]}
    if kind == "record":
        return {kind: {**body, "fields": [[key, _numbered(item, leaves)] for key, item in body["fields"]]}}
    return described


def _argument(entry: _Input, names: Names, written: bool) -> dict[str, Any]:
    fake = entry.fake
    if isinstance(fake, torch.SymInt):
        return {
            "name": entry.name, "dtype": "", "shape": [], "stride": [], "device": "", "written": False,
            "symbol": names.json(fake),
        }  # fmt: skip
    return {
        "name": entry.name,
        "dtype": str(fake.dtype),
        "shape": [names.json(size) for size in fake.shape],
        "stride": [names.json(size) for size in fake.stride()],
        "device": str(fake.device),
        "written": written,
        "symbol": None,
    }
