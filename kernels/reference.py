"""The readable oracle: one expert after another, every intermediate in float32 (float64 for float64 experts), each
result rounded once. Runs on any device; reads the offsets on the host.

    h = x W1 + b1          a = act(h)          row = a W2 + b2          y[t] = sum_k s[t, k] row[t, k]
    d row = s dy           ds = dy . row       dA = d row W2^T          dW2 = a^T d row        db2 = sum d row
    dh = act'(h) dA        dx[t] = sum_k dh W1^T        dW1 = x^T dh        db1 = sum dh
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from moe_inductor.spec import Combine, ExpertsSpec, Grad

from . import activations
from .family import Need, Rows, accumulator, in_out, width
from .family import sort_by_expert as route


def up(
    x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
) -> tuple[Tensor, Tensor]:
    """(a [N, I], h [N, W])."""
    acc = accumulator(w1)
    h = x.new_zeros(rows.order.numel(), width(w1, spec.w1))
    a = h.new_zeros(h.shape[0], h.shape[1] // 2 if spec.gated else h.shape[1])
    for e, own in _experts(rows):
        pre = x[rows.tokens[own]].to(acc) @ in_out(w1[e], spec.w1).to(acc)
        if b1 is not None:
            pre += b1[e]
        h[own] = pre
        g, u = activations.split(h[own].to(acc), spec)
        a[own] = activations.evaluate(spec.activation, g, u, consts)
    return a, h


def up_backward(
    dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [T, H], dw1 like w1, db1 [E, W])."""
    acc = accumulator(w1)
    dx = x.new_zeros(rows.order.numel(), x.shape[1], dtype=acc)
    dw1 = w1.new_zeros(w1.shape)
    db1 = w1.new_zeros(w1.shape[0], dh.shape[1])
    for e, own in _experts(rows):
        tokens, grad = rows.tokens[own], dh[own].to(acc)
        dx[rows.order[own]] = grad @ in_out(w1[e], spec.w1).to(acc).t()
        in_out(dw1[e], spec.w1).copy_(x[tokens].to(acc).t() @ grad)
        db1[e] = grad.sum(0)
    return (
        dx.view(-1, rows.top_k, x.shape[1]).sum(1).to(x.dtype) if Grad.X in need else None,
        dw1 if Grad.W1 in need else None,
        db1 if Grad.B1 in need else None,
    )


def down(a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """y [T, H], or [N, H] in slot order."""
    acc = accumulator(w2, weights)
    out = a.new_zeros(rows.order.numel(), width(w2, spec.w2), dtype=acc)
    for e, own in _experts(rows):
        row = a[own].to(acc) @ in_out(w2[e], spec.w2).to(acc)
        if b2 is not None:
            row += b2[e]
        if weights is not None:
            row *= _per_row(weights, rows, own, spec).to(acc)
        out[rows.order[own]] = row
    if spec.combine is Combine.WEIGHTED_SUM:
        out = out.view(-1, rows.top_k, out.shape[1]).sum(1)
    return out.to(spec.out_dtype)


def down_backward(
    dy: Tensor,
    h: Tensor,
    rows: Rows,
    weights: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    consts: Sequence[float],
    spec: ExpertsSpec,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dh [N, W], dweights [T, K], dw2 like w2, db2 [E, H])."""
    acc = accumulator(w2, weights)
    dh = h.new_zeros(h.shape)
    dweights = h.new_zeros(rows.order.numel(), dtype=acc)
    dw2 = w2.new_zeros(w2.shape)
    db2 = w2.new_zeros(w2.shape[0], dy.shape[1])
    for e, own in _experts(rows):
        drow = dy[rows.gradient_rows(spec)[own]].to(acc)
        dh_own = dh[own]
        g, u = activations.split(h[own].to(acc), spec)
        a, pull = activations.differentiate(spec.activation, g, u, consts)
        if weights is not None:
            row = a @ in_out(w2[e], spec.w2).to(acc)
            dweights[rows.order[own]] = ((row if b2 is None else row + b2[e]) * drow).sum(1)
            drow = drow * _per_row(weights, rows, own, spec).to(acc)
        in_out(dw2[e], spec.w2).copy_(a.t() @ drow)
        db2[e] = drow.sum(0)
        for view, grad in zip(
            activations.split(dh_own, spec), pull(drow @ in_out(w2[e], spec.w2).to(acc).t()), strict=True
        ):
            if view is not None and grad is not None:
                view.copy_(grad)
    return (
        dh if Grad.X in need else None,
        dweights.view(weights.shape).to(weights.dtype) if weights is not None and Grad.WEIGHTS in need else None,
        dw2 if Grad.W2 in need else None,
        db2 if Grad.B2 in need else None,
    )


def experts(
    x: Tensor,
    rows: Rows,
    weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    consts: Sequence[float],
    spec: ExpertsSpec,
) -> Tensor:
    """``down(up(...))``."""
    a, _ = up(x, rows, w1, b1, consts, spec)
    return down(a, rows, weights, w2, b2, spec)


def _experts(rows: Rows) -> Iterator[tuple[int, slice]]:
    """(e, rows of expert e) for experts that have rows."""
    start = 0
    for e, end in enumerate(rows.offsets.tolist()):
        if end > start:
            yield e, slice(start, end)
        start = end


def _per_row(weights: Tensor, rows: Rows, own: slice, spec: ExpertsSpec) -> Tensor:
    """[n, 1], the routing weights of some rows as they are applied."""
    return weights.reshape(-1)[rows.order[own], None].to(spec.weight_dtype)


__all__ = ["down", "down_backward", "experts", "route", "up", "up_backward"]
