"""Launch plans: segments between ATen calls, the arena, views, frames under threads, errors, serialization."""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from random import Random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, interpret_program
from aotkit_inductor_lower.errors import CodegenError
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.launch_plan import (
    Allocate,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    Return,
    View,
    compiled_from_json,
    compiled_to_json,
    plan_from_json,
    plan_to_json,
)
from aotkit_inductor_lower.loop_passes.reuse_call_results import reuse_call_results
from aotkit_inductor_lower.memory.placement import place_buffers
from aotkit_inductor_lower.passes import Fuel
from aotkit_inductor_lower.runtime import ArenaPool, BindError, bind_program, constant_places
from aotkit_inductor_lower.targets.cpu.generate import generate

# two linear layers with relu between, then a transposed view of the result is returned too
MLP = """aotkit-ir 2
program mlp
symbol $s0 = input 0 size 0
input x
buffer x : float32[$s0, 16] strides [16, 1] input on cpu
buffer w : float32[16, 32] strides [32, 1] constant on cpu
buffer v : float32[32, 8] strides [8, 1] constant on cpu
buffer h : float32[$s0, 32] strides [32, 1] temporary on cpu
buffer r : float32[$s0, 32] strides [32, 1] temporary on cpu
buffer q : float32[$s0, 32] strides [32, 1] temporary on cpu
buffer m : float32[$s0, 8] strides [8, 1] temporary on cpu
buffer y : float32[$s0, 8] strides [8, 1] output on cpu
buffer yt : float32[8, $s0] strides [1, 8] output on cpu
extern mm0: h = aten.mm.default(x, w) reason "a matmul"
loop relu(i0 < $s0, i1 < 32):
  stage():
    %a = load h[i0, i1] : f32
    %z = const 0.0 : f32
    %b = maximum %a, %z : f32
    store r[i0, i1] = %b
loop shift(i0 < $s0, i1 < 32):
  origin nodes ["shift"] ops ["aten.add.Tensor"] line "model.py:4"
  stage():
    %a = load r[i0, i1] : f32
    %one = const 1.0 : f32
    %b = add %a, %one : f32
    store q[i0, i1] = %b
extern mm1: m = aten.mm.default(q, v) reason "a matmul"
loop scale(i0 < $s0, i1 < 8):
  stage():
    %a = load m[i0, i1] : f32
    %two = const 2.0 : f32
    %b = mul %a, %two : f32
    store y[i0, i1] = %b
alias t: yt = y + 0
return y, yt, sym($s0)
"""


def mlp() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    constants = {"w": torch.randn(16, 32), "v": torch.randn(32, 8)}
    return generate(reuse_call_results(parse_program(MLP), Fuel())), constants


def eager_mlp(x: torch.Tensor, constants: dict[str, torch.Tensor]) -> torch.Tensor:
    return ((x @ constants["w"]).relu() + 1) @ constants["v"] * 2


def test_neighbouring_kernels_are_one_native_call_between_aten_calls() -> None:
    compiled, _ = mlp()
    kinds = [type(step) for step in compiled.plan.steps if type(step) is not type(None)]
    assert kinds.count(CallSegment) == 2 and kinds.count(CallExtern) == 2
    first = next(step for step in compiled.plan.steps if isinstance(step, CallSegment))
    assert first.launches == ("relu", "shift")
    assert isinstance(compiled.plan.steps[-1], Return)
    assert [k.name for k in compiled.kernels] == ["relu", "shift", "scale"]


