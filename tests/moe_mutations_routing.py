"""Changes of meaning in the routing, one each: order, rows, offsets, experts and biases."""

from __future__ import annotations

import torch

from tests.moe_block import BATCHED, GROUPED, Block, Flow
from tests.moe_changes import PLAIN, SORTED, biased, fp32, inference, mutation, several
from tests.moe_forms import batched_mm, grouped_mm, oriented

# The order of the rows, and its inverse.


@mutation("sort", attacks="index", forms=SORTED)
def order_of_other_ids(m: Block, c: Flow) -> None:
    c.order = torch.sort(c.ids)[0]
    c.perm = torch.sort(c.ids.flip(0))[1]


@mutation("sort", attacks="order", forms=SORTED)
def descending(m: Block, c: Flow) -> None:
    c.order, c.perm = torch.sort(c.ids, descending=True)


@mutation("sort", attacks="order", forms=SORTED)
def order_rolled(m: Block, c: Flow) -> None:
    c.perm = torch.argsort(c.ids).roll(1)
    c.order = c.ids[c.perm]


@mutation("sort", attacks="order", forms=SORTED)
def order_reversed(m: Block, c: Flow) -> None:
    c.perm = torch.argsort(c.ids).flip(0)
    c.order = c.ids[c.perm]


@mutation("sort", attacks="order", forms=SORTED)
def order_applied_twice(m: Block, c: Flow) -> None:
    perm = torch.argsort(c.ids)
    c.perm = perm[perm]
    c.order = c.ids[c.perm]


@mutation("sort", attacks="order", forms=GROUPED)
def unsorted(m: Block, c: Flow) -> None:
    c.order, c.perm = c.ids.clone(), torch.arange(c.ids.shape[0])


@mutation("sort", attacks="index", forms=GROUPED, needs=several)
def sorted_by_slot_value(m: Block, c: Flow) -> None:
    c.perm = torch.argsort(c.ids * m.k + torch.arange(c.ids.shape[0]) % m.k * m.e)
    c.order = c.ids[c.perm]


