"""Packages of weights and arguments that share memory, repeat elements or have no memory: as the module, or refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, export
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit


class Holder(nn.Module):
    """Buffers by name, and a function that reads and writes them."""

    def __init__(self, run: Callable[..., Any], **buffers: torch.Tensor) -> None:
        super().__init__()
        self.run = run
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.run(self, *args)


def x() -> torch.Tensor:
    return torch.arange(12.0).view(3, 4)


def packed(model: Any, *args: torch.Tensor, path: Path, **settings: Any) -> aotkit.driver.package.Package:
    return aotkit.load(aotkit.aot_compile(model, args, path / "file", **settings))


def check(model: nn.Module, *calls: tuple[torch.Tensor, ...], path: Path, **settings: Any) -> Any:
    """Compare results, arguments and buffers with the module's, for ``calls``; the first is the example, too."""
    eager = copy.deepcopy(model)
    loaded = packed(model, *copy.deepcopy(calls[0]), path=path, **settings)
    for call in calls:
        own, given = copy.deepcopy(call), copy.deepcopy(call)
        torch.testing.assert_close(loaded(*given), eager(*own))
        torch.testing.assert_close(given, own)
        held = {name: loaded.weights.get(name) for name, _ in eager.named_buffers()}
        assert all(value is None or torch.equal(value, eager.get_buffer(name)) for name, value in held.items())
    return loaded


REPEATED = {
    "expanded": lambda: torch.randn(1, 4).expand(3, 4),
    "of one number": lambda: torch.tensor(2.0).expand(3, 4),
    "windows": lambda: torch.randn(10).as_strided((3, 4), (2, 1)),
}


@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("kind", REPEATED)
def test_weights_of_which_elements_are_one_number(kind: str, freezing: bool, tmp_path: Path) -> None:
    model = Holder(lambda self, x: x * self.held + self.held.sum(), held=REPEATED[kind]())
    check(model, (x(),), path=tmp_path, options=aotkit.Options(freezing=freezing))


def test_new_values_of_an_expanded_weight(tmp_path: Path) -> None:
    model = Holder(lambda self, x: x * self.held, held=torch.randn(1, 4).expand(3, 4))
    loaded = packed(model, x(), path=tmp_path)
    loaded.load_weights({"held": torch.arange(4.0).expand(3, 4)})
    assert torch.equal(loaded(x()), x() * torch.arange(4.0))
    with pytest.raises(ValueError, match="several elements of the weight held are one number, and differ"):
        loaded.load_weights({"held": x()})
    assert torch.equal(loaded(x()), x() * torch.arange(4.0))


OVERLAPPING = {
    "rows": lambda base: (base[:3], base[2:5]),
    "a part": lambda base: (base[:3], base),
    "columns": lambda base: (base.view(3, 8)[:, :4], base.view(3, 8)[:, 4:]),
    "another type": lambda base: (base[:3], base[:3].view(torch.int32)),
    "lying apart": lambda base: (base[:3], base[3:]),
}


@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("kind", OVERLAPPING)
def test_weights_that_are_views_of_one_another_stay_so_when_one_is_written(
    kind: str, freezing: bool, tmp_path: Path
) -> None:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.one.add_(1)
        return x * self.one + self.two.sum()

    one, two = OVERLAPPING[kind](torch.randn(6, 4))
    model = Holder(run, one=one, two=two)
    # A copy of a module keeps what its buffers share.
    check(model, (x(),), (x() + 1,), path=tmp_path, options=aotkit.Options(freezing=freezing))


def test_weights_whose_names_the_file_itself_might_use(tmp_path: Path) -> None:
    check(Holder(lambda self, x: x * getattr(self, "__gap0"), __gap0=torch.randn(4)), (x(),), path=tmp_path)
    model = Holder(lambda self, x: x * self.__metadata__, __metadata__=torch.randn(4))
    with pytest.raises(aotkit.PackageError, match="can't be called __metadata__"):
        packed(model, x(), path=tmp_path)


@pytest.mark.parametrize("kind", REPEATED)
def test_an_example_of_which_elements_are_one_number_stands_for_others(kind: str, tmp_path: Path) -> None:
    model, example = Holder(lambda _, x: x * 2 + 1), REPEATED[kind]()
    check(model, (example,), (x(),), path=tmp_path)
    sizes = {"dynamic_shapes": ((({0: Dim("rows", min=1, max=9)}),),)}
    check(model, (example,), (x(),), (torch.ones(1, 4),), (torch.randn(9, 1).expand(9, 4),), path=tmp_path, **sizes)


def test_strides_that_no_size_tells(tmp_path: Path) -> None:
    wide = torch.randn(3, 9)
    sizes = {"dynamic_shapes": (({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC}),)}
    model = Holder(lambda _, x, y: (x * 2, y + 1))
    calls = ((wide[:, :2], wide[:, :4]), (wide[:, 2:7], wide[:, :5]), (wide[:, :3], torch.randn(3, 7)))
    loaded = check(model, *calls, (torch.randn(3, 11)[:, :4], torch.randn(3, 11)[:, :3]), path=tmp_path, **sizes)
    with pytest.raises(ValueError, match="by which elements are one number"):
        loaded(wide[:, :5], torch.randn(3, 12))
    with pytest.raises(ValueError, match="the stride of dimension 0 of args_0 != dimension 1 of args_0"):
        loaded(torch.randn(3, 12), wide[:, :5])


