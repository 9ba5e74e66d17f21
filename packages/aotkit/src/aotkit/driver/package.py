"""A compiled model in a file, loaded: runs without tracing or compiling anything.

What this module imports is what a deployed process needs; see Note [What is loaded].
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from aotkit_inductor_lower.options import INTERPRETERS
from aotkit_inductor_lower.runtime import BindError
from aotkit_inductor_lower.targets.cpu import processor_machine
from aotkit_runtime_wrappers import WrapperError

from ..__about__ import __version__
from .._dynamo_frames import hide_from_dynamo
from ..artifact.custom_ops import check_operators
from ..artifact.guards import evaluate, guards_hold
from ..artifact.package_file import read_package
from ..artifact.package_sizes import package_text, relation_text, size_error
from ..artifact.package_weights import overlaps_itself, views_in, writable_part
from ..artifact.records import ARTIFACT_FORMAT, Artifact
from ..artifact.structure import flatten_like, rebuild_structure
from ..artifact.torch_state import call_unwatched, outside_of_modes
from ..errors import FrozenParameterError, PackageError
from .bind import bind
from .process import collections_put_off

__all__ = ["MANIFEST_FORMAT", "Package", "check_environment", "environment_of_package", "load"]


MANIFEST_FORMAT = 3
"""Of a package's manifest, which the runner in C reads too."""

_GONE = torch.empty(0)
"""Stands for a weight that is not in the file, since only its value is needed, which is a constant of the code."""
_CPU = torch.device("cpu")


def environment_of_package(processor: str = "host", device: torch.device = _CPU) -> dict[str, Any]:
    """What a package that is compiled here can be loaded with: for this processor or a level of processors, or with
    kernels for what a CUDA ``device`` can."""
    target = processor_machine("host" if processor in INTERPRETERS else processor)
    return {
        "aotkit": __version__,
        "artifact": ARTIFACT_FORMAT,
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.machine()}",
        "device": "cpu" if device.type == "cpu" else _architecture(device),
        "processor": target.cpu,
        "features": sorted(f[1:] for f in target.features.split(",") if f.startswith("+")),
    }


def _architecture(device: torch.device) -> str:
    major, minor = torch.cuda.get_device_capability(device)
    return f"{device} of architecture sm_{major}{minor}"


@collections_put_off()
def load(
    path: str | os.PathLike[str],
    *,
    signing_key: bytes | str | None = None,
    check_weights: bool = True,
    classes: Sequence[type] = (),
) -> Package:
    """Load a package that :func:`aotkit.aot_compile` wrote; weights are mapped.

    A package holds native code, which runs in this process: load only files that you trust.

    Args:
        path: the file.
        signing_key: a file that was not signed with it is refused unread.
        check_weights: read the weights once, to see that they are whole. Without it a call reads what it uses.
        classes: of records among the results (dataclasses, named tuples, Transformers' outputs), which are to come back
            as such. Without its class a record is a dict whose values are attributes too; nothing is imported for a
            name in a file.

    Raises :class:`PackageError` if the file is no package, was made for another version of torch or another processor,
    or lacks the signature.
    """
    with outside_of_modes(), torch.inference_mode(False):  # it serves other calls, too
        return _load(path, signing_key, check_weights, classes)


def _load(
    path: str | os.PathLike[str], signing_key: bytes | str | None, check_weights: bool, classes: Sequence[type]
) -> Package:
    manifest, sections, weights = read_package(path, signing_key, check_weights)
    if "stage" in manifest:
        raise PackageError(f"{os.fspath(path)} is a stage of a compile and no package; read it with aotkit.staged.load")
    if manifest.get("format") != MANIFEST_FORMAT:
        raise PackageError(f"the package {os.fspath(path)} was written by another version of aotkit; compile it again")
    variant = _chosen(manifest)
    check_operators(manifest["operators"])
    inside = "".join(f"{part}/" for part in variant["folder"].split("/")[1:])
    own = {name.removeprefix(inside): data for name, data in sections.items() if name.startswith(inside)}
    missing = _in_the_file(manifest) - weights.keys()
    if missing:
        raise PackageError(f"the package {os.fspath(path)} lacks the weights {', '.join(sorted(missing))}")
    for name, stride in manifest["strides"].items():  # the file holds the elements in the order of their indices
        kept = weights[name]
        weights[name] = torch.empty_strided(kept.shape, stride, dtype=kept.dtype).copy_(kept)
    for name, device in manifest["devices"].items():
        weights[name] = weights[name].to(device)
    weights = views_in(weights, manifest["views"])
    for name, first in manifest["same"].items():
        weights[name] = weights[first]
    leading = [weights.get(name, _GONE) for name in manifest["weights"]]
    try:
        artifact = Artifact.from_sections(own, variant["artifact"])
        call = bind(artifact, name="package", arguments=dict(enumerate(leading)))
    except (BindError, WrapperError, ValueError, KeyError) as error:
        raise PackageError(f"the package {os.fspath(path)} can't be loaded: {error}") from error
    return Package(call, manifest, weights, artifact.guards, variant, classes)


