"""Every operator of torch's ``op_db``, compiled with pass-through compilers and compared with eager.

``python -m tools.conformance op_db`` runs one fixed sample per operator and dtype, forward and backward;
``--dtypes``, ``--only`` and ``--variant`` choose, ``--json`` keeps every outcome in a file.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import aotkit
from aotkit.driver.refusals import REFUSALS

__all__ = ["VARIANTS", "Outcome", "check_operator", "entries", "main"]

TYPED = (*REFUSALS, aotkit.CompileError)
_SEED = 42  # the table's random operators set this one in each call, which a captured graph does not repeat
VARIANTS = ("function", "inplace", "method")


@dataclass(frozen=True, slots=True)
class Outcome:
    """``kind``: equal, refused (a typed error), different, crash, eager raises, or absent (no sample)."""

    operator: str
    variant: str
    dtype: str
    kind: str
    reason: str = ""
    seconds: float = 0.0


def entries() -> dict[str, OpInfo]:
    """The table by name and variant of the test: ``nn.functional.gelu``, ``norm(nuc)``."""
    return {f"{info.name}({name})" if (name := info.variant_test_name) else info.name: info for info in op_db}


def check_operator(info: OpInfo, dtype: torch.dtype, variant: str = "function", *, dynamic: bool = False) -> Outcome:
    """One sample: two calls with their backwards, once by eager and once compiled."""
    started = time.perf_counter()
    kind, reason = _check(info, dtype, variant, dynamic)
    name = f"{info.name}({info.variant_test_name})" if info.variant_test_name else info.name
    label = str(dtype).removeprefix("torch.")
    return Outcome(name, variant, label, kind, reason, round(time.perf_counter() - started, 3))


def _check(info: OpInfo, dtype: torch.dtype, variant: str, dynamic: bool) -> tuple[str, str]:
    operator = _operator(info, variant)
    sample = None if operator is None or dtype not in info.dtypes else _sample(info, dtype, variant)
    if operator is None or sample is None:
        return "absent", "no such variant" if operator is None else "no sample for this dtype"

    def fn(given: Any, args: Any, kwargs: Any) -> Any:
        # A leaf that requires grad may not be written to.
        given = pytree.tree_map_only(torch.Tensor, torch.clone, given) if variant == "inplace" else given
        return operator(given, *args, **kwargs)

    try:
        wanted = _run(sample, fn)
    except Exception as error:  # noqa: BLE001  # there is nothing to compare with then
        return "eager raises", f"{type(error).__name__}: {_first_line(error)}"
    try:
        got = _run(sample, aotkit.aot_function(fn, aotkit.nop, dynamic=dynamic))
    except TYPED as refusal:
        return "refused", f"{type(refusal).__name__}: {refusal}"
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the report is about
        return "crash", f"{type(error).__name__}: {_first_line(error)}\n{traceback.format_exc(limit=-4)}"
    return _compare(wanted, got, values="empty" not in info.name)


def _operator(info: OpInfo, variant: str) -> Callable[..., Any] | None:
    chosen = {"function": info.op, "inplace": info.inplace_variant, "method": info.method_variant}[variant]
    return chosen  # type: ignore[no-any-return]


def _sample(info: OpInfo, dtype: torch.dtype, variant: str) -> SampleInput | None:
    """The first sample with elements in every tensor; that of a write must be of the result's shape."""
    torch.manual_seed(0)
    differentiable = bool(info.supports_autograd and (dtype.is_floating_point or dtype.is_complex))
    fallback = None
    for sample in info.sample_inputs("cpu", dtype, requires_grad=differentiable):
        if variant == "inplace" and sample.broadcasts_input:
            continue
        fallback = fallback or sample
        if all(t.numel() > 1 for t in pytree.tree_leaves(sample.input) if isinstance(t, torch.Tensor)):
            return sample
    return fallback