def test_an_example_that_is_there_twice_stands_for_two(tmp_path: Path) -> None:
    both, held = x(), torch.randn(3, 4)
    check(Holder(lambda _, x, y: x - 2 * y), (both, both + 1), path=tmp_path)
    loaded = packed(Holder(lambda _, x, y: x - 2 * y), both, both, path=tmp_path)
    assert torch.equal(loaded(x(), x() + 1), x() - 2 * (x() + 1))
    loaded = packed(Holder(lambda self, x: x - 2 * self.held, held=held), held, path=tmp_path)
    assert torch.equal(loaded(x()), x() - 2 * held)


class Wrapper(torch.Tensor):
    """Has no memory of its own."""

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, dtype=held.dtype, device=held.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_arguments_without_memory_are_refused_and_zeros_are_filled_in(tmp_path: Path) -> None:
    loaded = packed(Holder(lambda _, x: (x + 1).relu().sum(1)), x(), path=tmp_path)
    for value in (Wrapper(x()), FakeTensorMode().from_tensor(x())):
        with pytest.raises(TypeError, match="without memory of its own"):
            loaded(value)
    assert torch.equal(loaded(torch._efficientzerotensor((3, 4))), torch.full((3,), 4.0))
    assert torch.equal(loaded(nn.Parameter(x())), (x() + 1).sum(1))


def test_a_package_in_a_function_that_is_recorded_is_refused(tmp_path: Path) -> None:
    loaded = packed(Holder(lambda _, x: (x + 1).relu().sum(1)), x(), path=tmp_path)
    for record in (
        lambda: make_fx(loaded)(x()),
        lambda: make_fx(loaded, pre_dispatch=True)(x()),
        lambda: export(Holder(lambda _, x: loaded(x)), (x(),)),
    ):
        with pytest.raises(aotkit.PackageError, match="does not see its kernels"):
            record()


def _writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls.add_(1)
    self.old.copy_(self.new)
    self.new.copy_(x[0])
    x.mul_(2)
    return self.old * x + self.calls


def _swaps(self: Any, x: torch.Tensor) -> torch.Tensor:
    kept = self.one.clone()
    self.one.copy_(self.two)
    self.two.copy_(kept)
    return x + self.one


def _swaps_and_returns(self: Any, given: torch.Tensor) -> Any:
    old = self.one.clone()
    self.one.copy_(self.two)
    self.two.copy_(old + given)
    return self.one, self.one[1:].view(-1, 1), self.one + self.two, old


def _swaps_rows(self: Any, given: torch.Tensor) -> Any:
    self.one.copy_(self.one.flip(0) + given)
    return self.one[0], self.two.view(-1), self.one


@pytest.mark.filterwarnings("ignore:erase_node:UserWarning")  # torch 2.15 decomposes so
@pytest.mark.parametrize("decompositions", [None, {}], ids=["core", "none"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: Holder(_writes, calls=torch.zeros(1), old=torch.zeros(4), new=torch.ones(4)),
        lambda: Holder(_swaps, one=torch.zeros(4), two=torch.ones(4)),
        lambda: nn.BatchNorm1d(4),
        lambda: Holder(_swaps_and_returns, one=torch.zeros(3, 4), two=torch.ones(3, 4)),
        lambda: Holder(_swaps_rows, one=x() * 2, two=x()),
    ],
    ids=["writes", "swaps", "norm", "swaps and returns", "swaps rows"],
)
def test_decomposed_programs_write_what_they_wrote(make: Any, decompositions: Any, tmp_path: Path) -> None:
    model = make()
    program = export(copy.deepcopy(model), (x(),)).run_decompositions(decompositions)
    loaded = packed(program, path=tmp_path)
    for step in range(3):
        given, own = x() + step, x() + step
        with torch.no_grad():
            torch.testing.assert_close(loaded(given), model(own))
        assert torch.equal(given, own)
        for name, value in model.named_buffers():
            torch.testing.assert_close(loaded.weights[name], value)


@pytest.mark.parametrize("decomposed", [False, True])
def test_what_is_returned_and_written_is_one_tensor(decomposed: bool, tmp_path: Path) -> None:
    def add(self: Any, given: torch.Tensor) -> torch.Tensor:
        held: torch.Tensor = self.total.add_(given)
        return held

    program = export(Holder(add, total=torch.zeros(3, 4)), (x(),))
    loaded = packed(program.run_decompositions() if decomposed else program, path=tmp_path)
    first = loaded(x())
    loaded(x())
    assert torch.equal(first, 2 * x())


def test_sparse_weights_are_refused(tmp_path: Path) -> None:
    model = Holder(lambda self, given: torch.sparse.mm(self.w, given), w=torch.eye(3).to_sparse())
    with pytest.raises(aotkit.PackageError, match="the weight w is no plain tensor"):
        packed(model, x(), path=tmp_path)


def test_expanded_weights_may_become_nan(tmp_path: Path) -> None:
    loaded = packed(Holder(lambda self, given: self.w + given, w=torch.ones(3, 1).expand(3, 4)), x(), path=tmp_path)
    loaded.load_weights({"w": torch.tensor([[1.0], [float("nan")], [2.0]]).expand(3, 4)})
    assert torch.equal(loaded(x()).isnan(), torch.tensor([[False], [True], [False]]).expand(3, 4))
