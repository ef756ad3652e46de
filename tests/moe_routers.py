"""Routers as steps: each sets c.w [T, K] in the wide dtype, c.idx [T, K] and c.logits [T, E]."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.moe_block import Block, Flow, Step


def softmax_topk(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x, m.router)
    c.w, c.idx = m.pick(F.softmax(c.logits, dim=-1, dtype=m.wide))
    c.w = c.w / c.w.sum(dim=-1, keepdim=True)


def softmax_topk_inplace(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x, m.router)
    c.w, c.idx = m.pick(c.logits.to(m.wide).softmax(-1))
    c.w /= c.w.sum(dim=-1, keepdim=True)


def topk_softmax(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x, m.router)
    top, c.idx = m.pick(c.logits)
    c.w = torch.softmax(top, dim=1, dtype=m.wide)


def sigmoid_group(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x.to(m.wide), m.router.to(m.wide))
    scores = c.logits.sigmoid()
    biased = scores + m.correction
    groups = 2 if m.e % 2 == 0 and m.k <= m.e // 2 else 1
    best = biased.view(-1, groups, m.e // groups).topk(min(2, m.e // groups), dim=-1)[0].sum(dim=-1)
    keep = torch.zeros_like(best).scatter_(1, best.topk(1, dim=-1, sorted=False)[1], 1)
    mask = keep.unsqueeze(-1).expand(-1, groups, m.e // groups).reshape(-1, m.e)
    _, c.idx = m.pick(biased.masked_fill(~mask.bool(), float("-inf")))
    c.w = scores.gather(1, c.idx)
    c.w = c.w / (c.w.sum(dim=-1, keepdim=True) + 1e-20) * 2.5


def argmax_top1(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x, m.router)
    p = c.logits.to(m.wide).softmax(-1)
    c.idx = p.argmax(dim=-1, keepdim=True) if m.forced is None else m.forced
    if m.recording:
        m.seen = c.idx
    c.w = p.gather(-1, c.idx)


def index_table(m: Block, c: Flow) -> None:
    c.logits = F.linear(c.x, m.router)
    c.idx = m.table[torch.arange(c.x.shape[0]) % m.table.shape[0]]
    c.w = c.logits.to(m.wide).sigmoid().gather(-1, c.idx)


ROUTERS: dict[str, Step] = {
    f.__name__: f for f in (softmax_topk, softmax_topk_inplace, topk_softmax, sigmoid_group, argmax_top1, index_table)
}