@mutation("rows", attacks="rows", forms=GROUPED, needs=several)
def divided_by_one_more(m: Block, c: Flow) -> None:
    c.xs = c.x[c.perm // (m.k + 1)]


@mutation("rows", attacks="rows", forms=GROUPED, needs=several)
def tokens_by_remainder(m: Block, c: Flow) -> None:
    c.xs = c.x[c.perm % c.x.shape[0]]


@mutation("rows", attacks="rows", forms=PLAIN)
def rows_unsorted(m: Block, c: Flow) -> None:
    c.xs = c.x.repeat_interleave(m.k, dim=0)


@mutation("rows", attacks="rows", forms=BATCHED, needs=several)
def tiled_rows(m: Block, c: Flow) -> None:
    c.xs = c.x.repeat(m.k, 1)


@mutation("inverse", attacks="inverse", forms=GROUPED)
def perm_as_inverse(m: Block, c: Flow) -> None:
    c.inv = c.perm


@mutation("inverse", attacks="inverse", forms=GROUPED)
def inverse_of_reversed(m: Block, c: Flow) -> None:
    c.inv = torch.empty_like(c.perm)
    c.inv[c.perm] = torch.arange(c.perm.size(0)).flip(0)


@mutation("inverse", attacks="inverse", forms=GROUPED)
def inverse_of_other_order(m: Block, c: Flow) -> None:
    c.inv = torch.argsort(torch.argsort(c.ids.flip(0)))


@mutation("restore", attacks="inverse", forms=GROUPED)
def not_restored(m: Block, c: Flow) -> None:
    pass


@mutation("restore", attacks="inverse", forms=GROUPED)
def restored_twice(m: Block, c: Flow) -> None:
    c.z = c.z[c.inv][c.inv]


# Offsets and the experts that take part.


@mutation("offsets", attacks="offsets", forms=PLAIN, needs=fp32)
def histc_short_range(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 2)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


@mutation("offsets", attacks="meaning", forms=PLAIN, must_refuse=False)
def histc_wide_range(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN)
def counts_rolled(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts.roll(1), dim=0, dtype=torch.int32)


@mutation("offsets", attacks="index", forms=PLAIN)
def offsets_of_other_ids(m: Block, c: Flow) -> None:
    counts = torch.histc((m.e - 1 - c.ids).float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN, needs=fp32)
def offsets_are_starts(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = (torch.cumsum(counts, dim=0) - counts).to(torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN, needs=fp32)
def offsets_not_summed(m: Block, c: Flow) -> None:
    c.offs = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1).cummax(0)[0].to(torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN, needs=fp32)
def histc_shifted_range(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=1, max=m.e)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN)
def counts_reversed(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts.flip(0), dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN)
def counts_sorted(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts.sort()[0], dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN)
def clamped_ids_counted(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.clamp(max=m.e - 2).float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


@mutation("offsets", attacks="offsets", forms=PLAIN)
def offsets_of_the_next_group(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    c.offs = torch.cat([ends[1:], ends[-1:]])


@mutation("offsets", attacks="offsets", forms=PLAIN)
def first_group_emptied(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    ends = torch.cumsum(counts, dim=0, dtype=torch.int32)
    c.offs = torch.cat([torch.zeros_like(ends[:1]), ends[1:]])


@mutation("down", attacks="index", forms=PLAIN)
def other_offsets_down(m: Block, c: Flow) -> None:
    counts = torch.histc((m.e - 1 - c.ids).float(), bins=m.e, min=0, max=m.e - 1)
    c.y = grouped_mm(c.a, oriented(m, m.w2), torch.cumsum(counts, dim=0, dtype=torch.int32))


@mutation("up", attacks="partial", forms=PLAIN, needs=fp32)
def last_expert_left_out(m: Block, c: Flow) -> None:
    c.h = grouped_mm(c.xs, oriented(m, m.w1)[:-1], c.offs[:-1])


@mutation("down", attacks="partial", forms=PLAIN, needs=fp32)
def last_expert_left_out_down(m: Block, c: Flow) -> None:
    c.y = grouped_mm(c.a, oriented(m, m.w2)[:-1], c.offs[:-1])


@mutation("up", attacks="partial", forms=BATCHED)
def second_of_two_banks_up(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, torch.cat([m.w1, m.w1 * 2])[c.ids + m.e])


@mutation("down", attacks="partial", forms=BATCHED)
def second_of_two_banks_down(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, torch.cat([m.w2, m.w2 * 2])[c.ids + m.e])


@mutation("up", attacks="partial", forms=BATCHED)
def half_the_experts_up(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, m.w1[: m.e // 2][c.ids % (m.e // 2)])


@mutation("up", attacks="meaning", forms=PLAIN, must_refuse=False)
def experts_shifted(m: Block, c: Flow) -> None:
    c.h = grouped_mm(c.xs, oriented(m, torch.cat([m.w1[1:], m.w1[:1]])), c.offs)


@mutation("up", attacks="index", forms=BATCHED)
def other_index_up(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, m.w1[(c.ids + 1) % m.e])


@mutation("down", attacks="index", forms=BATCHED)
def other_index_down(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2[m.e - 1 - c.ids])


@mutation("down", attacks="index", forms=BATCHED, needs=several)
def index_of_other_slots(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2[c.idx.flip(1).reshape(-1)])


@mutation(after="act", attacks="index", forms=BATCHED, needs=inference)
def index_mutated_between(m: Block, c: Flow) -> None:
    c.ids.copy_(m.e - 1 - c.ids)


@mutation("up", attacks="bias", forms=PLAIN, needs=biased)
def bias_by_unsorted_ids(m: Block, c: Flow) -> None:
    c.h = grouped_mm(c.xs, oriented(m, m.w1), c.offs) + m.b1[c.ids]


@mutation("down", attacks="bias", forms=PLAIN, needs=biased)
def down_bias_by_unsorted_ids(m: Block, c: Flow) -> None:
    c.y = grouped_mm(c.a, oriented(m, m.w2), c.offs) + m.b2[c.ids]


@mutation("up", attacks="bias", forms=BATCHED, needs=biased)
def bias_of_next_expert(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, m.w1[c.ids]) + m.b1[(c.ids + 1) % m.e]


@mutation("down", attacks="bias", forms=BATCHED, needs=biased)
def down_bias_of_next_expert(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2[c.ids]) + m.b2[(c.ids + 1) % m.e]


@mutation("up", attacks="bias", forms=BATCHED, needs=lambda c: biased(c) and several(c))
def bias_of_other_slots(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, m.w1[c.ids]) + m.b1[c.idx.flip(1).reshape(-1)]


@mutation("down", attacks="bias", forms=BATCHED, needs=lambda c: biased(c) and several(c))
def down_bias_of_other_slots(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2[c.ids]) + m.b2[c.idx.flip(1).reshape(-1)]


@mutation(after="up", attacks="bias", needs=lambda c: not biased(c))
def bias_of_two_banks(m: Block, c: Flow) -> None:
    c.h = c.h + torch.cat([m.w1, m.w1 * 2]).mean(2 if m.c.out_in else 1)[(c.order if m.c.grouped else c.ids) + m.e]


@mutation(after="down", attacks="bias", needs=lambda c: not biased(c))
def one_number_for_bias(m: Block, c: Flow) -> None:
    c.y = c.y + m.correction.to(c.y.dtype).unsqueeze(-1)[c.order if m.c.grouped else c.ids]
