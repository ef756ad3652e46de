"""Running nodes of a graph one by one, on fake or on real tensors, with the autocast regions they open."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import _torch


class Unsupported(Exception):
    """The nodes hold something that cannot be followed."""


def run_nodes(
    nodes: Sequence[torch.fx.Node],
    env: dict[torch.fx.Node, Any],
    autocasts: Sequence[torch.fx.Node],
    call: Callable[[torch.fx.Node, dict[torch.fx.Node, Any]], Any] | None = None,
) -> None:
    """Run ``nodes`` in order and put their results into ``env``, inside the autocast regions that ``autocasts`` open.

    ``call`` runs one node, :func:`call_node` where it is None. Switching gradients on and off is the caller's matter.
    """
    call = call_node if call is None else call
    open_regions: dict[torch.fx.Node, contextlib.ExitStack] = {}
    with contextlib.ExitStack() as stack:
        for opened in autocasts:
            stack.enter_context(_autocast(opened))
        for node in nodes:
            if _torch.enters_autocast(node):
                region = open_regions[node] = stack.enter_context(contextlib.ExitStack())
                region.enter_context(_autocast(node))
            elif _torch.exits_autocast(node):
                if node.args[0] not in open_regions:
                    raise Unsupported("an autocast region ends inside the window")
                open_regions.pop(node.args[0]).close()  # type: ignore[arg-type]
            elif _torch.switches(node):  # its other end may lie outside, and would never run
                raise Unsupported(f"a mode or a transform starts or ends inside the window ({node.name})")
            elif not _torch.sets_grad_enabled(node):
                env[node] = call(node, env)


def _autocast(node: torch.fx.Node) -> torch.autocast:
    args: tuple[Any, ...] = node.args
    return torch.autocast(*args)


def call_node(node: torch.fx.Node, env: dict[torch.fx.Node, Any]) -> Any:
    """The result of ``node``."""
    args = torch.fx.map_arg(node.args, env.__getitem__)
    kwargs = torch.fx.map_arg(node.kwargs, env.__getitem__)
    if node.op == "call_function" and callable(node.target):
        return node.target(*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    raise Unsupported(f"a {node.op} node inside the window")
