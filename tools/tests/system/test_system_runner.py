"""Packages run from C, in a process without Python: built with the system's compiler, bit-equal to Python's loader."""

from __future__ import annotations

import json
import math
import os
import random
import re
import struct
import subprocess
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

import aotkit
from aotkit.cli.runner import HEADER, LIBRARY, build_runner
from aotkit_inductor_lower.errors import SizeOverflowError

pytestmark = pytest.mark.system

SERVER = Path(__file__).with_name("runner") / "serve.c"
KEY = "a key of sixteen or more"
DTYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
TENSOR, INTEGER, CONSTANT = 1, 2, 3

Calls = Sequence[tuple[Sequence[Any], Sequence[Any]]]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built as a user builds it, and a program in C that serves with it."""
    folder = tmp_path_factory.mktemp("runner")
    build_runner(folder)
    assert (folder / HEADER).is_file() and (folder / LIBRARY).is_file()
    libraries = Path(torch.__file__).parent / "lib"
    paths = [f"-Wl,-rpath,{folder}", f"-Wl,-rpath-link,{libraries}"]
    command = ["gcc", "-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-O1", "-I", str(folder), str(SERVER)]
    command += ["-o", str(folder / "serve"), f"-L{folder}", "-laotkit_runner", *paths, "-lpthread"]
    subprocess.run(command, check=True)
    return folder / "serve"


@pytest.fixture
def serve(server: Path, tmp_path: Path) -> Callable[..., str]:
    def run(package: Path, calls: Calls, threads: int = 1, rounds: int = 1, key: str | None = None) -> str:
        """What the server prints, in an environment in which it would find no Python."""
        (tmp_path / "calls").write_bytes(written(calls))
        command = [
            str(server),
            str(package),
            str(tmp_path / "calls"),
            str(threads),
            str(rounds),
            *([key] if key else []),
        ]
        env = {"OMP_NUM_THREADS": str(torch.get_num_threads()), "PATH": os.environ["PATH"]}
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr

    return run


def written(calls: Calls) -> bytes:
    """The file of calls that serve.c reads."""
    rows = [struct.pack("<q", len(values)) + b"".join(map(one, values)) for call in calls for values in call]
    return struct.pack("<q", len(calls)) + b"".join(rows)


def one(value: Any) -> bytes:
    if isinstance(value, int):
        return struct.pack("<2q", INTEGER, value)
    if not isinstance(value, torch.Tensor):
        return struct.pack("<q", CONSTANT)
    count = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    flat = value.detach().as_strided((count if value.numel() else 0,), (1,)).contiguous().view(torch.uint8).numpy()
    layout = (*value.shape, *value.stride(), flat.nbytes)
    return struct.pack(f"<3q{len(layout)}q", TENSOR, DTYPES[value.dtype], value.dim(), *layout) + flat.tobytes()


def leaves(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in leaves(item)]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, tuple | list) else [value]


def all_right(count: int) -> str:
    return f"0 of {count} results differ, Python is absent"


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    from tools.bench.models import make_batch, make_model

    model, batch = make_model("bert").eval(), make_batch("bert", quick=True)
    batch.pop("labels")
    path = tmp_path_factory.mktemp("bert") / "bert.aotkit"
    aotkit.aot_compile(model, (), path, kwargs=batch, signing_key=KEY)
    return path, batch


def test_eight_threads_serve_bert_bit_equal_to_python_without_python(
    bert: tuple[Path, dict[str, torch.Tensor]], serve: Callable[..., str]
) -> None:
    path, batch = bert
    loaded = aotkit.load(path, signing_key=KEY)
    calls = []
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(0, 1000, batch["input_ids"].shape, generator=generator)
        calls.append(
            ([ids, batch["attention_mask"]], leaves(loaded(input_ids=ids, attention_mask=batch["attention_mask"])))
        )
    printed = serve(path, calls, threads=8, rounds=5, key=KEY)
    assert all_right(8 * 5 * 3) in printed
    assert "2 arguments, results logits\n" in printed
    assert "refused 1 the file was not signed with this key" in serve(path, calls, key="another key of sixteen")


class Varied(nn.Module):
    """Keywords, nested results, tied weights, a weight with other strides, a buffer that is written, sizes, None."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.last.weight = self.first.weight
        self.turned = nn.Parameter(torch.randn(4, 5).T.contiguous().T)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls.add_(1)
        y = self.norm(self.first(x) + self.last(x))
        best = (y @ self.turned).relu() + more["shift"]
        return {"y": best, "sizes": (x.shape[0], [self.calls.clone(), None]), "order": best.softmax(-1).cumsum(-1)}


