"""Run with the eight wheels installed, outside the checkout: each package imports, and one model trains.

Prints one line per package; any failure is an exception.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path

import torch

PACKAGES = ("functionalize", "aot-trace", "partition", "runtime-wrappers", "inductor-lower", "cudagraphs", "cache")


def check_imports() -> None:
    """Import each package from its installed wheel and compare its version with the wheel's."""
    checkout = Path(__file__).resolve().parent.parent
    for distribution in (*(f"aotkit-{name}" for name in PACKAGES), "aotkit"):
        module = importlib.import_module(distribution.replace("-", "_"))
        origin = Path(str(module.__file__)).resolve()
        if origin.is_relative_to(checkout / "packages"):
            raise RuntimeError(f"{distribution} was imported from the checkout: {origin}")
        missing = [name for name in module.__all__ if not hasattr(module, name)]
        if missing:
            raise RuntimeError(f"{distribution} lists {missing} in __all__ but does not have them")
        _check_license(distribution)
        print(f"{distribution} {importlib.metadata.version(distribution)}: {len(module.__all__)} public names")


def _check_license(distribution: str) -> None:
    files = importlib.metadata.files(distribution) or []
    if not any(path.name == "LICENSE" and path.read_text().startswith("BSD 3-Clause") for path in files):
        raise RuntimeError(f"{distribution} was installed without its LICENSE")


def check_training() -> None:
    """One training step through the entry point (no `import aotkit` is needed for it) equals eager's."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.LayerNorm(32), torch.nn.Linear(32, 4)
    )
    compiled = torch.compile(model, backend="aotkit")
    x = torch.randn(8, 16)
    model(x).square().mean().backward()
    expected = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    compiled(x).square().mean().backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    print(f"one training step through backend='aotkit' equals eager: {len(expected)} gradients compared")


def main() -> int:
    """Run both checks."""
    check_imports()
    check_training()
    return 0


if __name__ == "__main__":
    sys.exit(main())
