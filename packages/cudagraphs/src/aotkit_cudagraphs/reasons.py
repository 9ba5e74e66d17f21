"""Why something was not recorded."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from ._records import Format


@enum.unique
class SkipKind(enum.Enum):
    """Kinds of reasons; the value is what to do about it."""

    CPU_DEVICE = "move the tensor to the GPU, or leave this callable uncaptured"
    MULTIPLE_DEVICES = "keep each recorded callable on one device"
    NO_DEVICE_TENSOR = "record callables that take at least one tensor on the device"
    NON_TENSOR_INPUT = "pass tensors and integers only; bind other values into the callable"
    NON_TENSOR_OUTPUT = "return tensors, integers or None only"
    SPARSE = "use dense tensors at the boundary of the callable"
    LAZY_VIEW = "call resolve_conj() or resolve_neg() first"
    TENSOR_SUBCLASS = "unwrap tensor subclasses before the call"
    REQUIRES_GRAD = "call it without gradients, or record forward and backward separately"
    MUTATED_INPUT = "declare the input static, so that the recording works on the tensor itself"
    INCOMPATIBLE_OP = "split the graph around the operator"
    UNSAFE_TAG = "split the graph around it, or drop the tag if the operator can be recorded after all"
    CONTROL_FLOW = "split the graph around the control flow"
    BOOLEAN_INDEX = "index with integers, or split the graph around it"
    UNBACKED_SIZE = "sizes that depend on data can't be recorded; split the graph before them"
    CAPTURE_FAILED = "see the message; operations that wait for the device can't be recorded"
    RECORDING_LIMIT = "pad inputs to fewer sizes or raise max_recordings"
    RERECORD_LIMIT = "keep static inputs where they are, or don't declare them static"
    DYNAMIC_SHAPES = "pad to fixed sizes, or record each size (skip_dynamic=False)"
    SIZE_NOT_LISTED = "add the size to capture_sizes if it is a common one"
    STORAGE_MUTATION = "keep the storage of inputs; write into them instead of swapping or resizing their memory"
    COLLECTIVE = "split the graph around communication; its streams have not been tried in a capture"
    SMALL_SEGMENT = "lower min_nodes if recording so few operators is worth a launch"
    DISABLED = "the policy said no"
    FORWARD_SKIPPED = "make the forward recordable, and its backward is recorded too"
    LEAKED_MEMORY = "don't keep tensors that are made inside; create caches in the first call"
    MEMORY_CAP = "raise max_pool_bytes, or record fewer or smaller callables"
    NO_CACHING_ALLOCATOR = "use torch's caching allocator (no PYTORCH_NO_CUDA_MEMORY_CACHING, no other backend)"


@dataclass(frozen=True, slots=True)
class SkipReason:
    """One reason, readable and comparable.

    Attributes:
        kind: which kind.
        detail: what exactly, in this program.
        user_line: `file:line: source` of the user's code, where it is known.
    """

    kind: SkipKind
    detail: str
    user_line: str | None = None

    def __str__(self) -> str:
        where = f" ({self.user_line})" if self.user_line else ""
        return f"{self.detail}{where}; {self.kind.value}"

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return _FORMAT.to_raw(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> SkipReason:
        """The reason that `to_json` described. Raises `ValueError` for anything else."""
        return _FORMAT.from_raw(data)


_FORMAT = Format(SkipReason, "aotkit skip reason", 2)


class CudagraphSkipped(RuntimeError):
    """Nothing was recorded, and `on_skip="raise"` asked for an error.

    Attributes:
        reasons: why.
    """

    def __init__(self, reasons: tuple[SkipReason, ...]) -> None:
        super().__init__("no CUDA graph was recorded: " + "; ".join(map(str, reasons)))
        self.reasons = reasons


class CudagraphNotice(UserWarning):
    """A callable runs uncaptured; the result is right, only not faster."""


class CaptureError(RuntimeError):
    """An operation that can't be part of a recording ran during a capture."""