def _in_the_file(manifest: Mapping[str, Any]) -> set[str]:
    """The names that the file has to hold."""
    own = set(manifest["weights"]).difference(manifest["gone"], manifest["same"], manifest["views"])
    return own.union(view[0] for view in manifest["views"].values())


def _chosen(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first of the variants, the best of which comes first, that can run here; what the last lacks is raised."""
    variants: list[Mapping[str, Any]] = manifest["variants"]
    for variant in variants[:-1]:
        try:
            check_environment(variant["environment"])
        except PackageError:
            continue
        return variant
    check_environment(variants[-1]["environment"])
    return variants[-1]


class Package:
    """A loaded package: call it as the model that it was made of. Results never require grad.

    Attributes:
        manifest: what the package says about itself: versions, processors, arguments, ranges of sizes, results.
        variant: the part of the manifest about the kernels that run here.
        weights: parameters and buffers by name, in private memory. Writing to them changes what later calls compute.
    """

    def __init__(
        self,
        call: Any,
        manifest: Mapping[str, Any],
        weights: Mapping[str, torch.Tensor],
        guards: Any,
        variant: Mapping[str, Any],
        classes: Sequence[type],
    ) -> None:
        self._classes = {f"{cls.__module__}.{cls.__qualname__}": cls for cls in classes}
        self.manifest, self.variant = manifest, variant
        self.weights = dict(weights)
        self._call = call
        self._guards = guards
        self._frozen = {manifest["weights"][index] for index in variant["artifact"]["frozen"]}
        self._leading = [self.weights.get(name, _GONE) for name in manifest["weights"]]
        self._arguments = [_Argument(**described) for described in manifest["arguments"]]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run. Raises ``TypeError`` or ``ValueError`` for arguments that the package was not compiled for."""
        return call_unwatched(self._run, args, kwargs)

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if get_proxy_mode() is not None:
            raise PackageError(
                "a package was called while torch.export or make_fx records what runs, which does not see its kernels; "
                "record the model that it was made of"
            )
        flat: list[Any] = []
        flatten_like(self.manifest["inputs"], [list(args), kwargs], flat)
        symbols: dict[str, int] = {}
        for argument, value in zip(self._arguments, flat, strict=True):
            argument.check(value, symbols)
        for argument, value in zip(self._arguments, flat, strict=True):
            argument.note_strides(value, symbols)
        self._check_sizes(flat, symbols)
        values = [a.laid_out(v, symbols) for a, v in zip(self._arguments, flat, strict=True)]
        with torch.no_grad():
            results = self._call([*self._leading, *values])
        return rebuild_structure(self.manifest["outputs"], results, self._classes)

    def load_weights(self, weights: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
        """Copy new values into :attr:`weights`.

        Raises ``KeyError`` for unknown names and, if ``strict``, missing ones; ``ValueError`` for another shape, or
        for values that differ where an expanded weight has one;
        :class:`FrozenParameterError` for weights that are constants of the code (option ``freezing``).
        """
        frozen = sorted(weights.keys() & self._frozen)
        if frozen:
            raise FrozenParameterError(
                f"the package was compiled for the values of {', '.join(frozen)}; compile it again, or leave "
                "'freezing' out"
            )
        unknown = sorted(weights.keys() - self.weights.keys())
        missing = sorted(self.weights.keys() - weights.keys() - self._frozen) if strict else []
        if unknown or missing:
            raise KeyError(f"weights that the package does not have: {unknown}; weights that are missing: {missing}")
        for name, value in weights.items():
            if value.shape != self.weights[name].shape:
                wanted = tuple(self.weights[name].shape)
                raise ValueError(f"the weight {name} has shape {tuple(value.shape)}; the package needs {wanted}")
        parts = {name: writable_part(self.weights[name], value) for name, value in weights.items()}
        for name, part in parts.items():
            if part is None:
                raise ValueError(f"several elements of the weight {name} are one number, and differ in the new values")
        with torch.no_grad():
            for part in parts.values():
                if part is not None:
                    part[0].copy_(part[1])

    def __str__(self) -> str:
        """Versions and processor, arguments with the sizes that they may have, weights."""
        return package_text(self.manifest, self.variant, self.weights)

    def _check_sizes(self, flat: list[Any], symbols: dict[str, int]) -> None:
        for name, (low, high) in self.manifest["ranges"].items():
            if name in symbols and not (low <= symbols[name] and (high is None or symbols[name] <= high)):
                raise ValueError(size_error(name, symbols[name], (low, high), self.manifest["arguments"]))
        for argument, value in zip(self._arguments, flat, strict=True):
            if isinstance(value, torch.Tensor):
                for dim, (size, wanted) in enumerate(zip(value.shape, argument.shape, strict=True)):
                    if evaluate(wanted, symbols) != size:
                        raise ValueError(
                            f"{argument.name} has size {size} in dimension {dim}, where the package was compiled for "
                            f"{evaluate(wanted, symbols)}"
                        )
            elif value != evaluate(argument.symbol, symbols):
                known = evaluate(argument.symbol, symbols)
                raise ValueError(f"{argument.name} is {value}, where the package was compiled for {known}")
        for guard in self._guards:
            if not guards_hold([guard], symbols):
                raise ValueError(
                    f"the package was compiled for sizes with {relation_text(guard, self.manifest['arguments'])}, "
                    f"which does not hold for {[tuple(v.shape) for v in flat if isinstance(v, torch.Tensor)]}"
                )


class _Argument:
    """One tensor or integer argument as the package was compiled for it; sizes are expressions over symbols, and so is
    ``symbol``, what an integer was found to be; ``None`` for tensors."""

    __slots__ = ("device", "dtype", "name", "shape", "stride", "symbol", "written")

    def __init__(self, name: str, dtype: str, shape: Any, stride: Any, device: str, written: bool, symbol: Any) -> None:
        self.device = torch.device(device or "cpu")
        self.name, self.shape, self.stride, self.written, self.symbol = name, shape, stride, written, symbol
        self.dtype = getattr(torch, dtype.removeprefix("torch.")) if dtype else None

    def check(self, value: Any, symbols: dict[str, int]) -> None:
        """Refuse another type, and note the sizes that symbols stand for."""
        if self.symbol is not None:
            if type(value) is not int:
                raise TypeError(f"{self.name} has to be an integer, not a {type(value).__name__}")
            if isinstance(self.symbol, str):
                symbols.setdefault(self.symbol, value)
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self.name} has to be a tensor, not a {type(value).__name__}")
        if value.is_nested or not _has_memory(value):
            raise TypeError(f"{self.name} is a {type(value).__name__} without memory of its own, which code can't read")
        if value.dtype is not self.dtype or value.device != self.device or value.layout is not torch.strided:
            raise TypeError(
                f"{self.name} is a {value.layout} tensor of {value.dtype} on device {value.device}; the package was "
                f"compiled for a dense one of {self.dtype} on device {self.device}"
            )
        if value.dim() != len(self.shape):
            raise ValueError(
                f"{self.name} has {value.dim()} dimensions; the package was compiled for {len(self.shape)}"
            )
        for size, wanted in zip(value.shape, self.shape, strict=True):
            if isinstance(wanted, str):
                symbols.setdefault(wanted, size)

    def note_strides(self, value: Any, symbols: dict[str, int]) -> None:
        """Note what symbols of strides stand for, where no size tells: of a part of rows whose length varies."""
        for number, wanted in zip(value.stride() if self.stride else (), self.stride, strict=True):
            if isinstance(wanted, str):
                symbols.setdefault(wanted, number)

    def laid_out(self, value: Any, symbols: Mapping[str, int]) -> Any:
        """``value`` with the strides that the code reads by: itself, or a copy."""
        if self.symbol is not None:
            return value
        stride = tuple(evaluate(part, symbols) for part in self.stride)
        differs = any(size > 1 and a != b for size, a, b in zip(value.shape, value.stride(), stride, strict=True))
        if not differs and not value.is_conj() and not value.is_neg() and not value._is_zerotensor():
            return value
        if self.written:
            raise ValueError(
                f"{self.name} is written to and has strides {value.stride()}; the package was compiled for {stride}"
            )
        if overlaps_itself(value.shape, stride):
            raise ValueError(
                f"{self.name} has strides {value.stride()}; for these sizes the package was compiled for {stride}, by "
                "which elements are one number. Compile it with an example that is contiguous"
            )
        return torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device).copy_(value)


