"""Ahead-of-time packages: one file, run by a process that never traces or compiles."""

from __future__ import annotations

import dataclasses
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.export import Dim, export

import aotkit
from aotkit import PackageError
from aotkit.driver import package as package_module
from aotkit_inductor_lower.targets.cpu import host_machine, machine


class Model(nn.Module):
    """Keywords, nested arguments and results, tied weights, a weight with other strides, a buffer that is written."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(4, 5).T.contiguous().T)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, scale: float = 2.0, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls.add_(1)
        y = self.norm(self.first(x) + self.last(x)) * scale
        return {"y": (y @ self.turned).relu() + more["shift"], "sizes": (x.shape[0], [self.calls.clone()])}


def arguments(batch: int = 4) -> tuple[tuple[torch.Tensor], dict[str, Any]]:
    generator = torch.Generator().manual_seed(batch)
    x = torch.randn(batch, 3, generator=generator)
    return (x,), {"scale": 3.0, "more": {"shift": torch.full((5,), 0.5)}}


def package(path: Path, model: nn.Module | None = None, **settings: Any) -> str:
    args, kwargs = arguments()
    settings.setdefault("dynamic_shapes", {"x": {0: Dim("b", min=1, max=64)}, "scale": None, "more": {"shift": None}})
    return aotkit.aot_compile(model or Model().eval(), args, path, kwargs=kwargs, **settings)


def test_a_package_gives_what_the_model_gives_for_every_batch_and_keeps_its_state(tmp_path: Path) -> None:
    model = Model().eval()
    loaded = aotkit.load(package(tmp_path / "model.aotkit", model))
    for batch in (4, 1, 2, 17, 64):
        args, kwargs = arguments(batch)
        with torch.no_grad():
            want, got = model(*args, **kwargs), loaded(*args, **kwargs)
        torch.testing.assert_close(got, want)
        assert type(got["sizes"]) is tuple and got["sizes"][0] == batch
    assert loaded.weights["calls"].item() == 5
    assert loaded.weights["first.weight"] is loaded.weights["last.weight"]
    assert loaded.weights["turned"].stride() == model.turned.stride()


@pytest.mark.covers("F5a.20", "F5a.22", "F7.33")
def test_an_exported_program_with_a_dynamic_batch_runs_all_sizes_in_a_process_without_dynamo(
    tmp_path: Path, warm_python: Any
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    program = export(model, (torch.randn(4, 8),), dynamic_shapes=({0: Dim("b", min=1, max=64)},))
    aotkit.aot_compile(program, None, tmp_path / "p.aotkit")
    batches = [torch.randn(n, 8) for n in range(1, 65)]
    with torch.no_grad():
        torch.save([batches, [model(b) for b in batches]], tmp_path / "values")
    script = """
import sys, torch, aotkit
model = aotkit.load("p.aotkit")
batches, wanted = torch.load("values")
for batch, want in zip(batches, wanted, strict=True):
    assert torch.allclose(model(batch), want, atol=1e-6), batch.shape
