"""The file of an ahead-of-time package: a zip archive without compression that tools can look into.

Note [Package file]
    manifest.json         what it is for: versions, processor, structures and sizes of arguments, names of weights
    graph/...             the sections of the artifact: wrapper plan, launch plan with object code, constants; those of
                          a further variant, for another level of processors, in graph/LEVEL/
    weights.safetensors   parameters and buffers, the data of each at a multiple of 64 bytes in the file, to be mapped
    signature             optional: HMAC-SHA256 with a shared key over all members before it, names included
Object code runs in the process that loads it: a package is to be trusted like a shared library. With a signing key,
nothing of a file is looked at before its signature holds.
"""

from __future__ import annotations

import ctypes
import hashlib
import hmac
import json
import math
import mmap
import os
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from aotkit_cache import CacheError, key_from_text
from aotkit_cache.sealed import seal

from ..errors import PackageError

__all__ = ["read_package", "read_weights", "write_block", "write_package"]

_WEIGHTS = "weights.safetensors"
_ALIGNMENT = 64
_GAP, _METADATA = ".gap", "__metadata__"
_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16", torch.uint32: "U32", torch.uint64: "U64",
}  # fmt: skip
# What Python's reader of zip archives and of JSON raises for bytes that are neither.
_UNREADABLE = (
    zipfile.BadZipFile, KeyError, ValueError, struct.error, EOFError, NotImplementedError, OverflowError, RuntimeError,
    zlib.error,
)  # fmt: skip
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


