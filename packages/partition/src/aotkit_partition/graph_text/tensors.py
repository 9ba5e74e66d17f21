"""What a node's value looks like (dtype, sizes, strides, offset, device, storage), and small constants with their data.

Values that share a storage are written with the same storage number, so that aliasing survives the round trip.
"""

from __future__ import annotations

import base64
from contextlib import nullcontext
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .._torch_compat import make_fake_tensor, symbolic_hint
from ..errors import GraphFormatError, UnserializableGraphError
from .symbols import SymbolReader, SymbolWriter

# Real constants up to this many bytes travel inside the text (base64).
INLINE_CONSTANT_BYTES = 64 * 1024

_SYM_TYPES = (torch.SymInt, torch.SymFloat, torch.SymBool)

#: Types of which :meth:`MetadataWriter.write` writes values, if what they contain is of such types, too.
WRITTEN_TYPES = (torch.Tensor, *_SYM_TYPES, type(None), bool, int, float, str, tuple, list, dict)


class MetadataWriter:
    """Writes values of ``node.meta['val']``."""

    def __init__(self, symbols: SymbolWriter) -> None:
        self._symbols = symbols
        self._storages: dict[int, int] = {}

    def write(self, value: Any, node: str) -> Any:
        """A tensor becomes ``{"t": [dtype, sizes, strides, offset, device, requires_grad, storage, its bytes]}``."""
        if isinstance(value, torch.Tensor):
            return {"t": self._tensor(value, node)}
        if isinstance(value, _SYM_TYPES):
            return self._symbols.write_value(value)
        if value is None or isinstance(value, (bool, int, str)):
            return value
        if isinstance(value, float):
            return {"float": repr(value)}
        if isinstance(value, (tuple, list)):
            return {
                type(value).__name__ if type(value) in (tuple, list) else "tuple": [self.write(v, node) for v in value]
            }
        if isinstance(value, dict) and all(type(key) is str for key in value):  # what a Triton kernel has written to
            return {"dict": [[key, self.write(item, node)] for key, item in value.items()]}
        raise UnserializableGraphError(
            f"node '{node}' produces a {type(value).__module__}.{type(value).__qualname__}, which has no pickle-free "
            "description. Only graphs of tensors and numbers can be written as text.",
            node,
        )

    def _number(self, value: Any) -> Any:
        return value if type(value) is int else self._symbols.write_value(value)

    def _tensor(self, tensor: torch.Tensor, node: str) -> list[Any]:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
            raise UnserializableGraphError(
                f"node '{node}' produces a tensor of layout {tensor.layout}; only strided tensors can be written as "
                "text. Unwrap it into its component tensors before tracing.",
                node,
            )
        key = tensor.untyped_storage()._cdata
        first = key not in self._storages
        storage = self._storages.setdefault(key, len(self._storages))
        nbytes = _unusual_storage_bytes(tensor) if first else None
        return [
            str(tensor.dtype).removeprefix("torch."),
            [size if type(size) is int else self._number(size) for size in tensor.size()],
            [stride if type(stride) is int else self._number(stride) for stride in tensor.stride()],
            self._number(tensor.storage_offset()),
            str(tensor.device),
            int(tensor.requires_grad),
            storage,
            None if nbytes is None else self._number(nbytes),
        ]


def _unusual_storage_bytes(tensor: torch.Tensor) -> Any:
    """Size of the storage where it isn't just what the tensor itself reaches, else None. Compares example values."""
    nbytes = tensor.untyped_storage().nbytes()
    sizes = [symbolic_hint(size) for size in tensor.size()]
    strides = [symbolic_hint(stride) for stride in tensor.stride()]
    offset, total = symbolic_hint(tensor.storage_offset()), symbolic_hint(nbytes)
    if None in sizes or None in strides or offset is None or total is None:
        return nbytes
    return nbytes if total != _reach(sizes, strides, offset) * tensor.element_size() else None


def _reach(sizes: list[Any], strides: list[Any], offset: Any) -> Any:
    """Elements from the start of the storage to the last one that the tensor touches."""
    if any(type(size) is int and size == 0 for size in sizes):
        return 0
    return offset + 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))