found = [n for n in sys.modules if n.split(".")[0] == "sympy" or n.startswith(("torch._dynamo.", "torch._inductor"))]
print(found, [n for n in sys.modules if n in ("aotkit_aot_trace", "aotkit_partition")])
"""
    done = warm_python.run(["-c", script], cwd=tmp_path, only_torch=True)
    assert (done.returncode, done.stdout) == (0, "[] []\n"), done.stderr


@pytest.mark.covers("F5a.20")
def test_weights_can_be_replaced_and_are_private_to_the_process(tmp_path: Path) -> None:
    model = nn.Linear(3, 2).eval()
    path = aotkit.aot_compile(model, (torch.randn(4, 3),), tmp_path / "linear")
    before = Path(path).read_bytes()
    loaded, other = aotkit.load(path), aotkit.load(path)
    x = torch.randn(4, 3)
    loaded.load_weights({"weight": torch.ones(2, 3), "bias": torch.zeros(2)})
    torch.testing.assert_close(loaded(x), x.sum(1, keepdim=True).expand(4, 2))
    torch.testing.assert_close(other(x), model(x).detach())
    assert Path(path).read_bytes() == before
    with pytest.raises(KeyError, match=r"missing: \['bias'\]"):
        loaded.load_weights({"weight": torch.ones(2, 3)})
    with pytest.raises(KeyError, match=r"does not have: \['wait'\]"):
        loaded.load_weights({"wait": torch.ones(2, 3)}, strict=False)
    with pytest.raises(ValueError, match=r"has shape \(3, 2\)"):
        loaded.load_weights({"weight": torch.ones(3, 2)}, strict=False)


def test_the_weights_are_a_safetensors_file_and_lie_aligned(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    model = Model().eval()
    path = package(tmp_path / "model.aotkit", model)
    with zipfile.ZipFile(path) as archive:
        read = safetensors.load(archive.read("weights.safetensors"))
        assert archive.testzip() is None
    loaded = aotkit.load(path)
    for name, value in model.state_dict().items():
        if name != "last.weight":
            assert torch.equal(read[name], value), name
        assert torch.equal(loaded.weights[name], value), name
        assert loaded.weights[name].data_ptr() % 64 == 0 or name == "turned"
    size = sum(v.numel() * v.element_size() for v in model.state_dict().values())
    assert Path(path).stat().st_size < size + 5_000_000


def test_arguments_that_the_package_was_not_made_for_are_refused(tmp_path: Path) -> None:
    loaded = aotkit.load(package(tmp_path / "model.aotkit"))
    (x,), kwargs = arguments()
    torch.testing.assert_close(loaded(x.T.contiguous().T, **kwargs)["y"], loaded(x, **kwargs)["y"])  # copied
    shift = kwargs["more"]["shift"]
    cases: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (TypeError, "compiled for 3.0", x, {**kwargs, "scale": 2.0}),
        (TypeError, "the package takes .*'more', 'scale'", x, {"scale": 3.0}),
        (TypeError, r"more: the package takes \['shift'\]", x, {**kwargs, "more": {"shift": shift, "x": shift}}),
        (TypeError, "compiled for a dense one of torch.float32", x.double(), kwargs),
        (TypeError, "on device meta", x.to("meta"), kwargs),
        (TypeError, "has to be a tensor, not a list", [[1.0]], kwargs),
        (ValueError, "has 1 dimensions; the package was compiled for 2", x[0], kwargs),
        (ValueError, "size 2 in dimension 1, where the package was compiled for 3", x[:, :2], kwargs),
        (ValueError, "dimension 0 of x is 65; the package was compiled for 1 to 64", torch.randn(65, 3), kwargs),
    ]
    for kind, message, first, keywords in cases:
        with pytest.raises(kind, match=message):
            loaded(first, **keywords)
    with pytest.raises(TypeError, match="takes 1 values here, not 2"):
        loaded(x, x, **kwargs)


@pytest.mark.covers("F5a.20", "F7.29")
def test_files_that_do_not_fit_are_refused_with_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = b"sixteen secret bytes"
    path = aotkit.aot_compile(nn.Linear(3, 2), (torch.randn(4, 3),), tmp_path / "linear", signing_key=key)
    assert aotkit.load(path, signing_key=key)(torch.zeros(4, 3)).shape == (4, 2)
    with pytest.raises(PackageError, match="was not signed with this key"):
        aotkit.load(path, signing_key=b"another secret of 16")
    data = bytearray(Path(path).read_bytes())
    data[data.index(b"weights.safetensors") + 200] ^= 1
    (tmp_path / "changed").write_bytes(data)
    with pytest.raises(PackageError, match="is damaged: Bad CRC"):
        aotkit.load(tmp_path / "changed", signing_key=key)
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(tmp_path / "swapped", "w") as other:
        for name in archive.namelist():
            other.writestr(name, archive.read(name).replace(b'"device": "cpu"', b'"device": "CPU"'))
    with pytest.raises(PackageError, match="not signed with this key, or was changed"):
        aotkit.load(tmp_path / "swapped", signing_key=key)
    for damaged in (b"", b"PK no", bytes(data[: len(data) // 2])):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(PackageError, match="is no package of aotkit, or is damaged"):
            aotkit.load(tmp_path / "bad")
    with pytest.raises(PackageError, match="can't read the package"):
        aotkit.load(tmp_path / "missing")
    with zipfile.ZipFile(path) as archive:
        made = json.loads(archive.read("manifest.json"))["variants"][0]["environment"]
    assert len(made["features"]) > 3 and made["device"] == "cpu"
    real = package_module.environment_of_package()
    for change, message in (
        ({"artifact": 0}, "which reads format"),
        ({"torch": "9.1.0"}, "compiled with torch .*, and this is torch 9.1.0"),
        ({"system": "Plan9 sparc"}, "this process has 'Plan9 sparc'"),
        ({"device": "cuda"}, "this process has 'cuda'"),
        ({"features": real["features"][1:]}, f"features that this one .* lacks: {real['features'][0]}"),
    ):
        monkeypatch.setattr(package_module, "environment_of_package", lambda change=change, **_: {**real, **change})
        with pytest.raises(PackageError, match=message):
            aotkit.load(path)


def test_what_cannot_be_packed_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    class Custom(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return {x.shape: x} if False else {("a", 1): x + 1}

    with pytest.raises((PackageError, Exception)) as refused:
        aotkit.aot_compile(Custom(), (torch.randn(2),), tmp_path / "custom")
    assert "dict with the key ('a', 1)" in str(refused.value)
    assert list(tmp_path.iterdir()) == []


# -- which sizes a package takes -------------------------------------------------------------------------


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("declared", ["bounded", "dynamic", "auto"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_package_with_convolutions_takes_every_declared_number_of_images(
    declared: str, layout: torch.memory_format, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.ConvTranspose2d(4, 2, 3)).eval()
    size = {"bounded": Dim("b", min=1, max=64), "dynamic": Dim.DYNAMIC, "auto": Dim.AUTO}[declared]
    example = torch.randn(2, 3, 8, 8).to(memory_format=layout)
    program = export(model, (example,), dynamic_shapes=({0: size},))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    for images in (1, 2, 15, 16, 17, 64):
        x = torch.randn(images, 3, 8, 8).to(memory_format=layout)
        torch.testing.assert_close(loaded(x), model(x).detach())
    with pytest.raises(ValueError, match=r"dimension 0 of input is 0; the package was compiled for 1 "):
        loaded(torch.empty(0, 3, 8, 8))


class Joined(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y]).softmax(0) * x.shape[0] + y.sum() / y.shape[0]


def test_sizes_without_declared_bounds_may_be_one(tmp_path: Path) -> None:
    shapes = ({0: Dim.DYNAMIC}, {0: Dim.DYNAMIC, 1: Dim.DYNAMIC})
    program = export(Joined(), (torch.randn(3, 4), torch.randn(2, 4)), dynamic_shapes=({0: Dim.DYNAMIC}, shapes[0]))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    for rows, more in ((3, 2), (1, 2), (3, 1), (1, 1), (200, 7)):
        x, y = torch.randn(rows, 4), torch.randn(more, 4)
        torch.testing.assert_close(loaded(x, y), Joined()(x, y))


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def test_sizes_that_the_code_is_not_right_for_are_named_at_compile_time_and_in_calls(tmp_path: Path) -> None:
    program = export(Doubled(), (torch.randn(4, 3),), dynamic_shapes=({0: Dim("b", min=1, max=64)},))
    from aotkit.artifact.package_sizes import narrowed, relation_text

    shapes = {"x": ["d0", 3], "y": ["d1", "d0"]}
    arguments = [{"name": name, "symbol": None, "shape": shape} for name, shape in shapes.items()]
    with pytest.warns(UserWarning, match=r"sizes of 1 to 15 in dimension 0 of x, and the program declares 1 to 64"):
        assert narrowed({"d0": (1, 64)}, [["<", "d0", 16]], arguments) == {"d0": (1, 15)}
    with pytest.warns(UserWarning, match=r"sizes of 16 or more in dimension 0 of y"):
        assert narrowed({"d1": (1, None)}, [[">=", "d1", 16]], arguments) == {"d1": (16, None)}
    with pytest.warns(UserWarning, match="sizes of 2 to 8 without 3, 5, 7 in dimension 0 of x"):
        assert narrowed({"d0": (1, 9)}, [["==", ["%", "d0", 2], 0]], arguments) == {"d0": (2, 8)}
    assert narrowed({"d0": (1, None)}, [["!=", "d0", 1]], arguments) == {"d0": (2, None)}
    multiples = [["==", ["%", "d0", 4], 0]]
    with pytest.warns(UserWarning, match="sizes of 4 or more without 5, 6, 7"):
        assert narrowed({"d0": (1, None)}, multiples, arguments) == {"d0": (4, None)}
    with pytest.warns(UserWarning, match="sizes of 4 to 9996 without"):
        assert narrowed({"d0": (1, 9999)}, multiples, arguments) == {"d0": (4, 9996)}
    divides = [["==", ["%", "d0", ["//", "d0", 4]], 0]]
    with pytest.warns(UserWarning, match="sizes of 4 to 8 in"):
        assert narrowed({"d0": (1, 9)}, divides, arguments) == {"d0": (4, 8)}
    assert relation_text(["==", ["%", "d0", 2], ["max", "d1", 0]], arguments) == (
        "((dimension 0 of x % 2) == max(dimension 0 of y, 0))"
    )
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    loaded._guards = [["==", ["%", "d0", 2], 0]]
    with pytest.raises(ValueError, match=r"sizes with \(\(dimension 0 of x % 2\) == 0\), which does not hold for"):
        loaded(torch.randn(3, 3))


class Grouped(nn.Module):
    """Takes multiples of 8, half of them, and odd numbers."""

    def forward(self, x: torch.Tensor, half: torch.Tensor, odd: torch.Tensor) -> tuple[Any, ...]:
        return x.view(-1, 8, 3).sum(1), torch.cat([x, half]) * 2, odd[1:].view(2, -1) + odd.shape[0], x.shape[0] // 8


def multiples(count: int, odd: int = 3) -> tuple[torch.Tensor, ...]:
    return torch.randn(8 * count, 3), torch.randn(4 * count, 3), torch.randn(2 * odd + 1)


def test_sizes_that_are_multiples_and_odd_numbers_of_a_symbol(tmp_path: Path) -> None:
    batch, pairs = Dim("batch"), Dim("pairs", min=2, max=9)
    shapes = ({0: 8 * batch}, {0: 4 * batch}, {0: 2 * pairs + 1})
    program = export(Grouped(), multiples(3), dynamic_shapes=shapes)
    for _ in range(2):  # what the first notes about the program's sizes is nothing to the second
        loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    assert "dimension 0 of x: 16 or more" in str(loaded) and "dimension 0 of odd: 5 to 19" in str(loaded)
    for inputs in (multiples(2, 2), multiples(5, 9)):
        torch.testing.assert_close(loaded(*inputs), Grouped()(*inputs))
    x, half, odd = multiples(3)
    with pytest.raises(ValueError, match=r"sizes with \(\(dimension 0 of x % 8\) == 0\), which does not hold for"):
        loaded(x.repeat(2, 1)[:28], half, odd)
    with pytest.raises(ValueError, match="half has size 8 in dimension 0, where the package was compiled for 12"):
        loaded(x, half[:8], odd)
    with pytest.raises(ValueError, match=r"% 2\) == 0\), which does not hold for"):
        loaded(x, half, odd[:6])
    with pytest.raises(ValueError, match="dimension 0 of odd is 21; the package was compiled for 5 to 19"):
        loaded(x, half, torch.randn(21))


class Alone(nn.Module):
    """One row of eight is another result than many."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(-1, 8).squeeze(0) * 2


