"""An ahead-of-time compile stack for PyTorch, assembled from parts that each stand alone.

::

    import torch, aotkit

    compiled = torch.compile(model, backend="aotkit")
    loss = compiled(batch).sum()
    loss.backward()
    print(aotkit.explain(model, batch))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import _import_time as _import_time  # before all that comes below
from .__about__ import __version__
from ._interpreters import refuse_subinterpreters
from .driver.process import collections_put_off
from .registration import register_with_torch

refuse_subinterpreters()

if TYPE_CHECKING:
    from aotkit_aot_trace.export import ExportError, GraphSignature, aot_export_joint_simple, aot_export_module

    from .backend import make_backend
    from .cli.cache import load_cache, save_cache
    from .driver.boxed import get_aot_graph_name, get_graph_being_compiled, make_boxed_compiler, make_boxed_func, nop
    from .driver.freezing import discard_parameters
    from .driver.package import Package, load
    from .driver.user_passes import GraphPasses
    from .errors import CompileError, EagerFallback, FrozenParameterError, GuardError, PackageError, UnknownOption
    from .options import MODES, Options
    from .recorder import GraphRecord, Recorder, StageTiming
    from .reports.agreement import Agreement, compare
    from .reports.bisect import Culprit, find_culprit
    from .reports.explain import Explanation, explain
    from .reports.html_report import report
    from .reports.profile import Profile, ProfileRow, profile
    from .staged import stages
    from .torch_api.aot_compile import aot_compile
    from .torch_api.aot_function import aot_function, aot_module, aot_module_simplified
    from .torch_api.compile_fx import compile_fx, compile_fx_aot, compile_fx_inner, list_mode_options, list_options
    from .torch_api.joint import (
        JointWithDescriptors,
        aot_compile_joint_with_descriptors,
        aot_export_joint_with_descriptors,
    )

__all__ = [
    "MODES",
    "Agreement",
    "CompileError",
    "Culprit",
    "EagerFallback",
    "Explanation",
    "ExportError",
    "FrozenParameterError",
    "GraphPasses",
    "GraphRecord",
    "GraphSignature",
    "GuardError",
    "InternalError",
    "JointWithDescriptors",
    "Options",
    "Package",
    "PackageError",
    "Profile",
    "ProfileRow",
    "Recorder",
    "StageTiming",
    "UnknownOption",
    "__version__",
    "aot_compile",
    "aot_compile_joint_with_descriptors",
    "aot_export_joint_simple",
    "aot_export_joint_with_descriptors",
    "aot_export_module",
    "aot_function",
    "aot_module",
    "aot_module_simplified",
    "compare",
    "compile_fx",
    "compile_fx_aot",
    "compile_fx_inner",
    "discard_parameters",
    "explain",
    "find_culprit",
    "get_aot_graph_name",
    "get_graph_being_compiled",
    "list_mode_options",
    "list_options",
    "load",
    "load_cache",
    "make_backend",
    "make_boxed_compiler",
    "make_boxed_func",
    "nop",
    "profile",
    "report",
    "save_cache",
    "stages",
]

# Where each name is defined. It is imported when it is asked for: importing this package imports neither Dynamo
# nor the tracer, which a process that loads what was compiled before never needs.
_HOMES = {
    name: home
    for home, names in {
        "aotkit_aot_trace.export": (
            "ExportError",
            "GraphSignature",
            "aot_export_joint_simple",
            "aot_export_module",
        ),
        ".driver.freezing": ("discard_parameters",),
        ".recorder": (
            "GraphRecord",
            "Recorder",
            "StageTiming",
        ),
        ".torch_api.aot_function": (
            "aot_function",
            "aot_module",
            "aot_module_simplified",
        ),
        ".backend": ("make_backend",),
        ".driver.boxed": (
            "get_aot_graph_name",
            "get_graph_being_compiled",
            "make_boxed_compiler",
            "make_boxed_func",
            "nop",
        ),
        ".torch_api.aot_compile": ("aot_compile",),
        ".reports.agreement": ("Agreement", "compare"),
        ".reports.bisect": ("Culprit", "find_culprit"),
        ".cli.cache": ("load_cache", "save_cache"),
        ".torch_api.compile_fx": (
            "compile_fx",
            "compile_fx_aot",
            "compile_fx_inner",
            "list_mode_options",
            "list_options",
        ),
        ".driver.package": ("Package", "load"),
        ".driver.user_passes": ("GraphPasses",),
        ".errors": (
            "CompileError",
            "EagerFallback",
            "FrozenParameterError",
            "GuardError",
            "InternalError",
            "PackageError",
            "UnknownOption",
        ),
        ".reports.explain": (
            "Explanation",
            "explain",
        ),
        ".reports.html_report": ("report",),
        ".reports.profile": ("Profile", "ProfileRow", "profile"),
        ".staged": ("stages",),
        ".options": (
            "MODES",
            "Options",
        ),
        ".torch_api.joint": (
            "JointWithDescriptors",
            "aot_compile_joint_with_descriptors",
            "aot_export_joint_with_descriptors",
        ),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    if name in ("saved", "staged"):  # modules that are public by name
        return import_module(f".{name}", __name__)
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with collections_put_off():
        value = getattr(import_module(_HOMES[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_torch()
