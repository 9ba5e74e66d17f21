"""What a compiled graph does when called, and how it is bound to a process."""

from .arena import ArenaPool
from .bind import BoundProgram, bind
from .errors import BindError, RedzoneError
from .launch_plan import (
    Allocate,
    ArenaBuffer,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    KernelRecord,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    TakeOver,
    View,
)
from .serialize import compiled_from_json, compiled_to_json, plan_from_json, plan_to_json

__all__ = [
    "Allocate",
    "ArenaBuffer",
    "ArenaPool",
    "BindError",
    "BoundProgram",
    "CallExtern",
    "CallSegment",
    "CompiledProgram",
    "Free",
    "KernelRecord",
    "LaunchPlan",
    "PlanStep",
    "PlannedBuffer",
    "RedzoneError",
    "Return",
    "TakeOver",
    "View",
    "bind",
    "compiled_from_json",
    "compiled_to_json",
    "plan_from_json",
    "plan_to_json",
]
