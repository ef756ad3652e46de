"""Which node of the graph holds each operand of a region where the region ends."""

from __future__ import annotations

from dataclasses import dataclass

import sympy
import torch

from .dispatch import first
from .refusal import Refused, describe, require
from .shadow import Shadow
from .values import Dim, Value, dim
from .window import MOVES, example, name_of


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the region: ``node`` holds it but for a ``cast``, a ``reshape`` and a ``wrap``, applied in that
    order."""

    node: torch.fx.Node
    cast: torch.dtype | None = None
    reshape: tuple[int, ...] | None = None  #: -1 for the rest
    wrap: int | None = None  #: negative indices count from here backwards

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows it."""
        value = example(self.node)
        return value is not None and value.requires_grad


def operand(seen: Shadow, value: Value, dtype: torch.dtype | None, shape: tuple[Dim, ...] | None) -> Operand:
    """The node that holds ``value``, or what it is a cast or reshape of; ``dtype`` and ``shape`` are what is wanted."""
    wanted = dtype if dtype is not None else value.dtype
    nearest: torch.fx.Node | None = None
    below = value
    while True:
        node = seen.carrier(below)
        if node is not None:
            held = example(node)
            assert held is not None
            if shape is None or (held.dim() == len(shape) and dim(held.shape[-1]) == shape[-1]):
                return Operand(node, None if held.dtype is wanted else wanted)
            nearest = nearest or node
        if below.op == "reshape":
            shape = below.shape if shape is None else shape
        elif below.op != "cast" or nearest is not None:
            break
        below = first(below)
    require(nearest is not None, "operand", f"no node holds {describe(below)} where the region ends", below)
    assert nearest is not None and shape is not None
    require(all(isinstance(s, int) for s in shape), "operand", f"no node holds {describe(below)} as [T, K]", value)
    held = example(nearest)
    assert held is not None
    return Operand(nearest, None if held.dtype is wanted else wanted, tuple(s for s in shape if isinstance(s, int)))


def never_negative(ids: torch.fx.Node) -> bool:
    """Whether the graph shows that ``ids`` are positions: what a top-k, a sort or an argmax gives."""
    for _ in range(8):
        name = name_of(ids)
        if name in _POSITIONS:
            return True
        if name not in MOVES and name not in _WHOLE or not ids.all_input_nodes:
            return False
        ids = ids.all_input_nodes[0]
    return False


_POSITIONS = frozenset("topk sort argsort argmax argmin multinomial".split())
_WHOLE = frozenset("long int".split())


def number(seen: Shadow, constant: sympy.Expr) -> torch.fx.Node:
    """The node that holds the number ``constant``. Raises Refused where there is none."""
    for node, held in seen.scalars.items():
        if held.node.expr == constant:
            return node
    raise Refused("operand", f"no node holds the constant {constant}")