def test_sizes_that_vary_and_buffers_that_are_written(tmp_path: Path, serve: Callable[..., str]) -> None:
    sizes = {"x": {0: Dim("b", min=1, max=64)}, "more": {"shift": None}}
    path = tmp_path / "varied.aotkit"
    shift = torch.full((5,), 0.5)
    example = (torch.randn(4, 3),), {"more": {"shift": shift}}
    aotkit.aot_compile(Varied().eval(), example[0], path, kwargs=example[1], dynamic_shapes=sizes)
    loaded, calls = aotkit.load(path), []
    for batch in (4, 1, 2, 17, 64, 4):
        x = torch.randn(batch, 3, generator=torch.Generator().manual_seed(batch))
        x = x if batch != 17 else x.T.contiguous().T  # laid out as the code reads it by a copy
        calls.append(([x, shift], leaves(loaded(x, more={"shift": shift}))))
    printed = serve(path, calls)
    assert all_right(6) in printed and "results y sizes.0 sizes.1.0 sizes.1.1 order\n" in printed
    for wrong, told in (
        (torch.randn(65, 3), "a size is 65; the package was compiled for 1 to 64"),
        (torch.randn(4, 2), "x has size 2 in dimension 1, where the package was compiled for 3"),
        (torch.randn(4, 3).double(), "x is of Double; the package was compiled for Float"),
        (torch.randn(3), "x has 1 dimensions; the package was compiled for 2"),
        (7, "x has to be a tensor"),
    ):
        assert told in serve(path, [([wrong, shift], calls[0][1])])
    assert "the package takes 2 arguments, not 1" in serve(path, [([shift], calls[0][1])])


class Rooted(nn.Module):
    """The side of a square of patches: a size that is the root of another."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.new_ones(int(x.shape[0] ** 0.5) + 1).cumsum(0), x * 2


def test_a_size_that_is_a_root_is_checked(tmp_path: Path, serve: Callable[..., str]) -> None:
    path = tmp_path / "rooted.aotkit"
    with pytest.warns(UserWarning, match="the package takes sizes of 25 to 35"):  # whose root is 5
        aotkit.aot_compile(Rooted(), (torch.randn(30, 3),), path, dynamic_shapes=({0: Dim.DYNAMIC},))
    loaded = aotkit.load(path)
    calls = [([x], leaves(loaded(x))) for x in map(torch.ones, [(25, 3), (35, 3)])]
    assert all_right(2) in serve(path, calls)
    assert "a size is 36; the package was compiled for 25 to 35" in serve(path, [([torch.ones(36, 3)], calls[0][1])])


class Eights(nn.Module):
    """Rows that are a multiple of eight."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x.view(-1, 8, 3).sum(1), x * 2


def test_sizes_that_are_multiples(tmp_path: Path, serve: Callable[..., str]) -> None:
    path = tmp_path / "eights.aotkit"
    aotkit.aot_compile(Eights(), (torch.randn(24, 3),), path, dynamic_shapes=({0: 8 * Dim("b")},))
    loaded = aotkit.load(path)
    calls = [([x], leaves(loaded(x))) for x in map(torch.ones, [(16, 3), (40, 3)])]
    assert all_right(2) in serve(path, calls)
    assert "for sizes in another relation" in serve(path, [([torch.ones(36, 3)], calls[0][1])])


class Lengths(nn.Module):
    """Numbers of which one is twice the other, and one a constant of the code."""

    def forward(self, x: torch.Tensor, n: int, m: int, k: int) -> torch.Tensor:
        return (torch.arange(n).repeat(2) + torch.arange(m)).float() * F.avg_pool1d(x[None], k)[0].sum()