@pytest.mark.covers("F5h.16", "F5h.8")
def test_temporaries_share_arena_memory_and_matmuls_write_into_it() -> None:
    compiled, constants = mlp()
    homes = {b.name: b.storage for b in compiled.plan.buffers}
    assert homes == {
        **dict.fromkeys(("h", "r", "q"), "arena"),
        **dict.fromkeys(("w", "v"), "constant"),
        "x": "input",
        "m": "call result",  # becomes the result: `scale` writes over it
        "y": "view",
        "yt": "view",
    }
    externs = [s for s in compiled.plan.steps if isinstance(s, CallExtern)]
    assert [s.out for s in externs] == ["aten.mm.out", None]
    offsets, total = place_buffers(
        [(a.buffer, a.first, a.last) for a in compiled.plan.arena], dict.fromkeys(("h", "r", "q"), 1000)
    )
    assert total < 3 * 1024 and offsets["q"] in (offsets["h"], offsets["r"])
    bound = bind_program(compiled, constants)
    for count in (3, 5, 3, 200):
        x = torch.randn(count, 16)
        y, yt, n = bound([x])
        torch.testing.assert_close(y, eager_mlp(x, constants), rtol=1e-4, atol=1e-4)
        assert yt.data_ptr() == y.data_ptr() and yt.shape == (8, count) and n == count


def test_outputs_of_two_calls_are_different_memory() -> None:
    compiled, constants = mlp()
    bound = bind_program(compiled, constants)
    a, b = torch.randn(4, 16), torch.randn(4, 16)
    first = bound([a])[0]
    kept = first.clone()
    bound([b])
    assert torch.equal(first, kept)


def test_the_argument_list_is_emptied_and_inputs_may_die_early() -> None:
    compiled, constants = mlp()
    args = [torch.randn(4, 16)]
    bind_program(compiled, constants)(args)
    assert args == []


