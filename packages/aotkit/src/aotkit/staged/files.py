"""The file of a stage: a package file (see Note [Package file]) without weights that says which stage it is."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import torch

from ..artifact.package_file import write_package
from ..artifact.tensors import bytes_of, tensor_of
from ..driver.package import environment_of_package
from ..errors import PackageError
from ..options import Options

__all__ = ["check_format", "constant_sections", "options_from", "read_constants", "write_stage"]

_FORMAT = 2
_DEVICES = ("cpu", "cuda")


def write_stage(
    path: str | os.PathLike[str],
    stage: str,
    content: Mapping[str, Any],
    sections: Mapping[str, bytes],
    options: Options,
    device: str,
    signing_key: bytes | str | None,
) -> None:
    """Write one. ``device``: the one that its kernels are, or would be, for."""
    environment = environment_of_package(options.processor, torch.device(device))
    manifest = {"stage": stage, "format": _FORMAT, "environment": environment, "options": _plain(options), **content}
    write_package(path, manifest, sections, {}, signing_key)


def check_format(manifest: Mapping[str, Any], path: Any) -> None:
    """Raise :class:`PackageError` for a file that is no stage of this version."""
    if "stage" not in manifest:
        raise PackageError(f"{os.fspath(path)} is a package and no stage of a compile; read it with aotkit.load")
    if manifest["format"] != _FORMAT:
        raise PackageError(
            f"the stage has format {manifest['format']}, and this version reads format {_FORMAT}; capture it again"
        )


def options_from(data: Mapping[str, Any]) -> Options:
    """Options as a manifest holds them."""
    return Options().patch(**data)


def _plain(options: Options) -> dict[str, Any]:
    named = asdict(options)
    return {f.name: sorted(v) if isinstance(v := named[f.name], frozenset) else v for f in fields(options)}


def constant_sections(name: str, constants: Mapping[str, torch.Tensor]) -> tuple[dict[str, bytes], list[Any]]:
    """The data of tensors, and what they are."""
    sections, described = {}, []
    for number, (constant, value) in enumerate(constants.items()):
        plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
        if not plain or value.device.type not in _DEVICES:
            raise PackageError(f"the stage holds the constant {constant}, which is no plain tensor, and can't be saved")
        sections[f"{name}.constant{number}"] = bytes_of(value.detach())
        described.append([constant, str(value.dtype), list(value.shape), list(value.stride()), str(value.device)])
    return sections, described


def read_constants(name: str, sections: Mapping[str, bytes], described: list[Any]) -> dict[str, torch.Tensor]:
    """The inverse of :func:`constant_sections`."""
    return {
        constant: tensor_of(sections[f"{name}.constant{number}"], dtype, shape, stride, device)
        for number, (constant, dtype, shape, stride, device) in enumerate(described)
    }
