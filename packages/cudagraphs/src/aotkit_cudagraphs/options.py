"""What a caller can choose."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class CudagraphOptions:
    """Options of `cudagraphify`.

    Attributes:
        outputs: "survive": returned tensors are the caller's to keep. "overwrite": they are the recording's own
            memory, without a copy, and the next call overwrites them.
        on_skip: what to do where nothing can be recorded: "notice" runs the callable as it is, with one warning per
            kind of reason; "raise" raises `CudagraphSkipped`.
        warmup_iterations: runs before the capture, on a side stream; at least one, for lazy initialization.
        alignment: bytes a static input's address must be a multiple of; others are copied instead.
        max_recordings: recordings kept, one per distinct layout of the inputs and value of the integers among them;
            further ones run uncaptured.
        max_rerecords: how often recordings may be replaced because a static input moved.
        check_static_addresses: compare the addresses of static inputs on each call. Without it a moved static
            input is silently ignored by the replay; turn it off only where addresses are known to be fixed.
    """

    outputs: Literal["survive", "overwrite"] = "survive"
    on_skip: Literal["notice", "raise"] = "notice"
    warmup_iterations: int = 1
    alignment: int = 16
    max_recordings: int = 8
    max_rerecords: int = 128
    check_static_addresses: bool = True

    def __post_init__(self) -> None:
        if self.outputs not in ("survive", "overwrite"):
            raise ValueError(f"outputs must be 'survive' or 'overwrite', not {self.outputs!r}")
        if self.on_skip not in ("notice", "raise"):
            raise ValueError(f"on_skip must be 'notice' or 'raise', not {self.on_skip!r}")
        if self.warmup_iterations < 1 or self.max_recordings < 1 or self.max_rerecords < 0:
            raise ValueError("warmup_iterations and max_recordings must be at least 1, max_rerecords at least 0")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {self.alignment}")
