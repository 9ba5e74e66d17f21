"""Masks and biases that follow from positions, in the kernels of attention on a device."""

from __future__ import annotations

import importlib.util
import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, bind_program, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.graph_passes.remove_noops import remove_noops
from aotkit_inductor_lower.graph_passes.rewriting import drop_dead_nodes
from aotkit_inductor_lower.ir import LoopNest
from aotkit_inductor_lower.targets.triton import compile_kernel, kernels_of, resource_facts

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

_spec = importlib.util.spec_from_file_location(
    "attention_forms", Path(__file__).with_name("test_inductor_lower_attention_forms.py")
)
assert _spec is not None and _spec.loader is not None
forms = importlib.util.module_from_spec(_spec)
sys.modules["attention_forms"] = forms
_spec.loader.exec_module(forms)
Case, forward, backward, written_out, off = forms.Case, forms.forward, forms.backward, forms.written_out, forms.off

Tensors = list[Tensor]


@dataclass(frozen=True)
class Masks:
    """Functions of batch, head, query and key, and of tensors: what is added to scores, and which are seen."""

    added: Callable[..., Tensor] | None = None
    seen: Callable[..., Tensor] | None = None

    def of(self, sizes: tuple[int, ...], device: torch.device, tensors: Tensors) -> Tensors:
        """The masks as tensors."""
        batch, heads, _, queries, keys, _ = sizes
        places = []
        for number, size in enumerate((batch, heads, queries, keys)):
            shape = [1, 1, 1, 1]
            shape[number] = size
            places.append(torch.arange(size, device=device, dtype=torch.int32).view(shape))
        return [each(*places, *tensors) for each in (self.added, self.seen) if each is not None]