def test_the_least_multiple_is_refused_where_the_code_is_not_right_for_it(tmp_path: Path) -> None:
    program = export(Alone(), (torch.randn(24),), dynamic_shapes=({0: 8 * Dim("batch")},))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    x = torch.randn(16)
    assert torch.equal(loaded(x), Alone()(x))
    with pytest.raises(ValueError, match="dimension 0 of x is 8; the package was compiled for 16 or more"):
        loaded(x[:8])
    program = export(Doubled(), (torch.randn(6, 3),), dynamic_shapes=({0: 2 * Dim("half")},))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    for rows in (2, 4, 10):
        assert torch.equal(loaded(torch.ones(rows, 3)), torch.full((rows, 3), 2.0))
    with pytest.raises(ValueError, match="which does not hold for"):
        loaded(torch.ones(3, 3))


class Branches(nn.Module):
    """What is computed depends on the sizes."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        groups = x.shape[0] // 8
        return x * (5 if groups == 5 else 2) * (3 if groups == y.shape[0] else 7)


def test_what_the_export_relied_on_about_a_multiple_is_checked(tmp_path: Path) -> None:
    given = (torch.ones(24, 2), torch.ones(6))
    program = export(Branches(), given, dynamic_shapes=({0: 8 * Dim("groups")}, {0: Dim("rows")}))
    with pytest.warns(UserWarning, match="without 40 in dimension 0 of x"):
        loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "p.aotkit"))
    x, y = torch.ones(48, 2), torch.ones(4)
    assert torch.equal(loaded(x, y), x * 14)
    with pytest.raises(ValueError, match="which does not hold for"):
        loaded(x[:40], y)
    with pytest.raises(ValueError, match="which does not hold for"):
        loaded(x[:32], y)


def test_a_size_that_no_call_tells_is_refused_by_name(tmp_path: Path) -> None:
    program = export(nn.Linear(4, 3), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("rows")},))
    node = next(node for node in program.graph.find_nodes(op="placeholder") if node.name == "input")
    fake = node.meta["val"]
    with fake.fake_mode:
        node.meta["val"] = fake.new_empty(fake.shape[0] ** 2, 4)
    with pytest.raises(PackageError, match=r"dimension 0 of input has the size s\d+\*\*2, and s\d+ is the size of no"):
        aotkit.aot_compile(program, None, tmp_path / "p.aotkit")


# -- records, processors, what a package says ------------------------------------------------------------------


@dataclasses.dataclass
class Scores:
    """A result with fields."""

    best: torch.Tensor
    rest: Pair
    factor: float = 2.0


class Pair(NamedTuple):
    """Another one."""

    low: torch.Tensor
    high: torch.Tensor


class Scored(nn.Module):
    """Takes and gives records."""

    def forward(self, given: Pair) -> Scores:
        low, high = given.low.sin(), given.high.cos()
        return Scores(low + high, Pair(low, high))


torch.utils._pytree.register_dataclass(Scores)


@pytest.fixture
def scored(tmp_path: Path) -> Path:
    given = Pair(torch.randn(3), torch.randn(3))
    return Path(aotkit.aot_compile(Scored(), (given,), tmp_path / "scored"))


def test_records_come_back_as_their_classes_which_the_caller_gives(scored: Path) -> None:
    given = Pair(torch.randn(3), torch.randn(3))
    want = Scored()(given)
    found = aotkit.load(scored, classes=(Scores, Pair))(given)
    assert type(found) is Scores and type(found.rest) is Pair and found.factor == 2.0
    torch.testing.assert_close(found.best, want.best)
    torch.testing.assert_close(found.rest, want.rest)


def test_a_compiled_function_may_call_a_package(scored: Path) -> None:
    loaded, given = aotkit.load(scored), Pair(torch.randn(3), torch.randn(3))
    want = Scored()(given)
    torch.testing.assert_close(torch.compile(loaded, backend="aotkit")(given).best, want.best)
    around = torch.compile(lambda given: loaded(Pair(given.low * 2, given.high)).best + 1, backend="aotkit")
    torch.testing.assert_close(around(Pair(given.low / 2, given.high)), want.best + 1)


def test_without_their_classes_records_are_dicts_with_attributes(scored: Path) -> None:
    loaded, given = aotkit.load(scored), Pair(torch.randn(3), torch.randn(3))
    found, want = loaded(given), Scored()(given)
    assert torch.equal(found.best, found["best"]) and isinstance(found, dict)
    torch.testing.assert_close(found.rest.high, want.rest.high)
    torch.testing.assert_close(loaded({"low": given.low, "high": given.high}).best, want.best)
    with pytest.raises(AttributeError, match="the record has no field 'worst'; it has best, rest, factor"):
        _ = found.worst
    with pytest.raises(TypeError, match=r"the package takes a .*Pair, not Tensor"):
        loaded(given.low)


def test_a_package_for_several_processors_takes_the_best_that_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), torch.randn(4, 8)
    options = [aotkit.Options(processor=level) for level in ("x86-64", "x86-64-v2")]
    path = aotkit.aot_compile(model, (x,), tmp_path / "levels", options=options)
    loaded = aotkit.load(path)
    assert [v["environment"]["processor"] for v in loaded.manifest["variants"]] == ["x86-64-v2", "x86-64"]
    assert loaded.variant["environment"]["processor"] == "x86-64-v2" and "also for: x86-64\n" in str(loaded)
    torch.testing.assert_close(loaded(x), model(x).detach())
    real = package_module.environment_of_package()
    old = {**real, "features": [f for f in real["features"] if not f.startswith(("sse4", "popcnt"))]}
    monkeypatch.setattr(package_module, "environment_of_package", lambda **_: old)
    older = aotkit.load(path)
    assert older.variant["environment"]["processor"] == "x86-64"
    torch.testing.assert_close(older(x), model(x).detach())
    monkeypatch.setattr(package_module, "environment_of_package", lambda **_: {**real, "features": []})
    with pytest.raises(PackageError, match=r"features that this one .* lacks: sse2"):
        aotkit.load(path)
    with pytest.raises(PackageError, match="a package is compiled once for each processor, and the options have"):
        aotkit.aot_compile(model, (x,), tmp_path / "none", options=options[:1] * 2)


def test_a_package_says_which_sizes_it_takes(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum(0) + y

    rows = Dim("rows", min=2, max=64)
    path = aotkit.aot_compile(
        Sum(), (torch.randn(4, 3), torch.randn(3)), tmp_path / "sum", dynamic_shapes=({0: rows}, None)
    )
    text = str(aotkit.load(path))
    assert re.search(r"argument x: torch.float32 \[(\w+), 3\]\n(.*\n)*size \1, dimension 0 of x: 2 to 64\n", text), text


class Normed(nn.Module):
    """A convolution and its norm, which freezing folds into one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.last = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.norm.running_var.uniform_(0.5, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.conv(x)).relu().mean((2, 3)))


