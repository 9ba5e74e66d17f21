"""Functions that Dynamo does not look into.

This file is the same in every package that has it; the original is tools/shared/_dynamo_frames.py.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hide_from_dynamo"]


def hide_from_dynamo(function: Any, reason: str = "") -> None:
    """Have Dynamo run ``function``, and all that it calls, as it is. ``torch.compiler.disable`` does so with one frame
    more in every call, and imports Dynamo. ``reason``: why a graph that Dynamo traces breaks there."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
