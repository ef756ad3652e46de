"""``megamoe::experts``, all of a region's experts in one operator which saves its inputs only: for inference, and for
training that would rather compute h again than keep it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _torch
from . import spec as specs
from .kernels.family import Rows, width
from .opdef import KEY, asked, combined, define, family, if_wanted, no_autocast, or_empty, parse_need, same_dtype
from .spec import Combine, Grad


def _experts(
    x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    same_dtype("experts", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    s = combined(spec, topk_weights)
    kernels = family(plan)
    rows = Rows(*kernels.route(idx, s.experts)[:3], s.top_k or max(idx.shape[1], 1))
    return kernels.experts(x, rows, topk_weights, w1, b1, w2, b2, consts, s)


def _experts_fake(
    x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    same_dtype("experts", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    s = combined(spec, topk_weights)
    rows = idx.shape[0] * idx.shape[1] if s.combine is Combine.ROWS else idx.shape[0]
    return x.new_empty(rows, width(w2, s.w2), dtype=s.out_dtype)


experts = define(
    "experts",
    "(Tensor x, Tensor idx, Tensor? topk_weights, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, float[] consts,"
    f" {KEY}) -> Tensor",
    _experts,
    _experts_fake,
)


def _traced(x: Tensor, *args: Any) -> Any:
    """The CPU's experts as the operators they are made of, whose pointwise ones Inductor fuses."""
    *_, plan, _digest = args
    if not plan.startswith("cpu/"):
        return NotImplemented
    with no_autocast("cpu"):
        return _experts(x, *args)


_torch.decompose_in_inductor(torch.ops.megamoe.experts.default, _traced)


def _experts_backward(
    dy: Tensor, x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, kernels, wanted = specs.parse(spec), family(plan), parse_need(need)
    rows = Rows(*kernels.route(idx, s.experts)[:3], s.top_k or max(idx.shape[1], 1))
    below = wanted & {Grad.X, Grad.W1, Grad.B1}
    _, h = kernels.up(x, rows, w1, b1, consts, s)
    beside = wanted - {Grad.X} | ({Grad.X} if below else set())
    dh, dweights, dw2, db2 = kernels.down_backward(dy, h, rows, topk_weights, w2, b2, consts, s, beside)
    dx, dw1, db1 = (None, None, None) if dh is None else kernels.up_backward(dh, x, rows, w1, s, below)
    return or_empty(dy, dx, dweights, dw1, db1, dw2, db2)


def _experts_backward_fake(
    dy: Tensor, x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = {Grad.X: x, Grad.WEIGHTS: topk_weights, Grad.W1: w1, Grad.B1: b1, Grad.W2: w2, Grad.B2: b2}
    n = parse_need(need)
    return tuple(dy.new_empty(0) if t is None or g not in n else t.new_empty(t.shape) for g, t in wanted.items())


experts_backward = define(
    "experts_backward",
    "(Tensor dy, Tensor x, Tensor idx, Tensor? topk_weights, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    f" float[] consts, {KEY}, str need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts_backward,
    _experts_backward_fake,
)


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, consts, spec, plan, digest = inputs
    ctx.key = (consts, spec, plan, digest)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _experts_autograd(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    need = asked(ctx, x=0, weights=2, w1=3, b1=4, w2=5, b2=6)
    if dy is None or not need:
        return (None,) * 11
    grads = experts_backward(dy, *ctx.saved_tensors, *ctx.key, need)
    dx, *rest = (if_wanted(need, g.value, d) for g, d in zip(Grad, grads, strict=True))
    return dx, None, *rest, None, None, None, None


experts.register_autograd(_experts_autograd, setup_context=_experts_setup)
