"""Functions that Dynamo does not look into."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["hide_from_dynamo"]


def hide_from_dynamo(function: Any, reason: str = "") -> None:
    """Have Dynamo run ``function``, and all that it calls, as it is.

    ``reason``: why a graph that it traces breaks there. As ``torch.compiler.disable`` does,
    without a frame more in every call, and without importing Dynamo.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = reason
