"""Recipes of windows (pooling) and of what enlarges, pads and shrinks images."""

from __future__ import annotations

from typing import Any

from .draw import Draw
from .program import Ref
from .recipes import recipe


def image(d: Draw, dims: int, least: int = 1, most: int = 14) -> Ref:
    """A batch of images, or one alone, with so many dimensions of space."""
    most = most if dims < 3 else 6
    space = [max(least, d.rng.randint(1, most)) for _ in range(dims)]
    if dims < 3 and d.flag(0.05):
        space[-1] = d.pick(40, 70, 130)
    lead = [d.pick(1, 2, 3)] if d.flag(0.25) else [d.pick(0, 1, 1, 2), d.pick(1, 2, 3, 5)]
    return d.tensor([*lead, *space], layout=d.goal_layout())


def _window(d: Draw, space: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Kernel, stride and padding: small ones, large ones, as large as the image."""
    kernel = [d.pick(1, 2, 2, 3, 3, 5, 7, n, max(n // 2 + 1, 1), max(n - 1, 1)) for n in space]
    stride = [d.pick(1, 1, 2, 3, k) for k in kernel]
    padding = [d.rng.randint(0, k // 2) for k in kernel]
    if d.flag(0.2):
        kernel, padding = kernel[:1], [0]
    if d.flag(0.2):
        stride = []
    return kernel, stride, padding if d.flag(0.7) else [0]


@recipe("avg_pool2d", "avg_pool3d", "avg_pool2d_backward", "avg_pool3d_backward", "avg_pool1d")
def _avg_pool(d: Draw, op: str) -> None:
    dims = int(op[op.index("pool") + 4])
    x = image(d, dims)
    kernel, stride, padding = _window(d, d.shape(x)[-dims:])
    args: list[Any] = [kernel, stride, padding, d.flag(), d.flag()]
    if dims > 1:
        args.append(d.pick(None, None, 1, 3, 7, -2))
    made = d.call(f"aten.avg_pool{dims}d.default", [x, *args])
    if "backward" in op:
        d.call(op, [d.like(made.outputs[0]), x, *args])


@recipe("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool2d_with_indices_backward",
        "max_pool3d_with_indices_backward")  # fmt: skip
def _max_pool(d: Draw, op: str) -> None:
    dims = int(op[op.index("pool") + 4])
    x = image(d, dims)
    kernel, stride, padding = _window(d, d.shape(x)[-dims:])
    dilation = d.pick(1, 1, 1, 2, 3)
    if any(dilation > 1 and dilation > n for n in d.shape(x)[-dims:]):
        dilation = 1  # a window may step over all elements: eager's backward writes beyond its memory then
    args = [kernel, stride, padding, [dilation], d.flag()]
    made = d.call(f"aten.max_pool{dims}d_with_indices.default", [x, *args])
    if "backward" in op:
        out, indices = made.outputs
        d.call(op, [d.like(out), x, *args, indices])


@recipe("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "_adaptive_avg_pool2d_backward",
        "_adaptive_avg_pool3d_backward", "adaptive_max_pool2d", "adaptive_max_pool3d", "adaptive_max_pool2d_backward",
        "adaptive_max_pool3d_backward")  # fmt: skip
def _adaptive_pool(d: Draw, op: str) -> None:
    dims = int(op[op.index("pool") + 4])
    x = image(d, dims)
    size = [d.pick(1, 2, 3, 5, 7, n) for n in d.shape(x)[-dims:]]
    made = d.call(op.replace("_backward", ""), [x, size])
    if "backward" in op:
        out, *indices = made.outputs
        d.call(op, [d.like(out), x, *indices])


@recipe(*(f"{kind}_pad{n}d{back}" for kind in ("reflection", "replication") for n in (1, 2, 3)
          for back in ("", "_backward")))  # fmt: skip
def _pad(d: Draw, op: str) -> None:
    dims = int(op[op.index("pad") + 3])
    x = image(d, dims, most=9)
    pad: list[int] = []
    for n in reversed(d.shape(x)[-dims:]):
        most = n - 1 if "reflection" in op else 5
        pad += [d.pick(0, min(1, most), d.rng.randint(0, most)) for _ in range(2)]
    if d.flag(0.1):
        pad[0] = -1
    made = d.call(op.replace("_backward", ""), [x, pad])
    if "backward" in op:
        d.call(op, [d.like(made.outputs[0]), x, pad])


_SCALED = {"linear1d": 1, "bilinear2d": 2, "trilinear3d": 3, "bicubic2d": 2}
_SCALED |= {f"nearest{n}d": n for n in (1, 2, 3)} | {f"nearest_exact{n}d": n for n in (1, 2, 3)}


def _upsampling(kind: str) -> str:
    return f"{'_' if 'exact' in kind else ''}upsample_{kind}"


@recipe(*(f"{_upsampling(kind)}{back}" for kind in _SCALED for back in ("", "_backward")))
def _upsample(d: Draw, op: str) -> None:
    forward = op.replace("_backward", "")
    dims = _SCALED[forward.split(".")[1].partition("upsample_")[2]]
    space = [d.rng.randint(1, 7) for _ in range(dims)]
    x = d.tensor([d.pick(1, 2), d.pick(1, 2, 3), *space], layout=d.goal_layout())
    if d.flag():
        scales: list[Any] = [float(d.pick(2, 0.5, 1.5, 1.0, 3.0, 0.7)) for _ in space]
        size = [max(int(n * s), 1) for n, s in zip(space, scales, strict=True)]
    else:
        size, scales = [d.rng.randint(1, 12) for _ in space], [None] * dims
    corners = [] if "nearest" in op else [d.flag()]
    made = d.call(forward, [x, size, *corners, *scales])
    if "backward" in op:
        d.call(op, [d.like(made.outputs[0]), size, d.shape(x), *corners, *scales])
