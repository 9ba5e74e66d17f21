"""Choices of a partition, as one frozen record that callers pass and caches can hash."""

from __future__ import annotations

from dataclasses import dataclass

from ._records import Format
from .errors import InvalidOptionError

STRATEGIES = ("min-cut", "default", "min-peak", "exact")
KNAPSACKS = ("greedy", "dp", "dp-low-memory", "milp")
DETAILS = ("decisions", "memory", "front")
RUNTIMES = ("roofline", "flops", "measured")


@dataclass(frozen=True, slots=True)
class PartitionOptions:
    """How to split a joint graph. Every field changes the result, so all of them belong into a cache key."""

    strategy: str = "min-cut"
    """``min-cut``: save the cheapest set of values, recompute the rest. ``exact``: the same by integer programming, for
    small graphs. ``min-peak``: lower the peak of memory over forward and backward, whatever is saved for it.
    ``default``: recompute nothing but views."""

    cse: bool = True
    """Merge equal computations before cutting."""

    static_inputs: tuple[int, ...] = ()
    """Positions of inputs that outlive the call anyhow (parameters); saving one is free."""

    inputs_are_free: bool = True
    """Saving any forward input is free (its owner mostly keeps it). If False, only ``static_inputs`` are."""

    mutated_inputs: tuple[int, ...] = ()
    """Positions of inputs whose memory is overwritten after the forward graph ran: saved as copies, never as is."""

    distance_bias: float = 1.0
    """A value's cost grows by this factor per forward step that lies between it and the backward (at most 100)."""

    unmaterialized_factor: float = 1.001
    """Cost factor of a value that exists only because it is saved (all its forward uses fuse): one more write. The
    default only breaks ties; 2 counts the write like a byte kept, which may keep more bytes than need be."""

    allowlist_only: bool = True
    """Recompute only operators known to be cheap; if False, everything but compute-intensive and random ones."""

    script_objects_are_free: bool = False
    """Saving a script object, whose size nobody knows, costs nothing. If False it is not saved."""

    recompute_custom_ops: bool = False
    """Operators from outside ATen may be recomputed."""

    recompute_random: bool = False
    """Random ops may be run again, from the generator state that the forward saves. Policies and budgets make use of
    it; without either a random op's result is saved as before."""

    bit_identical: bool = False
    """Recompute only what gives the same bits however a compiler fuses and tiles it: elementwise ops, copies, gathers
    and views. Sums, norms and products are saved; policies that ask for more are followed."""

    recompute_collectives: bool = False
    """Collective communication may be recomputed."""

    regather: bool = False
    """What the forward gathers of inputs from all ranks (parameters of which each rank has a part) is gathered again in
    the backward, where that saves memory, and not kept. Ranks must partition the same graph with the same options."""

    regather_budget: int = 0
    """With ``regather``: so many bytes of what is gathered are kept all the same, those whose gathers take the longest;
    see :mod:`gathered_parameters`."""

    link_latency: float = 20e-6
    """Seconds that a gather takes whatever its size."""

    link_bandwidth: float = 4e9
    """Bytes per second between ranks."""

    ban_reductions: bool = True
    """Never recompute an op whose output is a quarter of its inputs or less."""

    ban_materialized_in_backward: bool = True
    """Never recompute a value that the backward has to write to memory for an op that can't fuse with it."""

    ban_used_far_apart: bool = False
    """Never recompute a fusible use of a value that lies beyond the first use which ends a fusion."""

    max_fusible_chain: int = 100
    """Save at least one value in every chain of this many fusible recomputable ops (0: no limit)."""

    max_distance: int = 1000
    """Never recompute values further than this many forward steps away from the backward."""

    recompute_late: bool = True
    """In the backward, make recomputed values just before their first use; if False, all of them first."""

    chunk_loss_bytes: int = 1 << 28
    """Logits of at least this many bytes (in float32) are computed in chunks of rows, with their loss and its gradient,
    where the graph lets them: see :func:`chunk_losses`. 0: never."""

    memory_budget: float | None = None
    """From 0 to 1. For ``min-cut`` the bytes to save, as a share of what the cut saves without a budget: 1 (which None
    stands for) is that cut, 0 recomputes all that can be; the peak need not fall with it. For ``min-peak`` the peak to
    stay within, as a share of the peak of that cut, by the least recomputation; 0 (None) is the lowest that is
    found."""

    knapsack: str = "dp"
    """How to choose what to keep within a budget of bytes: ``greedy``, ``dp`` (dynamic program), ``dp-low-memory`` or
    ``milp`` (exact)."""

    runtime: str = "roofline"
    """How to estimate the time of an op: ``roofline`` (arithmetic and memory traffic), ``flops``, or ``measured``."""

    details: str = "memory"
    """What the report holds: ``decisions`` alone, ``memory`` over time too, or also the ``front`` of plans worth
    choosing from. Does not change the graphs."""

    symbol_fallback: int = 4096
    """Stands in for a size that has no example value."""

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise InvalidOptionError(f"strategy is {self.strategy!r}; known strategies are {', '.join(STRATEGIES)}.")
        if not 1.0 <= self.distance_bias <= 1.2:
            raise InvalidOptionError(f"distance_bias is {self.distance_bias}; give a factor from 1.0 to 1.2.")
        if self.unmaterialized_factor < 1.0:
            raise InvalidOptionError(
                f"unmaterialized_factor is {self.unmaterialized_factor}; give a factor of 1 or more."
            )
        for name in ("max_fusible_chain", "max_distance", "chunk_loss_bytes", "regather_budget"):
            if getattr(self, name) < 0:
                raise InvalidOptionError(f"{name} is {getattr(self, name)}; give a count of 0 or more.")
        for name in ("link_latency", "link_bandwidth"):
            if not 0.0 < getattr(self, name) < float("inf"):
                raise InvalidOptionError(f"{name} is {getattr(self, name)}; give a number above 0.")
        if not 0.0 <= self.budget <= 1.0:
            raise InvalidOptionError(f"memory_budget is {self.memory_budget}; give a share from 0 to 1.")
        for name, known in (("knapsack", KNAPSACKS), ("runtime", RUNTIMES), ("details", DETAILS)):
            if getattr(self, name) not in known:
                raise InvalidOptionError(f"{name} is {getattr(self, name)!r}; known are {', '.join(known)}.")
        if self.symbol_fallback < 1:
            raise InvalidOptionError(f"symbol_fallback is {self.symbol_fallback}; give a size of 1 or more.")

    @property
    def budget(self) -> float:
        """``memory_budget``, or what None stands for."""
        if self.memory_budget is not None:
            return self.memory_budget
        return 0.0 if self.strategy == "min-peak" else 1.0

    def to_json(self) -> str:
        """The fields that differ from their defaults, as JSON text."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> PartitionOptions:
        """Options from :meth:`to_json`; refuses unknown fields.

        Raises:
            InvalidOptionError: an unknown field or a bad value.
        """
        return _FORMAT.from_text(text)


_FORMAT = Format(PartitionOptions, "aotkit partition options", 3, error=InvalidOptionError)
