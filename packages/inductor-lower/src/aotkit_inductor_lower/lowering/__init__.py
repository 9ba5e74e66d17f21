"""From FX graphs to the loop IR: one rule per ATen op, one file per family of ops."""

from .graph import RULES, lower_graph
from .registry import Decline, RuleTable

__all__ = ["RULES", "Decline", "RuleTable", "lower_graph"]
