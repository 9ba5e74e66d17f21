"""What a compile gives: a launch plan and its records, as data, and their way to text and back."""

from .codec import compiled_from_json, compiled_to_json, plan_from_json, plan_to_json
from .records import (
    Allocate,
    ArenaBuffer,
    Binary,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    KernelRecord,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    ReuseBuffer,
    StorageClass,
    View,
)

__all__ = [
    "Allocate",
    "ArenaBuffer",
    "Binary",
    "CallExtern",
    "CallSegment",
    "CompiledProgram",
    "Free",
    "KernelRecord",
    "LaunchPlan",
    "PlanStep",
    "PlannedBuffer",
    "Return",
    "ReuseBuffer",
    "StorageClass",
    "View",
    "compiled_from_json",
    "compiled_to_json",
    "plan_from_json",
    "plan_to_json",
]
