"""Linear upsampling in up to three dimensions, and sampling at places of a grid: sums of neighbours times weights.

Note [Weights of neighbours]
    An element between two is ``a * (1 - part) + b * part``, as in eager mode, also where ``part`` is 0: infinities next
    to a place make it nan. ``a + (b - a) * part`` would be one product less, and nan for other places; for large
    numbers it overflows. A dimension that keeps its size is not resampled, whatever factor is given.

Note [Columns in phases]
    To load pixels at places that were computed is to load them one by one, four for each pixel of a result. Where an
    image becomes 2, 4 or 8 times as wide, every column has that many, one phase of each, whose neighbours are the
    column and the one before or behind, with weights that are numbers. So rows are taken first, into a temporary image
    of the old width, and the phases of those, which are loaded as they lie. Places are exact there in float32, so that
    no other neighbours are read than in eager mode; only the first columns have weights 1 and 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import guard_or_false

from ..target import on_host

__all__ = ["sample_grid", "upsample_linear"]

_EXACT, _WIDEST = (2, 4, 8), 1 << 19  # factors by which places are exact in float32, up to this width
Line = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def upsample_linear(
    decompose: Callable[..., Any], x: torch.Tensor, size: Sequence[Any], corners: bool, *factors: float | None
) -> Any:
    """Of floats; see Note [Weights of neighbours]."""
    if not x.is_floating_point() or not on_host(x):
        return decompose(x, size, corners, *factors)
    count = len(size)
    wide = x.float() if x.dtype.itemsize < 4 else x
    factors = (*factors, *[None] * (count - len(factors)))
    times = _phases(x, size, corners, factors)
    if times and count > 1:
        lines = [_line(wide, k - count, size[k], corners, factors[k]) for k in range(count - 1)]
        found = _between_columns(_between(wide, lines), times)
        return found.to(x.dtype).contiguous(memory_format=suggest_memory_format(x))
    lines = [_line(wide, k - count, size[k], corners, factors[k]) for k in range(count)]
    return _between(wide, lines).to(x.dtype).contiguous(memory_format=suggest_memory_format(x))


def _between(x: torch.Tensor, lines: Sequence[Line]) -> torch.Tensor:
    """Neighbours in the dimensions behind the channels that lines are for, weighted."""
    left = x.dim() - 2 - len(lines)
    values = []
    for corner in product((0, 1), repeat=len(lines)):
        places = (line[far] for line, far in zip(lines, corner, strict=True))
        shaped = [place.view(place.shape[: place.dim() - left]) for place in places]
        values.append(torch.ops.aten._unsafe_index(x, [None, None, *shaped]))
    for _, _, part in reversed(lines):
        values = [a * (1 - part) + b * part for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0]


def _phases(x: torch.Tensor, size: Sequence[Any], corners: bool, factors: Sequence[float | None]) -> int:
    """How many columns there are for each, if its neighbours and weights are the same for every one of them; else 0."""
    known = [*x.shape, *size]
    if corners or not all(isinstance(number, int) for number in known) or not x.is_contiguous() or 0 in known:
        return 0
    times, rest = divmod(size[-1], x.shape[-1])
    exact = times in _EXACT and not rest and 1 < x.shape[-1] <= _WIDEST and factors[-1] in (None, times)
    return times if exact else 0


def _between_columns(rows: torch.Tensor, times: int) -> torch.Tensor:
    """``times`` columns for each, see Note [Columns in phases]."""
    before, after = torch.cat([rows[..., :1], rows[..., :-1]], -1), torch.cat([rows[..., 1:], rows[..., -1:]], -1)
    first = torch.arange(rows.shape[-1], device=rows.device) == 0
    second = torch.where(first, after, rows)
    phases = []
    for phase in range(times):
        part: Any = (phase + 0.5) / times - 0.5
        low, high = (before, second) if part < 0 else (rows, after)
        if part < 0:
            part = torch.where(first, rows.new_zeros(()), part + 1)
        phases.append(low * (1 - part) + high * part)
    return torch.stack(phases, -1).flatten(-2)


def _line(x: torch.Tensor, dim: int, count: Any, corners: bool, factor: float | None) -> Line:
    """For each place of a new dimension the two old places around it, and how far it is on the way to the second."""
    size = x.shape[dim]
    shape = (-1, *[1] * (-dim - 1))
    place = torch.arange(count, device=x.device)
    if guard_or_false(size == count):
        low, high, part = place, place, x.new_zeros(count)
    else:
        if corners:
            ratio = (size - 1.0) / (count - 1.0) if count > 1 else 0.0
            exact = place.to(x.dtype) * ratio
        else:
            ratio = 1.0 / factor if factor is not None and factor > 0 else size / count
            exact = ((place.to(x.dtype) + 0.5) * ratio - 0.5).clamp(min=0.0)
        low = exact.to(torch.int64).clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        part = (exact - low).clamp(0.0, 1.0)
    return low.view(shape), high.view(shape), part.view(shape)


def sample_grid(
    decompose: Callable[..., Any], image: torch.Tensor, grid: torch.Tensor, mode: int, padding: int, corners: bool
) -> Any:
    """A neighbour outside of the image counts 0 whatever the image holds, where torch's decomposition has 0 times the
    first pixel. Eager refuses places of other than two coordinates, other numbers of images than of grids, and images
    without pixels, even if there are none of them."""
    if image.dim() != 4 or grid.dim() != 4 or grid.shape[-1] != 2 or image.shape[0] != grid.shape[0]:
        return NotImplemented
    if image.shape[2] == 0 or image.shape[3] == 0:
        return NotImplemented
    plain = mode in (0, 1, 2) and padding in (0, 1, 2) and image.dtype == grid.dtype and image.is_floating_point()
    if not plain or not on_host(image):
        return decompose(image, grid, mode, padding, corners)
    wide, places = (t.float() if t.dtype.itemsize < 4 else t for t in (image, grid))
    batch, channels, *size = image.shape
    places = places.unsqueeze(1).expand(batch, channels, *grid.shape[1:])
    y, x = (places[..., 1 - k] * (n * 0.5 - 0.5 if corners else n * 0.5) + (n * 0.5 - 0.5) for k, n in enumerate(size))
    pixel = _Pixels(wide, padding, corners)
    if mode != 2:
        y, x = pixel.bounded(y, 0), pixel.bounded(x, 1)
    top, left = (y.round(), x.round()) if mode == 1 else (y.floor(), x.floor())
    if mode == 0:
        result = _bilinear(pixel, (top, left), (y - top, x - left))
    else:
        result = pixel(top, left, None) if mode == 1 else _bicubic(pixel, (top, left), (y - top, x - left))
    return result.to(image.dtype).contiguous()


class _Pixels:
    """Pixels at places that may lie outside of the image."""

    def __init__(self, image: torch.Tensor, padding: int, corners: bool) -> None:
        self.image, self.padding, self.corners = image, padding, corners
        batch, channels, *self.size = image.shape
        self.batch = torch.arange(batch, device=image.device).view(-1, 1, 1, 1)
        self.channel = torch.arange(channels, device=image.device).view(-1, 1, 1)

    def __call__(self, y: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        """Times the weight; 0 outside, but nan where a place at infinity gives no weight."""
        inside = (x >= 0) & (x < self.size[1]) & (y >= 0) & (y < self.size[0])
        row, column = (torch.where(inside, t, 0).to(torch.int64) for t in (y, x))
        found = torch.ops.aten._unsafe_index(self.image, [self.batch, self.channel, row, column])
        found = torch.where(inside, found, 0.0)
        return found if weight is None else found * weight

    def bounded(self, place: torch.Tensor, dim: int) -> torch.Tensor:
        """Moved into the image, unless there are zeros around it: to the first pixel if it is nan."""
        if self.padding == 0:
            return place
        if self.padding == 2:
            low, span = (0.0, self.size[dim] - 1) if self.corners else (-0.5, self.size[dim])
            if guard_or_false(span == 0):
                return torch.zeros_like(place)
            distance = (place - low).abs()
            rest = torch.fmod(distance, span)
            there = torch.fmod((distance / span).floor(), 2) == 0
            place = torch.where(there, rest + low, span + low - rest)
        return torch.where(place > 0, place, 0.0).clamp(max=self.size[dim] - 1)


Pair = tuple[torch.Tensor, torch.Tensor]


def _bilinear(pixel: _Pixels, corner: Pair, part: Pair) -> torch.Tensor:
    (top, left), (down, right) = corner, part
    up, back = 1 - down, 1 - right
    upper = pixel(top, left, back * up) + pixel(top, left + 1, right * up)
    return upper + pixel(top + 1, left, back * down) + pixel(top + 1, left + 1, right * down)


def _bicubic(pixel: _Pixels, corner: Pair, part: Pair) -> torch.Tensor:
    (top, left), (down, right) = corner, part
    columns = [pixel.bounded(left + (k - 1), 1) for k in range(4)]
    rows = [pixel.bounded(top + (k - 1), 0) for k in range(4)]
    across = _cubic(right)
    lines = [_weighted([pixel(row, column, None) for column in columns], across) for row in rows]
    return _weighted(lines, _cubic(down))


def _weighted(values: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
    first, *rest = (value * weight for value, weight in zip(values, weights, strict=True))
    for term in rest:
        first = first + term
    return first


def _cubic(part: torch.Tensor) -> list[torch.Tensor]:
    """Weights of four neighbours in a line, at a place that lies between the second and the third."""
    a = -0.75
    distances = part + 1, part, 1 - part, 2 - part
    near = [((a + 2) * d - (a + 3)) * d * d + 1 for d in distances[1:3]]
    far = [((a * d - 5 * a) * d + 8 * a) * d - 4 * a for d in distances[::3]]
    return [far[0], *near, far[1]]
