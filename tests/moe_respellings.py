"""Changes of spelling: what is computed stays the same, the operations do not."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.moe_block import BATCHED, GROUPED, Block, Config, Flow
from tests.moe_changes import PLAIN, SORTED, fp32, gated, halved, respelling
from tests.moe_forms import batched_mm, counted_offsets, grouped_mm, oriented, sorted_rows


def silu(config: Config) -> bool:
    return config.gated and config.activation == "silu"


def relu2(config: Config) -> bool:
    return config.gated and config.activation == "relu2"


def unbiased(config: Config) -> bool:
    return not config.bias


# Order, rows, offsets, inverse.


@respelling("flatten")
def ids_by_flatten(m: Block, c: Flow) -> None:
    c.ids = c.idx.flatten()


@respelling("flatten")
def ids_by_view(m: Block, c: Flow) -> None:
    c.ids = torch.flatten(c.idx.unsqueeze(0), 0).view(-1)


@respelling("sort", forms=SORTED)
def stable_sort(m: Block, c: Flow) -> None:
    c.order, c.perm = c.ids.sort(stable=True)


@respelling("sort", forms=SORTED)
def sorted_by_gather(m: Block, c: Flow) -> None:
    c.perm = c.ids.argsort(dim=0)
    c.order = torch.gather(c.ids, 0, c.perm)


@respelling("rows", forms=GROUPED)
def rows_by_index_select(m: Block, c: Flow) -> None:
    c.xs = c.x.index_select(0, torch.div(c.perm, m.k, rounding_mode="floor"))


@respelling("rows", forms=GROUPED)
def rows_by_floor_divide(m: Block, c: Flow) -> None:
    c.xs = c.x[torch.floor_divide(c.perm, m.k), :]


@respelling("rows", forms=GROUPED)
def rows_of_repeated_tokens(m: Block, c: Flow) -> None:
    c.xs = c.x.repeat_interleave(m.k, dim=0)[c.perm]


@respelling("rows", forms=BATCHED)
def rows_by_expand(m: Block, c: Flow) -> None:
    c.xs = c.x.unsqueeze(1).expand(-1, m.k, -1).reshape(-1, c.x.shape[-1])


@respelling("rows", forms=BATCHED)
def rows_by_token_index(m: Block, c: Flow) -> None:
    c.xs = c.x[torch.arange(c.x.shape[0]).repeat_interleave(m.k)]


@respelling("weights", forms=GROUPED)
def weights_as_column(m: Block, c: Flow) -> None:
    c.wg = c.w.reshape(-1, 1)[c.perm].squeeze(-1)


@respelling("weights", forms=GROUPED)
def weights_by_take(m: Block, c: Flow) -> None:
    c.wg = c.w.flatten().index_select(0, c.perm)


@respelling("offsets", forms=PLAIN)
def counted_unsorted(m: Block, c: Flow) -> None:
    c.offs = c.ids.to(torch.float32).histc(m.e, 0, m.e - 1).cumsum(0, dtype=torch.int32)


@respelling("offsets", forms=PLAIN)
def summed_as_int32(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = counts.to(torch.int32).cumsum(-1, dtype=torch.int32)


@respelling("rows", forms=("grouped",))
def offsets_before_rows(m: Block, c: Flow) -> None:
    counted_offsets(m, c)
    sorted_rows(m, c)


@respelling("inverse", forms=GROUPED)
def inverse_by_sort(m: Block, c: Flow) -> None:
    c.inv = torch.sort(c.perm)[1]


@respelling("inverse", forms=GROUPED)
def inverse_by_scatter(m: Block, c: Flow) -> None:
    c.inv = torch.zeros_like(c.perm).scatter(0, c.perm, torch.arange(c.perm.shape[0]))


@respelling("restore", forms=GROUPED)
def restored_by_index_select(m: Block, c: Flow) -> None:
    c.z = torch.index_select(c.z, 0, c.inv)


# Matmuls.


@respelling("up", forms=BATCHED, needs=unbiased)
def up_by_matmul(m: Block, c: Flow) -> None:
    c.h = (c.xs.unsqueeze(-2) @ oriented(m, m.w1[c.ids])).squeeze(-2)


@respelling("down", forms=BATCHED, needs=unbiased)
def down_indexed_by_select(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2.index_select(0, c.ids))


@respelling("down", forms=BATCHED, needs=unbiased)
def down_in_the_other_order(m: Block, c: Flow) -> None:
    c.y = torch.matmul(oriented(m, m.w2[c.ids]).transpose(1, 2), c.a[..., None])[..., 0]


@respelling("up", forms=PLAIN, needs=unbiased)
def up_cast_and_mT(m: Block, c: Flow) -> None:
    weight = m.w1.to(c.xs.dtype)
    c.h = grouped_mm(c.xs.contiguous(), weight.mT if m.c.out_in else weight, c.offs)


# Activation.


@respelling("halves", needs=halved)
def halves_by_slices(m: Block, c: Flow) -> None:
    first, second = c.h[..., : m.c.I], c.h[..., m.c.I :]
    c.g, c.u = (first, second) if m.c.halves == "gate_up" else (second, first)


@respelling("halves", needs=halved)
def halves_by_split(m: Block, c: Flow) -> None:
    first, second = torch.split(c.h, m.c.I, dim=1)
    c.g, c.u = (first, second) if m.c.halves == "gate_up" else (second, first)


@respelling("halves", needs=halved)
def halves_by_narrow(m: Block, c: Flow) -> None:
    first, second = c.h.narrow(-1, 0, m.c.I), c.h.narrow(-1, m.c.I, m.c.I)
    c.g, c.u = (first, second) if m.c.halves == "gate_up" else (second, first)


@respelling("halves", needs=lambda c: c.halves == "interleaved")
def halves_by_strided_slices(m: Block, c: Flow) -> None:
    c.g, c.u = c.h[:, 0 : 2 * m.c.I : 2], c.h[:, 1 : 2 * m.c.I : 2]


@respelling("act", needs=silu)
def silu_written_out(m: Block, c: Flow) -> None:
    c.a = c.g * torch.sigmoid(c.g) * c.u


@respelling("act", needs=silu)
def silu_commuted(m: Block, c: Flow) -> None:
    c.a = torch.mul(c.u, F.silu(c.g))


@respelling("act", needs=silu)
def silu_in_place(m: Block, c: Flow) -> None:
    c.a = F.silu(c.g).mul_(c.u)


@respelling("act", needs=relu2)
def relu_to_the_power_of_two(m: Block, c: Flow) -> None:
    c.a = torch.relu(c.g).pow(2) * c.u


@respelling("act", needs=relu2)
def relu_times_itself(m: Block, c: Flow) -> None:
    r = c.g.relu()
    c.a = c.u * (r * r)


@respelling("act", needs=lambda c: c.gated and c.activation == "gelu")
def gelu_module(m: Block, c: Flow) -> None:
    c.a = torch.nn.GELU()(c.g) * c.u


@respelling(after="halves", needs=gated)
def halves_made_contiguous(m: Block, c: Flow) -> None:
    c.g, c.u = c.g.contiguous(), c.u.contiguous()


# Combine.


@respelling("weigh", forms=GROUPED)
def weighed_commuted(m: Block, c: Flow) -> None:
    c.z = torch.mul(c.wg[:, None], c.y)


@respelling("weigh", forms=BATCHED)
def slots_weighed_as_cube(m: Block, c: Flow) -> None:
    c.z = (c.y.view(*c.idx.shape, -1) * c.w[..., None]).flatten(0, 1)


@respelling("weigh", forms=BATCHED)
def slots_weighed_by_column(m: Block, c: Flow) -> None:
    c.z = c.w.view(-1, 1) * c.y


@respelling("combine", needs=lambda c: c.combine != "rows_cast")
def summed_over_negative_axis(m: Block, c: Flow) -> None:
    c.out = torch.sum(c.z.reshape(c.x.shape[0], m.k, c.x.shape[1]), dim=-2).to(c.x.dtype)


@respelling("combine", needs=lambda c: c.combine != "rows_cast")
def summed_after_unflatten(m: Block, c: Flow) -> None:
    c.out = c.z.unflatten(0, (-1, m.k)).sum(1).type_as(c.x)


# Steps that change nothing.


@respelling(after="up")
def up_cast_to_itself(m: Block, c: Flow) -> None:
    c.h = c.h.to(c.h.dtype)


@respelling(after="up", needs=fp32)
def up_viewed(m: Block, c: Flow) -> None:
    c.h = c.h.unsqueeze(0).squeeze(0).view(c.h.shape)


@respelling(after="act")
def activation_cloned(m: Block, c: Flow) -> None:
    c.a = c.a.clone()


@respelling(after="down")
def down_reshaped(m: Block, c: Flow) -> None:
    c.y = c.y.reshape(c.y.shape[0], 1, -1).flatten(1)


@respelling(after="weigh")
def rows_made_contiguous(m: Block, c: Flow) -> None:
    c.z = c.z.contiguous()


@respelling(after="rows", forms=(*PLAIN, *BATCHED))
def gathered_rows_viewed(m: Block, c: Flow) -> None:
    c.xs = c.xs.view(c.xs.shape).clone()