@pytest.mark.covers("F5c.8")
def test_an_input_that_is_not_used_is_gone_before_anything_runs() -> None:
    text = MLP.replace("input x\n", "input unused\ninput x\n", 1).replace("input 0 size 0", "input 1 size 0")
    text = text.replace("buffer w :", "buffer unused : float32[4] strides [1] input on cpu\nbuffer w :")
    compiled = generate(parse_program(text))
    assert compiled.plan.steps[0] == Free(("unused",))
    torch.manual_seed(0)
    constants, x = {"w": torch.randn(16, 32), "v": torch.randn(32, 8)}, torch.randn(4, 16)
    bound = bind_program(compiled, constants)
    torch.testing.assert_close(bound([torch.ones(4), x])[0], eager_mlp(x, constants), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(bound([None, x])[0], eager_mlp(x, constants), rtol=1e-4, atol=1e-4)


@pytest.mark.covers("F5d.5")
def test_concurrent_calls_have_their_own_memory() -> None:
    compiled, constants = mlp()
    bound = bind_program(compiled, constants)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(20):
            x = torch.randn(40 + seed, 16, generator=generator)
            if not torch.allclose(bound([x])[0], eager_mlp(x, constants), rtol=1e-3, atol=1e-3):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(seed % 2,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


class Placed(list):  # type: ignore[type-arg]
    """Arguments that tell where they lie, as those that the wrappers hand over, and what moved since ``before``."""

    def __init__(self, values: list[torch.Tensor], before: tuple[int, ...] = ()) -> None:
        super().__init__(values)
        self.addresses, self.before = tuple(value.data_ptr() for value in values), before
        self.moved = tuple(k for k, address in enumerate(before) if address != self.addresses[k])


def many(seed: int, count: int = 40) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(7, generator=generator) for _ in range(count)]


def summed(*values: torch.Tensor) -> torch.Tensor:
    total = values[0] * 2
    for value in values[1:]:
        total = total + value
    return total


def test_many_inputs_are_read_where_they_lie_now() -> None:
    """A frame keeps where inputs lay, and is given back and taken by calls with others."""
    values = many(0)
    own = compile_graph(make_fx(summed)(*values))
    for turn in range(60):
        for k in range(turn % 5):
            values[(turn * 7 + k) % 40] = many(turn)[k]
        given = Placed(values) if turn % 3 else list(values)
        (result,) = own(given)
        assert torch.equal(result, summed(*values)) and not given
    assert "frame.inputs" in own._bound.source


def test_what_moved_is_believed_of_the_last_addresses_only() -> None:
    """Calls tell what moved since their last one, and others are made in between."""
    values, random = many(0), Random(0)
    own = compile_graph(make_fx(summed)(*values))
    before: tuple[int, ...] = ()
    for turn in range(80):
        for k in random.sample(range(40), random.choice((0, 1, 2, 30))):
            values[k] = many(turn)[k]
        given = Placed(values, before)
        before = given.addresses
        (result,) = own(given)
        assert torch.equal(result, summed(*values))
        if turn % 5 == 4:
            others = many(turn + 1000)
            assert torch.equal(own(list(others))[0], summed(*others))


@pytest.mark.parametrize("early", [True, False])
def test_many_inputs_live_as_long_as_they_are_read(early: bool) -> None:
    """Those that are let go before the last launch may die there; the others are held until the call is over."""
    seen: list[bool] = []

    def graph(*values: torch.Tensor) -> torch.Tensor:
        total = summed(*values)
        return torch.linalg.inv(total.outer(total) + 9 * torch.eye(7)) if early else total

    own = compile_graph(make_fx(graph)(*many(0)), options=LowerOptions(check_inputs=False))
    program = own._bound
    assert ("= given\n" in program.source) is early
    values = many(0)
    watched = weakref.ref(values[3])
    expected = graph(*values)
    name = next(name for name in program._call.__globals__ if name.startswith("op_" if early else "segment_"))
    inner = program._call.__globals__[name]
    program._call.__globals__[name] = lambda *args, **kwargs: (seen.append(watched() is None), inner(*args, **kwargs))[
        1
    ]
    args = values[:]
    del values
    torch.testing.assert_close(own(args)[0], expected)
    assert seen == [early] and watched() is None


@pytest.mark.parametrize("sizes", [(2, 3, 4), (24,), (4, 6)])
def test_a_result_that_is_a_view_of_a_fresh_tensor_is_made_as_the_view(sizes: tuple[int, ...]) -> None:
    x = torch.randn(24, 24)
    own = compile_graph(make_fx(lambda x: (x.sin() @ x.cos()).sum(1).view(sizes))(x))
    (result,) = own([x])
    torch.testing.assert_close(result, (x.sin() @ x.cos()).sum(1).view(sizes))
    assert not result._is_view() and result.is_contiguous()


def test_a_fresh_tensor_that_is_returned_beside_its_view_shares_its_memory() -> None:
    x = torch.randn(6)
    own = compile_graph(make_fx(lambda x: [(y := x.sin()), y.view(2, 3)])(x))
    whole, view = own([x])
    assert whole.data_ptr() == view.data_ptr() and view.shape == (2, 3) and torch.equal(view.flatten(), whole)


def test_views_that_a_method_gives_are_not_taken_with_all_their_strides() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = x.sin().view(6, 4)  # of a fresh tensor that nothing else needs: it is made as this view
        return hidden @ w.t(), v.view(6, 4) @ w.t()[:, :5], hidden.t() @ hidden

    x, w, v = torch.randn(2, 3, 4), torch.randn(8, 4), torch.randn(3, 2, 4)
    own = compile_graph(make_fx(f, tracing_mode="fake")(x, w, v), options=LowerOptions(arena_bytes=0))
    source = own._bound.source
    assert source.count(".t()") == 2 and source.count(".view(6, 4)") == 1 and source.count("as_strided(") == 1, source
    for got, want in zip(own([x, w, v]), f(x, w, v), strict=True):
        torch.testing.assert_close(got, want)


def test_a_result_that_is_written_over_is_taken_as_the_view_that_is_needed() -> None:
    """A product's memory gets what is computed of it; that has other sizes, and is needed in a third kind only."""

    def f(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(a, b).view(2, 3, 5, 7)
        return torch.bmm((scores * scores.sum(-1, keepdim=True)).view(3, 10, 7), c)

    values = torch.randn(6, 5, 4), torch.randn(6, 4, 7), torch.randn(3, 7, 4)
    made = compile_graph(
        make_fx(f, tracing_mode="fake")(*values), options=LowerOptions(arena_bytes=0, contractions="aten")
    )
    assert "= unsafe_view(" in made._bound.source
    torch.testing.assert_close(made(list(values))[0], f(*values))


def random_chain(chance: Random) -> Callable[..., list[torch.Tensor]]:
    """Calls of ATen, kernels over what they return, and views between them; some of it is returned, too."""
    moves = [chance.choice(("matrix", "batch", "kernel", "rows", "turn", "keep")) for _ in range(chance.randint(4, 9))]
    sizes = [chance.choice(((2, 3), (3, 2), (6,), (1, 6))) for _ in moves]

    def f(x: torch.Tensor, *weights: torch.Tensor) -> list[torch.Tensor]:
        kept: list[torch.Tensor] = []
        for move, some in zip(moves, sizes, strict=True):
            if move == "matrix":
                x = x.reshape(-1, 8) @ weights[0]
            elif move == "batch":
                x = torch.bmm(x.reshape(2, -1, 8), weights[1])
            elif move == "kernel":
                x = x.sin() + x.reshape(*some, -1, 8).sum(-1, keepdim=True).reshape(*x.shape[:-1], 1)
            elif move == "rows":
                x = x.reshape(*some, -1, 8)
            elif move == "turn":
                x = x.reshape(-1, 4, 8).transpose(0, 1)
            else:
                kept.append(x)
        return [*kept, x]

    return f


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(6))
def test_random_chains_of_calls_kernels_and_views_are_as_eager_computes_them(seed: int) -> None:
    chance = Random(seed)
    reused = 0
    for number in range(60):
        torch.manual_seed(seed * 100 + number)
        weights = [torch.randn(8, 8) / 3, torch.randn(2, 8, 8) / 3]
        f, x = random_chain(chance), torch.randn(24, 8)
        arena = chance.choice((0, 1 << 20))
        options = LowerOptions(arena_bytes=arena, contractions="aten")
        made = compile_graph(make_fx(f, tracing_mode="fake")(x, *weights), options=options)
        reused += "= unsafe_view(" in made._bound.source
        for got, want in zip(made([x, *weights]), f(x, *weights), strict=True):
            assert (got.shape, got.stride()) == (want.shape, want.stride())
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())
    assert reused


