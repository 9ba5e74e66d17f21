"""One decision for all ranks (F3.50): what differs between ranks is what they would choose, never the graph.

Ranks may choose differently though their graphs are alike, because times were measured or a solver has more than one
answer. If the graph holds collectives, running different ops on different ranks hangs or breaks them. So every rank
says what it would save, and all take the choice of the least memory (the lowest rank among equals). Values are told by
their position in the cleaned joint graph: names may differ between ranks.

Note [A budget for each rank]
    Ranks that have budgets of their own (`Extensions.own_budgets`) may also keep their own decisions, since what a rank
    computes by itself is its own business: forward and backward graphs only have to start the same collectives in the
    same order. That order depends on what is recomputed, so it is compared as it is in the graphs. A rank whose
    collectives are not those of the rank that saves the least takes that rank's decision, which saves no more than its
    own.

Note [How ranks talk]
    Through the key-value store of their group, never through a collective, which hangs where one rank does not come.
    Each rank posts its record, or why it failed, and reads those of the others as they come; whichever does not come
    in time is named. A rank counts its own exchanges in a group, and the numbers meet. Whoever posts a record has read
    all of the exchange before, so once all have posted, each empties its record of that one.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed

from .decide import Decision
from .errors import PartitionError
from .joint import JointGraph
from .peak import plan_bytes
from .plan import make_plan
from .timeline import waits_for_collective

_NOT_THERE = ("fake",)  # backends of groups for tests, whose other ranks do not exist
_LONGEST_PAUSE = 0.05


@dataclass(frozen=True, slots=True)
class Exchange:
    """One decision that the ranks of a group take together; see Note [How ranks talk].

    Attributes:
        store: the group's.
        prefix: of the keys of this exchange.
        rank: this one, in the group.
        names: of the group's ranks among all.
        timeout: seconds to wait for the others.
        earlier: prefix of the exchange before, if there was one.
    """

    store: Any
    prefix: str
    rank: int
    names: Sequence[int]
    timeout: float
    earlier: str | None = None

    @staticmethod
    def begin(group: Any, timeout: float) -> Exchange | None:
        """The next exchange of ``group``; ``None`` if there is nobody to talk to."""
        if group is None or torch.distributed.get_backend(group) in _NOT_THERE:
            return None
        c10d: Any = torch.distributed.distributed_c10d
        rank, names = torch.distributed.get_rank(group), torch.distributed.get_process_group_ranks(group)
        if rank < 0 or len(names) < 2:
            return None
        store = c10d._get_process_group_store(group)
        with _store_errors():
            number = store.add(f"aotkit-partition/count of {rank}", 1)
        earlier = f"aotkit-partition/{number - 1}" if number > 1 else None
        return Exchange(store, f"aotkit-partition/{number}", rank, names, timeout, earlier)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Context in which an error is told to the others before it is raised."""
        try:
            yield
        except Exception as error:
            self._post({"failed": f"{type(error).__name__}: {error}"})
            raise

    def answers(self, mine: dict[str, Any]) -> list[dict[str, Any]]:
        """Every rank's record, by rank. Raises :class:`PartitionError` if one has failed, or does not come in time."""
        self._post(mine)
        until = time.monotonic() + self.timeout
        found = []
        for rank in range(len(self.names)):
            found.append(self._answer(rank, until))
            if "failed" in found[-1]:
                raise PartitionError(
                    f"rank {self.names[rank]} could not partition it: {found[-1]['failed']}\n"
                    f"So the ranks {list(self.names)} have no common decision, and none of them partitions this graph."
                )
        if self.earlier is not None:
            with _store_errors():  # not every store can delete a key
                self.store.set(f"{self.earlier}/rank {self.rank}", "")
        return found

    def _post(self, record: dict[str, Any]) -> None:
        with _store_errors():
            self.store.set(f"{self.prefix}/rank {self.rank}", json.dumps(record))

    def _answer(self, rank: int, until: float) -> dict[str, Any]:
        """A store's own wait would keep its other users out, so this asks again and again."""
        key, pause = f"{self.prefix}/rank {rank}", 0.001
        with _store_errors():
            while not self.store.check([key]):
                if time.monotonic() > until:
                    raise PartitionError(
                        f"rank {self.names[rank]} did not say within {self.timeout:g} s what it would save: it has "
                        "ended, does not partition this graph, or is slower than Extensions(rank_timeout=...) allows."
                    )
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            record: dict[str, Any] = json.loads(bytes(self.store.get(key)))
        return record


@contextmanager
def _store_errors() -> Iterator[None]:
    """Context in which a store may fail: the process that holds it may have ended."""
    try:
        yield
    except RuntimeError as error:
        raise PartitionError(f"the process group's store can't be reached: {error}") from error


def sync_across_ranks(
    joint: JointGraph, decision: Decision, exchange: Exchange, *, own_budgets: bool = False, reorder: bool = True
) -> Decision:
    """The decision of the rank whose plan saves the least, or with ``own_budgets`` this rank's own, see
    Note [A budget for each rank]. ``reorder``: as in :func:`make_plan`.

    Raises:
        PartitionError: the ranks hold different graphs, or one has failed or does not come.
    """
    plan = make_plan(joint, decision.saved, reorder)
    mine = {
        "graph": fingerprint(joint),
        "bytes": plan_bytes(joint, plan),
        "saved": list(decision.saved),
        "collectives": [_collectives(joint, side) for side in (plan.forward, plan.backward)],
    }
    answers = exchange.answers(mine)
    different = [exchange.names[rank] for rank, answer in enumerate(answers) if answer["graph"] != mine["graph"]]
    if different:
        raise PartitionError(
            f"the ranks {different} partition another joint graph than rank {exchange.names[exchange.rank]}, so "
            "there is no common decision. Trace the same function on all ranks, or partition without a group."
        )
    best = min(range(len(answers)), key=lambda rank: (answers[rank]["bytes"], rank))
    if answers[best]["saved"] == mine["saved"]:
        return decision
    if own_budgets and answers[best]["collectives"] == mine["collectives"]:
        return decision
    name = f"{decision.strategy}, as rank {best} decided"
    return replace(decision, saved=tuple(answers[best]["saved"]), strategy=name)


def _collectives(joint: JointGraph, side: Sequence[int]) -> list[int]:
    """Those that a graph starts, in order; waits are a rank's own business."""
    return [i for i in side if joint.facts[i].is_collective and not waits_for_collective(joint.nodes[i])]


def fingerprint(joint: JointGraph) -> str:
    """A hash of the graph that leaves names out: operators, edges, sizes, sides."""
    digest = hashlib.sha256()
    for index, node in enumerate(joint.nodes):
        target = "" if node.op in ("placeholder", "output", "get_attr") else str(node.target)
        row = (node.op, target, joint.inputs_of[index], joint.bytes_of[index], joint.in_backward[index])
        digest.update(repr(row).encode())
    return digest.hexdigest()