def test_a_frozen_package_holds_what_its_weights_became(tmp_path: Path) -> None:
    model, x = Normed().eval(), torch.randn(2, 3, 8, 8)
    path = aotkit.aot_compile(model, (x,), tmp_path / "frozen", options=aotkit.Options(freezing=True))
    plain = aotkit.aot_compile(model, (x,), tmp_path / "plain")
    loaded = aotkit.load(path)
    torch.testing.assert_close(loaded(x), model(x).detach())
    gone = set(loaded.manifest["gone"])
    assert {"norm.running_var", "norm.weight"} <= gone and not gone & loaded.weights.keys()
    assert set(aotkit.load(plain).weights) == gone | loaded.weights.keys()
    for name in ("norm.weight", "conv.weight"):
        with pytest.raises(aotkit.FrozenParameterError, match=f"compiled for the values of {name}; compile it again"):
            loaded.load_weights({name: model.state_dict()[name]}, strict=False)
    torch.testing.assert_close(loaded(x), model(x).detach())


def test_a_frozen_package_carries_packed_weights(tmp_path: Path) -> None:
    model, x = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).eval(), torch.randn(40, 256)
    options = aotkit.Options(freezing=True, contractions="generated")
    loaded = aotkit.load(aotkit.aot_compile(model, (x,), tmp_path / "frozen", options=options))
    torch.testing.assert_close(loaded(x), model(x).detach(), rtol=1e-5, atol=1e-5)
    if host_machine().has("fma"):
        assert {"0.weight", "2.weight"} <= set(loaded.manifest["gone"])
        size = (tmp_path / "frozen").stat().st_size
        assert size < 1.5 * sum(4 * p.numel() for p in model.parameters()), "one copy, and the code"
    with pytest.raises(aotkit.FrozenParameterError, match=r"compiled for the values of 0\.weight"):
        loaded.load_weights({"0.weight": model[0].weight.detach()}, strict=False)


