"""More near misses: for each proof of the recogniser, a graph that only this proof keeps from being fused."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.moe_forms import grouped_mm
from tests.near_misses import NEAR_MISSES, Batched, E, Grouped, H, I, K, NearMiss, T, near_miss


class GroupedBias(Grouped):
    """Biases, gathered by sorted id."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(dtype)
        self.b1 = nn.Parameter(torch.randn(E, 2 * I) * 0.1)

    def bias(self, ids: Tensor, ordered: Tensor) -> Tensor:
        return self.b1[ordered]

    def forward(self, x: Tensor) -> Tensor:
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        h = self.up(self.gather(x, perm), ends) + self.bias(ids, ordered)
        y = self.down(self.act(h, x).to(self.w2.dtype), ends)
        z = y * self.weights(w, perm).unsqueeze(-1)
        return self.total(z[self.inverse(perm)])


class Masked(Grouped):
    """Rows of dropped slots are zeroed, as under expert parallelism."""

    def mask(self, ordered: Tensor) -> Tensor:
        return (ordered >= E).unsqueeze(-1)

    def forward(self, x: Tensor) -> Tensor:
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        h = self.up(self.gather(x, perm), ends)
        y = self.down(self.act(h, x), ends).masked_fill(self.mask(ordered), 0.0)
        z = y * self.weights(w, perm).unsqueeze(-1)
        return self.total(z[self.inverse(perm)])


class BatchedBias(Batched):
    """Biases, gathered by the slot's id."""

    def __init__(self) -> None:
        super().__init__()
        self.b1 = nn.Parameter(torch.randn(E, 2 * I) * 0.1)

    def bias_ids(self, ids: Tensor) -> Tensor:
        return ids

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        ids = idx.reshape(-1)
        xs = self.rows(x, w)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1) + self.b1[self.bias_ids(ids)]
        y = torch.bmm(self.w2[ids], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return self.total(y, w)


def _other_bank(self: GroupedBias, ids: Tensor, ordered: Tensor) -> Tensor:
    return torch.cat([self.b1, self.b1])[ordered]


def _one_place(self: Grouped, perm: Tensor) -> Tensor:
    return torch.empty_like(perm).index_put((perm,), torch.arange(1))


near_miss("bias_of_two_banks", "bias", base=GroupedBias, bias=_other_bank)
near_miss("bias_by_unsorted_ids", base=GroupedBias, bias=lambda self, ids, o: self.b1[ids])
near_miss("bias_of_the_next_expert", "bias", base=BatchedBias, bias_ids=lambda self, ids: (ids + 1) % E)
near_miss("bias_a_number", "bias", base=GroupedBias, bias=lambda self, ids, o: self.b1[:, 0][o].unsqueeze(-1))


class _WideBias(GroupedBias):
    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16())


near_miss("bias_in_float32", base=_WideBias)