def write_package(
    path: str | os.PathLike[str],
    manifest: Mapping[str, Any],
    sections: Mapping[str, bytes],
    weights: Mapping[str, torch.Tensor],
    signing_key: bytes | str | None,
) -> None:
    """Write a package beside ``path`` and rename it there. Raises :class:`PackageError` for an unknown dtype."""
    target = Path(path).absolute()
    descriptor, temporary = tempfile.mkstemp(prefix=".aotkit-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w+b") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                archive.writestr("manifest.json", json.dumps(manifest, indent=1))
                for name, data in sections.items():
                    archive.writestr(f"graph/{name}", data)
                _write_weights(archive, weights)
            if signing_key is not None:
                file.flush()
                with zipfile.ZipFile(file, "r") as archive:
                    signature = _signature(archive, signing_key)
                with zipfile.ZipFile(file, "a", zipfile.ZIP_STORED) as archive:
                    archive.writestr("signature", signature)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write_block(
    path: str | os.PathLike[str],
    sections: Mapping[str, bytes],
    meta: Mapping[str, Any],
    signing_key: bytes | str | None,
) -> None:
    """Write a sealed block (``aotkit_cache.sealed``) beside ``path`` and rename it there."""
    try:
        data = seal(sections, meta, signing_key)
    except CacheError as error:
        raise PackageError(f"this is no signing key: {error}") from error
    target = Path(path).absolute()
    descriptor, temporary = tempfile.mkstemp(prefix=".aotkit-", dir=target.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.chmod(temporary, 0o644)
        os.replace(temporary, target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_weights(path: str | os.PathLike[str]) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, mapped and private. Raises :class:`PackageError` for a file that is none."""
    try:
        with open(path, "rb") as file:
            return _map_tensors(file.fileno(), 0)
    except (KeyError, ValueError, TypeError, struct.error) as error:
        raise PackageError(f"{os.fspath(path)} is no safetensors file, or is damaged: {error}") from error
    except OSError as error:
        raise PackageError(f"can't read {os.fspath(path)}: {error}") from error


def _write_weights(archive: zipfile.ZipFile, weights: Mapping[str, torch.Tensor]) -> None:
    """The safetensors layout: length of the header, JSON header, data; spaces in the header align the data."""
    header: dict[str, Any] = {}
    offset, holes = 0, 0
    for name, value in weights.items():
        if value.dtype not in _NAMES:
            raise PackageError(f"the weight {name} has dtype {value.dtype}, which a package can't hold")
        if name == _METADATA:
            raise PackageError(f"a weight can't be called {name}: the file's format has another use for that name")
        size = value.numel() * value.element_size()
        header[name] = {
            "dtype": _NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
        gap = -offset % _ALIGNMENT
        if gap:  # the format knows no gaps: filled by a tensor of its own, with a name that no weight can have
            header[f"{_GAP}{holes}"] = {"dtype": "U8", "shape": [gap], "data_offsets": [offset, offset + gap]}
            offset, holes = offset + gap, holes + 1
    text = json.dumps(header, separators=(",", ":")).encode()
    with archive.open(zipfile.ZipInfo(_WEIGHTS), "w", force_zip64=True) as member:
        assert archive.fp is not None
        text += b" " * (-(archive.fp.tell() + 8 + len(text)) % _ALIGNMENT)
        member.write(struct.pack("<Q", len(text)) + text)
        for value in weights.values():
            data = value.detach().cpu().contiguous().reshape(-1)
            size = data.numel() * data.element_size()
            if size:
                member.write(memoryview((ctypes.c_char * size).from_address(data.data_ptr())))
            member.write(bytes(-size % _ALIGNMENT))


def read_package(
    path: str | os.PathLike[str], signing_key: bytes | str | None, check_weights: bool = True
) -> tuple[dict[str, Any], dict[str, bytes], dict[str, torch.Tensor]]:
    """Manifest, sections and weights of the file at ``path``; weights are mapped, and private to this process.

    Raises :class:`PackageError` if it is no package, damaged, or not signed with ``signing_key``. Damage of the weights
    is not noticed without ``check_weights``, which reads them once.
    """
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            names = archive.namelist()
            if signing_key is not None:
                signed = archive.read("signature") if "signature" in names else b""
                if not hmac.compare_digest(signed, _signature(archive, signing_key)):
                    raise PackageError(f"{os.fspath(path)} was not signed with this key, or was changed since")
            manifest = json.loads(archive.read("manifest.json"))
            sections = {name[6:]: archive.read(name) for name in names if name.startswith("graph/")}
            weights = _map_weights(file.fileno(), archive, check_weights and signing_key is None)
            return manifest, sections, weights
    except _UNREADABLE as error:
        raise PackageError(f"{os.fspath(path)} is no package of aotkit, or is damaged: {error}") from error
    except OSError as error:
        raise PackageError(f"can't read the package {os.fspath(path)}: {error}") from error


def _signature(archive: zipfile.ZipFile, key: bytes | str) -> bytes:
    try:
        signer = hmac.new(key_from_text(key) if isinstance(key, str) else key, digestmod=hashlib.sha256)
    except (CacheError, TypeError) as error:
        raise PackageError(f"this is no signing key: {error}") from error
    for info in archive.infolist():
        if info.filename != "signature":
            signer.update(f"{info.filename}\0{info.file_size}\0".encode())
            with archive.open(info) as member:
                while chunk := member.read(1 << 20):
                    signer.update(chunk)
    return signer.digest()


def _map_weights(descriptor: int, archive: zipfile.ZipFile, check: bool) -> dict[str, torch.Tensor]:
    info = archive.getinfo(_WEIGHTS)
    if info.compress_type != zipfile.ZIP_STORED:
        raise ValueError("its weights are compressed")
    # The length of a member's local header is in that header only.
    name, extra = struct.unpack("<HH", os.pread(descriptor, 4, info.header_offset + 26))
    start = info.header_offset + 30 + name + extra
    if check:
        with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped, memoryview(mapped) as data:
            if len(data) < start + info.file_size or zlib.crc32(data[start : start + info.file_size]) != info.CRC:
                raise ValueError("the checksum of its weights differs")
    return _map_tensors(descriptor, start)


def _map_tensors(descriptor: int, start: int) -> dict[str, torch.Tensor]:
    """The tensors of the safetensors data that begin at ``start`` in a file."""
    (length,) = struct.unpack("<Q", os.pread(descriptor, 8, start))
    header = json.loads(os.pread(descriptor, length, start + 8))
    data = start + 8 + length
    mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    weights = {}
    for name, described in header.items():
        if not name.startswith(_GAP) and name != _METADATA:
            begin, end = described["data_offsets"]
            if data + end > len(mapped):
                raise PackageError(f"the file is cut short: its weight {name} lies behind its end")
            weights[name] = _tensor(mapped, data + begin, _DTYPES[described["dtype"]], described["shape"])
    return weights


def _tensor(mapped: mmap.mmap, offset: int, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    count = math.prod(shape)
    if count == 0:
        return torch.empty(list(shape), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset).view(list(shape))