def _has_memory(value: torch.Tensor) -> bool:
    """Fake tensors, and subclasses that wrap other tensors, have none."""
    return type(value).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def check_environment(made: Mapping[str, Any]) -> None:
    """Raise :class:`PackageError` if what was made there can't be loaded here."""
    here = environment_of_package(device=_named_device(str(made.get("device"))))
    if made.get("artifact") != here["artifact"]:
        raise PackageError(
            f"the package has format {made.get('artifact')} (aotkit {made.get('aotkit')}); this is aotkit "
            f"{__version__}, which reads format {ARTIFACT_FORMAT}. Compile it again"
        )
    if _release(made["torch"]) != _release(here["torch"]):
        raise PackageError(
            f"the package was compiled with torch {made['torch']}, and this is torch {here['torch']}. Compile it "
            "again, or install that version"
        )
    for what in ("system", "device"):
        if made[what] != here[what]:
            raise PackageError(f"the package was compiled for {what} {made[what]!r}; this process has {here[what]!r}")
    missing = sorted(set(made["features"]) - set(here["features"]))
    if missing:
        raise PackageError(
            f"the package was compiled for a processor ({made['processor']}) with features that this one "
            f"({here['processor']}) lacks: {', '.join(missing)}. Compile it on such a processor"
        )


def _named_device(made: str) -> torch.device:
    """The device that a package was compiled for, if this process has it."""
    name = made.partition(" ")[0]
    if not name.startswith("cuda"):
        return _CPU
    device = torch.device(name)
    if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
        raise PackageError(f"the package was compiled for {made}, and this process has no such device")
    return device


def _release(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


hide_from_dynamo(Package.__call__, "the kernels of a loaded package are no part of a graph")
