"""From a match and a plan to an edited graph."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import ops  # noqa: F401  registers the operators
from ..digest import digest
from ..spec import Combine
from .effects import Effects
from .operands import Operand
from .recognise import Match
from .window import example


@dataclass(frozen=True, slots=True)
class Emitted:
    """The operators of one region, in the graph but not yet read: ``out`` takes the place of the region's end."""

    match: Match
    added: tuple[torch.fx.Node, ...]
    out: torch.fx.Node


def emit(graph: torch.fx.Graph, match: Match, plan: str, *, recompute_all: bool) -> Emitted:
    """Write the operators of ``match`` in front of its end."""
    end = match.end
    before = set(graph.nodes)
    with graph.inserting_before(end):
        out = _emit(graph, match, plan, recompute_all=recompute_all)
    added = tuple(n for n in graph.nodes if n not in before)
    for node in added:
        node.stack_trace = end.stack_trace
        if "nn_module_stack" in end.meta:
            node.meta["nn_module_stack"] = end.meta["nn_module_stack"]
    out.meta["example_value"] = end.meta.get("example_value")
    return Emitted(match, added, out)


def replace(graph: torch.fx.Graph, emitted: Sequence[Emitted]) -> None:
    """Let the operators take the regions' places, and erase what is dead.

    All regions at once: the end of one may be an operand of the next, and regions beside each other may share nodes.
    """
    for one in emitted:
        one.match.end.replace_all_uses_with(one.out)
    for one in emitted:
        _erase(graph, one.match)


def rewrite(graph: torch.fx.Graph, match: Match, plan: str, *, recompute_all: bool) -> None:
    """Replace the one region of ``match`` in ``graph``."""
    replace(graph, [emit(graph, match, plan, recompute_all=recompute_all)])


def _emit(graph: torch.fx.Graph, match: Match, plan: str, *, recompute_all: bool) -> torch.fx.Node:
    tail = (str(match.spec.ops), plan, digest())
    consts = list(match.constants)
    x, idx, w1, w2 = (_node(graph, o) for o in (match.x, match.idx, match.w1, match.w2))
    weights, b1, b2 = (None if o is None else _node(graph, o) for o in (match.weights, match.b1, match.b2))
    if match.spec.training and not recompute_all:
        routed = graph.call_function(torch.ops.megamoe.route_metadata.default, (idx, *tail))
        order, inverse, offsets = (_item(graph, routed, i) for i in range(3))
        up = graph.call_function(
            torch.ops.megamoe.experts_up.default, (x, order, inverse, offsets, w1, b1, consts, *tail)
        )
        a, h = _item(graph, up, 0), _item(graph, up, 1)
        out = graph.call_function(
            torch.ops.megamoe.experts_down.default, (a, h, order, inverse, offsets, weights, w2, b2, consts, *tail)
        )
    else:
        out = graph.call_function(torch.ops.megamoe.experts.default, (x, idx, weights, w1, b1, w2, b2, consts, *tail))
    if match.spec.ops.combine is Combine.ROWS and match.order is not None:
        out = graph.call_function(operator.getitem, (out, match.order))
    held = example(match.end)
    if held is not None and held.dim() != 2:
        shape = tuple(_size(s) for s in held.shape)
        out = graph.call_method("reshape", (out, *shape))
    return out


def _size(size: Any) -> int:
    return int(size) if isinstance(size, int) else -1


def _item(graph: torch.fx.Graph, node: torch.fx.Node, i: int) -> torch.fx.Node:
    return graph.call_function(operator.getitem, (node, i))


def _node(graph: torch.fx.Graph, operand: Operand) -> torch.fx.Node:
    node = operand.node
    if operand.cast is not None:
        node = graph.call_method("to", (node, operand.cast))
    if operand.reshape is not None:
        node = graph.call_method("reshape", (node, *operand.reshape))
    if operand.wrap is not None:
        negative = graph.call_function(operator.lt, (node, 0))
        wrapped = graph.call_function(operator.add, (node, operand.wrap))
        node = graph.call_function(torch.where, (negative, wrapped, node))
    return node


def _erase(graph: torch.fx.Graph, match: Match) -> None:
    """Erase the interior, and then what nothing reads any more: sorts, counts, gathered rows, the inverse order."""
    present = set(graph.nodes)
    doomed = [n for n in match.nodes if n in match.interior and n in present]
    alive = [n for n in match.nodes if n not in match.interior and n in present]
    while doomed:
        for node in reversed(doomed):
            if not node.users:
                graph.erase_node(node)
        doomed = _unread(alive, match.effects) or _only_written(alive, graph, match.effects)
        gone = set(doomed)
        alive = [n for n in alive if n not in gone]


def _unread(alive: list[torch.fx.Node], effects: Effects) -> list[torch.fx.Node]:
    """Values that are read by nobody, or by such values only."""
    found: set[torch.fx.Node] = set()
    for node in reversed(alive):
        if effects.pure(node) and all(user in found for user in node.users):
            found.add(node)
    return [n for n in alive if n in found]


def _only_written(alive: list[torch.fx.Node], graph: torch.fx.Graph, effects: Effects) -> list[torch.fx.Node]:
    """A tensor made here, its views and the writes into it, where nothing else reads any of them."""
    here = set(alive)
    present = set(graph.nodes)
    for storage in dict.fromkeys(s for n in alive for s in effects.writes.get(n, ())):
        group = effects.touching(storage, (n for n in effects.storages if n in present))
        members = set(group)
        closed = all(user in members for node in group for user in node.users)
        alone = all(n not in effects.other and effects.writes.get(n, _NONE) <= {storage} for n in group)
        if closed and alone and members <= here:
            return group
    return []


_NONE: frozenset[int] = frozenset()
