"""Operators that check something stay in graphs, though nobody uses their result.

This file is the same in every package that has it; the original is tools/shared/_kept_checks.py.
"""

from __future__ import annotations

import torch

__all__ = ["keep_checks"]


def keep_checks() -> None:
    """Tell torch that operators which check something are no dead code, though nobody uses their result. Before torch
    2.13 it does not know so of those that raise the errors of linear algebra, and in no version of an assertion without
    a message."""
    for check in (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.default):
        torch.fx.has_side_effect(check)
