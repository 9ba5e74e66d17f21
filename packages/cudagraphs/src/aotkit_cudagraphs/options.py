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


@dataclass(frozen=True, slots=True)
class TreeOptions:
    """Options of `CudagraphTrees`.

    Attributes:
        outputs: "survive": results are the caller's to keep; those that proved to be kept across calls are copies.
            "copy": all are copies (for results used on other streams). "overwrite": none is; the next step takes their
            memory, and reading them then raises `OverwrittenError`.
        on_skip: "notice": what can't be recorded runs as it is, with one warning per kind of reason. "raise": it raises
            `CudagraphSkipped`.
        alignment: bytes a static input's address must be a multiple of; others are copied instead.
        check_static_layouts: compare the sizes and strides of static inputs on each call, besides their addresses.
            Callers whose guards do so already turn it off.
        skip_dynamic: record nothing that takes integers (sizes) as inputs.
        capture_sizes: with integers among the inputs, record only these combinations of them; None: all.
        warn_sizes: recorded sizes of one callable after which a notice says so, once.
        max_sizes: recorded sizes of one callable; further ones run uncaptured.
        max_rerecords: recordings of one callable and size made because liveness or the path differed.
        max_static_moves: how often a static input may move before it is copied instead.
        max_static_variants: recordings kept that differ in the addresses of static inputs only.
        max_path: calls in one step; a longer path starts a new step by itself.
        max_pool_bytes: pools are dropped, least recently used first, when all together need more.
        patience: calls that run uncaptured because a kept result is in the way, before memory is left to it and
            recordings are made elsewhere.
    """

    outputs: Literal["survive", "overwrite", "copy"] = "survive"
    on_skip: Literal["notice", "raise"] = "notice"
    alignment: int = 16
    check_static_layouts: bool = True
    skip_dynamic: bool = False
    capture_sizes: frozenset[tuple[int, ...]] | None = None
    warn_sizes: int = 8
    max_sizes: int = 64
    max_rerecords: int = 128
    max_static_moves: int = 8
    max_static_variants: int = 64
    max_path: int = 64
    max_pool_bytes: int | None = None
    patience: int = 1

    def __post_init__(self) -> None:
        if self.outputs not in ("survive", "overwrite", "copy"):
            raise ValueError(f"outputs must be 'survive', 'overwrite' or 'copy', not {self.outputs!r}")
        if self.on_skip not in ("notice", "raise"):
            raise ValueError(f"on_skip must be 'notice' or 'raise', not {self.on_skip!r}")
        if self.alignment < 1 or self.alignment & (self.alignment - 1):
            raise ValueError(f"alignment must be a power of two, not {self.alignment}")
        for name in ("warn_sizes", "max_sizes", "max_static_variants", "max_path"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        for name in ("max_rerecords", "max_static_moves", "patience"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative")