def _run(sample: SampleInput, call: Callable[..., Any]) -> list[dict[str, Any]]:
    """Two calls with their backwards, and what each leaves behind."""
    runs = []
    for _ in range(2):
        given, args, kwargs = _cloned((sample.input, sample.args, sample.kwargs))
        torch.manual_seed(_SEED)
        result = call(given, args, kwargs)
        leaves = pytree.tree_leaves(result)
        starts = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        tensors = [t for t in pytree.tree_leaves((given, args, kwargs)) if isinstance(t, torch.Tensor)]
        wanted = [t for t in tensors if t.requires_grad]
        gradients: Sequence[Any] = ()
        if starts and wanted:
            torch.manual_seed(7)
            gradients = torch.autograd.grad(starts, wanted, [torch.randn_like(t) for t in starts], allow_unused=True)
        runs.append(
            {
                "layout": [_described(leaf) for leaf in leaves],
                "outputs": [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves],
                "inputs": [t.detach() for t in tensors],
                # No gradient and one of zeros mean the same.
                "gradients": [torch.zeros_like(t) if g is None else g for t, g in zip(wanted, gradients, strict=False)],
            }
        )
    return runs


def _described(leaf: Any) -> str:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf).__name__
    strides = tuple(0 if size == 1 else stride for size, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return f"{leaf.dtype} {tuple(leaf.shape)} {strides if leaf.numel() else ''} grad={leaf.requires_grad}"


def _compare(wanted: list[dict[str, Any]], got: list[dict[str, Any]], values: bool) -> tuple[str, str]:
    for expected, found in zip(wanted, got, strict=True):
        if found["layout"] != expected["layout"]:
            return "different", f"outputs are {found['layout']}, eager's {expected['layout']}"
        for what in ("outputs", "inputs", "gradients") if values else ("inputs",):
            try:
                torch.testing.assert_close(found[what], expected[what], equal_nan=True)
            except AssertionError as difference:
                return "different", f"{what}: {_first_line(difference)}"
            except (TypeError, ValueError):
                if str(found[what]) != str(expected[what]):
                    return "different", f"{what}: {str(found[what])[:100]}, eager's {str(expected[what])[:100]}"
    return "equal", ""


def _cloned(values: Any) -> Any:
    def clone(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, clone, values)


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), "")


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is not equal and a table of counts. Returns 1 if anything differs or crashes."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance op_db", description=__doc__.partition("\n")[0])
    parser.add_argument("--dtypes", nargs="+", default=["float32"], help="names such as float32 int64 complex64")
    parser.add_argument("--only", nargs="+", default=[], help="names of operators, as nn.functional.gelu")
    parser.add_argument("--variant", choices=VARIANTS, default="function")
    parser.add_argument("--dynamic", action="store_true", help="with symbolic sizes")
    parser.add_argument("--json", type=Path, help="file for all outcomes")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    outcomes: list[Outcome] = []
    for name, info in entries().items():
        if chosen.only and name not in chosen.only and info.name not in chosen.only:
            continue
        for dtype in chosen.dtypes:
            outcome = check_operator(info, getattr(torch, dtype), chosen.variant, dynamic=chosen.dynamic)
            outcomes.append(outcome)
            if outcome.kind in ("different", "crash"):
                print(f"{outcome.kind}: {name} {dtype}: {outcome.reason}", flush=True)
    if chosen.json:
        chosen.json.write_text(json.dumps([asdict(o) for o in outcomes], indent=1) + "\n")
    return _summary(outcomes)


def _summary(outcomes: Iterable[Outcome]) -> int:
    kinds: Counter[tuple[str, str]] = Counter()
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        kinds[outcome.dtype, outcome.kind] += 1
        if outcome.kind == "refused":
            reasons.setdefault(outcome.reason.partition("\n")[0][:150], []).append(outcome.operator)
    for reason, operators in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"refused {len(operators):4d}: {reason}: {', '.join(operators[:8])}{' ..' if operators[8:] else ''}")
    for (dtype, kind), count in sorted(kinds.items()):
        print(f"{dtype:10} {kind:13} {count}")
    return int(any(kind in ("different", "crash") for _, kind in kinds))