@pytest.mark.parametrize("sizes", [(1, 4), (4, 1), (1, 1), (0, 4)])
def test_views_with_strides_that_no_size_tells_have_those_of_the_graph(sizes: tuple[int, int]) -> None:
    x, w = torch.randn(100).as_strided(sizes, (7, 9)), torch.randn(sizes)
    own = compile_graph(make_fx(lambda x, w: (x.t() @ w, w.sin().t()), tracing_mode="fake")(x, w))
    assert ".t()" not in own._bound.source and ".view(" not in own._bound.source
    product, turned = own([x, w])
    torch.testing.assert_close(product, x.t() @ w)
    assert turned.stride() == w.sin().t().stride() and torch.equal(turned, w.sin().t())


def test_two_results_that_are_views_of_one_fresh_tensor_are_both_views() -> None:
    x = torch.randn(6, 4)
    own = compile_graph(make_fx(lambda x: ((y := x.sin()).t(), y.view(24)))(x))
    turned, flat = own([x])
    assert turned.data_ptr() == flat.data_ptr() and torch.equal(turned.t().reshape(24), flat)
    assert turned._base is flat._base and turned._base is not None


def test_threads_with_many_inputs_of_their_own_get_their_own_results() -> None:
    own = compile_graph(make_fx(summed)(*many(0)))
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(50):
            values = many(seed * 1000 + turn % 3)
            (result,) = own(Placed(values) if turn % 2 else list(values))
            if not torch.equal(result, summed(*values)):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("sizes", [(0,), (3,)])
def test_inputs_without_elements_have_no_address_to_remember(sizes: tuple[int, ...]) -> None:
    values = [*many(1), torch.zeros(sizes)]
    own = compile_graph(make_fx(lambda *given: (summed(*given[:-1]), given[-1] + 1))(*values))
    assert ("frame.inputs" in own._bound.source) is (sizes == (3,))
    total, more = own(list(values))
    assert torch.equal(total, summed(*values[:-1])) and torch.equal(more, values[-1] + 1)