def slopes(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return -slope[h] * (q - k).abs()


def relative(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return table[h, q - k + 99] * 0.5


def documents(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return (doc[b, q] == doc[b, k]) & (k <= q)


def prefix(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return (k <= q) | (k < 5 + 20 * b)


def in_blocks(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return (q // 8 == k // 8) | ((k - q) % 7 == 0)


def near(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return ((q - k).abs() < 6 + 3 * h) & (q != 7)  # the seventh query sees nothing


F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
HIDES: dict[str, Any] = {"replaces": True, "zero_empty": True}
CASES = [
    (Case((2, 4, 2, 40, 45, 16), seen="bij", added="hij", **HIDES), Masks(slopes, documents), BF16),
    (Case((2, 2, 2, 20, 70, 24), seen="bij", added="hij", replaces=True, scores=True), Masks(relative, prefix), F16),
    (Case((1, 4, 2, 70, 40, 16), seen="hij", kept=True, **HIDES), Masks(None, near), BF16),
    (Case((1, 4, 1, 40, 40, 16), added="hij", causal=True, window=20, cap=3.0), Masks(relative), F32),
    (Case((2, 2, 1, 35, 35, 32), seen="bij"), Masks(None, prefix), F32),
    (Case((1, 2, 1, 35, 35, 16), seen="ij", replaces=True), Masks(None, in_blocks), BF16),
]
NAMES = ["slopes and documents", "a table", "near", "capped", "a prefix", "in blocks"]


def tensors(dtype: torch.dtype) -> Tensors:
    g = torch.Generator().manual_seed(2)
    doc = torch.randint(0, 3, (2, 100), generator=g).sort(-1).values
    return [torch.linspace(0.01, 1, 4), torch.randn(4, 200, generator=g).to(dtype), doc]


def lowered(program: Callable[..., Any], args: Tensors, **settings: Any) -> Compiled:
    graph = make_fx(program, decompositions(), tracing_mode="fake")(*args)
    made = compile_to_program(graph, options=LowerOptions(verify=True, processor="triton-interpreter", **settings))
    assert isinstance(made, Compiled)
    return made


def attention(case: Any, masks: Masks, ahead: int, *, gradients: bool = False) -> Callable[..., Any]:
    """A graph that makes the masks; ``ahead``: how many operands there are before dropout's."""
    whole = (backward if gradients else forward)(case)

    def program(*args: Tensor) -> Any:
        operands, kept, read = args[:ahead], args[ahead : ahead + case.kept], args[ahead + case.kept :]
        return whole(*operands, *masks.of(case.sizes, args[0].device, list(read)), *kept)

    return program


def computed(case: Any, masks: Masks, args: Tensors, gradient: Tensor, read: Tensors) -> Tensors:
    """Result and gradients, of kernels that have nothing of the size of scores in memory."""
    kept = args[-1:] if case.kept else []
    whole = [*args[:3], *kept, *read]
    made = lowered(attention(case, masks, 3), whole)
    check_alone(made)
    ahead = bind_program(made.program)(list(whole))
    whole = [gradient, *args[:3], *ahead, *kept, *read]
    made = lowered(attention(case, masks, 7, gradients=True), whole)
    check_alone(made)
    return [ahead[0], *bind_program(made.program)(list(whole))]


def check_alone(made: Compiled) -> None:
    """There is attention, and nothing else."""
    (nest,) = made.scheduled.steps
    assert isinstance(nest, LoopNest)
    for kernel in kernels_of(made.program):
        assert re.search("fade|change|going", kernel.source.text)
        assert "int64" not in kernel.source.text.split("def attention")[1], "positions fit 32 bits"


@pytest.mark.parametrize(("case", "masks", "dtype"), CASES, ids=NAMES)
def test_both_directions_are_as_exact_as_eager(case: Any, masks: Masks, dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    read = tensors(dtype)
    plain = case.operands(dtype)
    args = [*plain[:3], *masks.of(case.sizes, torch.device("cpu"), read), *(plain[-1:] if case.kept else [])]
    gradient = case.lines(case.sizes[1], case.sizes[3], dtype)
    got = computed(case, masks, args, gradient, read)
    eager, true = (written_out(case, args, gradient, kind) for kind in (dtype, torch.float64))
    for own, want, right in zip(got, eager, true, strict=True):
        assert own.shape == right.shape and torch.equal(own.isnan(), right.isnan())
        assert off(own, right) <= 3 * (off(want, right) + 2e-6)


def test_few_queries_compute_them_for_each_part_of_the_keys() -> None:
    torch.manual_seed(1)
    case = Case((1, 4, 2, 3, 70, 16), seen="bij", added="hij", replaces=True, zero_empty=True)
    masks, read = Masks(slopes, documents), tensors(torch.bfloat16)
    args = case.operands(torch.bfloat16)[:3]
    made = lowered(attention(case, masks, 3), [*args, *read])
    assert len(made.scheduled.steps) == 1 and len(kernels_of(made.program)) == 2
    got = bind_program(made.program)([*args, *read])[0]
    whole = [*args, *masks.of(case.sizes, torch.device("cpu"), read)]
    gradient = torch.zeros_like(got)
    eager, true = (written_out(case, whole, gradient, kind)[0] for kind in (torch.bfloat16, torch.float64))
    assert off(got, true) <= 3 * (off(eager, true) + 2e-6)


@pytest.mark.parametrize("shared", [4, 2])
def test_blocks_that_no_query_sees_are_not_computed(shared: int) -> None:
    """In both directions: what lies in other documents, nan here, changes nothing."""
    torch.manual_seed(1)
    case = Case((1, 4, shared, 200, 200, 16), seen="ij", **HIDES)
    doc = (torch.arange(200) // 64)[None]
    masks = Masks(None, lambda b, h, q, k, doc: doc[0, q] == doc[0, k])
    args = case.operands(BF16)[:3]
    gradient = case.lines(4, 200, BF16)
    want = computed(case, masks, args, gradient, [doc])
    for tensor in (*args, gradient):
        tensor[:, :, 64:128] = float("nan")
    got = computed(case, masks, args, gradient, [doc])
    for own, right in zip(got, want, strict=True):
        assert own[:, :, 64:128].isnan().all() and right.isfinite().all()
        for part in (slice(None, 64), slice(128, None)):
            assert torch.equal(own[:, :, part], right[:, :, part])


def test_gradients_of_a_query_without_a_key_are_nan_for_all_keys() -> None:
    """Where it is no zero: so the blocks that it does not see are computed all the same."""
    torch.manual_seed(1)
    case = Case((1, 2, 2, 70, 200, 16), seen="ij", replaces=True)
    masks = Masks(None, lambda b, h, q, k: (k < 9) & (q != 3))
    args = case.operands(F32)[:3]
    gradient = case.lines(2, 70, F32)
    got = computed(case, masks, args, gradient, [])
    whole = [*args, *masks.of(case.sizes, torch.device("cpu"), [])]
    for own, right in zip(got, written_out(case, whole, gradient, torch.float64), strict=True):
        assert torch.equal(own.isnan(), right.isnan())


def lost_and_later(q: Any, k: Any, v: Any, bias: Any, seen: Any, positions: Any) -> Any:
    """Queries that see nothing, beside later keys that are hidden from all by where they are."""
    return torch.where((positions[:, None] >= positions) & seen, q @ k.mT * 0.3 + bias, -math.inf).softmax(-1) @ v


def lost_in_a_window(q: Any, k: Any, v: Any, bias: Any, seen: Any, positions: Any) -> Any:
    back = positions[:, None] - positions
    return torch.where((back >= 0) & (back < 20) & seen, q @ k.mT * 0.3, -math.inf).softmax(-1) @ v


def lost_by_numbers(q: Any, k: Any, v: Any, bias: Any, seen: Any, positions: Any) -> Any:
    return torch.where(positions[:, None] >= positions, q @ k.mT * 0.3 + bias, -math.inf).softmax(-1) @ v


def lost_under_a_triangle(q: Any, k: Any, v: Any, bias: Any, seen: Any, positions: Any) -> Any:
    triangle = torch.where(torch.ones(70, 70, dtype=torch.bool).tril(), 0.0, -math.inf)
    return (q @ k.mT * 0.3 + torch.where(seen, 0.0, -math.inf) + triangle).softmax(-1) @ v


@pytest.mark.parametrize("processor", ["triton-interpreter", "host"])
@pytest.mark.parametrize("function", [lost_and_later, lost_in_a_window, lost_by_numbers, lost_under_a_triangle])
def test_a_query_that_sees_no_key_has_eagers_gradients_where_later_keys_are_hidden(
    function: Callable[..., Any], processor: str
) -> None:
    """Those of values are nan for keys of blocks, too, that no query sees."""

    def both(gradient: torch.Tensor, *given: torch.Tensor) -> list[torch.Tensor]:
        wanted = [x.detach().requires_grad_() for x in given[:3]]
        out = function(*wanted, *given[3:], torch.arange(70))
        return [out, *torch.autograd.grad(out, wanted, gradient)]

    torch.manual_seed(1)
    gradient, *qkv = (torch.randn(1, 1, 70, 16) for _ in range(4))
    bias, seen = torch.randn(1, 1, 70, 70), torch.rand(1, 1, 70, 70) < 0.7
    seen |= torch.eye(70, dtype=torch.bool)
    seen[..., 5, :], bias[..., 5, :6] = False, -math.inf  # the query 5 is lost
    args = [gradient, *qkv, bias, seen]
    gm = make_fx(both, decompositions(), tracing_mode="fake")(*args)
    remove_noops(gm.graph, 1000)
    drop_dead_nodes(gm.graph)
    made = compile_to_program(gm, options=LowerOptions(verify=True, processor=processor, contractions="generated"))
    got = bind_program(made.program)(list(args))
    for own, want in zip(got, both(*args), strict=True):
        assert torch.equal(own.isnan(), want.isnan())
        torch.testing.assert_close(own, want, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert got[3].isnan().all()


def dilated(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return (doc[b, k] % doc[b, q].clamp(min=1)) == 0


def looked_up(b: Any, h: Any, q: Any, k: Any, slope: Any, table: Any, doc: Any) -> Any:
    return table[h, doc[b, q] * 3 + doc[b, k]]


STAY = [
    (Masks(None, dilated), "divides by what may be 0"),
    (Masks(looked_up), "places that are read may be out of range"),
]


@pytest.mark.parametrize(("masks", "why"), STAY, ids=["a division", "a place"])
def test_what_may_report_an_error_stays_in_memory(masks: Masks, why: str) -> None:
    case = Case((2, 4, 4, 17, 20, 16), seen="bij" * bool(masks.seen), added="bhij" * bool(masks.added))
    read, args = tensors(torch.float32), case.operands(torch.float32)[:3]
    made = lowered(attention(case, masks, 3), [*args, *read])
    assert len(made.scheduled.steps) > 1, why
    got = bind_program(made.program)([*args, *read])[0]
    whole = [*args, *masks.of(case.sizes, torch.device("cpu"), read)]
    gradient = torch.zeros_like(got)
    torch.testing.assert_close(got.double(), written_out(case, whole, gradient, torch.float64)[0], rtol=1e-4, atol=1e-5)


def test_a_mask_that_is_needed_in_memory_is_read() -> None:
    case = Case((2, 4, 4, 17, 20, 16), seen="bij")
    masks, read = Masks(None, prefix), tensors(torch.float32)
    args = case.operands(torch.float32)[:3]

    def program(*given: Tensor) -> Any:
        (seen,) = masks.of(case.sizes, given[0].device, list(given[3:]))
        return *forward(case)(*given[:3], seen), seen

    made = lowered(program, [*args, *read])
    assert len(made.scheduled.steps) == 2
    kept = bind_program(made.program)([*args, *read])[3]
    assert torch.equal(kept, masks.of(case.sizes, torch.device("cpu"), read)[0])


def test_it_can_be_turned_off() -> None:
    case, masks, _ = CASES[0]
    args = [*case.operands(torch.float32)[:3], *tensors(torch.float32)]
    made = lowered(attention(case, masks, 3), args, disable=("compute-masks",))
    assert len(made.scheduled.steps) > 1


@pytest.mark.parametrize("gradients", [False, True], ids=["forward", "backward"])
def test_blocks_fit_a_hopper(gradients: bool) -> None:
    case = replace(CASES[0][0], sizes=(2, 4, 2, 1024, 1024, 64))
    with FakeTensorMode():
        read = [torch.empty(4), torch.empty(4, 200), torch.empty(2, 1024, dtype=torch.int64)]
        args = case.operands(torch.bfloat16)[:3]
        if gradients:
            args = [case.lines(4, 1024, torch.bfloat16), *args, *forward(replace(case, seen="", added=""))(*args)]
        made = lowered(attention(case, CASES[0][1], len(args), gradients=gradients), [*args, *read])
    check_alone(made)
    for kernel in kernels_of(made.program):
        facts = resource_facts(compile_kernel(kernel.source, 90))
        assert facts.spills == facts.stack == 0
