"""`python -m tools.fuzz.architectures`: architectures of transformers, small and with random weights, against eager.

For each type of model that a mapping of transformers knows (:mod:`.small_configs`) a forward pass, a training step,
and a training step with sizes known at run time at two sizes are compiled with ``fallback="error"`` and compared with
eager and float64 by the rule of `tools.bench.numerics`. Each runs in a process of its own, which is stopped when it
takes too long. What cannot be made small, or what eager mode refuses, is counted and left out.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils import _pytree as pytree

import aotkit

from ..bench.numerics import FACTOR, SLACK, relative_errors
from .sizes import seen_strides
from .small_configs import HEADS, architectures, make_inputs, make_small_model

__all__ = ["MODES", "Finding", "Seen", "check", "differences", "in_a_process", "main"]

MODES = ("inference", "training", "dynamic")
#: Where a model computes in no other type than float32: errors relative to eager's values.
_BOUND = 1e-3


@dataclass(frozen=True)
class Finding:
    """What became of a type of model with a head in a mode. ``what``: ok, wrong, error, left out, or too long."""

    kind: str
    head: str
    mode: str
    what: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class Seen:
    """What a call left: outputs, and for training gradients of all parameters and buffers, as arrays by name; types and
    strides of the outputs."""

    values: dict[str, Any]
    kinds: dict[str, str]


def observe(model: nn.Module, call: Callable[..., Any], inputs: Mapping[str, Any], train: bool) -> Seen:
    """Call, and for training run the backward of the loss, or of a weighted sum of all outputs."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(0)
    with torch.enable_grad() if train else torch.no_grad():
        result = call(**inputs)
    outputs = pytree.tree_leaves(result.to_tuple() if hasattr(result, "to_tuple") else result)
    values = {f"output:{number}": leaf for number, leaf in enumerate(outputs) if isinstance(leaf, torch.Tensor)}
    kinds = {name: f"{str(leaf.dtype)[6:]} with strides {seen_strides(leaf)}" for name, leaf in values.items()}
    if train:
        _loss(result, values).backward()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                values[f"grad:{name}"] = parameter.grad
        for name, buffer in model.named_buffers():
            values[f"buffer:{name}"] = buffer
    return Seen({name: _array(value.detach()) for name, value in values.items()}, kinds)


def _array(value: torch.Tensor) -> Any:
    return (torch.view_as_real(value) if value.is_complex() else value).double().numpy()


