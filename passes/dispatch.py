"""The dispatch seam: which token, which slot and which expert each routed row belongs to.

Slot ``t*K + k`` is token ``t``'s choice number ``k``. Rows are in slot order, or in the order of a permutation of the
slots: row ``r`` is slot ``perm[r]``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .pattern import P, match
from .refusal import Refused, describe, require
from .values import Dim, Table, Value

#: ``histc`` of float32 ids with bins = E and range [0, E-1] puts id i at i*E/(E-1): exact while 1/(E-1) is far above
#: E times the float32 rounding of 6e-8.
HISTC_EXPERTS = 1024

SORTED = P.op("sort_index", P.any("keys"), 0, "ascending")
#: inverse[perm] = arange(N): where each slot's row is.
SCATTERED = P.alt(
    P.op("index_put", P.any("base"), P.op_list(P.any("index")), P.op("arange", 0, P.int("n"), 1), False),
    P.op("scatter", P.any("base"), 0, P.any("index"), P.op("arange", 0, P.int("n"), 1)),
)
#: x[perm // K]: row r holds token perm[r] // K.
TOKEN_OF_SLOT = P.op("floor_divide", P.any("slots"), P.int("k"))
COUNTS = P.op("cumsum", P.through("cast", P.op("histc", P.any("ids"), P.int("bins"), P.int("low"), P.int("high"))), 0)
#: Dtypes that hold every expert id, and every count up to 2**24 rows.
EXACT = (torch.float32, torch.float64, torch.int32, torch.int64)
#: sorted id >= E, one flag a row.
DROPPED = P.reshaped(P.op("ge", P.any("ids"), P.int("bound")))


@dataclass(frozen=True, slots=True)
class Order:
    """The order of rows: ``perm`` maps rows to slots, None where rows are slots."""

    perm: Value | None


@dataclass(frozen=True, slots=True)
class Axes:
    """The axes of a region (T, K, E, N = T*K) and the table its values come from."""

    tokens: Dim
    top_k: Dim
    experts: int
    slots: Dim
    table: Table


def permutation(perm: Value, axes: Axes) -> Value:
    """The keys that ``perm`` sorts: an index of a full sort over the slots is a permutation of them, so no slot is
    lost or doubled."""
    found = match(SORTED, perm)
    if found is None:
        raise Refused("order", f"the row order is not the index of an ascending sort: {describe(perm)}", perm)
    keys: Value = found.keys
    return keys


def is_inverse(inverse: Value, perm: Value, axes: Axes) -> bool:
    """Whether ``inverse[perm[r]] = r``: a scatter of 0..N-1 to ``perm``, or the sort index of ``perm`` itself."""
    resorted = match(SORTED, inverse)
    if resorted is not None:
        return resorted.keys is perm
    found = match(SCATTERED, inverse)
    return found is not None and found.index is perm and found.n == axes.slots


def tokens_of_rows(rows: Value, order: Order, axes: Axes) -> Value:
    """The token matrix ``x`` [T, H] whose rows ``rows`` [N, H] are, each token's row at its K slots.

    Masks that zero dropped rows, and casts, are looked through: both act on rows.
    """
    rows = unmasked(rows, order, axes)
    if rows.op == "reshape" and first(rows).op == "cast":  # autocast of a matmul in three axes
        rows = axes.table.reshape(first(first(rows)), rows.shape)
    elif rows.op == "cast":
        rows = unmasked(first(rows), order, axes)
    if (repeated := _repeated(rows, axes)) is not None:
        require(order.perm is None, "dispatch", "tokens are repeated in slot order, but the rows are sorted", rows)
        return repeated
    if rows.op != "gather":
        raise Refused("dispatch", f"the rows of the up projection are not gathered tokens: {describe(rows)}", rows)
    base, index = rows.args
    assert isinstance(base, Value) and isinstance(index, Value)
    if index is order.perm and axes.top_k > 1:
        if (repeated := _repeated(base, axes)) is not None:
            return repeated
        require(base.op == "gather", "dispatch", "sorted slots are used as token numbers", rows)
        base, slot_tokens = base.args  # x[token of slot][perm]
        assert isinstance(base, Value) and isinstance(slot_tokens, Value)
        _prove_tokens(slot_tokens, Order(None), axes)
    else:
        _prove_tokens(index, order, axes)
    require(base.shape[0] == axes.tokens, "dispatch", f"rows come from {base.shape[0]} tokens, not {axes.tokens}", rows)
    return base


def _repeated(rows: Value, axes: Axes) -> Value | None:
    """``x`` [T, H] where ``rows`` is x[:, None].expand(T, K, H) flattened."""
    width = rows.shape[-1]
    if axes.top_k == 1:  # nothing is repeated
        return None if rows.op == "gather" else axes.table.reshape(rows, (axes.tokens, width))
    wide = first(rows) if rows.op == "reshape" else rows
    if wide.op != "expand" or wide.shape != (axes.tokens, axes.top_k, width):
        return None
    narrow = first(wide)
    return axes.table.reshape(narrow, (axes.tokens, width)) if narrow.shape == (axes.tokens, 1, width) else None


def _prove_tokens(index: Value, order: Order, axes: Axes) -> None:
    """``index`` [N] is the token number of each row."""
    if order.perm is not None and index.op == "gather" and index.args[1] is order.perm:
        return _prove_tokens(first(index), Order(None), axes)
    slots = order.perm or axes.table.make("arange", (0, axes.slots, 1), (axes.slots,), index.dtype)
    if axes.top_k == 1 and index is slots:
        return None
    found = match(TOKEN_OF_SLOT, index)
    if found is not None:
        require(
            found.k == axes.top_k,
            "dispatch",
            f"rows are gathered with // {found.k}, but the router chose {axes.top_k} experts",
            index,
        )
        require(found.slots is slots, "dispatch", "tokens are gathered in another order than the experts'", index)
        return None
    every = axes.table.make("arange", (0, axes.tokens, 1), (axes.tokens,), index.dtype)
    repeated = axes.table.expand(
        axes.table.reshape(every, (axes.tokens, 1)), (axes.tokens, axes.top_k)
    )  # arange(T) with every entry K times
    if order.perm is None and index is axes.table.reshape(repeated, (axes.slots,)):
        return None
    raise Refused("dispatch", f"the row of a slot is not its token's: {describe(index)}", index)


def slot_ids(ids: Value, order: Order, axes: Axes) -> Value:
    """The expert of each slot [N], where ``ids`` has the expert of each row. Clamped ids are looked through where the
    rows are sorted: rows of dropped slots lie past the last offset."""
    if order.perm is None:
        return ids
    keys = permutation(order.perm, axes)
    if _is_clamped_down(ids, axes):
        ids = first(ids)
    sorted_keys = match(P.op("sort", P.any("keys"), 0, "ascending"), ids)
    if sorted_keys is not None:
        require(sorted_keys.keys is keys, "experts-index", "expert ids and row order come from different sorts", ids)
    elif ids.op == "gather" and ids.args[1] is order.perm:
        require(ids.args[0] is keys, "experts-index", "the gathered expert ids are not the ones that were sorted", ids)
    else:
        raise Refused("experts-index", f"the expert of a row is not the sorted id of its slot: {describe(ids)}", ids)
    return keys


def _is_clamped_down(ids: Value, axes: Axes) -> bool:
    """Whether ``ids`` are ids of which those past the last expert became the last expert's."""
    last = axes.experts - 1
    return (ids.op == "clamp" and ids.args[1] in (None, 0) and ids.args[2] == last) or (
        ids.op == "clamp_max" and ids.args[1] == last
    )


