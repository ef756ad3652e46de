"""The combine seam: rows back in slot order, times their routing weight, summed over a token's experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..spec import DTYPES
from .aten import POINTWISE
from .dispatch import SCATTERED, SORTED, Axes, Order, first, is_inverse
from .pattern import P, match
from .refusal import Refused, describe, require
from .values import Value, numel

#: The sum over the K slots of a token.
SUM = P.op("sum", P.any("slots"), P.op_list(1))


@dataclass(frozen=True, slots=True)
class Combined:
    """``rows`` [N, H] in ``order``, ``weights`` [T, K] (in any shape of N elements, in slot order), and the dtypes in
    which a weighted row and the sum are held."""

    rows: Value
    weights: Value
    order: Order
    row_dtype: torch.dtype
    out_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Shape:
    """What the outermost sum alone says: [T, K, H] slots summed over K."""

    slots: Value
    out_dtype: torch.dtype


def outer(out: Value) -> Shape:
    """The sum that ``out`` [T, H], or a cast of it, is."""
    total = first(out) if out.op == "cast" else out
    if _bits(out.dtype) > _bits(total.dtype):  # the region ends at the sum: its rounding is the model's
        raise Refused("combine", f"the sum is widened to {out.dtype}", out)
    found = match(SUM, total)
    if found is None or len(found.slots.shape) != 3:
        raise Refused("combine", f"not a sum over a token's experts: {describe(out)}", out)
    return Shape(found.slots, out.dtype)


def combined(shape: Shape, axes: Axes) -> Combined:
    """The weighted rows in the sum. Tries each way to read it; raises Refused with the reason of the last."""
    reason = Refused("combine", f"the summed rows are not weighted: {describe(shape.slots)}", shape.slots)
    slots, order, dtype = _unpermuted(shape.slots, axes)
    for rows, weight in _products(slots):
        try:
            return _weighted(rows, weight, order, dtype, shape, axes)
        except Refused as refused:
            reason = refused
    raise reason


def _bits(dtype: torch.dtype) -> int:
    """How wide a float is; numbers that are no floats count as none."""
    return torch.finfo(dtype).bits if dtype.is_floating_point else 0


def _unpermuted(slots: Value, axes: Axes) -> tuple[Value, Order, torch.dtype]:
    """``slots`` without reshapes, casts and the inverse permutation around the weighted rows, the order that leaves
    the rows in, and the narrowest dtype on the way."""
    narrowest, order, value = slots.dtype, Order(None), slots
    while True:
        if value.op == "reshape" or (value.op == "cast" and {value.dtype, first(value).dtype} <= DTYPES.keys()):
            value = first(value)
            narrowest = min(narrowest, value.dtype, key=_bits)
        elif value.op == "gather" and order.perm is None and (perm := _inverted(value, axes)) is not None:
            value, order = first(value), Order(perm)
        else:
            return value, order, narrowest


def _inverted(gathered: Value, axes: Axes) -> Value | None:
    """The permutation that gathering with the index of ``gathered`` undoes."""
    index = gathered.args[1]
    assert isinstance(index, Value)
    found = match(SCATTERED, index)
    perm = found.index if found is not None else None
    if found is None and (resorted := match(SORTED, index)) is not None and match(SORTED, resorted.keys) is not None:
        perm = resorted.keys
    if perm is None:
        return None
    require(is_inverse(index, perm, axes), "combine", "the rows are not brought back in slot order", gathered)
    return perm  # type: ignore[no-any-return]


def _products(value: Value) -> Iterator[tuple[Value, Value]]:
    """(rows, weight) for both ways to read a product of rows with one number a row."""
    if value.op == "mul" and len(value.args) == 2:
        for rows, weight in (value.args, value.args[::-1]):
            if isinstance(rows, Value) and isinstance(weight, Value):
                narrow = first(weight) if weight.op == "expand" else weight
                if narrow.shape and narrow.shape[-1] == 1:
                    yield rows, narrow


def _weighted(rows: Value, weight: Value, order: Order, row_dtype: torch.dtype, shape: Shape, axes: Axes) -> Combined:
    weight = _bare(weight)
    inner_order = order
    rows = _bare(rows)
    if order.perm is None and rows.op == "gather" and (perm := _inverted(rows, axes)) is not None:
        rows, inner_order = _bare(first(rows)), Order(perm)  # unpermuted before the weight
    if order.perm is not None:
        if not (weight.op == "gather" and weight.args[1] is order.perm):
            raise Refused("weights", f"the rows are sorted, but their weights are not: {describe(weight)}", weight)
        weight = first(weight)
    require(weight.dtype in DTYPES, "weights", f"the routing weights are {weight.dtype}", weight)
    require(
        numel(weight.shape) == axes.slots,
        "weights",
        f"the routing weights are {describe(weight)}, not one a slot",
        weight,
    )
    return Combined(rows, weight, inner_order, row_dtype, shape.out_dtype)


def _bare(value: Value) -> Value:
    """``value`` without reshapes, and without casts to a wider dtype."""
    while value.op == "reshape" or (value.op == "cast" and _bits(value.dtype) > _bits(first(value).dtype) > 0):
        value = first(value)
    return value


def below_row_ops(rows: Value, is_product: Callable[[Value], bool]) -> Value:
    """The result of the down projection under row-wise work such as a norm: every operation between them is
    element-wise, with operands that are the same for all rows, or reduces a row to one number."""
    found: list[Value] = []
    stack, seen = [rows], set()
    while stack:
        value = stack.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if is_product(value):
            if value not in found:
                found.append(value)
            continue
        if value.shape[:1] != rows.shape[:1]:  # a parameter of the norm: the same for all rows
            continue
        reduces = value.op in ("mean", "sum", "amax") and value.args[1] == (len(first(value).shape) - 1,)
        keeps_rows = value.op == "reshape" and value.shape[0] == first(value).shape[0]
        require(
            value.op in POINTWISE or value.op == "cast" or reduces or keeps_rows,
            "combine",
            f"work after the experts is not row by row: {describe(value)}",
            value,
        )
        stack.extend(value.operands)
    require(len(found) == 1, "combine", "the summed rows do not follow from one down projection", rows)
    return found[0]
