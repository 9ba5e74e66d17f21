"""Arguments that share memory, one of them written to.

torch 2.13's own stack returns a view of the wrong argument where one of them has a storage offset (``fn(t, t[1:])``
gives ``t[0]`` for ``b[0]``, and fails for ``b.view(-1)``), refuses arguments of different dtypes and non-differentiable
views, and goes on silently with a graph that was compiled for arguments that shared nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import aotkit
from aotkit_runtime_wrappers import AliasingChangedError

Check = Callable[..., None]
# torch looks at the .grad of each argument.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda b: b,
    "alias": lambda b: b.detach(),
    "select": lambda b: b[0],
    "select last": lambda b: b[..., -1],
    "slice": lambda b: b[1:],
    "slice step": lambda b: b[..., ::2],
    "narrow": lambda b: b.narrow(1, 1, 2),
    "view": lambda b: b.view(-1),
    "view as": lambda b: b.view(2, 2, 3),
    "reshape": lambda b: b.reshape(3, 4),
    "t": lambda b: b.t(),
    "permute": lambda b: b.permute(1, 0),
    "transpose of slice": lambda b: b[1:].transpose(0, 1),
    "expand": lambda b: b.unsqueeze(0).expand(2, -1, -1),
    "unsqueeze": lambda b: b.unsqueeze(1),
    "squeeze": lambda b: b[:1].squeeze(0),
    "diagonal": lambda b: b.diagonal(),
    "unfold": lambda b: b.unfold(1, 2, 1),
    "split": lambda b: b.split(2)[1],
    "chunk": lambda b: b.chunk(2, 1)[0],
    "unbind": lambda b: b.unbind(0)[2],
    "as_strided": lambda b: b.as_strided((2, 2), (4, 1), b.storage_offset() + 1),
    "unflatten": lambda b: b.unflatten(0, (2, 2)),
    "movedim": lambda b: b.movedim(0, 1),
    "real as complex": lambda b: torch.view_as_complex(b.view(6, 2)),
    "another dtype": lambda b: b.view(torch.int32),
    "smaller dtype": lambda b: b.view(torch.int16),
}


def whole_and_part(grad: bool) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        leaf = torch.randn(16, requires_grad=grad)
        whole = leaf * 1 if grad else leaf
        return [whole, whole[4:].view(4, 3)]

    return make


@pytest.mark.covers("F1.68", "F1.46", "F4.21")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("grad", [False, True], ids=["", "grad"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_the_argument_that_was_not_written_to_is_that_of_eager(
    captured_same_as_eager: Check, view: str, grad: bool
) -> None:
    def write_the_whole(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.mul_(2)
        return VIEWS[view](b), b * 3

    def write_the_part(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        b.add_(b)
        b.sin_()
        return VIEWS[view](b), a * 3

    for fn in (write_the_whole, write_the_part):
        captured_same_as_eager(fn, whole_and_part(grad))


def scale_first(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return b + 1


def scale_second(a: Tensor, b: Tensor) -> Tensor:
    b.mul_(2)
    return a + 1


def scale_first_return_views(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    a.mul_(2)
    return b.view(-1), a, b[1:]


def complex_pair(grad: bool) -> list[Tensor]:
    z = torch.randn(6, dtype=torch.complex64, requires_grad=grad)
    z = z * 1 if grad else z
    return [z, torch.view_as_real(z)]


def real_pair(grad: bool) -> list[Tensor]:
    x = torch.randn(6, 2, requires_grad=grad)
    x = x * 1 if grad else x
    return [x, torch.view_as_complex(x)]


def floats_as(dtype: torch.dtype) -> Callable[[], list[Tensor]]:
    def make() -> list[Tensor]:
        x = torch.randn(8)
        return [x, x.view(dtype)]

    return make


DTYPES: dict[str, Callable[[], list[Tensor]]] = {
    "int32": floats_as(torch.int32),
    "int64": floats_as(torch.int64),
    "int16": floats_as(torch.int16),
    "uint8": floats_as(torch.uint8),
    "parts of bytes": lambda: (lambda x: [x[1:], x.view(torch.uint8)[3:17]])(torch.randn(8)),
    "detached": lambda: (lambda x: [x.detach(), x.view(torch.int64).detach()])(torch.randn(8)),
    "complex": lambda: complex_pair(False),
    "complex, grad": lambda: complex_pair(True),
    "real": lambda: real_pair(False),
    "real, grad": lambda: real_pair(True),
    "part of complex": lambda: (lambda z: [z[1:], torch.view_as_real(z)[:4]])(torch.randn(6, dtype=torch.complex64)),
    "imaginary": lambda: (lambda z: [z, z.imag])(torch.randn(6, dtype=torch.complex64)),
    "transposed complex": lambda: (lambda z: [z.t(), torch.view_as_real(z)])(torch.randn(3, 4, dtype=torch.complex64)),
}


@pytest.mark.sample(ways=1)
@pytest.mark.covers("F1.69")
@pytest.mark.parametrize("fn", [scale_first, scale_second, scale_first_return_views])
@pytest.mark.parametrize("make", DTYPES.values(), ids=DTYPES)
def test_arguments_of_different_dtypes_may_share_memory(
    same_as_eager: Check, fn: Callable[..., object], make: Callable[[], list[Tensor]]
) -> None:
    same_as_eager(fn, make)


def test_smaller_elements_at_odd_strides_are_served_by_a_flat_base_or_refused(captured_same_as_eager: Check) -> None:
    def odd(grad: bool) -> list[Tensor]:
        z, pairs = complex_pair(grad)
        return [z, pairs.as_strided((2, 2), (3, 1), 1)]

    def write_what_has_no_base(a: Tensor, b: Tensor) -> Tensor:
        b.mul_(2)
        return a * 2

    x = torch.randn(6, dtype=torch.float64)
    captured_same_as_eager(
        scale_second, lambda: (lambda y: [y, y.view(torch.float32).as_strided((3, 2), (3, 1), 1)])(x.clone())
    )
    captured_same_as_eager(write_what_has_no_base, lambda: [t.detach() for t in odd(False)])
    with pytest.raises(RuntimeError, match=r"which are not whole numbers of elements of the torch\.complex64"):
        aotkit.aot_function(write_what_has_no_base, lambda graph, inputs: graph)(*odd(True))


def scale_and_transpose(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    b.t_()
    return a + b


def change_shape_of_both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    b.t_()
    a.mul_(2)
    b.unsqueeze_(0)
    a.squeeze_()
    return b * 2, b


def reshape_the_base_and_return_views(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    a.unsqueeze_(-1)
    view = b.t()
    b.mul_(2)
    return view, b.view(-1), a


@pytest.mark.covers("F4.23")
@pytest.mark.parametrize("own", [False, True])
def test_views_of_a_base_that_changes_its_own_sizes_are_taken_of_what_it_was(
    captured_same_as_eager: Check, own: bool
) -> None:
    def make() -> list[Tensor]:
        x = torch.randn(2, 4)
        x = x if own else x.view(2, 4)
        return [x, x[:1]]

    captured_same_as_eager(reshape_the_base_and_return_views, make)


@pytest.mark.covers("F4.23")
@pytest.mark.parametrize("fn", [scale_and_transpose, change_shape_of_both])
@pytest.mark.parametrize("detached", [False, True])
def test_sizes_of_arguments_that_share_memory_change_in_place(
    captured_same_as_eager: Check, fn: Callable[..., object], detached: bool
) -> None:
    def make() -> list[Tensor]:
        x = torch.randn(4)
        pair = [x.view(2, 2), x.view(2, 2)]
        return [p.detach() for p in pair] if detached else pair

    captured_same_as_eager(fn, make)


def test_a_view_of_an_argument_that_changes_its_shape_and_shares_memory(captured_same_as_eager: Check) -> None:
    def fn(a: Tensor, b: Tensor) -> Tensor:
        view = a[:, None]
        a.transpose_(0, 1)
        a.square_()
        return view

    captured_same_as_eager(fn, lambda: (lambda x: [x, x[::2]])(torch.randn(2, 6)))


@pytest.mark.parametrize("shared", [False, True])
def test_a_change_of_shape_that_changes_nothing_leaves_what_the_backward_saved_valid(
    captured_same_as_eager: Check, shared: bool
) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.squeeze_()
        a.t_()
        a.t_()
        return a.sin(), b.cos()

    def make() -> list[Tensor]:
        x = torch.randn(4, 4, requires_grad=True).clone()
        return [x, x[:2] if shared else torch.randn(2)]

    captured_same_as_eager(fn, make)


SYMBOLIC: dict[str, Callable[[int], list[Tensor]]] = {
    "slice": lambda n: (lambda x: [x, x[1:]])(torch.randn(n)),
    "two slices": lambda n: (lambda x: [x[:-1], x[1:]])(torch.randn(n)),
    "matrix": lambda n: (lambda x: [x.view(-1)[1:], x[:, 0]])(torch.randn(n, n + 1)),
    "flat base": lambda n: (lambda x: [x.view(-1).detach(), x.detach()])(torch.randn(n, n + 1)),
    "dtype": lambda n: (lambda x: [x, x.view(torch.int32)[2:]])(torch.randn(n)),
}


@pytest.mark.covers("F4.21")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("how", ["aot_function", "torch.compile"])
@pytest.mark.parametrize("make", SYMBOLIC.values(), ids=SYMBOLIC)
def test_arguments_that_share_memory_may_have_symbolic_sizes(how: str, make: Callable[[int], list[Tensor]]) -> None:
    def fn(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        a.mul_(2)
        return b.sum(), b.t()

    graphs: list[object] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    recorder = aotkit.Recorder()
    options = {"fallback": "error", "observer": recorder}
    if how == "aot_function":
        compiled = aotkit.aot_function(fn, compiler, dynamic=True)
    else:
        compiled = torch.compile(fn, backend="aotkit", dynamic=True, options=options)
    for size in (6, 9, 4):
        torch.manual_seed(size)
        eager = make(size)
        torch.manual_seed(size)
        ours = make(size)
        for want, got in zip((*fn(*eager), *eager), (*compiled(*ours), *ours), strict=True):
            torch.testing.assert_close(got, want)
            assert (got.stride(), got.storage_offset()) == (want.stride(), want.storage_offset())
    assert len(graphs) + len(recorder.graphs) == 1


def scale_and_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    a.mul_(2)
    return b + c


PATTERNS: dict[str, Callable[[], list[Tensor]]] = {
    "apart": lambda: [torch.randn(4), torch.randn(4), torch.randn(4)],
    "first and second": lambda: (lambda x: [x[:4], x[2:6], torch.randn(4)])(torch.randn(6)),
    "first and third": lambda: (lambda x: [x[:4], torch.randn(4), x[2:6]])(torch.randn(6)),
    "all": lambda: (lambda x: [x[1:5], x[:4], x[2:6]])(torch.randn(6)),
    "all, otherwise": lambda: (lambda x: [x[2:6], x[:4], x[1:5]])(torch.randn(6)),
    "the same memory": lambda: (lambda x: [x.view(4), x.view(4), torch.randn(4)])(torch.randn(4)),
    "second and third": lambda: (lambda x: [torch.randn(4), x[:4], x[1:]])(torch.randn(5)),
}


@pytest.mark.covers("F4.42")
@pytest.mark.parametrize("how", ["aot_function", "torch.compile"])
def test_memory_shared_in_another_way_than_at_the_first_call_compiles_again(how: str) -> None:
    graphs: list[object] = []

    def compiler(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph

    recorder = aotkit.Recorder()
    if how == "aot_function":
        compiled = aotkit.aot_function(scale_and_add, compiler)
    else:
        options = {"fallback": "error", "observer": recorder}
        compiled = torch.compile(scale_and_add, backend="aotkit", options=options)
    for _ in range(2):
        for make in (*PATTERNS.values(), *reversed(PATTERNS.values())):
            torch.manual_seed(0)
            eager = make()
            torch.manual_seed(0)
            ours = make()
            for want, got in zip((scale_and_add(*eager), *eager), (compiled(*ours), *ours), strict=True):
                torch.testing.assert_close(got, want)
    # Apart, and what does not concern the argument that is written to, are one pattern.
    assert len(graphs) + len(recorder.graphs) == len(PATTERNS) - 1


@pytest.mark.covers("F4.42")
def test_after_sixteen_patterns_of_shared_memory_the_error_is_the_callers() -> None:
    compiled = aotkit.aot_function(scale_first, lambda graph, inputs: graph)
    compiled(torch.randn(24), torch.randn(24))
    memory = torch.randn(80)
    with pytest.raises(AliasingChangedError, match="capture the function again"):
        for offset in range(20):
            compiled(memory[10 + offset : 34 + offset], memory[20:44])


def square_the_other(a: Tensor, b: Tensor) -> Tensor:
    a.mul_(2)
    return b * b


def write_what_has_a_gradient(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    b.mul_(2)
    return a * a, b * 3


def write_and_return_views(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    a.mul_(2)
    return b.flatten(), a.flatten(), b * 2


def write_between_uses(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    c = b * 1
    a.add_(1)
    return c * b, a * b.sum()


def write_both(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    b.mul_(2)
    a.add_(1)
    return b[1:], a


DETACHED: dict[str, Callable[[Tensor], list[Tensor]]] = {
    "all of it": lambda m: [m.detach(), m],
    "a part": lambda m: [m.detach()[1:], m[:2]],
    "detached part": lambda m: [m[1:].detach(), m.view(4, 3)],
    "another dtype": lambda m: [m.detach().view(torch.int32), m],
    "whole and row": lambda m: [m.detach(), m[1]],
}


@pytest.mark.sample(ways=1)
@pytest.mark.covers("F4.21")
@pytest.mark.parametrize(
    "fn", [square_the_other, write_what_has_a_gradient, write_and_return_views, write_between_uses, write_both]
)
@pytest.mark.parametrize("pair", DETACHED.values(), ids=DETACHED)
def test_an_argument_and_a_detached_one_may_share_memory(
    same_as_eager: Check, fn: Callable[..., object], pair: Callable[[Tensor], list[Tensor]]
) -> None:
    same_as_eager(fn, lambda: pair(torch.randn(3, 4, requires_grad=True) * 1))


@pytest.mark.covers("F4.22")
def test_a_leaf_over_a_part_of_what_needs_no_gradient_is_refused() -> None:
    whole = torch.randn(8)
    with pytest.raises(RuntimeError, match="no views of one tensor"):
        aotkit.aot_function(square_the_other, lambda graph, inputs: graph)(whole, whole[2:].requires_grad_())


SEVERAL_STORAGES: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "one array": lambda: _of_array(lambda a: (a, a)),
    "rows": lambda: _of_array(lambda a: (a[:6], a[5:])),
    "columns": lambda: _of_array(lambda a: (a[:, :6], a[:, 5:])),
    "exported": lambda: (lambda t: (t, torch.from_dlpack(t)))(torch.arange(100.0)),
    "written inside": lambda: _of_array(lambda a: (a[3:5], a)),
    "half an element apart": lambda: _of_array(lambda a: (a, np.frombuffer(a, np.float32, 20, offset=2))),
}


def _of_array(parts: Callable[[Any], tuple[Any, Any]]) -> tuple[Tensor, Tensor]:
    x, y = parts(np.arange(100, dtype=np.float32).reshape(10, 10))
    return torch.from_numpy(x), torch.from_numpy(y)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("how", SEVERAL_STORAGES)
def test_memory_may_have_several_storages(how: str, dynamic: bool) -> None:
    def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.add_(1)
        y.mul_(2)
        return x.sum(), y.cumsum(0)

    torch._dynamo.reset()
    run = torch.compile(fn, backend="aotkit", dynamic=dynamic, options={"cache": False})
    apart, again = ([value.clone() for value in SEVERAL_STORAGES[how]()] for _ in range(2))
    torch.testing.assert_close(run(*apart), fn(*again))
    want, got = SEVERAL_STORAGES[how](), SEVERAL_STORAGES[how]()
    with pytest.warns(aotkit.EagerFallback, match="several storages"):
        result = run(*got)
    torch.testing.assert_close(result, fn(*want))
    torch.testing.assert_close(got, want)


def test_columns_of_one_array_are_told_apart() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        x.add_(1)
        y.mul_(2)
        return x.sum()

    torch._dynamo.reset()
    run = torch.compile(fn, backend="aotkit", options={"cache": False, "fallback": "error"})
    want, got = (_of_array(lambda a: (a[:, :5], a[:, 5:])) for _ in range(2))
    torch.testing.assert_close(run(*got), fn(*want))
    torch.testing.assert_close(got, want)