def test_a_frozen_package_keeps_buffers_that_are_written_and_tied_weights(tmp_path: Path) -> None:
    model = Model().eval()
    loaded = aotkit.load(package(tmp_path / "frozen", model, options=aotkit.Options(freezing=True)))
    for batch in (4, 2):
        args, kwargs = arguments(batch)
        with torch.no_grad():
            torch.testing.assert_close(loaded(*args, **kwargs), model(*args, **kwargs))
    assert loaded.weights["calls"].item() == 2


def test_a_package_for_tile_registers_is_refused_where_they_may_not_be_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Features that the system does not allow are none that the processor has."""
    here = package_module.environment_of_package()
    plain = sorted(name for name in here["features"] if not name.startswith("amx"))
    with_tiles = {**here, "features": sorted([*plain, "amx-bf16", "amx-tile"])}
    monkeypatch.setattr("aotkit.torch_api.aot_compile.environment_of_package", lambda *_: with_tiles)
    path = aotkit.aot_compile(nn.Linear(64, 64).eval(), (torch.randn(64, 64),), tmp_path / "tiles")
    monkeypatch.setattr(package_module, "environment_of_package", lambda **_: {**here, "features": plain})
    with pytest.raises(PackageError, match=r"features that this one .* lacks: amx-bf16, amx-tile"):
        aotkit.load(path)


def test_a_level_that_this_processor_lacks_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lesser = dataclasses.replace(host_machine(), features=host_machine().features.replace("+amx", "-amx"))
    monkeypatch.setattr(machine, "host_machine", lambda: lesser)
    layer, x = nn.Linear(8, 8).eval(), torch.randn(4, 8)
    options = aotkit.Options(processor="x86-64-amx", fallback="error", cache=False)
    with pytest.raises(PackageError, match="can't run code for x86-64-amx; compile with processor='host'"):
        aotkit.aot_compile(layer, (x,), tmp_path / "tiles", options=options)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"CompileError: .*can't run code for x86-64-amx"):
        torch.compile(layer, backend=aotkit.make_backend(options))(x)


class WithBuffer(nn.Module):
    """Adds a buffer to parts of its argument."""

    def __init__(self, held: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("held", held)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(x.resolve_conj()) + torch.view_as_real(self.held.resolve_conj() + 0j)


class Views(nn.Module):
    """Results that are views of the argument, and one that is not."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.t(), x[1:], x.exp() + 1


