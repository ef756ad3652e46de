"""From a window to a proof: what its region computes and from which nodes, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import sympy
import torch

from .. import activation
from ..spec import DTYPES, Combine, ExpertsSpec, Grad, Layout, MoESpec
from . import combine, experts, shadow
from .dispatch import Axes, Order, counted_ids, first, slot_ids, tokens_of_rows, unmasked
from .effects import Effects
from .interior import interior
from .operands import Operand, never_negative, number, operand
from .refusal import Refused, describe, require
from .runner import Unsupported
from .shadow import Shadow
from .values import Dim, Table, Value
from .window import Window, example


@dataclass(frozen=True, slots=True)
class Match:
    """A proved region: ``spec``, its operands, and ``end``, the node whose value the operators give instead.

    ``order`` is set where the operators give unweighted rows: the node with the permutation that brings slot order
    into the order which the rest of the graph expects.
    """

    spec: MoESpec
    end: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]  #: the window up to ``end``, in order
    interior: frozenset[torch.fx.Node]  #: of them, those that the operators replace
    x: Operand
    idx: Operand
    weights: Operand | None
    w1: Operand
    b1: Operand | None
    w2: Operand
    b2: Operand | None
    constants: tuple[torch.fx.Node, ...]
    order: torch.fx.Node | None
    effects: Effects

    @property
    def operands(self) -> dict[Grad, Operand | None]:
        """The operands that may take a gradient."""
        return dict(zip(Grad, (self.x, self.weights, self.w1, self.b1, self.w2, self.b2), strict=True))


@dataclass(frozen=True, slots=True)
class _Region:
    """The values of a region."""

    axes: Axes
    x: Value
    ids: Value
    weights: Value | None
    up: experts.ExpertMatmul
    down: experts.ExpertMatmul
    gate: experts.Gate
    rows: Value
    perm: Value | None
    weight_dtype: torch.dtype
    row_dtype: torch.dtype
    out_dtype: torch.dtype
    bias1: Value | None
    bias2: Value | None


@dataclass(frozen=True, slots=True)
class Failure:
    """The first step of a proof that failed, and the node where it did."""

    code: str
    why: str
    at: torch.fx.Node


def recognise(
    window: Window, blocked: dict[torch.fx.Node, bool], autocasts: Sequence[torch.fx.Node]
) -> Match | Failure:
    """The proof that ``window`` holds a Mixture-of-Experts region, or why there is none.

    ``blocked`` has True for the nodes that run with gradients switched off by the graph itself.
    """
    try:
        seen = shadow.run(window.nodes, window.leaves, blocked.__getitem__, autocasts)
    except shadow.NeedsGuard as e:
        return Failure("guard", f"needs a guard: {e}", window.down)
    except Unsupported as e:
        return Failure("shadow", str(e), window.down)
    reason: Refused | None = None
    for end in window.ends:
        out = seen.ran.get(end)
        if not isinstance(out, Value):
            continue
        try:
            return _match(window, seen, end, _prove(out, seen.table))
        except Refused as refused:
            reason = refused
    if reason is None:
        return Failure("combine", "the sum over a token's experts is not a tensor", window.down)
    at = reason.at.origin if reason.at is not None and reason.at.origin is not None else window.down
    return Failure(reason.code, reason.why, at)


def _prove(out: Value, table: Table) -> _Region:
    """Every step from ``out`` [T, H] back to tokens, choice, weights and parameters."""
    shape = combine.outer(out)
    tokens, top_k, _ = shape.slots.shape
    axes = Axes(tokens, top_k, 0, tokens * top_k, table)
    found = combine.combined(shape, axes)
    rows, order = found.rows, found.order

    masks: list[Value] = []

    def unmask(value: Value) -> Value:
        """Without masks; they are proved once the number of experts is known."""
        while value.op == "masked_fill":
            masks.append(value)
            value = first(value)
        return value

    def is_product(value: Value) -> bool:
        known = len(masks)
        try:
            experts.matmul(value, table, unmask)
        except Refused:
            return False
        finally:
            del masks[known:]
        return True

    boundary = rows if is_product(rows) else combine.below_row_ops(rows, is_product)
    normed = boundary is not rows
    down = experts.matmul(boundary, table, unmask)
    require(isinstance(down.experts, int), "experts", f"the number of experts, {down.experts}, is not fixed", boundary)
    assert isinstance(down.experts, int)
    axes = Axes(tokens, top_k, down.experts, axes.slots, table)
    gate = experts.gate(down.rows, is_product)
    up = experts.matmul(gate.hidden, table, unmask)
    require(up.experts == down.experts, "experts", f"up has {up.experts} experts, down {down.experts}", boundary)
    ids = _ids(up, down, order, axes)
    x = tokens_of_rows(up.rows, order, axes)
    for mask in masks:
        unmasked(mask, order, axes)
    product_dtype = gate.hidden.dtype
    require(
        up.weight.dtype is product_dtype and down.weight.dtype is product_dtype,
        "dtype",
        f"up is in {up.weight.dtype}, down in {down.weight.dtype}",
        boundary,
    )
    weight_dtype = found.weights.dtype
    for dtype in (weight_dtype, found.row_dtype, found.out_dtype, product_dtype):
        if dtype not in DTYPES:  # the next end, before its cast, may do
            raise Refused("dtype", f"the region computes in {dtype}", boundary)
    return _Region(
        axes=axes,
        x=x,
        ids=ids,
        weights=None if normed else found.weights,
        up=up,
        down=down,
        gate=gate,
        rows=boundary,
        perm=order.perm,
        weight_dtype=weight_dtype,
        row_dtype=boundary.dtype if normed else found.row_dtype,
        out_dtype=boundary.dtype if normed else found.out_dtype,
        bias1=experts.bias_of(up, ids if order.perm is not None else _row_ids(up), order, axes),
        bias2=experts.bias_of(down, ids if order.perm is not None else _row_ids(down), order, axes),
    )


def _row_ids(product: experts.ExpertMatmul) -> Value:
    assert product.ids is not None
    return product.ids


def _ids(up: experts.ExpertMatmul, down: experts.ExpertMatmul, order: Order, axes: Axes) -> Value:
    """The expert of each slot [N], proved the same for both products."""
    found: list[Value] = []
    for product in (up, down):
        if product.groups is not None:
            require(order.perm is not None, "order", "grouped rows are not brought back in slot order", product.rows)
            found.append(counted_ids(product.groups, order, axes))
        else:
            assert product.ids is not None
            found.append(slot_ids(product.ids, order, axes))
    require(found[0] is found[1], "experts-index", "up and down pick experts by different ids", down.rows)
    require(found[0].shape == (axes.slots,), "experts-index", f"not one expert a slot: {describe(found[0])}", found[0])
    require(found[0].dtype in _INDEX, "experts-index", f"expert ids are {found[0].dtype}", found[0])
    return found[0]


_INDEX = (torch.int64, torch.int32)


def _match(window: Window, seen: Shadow, end: torch.fx.Node, region: _Region) -> Match:
    """Names a node for every operand, and checks that nothing outside reads the region's interior."""
    axes = region.axes
    normed = region.weights is None
    target = end
    if normed:
        held = [n for n, value in seen.ran.items() if value is region.rows and n in window.nodes]
        assert held  # the node that computed them does
        target = held[0] if example(held[0]).dim() == 2 else held[-1]  # type: ignore[union-attr]
    if normed and region.perm is not None:
        order = seen.carrier(region.perm)
        require(order is not None, "order", "no node holds the row order", region.perm)
    else:
        order = None
    x = operand(seen, region.x, region.up.weight.dtype, None)
    idx = operand(seen, region.ids, None, (-1, axes.top_k))
    if region.up.groups is None and not never_negative(idx.node):
        idx = replace(idx, wrap=axes.experts)  # as indexing the weights does
    weights = None if region.weights is None else operand(seen, region.weights, None, (-1, axes.top_k))
    top_k = axes.top_k if isinstance(axes.top_k, int) else 0
    w1, w2 = (operand(seen, m.weight, m.weight.dtype, None) for m in (region.up, region.down))
    b1, b2 = (
        None if b is None else operand(seen, b, region.up.weight.dtype, None) for b in (region.bias1, region.bias2)
    )
    named = {
        Grad.X: x, Grad.WEIGHTS: weights, Grad.W1: w1, Grad.B1: b1, Grad.W2: w2, Grad.B2: b2
    }  # fmt: skip
    out = example(target)
    assert out is not None
    spec = MoESpec(
        ops=ExpertsSpec(
            experts=axes.experts,
            top_k=top_k,
            activation=activation.name_of(region.gate.expr),
            halves=region.gate.halves,
            w1=region.up.layout,
            w2=region.down.layout,
            combine=Combine.ROWS if normed else Combine.WEIGHTED_SUM,
            weight_dtype=region.weight_dtype,
            combine_dtype=region.row_dtype,
            out_dtype=region.out_dtype,
        ),
        tokens=sympy.sympify(axes.tokens),
        top_k=sympy.sympify(axes.top_k),
        hidden=_fixed(region.up.weight.shape[2 if region.up.layout is Layout.OUT_IN else 1]),
        inter=_fixed(region.down.weight.shape[2 if region.down.layout is Layout.OUT_IN else 1]),
        out_hidden=_fixed(region.down.width),
        dtype=region.up.weight.dtype,
        bias1=b1 is not None,
        bias2=b2 is not None,
        training=out.requires_grad,
        grads=frozenset(
            g for g, operand in named.items() if out.requires_grad and operand is not None and operand.requires_grad
        ),
        device=out.device.type,
    )
    constants = tuple(number(seen, c) for c in region.gate.constants)
    nodes = tuple(window.nodes[: window.nodes.index(target) + 1])
    read = {o.node for o in (x, idx, weights, w1, b1, w2, b2) if o is not None} | {*constants, *filter(None, [order])}
    gone = interior(window, seen, target, read)
    effects = seen.effects.among([*window.leaves, *nodes])
    return Match(spec, target, nodes, gone, x, idx, weights, w1, b1, w2, b2, constants, order, effects)


def _fixed(size: Dim) -> int:
    require(isinstance(size, int), "experts", f"an expert weight has the symbolic size {size}")
    assert isinstance(size, int)
    return size
