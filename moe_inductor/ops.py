"""The fused operators, ``torch.ops.megamoe.*``: schemas, fake forms, autograd and FLOP formulas.

Training is cut in three, ``route_metadata`` -> ``experts_up`` -> ``experts_down``, with the pre-activation h as the one
differentiable edge, so that activation checkpointing recomputes the up projection only. ``experts`` is the whole in one
operator that saves its inputs only: for inference, and for training that would rather recompute than keep h.

``spec`` is the text of an :class:`~moe_inductor.spec.ExpertsSpec`, ``plan`` is ``<family>/<precision>``, ``digest`` is
:func:`moe_inductor.digest.digest` (not read here: it keys compile caches). ``consts`` are the activation's c0, c1, ...
Axes and row order: :mod:`moe_inductor.kernels.family`. ValueError on an unknown spec or family, TypeError on operands
whose dtypes differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import flops
from . import spec as specs
from .kernels.family import width
from .opdef import KEY, ROWS, asked, combined, define, family, if_wanted, or_empty, parse_need, rows_of, same_dtype
from .spec import Grad
from .whole import experts, experts_backward

# route_metadata


def _route(idx: Tensor, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return family(plan).route(idx, specs.parse(spec).experts)


def _route_fake(idx: Tensor, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, e = idx.shape[0] * idx.shape[1], specs.parse(spec).experts
    slots = (idx.new_empty(n, dtype=torch.int64), idx.new_empty(n, dtype=torch.int64))
    return *slots, idx.new_empty(e, dtype=torch.int32), idx.new_empty(e, dtype=torch.int64)


route_metadata = define(
    "route_metadata", f"(Tensor idx, {KEY}) -> (Tensor, Tensor, Tensor, Tensor)", _route, _route_fake
)


# experts_up


def _up(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor, b1: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    same_dtype("experts_up", x=x, w1=w1, b1=b1)
    s = specs.parse(spec)
    return family(plan).up(x, rows_of(s, x.shape[0], order, inverse, offsets), w1, b1, consts, s)


def _up_fake(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor, b1: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    same_dtype("experts_up", x=x, w1=w1, b1=b1)
    s = specs.parse(spec)
    n, w = order.shape[0], width(w1, s.w1)
    return x.new_empty(n, w // 2 if s.gated else w), x.new_empty(n, w)


experts_up = define(
    "experts_up",
    f"(Tensor x, {ROWS}, Tensor w1, Tensor? b1, float[] consts, {KEY}) -> (Tensor, Tensor)",
    _up,
    _up_fake,
)


def _up_backward(
    dh: Tensor, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor,
    spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s = specs.parse(spec)
    rows = rows_of(s, x.shape[0], order, inverse, offsets)
    return or_empty(dh, *family(plan).up_backward(dh, x, rows, w1, s, parse_need(need)))


def _up_backward_fake(
    dh: Tensor, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor,
    spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = parse_need(need)
    return (
        x.new_empty(x.shape if Grad.X in n else (0,)),
        w1.new_empty(w1.shape if Grad.W1 in n else (0,)),
        w1.new_empty((w1.shape[0], dh.shape[1]) if Grad.B1 in n else (0,)),
    )


experts_up_backward = define(
    "experts_up_backward",
    f"(Tensor dh, Tensor x, {ROWS}, Tensor w1, {KEY}, str need) -> (Tensor, Tensor, Tensor)",
    _up_backward,
    _up_backward_fake,
)


def _up_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, order, inverse, offsets, w1, _, _, *ctx.key = inputs
    ctx.save_for_backward(x, order, inverse, offsets, w1)
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)


def _up_autograd(ctx: Any, da: None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    need = asked(ctx, x=0, w1=4, b1=5)
    if dh is None or not need:
        return (None,) * 10
    dx, dw1, db1 = experts_up_backward(dh, *ctx.saved_tensors, *ctx.key, need)
    grads = if_wanted(need, "x", dx), None, None, None, if_wanted(need, "w1", dw1), if_wanted(need, "b1", db1)
    return *grads, None, None, None, None


experts_up.register_autograd(_up_autograd, setup_context=_up_setup)


# experts_down


def _down(
    a: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    same_dtype("experts_down", a=a, h=h, w2=w2, b2=b2)
    s = combined(spec, topk_weights)
    return family(plan).down(
        a, rows_of(s, _tokens(order, topk_weights), order, inverse, offsets), topk_weights, w2, b2, s
    )


def _tokens(order: Tensor, topk_weights: Tensor | None) -> int:
    """T, or N where the rows are not combined."""
    return order.shape[0] if topk_weights is None else topk_weights.shape[0]


def _down_fake(
    a: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    same_dtype("experts_down", a=a, h=h, w2=w2, b2=b2)
    s = combined(spec, topk_weights)
    return a.new_empty(_tokens(order, topk_weights), width(w2, s.w2), dtype=s.out_dtype)


experts_down = define(
    "experts_down",
    f"(Tensor a, Tensor h, {ROWS}, Tensor? topk_weights, Tensor w2, Tensor? b2, float[] consts, {KEY}) -> Tensor",
    _down,
    _down_fake,
)


def _down_backward(
    dy: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s = specs.parse(spec)
    rows = rows_of(s, _tokens(order, topk_weights), order, inverse, offsets)
    return or_empty(dy, *family(plan).down_backward(dy, h, rows, topk_weights, w2, b2, consts, s, parse_need(need)))


def _down_backward_fake(
    dy: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = parse_need(need)
    weights = topk_weights if topk_weights is not None and Grad.WEIGHTS in n else None
    return (
        h.new_empty(h.shape if Grad.X in n else (0,)),
        dy.new_empty(0) if weights is None else weights.new_empty(weights.shape),
        w2.new_empty(w2.shape if Grad.W2 in n else (0,)),
        w2.new_empty((w2.shape[0], dy.shape[1]) if Grad.B2 in n else (0,)),
    )


experts_down_backward = define(
    "experts_down_backward",
    f"(Tensor dy, Tensor h, {ROWS}, Tensor? topk_weights, Tensor w2, Tensor? b2, float[] consts, {KEY}, str need)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _down_backward,
    _down_backward_fake,
)


def _down_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, order, inverse, offsets, weights, w2, b2, *ctx.key = inputs
    ctx.save_for_backward(h, order, inverse, offsets, weights, w2, b2)
    ctx.set_materialize_grads(False)


def _down_autograd(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    need = asked(ctx, x=1, weights=5, w2=6, b2=7)
    if dy is None or not need:
        return (None,) * 12
    dh, dweights, dw2, db2 = experts_down_backward(dy, *ctx.saved_tensors, *ctx.key, need)
    grads = if_wanted(need, "weights", dweights), if_wanted(need, "w2", dw2), if_wanted(need, "b2", db2)
    return None, if_wanted(need, "x", dh), None, None, None, *grads, None, None, None, None


experts_down.register_autograd(_down_autograd, setup_context=_down_setup)


flops.register()

__all__ = [
    "experts",
    "experts_backward",
    "experts_down",
    "experts_down_backward",
    "experts_up",
    "experts_up_backward",
    "route_metadata",
]
