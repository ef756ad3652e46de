"""The user's source line behind a graph node."""

from __future__ import annotations

import os
import re

import torch

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_TORCH = os.path.dirname(torch.__file__) + os.sep


def where(node: torch.fx.Node) -> str:
    """``file:line`` of the innermost frame outside of torch, ``"<graph>:<name>"`` where the trace has none."""
    frames = _FRAME.findall(node.stack_trace or "")
    user = [frame for frame in frames if not frame[0].startswith(_TORCH)] or frames
    return ":".join(user[-1]) if user else f"<graph>:{node.name}"
