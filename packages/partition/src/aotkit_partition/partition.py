"""`partition`: joint graph in, forward graph, backward graph and the reasons out; and the same under torch's names."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx
from torch._subclasses.fake_tensor import FakeTensorMode

from .__about__ import __version__
from ._observer import SILENT, Observer
from ._records import Format
from ._torch_compat import copy_module
from .chunk_losses import chunk_losses
from .decide import Decision, decide, peak_front
from .errors import GraphFormatError, InvalidOptionError
from .extensions import Extensions
from .extract import extract
from .gathered_parameters import gather_decisions
from .graph_text import dump_graph, load_graph
from .joint import JointGraph, analyze_joint, described_mutations
from .options import PartitionOptions
from .plan import NO_VERSION_CHECK, Plan, make_plan
from .rank_sync import Exchange, sync_across_ranks
from .regions import with_region_budget
from .replay import replay_random_ops
from .report import PartitionReport, add_front, add_memory, add_states, make_report

_DEFAULT_OPTIONS = PartitionOptions()
_NO_EXTENSIONS = Extensions()
_Graphs = tuple[torch.fx.GraphModule, torch.fx.GraphModule]


@dataclass(frozen=True, slots=True, eq=False)
class Partition:
    """A joint graph, split.

    The forward returns ``[user outputs..., saved tensors..., saved symints...]``; the backward takes
    ``[saved symints..., saved tensors..., tangents...]`` and returns the gradients.

    Attributes:
        forward: the forward graph.
        backward: the backward graph.
        num_fwd_outputs: how many leading outputs of the forward belong to the user.
        saved_names: names of the saved values in the order the forward returns them.
        num_saved_symints: how many of them, at the end, are symbolic sizes.
        num_saved_without_version_check: how many of the tensors, the last ones, are stashed without a version check.
        report: what was saved, what is recomputed, and why.
    """

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_fwd_outputs: int
    saved_names: tuple[str, ...]
    num_saved_symints: int
    num_saved_without_version_check: int
    report: PartitionReport

    def to_json(self) -> str:
        """The partition as JSON text; see :func:`dump_graph` for what a graph keeps.

        Raises:
            UnserializableGraphError: see :func:`dump_graph`.
        """
        return _format().to_text(self)

    @staticmethod
    def from_json(
        text: str,
        fake_mode: FakeTensorMode | None = None,
        constants: Mapping[str, torch.Tensor] | None = None,
    ) -> Partition:
        """The partition that :meth:`to_json` wrote; ``fake_mode`` and ``constants`` as in :func:`load_graph`.

        Raises:
            GraphFormatError: not such a text.
        """
        return _format(fake_mode, constants).from_text(text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Partition) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash((self.num_fwd_outputs, self.saved_names, self.report))

    def __str__(self) -> str:
        return str(self.report)


class _GraphForm:
    """Graphs have a text of their own."""

    def __init__(self, fake_mode: FakeTensorMode | None, constants: Mapping[str, torch.Tensor] | None) -> None:
        self.fake_mode, self.constants = fake_mode, constants

    def to_raw(self, graph: torch.fx.GraphModule, /) -> Any:
        return json.loads(dump_graph(graph))

    def from_raw(self, raw: Any, /) -> torch.fx.GraphModule:
        return load_graph(json.dumps(raw), self.fake_mode, constants=self.constants)


def _format(
    fake_mode: FakeTensorMode | None = None, constants: Mapping[str, torch.Tensor] | None = None
) -> Format[Partition]:
    own = {torch.fx.GraphModule: _GraphForm(fake_mode, constants)}
    return Format(Partition, "aotkit partition", 2, error=GraphFormatError, own=own)


def partition(
    joint: torch.fx.GraphModule,
    num_fwd_outputs: int,
    options: PartitionOptions = _DEFAULT_OPTIONS,
    observer: Observer = SILENT,
    extensions: Extensions = _NO_EXTENSIONS,
) -> Partition:
    """Split a joint forward-backward graph.

    Args:
        joint: takes ``primals_*`` then ``tangents_*`` (told apart by name), returns one flat list: the forward's
            outputs, then the gradients. Fake values in ``node.meta['val']``. It is not changed.
        num_fwd_outputs: how many of its outputs belong to the forward.
        options: how to split.
        observer: told about stages and graphs.
        extensions: the caller's own solvers and estimators.

    Raises:
        InvalidJointGraphError: the graph is not of that form.
        InfeasiblePartitionError: the constraints contradict each other.
        PartitionError: the ranks of ``extensions.group`` hold different graphs, one of them has failed, or one does not
            come within ``extensions.rank_timeout``.
    """
    exchange = None if extensions.group is None else Exchange.begin(extensions.group, extensions.rank_timeout)
    with nullcontext() if exchange is None else exchange.watched():
        analysed, options, decision = _decided(joint, num_fwd_outputs, options, observer, extensions)
    if exchange is not None:
        with observer.stage("partition.ranks"):
            how = {"own_budgets": extensions.own_budgets, "reorder": options.recompute_late}
            decision = sync_across_ranks(analysed, decision, exchange, **how)
    with observer.stage("partition.extract"):
        plan = make_plan(analysed, decision.saved, options.recompute_late)
        report = _report(analysed, plan, decision, options, extensions)
        result = _package(analysed, plan, extract(analysed, plan), report)
    observer.dump("forward", "graphs", lambda: str(result.forward.graph))
    observer.dump("backward", "graphs", lambda: str(result.backward.graph))
    observer.dump("partition", "graphs", lambda: str(result.report))
    return result


def _decided(
    joint: torch.fx.GraphModule, num_fwd_outputs: int, options: PartitionOptions, observer: Observer, own: Extensions
) -> tuple[JointGraph, PartitionOptions, Decision]:
    """The graph, analysed, the options as its regions change them, and what this rank by itself would save."""
    if own.joint_pass is not None:
        with observer.stage("partition.joint_pass"):
            joint = _run_joint_pass(joint, own.joint_pass)
    with observer.stage("partition.chunk_losses"):
        joint, _ = chunk_losses(joint, options.chunk_loss_bytes)
    with observer.stage("partition.analyze"):
        analysed = analyze_joint(joint, num_fwd_outputs, options.symbol_fallback, options.cse)
        analysed.replay_random = options.recompute_random
        options = with_region_budget(analysed, options)
        _place_inputs(analysed, options)
    with observer.stage("partition.cut"):
        return analysed, options, decide(analysed, options, own)


def partition_key(
    joint: torch.fx.GraphModule,
    num_fwd_outputs: int,
    options: PartitionOptions = _DEFAULT_OPTIONS,
    extensions: Extensions = _NO_EXTENSIONS,
) -> str:
    """A hash under which the result of :func:`partition` with these arguments may be kept; see :class:`Extensions`.

    Raises:
        InvalidOptionError: nameless extensions.
        UnserializableGraphError: the graph has no text.
    """
    parts = (dump_graph(joint, flat=True), str(num_fwd_outputs), options.to_json(), extensions.key(), __version__)
    digest = hashlib.sha256()
    for part in parts:
        digest.update(hashlib.sha256(part.encode()).digest())
    return digest.hexdigest()


def default_partition(
    joint_module: torch.fx.GraphModule,
    _joint_inputs: Any,
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    **_unused: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split without rematerialization; has the signature that ``aot_function(partition_fn=...)`` calls.

    Args: as for :func:`min_cut_rematerialization_partition`.
    """
    static = tuple(static_lifetime_input_indices or ())
    options = PartitionOptions(strategy="default", static_inputs=static, details="decisions")
    result = partition(joint_module, num_fwd_outputs, options)
    return result.forward, result.backward


