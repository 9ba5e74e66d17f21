"""The key of a graph: whatever decides what a compile makes of it flips the key, and nothing else does."""

from __future__ import annotations

import math
import operator
import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import fx
from torch._guards import TracingContext

from aotkit.artifact import key as key_module
from aotkit.artifact import torch_state
from aotkit.artifact.guards import Names, evaluate, guards_hold, guards_of, install_guards
from aotkit.artifact.key import graph_key
from aotkit.frontend.inputs import symbolic_twins
from aotkit.options import Options
from aotkit_cache import Uncacheable, explain, make_key


def key_of(gm: fx.GraphModule, args: list[Any], options: Options | None = None) -> Any:
    return make_key(**graph_key(gm, args, [None] * len(args), options or Options(), Names()))


def graph(
    first: Any = torch.add,
    *,
    constant: Any = 2,
    kwargs: dict[str, Any] | None = None,
    names: str = "x",
    swapped: bool = False,
    method: str = "view",
    meta: dict[str, Any] | None = None,
    body: Callable[[], fx.GraphModule] | None = None,
    held: torch.Tensor | None = None,
    dead: bool = False,
    outputs: int = 1,
) -> fx.GraphModule:
    g, root = fx.Graph(), torch.nn.Module()
    x, y = g.placeholder(names), g.placeholder(f"{names}_other")
    node = g.call_function(first, (y, x) if swapped else (x, y), kwargs or {})
    node.meta.update({"stack_trace": f"File {names}"} | (meta or {}))
    node = g.call_function(torch.mul, (node, constant))
    node = g.call_method(method, (node, (-1,)))
    if dead:
        g.call_function(torch.sin, (x,))
    if body is not None:
        root.inner = body()
        inner = g.get_attr("inner")
        node = g.call_function(torch.ops.higher_order.wrap, (inner, node))
    if held is not None:
        root.held = held
        node = g.call_function(torch.add, (node, g.get_attr("held")))
    g.output((node,) * outputs)
    return fx.GraphModule(root, g)


def body(constant: int = 1) -> fx.GraphModule:
    g = fx.Graph()
    g.output(g.call_function(operator.add, (g.placeholder("z"), constant)))
    return fx.GraphModule(torch.nn.Module(), g)


def inputs(**changes: Any) -> list[Any]:
    """A float tensor and another, one property of the first changed."""
    base = torch.zeros(64)
    x = torch.zeros(4, 6) if "make" not in changes else changes["make"](base)
    return [x, changes.get("second", torch.ones(4, 6))]


GRAPHS: dict[str, fx.GraphModule] = {
    "another function": graph(torch.sub),
    "an operator for a function": graph(torch.ops.aten.add.Tensor),
    "another overload": graph(torch.ops.aten.add.Scalar),
    "another constant": graph(constant=3),
    "another type of constant": graph(constant=2.0),
    "a boolean constant": graph(constant=True),
    "a keyword": graph(kwargs={"alpha": 2}),
    "another keyword value": graph(kwargs={"alpha": 3}),
    "arguments swapped": graph(swapped=True),
    "another method": graph(method="reshape"),
    "one more node": graph(dead=True),
    "one more result": graph(outputs=2),
    "a called graph": graph(body=body),
    "another called graph": graph(body=lambda: body(2)),
    "a recompute tag": graph(meta={"recompute": 1}),
    "a budget of a region": graph(meta={"custom": {"budget": 0.5}}),
}
INPUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dtype": lambda b: torch.zeros(4, 6, dtype=torch.float64),
    "device": lambda b: torch.zeros(4, 6, device="meta"),
    "shape": lambda b: torch.zeros(6, 4),
    "one more dimension": lambda b: torch.zeros(4, 6, 1),
    "stride": lambda b: torch.empty_strided((4, 6), (1, 4)),
    "offset": lambda b: torch.zeros(25)[1:].detach().as_strided((4, 6), (6, 1), 1),
    "requires_grad": lambda b: torch.zeros(4, 6, requires_grad=True),
    "no leaf": lambda b: torch.zeros(4, 6, requires_grad=True) * 1,
    "a parameter": lambda b: torch.nn.Parameter(torch.zeros(4, 6)),
    "a constant parameter": lambda b: torch.nn.Parameter(torch.zeros(4, 6), requires_grad=False),
    "a view": lambda b: b[:24].view(4, 6),
    "a view of something else": lambda b: b.view(8, 8)[:4, :6],
    "a conjugate": lambda b: torch.zeros(4, 6, dtype=torch.complex64).conj(),
    "complex": lambda b: torch.zeros(4, 6, dtype=torch.complex64),
    "an inference tensor": lambda b: _inference(),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "numerics": {"numerics": "fast"},
    "rng": {"rng": "fast"},
    "partitioner": {"partitioner": "default"},
    "memory_budget": {"memory_budget": 0.5},
    "chunk_loss_bytes": {"chunk_loss_bytes": 0},
    "lowering": {"lowering": "none"},
    "fuel": {"fuel": 3},
    "disable": {"disable": {"fold-uniform"}},
    "cacheable": {"cacheable": {"mine.op@1"}},
    "cudagraph_outputs": {"cudagraph_outputs": "copy"},
}


