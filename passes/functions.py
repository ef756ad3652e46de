"""Bodies of ``torch.autograd.Function``: Dynamo makes every intermediate of the forward body an output of it, which
would let no interior value of a region be private. Outputs that nobody reads are dropped, with their gradients."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch

from . import window
from .modules import child

_INDICES = ("dirty_idx", "non_differentiable_idx")  # keyword arguments that number the outputs


def drop_unread_outputs(module: torch.fx.GraphModule) -> None:
    """Drop, at each ``autograd_function_apply`` of ``module`` whose forward body has expert matmuls, the outputs that
    neither the graph nor the backward body reads. Bodies that several calls share are left."""
    calls = [n for n in module.graph.nodes if n.target is torch.ops.higher_order.autograd_function_apply]
    owners = Counter(id(child(module, body)) for call in calls for body in call.args[:2])
    for call in calls:
        forward, backward = (child(module, body) for body in call.args[:2])
        if forward is None or backward is None or max(owners[id(forward)], owners[id(backward)]) > 1:
            continue
        if next(window.find(forward.graph), None) is not None:
            _drop(call, forward, backward)


def _drop(call: torch.fx.Node, forward: torch.fx.GraphModule, backward: torch.fx.GraphModule) -> None:
    end, result = _output(forward), _output(forward).args[0]
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        return
    outputs, saved = result
    gradients = [n for n in backward.graph.nodes if n.op == "placeholder"]
    reads = _reads(call)
    if reads is None or not isinstance(outputs, (tuple, list)) or not isinstance(saved, (tuple, list)):
        return
    if len(gradients) != len(outputs) + len(saved):
        return
    numbers: dict[str, Any] = {name: call.kwargs.get(name) or () for name in _INDICES}
    written = numbers["dirty_idx"]
    kept = [i for i in range(len(outputs)) if i in reads or gradients[i].users or i in written]
    if len(kept) == len(outputs):
        return
    place = {old: new for new, old in enumerate(kept)}
    for index, readers in reads.items():
        for reader in readers:
            reader.args = (call, place[index])
    end.args = ((tuple(outputs[i] for i in kept), saved),)
    for i in sorted(set(range(len(outputs))) - set(kept)):
        backward.graph.erase_node(gradients[i])
    moved = {name: [place[i] for i in old if i in place] for name, old in numbers.items() if name in call.kwargs}
    call.kwargs = {**call.kwargs, **moved}
    example = call.meta.get("example_value")
    if isinstance(example, (tuple, list)) and len(example) == len(outputs):
        call.meta["example_value"] = type(example)(example[i] for i in kept)
    forward.recompile()
    backward.recompile()


def _output(module: torch.fx.GraphModule) -> torch.fx.Node:
    found: torch.fx.Node = next(n for n in reversed(module.graph.nodes) if n.op == "output")
    return found


def _reads(call: torch.fx.Node) -> dict[int, list[torch.fx.Node]] | None:
    """Output -> the nodes that pick it; None where ``call`` is read in another way."""
    reads: dict[int, list[torch.fx.Node]] = {}
    for user in call.users:
        index: Any = user.args[1] if user.target is operator.getitem else None
        if not isinstance(index, int):
            return None
        reads.setdefault(index, []).append(user)
    return reads
