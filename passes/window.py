"""Where to look: the piece of a graph around two expert matmuls that depend on each other.

A window is a run of consecutive nodes, so every mutation between its ends is inside it. It reaches from the first node
that routes rows to the experts down to the sum that brings them back.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch
from ..report import Reject
from ..source import where

#: Grouped matmuls, by the last part of their name.
GROUPED = frozenset({"_grouped_mm", "grouped_mm", "grouped_mm_fallback"})
#: Matmuls that may take one gathered expert matrix a row.
BATCHED = frozenset({"bmm", "matmul", "baddbmm"})
#: Calls that only move rows or elements, or gather and mask rows: looked through on the way up to x, idx and weights.
MOVES = frozenset(
    "view reshape flatten unflatten unsqueeze squeeze expand expand_as contiguous clone to type float bfloat16 half"
    " double type_as transpose permute t swapaxes mT T chunk split getitem select narrow index_select gather take"
    " masked_fill masked_fill_ repeat_interleave setitem index_put index_put_ broadcast_to getattr".split()
)
#: How many nodes the ways from one expert matmul to the other, and from there to the sum, may have.
REACH = 96


def name_of(node: torch.fx.Node) -> str:
    """The last part of what ``node`` calls: ``"bmm"`` for the method, the function and the operator."""
    target: Any = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).split(".")[1]
    return getattr(target, "__name__", "")


def example(node: torch.fx.Node) -> torch.Tensor | None:
    """The fake tensor that ``node`` gave when it was traced, None where it gave none."""
    value = node.meta.get("example_value")
    return value if isinstance(value, torch.Tensor) else None


@dataclass(slots=True)
class Window:
    """``nodes`` are consecutive; ``leaves`` feed them from before. ``ends`` are candidates for the region's output,
    last first: the sum over a token's experts, and casts of it."""

    up: torch.fx.Node
    down: torch.fx.Node
    nodes: list[torch.fx.Node]
    leaves: list[torch.fx.Node]
    ends: list[torch.fx.Node]


def find(graph: torch.fx.Graph) -> Iterator[Window | Reject]:
    """The windows of ``graph`` in order; a Reject for each pair of expert matmuls without one."""
    anchors = [n for n in graph.nodes if _is_anchor(n)]
    if not anchors:
        return
    position = {n: i for i, n in enumerate(graph.nodes)}
    everything = list(graph.nodes)
    marked = set(anchors)
    paired: set[torch.fx.Node] = set()
    for down in anchors:
        ups = _anchors_above(down, marked)
        if not ups:
            continue
        paired |= {down, *ups}
        if len(ups) > 1:
            yield Reject(where(down), "separate-gate-up", "gate and up come from separate matmuls")
            continue
        yield _window(ups.pop(), down, position, everything)
    for lone in anchors:
        if lone not in paired:
            yield Reject(where(lone), "lone-matmul", "an expert matmul without a second one that depends on it")


def _is_anchor(node: torch.fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = name_of(node)
    if name in GROUPED:
        return True
    return name in BATCHED and any(_is_gathered(a) for a in node.all_input_nodes)


def _is_gathered(node: torch.fx.Node) -> bool:
    """Whether ``node`` holds rows of a tensor of at least three axes, picked by an integer tensor."""
    for _ in range(6):
        name = name_of(node)
        inputs = node.all_input_nodes
        if not inputs:
            return False
        if name in ("getitem", "index_select", "index") and len(inputs) > 1:
            base, index = example(inputs[0]), example(inputs[-1])
            return base is not None and index is not None and base.dim() >= 3 and _is_integer(index)
        if name not in MOVES:
            return False
        node = inputs[0]
    return False


def _is_integer(tensor: torch.Tensor) -> bool:
    return not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype is torch.bool)