class _WideDownBias(Batched):
    """Experts in bfloat16, a bias after them in float32."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)
        self.b2 = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x.bfloat16(), self.router).float().softmax(-1).topk(K, dim=-1)
        ids = idx.reshape(-1)
        xs = self.rows(x.bfloat16(), w)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[ids], self.act(h, xs).unsqueeze(-1)).squeeze(-1) + self.b2[ids]
        return self.total(y, w)


near_miss("down_bias_in_float32", base=_WideDownBias)
near_miss("masked_from_another_expert", "masked", base=Masked, mask=lambda self, o: (o >= E - 1).unsqueeze(-1))
near_miss("masked_by_position", "masked", base=Masked, mask=lambda self, o: (o > 1).unsqueeze(-1))
near_miss("one_place_for_all", "slot order", base=Grouped, inverse=_one_place)
near_miss(
    "one_weight_a_token", "weights", base=Batched, total=lambda self, y, w: (y.view(-1, K, H) * w[:, :1, None]).sum(1)
)
near_miss(
    "whole_numbers_for_weights",
    "weights",
    base=Batched,
    total=lambda self, y, w: (y.view(-1, K, H) * (w[..., None] > 0).long()).sum(1),
)


def _two_banks(self: Grouped, a: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(a, self.w2.mT, ends) + grouped_mm(a, (self.w2 * 2).mT, ends)


near_miss("two_down_banks", "one down projection", base=Grouped, down=_two_banks)
near_miss(
    "rows_mixed_after_down", "row by row", base=Grouped, down=lambda self, a, n: grouped_mm(a, self.w2.mT, n).cumsum(0)
)
near_miss("tokens_of_a_longer_batch", "tokens", base=Grouped, gather=lambda self, x, p: torch.cat([x, x])[p // K])
near_miss("counts_in_half", "rounded", base=Grouped, ends=lambda self, n: n.half().cumsum(0, dtype=torch.int32))
near_miss(
    "clamped_ids_counted",
    "clamped",
    base=Grouped,
    counts=lambda self, ids, o: torch.histc(o.clamp(max=E - 1).float(), E, 0, E - 1),
)
near_miss("repeated_but_not_sorted", "slot order", base=Grouped, gather=lambda self, x, p: x.repeat_interleave(K, 0))
near_miss("tiled_then_sorted", "token numbers", base=Grouped, gather=lambda self, x, p: torch.cat([x] * K)[p])
near_miss("tokens_of_the_last_slots", "another order", base=Grouped, gather=lambda self, x, p: x[(T * K - 1 - p) // K])
near_miss(
    "counts_of_other_sorted_ids",
    "not the ones that were sorted",
    base=Grouped,
    counts=lambda self, ids, o: torch.histc(ids.flip(0)[torch.argsort(ids)].float(), E, 0, E - 1),
)
near_miss("half_the_columns", "columns", base=Grouped, act=lambda self, h, xs: F.silu(h[:, :I]))


class _ManyExperts(Grouped):
    """More experts than float32 bins tell apart."""

    n = 1100

    def __init__(self) -> None:
        super().__init__()
        for name, shape in {"router": (self.n, H), "w1": (self.n, 2 * I, H), "w2": (self.n, H, I)}.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape) * 0.4))

    def counts(self, ids: Tensor, ordered: Tensor) -> Tensor:
        return torch.histc(ordered.float(), bins=self.n, min=0, max=self.n - 1)


near_miss("more_experts_than_bins", "experts", base=_ManyExperts)


class _MaskedSlots(Batched):
    """Ids past the last expert are clamped to it, and their rows zeroed: not the same as dropping the slot."""

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        ids = idx.reshape(-1)
        xs = x.repeat_interleave(K, 0).masked_fill((ids >= E).unsqueeze(-1), 0.0)
        ids = ids.clamp(0, E - 1)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[ids], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return self.total(y, w)


near_miss("unsorted_rows_masked", "unsorted", base=_MaskedSlots)


class _MixedDtypes(Grouped):
    """Up in bfloat16, down in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(self.w1.detach().bfloat16())

    def gather(self, x: Tensor, perm: Tensor) -> Tensor:
        return super().gather(x, perm).bfloat16()

    def act(self, h: Tensor, xs: Tensor) -> Tensor:
        return super().act(h, xs).float()


near_miss("two_dtypes", "up is in torch.bfloat16", base=_MixedDtypes)