def counted_ids(offsets: Value, order: Order, axes: Axes) -> Value:
    """The ids [N] whose counts the group ``offsets`` accumulate, in slot order."""
    found = match(P.through("cast", COUNTS), offsets)
    if found is None:
        raise Refused(
            "offsets", f"the group offsets are not running counts of expert ids: {describe(offsets)}", offsets
        )
    step = offsets
    while True:
        require(step.dtype in EXACT, "offsets", f"ids or their counts are rounded to {step.dtype}", step)
        if step.op == "histc":  # has the dtype of the ids that it counts
            break
        step = first(step)
    require(
        found.bins == axes.experts and found.low == 0 and found.high == axes.experts - 1,
        "offsets",
        f"ids are counted in {found.bins} bins over [{found.low}, {found.high}], but there are {axes.experts} experts",
        offsets,
    )
    require(
        axes.experts <= HISTC_EXPERTS, "offsets", f"histc over {axes.experts} experts may round an id away", offsets
    )
    assert order.perm is not None
    keys = permutation(order.perm, axes)
    ids: Value = found.ids
    if ids.op == "cast":
        ids = first(ids)
    if ids is keys:  # counting needs no order
        return keys
    require(ids.op not in ("clamp", "clamp_max"), "offsets", "clamped ids are counted, dropped slots with them", ids)
    return slot_ids(ids, order, axes)


def unmasked(rows: Value, order: Order, axes: Axes) -> Value:
    """``rows`` without a mask that zeroes dropped rows: those of ids from E on, which lie past the last offset."""
    while rows.op == "masked_fill":
        _, mask, fill = rows.args
        if isinstance(fill, Value) and fill.op == "full":
            fill = fill.args[0]
        found = match(DROPPED, mask)
        require(
            found is not None and fill == 0 and isinstance(mask, Value) and mask.shape == (axes.slots, 1),
            "mask",
            "rows are masked by something else than their expert id",
            rows,
        )
        assert found is not None
        require(found.bound == axes.experts, "mask", f"rows of experts from {found.bound} on are masked", rows)
        require(order.perm is not None, "mask", "unsorted rows are masked", rows)
        slot_ids(found.ids, order, axes)
        rows = first(rows)
    return rows


def first(value: Value) -> Value:
    """The first operand."""
    operand = value.args[0]
    assert isinstance(operand, Value)
    return operand