def _anchors_above(down: torch.fx.Node, anchors: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """The nearest other anchors on the ways up from ``down``."""
    found: set[torch.fx.Node] = set()
    stack, seen = list(down.all_input_nodes), {down}
    while stack and len(seen) < REACH:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if node in anchors:
            found.add(node)
        elif node.op in ("call_function", "call_method") and not _ends_climb(node):
            stack.extend(node.all_input_nodes)
    return found


def _ends_climb(node: torch.fx.Node) -> bool:
    """Integers do not lead from one expert matmul to the other, and no sum lies between the two."""
    value = example(node)
    return (value is not None and not value.dtype.is_floating_point) or name_of(node) in _COMBINES


_COMBINES = frozenset({"sum", "index_add", "index_add_", "scatter_add", "scatter_add_"})


def _window(
    up: torch.fx.Node, down: torch.fx.Node, position: dict[torch.fx.Node, int], everything: Sequence[torch.fx.Node]
) -> Window | Reject:
    ends = _ends(down)
    if not ends:
        return Reject(
            where(down), "combine", "the rows of the second expert matmul are not summed over a token's experts"
        )
    last = max(map(position.__getitem__, ends))
    inner = _descendants(up, position, last)
    first = min(map(position.__getitem__, _needed(ends, inner)))
    nodes = list(everything[first : last + 1])
    while nodes and nodes[0].op in ("placeholder", "get_attr"):
        nodes.pop(0)
    if any(n.op not in ("call_function", "call_method") for n in nodes):
        nodes = [n for n in nodes if n.op != "get_attr"]
    inside = set(nodes)
    leaves = list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))
    return Window(up, down, nodes, leaves, ends)


def _ends(down: torch.fx.Node) -> list[torch.fx.Node]:
    """The sums that the rows of ``down`` run into, each followed by its casts, last first."""
    queue, seen = list(down.users), {down}
    while queue and len(seen) < REACH:
        node = queue.pop(0)
        if node in seen:
            continue
        seen.add(node)
        if name_of(node) == "sum" and _drops_an_axis(node):
            ends = [node]
            while len(ends[-1].users) == 1 and name_of(user := next(iter(ends[-1].users))) in _CASTS:
                if user.args and user.args[0] is not ends[-1]:
                    break
                ends.append(user)
            return ends[::-1]
        if example(node) is not None and node.op in ("call_function", "call_method"):
            queue.extend(node.users)
    return []


_CASTS = frozenset({"to", "type", "type_as", "float", "bfloat16", "half", "double"})


def _drops_an_axis(node: torch.fx.Node) -> bool:
    """A norm between down and combine sums too, but keeps the row axis: the combine goes from three axes to two."""
    before, after = example(node.all_input_nodes[0]), example(node)
    return before is not None and after is not None and before.dim() == after.dim() + 1 == 3


def _descendants(up: torch.fx.Node, position: dict[torch.fx.Node, int], last: int) -> set[torch.fx.Node]:
    inner, stack = {up}, [up]
    while stack:
        for user in stack.pop().users:
            if user not in inner and position[user] <= last:
                inner.add(user)
                stack.append(user)
    return inner


def _needed(ends: Sequence[torch.fx.Node], inner: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """``ends`` and what they follow from, up to the tokens, the router's choice and the expert parameters."""
    needed, stack = set(ends), list(ends)
    while stack:
        node = stack.pop()
        for above in _followed(node, inner):
            if above not in needed and above.op in ("call_function", "call_method"):
                needed.add(above)
                stack.append(above)
    return needed


def _followed(node: torch.fx.Node, inner: set[torch.fx.Node]) -> list[torch.fx.Node]:
    """Float arithmetic is followed only between the expert matmuls and the sum: elsewhere it is the model's own."""
    return [n for n in node.all_input_nodes if n in inner or _is_structure(n)]


def _is_structure(node: torch.fx.Node) -> bool:
    """Integer tensors, masks, and moves of anything; never a router's choice. Sizes are none: one that the graph worked
    out layers ago would stretch the window back to there."""
    name, value = name_of(node), node.meta.get("example_value")
    if isinstance(value, torch.Tensor):
        if node.target is operator.getitem and isinstance(node.args[0].meta.get("example_value"), (tuple, list)):  # type: ignore[union-attr]
            return _is_structure(node.args[0])  # type: ignore[arg-type]
        if value.dtype.is_floating_point:
            return name in MOVES
        return name not in ("argmax", "argmin", "multinomial")
    return isinstance(value, (tuple, list)) and name in ("sort", "argsort", "chunk", "split", "unbind")


def modes(graph: torch.fx.Graph) -> dict[torch.fx.Node, tuple[bool | None, tuple[torch.fx.Node, ...]]]:
    """For each node, what the graph itself last set gradient recording to, and the autocast regions open there."""
    grad: bool | None = None
    autocasts: tuple[torch.fx.Node, ...] = ()
    out: dict[torch.fx.Node, tuple[bool | None, tuple[torch.fx.Node, ...]]] = {}
    for node in graph.nodes:
        out[node] = (grad, autocasts)
        if _torch.sets_grad_enabled(node):
            grad = bool(node.args[0])
        elif _torch.enters_autocast(node):
            autocasts = (*autocasts, node)
        elif _torch.exits_autocast(node):
            autocasts = tuple(a for a in autocasts if a is not node.args[0])
    return out
