"""A compiled function as bytes: its plan and the compiled graphs, put together again by whoever can load those.

Note [What a serialized function is]
    A header line of JSON (format, version, the plan as :meth:`.WrapperPlan.to_json` writes it, the lengths of the
    parts, a digest of everything), then the bytes of the compiled forward and backward. What those bytes are is the
    compiler's business: :class:`SerializableFunction` gets them with a function that loads them. It runs what it
    loaded from them itself, so that nothing of a compile can hide where :meth:`SerializableFunction.serialize` does
    not look. The code around the graphs is generated from the plan; no code is stored.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from typing import Any

from .bind import bind
from .boxed import BoxedCallable
from .errors import PlanError
from .plan import WrapperPlan

__all__ = ["SerializableFunction"]

LoadGraph = Callable[[bytes], Callable[..., Any]]

FORMAT = "aotkit compiled function"
FORMAT_VERSION = 1


class SerializableFunction:
    """A bound callable (boxed: one list of flat arguments in, a list of flat outputs out) that can be written down.

    Attributes:
        plan: what happens around the compiled graphs.
        forward: the compiled graph as bytes.
        backward: the same of the backward; ``None`` exactly for inference plans.
        source: the generated Python.

    Second derivatives need the graph that was captured, and are refused (:class:`.DoubleBackwardError`).
    """

    _boxed_call = True

    def __init__(self, plan: WrapperPlan, forward: bytes, backward: bytes | None, load: LoadGraph) -> None:
        """Load and bind. ``load`` makes a compiled graph (see :func:`.bind`) of its bytes.

        It is called for the forward now, and for the backward at the first backward. Raises :class:`.PlanError` where
        plan and graphs do not fit, and what ``load`` raises.
        """
        if plan.call.training != (backward is not None):
            kind, has = ("a training", "no") if plan.call.training else ("an inference", "a")
            raise PlanError(f"{kind} plan came with {has} compiled backward")
        self.plan, self.forward, self.backward = plan, forward, backward
        lazy = None if backward is None else lambda: load(backward)
        call: Any = bind(plan, load(forward), lazy)
        self._call: BoxedCallable = call
        self.source: str = call.source

    def __call__(self, args: list[Any]) -> Any:
        return self._call(args)

    def serialize(self) -> bytes:
        """Everything as bytes, the same ones for equal functions; see Note [What a serialized function is]."""
        parts = [self.forward] if self.backward is None else [self.forward, self.backward]
        plan = self.plan.to_json()
        header = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "plan": plan,
            "lengths": [len(part) for part in parts],
            "digest": _digest(plan, parts),
        }
        return b"".join([json.dumps(header, sort_keys=True).encode(), b"\n", *parts])

    @staticmethod
    def deserialize(data: bytes, load: LoadGraph) -> SerializableFunction:
        """The function that :meth:`serialize` wrote.

        Raises :class:`.PlanError` for bytes that are no such function, of another version, cut off or changed. The
        digest guards against damage, not against an attacker: give ``load`` no bytes that you do not trust.
        """
        plan, parts = _parse(data)
        return SerializableFunction(WrapperPlan.from_json(plan), parts[0], parts[1] if parts[1:] else None, load)


def _parse(data: bytes) -> tuple[str, list[bytes]]:
    line, _, body = data.partition(b"\n")
    try:
        header = json.loads(line)
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise PlanError("these bytes are no serialized compiled function")
    if header.get("version") != FORMAT_VERSION:
        raise PlanError(
            f"a compiled function of version {header.get('version')!r} cannot be read by this release, which reads "
            f"version {FORMAT_VERSION}; compile it again"
        )
    plan, lengths = header.get("plan"), header.get("lengths")
    if isinstance(plan, str) and isinstance(lengths, list) and all(type(n) is int and n >= 0 for n in lengths):
        starts = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
        parts = [body[a:b] for a, b in itertools.pairwise(starts)]
        if 1 <= len(parts) <= 2 and starts[-1] == len(body) and header.get("digest") == _digest(plan, parts):
            return plan, parts
    raise PlanError("the bytes of this compiled function are damaged: lengths or digest do not fit them")


def _digest(plan: str, parts: list[bytes]) -> str:
    digest = hashlib.sha256(plan.encode())
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()