def test_numbers_that_the_export_settled(tmp_path: Path, serve: Callable[..., str]) -> None:
    path, x = tmp_path / "lengths.aotkit", torch.randn(3, 12)
    aotkit.aot_compile(Lengths(), (x, 5, 10, 2), path, dynamic_shapes=(None, *[Dim.AUTO] * 3))
    loaded = aotkit.load(path)
    calls = [([x, n, 2 * n, 2], leaves([loaded(x, n, 2 * n, 2)])) for n in (5, 7)]
    assert all_right(2) in serve(path, calls)
    for numbers, message in (((5, 12, 2), "m is 12, where"), ((5, 10, 3), "k is 3, where")):
        with pytest.raises(ValueError, match=message):
            loaded(x, *numbers)
        assert f"{message} the package was compiled for" in serve(path, [([x, *numbers], calls[0][1])])


class Rounded(nn.Module):
    """Sizes that Python computes with floats, some of which would be others without rounding."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        n = x.shape[0]
        scaled = F.interpolate(x[None, None], scale_factor=(1.7, 1.0))[0, 0] * 2
        return scaled, x.new_ones(math.trunc(n * 0.7) + 1).cumsum(0), x.new_ones(round(n / 4) + math.ceil(n**0.5)) * 3


def test_sizes_that_are_computed_with_floats(tmp_path: Path, serve: Callable[..., str]) -> None:
    path = tmp_path / "rounded.aotkit"
    aotkit.aot_compile(Rounded(), (torch.randn(30, 3),), path, dynamic_shapes=({0: Dim.DYNAMIC},))
    loaded = aotkit.load(path)
    calls = [([x], leaves(Rounded()(x))) for x in (torch.randn(rows, 3) for rows in (30, 2, 10, 20, 110, 34, 36))]
    for inputs, wanted in calls:
        assert all(map(torch.equal, leaves(loaded(*inputs)), wanted))
    assert all_right(7) in serve(path, calls)


class Cubes(nn.Module):
    """A size that is computed with integers that a float does not hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(math.trunc(x.shape[0] ** 3 / 7 * 0.3) % 5 + 2).cumsum(0)


def test_sizes_that_are_computed_with_large_integers(tmp_path: Path, serve: Callable[..., str]) -> None:
    path = tmp_path / "cubes.aotkit"
    aotkit.aot_compile(Cubes(), (torch.ones(30),), path, dynamic_shapes=({0: Dim.DYNAMIC},))
    loaded = aotkit.load(path)
    calls = [([x], leaves(Cubes()(x))) for x in map(torch.ones, (30, 1000, 208_000, 208_099))]
    for inputs, wanted in calls:
        assert all(map(torch.equal, leaves(loaded(*inputs)), wanted))
    assert all_right(3) in serve(path, calls[:3])
    assert "a number that is too large" in serve(path, calls[3:])


class Powers(nn.Module):
    """A size that is computed with integers beyond 64 bits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_ones(x.shape[0] ** 12 % 50 + 60) * 2 + 1


def test_sizes_beyond_64_bits(tmp_path: Path, serve: Callable[..., str]) -> None:
    path = tmp_path / "powers.aotkit"
    aotkit.aot_compile(Powers(), (torch.ones(30),), path, dynamic_shapes=({0: Dim.DYNAMIC},))
    loaded = aotkit.load(path)
    calls = [([x], leaves(Powers()(x))) for x in map(torch.ones, (30, 38, 39, 77))]
    assert all(torch.equal(loaded(*inputs), wanted) for inputs, (wanted,) in calls[:2])
    assert all_right(2) in serve(path, calls[:2])
    for call in calls[2:]:
        with pytest.raises(SizeOverflowError, match="64 bits"):
            loaded(*call[0])
        assert "a number that is too large" in serve(path, [call])


class Images(nn.Module):
    """Calls into ATen with many kinds of arguments, an index that a kernel checks, several element types."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.two = nn.Conv2d(3, 8, 3, stride=2, padding=1), nn.Conv2d(8, 8, 3, groups=2, bias=False)
        self.norm, self.table = nn.BatchNorm2d(8), nn.Embedding(6, 8)
        self.last = nn.Linear(8, 4).bfloat16()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> tuple[torch.Tensor, ...]:
        h = nn.functional.max_pool2d(self.norm(self.one(x)).relu(), 2)
        h = nn.functional.interpolate(self.two(h), scale_factor=2.0, mode="bilinear")
        h = torch.fft.rfft(h).abs() + self.table(label)[:, :, None, None]
        values, places = h.flatten(1).double().topk(3)
        return (
            self.last(h.mean((2, 3)).bfloat16()),
            values,
            places,
            torch.linalg.inv(h[:, :5, :5, 1] + 9 * torch.eye(5)),
        )


