"""Ranks of a process group compare what they compiled before any of them runs it.

Note [How ranks agree]
    A collective that one rank starts and another does not hangs both, so what ranks compiled is compared at the first
    compile of each graph with collectives, group by group, through the group's key-value store and never through
    a collective. Each rank posts a digest, or why its compile failed; the first rank of the group reads all of them and
    posts one verdict, which all read. So a rank waits for ``Options.rank_timeout`` at most, whatever becomes of the
    others: one that never comes is a difference too.

    Each rank counts its own comparisons of a group, and the numbers meet: the n-th graph with collectives of one rank
    is compared with the n-th of the others. Later compiles of the same code, for other sizes, are not compared, since
    one rank may meet new sizes where the others don't. Nor are graphs without collectives: what one rank computes by
    itself is its own business. For the same reason the default looks at collectives only, see ``compare_ranks``.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch._guards import CompileContext

from aotkit_cache import Uncacheable, environment_parts

from ..artifact.collectives import RANKS_ARE_NO_PROCESSES, Collective, collectives_of, groups_of_inputs
from ..errors import RanksDisagree
from ..options import Options

__all__ = ["Exchange", "RankCheck", "versions"]

_GRACE = 5.0  # seconds that others wait longer than the first rank, which tells them who did not come
_LONGEST_PAUSE = 0.05


class RankCheck:
    """The comparison of one graph of Dynamo, ``gm``, which is compiled for ``values``."""

    def __init__(self, gm: torch.fx.GraphModule, values: Sequence[Any], options: Options) -> None:
        self._gm, self._values, self._options = gm, values, options

    @staticmethod
    def of(gm: torch.fx.GraphModule, values: Sequence[Any], options: Options) -> RankCheck | None:
        """What compares ``gm``, or ``None`` where nothing is compared: see Note [How ranks agree]."""
        distributed = torch.distributed
        if options.compare_ranks == "off" or not distributed.is_available() or not distributed.is_initialized():
            return None
        current = CompileContext.current_compile_id()
        if current is not None and current.frame_compile_id:
            return None
        return RankCheck(gm, values, options)

    def compiled(self, collectives: Sequence[Collective]) -> None:
        """Compare what this rank compiled. Raises :class:`RanksDisagree`."""
        if not collectives:
            return
        whole = [] if self._options.compare_ranks == "collectives" else _graph_rows(self._gm)
        for group in dict.fromkeys(c.group for c in collectives):
            rows = [*versions(), *whole, *(str(c) for c in collectives if c.group == group)]
            compared = [*versions(), *whole, *(c.call for c in collectives if c.group == group)]
            exchange = Exchange.open(group, self._options.rank_timeout)
            if exchange is not None:
                exchange.post_rows(compared, rows)
                exchange.finish()

    def failed(self, reason: str, *, runs_eagerly: bool) -> None:
        """Tell the others that this rank can't compile the graph.

        If it ``runs_eagerly`` instead, that is right where it does so on all ranks; else raises :class:`RanksDisagree`.
        """
        certain = [c.group for c in collectives_of(self._gm)]
        groups = dict.fromkeys([*certain, *groups_of_inputs(self._values)])
        for group in groups:
            exchange = Exchange.open(group, self._options.rank_timeout)
            if exchange is None:
                continue
            exchange.post_failure(reason, runs_eagerly)
            if runs_eagerly and group in certain:
                exchange.finish()


@dataclass(slots=True)
class Exchange:
    """One comparison of one group. ``names``: of its ranks among all."""

    store: Any
    prefix: str
    rank: int
    names: Sequence[int]
    timeout: float
    deadline: float

    @staticmethod
    def open(group: str | None, timeout: float) -> Exchange | None:
        """The next comparison of the group of that name, if this process is one of several ranks of it."""
        if group is None:
            return None
        c10d: Any = torch.distributed.distributed_c10d
        members = c10d._resolve_process_group(group)
        rank, names = torch.distributed.get_rank(members), torch.distributed.get_process_group_ranks(members)
        if rank < 0 or len(names) < 2 or torch.distributed.get_backend(members) in RANKS_ARE_NO_PROCESSES:
            return None
        store = c10d._get_process_group_store(members)
        with _store_errors():
            number = store.add(f"aotkit/{group}/count of {rank}", 1)
        return Exchange(store, f"aotkit/{group}/{number}", rank, names, timeout, time.monotonic() + timeout)

    def post_rows(self, compared: Sequence[str], shown: Sequence[str]) -> None:
        """Post what this rank compiled: the digest of what is ``compared``, and both as text for a difference."""
        text = json.dumps([list(compared), list(shown)])
        with _store_errors():
            self.store.set(f"{self.prefix}/rows of {self.rank}", zlib.compress(text.encode(), 1))
        self._post({"digest": hashlib.sha256(json.dumps(list(compared)).encode()).hexdigest()})

    def post_failure(self, reason: str, runs_eagerly: bool) -> None:
        """Post why this rank compiled nothing."""
        self._post({"failed": reason, "eager": runs_eagerly})
        if self.rank == 0 and not runs_eagerly:
            self._decide(f"{self._name(0)} could not compile it: {reason}")

    def finish(self) -> None:
        """Wait for the verdict. Raises :class:`RanksDisagree`."""
        if self.rank == 0:
            verdict = self._judge()
            self._decide(verdict)
            if not verdict:
                self._forget()
        key = f"{self.prefix}/verdict"
        if not self._wait(key, self.deadline + _GRACE):
            raise RanksDisagree(f"{self._name(0)}, which compares, {self._silent()}")
        verdict = self._read(key)
        if verdict:
            raise RanksDisagree(
                f"the ranks {list(self.names)} did not compile the same graph: {verdict}\n"
                "None of them runs it, since collectives that not all ranks start never end. Compile the same code "
                "with the same versions and options on all ranks, or pass options={'compare_ranks': 'off'}."
            )

    def _judge(self) -> str:
        """What differs, or ``""``. Called on the first rank of the group."""
        answers: list[dict[str, Any]] = []
        for rank in range(len(self.names)):
            key = f"{self.prefix}/answer of {rank}"
            if not self._wait(key, self.deadline):
                return f"{self._name(rank)} {self._silent()}"
            answers.append(json.loads(self._read(key)))
        failed = [rank for rank, answer in enumerate(answers) if "failed" in answer]
        if failed:
            if len(failed) == len(answers) and all(answer["eager"] for answer in answers):
                return ""
            return f"{self._name(failed[0])} could not compile it: {answers[failed[0]]['failed']}"
        others = [rank for rank, answer in enumerate(answers) if answer["digest"] != answers[0]["digest"]]
        return self._difference(others) if others else ""

    def _difference(self, others: Sequence[int]) -> str:
        """The first row that the first of the ``others`` has otherwise than the first rank."""
        rows = []
        for rank in (0, others[0]):
            data = self.store.get(f"{self.prefix}/rows of {rank}")
            rows.append(json.loads(zlib.decompress(data)))
        (mine, my_text), (its, its_text) = rows
        longest = max(len(mine), len(its))
        at = next(i for i in range(longest) if i >= min(len(mine), len(its)) or mine[i] != its[i])
        shown = [text[at] if at < len(text) else "has nothing more" for text in (my_text, its_text)]
        names = ", ".join(str(self.names[rank]) for rank in others)
        return (
            f"rank {names} differs from rank {self.names[0]}, first here:\n"
            f"  rank {self.names[0]}: {shown[0]}\n  rank {self.names[others[0]]}: {shown[1]}"
        )

    def _post(self, answer: dict[str, Any]) -> None:
        with _store_errors():
            self.store.set(f"{self.prefix}/answer of {self.rank}", json.dumps(answer))

    def _forget(self) -> None:
        """Empty what all ranks have posted and nobody reads again; not every store can delete a key."""
        with _store_errors():
            for rank in range(len(self.names)):
                self.store.set(f"{self.prefix}/rows of {rank}", "")
                self.store.set(f"{self.prefix}/answer of {rank}", "")

    def _decide(self, verdict: str) -> None:
        with _store_errors():
            self.store.set(f"{self.prefix}/verdict", verdict or " ")

    def _read(self, key: str) -> str:
        with _store_errors():
            return bytes(self.store.get(key)).decode().strip()

    def _wait(self, key: str, until: float) -> bool:
        """Whether ``key`` is there in time. A store's own wait would keep its other users out, so this asks again."""

        def there() -> bool:
            with _store_errors():
                return bool(self.store.check([key]))

        return self.wait_for(there, until)

    def wait_for(self, holds: Callable[[], bool], until: float | None = None) -> bool:
        """Whether ``holds`` gives true in time, by default before others are told that this rank did not answer."""
        pause, until = 0.001, self.deadline if until is None else until
        while not holds():
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return True

    def _name(self, rank: int) -> str:
        return f"rank {self.names[rank]}"

    def _silent(self) -> str:
        return (
            f"did not say within {self.timeout:g} s what it compiled: it has ended, is slower than the option "
            "'rank_timeout' allows, or compiles no graph with collectives here"
        )


@contextmanager
def _store_errors() -> Iterator[None]:
    """Context in which a store may fail: the process that holds it may have ended."""
    try:
        yield
    except RuntimeError as error:
        why = f"the process group's store can't be reached, so ranks can't be compared: {error}"
        raise RanksDisagree(why) from error


def versions() -> list[str]:
    """Rows of the comparison: what is the same on all ranks, or nothing else is."""
    from ..artifact.sources import sources_digest

    return [f"torch {environment_parts()['env.torch']}", f"aotkit with sources {sources_digest()[:16]}"]


def _graph_rows(gm: torch.fx.GraphModule) -> list[str]:
    """The graph node by node, without the number of the rank's device."""
    from ..artifact.key import graph_lines

    try:
        lines: Sequence[str] = graph_lines(gm, {})
    except Uncacheable:  # something in it has no text that means the same elsewhere: operators alone are compared
        lines = [f"{node.op} {node.target}" for node in gm.graph.nodes]
    return [re.sub(r"\bcuda:\d+", "cuda", line) for line in lines]