def _inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(4, 6)


class _Set:
    """A context that calls a setter and restores what a getter said."""

    def __init__(self, get: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> None:
        self.get, self.put, self.value = get, put, value

    def __enter__(self) -> None:
        self.before = self.get()
        self.put(self.value)

    def __exit__(self, *what: object) -> None:
        self.put(self.before)


def _precision(library: Any, value: str) -> _Set:
    return _Set(lambda: library.fp32_precision, lambda new: setattr(library, "fp32_precision", new), value)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "grad mode": torch.no_grad,
    "inference mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "autocast dtype": lambda: torch.autocast("cpu", torch.float16),
    "autocast without its cache": lambda: torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    "default dtype": lambda: _Set(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "deterministic": lambda: _Set(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "matmul precision": lambda: _Set(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"),
    "precision of one library's products": lambda: _precision(torch.backends.mkldnn.matmul, "bf16"),
    "precision of cuBLAS": lambda: _precision(torch.backends.cuda.matmul, "tf32"),
    "cuDNN's attention": lambda: _Set(
        torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False
    ),
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=False),
    "threads": lambda: _Set(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "flash attention": lambda: _Set(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "math attention": lambda: _Set(torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
    "mkldnn": lambda: _Set(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "filling of new memory": lambda: _Set(
        torch._C._get_deterministic_fill_uninitialized_memory,
        torch._C._set_deterministic_fill_uninitialized_memory,
        False,
    ),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.covers("F7.4", "F7.6", "F7.7", "F7.8")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
def test_each_ingredient_alone_flips_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = key_of(graph(), inputs())
    keys = {"nothing": plain}
    keys.update({name: key_of(gm, inputs()) for name, gm in GRAPHS.items()})
    keys.update({f"input: {name}": key_of(graph(), inputs(make=make)) for name, make in INPUTS.items()})
    shared = torch.zeros(4, 6)
    keys["inputs share memory"] = key_of(graph(), [shared, shared.detach()])
    keys["a number for a tensor"] = key_of(graph(), inputs(second=3))
    keys["another number"] = key_of(graph(), inputs(second=4))
    keys["a held tensor"] = key_of(graph(held=torch.zeros(24)), [*inputs(), torch.zeros(24)])
    keys.update({f"option {name}": key_of(graph(), inputs(), Options().patch(**c)) for name, c in OPTIONS.items()})
    for name, context in STATES.items():
        made = inputs()
        with context() if name != "default device" else nullcontext():
            if name == "default device":
                monkeypatch.setattr(torch, "get_default_device", lambda: torch.device("meta"))
            keys[f"state: {name}"] = key_of(graph(), made)
            monkeypatch.undo()
    for name in ("sources_digest", "host_machine", "compilers", "environment_parts"):
        value: Any = {"env.torch": "2.99"} if name == "environment_parts" else "another"
        monkeypatch.setattr(key_module, name, lambda value=value: value)
        keys[f"environment: {name}"] = key_of(graph(), inputs())
        monkeypatch.undo()
    monkeypatch.setattr(key_module, "ARTIFACT_FORMAT", 0)
    keys["format"] = key_of(graph(), inputs())
    assert len(keys) > 60
    by_digest: dict[str, str] = {}
    for name, key in keys.items():
        other = by_digest.setdefault(key.digest, name)
        assert other == name, f"{name!r} and {other!r} share a key"
    assert key_of(graph(), inputs()).digest != plain.digest  # the format is still another
    monkeypatch.undo()
    assert key_of(graph(), inputs()).digest == plain.digest


@pytest.mark.covers("F7.9", "F7.4")
def test_what_decides_nothing_does_not_flip_the_key() -> None:
    plain = key_of(graph(kwargs={"alpha": 2, "out": None}), inputs())
    for same in (
        key_of(graph(kwargs={"out": None, "alpha": 2}), inputs()),
        key_of(graph(kwargs={"alpha": 2, "out": None}, names="another"), inputs()),  # names and stack traces
        key_of(graph(kwargs={"alpha": 2, "out": None}), [t + 1 for t in inputs()]),  # contents of tensors
        key_of(graph(kwargs={"alpha": 2, "out": None}), inputs(), Options(fallback="error", verify=True)),
        key_of(graph(kwargs={"alpha": 2, "out": None}), inputs(), Options(compile_workers=3)),
    ):
        assert same == plain, explain(plain, same)
    many = Options().patch(disable={"a", "b", "c"}), Options().patch(disable=["c", "b", "a"])
    assert key_of(graph(), inputs(), many[0]) == key_of(graph(), inputs(), many[1])


def _reductions(first: str, second: str, joined: bool = True) -> fx.GraphModule:
    """Two reductions, or two sines, in modules of these paths."""
    g = fx.Graph()
    x = g.placeholder("x")
    found = []
    for path in (first, second):
        if joined:
            node = g.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
        else:
            node = g.call_function(torch.sin, (x,))
        node.meta["nn_module_stack"] = {"key": (path, torch.nn.Linear)} if path else {}
        found.append(node)
    g.output(tuple(found))
    return fx.GraphModule(torch.nn.Module(), g)


def test_blocks_of_the_model_are_told_apart_where_there_are_collectives() -> None:
    def key(*paths: str, joined: bool = True) -> Any:
        return key_of(_reductions(*paths, joined=joined), [torch.ones(2)])

    one, two = key("layers.0.first", "layers.0.second"), key("layers.0.first", "layers.1.first")
    assert len({one, two, key("", ""), key("", "layers.0.first")}) == 4
    assert one == key("layers.5.a", "layers.5.b") and two == key("blocks.3", "blocks.1")
    assert key("layers.0", "layers.0", joined=False) == key("layers.0", "layers.1", joined=False)


@pytest.mark.covers("F7.30")
def test_two_keys_tell_the_stride_that_differs() -> None:
    a, b = (key_of(graph(), inputs(make=lambda _, s=s: torch.empty_strided((4, 6), (s, 1)))) for s in (6, 8))
    assert "inputs[0]['stride'][0]: 6 -> 8" in explain(a, b)


class _Callable:
    __name__ = "sin"

    def __call__(self, *args: Any) -> Any:
        return args[0]


@pytest.mark.covers("F7.11", "F7.12")
def test_what_no_key_can_name_is_refused_with_a_reason() -> None:
    def mine(*args: Any) -> Any:
        return args[0]

    cases: list[tuple[str, fx.GraphModule, list[Any]]] = [
        ("no function of torch or Python", graph(mine), inputs()),
        ("no function of torch or Python", graph(_Callable()), inputs()),
        ("argument of type builtins.range", graph(kwargs={"steps": range(3)}), inputs()),
        ("does not tell what it is made of", graph(), inputs(second=torch.nn.Buffer(torch.zeros(2)).as_subclass(_Sub))),
        ("has no canonical text", graph(), inputs(second=object())),
        ("checkpoints with a policy", graph(body=_with_policy), inputs()),
    ]
    for reason, gm, args in cases:
        with pytest.raises(Uncacheable, match=reason):
            key_of(gm, args)
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)
    with pytest.raises(Uncacheable, match="hooks on saved tensors"), hooks:
        torch_state.torch_state()


class _Sub(torch.Tensor):
    pass


def _with_policy() -> fx.GraphModule:
    gm = body()
    gm.meta["_checkpoint_context_fn"] = lambda: None
    return gm


def random_graph(chosen: random.Random) -> tuple[fx.GraphModule, list[torch.Tensor]]:
    """A small graph over two inputs and the inputs; everything drawn from a few values, so that pairs often agree."""
    g = fx.Graph()
    values = [g.placeholder("a"), g.placeholder("b")]
    for _ in range(chosen.randrange(1, 4)):
        kind = chosen.randrange(4)
        if kind == 0:
            f = chosen.choice([torch.add, torch.mul, torch.sub])
            values.append(g.call_function(f, (chosen.choice(values), chosen.choice(values))))
        elif kind == 1:
            f = chosen.choice([torch.add, torch.mul])
            values.append(g.call_function(f, (chosen.choice(values), chosen.choice([1, 2, 1.0, 2.5]))))
        elif kind == 2:
            values.append(g.call_method(chosen.choice(["sin", "neg"]), (chosen.choice(values),)))
        else:
            dim = chosen.choice([0, 1])
            values.append(g.call_function(torch.sum, (chosen.choice(values),), {"dim": dim, "keepdim": True}))
    g.output((chosen.choice(values),))
    dtype = chosen.choice([torch.float32, torch.float64])
    shape = chosen.choice([(2, 3), (3, 3)])
    transposed = chosen.random() < 0.3
    generator = torch.Generator().manual_seed(0)
    made = [torch.rand(*(reversed(shape) if transposed else shape), generator=generator).to(dtype) for _ in range(2)]
    return fx.GraphModule(torch.nn.Module(), g), [t.T.detach() if transposed else t for t in made]


def result_of(gm: fx.GraphModule, args: list[torch.Tensor]) -> tuple[Any, ...]:
    (value,) = gm(*args)
    return value.dtype, tuple(value.shape), value.stride(), value.contiguous().numpy().tobytes()


@pytest.mark.covers("F7.4")
def test_of_a_thousand_pairs_of_graphs_and_inputs_none_shares_a_key_with_another_result() -> None:
    chosen = random.Random(8)
    by_key: dict[str, tuple[Any, ...]] = {}
    shared = 0
    for _ in range(1000):
        gm, args = random_graph(chosen)
        # The inputs hold the same numbers wherever they have the same shape, dtype and layout.
        key, result = key_of(gm, args).digest, result_of(gm, args)
        known = by_key.setdefault(key, result)
        shared += known is not result
        assert known == result, f"one key for two results:\n{gm.graph}\n{[(a.shape, a.dtype) for a in args]}"
    assert shared > 50 and len(by_key) > 300


@pytest.mark.covers("F7.10")
def test_guards_survive_json_and_are_installed_on_other_symbols() -> None:
    import json

    from torch._dynamo.source import ConstantSource
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    def symbols(*sizes: int) -> tuple[ShapeEnv, Names]:
        env = ShapeEnv(duck_shape=False)
        mode = FakeTensorMode(shape_env=env)
        how = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(sizes))
        fake = mode.from_tensor(torch.empty(sizes), symbolic_context=how, source=ConstantSource(f"x{len(sizes)}"))
        names = Names()
        for size in fake.shape:
            names.text(size)
        return env, names

    env, names = symbols(8, 6)
    a, b = names.values.values()
    facts = (a % 4 == 0, a > b, a // 2 + b * 3 < 100, torch.sym_max(a, b) != 7, a * a >= 9)
    facts += (torch.sym_int((a * b) ** 0.5) == 6, math.ceil(a * 0.7) >= 6, round(b / 4) <= 2, a * 0.3 > b * 0.1)
    facts += (math.floor((a + b) ** 0.5 * 10) >= 37,)
    assert all(bool(fact) for fact in facts)
    guards = json.loads(json.dumps(guards_of(env, names)))
    assert len(guards) >= 9
    others = ((12, 5), (6, 5), (8, 9), (160, 20))
    for sizes, holds in (((8, 6), True), ((12, 3), True), *((sizes, False) for sizes in others)):
        assert guards_hold(guards, dict(zip(names.values, sizes, strict=True))) is holds, sizes
    other, renamed = symbols(12, 3)
    before = len(other.guards)
    install_guards(guards, renamed.values)
    assert len(other.guards) - before >= 9
    assert guards_of(other, renamed) == guards
    asked = mock.Mock(side_effect=evaluate)
    with mock.patch("aotkit.artifact.guards.evaluate", asked):
        install_guards(guards, renamed.values)
    assert not asked.called  # what the environment knows is not asked again


def test_only_inputs_with_symbols_have_twins() -> None:
    found: list[list[Any]] = []

    def backend(gm: fx.GraphModule, args: list[Any]) -> Any:
        context = TracingContext.try_get()
        values = [value for value in args if isinstance(value, torch.Tensor)]
        tensors = [
            n for n in gm.graph.find_nodes(op="placeholder") if isinstance(n.meta["example_value"], torch.Tensor)
        ]
        twins = symbolic_twins(args, gm, context)
        twins = [twin for twin, value in zip(twins, args, strict=True) if isinstance(value, torch.Tensor)]
        for value, node, twin in zip(values, tensors, twins, strict=True):
            seen = node.meta["example_value"]
            has_symbols = any(isinstance(n, torch.SymInt) for n in (*seen.shape, *seen.stride()))
            found.append([tuple(value.shape), has_symbols, twin is not None])
            if twin is not None:
                assert str((twin.shape, twin.stride())) == str((seen.shape, seen.stride()))
        return gm.forward

    layer, x, tail = torch.nn.BatchNorm1d(3), torch.randn(5, 3), torch.randn(3)
    torch._dynamo.mark_dynamic(x, 0)
    torch.compile(lambda x, tail: layer(x) + tail, backend=backend, fullgraph=True)(x, tail)
    assert [(5, 3), True, True] in found and len(found) >= 6
    assert all(has_symbols == has_twin for _, has_symbols, has_twin in found)
