"""From a window to a proof: what its region computes and from which nodes, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sympy
import torch

from .. import activation
from ..report import Reject
from ..source import where
from ..spec import Combine, ExpertsSpec, Grad, Layout, MoESpec
from . import combine, experts, shadow
from .dispatch import Axes, Order, counted_ids, first, slot_ids, tokens_of_rows, unmasked
from .refusal import Refused, describe, require
from .runner import Unsupported
from .shadow import Shadow
from .values import Dim, Table, Value, dim
from .window import Window, example


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor of the region: ``node`` holds it but for a ``cast`` and a ``reshape``, applied in that order."""

    node: torch.fx.Node
    cast: torch.dtype | None = None
    reshape: tuple[int, ...] | None = None  #: -1 for the rest

    @property
    def requires_grad(self) -> bool:
        """Whether autograd follows it."""
        value = example(self.node)
        return value is not None and value.requires_grad


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


def recognise(window: Window, blocked: dict[torch.fx.Node, bool], autocasts: Sequence[torch.fx.Node]) -> Match | Reject:
    """The proof that ``window`` holds a Mixture-of-Experts region, or a Reject that names the first step that failed.

    ``blocked`` has True for the nodes that run with gradients switched off by the graph itself.
    """
    try:
        seen = shadow.run(window.nodes, window.leaves, blocked.__getitem__, autocasts)
    except shadow.NeedsGuard as e:
        return Reject(where(window.down), "guard", f"needs a guard: {e}")
    except Unsupported as e:
        return Reject(where(window.down), "shadow", str(e))
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
        return Reject(where(window.down), "combine", "the sum over a token's experts is not a tensor")
    at = reason.at.origin if reason.at is not None and reason.at.origin is not None else window.down
    return Reject(where(at), reason.code, reason.why)


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
    interior = _interior(window, seen, target)
    if normed and region.perm is not None:
        order = seen.carrier(region.perm)
        require(order is not None, "order", "no node holds the row order", region.perm)
    else:
        order = None
    x = _operand(seen, region.x, region.up.weight.dtype, None)
    idx = _operand(seen, region.ids, None, (-1, axes.top_k))
    weights = None if region.weights is None else _operand(seen, region.weights, None, (-1, axes.top_k))
    top_k = axes.top_k if isinstance(axes.top_k, int) else 0
    w1, w2 = (_operand(seen, m.weight, m.weight.dtype, None) for m in (region.up, region.down))
    b1, b2 = (
        None if b is None else _operand(seen, b, region.up.weight.dtype, None) for b in (region.bias1, region.bias2)
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
    constants = tuple(_symbolic(seen, window, c) for c in region.gate.constants)
    nodes = tuple(window.nodes[: window.nodes.index(target) + 1])
    return Match(spec, target, nodes, interior, x, idx, weights, w1, b1, w2, b2, constants, order)


def _fixed(size: Dim) -> int:
    require(isinstance(size, int), "experts", f"an expert weight has the symbolic size {size}")
    assert isinstance(size, int)
    return size


def _operand(seen: Shadow, value: Value, dtype: torch.dtype | None, shape: tuple[Dim, ...] | None) -> Operand:
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


def _symbolic(seen: Shadow, window: Window, constant: sympy.Expr) -> torch.fx.Node:
    for node, held in seen.scalars.items():
        if held.node.expr == constant:
            return node
    raise Refused("operand", f"no node holds the constant {constant}")


def _interior(window: Window, seen: Shadow, end: torch.fx.Node) -> frozenset[torch.fx.Node]:
    """The nodes from the up projection to ``end``, with the in-place ones between. Refuses where one is read outside:
    its value would have to be computed twice."""
    order = {n: i for i, n in enumerate(window.nodes)}
    above, stack = {end}, [end]
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in order and node not in above:
                above.add(node)
                stack.append(node)
    below, stack = {window.up}, [window.up]
    while stack:
        for user in stack.pop().users:
            if user in order and order[user] <= order[end] and user not in below:
                below.add(user)
                stack.append(user)
    interior = above & below
    storages = frozenset().union(*(seen.storages.get(n, frozenset()) for n in interior if n is not end))
    inplace = {n for n in below - interior if not n.users and (own := seen.storages.get(n)) and own <= storages}
    for node in interior - {end}:
        for user in node.users:
            if user not in interior and user not in inplace and not is_dead(user):
                raise Refused("escape", f"{node.name}, inside the region, is read outside of it at {where(user)}")
    return frozenset(interior | inplace)


def is_dead(node: torch.fx.Node) -> bool:
    """Whether nothing comes of ``node``: a value that is written nowhere and that nobody reads."""
    computes = isinstance(node.meta.get("example_value"), (torch.Tensor, tuple, list))
    return computes and not shadow.writes(node) and all(map(is_dead, node.users))
