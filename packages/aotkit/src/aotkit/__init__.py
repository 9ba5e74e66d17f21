"""An ahead-of-time compile stack for PyTorch, assembled from parts that each stand alone.

import torch, aotkit

compiled = torch.compile(model, backend="aotkit")
loss = compiled(batch).sum()
loss.backward()
print(aotkit.explain(model, batch))
"""

from torch._dynamo import register_backend as _register_backend
from torch._dynamo.backends.registry import list_backends as _list_backends

from aotkit_aot_trace import ExportError, GraphSignature, aot_export_joint_simple, aot_export_module

from .__about__ import __version__
from ._observe import GraphRecord, Recorder, StageTiming
from .api import aot_function, aot_module, aot_module_simplified
from .backend import aotkit as _backend
from .backend import make_backend
from .boxed import get_aot_graph_name, get_graph_being_compiled, make_boxed_compiler, make_boxed_func, nop
from .errors import CompileError, EagerFallback, UnknownOption
from .explain import Explanation, explain
from .options import MODES, Options
from .staged import (
    JointWithDescriptors,
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)

__all__ = [
    "MODES",
    "CompileError",
    "EagerFallback",
    "Explanation",
    "ExportError",
    "GraphRecord",
    "GraphSignature",
    "JointWithDescriptors",
    "Options",
    "Recorder",
    "StageTiming",
    "UnknownOption",
    "__version__",
    "aot_compile_joint_with_descriptors",
    "aot_export_joint_simple",
    "aot_export_joint_with_descriptors",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "explain",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "make_backend",
    "make_boxed_compiler",
    "make_boxed_func",
    "nop",
]

# Where the package is installed, the entry point registers the name; with the sources on the path there is none.
if "aotkit" not in _list_backends(exclude_tags=None):
    _register_backend(_backend, name="aotkit")
