"""Tensors that are conjugated or negated lazily: as inputs, made inside the graph, written through, returned, saved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import aotkit
from aotkit_functionalize import Unsupported

Check = Callable[..., None]
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),  # Dynamo does
]


def _real(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.float64)


def _complex(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.complex128)


# What lies behind a bit: all of a tensor, a part of it, other strides, gaps.
REAL: dict[str, Callable[[], Tensor]] = {
    "imaginary part of a conjugate": lambda: _complex(3, 4).conj().imag,
    "negated view": lambda: torch._neg_view(_real(3, 4)),
    "transposed": lambda: torch._neg_view(_real(4, 3)).t(),
    "part": lambda: torch._neg_view(_real(20))[3:15].view(3, 4),
    "gaps": lambda: torch._neg_view(_real(3, 8))[:, ::2],
}
COMPLEX: dict[str, Callable[[], Tensor]] = {
    "conjugate": lambda: _complex(3, 4).conj(),
    "adjoint": lambda: _complex(4, 3).mH,
    "negated": lambda: torch._neg_view(_complex(3, 4)),
    "both": lambda: torch._neg_view(_complex(3, 4).conj()),
    "gaps": lambda: _complex(3, 8).conj()[:, 1::2],
}
READS: dict[str, Callable[[Tensor], Any]] = {
    "pointwise": lambda x: x * 2,
    "reduction": lambda x: (x + 1).sum(0),
    "product": lambda x: x @ x.T,
    "copy": lambda x: x.clone(),
    "copy in one piece": lambda x: x.contiguous(),
    "part": lambda x: x[1:, 2] * 3,
    "concatenated": lambda x: torch.cat([x, x * x]),
    "argument of an operator without a kernel": lambda x: x.cumsum(0).flip(1),
    "one element": lambda x: x[1, 1].exp(),
}
REAL_READS: dict[str, Callable[[Tensor], Any]] = {
    "softmax": lambda x: x.softmax(-1),
    "cumulative logarithm": lambda x: torch.logcumsumexp(x, 0),
    "sorted": lambda x: x.sort(dim=1)[0],
}
COMPLEX_READS: dict[str, Callable[[Tensor], Any]] = {
    "imaginary part": lambda x: x.imag * 3,
    "real part": lambda x: x.real * 3,
    "angle": lambda x: x.abs(),
    "conjugate and back": lambda x: x.conj() * 2,
    "transform": lambda x: torch.fft.ifft(x),
}
WRITES: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda x: x.mul_(2),
    "part": lambda x: x[1].add_(1),
    "flat part": lambda x: x[:, 1:3].zero_(),
    "copy_": lambda x: x.copy_(x + 1),
    "and read": lambda x: (x.add_(1), x * 2)[1],
    "and view": lambda x: (x.add_(1), x[0])[1],
    "index": lambda x: x.index_fill_(0, torch.tensor([1]), 3.0),
}
COMPLEX_WRITES: dict[str, Callable[[Tensor], Any]] = {
    "imaginary part": lambda x: x.imag.mul_(2),
    "real part, then the imaginary one": lambda x: (x.real.add_(1), x.imag * 2)[1],
    "all, then the imaginary part": lambda x: (x.mul_(2j), x.imag)[1],
    "conjugate": lambda x: x.conj().add_(1j),
}
VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda x: x,
    "part": lambda x: x[1:],
    "transposed": lambda x: x.T,
    "negated": lambda x: torch._neg_view(x),
    "beside a new one": lambda x: (x * 2, x.T),
}
COMPLEX_VIEWS: dict[str, Callable[[Tensor], Any]] = {
    "conjugate": lambda x: x.conj(),
    "imaginary part": lambda x: x.imag,
    "real part": lambda x: x.real,
    "imaginary part of the conjugate": lambda x: x.conj().imag,
    "several": lambda x: (x.conj(), x.imag, x.T),
}


READING = [*((f, REAL) for f in READS.items()), *((f, REAL) for f in REAL_READS.items())]
READING += [((name, fn), COMPLEX) for name, fn in (READS | COMPLEX_READS).items()]
WRITING = [(f, REAL) for f in WRITES.items()] + [(f, COMPLEX) for f in (WRITES | COMPLEX_WRITES).items()]
VIEWING = [(f, REAL) for f in VIEWS.items()] + [(f, COMPLEX) for f in (VIEWS | COMPLEX_VIEWS).items()]


def _cases(table: list[Any]) -> list[Any]:
    return [pytest.param(fn, makes, id=f"{name}-{next(iter(makes))}") for (name, fn), makes in table]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("fn", "makes"), _cases(READING))
def test_an_input_with_a_bit_is_read_as_it_is_meant_and_gets_its_gradient(
    captured_same_as_eager: Check, fn: Callable[..., Any], makes: dict[str, Callable[[], Tensor]]
) -> None:
    captured_same_as_eager(fn, lambda: [makes["gaps"]()])
    for make in makes.values():
        captured_same_as_eager(fn, lambda make=make: [make().detach().requires_grad_()])


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("fn", "makes"), _cases(WRITING))
def test_a_write_through_a_bit_lands_in_the_memory_behind_it(
    captured_same_as_eager: Check, fn: Callable[..., Any], makes: dict[str, Callable[[], Tensor]]
) -> None:
    for make in makes.values():
        captured_same_as_eager(fn, lambda make=make: [make()])
        captured_same_as_eager(fn, lambda make=make: [_with_history(make)])


def _with_history(make: Callable[[], Tensor]) -> Tensor:
    leaf = make().detach().requires_grad_()
    return torch._neg_view(leaf * 1.5) if leaf.is_neg() else (leaf * 1.5).conj()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("fn", "makes"), _cases(VIEWING))
def test_a_view_of_an_input_has_eager_modes_bits(
    captured_same_as_eager: Check, fn: Callable[..., Any], makes: dict[str, Callable[[], Tensor]]
) -> None:
    for make in makes.values():
        captured_same_as_eager(fn, lambda make=make: [make()])
        captured_same_as_eager(fn, lambda make=make: [make().detach().requires_grad_()])


MADE_INSIDE: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda z: z.conj().imag * 3,
    "read in one kernel with others": lambda z: ((z * 2).conj().imag + 1).softmax(0),
    "returned": lambda z: (z * 2).conj(),
    "returned imaginary part": lambda z: (z * 2).conj().imag,
    "returned beside its base": lambda z: _pair(z * 2, lambda y: y.conj()),
    "returned beside another view": lambda z: _pair(z * 2, lambda y: (y.conj(), y.imag, y[0]), False),
    "twice": lambda z: _pair((z * 2).conj(), lambda y: y.conj()),
    "both bits": lambda z: torch._neg_view((z * 2).conj()),
    "written to": lambda z: _write((z * 2).conj(), lambda y: y.imag.add_(3)),
    "written to and seen": lambda z: _write((z * 2).conj(), lambda y: (y.mul_(2j), y.imag)),
    "split": lambda z: [part * 2 for part in (z + 1).conj().unbind(0)],
    "split and returned": lambda z: (z + 1).conj().unbind(0),
    "product": lambda z: z @ z.mH,
    "copy": lambda z: (z * 2).conj().resolve_conj(),
    "two copies": lambda z: [y.clone() for y in [(z * 2).conj()] * 2],
    "stacked": lambda z: torch.stack([z.conj().imag, z.real]),
    "in memory of its own order": lambda z: (z.T * 2).conj().contiguous(),
    "the same one twice": lambda z: [(z * 2).conj()] * 2,
    "with complex numbers": lambda z: z.conj() * (1 + 2j) + 3j,
}


def _pair(base: Tensor, view: Callable[[Tensor], Any], first: bool = True) -> list[Tensor]:
    taken = view(base)
    return [*([base] if first else []), *(taken if isinstance(taken, tuple) else [taken])]


def _write(value: Tensor, write: Callable[[Tensor], Any]) -> list[Tensor]:
    done = write(value)
    return [value, *(t for t in (done if isinstance(done, tuple) else ()) if t is not value)]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("grad", [False, True], ids=["plain", "with a gradient"])
@pytest.mark.parametrize("name", MADE_INSIDE)
def test_a_bit_that_is_made_inside(same_as_eager: Check, name: str, grad: bool) -> None:
    same_as_eager(MADE_INSIDE[name], lambda: [_complex(3, 4).requires_grad_(grad)], lone_view=True)


COMPILED = ["pointwise", "reduction", "product", "part", "concatenated"]


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in COMPILED), ("reduction", True), ("part", True)]
)
def test_kernels_read_an_input_with_a_bit_as_it_is_meant(name: str, dynamic: bool) -> None:
    compiled = torch.compile(READS[name], backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    for make in REAL.values():
        x = make().detach().requires_grad_()
        want, got = READS[name](x), compiled(x)
        torch.testing.assert_close(got, want)
        weights = torch.arange(1.0, want.numel() + 1, dtype=want.dtype).view(want.shape)
        torch.testing.assert_close(
            torch.autograd.grad((got * weights).sum(), x), torch.autograd.grad((want * weights).sum(), x)
        )


@pytest.mark.parametrize("write", ["mul_", "part", "and read"])
def test_kernels_write_through_a_bit(write: str) -> None:
    compiled = torch.compile(WRITES[write], backend="aotkit", options={"fallback": "error"})
    for make in (*REAL.values(), *COMPLEX.values()):
        torch.manual_seed(1)
        x = make()
        torch.manual_seed(1)
        y = make()
        torch.testing.assert_close(compiled(y), WRITES[write](x))
        torch.testing.assert_close(y, x)


def test_a_call_with_other_bits_is_right() -> None:
    def fn(x: Tensor) -> Tensor:
        return x * 2 + 1

    both: list[Callable[..., Any]] = [
        torch.compile(fn, backend="aotkit", options={"fallback": "error"}),
        aotkit.aot_function(fn, lambda graph, _: graph),
    ]
    for compiled in both:
        for x in [_real(3, 4), torch._neg_view(_real(3, 4)), _real(3, 4), _complex(3, 4).conj().imag]:
            torch.testing.assert_close(compiled(x), fn(x))


def test_inputs_of_one_memory_with_different_bits_see_each_others_writes(same_as_eager: Check) -> None:
    def fn(x: Tensor, y: Tensor, z: Tensor) -> list[Tensor]:
        x.add_(1)
        return [y * 2, z.imag * 3, y]

    def make() -> list[Tensor]:
        base = _complex(4)
        return [base.conj().imag, base.imag, base.conj()]

    same_as_eager(fn, make)


def test_gradients_with_a_bit_and_second_derivatives(captured_same_as_eager: Check) -> None:
    def fn(x: Tensor, z: Tensor) -> Tensor:
        return (x * z.imag).sin() * x

    def gradients(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch._neg_view(_real(3)).detach().requires_grad_()
        z = _complex(3).conj().detach().requires_grad_()
        first = torch.autograd.grad(call(x, z), [x, z], torch._neg_view(_real(3)), create_graph=True)
        return [*first, *torch.autograd.grad(first[0].sum() + first[1].abs().sum(), [x, z])]

    compiled = aotkit.aot_function(fn, lambda graph, _: graph)
    torch.testing.assert_close(gradients(compiled), gradients(fn))


def test_a_tensor_on_the_module_may_have_a_bit() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", _complex(3).conj().imag)

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    net = Net().eval()
    x = _real(3)
    for options in ({"fallback": "error"}, {"fallback": "error", "freezing": True}):
        torch._dynamo.reset()
        with torch.no_grad():
            torch.testing.assert_close(torch.compile(net, backend="aotkit", options=options)(x), net(x))


def test_a_hit_in_the_cache_minds_the_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AOTKIT_VERIFY")

    def fn(x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, (z * 3).conj()

    for hits in (0, 2):
        recorder = aotkit.Recorder()
        torch._dynamo.reset()
        compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error", "observer": recorder})
        for x in (torch._neg_view(_real(4)), _real(4)):
            z = _complex(3)
            want, got = fn(x, z), compiled(x, z)
            torch.testing.assert_close(got, want)
            assert got[1].is_conj()
        assert len([e for e in recorder.events if e[0] == "cache.hit"]) == hits


def test_a_package_takes_tensors_with_a_bit(tmp_path: Any) -> None:
    class Net(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.exp() + 1

    plain, lazy = _real(3, 4), torch._neg_view(_real(3, 4))
    for example in (plain, lazy):
        program = torch.export.export(Net(), (example,))
        path = aotkit.aot_compile(program, None, tmp_path / "package.zip")
        package = aotkit.load(path)
        for x in (plain, lazy):
            torch.testing.assert_close(package(x), Net()(x))


def test_an_operator_that_returns_a_lazily_conjugated_tensor() -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        pivoted, pivots = torch.linalg.lu_factor(a)
        solved = torch.linalg.lu_solve(pivoted, pivots, b, adjoint=True, left=False)
        return torch.view_as_real(solved.clone()) * 2

    torch.manual_seed(0)
    a, b = _complex(3, 3), _complex(2, 3)
    compiled = torch.compile(fn, backend="aotkit", options={"fallback": "error"})
    torch.testing.assert_close(compiled(a, b), fn(a, b))


@torch.library.custom_op("aotkit_lazy_bits::negated", mutates_args=())
def _negated(x: Tensor) -> Tensor:
    return torch._neg_view(x.clone())


@_negated.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_a_custom_operator_may_return_a_lazily_negated_tensor() -> None:
    x = _real(3)
    compiled = torch.compile(lambda x: _negated(x) * 2, backend="aotkit", options={"fallback": "error"})
    torch.testing.assert_close(compiled(x), x * -2)


def test_captured_gradients_of_real_transforms_and_complex_numbers(same_as_eager: Check) -> None:
    def fn(x: Tensor) -> list[Tensor]:
        return [torch.fft.irfft(torch.fft.rfft(x)) * 1j, torch.fft.rfft(x).conj() * (2 - 1j)]

    same_as_eager(fn, lambda: [_real(2, 6).requires_grad_()])
    same_as_eager(lambda x: torch.fft.irfft(torch.fft.rfft(x) * 1j) * 2j, lambda: [_real(2, 6).requires_grad_()])


@pytest.mark.parametrize("number", [2j, 1 - 2j, 3, 0.5, complex(0.0, -0.0)], ids=repr)
def test_python_numbers_beside_complex_and_real_arguments(captured_same_as_eager: Check, number: complex) -> None:
    def fn(x: Tensor, z: Tensor, w: complex) -> list[Tensor]:
        return [x * w, z * w + x, w - z.conj(), torch.mul(z, w).real, (z / (w + 1)).imag]

    def call(x: Tensor, z: Tensor) -> list[Tensor]:
        return fn(x, z, number)

    captured_same_as_eager(call, lambda: [_real(3).requires_grad_(), _complex(3).requires_grad_()], lone_view=True)
    x, z = _real(3), _complex(3)
    torch.testing.assert_close(aotkit.aot_function(fn, lambda graph, _: graph)(x, z, number), fn(x, z, number))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("bit", [torch._neg_view, torch.conj, lambda x: torch._neg_view(x.conj())])
@pytest.mark.parametrize("view", [lambda x: x[1:], lambda x: x[:, ::2].t(), lambda x: x.split(2)[1]])
def test_a_part_of_a_value_that_was_written_to_under_a_bit_keeps_its_strides(bit, view):
    def program(x):
        taken = view(bit(x + 1))
        taken.copy_(taken * 2)
        return [taken]

    x = torch.randn(4, 5, dtype=torch.complex64).t()
    (wanted,), (found,) = program(x), aotkit.aot_function(program, aotkit.nop)(x)
    assert found.stride() == wanted.stride() and torch.equal(found, wanted)


BITS: dict[str, Callable[[Tensor], Tensor]] = {
    "conjugate": torch.conj,
    "negated": torch._neg_view,
    "both": lambda x: torch._neg_view(x.conj()),
}
IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "squeeze_ of dimensions": lambda x: torch.ops.aten.squeeze_.dims(x, [1, 3]),
    "squeeze_ of one dimension": lambda x: x.squeeze_(1),
    "squeeze_ of one that is not 1": lambda x: x.squeeze_(0),
    "squeeze_": lambda x: x.squeeze_(),
    "unsqueeze_": lambda x: x.unsqueeze_(0),
    "transpose_": lambda x: x.transpose_(0, 2),
    "swapaxes_": lambda x: x.swapaxes_(0, 2),
}


@pytest.mark.sample(ways=1)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")  # by eager mode's squeeze_(dim)
@pytest.mark.parametrize("bit", BITS)
@pytest.mark.parametrize("change", IN_PLACE)
def test_views_of_what_changed_its_shape_in_place_keep_the_bits(
    captured_same_as_eager: Check, bit: str, change: str
) -> None:
    def views(x: Tensor) -> list[Tensor]:
        IN_PLACE[change](x)
        return [x.as_strided((2, 2), (1, 2)), x[0], x.unfold(0, 1, 1), x.transpose(0, -1), x * 2]

    def write(x: Tensor) -> list[Tensor]:
        IN_PLACE[change](x)
        x[0].mul_(3)
        return [x, x[0]]

    captured_same_as_eager(views, lambda: [BITS[bit](_complex(3, 1, 4, 1))])
    captured_same_as_eager(write, lambda: [BITS[bit](_complex(3, 1, 4, 1))])


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("bit", BITS)
@pytest.mark.parametrize("lies", [lambda x: x.transpose(0, 2), lambda x: x[::2], lambda x: x[:1].expand(4, -1, -1)])
def test_squeezing_a_view_with_a_bit_that_eager_mode_writes_anew_is_refused(
    bit: str, lies: Callable[[Tensor], Tensor]
) -> None:
    with pytest.raises(Unsupported, match=r"squeezed in place.*writes its elements into its memory anew"):
        aotkit.aot_function(lambda x: x.squeeze_(1), aotkit.nop)(BITS[bit](lies(_complex(3, 1, 4))))
    kept = BITS[bit](lies(_complex(3, 1, 4)))
    assert aotkit.aot_function(lambda x: [x.squeeze_(0)], aotkit.nop)(kept)[0] is kept


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("bits", [torch._neg_view, torch.conj, lambda x: torch._neg_view(x.conj())])
@pytest.mark.parametrize("memory", [lambda m: m, lambda m: m[::2], lambda m: m[1:], lambda m: m.t()])
@pytest.mark.parametrize(
    "write",
    [
        lambda v: v.mul_(3),
        lambda v: v[1:].neg_(),
        lambda v: v.t().add_(1),
        lambda v: v.unfold(-1, 2, 2).fill_(0.5),
        lambda v: v.index_put_((torch.tensor([0, 1]),), torch.tensor(2j)),
        lambda v: v[:, torch.tensor([1, 0])].fill_(1),
        lambda v: v.masked_fill_(v.real > 3, 1j),
        lambda v: v.index_copy_(0, torch.tensor([1]), v[:1].clone()),
        lambda v: v.cumsum_(0),
        lambda v: v.tril_(),
        lambda v: v.scatter_(1, torch.tensor([[2, 1]]), 1j),
    ],
    ids=[
        "all",
        "a part",
        "transposed",
        "windows",
        "elements",
        "copied elements",
        "a mask",
        "a row",
        "sums",
        "a triangle",
        "places",
    ],
)
def test_views_of_what_was_written_to_through_a_bit_have_it(bits, memory, write) -> None:
    def of_a_view(v: Tensor) -> list[Tensor]:
        write(v)
        return [v[:], v[1:].t(), v * 2]

    def inside(a: Tensor) -> list[Tensor]:
        return of_a_view(bits(a))

    for fn, given in ((inside, memory), (of_a_view, lambda m: bits(memory(m)))):
        results = []
        for call in (fn, torch.compile(fn, backend="aotkit", options={"fallback": "error", "cache": False})):
            m = torch.complex(torch.arange(24.0).view(6, 4), torch.ones(6, 4))
            found = call(given(m))
            results.append([(t.resolve_conj().resolve_neg(), t.is_conj(), t.is_neg()) for t in (*found, m)])
        for got, want in zip(*reversed(results), strict=True):
            assert torch.equal(got[0], want[0]) and got[1:] == want[1:]


@pytest.mark.parametrize("bits", [torch._neg_view, torch.conj, lambda x: x], ids=["negated", "conjugated", "none"])
def test_several_changes_of_shape_in_place_have_one_history(bits: Callable[[Tensor], Tensor]) -> None:
    def change(x: Tensor) -> list[Tensor]:
        x.unsqueeze_(0)
        x.squeeze_()
        return []

    def gradient(f: Callable[[Tensor], object]) -> Tensor:
        leaf = torch.arange(8.0).to(torch.complex64).view(8, 1).requires_grad_()
        x = bits(leaf.clone()[::2])
        f(x)
        assert x.shape == (4,)
        (x * torch.tensor([1.0, 2, 3, 4j])).abs().sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(gradient(aotkit.aot_function(change, lambda gm, inputs: gm)), gradient(change))
