"""Recognition with a memory: windows that are the same graph but for their nodes' names are proved once."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import _torch
from ..report import Reject
from ..source import where
from .effects import Effects, is_dead
from .operands import Operand
from .recognise import Failure, Match, recognise
from .values import dim
from .window import Window, example

Modes = dict[torch.fx.Node, tuple[bool | None, tuple[torch.fx.Node, ...]]]


@dataclass(slots=True)
class Recogniser:
    """One per backend call. ``distinct`` counts the windows that were really proved."""

    _known: dict[Any, tuple[Match | Failure, dict[torch.fx.Node, int]]]
    distinct: int = 0

    def __init__(self) -> None:
        self._known = {}
        self.distinct = 0

    def __call__(self, window: Window, modes: Modes) -> Match | Reject:
        """The proof of ``window``; ``modes`` as :func:`~.window.modes` gives them."""
        if (inside := next(filter(_transforms, window.nodes), None)) is not None:  # may not even be run alone
            return Reject(where(inside), "transform", "the layer runs under a transform of torch.func")
        key, place, blocked = _seen(window, modes)
        everything = list(place)
        found = self._known.get(key)
        if found is None:
            self.distinct += 1
            outcome = recognise(window, blocked, modes[window.nodes[0]][1])
            found = self._known[key] = outcome, place
        outcome, old = found
        to = {n: everything[i] for n, i in old.items()}
        if isinstance(outcome, Failure):
            return Reject(where(to.get(outcome.at, outcome.at)), outcome.code, outcome.why)
        return outcome if old is place else moved(outcome, to.__getitem__)


def _transforms(node: torch.fx.Node) -> bool:
    """Whether ``node`` is under a transform of ``torch.func``, or opens or closes one."""
    held = example(node)
    opens = str(getattr(node.target, "__module__", "")).startswith("torch._functorch")
    return opens or (held is not None and _torch.is_transformed(held))


def fingerprint(window: Window, modes: Modes) -> str:
    """A digest of all that recognition can see of ``window``, the same in every process."""
    text = repr(_seen(window, modes)[0])
    return hashlib.sha256(re.sub(r" at 0x[0-9a-f]+", "", text).encode()).hexdigest()[:24]


def _seen(window: Window, modes: Modes) -> tuple[Any, dict[torch.fx.Node, int], dict[torch.fx.Node, bool]]:
    """The window without its nodes' names, each node's place in it, and the nodes with gradients switched off."""
    # where the sum itself has gradients off, the whole region has, and nothing inside is cut off by surprise
    graded = modes[window.ends[-1]][0] is not False
    blocked = {n: graded and modes[n][0] is False for n in window.nodes}
    place = {n: i for i, n in enumerate([*window.leaves, *window.nodes])}
    return _key(window, place, blocked, modes[window.nodes[0]][1]), place, blocked


def moved(match: Match, to: Callable[[torch.fx.Node], torch.fx.Node]) -> Match:
    """``match`` on the nodes of another window."""

    def operand(o: Operand) -> Operand:
        return replace(o, node=to(o.node))

    return replace(
        match,
        end=to(match.end),
        nodes=tuple(map(to, match.nodes)),
        interior=frozenset(map(to, match.interior)),
        x=operand(match.x),
        idx=operand(match.idx),
        weights=None if match.weights is None else operand(match.weights),
        w1=operand(match.w1),
        b1=None if match.b1 is None else operand(match.b1),
        w2=operand(match.w2),
        b2=None if match.b2 is None else operand(match.b2),
        constants=tuple(map(to, match.constants)),
        order=None if match.order is None else to(match.order),
        effects=Effects(
            {to(n): held for n, held in match.effects.storages.items()},
            {to(n): written for n, written in match.effects.writes.items()},
            frozenset(map(to, match.effects.other)),
        ),
    )


def _key(
    window: Window,
    place: dict[torch.fx.Node, int],
    blocked: dict[torch.fx.Node, bool],
    autocasts: tuple[torch.fx.Node, ...],
) -> Any:
    inside = set(window.nodes)
    storages: dict[int, int] = {}
    leaves = tuple(_meta(n, storages) for n in window.leaves)
    nodes = tuple(
        (
            n.op,
            n.target,
            _frozen(n.args, place),
            _frozen(n.kwargs, place),
            blocked[n],
            _requires_grad(n),
            any(u not in inside and not is_dead(u) for u in n.users),
        )
        for n in window.nodes
    )
    ends = tuple(place[n] for n in (window.up, window.down, *window.ends))
    return leaves, nodes, ends, tuple(_frozen(a.args, place) for a in autocasts)


def _requires_grad(node: torch.fx.Node) -> bool:
    value = node.meta.get("example_value")
    return isinstance(value, torch.Tensor) and value.requires_grad


def _meta(node: torch.fx.Node, storages: dict[int, int]) -> Any:
    """What a leaf is, and with which other leaves it shares memory."""
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor):  # a size, a number, or the body of a higher-order operator
        return repr(value), node.target if node.op == "get_attr" else None
    storage = storages.setdefault(value.untyped_storage()._cdata, len(storages))
    sizes = tuple(str(dim(s)) for s in (*value.shape, *value.stride()))
    return sizes, value.dtype, value.device, value.requires_grad, storage


def _frozen(arg: Any, place: dict[torch.fx.Node, int]) -> Any:
    if isinstance(arg, torch.fx.Node):
        return ("node", place.get(arg, arg.name))
    if isinstance(arg, (tuple, list)):
        return (type(arg).__name__, *(_frozen(a, place) for a in arg))
    if isinstance(arg, dict):
        return tuple((k, _frozen(v, place)) for k, v in arg.items())
    if isinstance(arg, slice):
        return ("slice", *(_frozen(a, place) for a in (arg.start, arg.stop, arg.step)))
    return (type(arg).__name__, repr(arg))
