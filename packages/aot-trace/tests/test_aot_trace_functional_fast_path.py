"""The short way through torch's functionalization mode records what the long way records."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from aotkit_aot_trace import FunctionalLayer, TraceOptions, capture
from aotkit_functionalize import functional_fast_path

LONG = functional_fast_path._Way.LONG


def views_of_views(x):
    return [x.view(2, 12).t()[1:].unsqueeze(0).transpose(0, 1), x.detach(), torch.cat([x, x.t().t()])]


def written_through_a_view(x):
    y = x * 2
    row = y[1]
    other = y.view(-1)
    row.mul_(3)
    return [other * 1, y.t(), row, torch.stack([row, y[0]])]


def written_input(x):
    before = x.t().contiguous()
    x.add_(1)
    x.t()[0].zero_()
    return [x.view(-1).sin(), before, x[2:]]


def layers(x):
    mean, var = torch.zeros(6, dtype=x.dtype), torch.ones(6, dtype=x.dtype)
    y = torch.nn.functional.batch_norm(x, mean, var, training=True)
    y = torch.nn.functional.layer_norm(y, (6,)).relu_()
    return [y, mean, var, torch.nn.functional.scaled_dot_product_attention(y[None], y[None], y[None])]


def lists_and_factories(x):
    parts = torch.split(x, 2, dim=1)
    made = torch.zeros_like(x)
    made[:, ::2] = torch.arange(12, dtype=x.dtype).view(4, 3)
    return [*torch._foreach_add(list(parts), 1), made, x[torch.tensor([0, 3])], torch.complex(x, x).conj() * 2]


def checkpointed(x):
    return [checkpoint(lambda v: (v @ v.t()).sin().expand(2, 4, 4), x, use_reentrant=False)]


def metadata_changed(x):
    y = x * 1
    y.t_().unsqueeze_(0)
    return [y, y.squeeze(0)]


PROGRAMS = [
    views_of_views,
    written_through_a_view,
    written_input,
    layers,
    lists_and_factories,
    checkpointed,
    metadata_changed,
]


def recorded(program, grad, dynamic):
    FakeTensorMode.cache_clear()  # what it keeps may have another offset than what it computes
    x = torch.arange(24, dtype=torch.float64).view(4, 6).sin()
    x = x.requires_grad_() if grad else x
    taken = (x * 1) if grad else x
    found = capture(program, [taken], options=TraceOptions(layer=FunctionalLayer.MODE, dynamic=dynamic))
    values = [node.meta.get("val") for node in found.graph.graph.nodes]
    layouts = [(v.shape, v.stride(), v.storage_offset()) if isinstance(v, torch.Tensor) else str(v) for v in values]
    return found.graph.code, str(found.metadata), str(layouts)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_both_ways_record_the_same_graph_and_metadata(program, grad, dynamic, monkeypatch):
    ways = []

    def noted(func):
        ways.append(chosen(func))
        return ways[-1]

    chosen = functional_fast_path._way
    monkeypatch.setattr(functional_fast_path, "_way", noted)
    short = recorded(program, grad, dynamic)
    assert any(way is not LONG for way in ways), "nothing took the short way"
    monkeypatch.setattr(functional_fast_path, "_way", lambda func: LONG)
    assert recorded(program, grad, dynamic) == short


@pytest.mark.parametrize(
    ("operator", "way"),
    [
        ("aten.mm.default", "computes"),
        ("aten.native_layer_norm.default", "computes"),
        ("aten.cat.default", "computes"),
        ("aten.view.default", "views"),
        ("aten.t.default", "views"),
        ("aten.add_.Tensor", "long"),
        ("aten.add.out", "long"),
        ("aten.t_.default", "long"),
        ("aten.split.Tensor", "long"),
        ("aten.reshape.default", "long"),
        ("aten.native_batch_norm.default", "long"),
        ("aten.lift_fresh.default", "long"),
        ("aten.sym_size.default", "long"),
        ("prims.add.default", "long"),
    ],
)
def test_only_operators_that_write_nothing_and_give_one_view_take_the_short_way(operator, way):
    namespace, name, overload = operator.split(".")
    func = getattr(getattr(getattr(torch.ops, namespace), name), overload)
    assert functional_fast_path._way(func).value == way
