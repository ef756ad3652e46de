"""The readable oracle of the fused router, in plain PyTorch: see :mod:`moe_inductor.router_spec` for what it computes.

Runs on any device. Arithmetic is in float32, in float64 where the spec or the logits name it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_inductor.router_spec import Best, Floor, Groups, RouterSpec, Scaling, Score


def forward(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """(weights [T, K], idx int64 [T, K]) of ``logits`` [T, E] and ``bias`` (E elements); each row's largest first."""
    wide = _wide(logits, spec)
    scores = _rounded(_apply(spec.score, logits.to(wide)), spec.score_dtype)
    idx = _largest(_choice(scores, bias, spec), spec.top_k)
    return _weights(scores.gather(1, idx), spec).out.to(spec.out_dtype), idx


def choice(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """What is chosen by, [T, E]."""
    return _choice(_rounded(_apply(spec.score, logits.to(_wide(logits, spec))), spec.score_dtype), bias, spec)


def _choice(scores: Tensor, bias: Tensor | None, spec: RouterSpec) -> Tensor:
    """The scores [T, E] with the bias; those of all but the best groups are the fill."""
    choice = scores
    if bias is not None and spec.bias_dtype is not None:
        choice = _rounded(scores + bias.reshape(-1).to(scores.dtype), spec.bias_dtype)
    if spec.groups is not None:
        dtype = spec.score_dtype if spec.bias_dtype is None else spec.bias_dtype
        choice = choice.masked_fill(~_kept(choice, spec.groups, dtype), spec.groups.fill)
    return choice


def _kept(choice: Tensor, groups: Groups, dtype: torch.dtype) -> Tensor:
    """Bool [T, E]: whether an expert's group is among the best."""
    tokens, experts = choice.shape
    grouped = choice.view(tokens, groups.count, experts // groups.count)
    if groups.best is Best.MAX:
        best = grouped.amax(-1)
    else:
        best = _rounded(grouped.topk(2, dim=-1).values.sum(-1), dtype)
    kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, groups.kept), 1)
    return kept.repeat_interleave(experts // groups.count, dim=1)


def _largest(values: Tensor, k: int) -> Tensor:
    """Positions [T, k] of the largest in each row, largest first; ties to the smaller position, NaN the largest."""
    return values.sort(dim=1, descending=True, stable=True).indices[:, :k].contiguous()


@dataclass(frozen=True, slots=True)
class _Steps:
    """The weights after each step, [T, K], and the divisor [T, 1] with its sum before a floor."""

    gathered: Tensor
    total: Tensor | None
    divisor: Tensor | None
    out: Tensor


def _weights(chosen: Tensor, spec: RouterSpec) -> _Steps:
    """From the chosen scores [T, K] to the weights."""
    gathered = out = _rounded(_apply(spec.gathered, chosen), spec.gathered_dtype)
    total = divisor = None
    if spec.norm is not None:
        total = divisor = _rounded(out.sum(-1, keepdim=True), spec.norm.sum_dtype)
        if spec.norm.floor is Floor.ADD:
            divisor = _rounded(total + spec.norm.eps, spec.norm.sum_dtype)
        elif spec.norm.floor is Floor.CLAMP:
            divisor = _rounded(total.clamp(min=spec.norm.eps), spec.norm.sum_dtype)
        out = _rounded(out / divisor, spec.norm.dtype)
    if spec.scale is not None:
        scaled = out * spec.scale.by if spec.scale.how is Scaling.MUL else out / spec.scale.by
        out = _rounded(scaled, spec.scale.dtype)
    return _Steps(gathered, total, divisor, out)


def backward(dweights: Tensor, logits: Tensor, idx: Tensor, spec: RouterSpec) -> Tensor:
    """The gradient [T, E] of ``logits``, in their dtype, from that of the weights [T, K]; roundings count as none."""
    wide = _wide(logits, spec)
    scores = _apply(spec.score, logits.to(wide))
    steps = _weights(_rounded(scores, spec.score_dtype).gather(1, idx), spec)
    grad = dweights.to(wide)
    if spec.scale is not None:
        grad = grad * spec.scale.by if spec.scale.how is Scaling.MUL else grad / spec.scale.by
    if spec.norm is not None:
        assert steps.divisor is not None and steps.total is not None
        through_sum = (grad * steps.gathered).sum(-1, keepdim=True) / steps.divisor**2
        if spec.norm.floor is Floor.CLAMP:
            through_sum = torch.where(steps.total >= spec.norm.eps, through_sum, 0.0)
        grad = grad / steps.divisor - through_sum
    grad = _pull(spec.gathered, steps.gathered, grad)
    dense = torch.zeros_like(scores).scatter_(1, idx, grad)
    return _pull(spec.score, scores, dense).to(logits.dtype)


def _apply(score: Score, x: Tensor) -> Tensor:
    if score is Score.SOFTMAX:
        return x.softmax(-1)
    return x.sigmoid() if score is Score.SIGMOID else x


def _pull(score: Score, y: Tensor, dy: Tensor) -> Tensor:
    """The gradient of x where y is the score of x."""
    if score is Score.SOFTMAX:
        return y * (dy - (y * dy).sum(-1, keepdim=True))
    return dy * y * (1 - y) if score is Score.SIGMOID else dy


def _wide(logits: Tensor, spec: RouterSpec) -> torch.dtype:
    return torch.float64 if torch.float64 in spec.dtypes | {logits.dtype} else torch.float32


def _rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x``, its values rounded to ``dtype``."""
    return x.to(dtype).to(x.dtype)
