"""The smallest changes that make each form something else, written out: one overridden method each.

``words`` are what the refusal must say; an empty tuple asks only for a refusal with a reason and a source line.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe_forms import grouped_mm

T, H, I, E, K = 6, 16, 8, 4, 2  # noqa: E741  (the field's name for the inner width)


class Grouped(nn.Module):
    """Sorted rows and two grouped matmuls; the plain form, which must be fused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        for name, shape in {"router": (E, H), "w1": (E, 2 * I, H), "w2": (E, H, I)}.items():
            self.register_parameter(name, nn.Parameter((torch.randn(shape, generator=gen) * 0.4).to(dtype)))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        return w, idx

    def order(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        ordered, perm = torch.sort(ids)
        return ordered, perm

    def gather(self, x: Tensor, perm: Tensor) -> Tensor:
        return x[perm // K]

    def counts(self, ids: Tensor, ordered: Tensor) -> Tensor:
        return torch.histc(ordered.float(), bins=E, min=0, max=E - 1)

    def ends(self, counts: Tensor) -> Tensor:
        return torch.cumsum(counts, dim=0, dtype=torch.int32)

    def up(self, xs: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(xs, self.w1.transpose(-2, -1), ends)

    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        g, u = h.chunk(2, dim=-1)
        return F.silu(g) * u

    def down(self, a: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(a, self.w2.transpose(-2, -1), ends)

    def weights(self, w: Tensor, perm: Tensor) -> Tensor:
        return w.reshape(-1)[perm]

    def inverse(self, perm: Tensor) -> Tensor:
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.size(0), device=perm.device)
        return inverse

    def total(self, z: Tensor) -> Tensor:
        return z.view(-1, K, H).sum(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        xs = self.gather(x, perm)
        y = self.down(self.act(self.up(xs, ends), xs), ends)
        z = y * self.weights(w, perm).unsqueeze(-1)
        return self.total(z[self.inverse(perm)])


class Batched(nn.Module):
    """One gathered weight a slot and two batched matmuls; the plain form, which must be fused."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(0)
        for name, shape in {"router": (E, H), "w1": (E, 2 * I, H), "w2": (E, H, I)}.items():
            self.register_parameter(name, nn.Parameter((torch.randn(shape, generator=gen) * 0.4).to(dtype)))

    def rows(self, x: Tensor, w: Tensor) -> Tensor:
        return x.repeat_interleave(K, dim=0)

    def down_ids(self, idx: Tensor) -> Tensor:
        return idx.reshape(-1)

    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        g, u = h.chunk(2, dim=-1)
        return F.silu(g) * u

    def total(self, y: Tensor, w: Tensor) -> Tensor:
        return (y * w.reshape(-1).unsqueeze(-1)).view(-1, K, H).sum(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        xs = self.rows(x, w)
        h = torch.bmm(self.w1[idx.reshape(-1)], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[self.down_ids(idx)], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return self.total(y, w)


@dataclass(frozen=True, slots=True)
class NearMiss:
    """``make()`` builds the module, ``words`` must all be in its refusal."""

    name: str
    form: str  #: grouped or batched
    make: Callable[[], nn.Module]
    words: tuple[str, ...] = ()
    args: Callable[[], tuple[Tensor, ...]] = lambda: (torch.randn(T, H),)
    dynamic: bool | None = None


NEAR_MISSES: list[NearMiss] = []


def near_miss(name: str, *words: str, base: type[nn.Module], **methods: Callable[..., object]) -> None:
    """Add ``base`` with ``methods`` replaced."""
    NEAR_MISSES.append(NearMiss(name, base.__name__.lower(), type(name, (base,), methods), words))


def _scatter_by_rank(self: Grouped, ids: Tensor) -> tuple[Tensor, Tensor]:
    perm = torch.argsort(torch.argsort(ids))
    return torch.sort(ids)[0], perm


near_miss("scatter_by_rank", base=Grouped, order=_scatter_by_rank)
near_miss("descending_sort", base=Grouped, order=lambda self, ids: tuple(torch.sort(ids, descending=True)))
near_miss("no_sort", base=Grouped, order=lambda self, ids: (ids, torch.arange(ids.shape[0])))
near_miss("floor_by_another_k", base=Grouped, gather=lambda self, x, perm: x[perm // (K + 1)])
near_miss("token_by_remainder", base=Grouped, gather=lambda self, x, perm: x[perm % x.shape[0]])
near_miss("one_bin_short", base=Grouped, counts=lambda self, ids, o: torch.histc(o.float(), bins=E, min=0, max=E - 2))
near_miss(
    "counts_of_other_ids", base=Grouped, counts=lambda self, ids, o: torch.histc((E - 1 - ids).float(), E, 0, E - 1)
)
near_miss("counts_rolled", base=Grouped, ends=lambda self, n: torch.cumsum(n.roll(1), dim=0, dtype=torch.int32))
near_miss("counts_not_summed", base=Grouped, ends=lambda self, n: n.to(torch.int32))
near_miss("weights_not_sorted", base=Grouped, weights=lambda self, w, perm: w.reshape(-1))
near_miss("weights_of_the_inverse", base=Grouped, weights=lambda self, w, perm: w.reshape(-1)[torch.argsort(perm)])
near_miss("perm_for_its_inverse", base=Grouped, inverse=lambda self, perm: perm)
near_miss("not_restored", base=Grouped, inverse=lambda self, perm: torch.arange(perm.shape[0]))
near_miss("mean_over_experts", base=Grouped, total=lambda self, z: z.view(-1, K, H).mean(dim=1))
near_miss("max_over_experts", base=Grouped, total=lambda self, z: z.view(-1, K, H).amax(dim=1))
near_miss("slots_summed_across_tokens", base=Grouped, total=lambda self, z: z.view(K, -1, H).sum(dim=0))
near_miss(
    "last_expert_left_out",
    "up has 3 experts",
    base=Grouped,
    up=lambda self, xs, n: grouped_mm(xs, self.w1.mT[:-1], n[:-1]),
)
near_miss("softmax_over_columns", base=Grouped, act=lambda self, h, xs: h[:, :I].softmax(-1) * h[:, I:])
near_miss("sum_over_rows", base=Grouped, act=lambda self, h, xs: F.silu(h[:, :I]).cumsum(0) * h[:, I:])
near_miss("residual_before_down", base=Grouped, act=lambda self, h, xs: F.silu(h[:, :I]) * h[:, I:] + xs[:, :I])
near_miss("halves_overlap", base=Grouped, act=lambda self, h, xs: F.silu(h[:, :I]) * h[:, I - 1 : -1])
near_miss("detached_gate", base=Grouped, act=lambda self, h, xs: F.silu(h[:, :I]).detach() * h[:, I:])

near_miss("tiled_rows", base=Batched, rows=lambda self, x, w: x.repeat(K, 1))
near_miss("weight_on_the_input", base=Batched, rows=lambda self, x, w: x.repeat_interleave(K, 0) * w.reshape(-1, 1))
near_miss("detached_rows", base=Batched, rows=lambda self, x, w: x.repeat_interleave(K, 0).detach())
near_miss("another_expert_down", base=Batched, down_ids=lambda self, idx: (idx.reshape(-1) + 1) % E)
near_miss("slots_swapped_down", base=Batched, down_ids=lambda self, idx: idx.flip(1).reshape(-1))
near_miss("dropout_inside", base=Batched, act=lambda self, h, xs: F.dropout(F.silu(h[:, :I]) * h[:, I:]))
near_miss(
    "norm_before_down",
    "columns move",
    base=Batched,
    act=lambda self, h, xs: F.rms_norm(F.silu(h[:, :I]) * h[:, I:], (I,)),
)
near_miss("rounded_inside", base=Batched, act=lambda self, h, xs: F.silu(h[:, :I].bfloat16()).float() * h[:, I:])
near_miss("scaled_by_the_input", base=Batched, act=lambda self, h, xs: F.silu(h[:, :I]) * h[:, I:] * xs[:, :1])
near_miss("max_over_slots", base=Batched, total=lambda self, y, w: (y * w.view(-1, 1)).view(-1, K, H).amax(dim=1))
near_miss("last_slot_dropped", base=Batched, total=lambda self, y, w: (y.view(-1, K, H) * w[..., None])[:, :-1].sum(1))
near_miss("product_of_slots", base=Batched, total=lambda self, y, w: (y.view(-1, K, H) * w[..., None]).prod(1))
