"""Loop IR programs to compiled programs: ``generate`` is in :mod:`.generate`, the LLVM side in :mod:`.llvm`."""

from .errors import CodegenError
from .llvm.target import CpuTarget, generic_target, host_target

__all__ = ["CodegenError", "CpuTarget", "generic_target", "host_target"]
