"""Choices of experts, [T, K] with distinct experts in each row, as a router would make them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import BenchError


def _uniform(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    return torch.rand(tokens, experts, generator=gen, device=gen.device).topk(top_k, dim=1).indices


def _zipf(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """K draws without replacement, the r-th most popular expert with weight 1/r (Gumbel's trick); which expert is
    popular is random."""
    rank = torch.randperm(experts, generator=gen, device=gen.device) + 1
    noise = torch.rand(tokens, experts, generator=gen, device=gen.device).clamp_(min=1e-20).log_().neg_().log_().neg_()
    return (noise - rank.log()).topk(top_k, dim=1).indices


def _empty(tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """Uniform over all experts but the middle one."""
    if top_k >= experts:
        raise BenchError(f"routing 'empty' leaves one of {experts} experts out, and a token needs {top_k}")
    idx = _uniform(tokens, experts - 1, top_k, gen)
    return idx + (idx >= experts // 2)


ROUTINGS: dict[str, Callable[[int, int, int, torch.Generator], Tensor]] = {
    "uniform": _uniform,
    "zipf": _zipf,
    "empty": _empty,
}


def route(name: str, tokens: int, experts: int, top_k: int, gen: torch.Generator) -> Tensor:
    """int64 [tokens, top_k] on ``gen``'s device. Raises BenchError on an unknown name."""
    if name not in ROUTINGS:
        raise BenchError(f"no routing is called {name!r}; known: {', '.join(ROUTINGS)}")
    return ROUTINGS[name](tokens, experts, top_k, gen).contiguous()


def loads(idx: Tensor, experts: int) -> dict[str, Any]:
    """Rows an expert: the mean, the largest, and how many experts have none."""
    counts = torch.bincount(idx.reshape(-1), minlength=experts)
    return {
        "mean": idx.numel() / experts,
        "largest": int(counts.max()),
        "without_rows": int((counts == 0).sum()),
    }
