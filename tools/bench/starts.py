"""Starts: how long a new process takes to the end of its first training step, for each way to keep a compile.

python -m tools.bench.starts                            the five architectures
python -m tools.bench.starts --models bert --runs 1     a short look

A first process compiles and saves; further ones, one per way and in turn, are measured, on one thread and in processor
time, since other work on a machine does not count in that. `eager` is the first step without a compile. `saved` loads
the file of `aotkit.saved.save_compiled_function`, `saved by torch` that of torch's own (`nan`: torch's loader refuses
it), `whole step` that of `compile_step`, and updates the parameters, too. `warm` is torch.compile with a filled cache;
`Dynamo` is torch.compile with backend="eager", `Inductor` its warm start. The model is there before the time begins;
imports of aotkit and of Dynamo count. Bytecode is written before, as installing a wheel does. The least of the runs
counts.
"""

from __future__ import annotations

import argparse
import compileall
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

WAYS = ("eager", "saved", "saved by torch", "whole step", "warm", "Dynamo", "Inductor")


def loss_of(model: Any, batch: dict[str, Any]) -> Any:
    """What a step differentiates."""
    return model(**batch).loss


def save(name: str, folder: Path) -> None:
    """Everything that the other processes load."""
    import torch

    import aotkit
    from tools.bench.models import make_batch, make_model

    model, batch = make_model(name), make_batch(name, quick=True)
    compiled = aotkit.saved.compile_to_save(model, (), batch)
    aotkit.saved.save_compiled_function(compiled, folder / f"{name}.aotkit")
    compiled.save_compiled_function(str(folder / f"{name}.pt"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    aotkit.saved.compile_step(model, optimizer, loss_of, (batch,)).save(folder / f"{name}.step")


def ways(name: str, folder: Path) -> dict[str, Callable[[Any, Any], None]]:
    """Per way its first step of a model on a batch."""
    import torch

    def saved(model: Any, batch: Any) -> None:
        import aotkit

        aotkit.saved.load_compiled_function(folder / f"{name}.aotkit")(model, **batch).loss.backward()

    def by_torch(model: Any, batch: Any) -> None:
        import aotkit.torch_api.compile_to_save as names

        with open(folder / f"{name}.pt", "rb") as file:
            compiled = torch.compiler.load_compiled_function(file, f_globals=vars(names))
        compiled(model, **batch).loss.backward()

    def whole(model: Any, batch: Any) -> None:
        import aotkit

        aotkit.saved.load_step(folder / f"{name}.step").bind(model)(batch)

    def compiled(backend: Any) -> Callable[[Any, Any], None]:
        def run(model: Any, batch: Any) -> None:
            if backend == "aotkit":
                import aotkit  # noqa: F401
            torch.compile(model, backend=backend)(**batch).loss.backward()

        return run

    return {
        "eager": lambda model, batch: model(**batch).loss.backward(),
        "saved": saved,
        "saved by torch": by_torch,
        "whole step": whole,
        "warm": compiled("aotkit"),
        "Dynamo": compiled("eager"),
        "Inductor": compiled("inductor"),
    }


def measure(name: str, way: str, folder: Path) -> dict[str, Any]:
    """The first step of this process."""
    import torch

    from tools.bench.models import make_batch, make_model

    torch.set_num_threads(1)
    model, batch = make_model(name), make_batch(name, quick=True)
    run = ways(name, folder)[way]
    begin = time.process_time()
    try:
        run(model, batch)
    except RuntimeError as error:
        if "Missing required external references" not in str(error):
            raise
        return {"seconds": float("nan")}  # Dynamo's bytecode names variables that its file lacks
    return {"seconds": time.process_time() - begin}


def write_bytecode() -> None:
    """Of all our packages, where it is not there yet."""
    for module in pkgutil.iter_modules():
        if module.name.startswith("aotkit"):
            spec = importlib.util.find_spec(module.name)
            assert spec is not None and spec.submodule_search_locations
            compileall.compile_dir(spec.submodule_search_locations[0], quiet=2)


def table(name: str, runs: int, chosen: list[str]) -> dict[str, float]:
    """The least seconds of each way."""
    found: dict[str, list[float]] = {way: [] for way in chosen}
    write_bytecode()
    with tempfile.TemporaryDirectory(prefix="aotkit-starts-") as folder:
        env = {
            **os.environ,
            "AOTKIT_CACHE_DIR": str(Path(folder) / "aotkit"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "",
        }
        _worker([name, "save", folder], env)
        for way in chosen:
            if way in ("warm", "Inductor"):
                _worker([name, way, folder], env)  # fills the cache
        for _ in range(runs):
            for way in chosen:
                found[way].append(_worker([name, way, folder], env)["seconds"])
    return {way: min(seconds) for way, seconds in found.items()}


def _worker(what: list[str], env: dict[str, str]) -> Any:
    command = [sys.executable, "-m", "tools.bench.starts", "--worker", *what]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(what)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.starts", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "resnet", "vit", "llama"])
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worker", nargs=3, metavar=("MODEL", "WAY", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        name, way, folder = given.worker
        if way == "save":
            save(name, Path(folder))
            print("{}")
        else:
            print(json.dumps(measure(name, way, Path(folder))))
        return
    print(f"| model | {' | '.join(given.ways)} |")
    print(f"|---|{'---|' * len(given.ways)}")
    for name in given.models:
        row = table(name, given.runs, given.ways)
        print(f"| {name} | {' | '.join(f'{row[way]:.2f} s' for way in given.ways)} |", flush=True)


if __name__ == "__main__":
    main()
