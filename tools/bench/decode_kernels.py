"""Where the time of one token goes: the launches of a decode step by kind, and how fast each kind reads.

python -m tools.bench.decode_kernels --large
python -m tools.bench.decode_kernels --formats int8 --huge-pages

Every kernel is a native call of its own here (Note [What a profile measures]), whose range costs about a microsecond.
"of the memory" is a kind's bytes per second over those of a sum of a large tensor in turns with the steps. Kinds are
products, by the bytes that each reads, and all others by the operators in them. Needs transformers.
"""

from __future__ import annotations

import argparse
import re
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from aotkit import huge_pages
from aotkit.environment import read_environment
from aotkit.reports.profile import ProfileRow, profile_of_step
from aotkit_inductor_lower.memory.huge_pages import move_to_huge_pages
from tools.bench.__main__ import machine
from tools.bench.chains import keep_freed_memory
from tools.bench.decode import FORMATS, LENGTH, PROMPT, READ, make_model, prompt_words, step, weight_bytes

__all__ = ["Launches", "launches_by_kind", "main"]

MUCH = 1 << 18  # bytes: what reads less is not a product with a weight
SHOWN = 12  # kinds


@dataclass(slots=True)
class Launches:
    """All launches of one kind in a token."""

    kind: str
    count: float = 0
    ms: float = 0
    bytes: int = 0


def launches_by_kind(rows: Iterable[ProfileRow]) -> list[Launches]:
    """The slowest kind first."""
    found: dict[str, Launches] = {}
    for row in rows:
        kind = _kind(row)
        of_kind = found.setdefault(kind, Launches(kind))
        of_kind.count += row.calls
        of_kind.ms += row.ms
        of_kind.bytes += row.bytes or 0
    return sorted(found.values(), key=lambda launches: -launches.ms)


def _kind(row: ProfileRow) -> str:
    ops = dict.fromkeys(re.sub(r"(_default)?_?\d*$", "", op) for op in row.ops or (row.name,))
    each = (row.bytes or 0) / max(1.0, row.calls)
    if each >= MUCH and any("mm" in op or "bmm" in op for op in ops):
        return f"product, {each / 1e6:.1f} MB"
    return " ".join(ops)


@torch.no_grad()
def measure(form: str, chosen: argparse.Namespace) -> None:
    """A table of one format."""
    from transformers import StaticCache

    model = make_model(form, *((24, 128000) if chosen.large else ()))
    cache, places = StaticCache(config=model.config, max_cache_len=LENGTH), torch.arange(PROMPT)
    model(torch.tensor([prompt_words()]), past_key_values=cache, cache_position=places)
    memory = torch.ones(READ // 4)
    if chosen.huge_pages:
        move_to_huge_pages([(memory.data_ptr(), memory.nbytes)])
        huge_pages.move_weights(model)
    arguments = model, cache, torch.tensor([[1]]), torch.tensor([PROMPT])
    options, taken = read_environment().options().patch(cache=False), list[float]()

    def read() -> None:
        start = time.process_time()
        memory.sum()
        taken.append(time.process_time() - start)

    found = profile_of_step(step, options, arguments, {}, read, chosen.tokens)
    speed = READ / statistics.median(taken)
    weights, total = weight_bytes(model), found.kernels_ms
    print(
        f"\n{form}: {weights / 1e6:.0f} MB of weights, memory {speed / 1e9:.1f} GB/s; kernels {total:.2f} ms, ", end=""
    )
    print(f"{weights / total * 1e3 / speed:.2f} of the memory\n")
    print("| launches | count | ms | share | us each | GB/s | of the memory |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    kinds = launches_by_kind(found.rows)
    rest = Launches("others")
    for more in kinds[SHOWN:]:
        rest.count, rest.ms, rest.bytes = rest.count + more.count, rest.ms + more.ms, rest.bytes + more.bytes
    for each in [*kinds[:SHOWN], *([rest] if rest.count else [])]:
        rate = each.bytes / each.ms * 1e3
        figures = (
            f"{each.count:g} | {each.ms:.2f} | {each.ms / found.kernels_ms:.3f} | {each.ms / each.count * 1e3:.1f}"
        )
        print(f"| {each.kind} | {figures} | {rate / 1e9:.1f} | {rate / speed:.2f} |", flush=True)


def main() -> int:
    """Prints a table for each format."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.decode_kernels", description=__doc__)
    parser.add_argument("--formats", nargs="*", default=["float32", "bfloat16", "int8", "int4"], choices=list(FORMATS))
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--huge-pages", action="store_true")
    parser.add_argument("--tokens", type=int, default=12)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    print(machine())
    for form in chosen.formats:
        measure(form, chosen)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
