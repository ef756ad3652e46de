"""The nodes that go when a region is replaced, and the proof that nobody misses them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable

import torch

from ..source import where
from .effects import is_dead
from .refusal import Refused
from .shadow import Shadow
from .window import Window


def interior(window: Window, seen: Shadow, end: torch.fx.Node, kept: set[torch.fx.Node]) -> frozenset[torch.fx.Node]:
    """The nodes from the up projection to ``end``, with the in-place ones between. Refuses where one is read outside
    (its value would have to be computed twice), does more than give a value, or where a hook waits for a gradient that
    would no longer come. ``kept`` are the nodes whose values the operators read."""
    order = {n: i for i, n in enumerate(window.nodes)}
    above = _closure({end}, lambda n: n.all_input_nodes, order)
    below = _closure({window.up}, lambda n: [u for u in n.users if order.get(u, len(order)) <= order[end]], order)
    between = above & below
    effects = seen.effects
    held = frozenset().union(*(effects.storages.get(n, frozenset()) for n in between if n is not end))
    inplace = {n for n in below - between if not n.users and (own := effects.storages.get(n)) and own <= held}
    gone = between | inplace
    for node in gone:
        if node in effects.other:
            raise Refused("escape", f"{node.name}, inside the region, does more than give a value")
        for storage in effects.writes.get(node, ()):
            _prove_unseen(node, storage, gone, window, seen, order)
        if node is end:
            continue
        for user in node.users:
            if user not in gone and not is_dead(user):
                raise Refused("escape", f"{node.name}, inside the region, is read outside of it at {where(user)}")
    for node in above - _closure(kept, lambda n: n.all_input_nodes, order) - gone:
        for user in node.users:
            if user not in above and isinstance(user.target, torch._ops.HigherOrderOperator):
                raise Refused("escape", f"{user.name} waits for the gradient of {node.name}, which the region computes")
    return frozenset(gone)


def _closure(
    start: set[torch.fx.Node],
    step: Callable[[torch.fx.Node], Iterable[torch.fx.Node]],
    within: Container[torch.fx.Node],
) -> set[torch.fx.Node]:
    """``start`` and what can be reached from it by ``step``, in ``within``."""
    found, stack = {n for n in start if n in within}, [n for n in start if n in within]
    while stack:
        for node in step(stack.pop()):
            if node in within and node not in found:
                found.add(node)
                stack.append(node)
    return found


def _prove_unseen(
    writer: torch.fx.Node,
    storage: int,
    gone: set[torch.fx.Node],
    window: Window,
    seen: Shadow,
    order: dict[torch.fx.Node, int],
) -> None:
    """``writer`` goes, and with it what it writes into ``storage``: nobody else may read that afterwards."""
    for node in seen.effects.touching(storage, [*window.leaves, *window.nodes]):
        if node in gone:
            continue
        later = [u for u in node.users if u not in gone and order.get(u, len(order)) > order[writer]]
        if node in window.leaves or order[node] > order[writer] or not all(map(is_dead, later)):
            raise Refused("escape", f"{writer.name}, inside the region, writes what is read outside of it")