class _TwoRowsASlot(Batched):
    """Every slot has two experts, each with half of the output columns."""

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        ids = torch.stack([idx, E - 1 - idx], dim=-1).reshape(-1)
        xs = x.repeat_interleave(2 * K, 0)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[ids, : H // 2], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return (y.reshape(-1, K, H) * w.unsqueeze(-1)).sum(1)


near_miss("two_rows_a_slot", base=_TwoRowsASlot)


class _HalfRows(Batched):
    """The same with two banks of half the width, so that each weight is gathered by one index."""

    def __init__(self) -> None:
        super().__init__()
        self.w2 = nn.Parameter(torch.randn(E, H // 2, I) * 0.4)

    def forward(self, x: Tensor) -> Tensor:
        w, idx = F.linear(x, self.router).softmax(-1).topk(K, dim=-1)
        ids = torch.stack([idx, E - 1 - idx], dim=-1).reshape(-1)
        xs = x.repeat_interleave(2 * K, 0)
        h = torch.bmm(self.w1[ids], xs.unsqueeze(-1)).squeeze(-1)
        y = torch.bmm(self.w2[ids], self.act(h, xs).unsqueeze(-1)).squeeze(-1)
        return (y.reshape(-1, K, H) * w.unsqueeze(-1)).sum(1)


near_miss("half_rows", "one expert a slot", base=_HalfRows)


class _SortedSum(Grouped):
    """Neighbours in expert order are summed, not a token's slots."""

    def forward(self, x: Tensor) -> Tensor:
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        xs = self.gather(x, perm)
        y = self.down(self.act(self.up(xs, ends), xs), ends)
        return self.total(y * self.weights(w, perm).unsqueeze(-1))


near_miss("summed_in_sorted_order", "slot order", base=_SortedSum)
near_miss("sorted_as_floats", base=Grouped, order=lambda self, ids: tuple(torch.sort(ids.float())))


class _Overwritten(Grouped):
    """The tokens change after they were gathered."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * 1
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        xs = self.gather(x, perm)
        x.add_(1.0)
        y = self.down(self.act(self.up(xs, ends), xs), ends)
        z = y * self.weights(w, perm).unsqueeze(-1)
        return self.total(z[self.inverse(perm)]) + x


near_miss("tokens_overwritten", "no node holds", base=_Overwritten)


class _OrderOverwritten(Grouped):
    """A norm stands after the experts, and the row order it goes by is overwritten."""

    def forward(self, x: Tensor) -> Tensor:
        w, idx = self.route(x)
        ids = idx.reshape(-1)
        ordered, perm = self.order(ids)
        ends = self.ends(self.counts(ids, ordered))
        xs = self.gather(x, perm)
        y = F.rms_norm(self.down(self.act(self.up(xs, ends), xs), ends), (H,))
        inverse, weights = self.inverse(perm), self.weights(w, perm)
        perm.add_(1)
        return self.total((y * weights.unsqueeze(-1))[inverse])


near_miss("order_overwritten", "row order", base=_OrderOverwritten)


class _LooseExperts(nn.Module):
    """Weights that come in as data, so that under dynamic shapes their number and widths are not fixed."""

    def forward(self, x: Tensor, w: Tensor, idx: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        ids = idx.reshape(-1)
        xs = x.repeat_interleave(K, dim=0)
        g, u = torch.bmm(w1[ids], xs.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(w2[ids], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1).unsqueeze(-1)).view(-1, K, x.shape[-1]).sum(dim=1)


def _loose() -> tuple[Tensor, ...]:
    w1, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    return torch.randn(T, H), torch.rand(T, K), torch.randint(0, E, (T, K)), w1, w2


def _loose_widths() -> tuple[Tensor, ...]:
    args = _loose()
    for tensor, axis in ((args[0], 1), (args[3], 2), (args[4], 1)):
        torch._dynamo.mark_dynamic(tensor, axis)
    return args


class _FlatIds(nn.Module):
    """The experts of the slots as one list, under a symbolic number of experts a token."""

    def forward(self, x: Tensor, w: Tensor, idx: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        top_k = w.shape[1]
        xs = x[torch.arange(idx.shape[0]) // top_k]
        g, u = torch.bmm(w1[idx], xs.unsqueeze(-1)).squeeze(-1).chunk(2, dim=-1)
        y = torch.bmm(w2[idx], (F.silu(g) * u).unsqueeze(-1)).squeeze(-1)
        return (y * w.reshape(-1).unsqueeze(-1)).view(-1, top_k, x.shape[-1]).sum(dim=1)


def _flat_ids() -> tuple[Tensor, ...]:
    x, w, idx, w1, w2 = _loose()
    torch._dynamo.mark_dynamic(w, 1)
    flat = idx.reshape(-1)
    torch._dynamo.mark_dynamic(flat, 0)
    return x, w, flat, w1, w2


NEAR_MISSES += [
    NearMiss("symbolic_experts", "batched", _LooseExperts, ("number of experts",), _loose, dynamic=True),
    NearMiss("symbolic_widths", "batched", _LooseExperts, ("symbolic size",), _loose_widths),
    NearMiss("flat_ids_of_symbolic_slots", "batched", _FlatIds, ("as [T, K]",), _flat_ids),
]


def _clamped_by_rows(self: Grouped, h: Tensor, xs: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return torch.clamp_min(g, u)


def _relu6(self: Grouped, h: Tensor, xs: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return F.relu6(g) * u


def _whole_number(self: Grouped, h: Tensor, xs: Tensor) -> Tensor:
    g, u = h.chunk(2, dim=-1)
    return F.silu(g) * u * torch.full((), 2.7, dtype=torch.int64)


near_miss("activation_bound_of_rows", "a bound of clamp_min differs", base=Grouped, act=_clamped_by_rows)
near_miss("activation_without_a_gradient_at_its_bounds", "hardtanh", base=Grouped, act=_relu6)
near_miss("activation_with_an_integer_tensor", "torch.int64", base=Grouped, act=_whole_number)
near_miss("sum_of_whole_numbers", base=Grouped, total=lambda self, z: z.view(-1, K, H).long().sum(dim=1))