def _loss(result: Any, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    if isinstance(getattr(result, "loss", None), torch.Tensor):
        return result.loss
    total = torch.zeros(())
    for value in values.values():
        if value.requires_grad and value.is_floating_point():
            weights = torch.linspace(-1.0, 1.0, max(value.numel(), 1), dtype=value.dtype)[: value.numel()]
            total = total + (value * weights.view(value.shape)).sum()
    return total


def check(kind: str, class_name: str, head: str, mode: str, redzones: bool = False) -> Finding:
    """One type of model in one mode, in this process."""
    train = mode != "inference"
    sizes = ((3, 12), (2, 16)) if mode == "dynamic" else ((2, 12),)
    try:
        model, config = make_small_model(kind, class_name)
        model.train(train)
        batches = [make_inputs(model, config, head, *size) for size in sizes]
        eager, reference = copy.deepcopy(model), copy.deepcopy(model).double()
        expected = [observe(eager, eager, batch, train) for batch in batches]
    except Exception as error:  # noqa: BLE001 - whatever transformers raises
        return Finding(kind, head, mode, "left out", _where(error))
    backend = aotkit.make_backend(aotkit.Options(fallback="error", redzones=redzones))
    compiled = torch.compile(model, backend=backend, dynamic=mode == "dynamic")
    for batch, eagers in zip(batches, expected, strict=True):
        try:
            values = observe(model, compiled, batch, train)
        except Exception as error:  # noqa: BLE001 - it is the finding
            return Finding(kind, head, mode, "error", _where(error))
        try:
            exact = observe(reference, reference, _double(batch), train)
        except Exception:  # noqa: BLE001 - a model that computes in float32 whatever it is given
            exact = None
        if found := differences(values, eagers, exact):
            return Finding(kind, head, mode, "wrong", "; ".join(found[:6]) + (" .." if len(found) > 6 else ""))
    return Finding(kind, head, mode, "ok", "" if exact is not None else "no float64")


def _double(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def differences(seen: Seen, eager: Seen, exact: Seen | None) -> list[str]:
    """What is missing, is there in addition, lies otherwise, or is further off than `tools.bench.numerics` allows. A
    result of eager's that is not finite everywhere is compared with it alone."""
    values, wanted = seen.values, eager.values
    found = [f"{name} is missing" for name in sorted(wanted.keys() - values.keys())]
    found += [f"{name} is new" for name in sorted(values.keys() - wanted.keys())]
    found += [
        f"{name} is {kind}, eager's {eager.kinds[name]}"
        for name, kind in seen.kinds.items()
        if kind != eager.kinds.get(name, kind)
    ]
    for name in sorted(values.keys() & wanted.keys()):
        if values[name].shape == wanted[name].shape and not numpy.isfinite(wanted[name]).all():
            if not numpy.allclose(values[name], wanted[name], rtol=_BOUND, atol=1e-5, equal_nan=True):
                found.append(f"{name} where eager is not finite")
            values, wanted = ({n: v for n, v in each.items() if n != name} for each in (values, wanted))
    reference = wanted if exact is None else {name: exact.values[name] for name in wanted.keys() & exact.values.keys()}
    own, base = relative_errors(values, reference), relative_errors(wanted, reference)
    for name, error in own.items():
        if name in values and not error <= (_BOUND if exact is None else FACTOR * (base[name] + SLACK)):
            found.append(f"{name} {error:.1e}, eager {base[name]:.1e}")
    return found


def _where(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    text = re.sub(r"\s+", " ", str(error))[:300]
    return f"{type(error).__name__}: {text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"


def in_a_process(arguments: tuple[str, str, str, str, bool], seconds: float) -> Finding:
    """``check`` in a process forked from this one, which has imported everything."""
    kind, _, head, mode, _ = arguments
    ours, theirs = multiprocessing.Pipe(duplex=False)
    begun = time.monotonic()
    process = multiprocessing.get_context("fork").Process(target=_send, args=(theirs, arguments))
    process.start()
    theirs.close()
    finding = Finding(kind, head, mode, "too long")
    if ours.poll(seconds):
        try:
            finding = Finding(**ours.recv())
        except EOFError:
            finding = Finding(kind, head, mode, "error", "the process died")
    process.kill()
    process.join()
    return Finding(**{**asdict(finding), "seconds": round(time.monotonic() - begun, 1)})


def _send(connection: Connection, arguments: tuple[str, str, str, str, bool]) -> None:
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - for as long as the process lives
    connection.send(asdict(check(*arguments)))
    connection.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 1 if something was wrong or an error."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.architectures", description=__doc__)
    parser.add_argument("--heads", nargs="+", choices=sorted(HEADS), default=sorted(HEADS))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--only", default=".*", help="types of models whose whole name matches")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="each N-th, from the K-th"
    )
    parser.add_argument("--seconds", type=float, default=240, help="for one model in one mode")
    parser.add_argument("--redzones", action="store_true", help="memory around what kernels write is checked")
    parser.add_argument("--journal", type=Path, help="a file of findings, one a line; those in it are not repeated")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    import transformers

    transformers.logging.set_verbosity_error()
    known = _known(options.journal)
    counts = Counter[str]()
    wanted = [
        (kind, name, head, mode)
        for head in options.heads
        for kind, name in architectures(head).items()
        if re.fullmatch(options.only, kind)
        for mode in options.modes
    ]
    for each in wanted[options.part[0] :: options.part[1]]:
        if (each[0], each[2], each[3]) in known:
            continue
        finding = in_a_process((*each, options.redzones), options.seconds)
        counts[finding.what] += 1
        print(f"{finding.what:9} {' '.join(each)} {finding.seconds} s  {finding.detail}", flush=True)
        if options.journal:
            with options.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(finding)) + "\n")
    print(", ".join(f"{count} {what}" for what, count in counts.most_common()))
    return int(bool(counts["wrong"] or counts["error"]))


def _known(journal: Path | None) -> set[tuple[str, str, str]]:
    if journal is None or not journal.exists():
        return set()
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    return {(line["kind"], line["head"], line["mode"]) for line in lines}


if __name__ == "__main__":
    sys.exit(main())