class Shared(nn.Module):
    """Buffers over one memory, of which one is written, and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(6, 4)
        self.register_buffer("one", memory[:3])
        self.register_buffer("two", memory[2:5])
        self.register_buffer("wide", torch.randn(1, 4).expand(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.wide + self.one + self.two


def test_weights_over_one_memory_and_examples_that_are_expanded(tmp_path: Path, serve: Callable[..., str]) -> None:
    model, path, x = Shared(), tmp_path / "shared", torch.randn(3, 4)
    aotkit.aot_compile(model, (torch.randn(1, 4).expand(3, 4),), path)
    calls = [([given], [aotkit.load(path)(given)]) for given in (x, x[:1].expand(3, 4))]
    assert all_right(2) in serve(path, calls)


class Parts(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x * 2, y + 1


def test_strides_that_no_size_tells(tmp_path: Path, serve: Callable[..., str]) -> None:
    wide, sizes = torch.randn(3, 9), ({1: Dim.DYNAMIC}, {1: Dim.DYNAMIC})
    aotkit.aot_compile(Parts(), (wide[:, :2], wide[:, :4]), tmp_path / "parts", dynamic_shapes=sizes)
    given = torch.randn(3, 11)[:, :4], torch.randn(3, 7)
    assert all_right(1) in serve(tmp_path / "parts", [(given, Parts()(*given))])
    printed = serve(tmp_path / "parts", [([wide[:, :5], torch.randn(3, 12)], [wide, wide])])
    assert "by which elements are one number" in printed


@pytest.mark.parametrize("freezing", [False, True])
def test_calls_into_aten_and_errors_of_kernels(freezing: bool, tmp_path: Path, serve: Callable[..., str]) -> None:
    model, x = Images().eval(), torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    path, label = tmp_path / "images.aotkit", torch.tensor([1, 5])
    aotkit.aot_compile(model, (x, label), path, options=aotkit.Options(freezing=freezing))
    wanted = leaves(aotkit.load(path)(x, label))
    printed = serve(path, [([x, label], wanted)], threads=2, rounds=3)
    assert all_right(6) in printed
    printed = serve(path, [([x, torch.tensor([1, 6])], wanted)])
    assert "an index is out of range for the dimension it selects from" in printed


class Unscaled(nn.Module):
    """An operator whose results are a list and a tensor."""

    def forward(self, a: torch.Tensor, b: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, ...]:
        parts = torch.ops.aten._amp_foreach_non_finite_check_and_unscale([a, b], found, torch.full((1,), 0.5))
        return parts[0][0] + 1, parts[0][1], parts[1] * 2


def test_a_list_among_the_results_of_a_call(tmp_path: Path, serve: Callable[..., str]) -> None:
    example = (torch.randn(3), torch.randn(2, 2), torch.zeros(1))
    aotkit.aot_compile(Unscaled(), example, tmp_path / "list.aotkit")
    inputs = [example, (torch.ones(3), torch.full((2, 2), torch.inf), torch.zeros(1))]
    calls = [(list(args), leaves(Unscaled()(*args))) for args in inputs]
    assert all_right(2) in serve(tmp_path / "list.aotkit", calls)


@torch.library.custom_op("runner_tests::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    """An operator that only Python knows."""
    return x * 2


@scale.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


class Scaled(nn.Module):
    """Calls it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return scale(x).sin()


def test_a_custom_operator_is_refused(tmp_path: Path, serve: Callable[..., str]) -> None:
    aotkit.aot_compile(Scaled(), (torch.ones(3),), tmp_path / "scaled")
    printed = serve(tmp_path / "scaled", [])
    assert printed == "refused 3 the package calls the custom operator runner_tests::scale\n"


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin() + 1, lambda x: x.cos(), (x,)) * 2


def test_a_graph_that_is_compiled_in_parts_is_refused(tmp_path: Path, serve: Callable[..., str]) -> None:
    aotkit.aot_compile(Branches(), (torch.ones(4),), tmp_path / "package")
    printed = serve(tmp_path / "package", [([torch.ones(4)], [torch.ones(4)])])
    assert printed == "refused 3 the package holds a graph that is compiled in parts; load it with Python\n"


