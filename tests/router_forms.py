"""Routers of a small grouped block with four experts, two a token: forms that must be fused."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.near_misses import E, Grouped, K

Route = Callable[["Routed", Tensor], tuple[Tensor, Tensor]]


class Routed(Grouped):
    """``Grouped`` with ``route`` given; what is appended to ``extra`` is returned beside the output."""

    def __init__(self, route: Route, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self._route = route
        self.bias = nn.Parameter(torch.tensor([0.1, -0.2, 0.05, 0.15], dtype=dtype))
        self.extra: list[Tensor] = []

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._route(self, x)

    def up(self, xs: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(xs, self.w1.transpose(-2, -1), ends)

    def down(self, a: Tensor, ends: Tensor) -> Tensor:
        return torch.ops.transformers.grouped_mm_fallback(a, self.w2.transpose(-2, -1), ends)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.router)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, ...]:
        self.extra = []
        y = super().forward(x)
        return (y, *self.extra) if self.extra else y


def softmax_topk(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = torch.topk(m.logits(x).softmax(-1), K, dim=-1)
    return w, idx


def softmax_topk_renorm(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = torch.topk(F.softmax(m.logits(x), dim=1), K, dim=-1)
    w /= w.sum(dim=-1, keepdim=True)
    return w, idx


def softmax_gather_renorm_clamped(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = m.logits(x).softmax(-1)
    idx = (p + m.bias.detach()).topk(K, dim=-1, sorted=False).indices
    w = p.gather(1, idx)
    return w / w.sum(-1, keepdim=True).clamp(min=0.6), idx


def topk_softmax(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    top, idx = m.logits(x).topk(K)
    return top.softmax(-1), idx


def topk_sigmoid_renorm(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    logits = m.logits(x)
    idx = (logits + m.bias.unsqueeze(0)).topk(K)[1]
    w = torch.sigmoid(torch.gather(logits, -1, idx))
    return w / (w.sum(-1, keepdim=True) + 1e-6), idx


def sigmoid_scaled(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    w, idx = m.logits(x).sigmoid().topk(K)
    return 2.5 * (w / w.sum(1, keepdim=True).expand_as(w)), idx


def kept_of(m: Routed, best: Tensor) -> Tensor:
    """Bool [T, E]: the experts of the best of two groups."""
    chosen = torch.zeros_like(best).scatter_(1, best.topk(1, dim=-1, sorted=False)[1], 1)
    return chosen.unsqueeze(-1).expand(-1, 2, E // 2).reshape(-1, E).bool()


def grouped_top2(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    scores = m.logits(x).sigmoid()
    with torch.no_grad():
        biased = scores + m.bias
        best = biased.view(-1, 2, E // 2).topk(2, dim=-1)[0].sum(dim=-1)
        idx = biased.masked_fill(~kept_of(m, best), -math.inf).topk(K, dim=-1, sorted=False)[1]
    w = scores.gather(1, idx)
    return w / (w.sum(dim=-1, keepdim=True) + 1e-20) * 2.5, idx


def grouped_max(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    p = m.logits(x).softmax(-1)
    best = p.view(-1, 2, E // 2).max(dim=-1).values
    w, idx = torch.where(kept_of(m, best), p, 0.0).topk(K)
    return w * 16.0, idx


def grouped_flag(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mask marks the groups that are dropped, and meets the scores with a group an axis."""
    scores = m.logits(x).sigmoid().view(-1, 2, E // 2)
    chosen = scores.amax(-1).topk(1)[1]
    dropped = torch.ones(x.shape[0], 2, dtype=torch.bool, device=x.device).scatter_(1, chosen, False)
    idx = scores.masked_fill(dropped.unsqueeze(-1), -math.inf).flatten(1).topk(K)[1]
    w = scores.flatten(1).gather(1, idx)
    return w / K, idx


def overwritten_afterwards(m: Routed, x: Tensor) -> tuple[Tensor, Tensor]:
    """By what stays in the graph, on the operator's result."""
    top = m.logits(x).softmax(-1).topk(K)
    w = top.values / 2.0
    w.mul_(x[:, :1])
    return w, top.indices


FORMS: dict[str, Route] = {
    f.__name__: f
    for f in (
        softmax_topk, softmax_topk_renorm, softmax_gather_renorm_clamped, topk_softmax, topk_sigmoid_renorm,
        sigmoid_scaled, grouped_top2, grouped_max, grouped_flag,
        overwritten_afterwards,
    )
}  # fmt: skip
