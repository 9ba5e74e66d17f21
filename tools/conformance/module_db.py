"""Every module of torch's ``module_db``, compiled and compared with eager: outputs, gradients, buffers, inputs.

Run ``python -m tools.conformance.module_db`` for everything (all sample inputs, train and eval mode, float32 on the
CPU, each way of compiling); ``--how``, ``--only`` and ``--samples`` narrow it down, ``--torch`` runs torch's own
``aot_module`` as well.
"""

from __future__ import annotations

import argparse
import copy
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch.aot_autograd import aot_module as torchs_aot_module
from torch._functorch.compilers import nop as torchs_nop
from torch.testing._internal.common_modules import ModuleInfo, module_db

import aotkit
from aotkit_aot_trace import Unsupported
from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_partition import PartitionError, min_cut_rematerialization_partition
from aotkit_runtime_wrappers import WrapperError

__all__ = ["HOW", "Outcome", "check_module", "entries"]

Compile = Callable[[nn.Module], Callable[..., Any]]
TYPED = (Unsupported, PartitionError, WrapperError, aotkit.CompileError)

HOW: dict[str, Compile] = {
    "nop": lambda m: aotkit.aot_module(m, aotkit.nop),
    "min_cut": lambda m: aotkit.aot_module(m, aotkit.nop, partition_fn=min_cut_rematerialization_partition),
    "kernels": lambda m: aotkit.aot_module(
        m, compile_graph, partition_fn=min_cut_rematerialization_partition, decompositions=decompositions()
    ),
    "torch": lambda m: torchs_aot_module(m, torchs_nop),
}


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result for one sample: ``equal``, ``refused`` (a typed error), ``different`` or ``crash``, with the reason."""

    module: str
    sample: int
    training: bool
    how: str
    kind: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class _Sample:
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def entries() -> dict[str, ModuleInfo]:
    """The table by name: ``nn.Linear`` and so on."""
    return {info.name: info for info in module_db}


def check_module(
    info: ModuleInfo, training: bool, how: str, limit: int | None = None, first: int = 0
) -> Iterator[Outcome]:
    """Compare ``limit`` sample inputs of one entry, from number ``first`` on, with eager; two calls each."""
    count = 0
    for dtype in (torch.float32, torch.float64):
        for sample in islice(_samples(info, training, dtype), first, None):
            if limit is not None and count >= limit:
                return
            kind, reason = _compare(sample, HOW[how])
            if kind != "eager fails":
                yield Outcome(info.name, first + count, training, how, kind, reason)
                count += 1
        if count:
            return  # the samples of a few entries are written for float64


def _samples(info: ModuleInfo, training: bool, dtype: torch.dtype) -> Iterator[_Sample]:
    torch.manual_seed(0)
    inputs = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for given in inputs:
        if given.forward_input is None:
            continue
        torch.manual_seed(1)
        made, call = given.constructor_input, given.forward_input
        module = info.module_cls(*made.args, **made.kwargs)
        module.to(dtype).train(training)
        if info.is_lazy:
            with torch.no_grad():
                module(*_cloned(call.args), **_cloned(call.kwargs))
        yield _Sample(module, call.args, call.kwargs)


def _compare(sample: _Sample, compile_module: Compile) -> tuple[str, str]:
    try:
        wanted = _run(sample, lambda m: m)
    except RuntimeError as error:
        return "eager fails", str(error)
    try:
        got = _run(sample, compile_module)
    except TYPED as refusal:
        return "refused", str(refusal)
    except Exception:  # noqa: BLE001  # whatever it is, it is what the report is about
        return "crash", traceback.format_exc(limit=-3)
    if got["layout"] != wanted["layout"]:
        return "different", f"outputs are {got['layout']}, eager's {wanted['layout']}"
    try:
        for what in ("outputs", "inputs", "gradients", "buffers"):
            torch.testing.assert_close(got[what], wanted[what], equal_nan=True, msg=f"{what}: {{}}".format)
    except AssertionError as difference:
        return "different", str(difference)
    return "equal", ""


def _run(sample: _Sample, compile_module: Compile) -> dict[str, Any]:
    """Two calls with their backwards, and everything that they leave behind."""
    module = copy.deepcopy(sample.module)
    call = compile_module(module)
    outputs, left = [], []
    for seed in (5, 6):
        args, kwargs = _cloned(sample.args), _cloned(sample.kwargs)
        torch.manual_seed(seed)
        result = call(*args, **kwargs)
        differentiable = [t for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
        if differentiable:
            torch.manual_seed(7)
            torch.autograd.backward(differentiable, [torch.randn_like(t) for t in differentiable])
        outputs.append(pytree.tree_map_only(torch.Tensor, lambda t: t.detach(), result))
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        left.append([(t.detach(), t.grad if t.is_leaf else None) for t in tensors])
    parameters = {name: p.grad for name, p in module.named_parameters()}
    buffers = {name: b.clone() for name, b in module.named_buffers()}
    described = pytree.tree_map_only(torch.Tensor, _described, outputs)
    return {"outputs": outputs, "layout": described, "inputs": left, "gradients": parameters, "buffers": buffers}


def _described(value: torch.Tensor) -> str:
    return f"{value.dtype} {tuple(value.shape)} {value.stride()}"


def _cloned(values: Any) -> Any:
    def clone(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, clone, values)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is not equal and a table of counts. Returns 1 if anything differs or crashes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--how", action="append", choices=sorted(HOW), help="ways of compiling (default: nop, min_cut)")
    parser.add_argument("--only", action="append", default=[], help="names of modules, as nn.Linear")
    parser.add_argument("--samples", type=int, help="at most so many sample inputs per module")
    parser.add_argument("--start", default="", help="begin with this module")
    parser.add_argument("--torch", action="store_true", help="run torch's own aot_module too")
    chosen = parser.parse_args(argv)
    ways = [*(chosen.how or ["nop", "min_cut"]), *(["torch"] if chosen.torch else [])]
    counts: Counter[tuple[str, str]] = Counter()
    failed: dict[str, set[str]] = {}
    names = list(entries())
    for name in names[names.index(chosen.start) if chosen.start else 0 :]:
        info = entries()[name]
        if chosen.only and name not in chosen.only:
            continue
        for how in ways:
            for training in (True, False):
                for outcome in check_module(info, training, how, chosen.samples):
                    counts[how, outcome.kind] += 1
                    if outcome.kind != "equal":
                        failed.setdefault(how, set()).add(name)
                        mode = "train" if training else "eval"
                        print(f"{outcome.kind}: {name} sample {outcome.sample} {mode} {how}\n{outcome.reason}\n")
    for (how, kind), count in sorted(counts.items()):
        print(f"{how:10} {kind:10} {count}")
    for how, unequal in failed.items():
        print(f"{how}: {len(unequal)} modules not equal: {', '.join(sorted(unequal))}")
    return int(any(kind != "equal" and how != "torch" for how, kind in counts))


if __name__ == "__main__":
    sys.exit(main())