class Sorted(nn.Module):
    """Rows of which kernels leave those with equal elements to ATen."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        middle, place = x.median(-1)
        third, other = x.kthvalue(3, -1)
        long = torch.cat([x, x * 2, x + 1, x.abs()], -1)
        found, places = long.sort(-1)
        kept = found > found.mean(-1, keepdim=True).round()
        sorted_stably = torch.sort(long, dim=-1, stable=True)
        best = *x.topk(4), middle, place, third, other, *x.sort(-1, descending=True)
        return *best, *sorted_stably, kept.scatter(1, places, kept)


def test_rows_with_equal_elements_are_sorted_as_eager_sorts_them(tmp_path: Path, serve: Callable[..., str]) -> None:
    path, generator = tmp_path / "sorted.aotkit", torch.Generator().manual_seed(4)
    distinct = torch.randn(50, 20, generator=generator)
    equal = torch.where(torch.arange(50)[:, None] % 7 == 0, distinct.round(), distinct)
    aotkit.aot_compile(Sorted(), (distinct,), path)
    with zipfile.ZipFile(path) as archive:
        assert b"fix_up_rows" in archive.read("graph/forward")
    loaded = aotkit.load(path)
    calls = [([x], leaves(loaded(x))) for x in (distinct, equal, distinct.round())]
    for (x,), results in calls:
        assert all(map(torch.equal, results, leaves(Sorted()(x))))
    assert all_right(3) in serve(path, calls)


def test_the_best_level_that_a_processor_has_is_picked_and_another_place_is_refused(
    tmp_path: Path, serve: Callable[..., str]
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), torch.randn(4, 8)
    path = tmp_path / "levels.aotkit"
    options = [aotkit.Options(processor=level) for level in ("x86-64", "x86-64-v2")]
    aotkit.aot_compile(model, (x,), path, options=options)
    wanted = leaves(aotkit.load(path)(x))
    assert all_right(1) in serve(path, [([x], wanted)])

    def changed(change: Callable[[Any], object]) -> Path:
        with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "changed", "w") as new:
            for info in old.infolist():
                data = old.read(info)
                if info.filename == "manifest.json":
                    manifest = json.loads(data)
                    change(manifest)
                    data = json.dumps(manifest).encode()
                new.writestr(info.filename, data)
        return tmp_path / "changed"

    best = changed(lambda manifest: manifest["variants"][0]["environment"]["features"].append("avx9000"))
    assert all_right(1) in serve(best, [([x], leaves(aotkit.load(best)(x)))])  # the next level
    for key, value, told in (
        ("torch", "9.1.0", "compiled with torch 9.1.0"), ("system", "Plan9 mips", "compiled for Plan9 mips"),
        ("device", "cuda:0 of architecture sm_90", "the device cuda:0"), ("features", ["avx9000"], "with avx9000"),
    ):  # fmt: skip
        other = changed(lambda m, k=key, v=value: [row["environment"].update({k: v}) for row in m["variants"]])
        found = re.search(r"refused 2 the package can't run here: .*", serve(other, [([x], wanted)]))
        assert found and told in found[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(18, 24))
def test_of_20_damaged_files_each_is_refused_or_gives_the_same(
    tmp_path: Path, serve: Callable[..., str], seed: int
) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 16), nn.GELU()).eval(), torch.randn(4, 8)
    aotkit.aot_compile(model, (x,), tmp_path / "whole")
    data, wanted = (tmp_path / "whole").read_bytes(), leaves(aotkit.load(tmp_path / "whole")(x))
    chance, refused = random.Random(seed), 0
    for _ in range(20):
        at = chance.randrange(len(data)) if chance.random() < 0.5 else len(data) - 1 - chance.randrange(800)
        bit = data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        run = data[:at] + chance.randbytes(8) + data[at + 8 :]
        (tmp_path / "file").write_bytes(chance.choice((bit, run, data[:at], data[:at] + b"more" + data[at:])))
        printed = serve(tmp_path / "file", [([x], wanted)])
        refused += printed.startswith("refused ")
        assert printed.startswith("refused 1") or all_right(1) in printed, printed
    assert refused > 12