def test_plans_and_compiled_programs_round_trip_as_json() -> None:
    compiled, _ = mlp()
    assert plan_from_json(plan_to_json(compiled.plan)) == compiled.plan
    assert compiled_from_json(compiled_to_json(compiled)) == compiled
    with pytest.raises(ValueError, match="format"):
        plan_from_json(plan_to_json(compiled.plan).replace('"format":7', '"format":99'))


def test_the_emitted_source_is_straight_line_python() -> None:
    compiled, constants = mlp()
    source = bind_program(compiled, constants).source
    compile(source, "plan", "exec")
    assert "for " not in source and "segment_0(address, n)  # relu, shift" in source


@pytest.mark.covers("F5c.9")
def test_equal_kernels_are_compiled_once() -> None:
    def layer(k: int) -> str:
        return f"""
loop gelu{k}(i{k}0 < 12, i{k}1 < 40):
  stage():
    %a{k} = load b{k}[i{k}0, i{k}1] : f32
    %b{k} = tanh %a{k} : f32
    store b{k + 1}[i{k}0, i{k}1] = %b{k}
"""

    buffers = [f"buffer b{k} : float32[12, 40] strides [40, 1] temporary on cpu" for k in range(1, 5)]
    text = "\n".join(
        [
            "aotkit-ir 2",
            "program layers",
            "input b0",
            "buffer b0 : float32[12, 40] strides [40, 1] input on cpu",
            *buffers,
            "buffer b5 : float32[12, 40] strides [40, 1] output on cpu",
            *(layer(k).strip("\n") for k in range(5)),
            "return b5",
        ]
    )
    compiled = generate(parse_program(text))
    assert {k.function for k in compiled.kernels} == {"kernel_gelu0"} and len(compiled.kernels) == 5
    x = torch.randn(12, 40)
    want = x
    for _ in range(5):
        want = want.tanh()
    torch.testing.assert_close(bind_program(compiled)([x])[0], want)


VIEWS = """aotkit-ir 2
program views
input x
buffer x : float32[6, 4] strides [4, 1] input on cpu
buffer a : float32[6, 4] strides [4, 1] temporary on cpu
buffer half : float32[3, 4] strides [8, 1] temporary on cpu
buffer bits : int32[6, 4] strides [4, 1] temporary on cpu
buffer s : float32[3, 4] strides [4, 1] output on cpu
buffer k : int32[6, 4] strides [4, 1] output on cpu
buffer e : float32[3, 4] strides [4, 1] output on cpu
loop double(i0 < 6, i1 < 4):
  stage():
    %a = load x[i0, i1] : f32
    %b = add %a, %a : f32
    store a[i0, i1] = %b
alias second: half = a + 4
alias raw: bits = a + 0
loop pick(i0 < 3, i1 < 4):
  stage():
    %a = load half[i0, i1] : f32
    store s[i0, i1] = %a
loop peek(i0 < 6, i1 < 4):
  stage():
    %a = load bits[i0, i1] : i32
    store k[i0, i1] = %a
extern floor0: e = aten.floor.default(half) reason "for the test"
return s, k, e
"""


@pytest.mark.covers("F5h.18")
def test_views_share_memory_in_kernels_and_in_aten_calls() -> None:
    compiled = generate(parse_program(VIEWS))
    assert sum(isinstance(step, View) for step in compiled.plan.steps) == 1  # only the one an ATen op takes
    x = torch.randn(6, 4)
    s, k, e = bind_program(compiled)([x])
    assert torch.equal(s, (2 * x)[1::2])
    assert torch.equal(k, (2 * x).view(torch.int32))
    assert torch.equal(e, (2 * x)[1::2].floor())


ALIASING = """aotkit-ir 2
program aliasing
input x
buffer x : float32[6, 4] strides [4, 1] input on cpu
buffer a : float32[6, 4] strides [4, 1] temporary on cpu
buffer v : float32[24] strides [1] output on cpu
loop double(i0 < 6, i1 < 4):
  stage():
    %a = load x[i0, i1] : f32
    %b = add %a, %a : f32
    store a[i0, i1] = %b
extern view0: v = aten.view.default(a, [24]) reason "for the test"
return v
"""


