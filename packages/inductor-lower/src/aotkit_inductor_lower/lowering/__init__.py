"""From FX graphs to the loop IR: one rule per ATen op, one file per family of ops."""

from ..errors import Fallback
from .graph import RULES, lower_graph
from .registry import RuleTable

__all__ = ["RULES", "Fallback", "RuleTable", "lower_graph"]
