"""The proof that experts are masked by their group: only those of the best groups may be chosen."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..router_spec import Best, Groups
from .dispatch import first
from .refusal import Refused, describe, require
from .router_steps import constant, opaque, topk, unwidened
from .values import Table, Value


@dataclass(frozen=True, slots=True)
class Mask:
    """Experts whose choice became ``fill``: those where ``mask`` is not ``kept_where``."""

    at: Value
    mask: Value
    kept_where: bool
    fill: float


def masked_of(choice: Value) -> tuple[Value, Mask | None]:
    """``choice`` before experts were masked, and the mask."""
    value = unwidened(choice)
    inner = first(value) if value.op == "reshape" else value
    if inner.op == "masked_fill":
        base, mask, fill = inner.args
        kept_where = False
    elif inner.op == "where":
        mask, base, fill = inner.args
        kept_where = True
    else:
        return choice, None
    fill = constant(fill)
    require(fill in (0, float("-inf")), "router", f"experts are masked with {fill!s}, neither 0 nor -inf", inner)
    assert isinstance(base, Value) and isinstance(mask, Value) and isinstance(fill, (int, float))
    return base, Mask(inner, mask, kept_where, float(fill))


def groups_of(masked: Mask, choice: Value, grouped: Value, experts: int, table: Table) -> Groups:
    """The best groups, of which ``masked`` lets the experts through; ``grouped`` is ``choice`` as it was masked."""
    value, kept = masked.mask, masked.kept_where
    tokens = choice.shape[0]
    spread = False
    while True:
        flips = value.op == "logical_not" or (value.op == "bitwise_not" and value.dtype is torch.bool)
        if flips or (value.op == "eq" and value.args[1] in (0, False)):
            kept, value = not kept, first(value)
        elif value.op == "cast" or (value.op == "ne" and value.args[1] in (0, False)):
            value = first(value)
        elif value.op == "expand" and first(value).shape[2:] == (1,) and len(value.shape) == 3:
            spread, value = True, first(value)
        elif value.op == "reshape" and (value.shape == (tokens, experts) or value.shape[2:] == (1,)):
            value = first(value)
        else:
            break
    require(
        value.op == "scatter" and len(value.shape) == 2 and value.shape[0] == tokens and value.args[1] in (1, -1),
        "router",
        "experts are masked by something else than their group",
        masked.at,
    )
    base, _, index, mark = value.args
    marks = [constant(base), constant(mark)]
    require(
        sorted(m for m in marks if isinstance(m, (int, float))) == [0, 1],
        "router",
        "the mask of the groups does not tell the best from the others",
        masked.at,
    )
    count = value.shape[1]
    assert isinstance(count, int) and isinstance(index, Value)  # a divisor of E, where the mask reaches its experts
    wide = (tokens, count, experts // count)
    require(spread or grouped.shape == wide, "router", "a group's mask does not reach its experts", masked.at)
    require(kept is bool(marks[1]), "router", "the best groups are masked, not the others", masked.at)
    found = topk(index, 1)
    require(found is not None, "router", "the groups are not the index of a top-k", index)
    assert found is not None
    best, kept_groups = found
    return Groups(count, kept_groups, _best(best, table.reshape(choice, wide), masked.at), masked.fill)


def _best(best: Value, grouped: Value, at: Value) -> Best:
    """What groups are ranked by; ``grouped`` is the choice [T, G, E / G]."""
    if best.op == "amax" and best.args == (grouped, (2,)):
        return Best.MAX
    largest = opaque(best, "max.0")
    if largest is not None and largest[0] is grouped and largest[1] in (2, -1):
        return Best.MAX
    if best.op == "sum" and best.args[1] == (2,) and (found := topk(first(best), 0)) is not None:
        of, count = found
        require(of is grouped and count in (1, 2), "router", f"a group is ranked by its best {count}", at)
        return Best.TOP2 if count == 2 else Best.MAX
    raise Refused("router", f"groups are ranked by something else than their best experts: {describe(best)}", at)