def test_memory_an_aten_op_may_hand_back_is_never_in_the_arena() -> None:
    compiled = generate(parse_program(ALIASING))
    assert {b.name: b.storage for b in compiled.plan.buffers}["a"] == "allocated"
    assert any(isinstance(step, Allocate) for step in compiled.plan.steps)
    bound = bind_program(compiled)
    x = torch.randn(6, 4)
    first = bound([x])[0]
    bound([x + 1])
    assert torch.equal(first, (2 * x).flatten())


MULTIPLE = """aotkit-ir 2
program multiple
input x
buffer x : float32[6, 4] strides [4, 1] input on cpu
buffer values : float32[6] strides [1] temporary on cpu
buffer places : int64[6] strides [1] output on cpu
buffer y : float32[6] strides [1] output on cpu
extern max0: values, places = aten.max.dim(x, 1) reason "for the test"
loop double(i0 < 6):
  stage():
    %a = load values[i0] : f32
    %b = add %a, %a : f32
    store y[i0] = %b
return y, places, none
"""


def test_aten_calls_with_several_results_feed_kernels() -> None:
    x = torch.randn(6, 4)
    y, places, nothing = bind_program(generate(parse_program(MULTIPLE)))([x])
    assert torch.equal(y, x.amax(1) * 2) and torch.equal(places, x.argmax(1)) and nothing is None


def test_a_missing_constant_and_an_unknown_op_are_bind_errors() -> None:
    compiled, constants = mlp()
    with pytest.raises(BindError, match="constant tensors v"):
        bind_program(compiled, {"w": constants["w"]})
    broken = generate(parse_program(MULTIPLE.replace("aten.max.dim", "aten.max.no_such_overload")))
    with pytest.raises(BindError, match=r"no op aten\.max\.no_such_overload"):
        bind_program(broken)


def test_constants_are_read_where_they_lie_now() -> None:
    """``.data = `` and ``set_`` give a tensor other memory, and its old one may be gone."""
    a, b, x = torch.ones(40), torch.ones(0, 40), torch.randn(40)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * a + 1, b + x

    bound = compile_graph(make_fx(f)(x))
    for value in range(3):
        torch.testing.assert_close(bound([x]), [*f(x)])
        a.add_(1)
        torch.testing.assert_close(bound([x]), [*f(x)])
        a.data = torch.full((41,), value + 7.0)[1:]
        torch.testing.assert_close(bound([x]), [*f(x)])
        a.set_(torch.full((40,), value + 9.0))


