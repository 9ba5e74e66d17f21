"""Loop IR programs to compiled programs: ``generate`` is in :mod:`.generate`, the LLVM side in :mod:`.llvm`."""

from .errors import CodegenError
from .llvm.target import CpuTarget, arm_target, generic_target, host_target, processor_target

__all__ = ["CodegenError", "CpuTarget", "arm_target", "generic_target", "host_target", "processor_target"]
