"""The pointwise steps between the matmuls, in blocks of rows: float32 (float64) temporaries stay small, and each result
is rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_inductor.spec import ExpertsSpec, Grad

from . import activations
from .family import Need, accumulator


@dataclass(frozen=True, slots=True)
class Pulled:
    """What the activation's backward makes of one pass over h; None where it was not needed.

    ``dh`` [N, W] as h; ``row_dots`` [N] in the accumulator's dtype, a . da, the gradient of the routing weight;
    ``scaled_a`` [N, I] as h, a times the routing weight, the left operand of dW2.
    """

    dh: Tensor | None
    row_dots: Tensor | None
    scaled_a: Tensor | None


def activate(h: Tensor, consts: Sequence[float], spec: ExpertsSpec, *, block: int, out: Tensor | None = None) -> Tensor:
    """a [N, I] of h [N, W], at most ``block`` elements of h at a time, written to ``out`` where given."""
    a = h.new_empty(h.shape[0], inter(h, spec)) if out is None else out
    for own in _blocks(h, block):
        g, u = activations.split(h[own].to(accumulator(h), copy=True), spec)
        a[own] = activations.evaluate_scratch(spec.activation, g, u, consts)
    return a


def pull(
    h: Tensor,
    da: Tensor | None,
    scale: Tensor | None,
    consts: Sequence[float],
    spec: ExpertsSpec,
    need: Need,
    *,
    block: int,
    dh: Tensor | None = None,
) -> Pulled:
    """One pass over h [N, W], given ``da`` [N, I], the gradient of a before the routing weight ``scale`` [N, 1].

    ``need``: ``Grad.X`` for dh (written to ``dh`` where given), ``Grad.WEIGHTS`` for the row dots (both need ``da``),
    ``Grad.W2`` for a times scale.
    """
    acc = accumulator(h, scale)
    if dh is None and Grad.X in need:
        dh = h.new_empty(h.shape)
    row_dots = h.new_empty(h.shape[0], dtype=acc) if Grad.WEIGHTS in need else None
    scaled_a = h.new_empty(h.shape[0], inter(h, spec)) if Grad.W2 in need else None
    for own in _blocks(h, block):
        scratch = h[own].to(acc, copy=True)
        g, u = activations.split(scratch, spec)
        a, back = activations.differentiate_scratch(spec.activation, g, u, consts)
        by = None if scale is None else scale[own]
        if scaled_a is not None:
            scaled_a[own] = a if by is None else a * by
        if da is None:
            continue
        da_own = da[own].to(acc, copy=by is not None)
        if row_dots is not None:
            torch.sum(da_own * a, 1, out=row_dots[own])
        if dh is None:
            continue
        dg, du = back(da_own if by is None else da_own.mul_(by))
        if dg is g:
            dh[own] = scratch
            continue
        halves = activations.split(dh[own], spec)
        halves[0].copy_(dg)
        if halves[1] is not None and du is not None:
            halves[1].copy_(du)
    return Pulled(dh, row_dots, scaled_a)


def inter(h: Tensor, spec: ExpertsSpec) -> int:
    """I, the width of one half of h."""
    return h.shape[1] // 2 if spec.gated else h.shape[1]


def _blocks(h: Tensor, elements: int) -> Iterator[slice]:
    n, step = h.shape[0], max(1, elements // max(1, h.shape[1]))
    return (slice(start, min(start + step, n)) for start in range(0, n, step))