@pytest.mark.parametrize("native", [True, False])
def test_many_constants_are_read_where_they_lie_now(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(constant_places, "_compiled", lambda: None)
    held, x = [torch.randn(40) for _ in range(20)], torch.randn(40)

    def f(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x * each + 1 for each in held)

    bound = compile_graph(make_fx(f)(x))
    changes: list[Callable[[torch.Tensor], object]] = [
        lambda t: None,
        lambda t: t.add_(1),
        lambda t: setattr(t, "data", torch.full((41,), 7.0)[1:]),
        lambda t: t.set_(torch.full((40,), 9.0)),
        lambda t: t.untyped_storage().resize_(4096),
        lambda t: t.set_(torch.full((99,), 3.0).untyped_storage(), 5, (40,), (1,)),
        lambda t: torch.utils.swap_tensors(t, torch.full((40,), 5.0)),
    ]
    for change in changes:
        for k in (0, 7, 19):
            change(held[k])
            torch.testing.assert_close(bound([x]), [*f(x)])


def test_constants_of_torchs_own_classes_are_asked_in_one_pass() -> None:
    held = [torch.ones(2) for _ in range(20)]
    words = (ctypes.c_int64 * 25)()
    write = constant_places.unwritten_constants(held, range(2, 22))
    left = write(ctypes.addressof(words))
    assert left is (constant_places._compiled() is None)
    assert left or [*words] == [0, 0, *(each.data_ptr() for each in held), 0, 0, 0]
    own = held[0].as_subclass(type("Own", (torch.Tensor,), {}))
    assert constant_places.unwritten_constants([own, *held], range(21))(ctypes.addressof(words))
    assert constant_places.unwritten_constants(held[:3], range(3))(ctypes.addressof(words))


def test_damaged_object_code_is_a_bind_error() -> None:
    compiled, constants = mlp()
    ((name, code),) = compiled.binary.sections
    sections = ((name, code[:-9] + b"x" + code[-8:]),)
    damaged = replace(compiled, binary=replace(compiled.binary, sections=sections))
    with pytest.raises(BindError, match="is damaged"):
        bind_program(damaged, constants)


def test_a_kernel_over_a_type_without_generated_code_is_refused() -> None:
    text = MULTIPLE.replace("values : float32[6]", "values : complex64[6]")
    with pytest.raises(CodegenError, match="complex64"):
        generate(parse_program(text))


def test_dead_arena_memory_is_used_again_and_live_memory_never_overlaps() -> None:
    lifetimes = [("a", 0, 2), ("b", 1, 3), ("c", 3, 5), ("d", 4, 4), ("e", 0, 5)]
    nbytes = {"a": 1000, "b": 70, "c": 900, "d": 5000, "e": 1}
    offsets, total = place_buffers(lifetimes, nbytes)
    assert total < sum(nbytes.values())
    for one, first, last in lifetimes:
        for two, born, dies in lifetimes:
            if one < two and first <= dies and born <= last:
                a, b = offsets[one], offsets[two]
                assert a + nbytes[one] <= b or b + nbytes[two] <= a
    assert all(offset % 64 == 0 for offset in offsets.values())


def _blocked() -> tuple[CompiledProgram, dict[str, torch.Tensor]]:
    """The two layers over widths whose temporaries are too large for a plan of its own to keep."""
    generator = torch.Generator().manual_seed(0)
    constants = {"w": torch.randn(16, 4096, generator=generator), "v": torch.randn(4096, 8, generator=generator)}
    text = MLP.replace("$s0, 32", "$s0, 4096").replace("[32, ", "[4096, ").replace("16, 32", "16, 4096")
    return generate(parse_program(text.replace("i1 < 32", "i1 < 4096"))), constants


@pytest.mark.covers("F5h.16")
def test_two_programs_take_turns_with_one_block_of_memory() -> None:
    arenas = ArenaPool()
    compiled, constants = _blocked()
    first, second = bind_program(compiled, constants, arenas), bind_program(compiled, constants, arenas)
    kept = []
    for bound, rows in ((first, 3), (second, 20), (first, 3), (second, 7), (first, 20)):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(bound([x])[0], eager_mlp(x, constants), rtol=1e-3, atol=1e-3)
        kept.append(arenas.kept_bytes)
    # it grew once, for the larger call, and then served all of them: of h, r and q no more than two live at once
    assert kept[0] < kept[1] == kept[2] == kept[3] == kept[4] <= 20 * (2 * 4096 + 8) * 4 + 3 * 64


def test_an_arena_pool_keeps_no_more_than_its_limit() -> None:
    arenas = ArenaPool(limit=1 << 20)
    compiled, constants = _blocked()
    bound = bind_program(compiled, constants, arenas)
    for rows, kept in ((4, True), (200, False), (4, True)):
        x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(bound([x])[0], eager_mlp(x, constants), rtol=1e-3, atol=1e-3)
        assert (0 < arenas.kept_bytes <= 1 << 20) == kept


def test_overlapping_calls_get_blocks_of_their_own_and_failed_calls_lose_theirs() -> None:
    arenas = ArenaPool()
    one, two = arenas.take(1000), arenas.take(500)
    assert one.memory.data_ptr() != two.memory.data_ptr() and arenas.kept_bytes == 0
    arenas.give_back(one)
    del two
    assert arenas.kept_bytes == 1000 and arenas.take(2000).nbytes == 2000 and arenas.kept_bytes == 0


def test_a_buffer_that_dies_inside_a_segment_leaves_its_memory_to_the_next_kernel() -> None:
    compiled, _ = mlp()
    lives = {a.buffer: (a.first, a.last) for a in compiled.plan.arena}
    assert lives["h"][1] == lives["r"][0] == lives["q"][0] - 1  # relu, then shift, in one segment
    assert lives["r"][1] == lives["q"][0]
    offsets, total = place_buffers([(n, *life) for n, life in lives.items()], {"h": 640, "r": 640, "q": 640, "m": 64})
    assert offsets["h"] == offsets["q"] and total == 1280


def test_views_of_temporaries_are_made_once_for_all_calls() -> None:
    text = MLP.replace("extern mm1: m = aten.mm.default(q, v)", "extern mm1: m = aten.mm.default(qt, v)")
    text = text.replace("extern mm1", "alias turned: qt = q + 0\nextern mm1")
    text = text.replace("buffer m :", "buffer qt : float32[$s0, 32] strides [1, $s0] temporary on cpu\nbuffer m :")
    torch.manual_seed(0)
    compiled, constants = generate(parse_program(text)), {"w": torch.randn(16, 32), "v": torch.randn(32, 8)}
    bound = bind_program(compiled, constants)
    assert bound.source.count("as_strided") == 1  # the view that is returned
    for rows in (5, 9, 5):
        x = torch.randn(rows, 16)
        q = (x @ constants["w"]).relu() + 1
        expected = q.as_strided((rows, 32), (1, rows)) @ constants["v"] * 2
        torch.testing.assert_close(bound([x])[0], expected, rtol=1e-4, atol=1e-4)


IN_PLACE = """aotkit-ir 2
program in_place
input x
input w
buffer x : float32[64, 512] strides [512, 1] input on cpu
buffer w : float32[512, 512] strides [512, 1] input on cpu
buffer h : float32[64, 512] strides [512, 1] temporary on cpu
buffer q : float32[64, 512] strides [512, 1] temporary on cpu
buffer y : float32[64, 512] strides [512, 1] output on cpu
extern mm0: h = aten.mm.default(x, w) reason "a matmul"
loop middle(i0 < 64):
  stage(r0 < 512):
    %a = load h[i0, r0] : f32
    %m = reduce max %a : f32
  stage(r1 < 512):
    %b = load h[i0, r1] : f32
    %c = sub %b, %m : f32
    store q[i0, r1] = %c
extern mm1: y = aten.mm.default(q, w) reason "a matmul"
return y
"""


@pytest.mark.covers("F5h.8")
@pytest.mark.parametrize(
    ("old", "new", "taken"),
    [
        ("", "", {"q": "h"}),
        ("%b = load h[i0, r1]", "%b = load h[i0, 511 - r1]", {}),  # other elements of the row in the same stage
        ("load h[i0, r0]", "load h[63 - i0, r0]", {}),  # another row, which may be overwritten by then
        ("mm.default(q, w) reason", "addmm.default(h, q, w) reason", {}),  # it is needed later
        ("q : float32[64, 512] strides [512, 1]", "q : float32[64, 512] strides [1, 64]", {}),
    ],
)
def test_a_result_takes_the_memory_of_an_argument_that_is_read_before_it(old, new, taken) -> None:
    program = parse_program(IN_PLACE.replace(old, new) if old else IN_PLACE)
    compiled = generate(program)
    assert {a.buffer: a.reuses for a in compiled.plan.arena if a.reuses} == taken
    generator = torch.Generator().manual_seed(3)
    x, w = torch.randn(64, 512, generator=generator), torch.randn(512, 512, generator=generator)
    arenas = ArenaPool()
    expected = interpret_program(program, [x, w])[0]
    torch.testing.assert_close(bind_program(compiled, {}, arenas)([x, w])[0], expected, rtol=1e-3, atol=1e-2)
    assert arenas.kept_bytes == (1 if taken else 2) * 64 * 512 * 4


def test_a_chain_of_buffers_in_one_place_lives_as_long_as_all_of_them() -> None:
    lives = [("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 1, 3)]
    offsets, total = place_buffers(lives, dict.fromkeys("abcd", 64), {"b": "a", "c": "b"})
    assert offsets["a"] == offsets["b"] == offsets["c"] != offsets["d"] and total == 128
