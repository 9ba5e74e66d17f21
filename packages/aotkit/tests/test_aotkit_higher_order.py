"""Higher-order operators, against eager: torch's own list of them, and what that list leaves out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._higher_order_ops as hops
import torch.nn.functional as F
import torch.utils._pytree as pytree
from functorch.experimental.control_flow import map as control_flow_map
from torch._higher_order_ops.associative_scan import associative_scan
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import aotkit

pytest.importorskip("expecttest", reason="torch's own list of operators needs expecttest, which is missing")
from torch.testing._internal.hop_db import hop_db

# Torch's own, about how it runs these operators outside of a compiler.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile"),
]


def pass_through(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
    return graph


def by_hand(fn: Callable[..., Any]) -> Callable[..., Any]:
    return aotkit.aot_function(fn, pass_through)


def by_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error", "rng": "eager"})


def copies(tree: Any) -> Any:
    def copy(value: torch.Tensor) -> torch.Tensor:
        return value.detach().clone().requires_grad_(value.requires_grad)

    return pytree.tree_map_only(torch.Tensor, copy, tree)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def outcome(fn: Callable[..., Any], args: Any, kwargs: Any = None) -> dict[str, Any]:
    """Results, gradients and inputs afterwards of one call with copies of the arguments."""
    args, kwargs = copies((args, kwargs or {}))
    torch.manual_seed(0)
    results = fn(*args, **kwargs)
    leaves = [t for t in tensors((args, kwargs)) if t.requires_grad]
    differentiable = [t for t in tensors(results) if t.requires_grad]
    gradients: tuple[Any, ...] = ()
    if leaves and differentiable:
        loss = [(t * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in differentiable]
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    plain = [leaf for leaf in pytree.tree_leaves(results) if not isinstance(leaf, torch.Tensor)]
    return {
        "results": [t.detach() for t in tensors(results)],
        "others": plain,
        "requires_grad": [t.requires_grad for t in tensors(results)],
        "gradients": list(gradients),
        "inputs": [t.detach() for t in tensors((args, kwargs))],
    }


def assert_like_eager(
    fn: Callable[..., Any], wrap: Callable[..., Any], args: Any, kwargs: Any = None, expected: Any = None
) -> None:
    expected = expected or outcome(fn, args, kwargs)
    compiled = wrap(fn)
    for _ in range(2):
        got = outcome(compiled, args, kwargs)
        assert got["requires_grad"] == expected["requires_grad"] and got["others"] == expected["others"]
        assert [g is None for g in got["gradients"]] == [g is None for g in expected["gradients"]]
        for part in ("results", "gradients", "inputs"):
            torch.testing.assert_close(
                [t for t in got[part] if t is not None], [t for t in expected[part] if t is not None]
            )


# What Dynamo has no variable for, or what works only on graphs that Dynamo has made.
NOT_BY_DYNAMO = {"local_map_hop", "register_hook"}
NOT_BY_HAND = {"flex_attention", "flex_attention_backward"}
# Their samples ask for a gradient, or carry what changes its type in the loop.
FLOATING = {"register_hook", "while_loop", "while_loop_stack_output"}
WAYS = {"by_hand": by_hand, "by_dynamo": by_dynamo}


def hop_cases() -> list[Any]:
    cases = []
    for info in hop_db:
        for dtype in sorted((info.supported_dtypes("cpu") & {torch.float32, torch.int64}) or {torch.float32}, key=str):
            if not dtype.is_floating_point and info.name in FLOATING:
                continue
            for requires_grad in (False, True) if dtype.is_floating_point and info.supports_autograd else (False,):
                for way in WAYS:
                    if info.name not in (NOT_BY_DYNAMO if way == "by_dynamo" else NOT_BY_HAND):
                        name = f"{info.name}-{info.variant_test_name}-{str(dtype)[6:]}-{requires_grad}-{way}"
                        cases.append(pytest.param(info, dtype, requires_grad, way, id=name))
    return cases


@pytest.mark.covers("F2.41")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("info", "dtype", "requires_grad", "way"), hop_cases())
def test_every_entry_of_hop_db_equals_eager(info: Any, dtype: torch.dtype, requires_grad: bool, way: str) -> None:
    for sample in info.sample_inputs("cpu", dtype, requires_grad=requires_grad):
        args = (sample.input, *sample.args)
        try:
            eagers = outcome(info.op, args, sample.kwargs)
        except (
            RuntimeError,
            TypeError,
            NotImplementedError,
        ) as error:  # not for this device or type: whoever compiles it has to be told as well
            with pytest.raises((type(error), torch._dynamo.exc.Unsupported)):
                outcome(WAYS[way](info.op), args, sample.kwargs)
            continue
        assert_like_eager(info.op, WAYS[way], args, sample.kwargs, eagers)


def test_no_entry_of_hop_db_is_left_out_in_both_ways() -> None:
    assert not NOT_BY_DYNAMO & NOT_BY_HAND
    assert {case.values[0].name for case in hop_cases()} == {info.name for info in hop_db}


def save_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE


def grad(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, requires_grad=True)


def selective(x: torch.Tensor) -> torch.Tensor:
    contexts = functools.partial(create_selective_checkpoint_contexts, save_products)
    return checkpoint(lambda y: (y.sin() @ y.t()).cos(), x, use_reentrant=False, context_fn=contexts)


def nested_checkpoints(x: torch.Tensor) -> torch.Tensor:
    def outer(y: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda z: z.sin().exp(), y, use_reentrant=False) * 2

    return checkpoint(outer, x, use_reentrant=False)


def without_early_stop(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda y: y.sin().exp() * y, x, use_reentrant=False, early_stop=False)


def checkpointed_branches(x: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
    return torch.cond(flag, lambda y: (y.sin() @ y,), lambda y: (y.cos(),), (x,))[0].exp()


def loop(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return hops.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), (torch.tensor(0), x))


def loop_over_numbers(x: torch.Tensor) -> Any:
    return hops.while_loop(lambda i, n, y: i + n < 7, lambda i, n, y: (i + 1, n * 2, y + n), (0, 1, x))


def scan_with_carry(xs: torch.Tensor, start: torch.Tensor) -> Any:
    return hops.scan(lambda carry, x: (carry * x, carry + x), start, xs)


def running_sum(xs: torch.Tensor) -> torch.Tensor:
    return associative_scan(lambda a, b: a + b, xs, dim=0, combine_mode="generic")


def mapped(xs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return control_flow_map(lambda x, z: x * z.sum(), xs, y)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score + 0.1 * (i - j))


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 128, 128, device="cpu")
    return flex_attention(q, k, v, block_mask=mask)


def strict(x: torch.Tensor) -> torch.Tensor:
    return hops.strict_mode(lambda y: y.sin() + y, (x,))


def hinted(x: torch.Tensor) -> torch.Tensor:
    return torch.ops.higher_order.hints_wrapper(lambda y: y.sin(), (x,), {}, hints={"fuse": True})


def wide_product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.ops.higher_order.out_dtype(torch.ops.aten.mm.default, torch.int32, x, y)


@torch.compiler.nested_compile_region
def region(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x.sin()) * 2


def repeated_regions(x: torch.Tensor) -> torch.Tensor:
    for _ in range(4):
        x = region(x)
    return x


small = torch.randint(-9, 9, (4, 4), dtype=torch.int8)
MORE = {
    "selective": (selective, lambda: (grad(4, 3),), WAYS),
    "nested_checkpoints": (nested_checkpoints, lambda: (grad(4, 3),), WAYS),
    "without_early_stop": (without_early_stop, lambda: (grad(4, 3),), WAYS),
    "cond_true": (checkpointed_branches, lambda: (grad(4, 4), torch.tensor(True)), WAYS),
    "cond_false": (checkpointed_branches, lambda: (grad(4, 4), torch.tensor(False)), WAYS),
    "while_loop": (loop, lambda: (torch.randn(4),), WAYS),
    "while_loop_with_gradient": (loop, lambda: (grad(4),), WAYS),
    "while_loop_over_numbers": (loop_over_numbers, lambda: (torch.randn(4),), ("by_dynamo",)),
    "scan": (scan_with_carry, lambda: (grad(5, 3), grad(3)), WAYS),
    "associative_scan": (running_sum, lambda: (torch.randn(5, 3),), WAYS),
    "map": (mapped, lambda: (grad(3, 2), grad(2)), WAYS),
    "flex_attention": (attention, lambda: tuple(torch.randn(1, 2, 128, 8) for _ in range(3)), ("by_dynamo",)),
    "flex_attention_mask": (
        masked_attention,
        lambda: tuple(torch.randn(1, 2, 128, 8) for _ in range(3)),
        ("by_dynamo",),
    ),
    "strict_mode": (strict, lambda: (torch.randn(4),), WAYS),
    "hints": (hinted, lambda: (torch.randn(4),), WAYS),
    "out_dtype": (wide_product, lambda: (small, small), WAYS),
    "invoke_subgraph": (repeated_regions, lambda: (grad(8),), WAYS),
}


@pytest.mark.covers("F2.41")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(
    ("name", "way"), [pytest.param(name, way, id=f"{name}-{way}") for name, (*_, ways) in MORE.items() for way in ways]
)
def test_higher_order_operators_beside_hop_db_equal_eager(name: str, way: str) -> None:
    fn, make, _ = MORE[name]
    assert_like_eager(fn, WAYS[way], make())


@pytest.mark.covers("F2.42", "F8.9")
def test_identical_regions_are_compiled_once() -> None:
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "observer": recorder}
    compiled = torch.compile(repeated_regions, backend="aotkit", fullgraph=True, options=options)
    x = torch.randn(8)
    torch.testing.assert_close(compiled(x), repeated_regions(x))
    (record,) = recorder.graphs
    assert record.report.kernel_count == 1, str(record.report)
    calls = {extern.target: extern.count for extern in record.report.externs}
    assert calls == {"invoke_subgraph": 4}


def test_what_is_not_in_a_kernel_is_reported_with_its_reason() -> None:
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "observer": recorder}
    compiled = torch.compile(checkpointed_branches, backend="aotkit", fullgraph=True, options=options)
    compiled(torch.randn(4, 4), torch.tensor(True))
    (record,) = recorder.graphs
    assert record.report.kernel_count >= 3  # one in each branch, one behind
    reasons = {extern.target: extern.reason for extern in record.report.externs}
    assert reasons["cond"] == "a higher-order operator"
