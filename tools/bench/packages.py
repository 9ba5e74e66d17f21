"""Ahead-of-time packages of the five inference models: what a process that compiles nothing pays to load and run one.

python -m tools.bench.packages                  the five architectures
python -m tools.bench.packages --models bert    one of them

Per model: written by one process, loaded by others. `load` and `run` are processor seconds after `import torch` (the
import of aotkit is in `load`, its bytecode is there); `run` is the first call, beside a call of the model in eager
mode. `beyond` is the size of the file beyond that of the weights. The command fails if a package needs more than 0.5 s,
is 5 MB larger than its weights, imports Dynamo, or gives something else than eager mode.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.starts import write_bytecode

# Everything but torch is imported after the clock started; values come back as they are saved by safetensors.
_LOADER = """
import json, sys, time
import torch
begin = time.process_time()
import aotkit
model = aotkit.load(sys.argv[1] + "/model.aotkit")
loaded = time.process_time()
inputs = torch.load(sys.argv[1] + "/inputs")
ready = time.process_time()
results = model(**inputs)
end = time.process_time()
found = [n for n in sys.modules if n == "torch._dynamo" or n.startswith(("torch._dynamo.", "torch._inductor"))]
torch.save(dict(results), sys.argv[1] + "/results")
print(json.dumps({"load": loaded - begin, "run": end - ready, "frontend": found}))
"""
SECONDS, BYTES = 0.5, 5_000_000


def write(name: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Package, inputs and eager's results in ``folder``; sizes and seconds."""
    import time

    import torch

    import aotkit
    from tools.bench.models import make_batch, make_model

    model = make_model(name).eval()
    batch = {key: value for key, value in make_batch(name, quick).items() if key != "labels"}
    begin = time.process_time()
    path = aotkit.aot_compile(model, (), folder / "model.aotkit", kwargs=batch)
    compiled = time.process_time() - begin
    with torch.no_grad():
        model(**batch)
        begin = time.process_time()
        wanted = model(**batch)
        eager = time.process_time() - begin
    torch.save(batch, folder / "inputs")
    torch.save(_tensors(wanted), folder / "wanted")
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in model.state_dict().values()}
    return {"beyond": Path(path).stat().st_size - sum(held.values()), "compile": compiled, "eager": eager}


def _tensors(results: Any) -> dict[str, Any]:
    return {key: value for key, value in dict(results).items() if value is not None}


def measure(name: str, runs: int, quick: bool) -> dict[str, Any]:
    """The least of ``runs`` processes that load the package, and the largest difference from eager mode."""
    import torch

    with tempfile.TemporaryDirectory(prefix="aotkit-packages-") as folder:
        row = write(name, Path(folder), quick)
        found = []
        for _ in range(runs):
            command = [sys.executable, "-c", _LOADER, folder]
            done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
            if done.returncode:
                raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
            found.append(json.loads(done.stdout.splitlines()[-1]))
        row.update(min(found, key=lambda r: r["load"] + r["run"]))
        got, wanted = _tensors(torch.load(Path(folder) / "results")), torch.load(Path(folder) / "wanted")
    assert got.keys() == wanted.keys(), f"{name}: results {list(got)} instead of {list(wanted)}"
    for key, value in wanted.items():
        torch.testing.assert_close(got[key], value, rtol=1e-3, atol=1e-4)
    row["difference"] = max((got[key] - value).abs().max().item() for key, value in wanted.items())
    return row


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.packages", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "resnet", "vit", "llama"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small inputs")
    given = parser.parse_args()
    write_bytecode()
    print("| model | compile | load | first run | eager run | beyond the weights | largest difference |")
    print("|---|---|---|---|---|---|---|")
    failed = []
    for name in given.models:
        row = measure(name, given.runs, given.quick)
        print(
            f"| {name} | {row['compile']:.2f} s | {row['load']:.3f} s | {row['run']:.3f} s | {row['eager']:.3f} s "
            f"| {row['beyond'] / 1e6:.2f} MB | {row['difference']:.1e} |",
            flush=True,
        )
        # The model's own arithmetic is no cost of the package.
        if row["load"] + max(row["run"] - row["eager"], 0) > SECONDS:
            failed.append(f"{name} takes {row['load'] + row['run']:.2f} s")
        if row["beyond"] > BYTES:
            failed.append(f"the file of {name} is {row['beyond']} bytes larger than its weights")
        if row["frontend"]:
            failed.append(f"{name} imports {row['frontend'][:3]}")
    if failed:
        sys.exit("; ".join(failed))


if __name__ == "__main__":
    main()