def min_cut_rematerialization_partition(
    joint_module: torch.fx.GraphModule,
    _joint_inputs: Any,
    compiler: str = "inductor",
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    options: PartitionOptions = _DEFAULT_OPTIONS,
    **_unused: Any,
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Split by minimum cut; has the signature that ``aot_function(partition_fn=...)`` calls.

    Args:
        joint_module: the joint graph.
        _joint_inputs: taken for the signature's sake; the values in the graph's metadata are what counts.
        compiler: taken for the signature's sake; the rules assume a compiler that fuses.
        num_fwd_outputs: how many leading outputs belong to the forward.
        static_lifetime_input_indices: inputs that outlive the call (parameters): free to save.
        options: everything else, for use with ``functools.partial``.

    Returns:
        The forward and the backward module, in the calling convention of :class:`Partition`.
    """
    static = options.static_inputs + tuple(static_lifetime_input_indices or ())
    result = partition(joint_module, num_fwd_outputs, replace(options, static_inputs=static, details="decisions"))
    return result.forward, result.backward


def _run_joint_pass(
    joint: torch.fx.GraphModule, rewrite: Callable[[torch.fx.GraphModule], torch.fx.GraphModule | None]
) -> torch.fx.GraphModule:
    module = copy_module(joint)
    return rewrite(module) or module


def _place_inputs(joint: JointGraph, options: PartitionOptions) -> None:
    for name, positions, target in (
        ("static_inputs", options.static_inputs, joint.static_inputs),
        ("mutated_inputs", options.mutated_inputs, joint.mutated_inputs),
    ):
        for position in positions:
            if not 0 <= position < len(joint.forward_inputs):
                raise InvalidOptionError(
                    f"{name} names input {position}, but the graph has {len(joint.forward_inputs)} forward inputs."
                )
            target.add(joint.forward_inputs[position])
    joint.mutated_inputs |= described_mutations(joint)


def _report(
    joint: JointGraph, plan: Plan, decision: Decision, options: PartitionOptions, extensions: Extensions
) -> PartitionReport:
    estimator = extensions.estimator(options)
    report = make_report(joint, plan, decision, estimator)
    report = replace(report, gathers=gather_decisions(joint, plan, options))
    if options.details == "decisions":
        return report
    report = add_memory(report, joint, plan, options.recompute_late)
    if options.details == "front" or decision.front:
        choices = decision.front or peak_front(joint, options, extensions)[0]
        report = add_front(report, joint, plan, choices, estimator)
    return report


def _package(joint: JointGraph, plan: Plan, graphs: _Graphs, report: PartitionReport) -> Partition:
    checked = _num_checked(joint, plan)
    names = [joint.nodes[index].name for index in (*plan.tensors, *plan.symints)]
    forward, backward = graphs
    again = [joint.nodes[index].name for index in plan.recomputed() if joint.facts[index].is_random]
    if again:
        places = joint.num_fwd_outputs + checked, len(plan.symints) + checked
        states = replay_random_ops(forward, backward, again, *places)
        names[checked:checked] = states
        report = add_states(report, forward, backward, joint.num_fwd_outputs, states)
    return Partition(
        forward=forward,
        backward=backward,
        num_fwd_outputs=joint.num_fwd_outputs,
        saved_names=tuple(names),
        num_saved_symints=len(plan.symints),
        num_saved_without_version_check=sum(bool(_unchecked(joint, index)) for index in plan.tensors),
        report=report,
    )


def _unchecked(joint: JointGraph, index: int) -> bool:
    return bool(joint.nodes[index].meta.get(NO_VERSION_CHECK, False))


def _num_checked(joint: JointGraph, plan: Plan) -> int:
    """Saved tensors before the first that is stashed without a version check, or is no tensor."""
    return sum(
        isinstance(joint.value(i), (torch.Tensor, type(None))) and not _unchecked(joint, i) for i in plan.tensors
    )
