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
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from .decide import Decision
from .errors import PartitionError
from .joint import JointGraph
from .peak import plan_bytes
from .plan import make_plan
from .timeline import waits_for_collective


def sync_across_ranks(
    joint: JointGraph, decision: Decision, group: Any, *, own_budgets: bool = False, reorder: bool = True
) -> Decision:
    """The decision of the rank whose plan saves the least, or with ``own_budgets`` this rank's own, see
    Note [A budget for each rank]. ``reorder``: as in :func:`make_plan`.

    Raises:
        PartitionError: the ranks hold different graphs.
    """
    plan = make_plan(joint, decision.saved, reorder)
    mine = {
        "graph": fingerprint(joint),
        "bytes": plan_bytes(joint, plan),
        "saved": list(decision.saved),
        "collectives": [_collectives(joint, side) for side in (plan.forward, plan.backward)],
    }
    answers = _gather(mine, group)
    different = [rank for rank, answer in enumerate(answers) if answer["graph"] != mine["graph"]]
    if different:
        raise PartitionError(
            f"the ranks {different} partition another joint graph than rank {torch.distributed.get_rank(group)}, so "
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


def _gather(mine: dict[str, Any], group: Any) -> list[dict[str, Any]]:
    """Every rank's record, by rank; as JSON in byte tensors, so that nothing is unpickled."""
    text = json.dumps(mine).encode()
    size = torch.distributed.get_world_size(group)
    device = torch.device("cuda") if torch.distributed.get_backend(group) == "nccl" else torch.device("cpu")
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    torch.distributed.all_gather(lengths, torch.tensor([len(text)], device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device=device)
    texts = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    torch.distributed.all_gather(texts, padded, group=group)
    return [json.loads(bytes(text.tolist())) for text in texts]