class MetadataReader:
    """Rebuilds fake tensors; one instance per document, since it owns the storages."""

    def __init__(self, symbols: SymbolReader, fake_mode: FakeTensorMode) -> None:
        self._symbols = symbols
        self._fake_mode = fake_mode
        self._storages: dict[int, torch.Tensor] = {}  # any one tensor on that storage
        self._twins: dict[tuple[int, str, str, str, str], torch.Tensor] = {}
        self._devices: dict[str, torch.device] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def read(self, data: Any) -> Any:
        """The value written as ``data``."""
        if type(data) is not dict:
            return data
        ((kind, body),) = data.items()
        if kind == "t":
            return self._tensor(body)
        if kind == "sym":
            return self._symbols.read(body)
        if kind == "float":
            return float(body)
        if kind in ("tuple", "list"):
            items = [self.read(item) for item in body]
            return tuple(items) if kind == "tuple" else items
        if kind == "dict":
            return {key: self.read(item) for key, item in body}
        raise GraphFormatError(f"this version of the package knows no value of kind '{kind}'.")

    def _number(self, data: Any) -> Any:
        return data if type(data) is int else self._symbols.read(data["sym"])

    def _tensor(self, body: list[Any]) -> FakeTensor:
        dtype_name, sizes, strides, offset, device_name, requires_grad, storage, nbytes = body
        device = self._devices.get(device_name)
        if device is None:
            device = self._devices[device_name] = torch.device(device_name)
        dtype = self._dtypes.get(dtype_name)
        if dtype is None:
            dtype = self._dtypes[dtype_name] = getattr(torch, dtype_name)
        shape = [self._number(size) for size in sizes]
        steps = [self._number(stride) for stride in strides]
        key = (storage, dtype_name, repr(sizes), repr(strides), repr(offset))
        twin = self._twins.get(key)
        if twin is not None:
            meta = twin.detach()  # quick: symbolic sizes make every other way slow
        else:
            # What holds of these sizes is in the environment already: to look at a tensor again is no new condition.
            env = self._fake_mode.shape_env
            with nullcontext() if env is None else env.suppress_guards():
                meta = self._meta_tensor(dtype, shape, steps, self._number(offset), storage, nbytes)
            self._twins[key] = meta
        fake = make_fake_tensor(self._fake_mode, meta, device)
        if requires_grad:
            fake.requires_grad_(True)
        return fake

    def _meta_tensor(
        self, dtype: torch.dtype, shape: list[Any], steps: list[Any], offset: Any, storage: int, nbytes: Any
    ) -> torch.Tensor:
        known = self._storages.get(storage)
        if known is not None:
            return torch.empty(0, dtype=dtype, device="meta").set_(known.untyped_storage(), offset, shape, steps)
        if type(offset) is int and offset == 0 and nbytes is None:
            meta = torch.empty_strided(shape, steps, dtype=dtype, device="meta")
        else:
            total = self._number(nbytes) if nbytes is not None else _reach(shape, steps, offset) * dtype.itemsize
            base = torch.empty(total, dtype=torch.uint8, device="meta")
            meta = torch.empty(0, dtype=dtype, device="meta").set_(base.untyped_storage(), offset, shape, steps)
        self._storages[storage] = meta
        return meta


def write_constant(tensor: torch.Tensor, metadata: MetadataWriter, name: str) -> dict[str, Any]:
    """A tensor attribute: always its metadata; its data too if it is real and small."""
    written: dict[str, Any] = {"meta": metadata.write(tensor, name), "fake": isinstance(tensor, FakeTensor)}
    if written["fake"] or tensor.numel() * tensor.element_size() > INLINE_CONSTANT_BYTES:
        return written
    if tensor.device.type == "meta":
        return written
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    written["data"] = base64.b64encode(bytes(flat.tolist())).decode("ascii")
    return written


def read_constant(written: dict[str, Any], metadata: MetadataReader) -> torch.Tensor | None:
    """The constant, or None where its data did not travel with the text."""
    described = metadata.read(written["meta"])
    assert isinstance(described, torch.Tensor)
    if written["fake"]:
        return described
    if "data" not in written:
        return None
    raw = base64.b64decode(written["data"])
    if not raw:
        data = torch.empty(0, dtype=described.dtype)
    else:
        data = torch.frombuffer(bytearray(raw), dtype=torch.uint8).clone().view(described.dtype)
    result = data.reshape(tuple(int(size) for size in described.shape)).to(described.device)
    return result.requires_grad_(True) if described.requires_grad else result