@pytest.mark.parametrize("freezing", [False, True])
@pytest.mark.parametrize("lazy", [lambda z: z.conj(), lambda z: z.conj().imag], ids=["conjugated", "negated"])
def test_lazily_conjugated_weights_and_arguments(
    lazy: Callable[[torch.Tensor], torch.Tensor], freezing: bool, tmp_path: Path
) -> None:
    plain, held = torch.randn(4, 3, dtype=torch.complex64), lazy(torch.randn(4, 3, dtype=torch.complex64))
    options = aotkit.Options(freezing=freezing)
    loaded = aotkit.load(aotkit.aot_compile(WithBuffer(held), (plain,), tmp_path / "file", options=options))
    for given in (plain, plain.conj(), plain.t().clone().t()):
        torch.testing.assert_close(loaded(given), WithBuffer(held)(given))
    loaded = aotkit.load(aotkit.aot_compile(Views(), (held,), tmp_path / "file", options=options))
    for given in (held, held.resolve_conj().resolve_neg(), lazy(plain)):
        torch.testing.assert_close(loaded(given), Views()(given))


class Shared(nn.Module):
    """A buffer, and the lazily conjugated view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("held", torch.randn(4, dtype=torch.complex64))
        self.register_buffer("view", self.held.conj())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.held.add_(1)
        return self.view * x


def test_a_lazily_conjugated_view_of_another_weight_is_refused(tmp_path: Path) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    with pytest.raises(aotkit.PackageError, match="weight view is lazily conjugated or negated and shares memory"):
        aotkit.aot_compile(Shared(), (x,), tmp_path / "file")


class Related(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, y[1:]]).view(-1, 2) + z


def test_sizes_that_the_program_relates_to_each_other(tmp_path: Path) -> None:
    """Declared by ``Dim.AUTO``: torch replaces the size of one input by that of another where they have to be equal."""
    sizes = [(4, 5, (4, 2)), (7, 8, (7, 2)), (2500, 2501, (2500, 2))]
    x, y, z = (torch.randn(size) for size in sizes[0])
    program = export(Related(), (x, y, z), dynamic_shapes=({0: Dim.AUTO}, {0: Dim.AUTO}, {0: Dim.AUTO}))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "joined.aotkit"))
    for x, y, z in ([torch.randn(size) for size in given] for given in sizes):
        torch.testing.assert_close(loaded(x, y, z), Related()(x, y, z), rtol=0, atol=0)
    with pytest.raises(ValueError, match="package was compiled for sizes with"):
        loaded(torch.randn(7), torch.randn(8), torch.randn(6, 2))


class Branching(nn.Module):
    def forward(self, x: torch.Tensor) -> Any:
        def small(x: torch.Tensor) -> torch.Tensor:
            return torch.cond(torch.sym_not(x.shape[0] > 2), lambda x: x.exp(), lambda x: x.sin(), [x])

        return torch.cond(x.shape[0] > 4, lambda x: x.cos() + 3, small, [x]), x.shape[0] == 6


def test_conditions_on_sizes_are_asked_in_each_call(tmp_path: Path) -> None:
    """They choose between branches, and are returned; they were false, and ``None``."""
    program = export(Branching(), (torch.randn(6, 4),), dynamic_shapes=({0: Dim("n", min=2)},))
    loaded = aotkit.load(aotkit.aot_compile(program, None, tmp_path / "branching.aotkit"))
    for size in (2, 4, 5, 6):
        x = torch.randn(size, 4)
        torch.testing.assert_close(loaded(x), Branching()(x))


class Lengths(nn.Module):
    def forward(self, x: torch.Tensor, n: int, m: int, k: int) -> torch.Tensor:
        return (torch.arange(n).repeat(2) + torch.arange(m)) * nn.functional.avg_pool1d(x[None], k)[0].sum()


def test_numbers_that_the_export_settled_are_compared(tmp_path: Path) -> None:
    """One is twice the other, and one a constant of the code."""
    path, x = tmp_path / "lengths.aotkit", torch.randn(3, 12)
    aotkit.aot_compile(Lengths(), (x, 5, 10, 2), path, dynamic_shapes=(None, *[Dim.AUTO] * 3))
    package = aotkit.load(path)
    for n in (5, 7):
        torch.testing.assert_close(package(x, n, 2 * n, 2), Lengths()(x, n, 2 * n, 2))
    for numbers, message in (((5, 12, 2), "m is 12, where"), ((5, 10, 3), "k is 3, where")):
        with pytest.raises(ValueError, match=message):
            package(x, *numbers)
