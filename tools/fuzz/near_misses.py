"""`python -m tools.fuzz.near_misses`: what recognises a pattern, given what is almost that pattern.

A program of :mod:`.near_seeds` becomes an ATen graph, of which one to three things are changed (:mod:`.mutations`).
What eager mode refuses is thrown away. The rest is compiled and compared with eager and float64 by the rule of
:mod:`.layers`. How often the pattern was still recognised is counted: such changes are the ones that matter. A failure
is shrunk to the fewest changes and printed as a graph.
"""

from __future__ import annotations

import argparse
import copy
import logging
import random
import re
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import aotkit
from aotkit.driver.bugs import is_bug
from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.driver import prepare_joint_graph
from aotkit_inductor_lower.graph_passes.freeze import freeze

from .layer_programs import Input, exact_helpers
from .layers import difference, make_tensor
from .marks import Marks
from .mutations import Mutation, apply, draw_mutation, look_at
from .near_more_seeds import ALL_SEEDS
from .near_seeds import DEVICE, DYNAMIC, Seed
from .sizes import print_counts, seen_strides

__all__ = ["Case", "Verdict", "draw_case", "judge", "main", "shrink"]

aten = torch.ops.aten
_DRAWS = 3
_BY_NAME = {each.name: each for each in ALL_SEEDS}
_EXACT = exact_helpers()
_LAYOUTS = ("turned", "cut", "offset", "expanded")
_REFUSED = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError, ZeroDivisionError, OverflowError)
Observed = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Case:
    """A seed in one mode with ``inputs``, captured with or without our ``decomposed`` operators, and what is changed of
    its graph."""

    seed: Seed
    mode: str
    inputs: tuple[Input, ...]
    decomposed: bool
    number: int = 0
    mutations: tuple[Mutation, ...] = ()

    def __str__(self) -> str:
        inputs = (f"# {i.name}: {list(i.shape)} {i.fill} {i.layout}" for i in self.inputs)
        changes = (f"# - {each}" for each in self.mutations)
        return "\n".join([f"# {self.seed.name}, {self.mode}, {self.seed.low}", *inputs, *changes, self.graph().code])

    def resized(self) -> Case:
        """The same of other sizes, see :attr:`.Seed.resized`."""
        of = self.seed.resized
        inputs = (replace(each, shape=tuple(of.get(size, size) for size in each.shape)) for each in self.inputs)
        return replace(self, inputs=tuple(inputs))

    def tensors(self, draw: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inputs, and the same numbers in float64; of a joint graph also the gradients of its results."""
        generator = torch.Generator().manual_seed(1000 * self.number + draw)
        pairs = [make_tensor(each, self.seed.low, generator) for each in self.inputs]
        real, exact = [list(each) for each in zip(*pairs, strict=True)]
        if self.mode == "joint":
            for result in self.seed.run(*real):
                given = torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype)
                real.append(given)
                exact.append(given.double())
        return real, exact

    def graph(self) -> GraphModule:
        """The graph with its changes; raises what eager mode does."""
        gm = copy.deepcopy(_captured(self.seed.name, self.mode, self.inputs, self.decomposed))
        for mutation in self.mutations:
            look_at(gm, self.tensors(0)[0])
            apply(gm, mutation)
        return gm


@lru_cache(maxsize=64)
def _captured(name: str, mode: str, inputs: tuple[Input, ...], decomposed: bool) -> GraphModule:
    seed = _BY_NAME[name]
    run = _with_gradients(seed.run, len(inputs)) if mode == "joint" else seed.run
    table = decompositions() if decomposed or mode == "joint" else None
    case = Case(seed, mode, inputs, decomposed)
    gm = _traced(run, table, case, case.tensors(0)[0])
    for node in gm.graph.find_nodes(op="call_function", target=aten.detach.default) if mode == "joint" else ():
        node.replace_all_uses_with(node.args[0])  # a captured graph has none
        gm.graph.erase_node(node)
    return gm


def _traced(run: Callable[..., Any], table: Any, case: Case, given: Sequence[torch.Tensor]) -> GraphModule:
    """With symbols for the sizes that change, where they do."""
    if case.mode != DYNAMIC:
        return make_fx(run, table)(*given)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    made = []
    for n, each in enumerate(given):
        kinds = [DimDynamic.DYNAMIC if size in case.seed.resized else DimDynamic.STATIC for size in each.shape]
        context: Any = StatelessSymbolicContext(dynamic_sizes=kinds)
        made.append(mode.from_tensor(each, symbolic_context=context, source=ConstantSource(f"given{n}")))
    with mode:
        return make_fx(run, table)(*made)


def _with_gradients(run: Callable[..., Any], count: int) -> Callable[..., list[torch.Tensor]]:
    def joint(*given: torch.Tensor) -> list[torch.Tensor]:
        leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in given[:count]]
        with torch.enable_grad():
            results = run(*leaves)
            wanted = [x for x in leaves if x.requires_grad]
            gradients = torch.autograd.grad(results, wanted, given[count:], allow_unused=True)
        return [*(r.detach() for r in results), *(g for g in gradients if g is not None)]

    return joint


def draw_case(number: int, seeds: Sequence[Seed] = ALL_SEEDS) -> Case | None:
    """The case of this number; ``None`` if eager mode refuses it."""
    draw = random.Random(number)
    seed = seeds[number % len(seeds)]
    inputs = tuple(replace(i, layout=draw.choice(_LAYOUTS)) if draw.random() < 0.1 else i for i in seed.inputs)
    case = Case(seed, draw.choice(seed.modes), inputs, draw.random() < 0.6, number)
    wanted = draw.choice((1, 1, 2, 2, 3))
    for _ in range(8 * wanted):
        if len(case.mutations) == wanted:
            break
        try:
            gm = case.graph()
            look_at(gm, case.tensors(0)[0])
            mutation = draw_mutation(gm, draw)
            if mutation is None or (_is_functional(case) and "in place" in str(mutation.value)):
                continue
            changed = replace(case, mutations=(*case.mutations, mutation))
            look_at(changed.graph(), case.tensors(0)[0])
        except _REFUSED:
            continue
        case = changed
    return case if case.mutations else None


def _is_functional(case: Case) -> bool:
    """Whether its graph is lowered as it is: a capture makes others of graphs that write."""
    return case.mode in ("frozen", "joint", DYNAMIC, DEVICE)


# --- what a graph does, eagerly and compiled --------------------------------------------------------------------


def _exact_graph(gm: GraphModule) -> GraphModule:
    """The graph in float64."""

    def wide(value: Any) -> Any:
        return torch.float64 if isinstance(value, torch.dtype) and value.is_floating_point else value

    made = copy.deepcopy(gm)
    for node in made.graph.nodes:
        if node.op == "call_function":
            node.args = torch.fx.node.map_aggregate(node.args, wide)
            node.kwargs = torch.fx.node.map_aggregate(node.kwargs, wide)
            node.target = _IN_FLOAT64.get(node.target, node.target)
    made.recompile()
    return made


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, _: float = 0, causal: bool = False, *,
    attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """ATen's fused attention, which takes for granted how operands lie; a query that sees no key has zeros."""
    scores = _masked(q, k, causal, attn_mask, scale)
    return torch.softmax(scores, -1).nan_to_num() @ v, scores.logsumexp(-1)


def _masked(q: torch.Tensor, k: torch.Tensor, causal: bool, mask: torch.Tensor | None, scale: float | None) -> Any:
    scores = (q @ k.mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    return scores if mask is None else scores + mask


def _attention_backward(
    g: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, total: torch.Tensor,
    _: float, causal: bool, *, attn_mask: torch.Tensor | None = None, scale: float | None = None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    weights = (_masked(q, k, causal, attn_mask, scale) - total[..., None]).exp().nan_to_num()
    of_scores = weights * (g @ v.mT - (g * out).sum(-1, keepdim=True))
    of_scores = of_scores * (q.shape[-1] ** -0.5 if scale is None else scale)
    return of_scores @ k, of_scores.mT @ q, weights.mT @ g


_IN_FLOAT64: dict[Any, Any] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
    aten._weight_int8pack_mm.default: _EXACT["int8_packed"],
    aten._weight_int4pack_mm_for_cpu.default: lambda x, w, group, s: _EXACT["int4_packed"](x, w, s, group),
}


def _observe(run: Callable[..., Any], case: Case, given: Sequence[torch.Tensor]) -> Observed:
    """Results, what was written to inputs, and gradients. Inputs are written to, so each call has its own."""
    training = case.mode == "training"
    leaves = [x.detach().requires_grad_(training and x.is_floating_point()) for x in given]
    before = [leaf._version for leaf in leaves]
    torch.manual_seed(5)
    with nullcontext() if training else torch.no_grad():
        results = [each for each in run(*leaves) if isinstance(each, torch.Tensor)]  # some calls give None, too
    found = {f"result {n}": each.detach() for n, each in enumerate(results)}
    for n, leaf in enumerate(leaves):
        if leaf._version != before[n]:
            found[f"input {n}"] = leaf.detach()
    outputs = [each for each in results if each.requires_grad and each.is_floating_point()]
    wanted = {f"gradient {n}": leaf for n, leaf in enumerate(leaves) if leaf.requires_grad}
    if outputs and wanted:
        generator = torch.Generator().manual_seed(7)
        grads = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
        gradients = torch.autograd.grad(outputs, [*wanted.values()], grads, allow_unused=True)
        found.update({n: g for n, g in zip(wanted, gradients, strict=True) if g is not None})
    return found


def _compiled(gm: GraphModule, case: Case, given: Sequence[torch.Tensor]) -> tuple[Callable[..., Any], str]:
    """What the graph becomes, by the stack or, frozen and joint, by the lowering; and what was seen of that."""
    marks, chosen = Marks(), case.seed.options
    recorder = aotkit.Recorder().shown_to(marks)
    if case.mode in ("inference", "training"):
        options = aotkit.Options(fallback="error", cache=False, verify=True, rng="eager").patch(**chosen)
        leaves = [x.detach().requires_grad_(case.mode == "training" and x.is_floating_point()) for x in given]
        with nullcontext() if case.mode == "training" else torch.no_grad():
            run = aotkit.compile_fx(gm, leaves, options=options, recorder=recorder)
            if case.mode == "training":
                _observe(run, case, given)  # which compiles the backward
        return run, "\n".join([*marks.names, *(str(each.report) for each in recorder.graphs)])
    if case.seed.rewrite is not None:
        with torch.no_grad():
            rewritten, count = case.seed.rewrite(make_fx(gm, decompositions(), tracing_mode="fake")(*given))
        return rewritten, "rewritten" if count else ""
    lower = LowerOptions(verify=True, rng="eager", pack_constants=case.mode == "frozen", **chosen)
    with torch.no_grad():
        if case.mode == DYNAMIC:
            functional = _traced(gm, decompositions(), case, given)
        else:
            functional = make_fx(gm, decompositions(), tracing_mode="fake")(*given)
    if case.mode == "frozen":
        weights = {n: given[n] for n, each in enumerate(case.inputs) if each.weight}
        functional = freeze(functional, weights)
    elif case.mode == "joint":
        functional = prepare_joint_graph(functional, lower, observer=recorder.part("joint"))
    made = compile_graph(functional, options=lower, observer=recorder.part("graph"))
    fakes = [node.meta["val"] for node in functional.graph.find_nodes(op="placeholder")]

    def run_compiled(*args: torch.Tensor) -> Any:
        if case.mode == DYNAMIC and not fakes[0].fake_mode.shape_env.evaluate_guards_for_args(fakes, args):
            raise _OtherGraph
        return made(list(args))

    return run_compiled, "\n".join([*marks.names, str(made.report())])


class _OtherGraph(Exception):
    """The guards of a graph do not hold for these sizes."""


@dataclass(frozen=True)
class Verdict:
    """``kind``: ``equal``, ``eager`` (which refuses it), ``refused``, ``mismatch`` or ``crash``; ``fired``: whether the
    pattern was still recognised."""

    kind: str
    text: str = ""
    fired: bool = False


def judge(case: Case) -> Verdict:
    """Whether a case is compiled right; numbers that differ are drawn again."""
    verdict = Verdict("equal")
    for draw in range(_DRAWS):
        found = _one_draw(case, draw)
        if found.kind != "mismatch":
            return found
        verdict = verdict if draw else found
    return verdict


def _one_draw(case: Case, draw: int) -> Verdict:
    try:
        gm = case.graph()
        look_at(gm, case.tensors(draw)[0])
        want = _observe(gm, case, case.tensors(draw)[0])
    except _REFUSED as error:
        return Verdict("eager", str(error).partition("\n")[0])
    try:
        true = _observe(_exact_graph(gm), case, case.tensors(draw)[1])
    except _REFUSED:
        true = {}
    try:
        run, seen = _compiled(gm, case, case.tensors(draw)[0])
        fired = _has_fired(case.seed, seen)
        got = _observe(run, case, case.tensors(draw)[0])
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what this looks for
        if not is_bug(error) and not isinstance(error, aotkit.InternalError):
            return Verdict("refused", f"{type(error).__name__}: {error}")
        return Verdict("crash", "".join(traceback.format_exception(error)[-3:]))
    text = _compare(case, want, true, got)
    if not text and case.mode == DYNAMIC:
        try:
            text = _of_other_sizes(gm, case.resized(), run, draw)
        except Exception as error:  # noqa: BLE001 - as above
            return Verdict("crash", "".join(traceback.format_exception(error)[-3:]))
    return Verdict("mismatch" if text else "equal", text, fired)


def _has_fired(seed: Seed, seen: str) -> bool:
    return re.search(seed.mark, seen) is not None and not (seed.without and re.search(seed.without, seen))


def _of_other_sizes(gm: GraphModule, case: Case, run: Callable[..., Any], draw: int) -> str:
    """How results of other sizes differ; nothing where eager mode, or a guard, refuses them."""
    try:
        want = _observe(gm, case, case.tensors(draw)[0])
        true = _observe(_exact_graph(gm), case, case.tensors(draw)[1])
    except _REFUSED:
        return ""
    try:
        text = _compare(case, want, true, _observe(run, case, case.tensors(draw)[0]))
    except _OtherGraph:
        return ""
    return f"other sizes: {text}" if text else ""


def _compare(case: Case, want: Observed, true: Observed, got: Observed) -> str:
    if want.keys() != got.keys():
        return f"{[*got]} for {[*want]}"
    exact = want.keys() == true.keys()
    for name, value in want.items():
        if case.seed.strides and name.startswith("result") and seen_strides(value) != seen_strides(got[name]):
            return f"{name}: strides {seen_strides(got[name])} for {seen_strides(value)}"
        types = {case.seed.low, value.dtype} - {torch.float64} if value.is_floating_point() else {case.seed.low}
        tolerance = max(
            [torch.finfo(each).eps * (16 if each == torch.float32 else 1) for each in types if each.is_floating_point]
        )
        of = true[name] if exact and true[name].shape == value.shape else value.double()
        cancels = not name.startswith("result") and of.numel() and of.is_floating_point() and of.abs().max() < 1e-6
        if cancels and got[name].abs().max() < 1e-5:
            continue  # gradients that cancel to 0 in eager mode: a known departure (docs/limits.md)
        if text := difference(value, of, got[name], tolerance if of is true.get(name) else 50 * tolerance):
            return f"{name}: {text}"
    return ""


def shrink(case: Case, fails: Callable[[Case], bool]) -> Case:
    """The case with the fewest changes and the plainest inputs that still fails."""
    smaller = True
    while smaller:
        smaller = False
        for n in range(len(case.mutations)):
            fewer = replace(case, mutations=case.mutations[:n] + case.mutations[n + 1 :])
            if fails(fewer):
                case, smaller = fewer, True
                break
    plain = replace(case, inputs=tuple(replace(each, layout="plain") for each in case.inputs))
    return plain if fails(plain) else case


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a case mismatched or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.near_misses", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=0, help="begin no case after so long; 0: run all")
    parser.add_argument("--only", default="", help="patterns whose names have this text")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # it logs what we see fail
    seeds = [each for each in ALL_SEEDS if chosen.only in each.name]
    kinds: Counter[str] = Counter()
    refusals: Counter[str] = Counter()
    tally: dict[str, Counter[str]] = {each.name: Counter() for each in seeds}
    begun = time.monotonic()
    for number in range(chosen.seed, chosen.seed + chosen.cases):
        if chosen.seconds and time.monotonic() - begun > chosen.seconds:
            break
        case = draw_case(number, seeds)
        if case is None:
            continue
        verdict = judge(case)
        kinds[verdict.kind] += 1
        tally[case.seed.name].update([verdict.kind, *["fired"] * verdict.fired, "all"])
        if verdict.kind in ("mismatch", "crash"):
            least = shrink(case, lambda each, kind=verdict.kind: judge(each).kind == kind)  # type: ignore[misc]
            print(f"-- case {number}: {verdict.kind}: {judge(least).text[:1500]}\n{least}", flush=True)
        elif verdict.kind == "refused":
            refusals[verdict.text.partition("\n")[0][:160]] += 1
    for text, count in refusals.most_common(10):
        print(f"refused {count}: {text}")
    for name, counts in tally.items():
        print(f"{name:36} {counts['all']:5d} cases, {counts['fired']:5d} recognised, {counts['mismatch']} mismatches")
    return print_counts(kinds)


if __name__ == "__main__":
    raise SystemExit(main())
