"""Changes of meaning in weights, combine, activation and what leaves the region, one each."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.moe_block import BATCHED, GROUPED, Block, Flow
from tests.moe_changes import PLAIN, fp32, gated, halved, mutation, several
from tests.moe_forms import activate, batched_mm, grouped_mm, oriented

# Routing weights and the sum over K.


@mutation("weights", attacks="weight", forms=GROUPED)
def weights_unsorted(m: Block, c: Flow) -> None:
    c.wg = c.w.reshape(-1)


@mutation("weights", attacks="weight", forms=GROUPED)
def weights_by_other_order(m: Block, c: Flow) -> None:
    c.wg = c.w.reshape(-1)[torch.argsort(c.perm)]


@mutation("weights", attacks="meaning", forms=GROUPED, needs=several, must_refuse=False)
def weights_slot_major(m: Block, c: Flow) -> None:
    c.wg = c.w.t().reshape(-1)[c.perm]


@mutation("weigh", attacks="meaning", forms=BATCHED, needs=several, must_refuse=False)
def slot_weights_slot_major(m: Block, c: Flow) -> None:
    c.z = c.y * c.w.t().reshape(-1, 1)


@mutation("weights", attacks="weight", forms=GROUPED)
def weights_rolled(m: Block, c: Flow) -> None:
    c.wg = c.w.reshape(-1)[c.perm].roll(1)


@mutation("weigh", attacks="weight", forms=BATCHED, needs=several)
def one_weight_a_token(m: Block, c: Flow) -> None:
    c.z = (c.y.view(-1, m.k, c.y.shape[-1]) * c.w[:, :1, None]).flatten(0, 1)


@mutation(after="weight_dtype", attacks="weight")
def whole_number_weights(m: Block, c: Flow) -> None:
    c.w = (c.w > 0.25).long()


@mutation(after="weight_dtype", attacks="meaning", must_refuse=False)
def weights_squared(m: Block, c: Flow) -> None:
    c.w = c.w * c.w


@mutation(after="weight_dtype", attacks="meaning", must_refuse=False)
def weights_detached(m: Block, c: Flow) -> None:
    c.w = c.w.detach()


@mutation("weigh", attacks="meaning", must_refuse=False)
def unweighted(m: Block, c: Flow) -> None:
    c.z = c.y


@mutation(after="weigh", attacks="meaning", must_refuse=False)
def weighted_twice(m: Block, c: Flow) -> None:
    c.z = c.z * (c.wg if m.c.grouped else c.w.reshape(-1)).unsqueeze(-1)


@mutation(after="rows", attacks="rows", forms=BATCHED, needs=several)
def weight_on_input(m: Block, c: Flow) -> None:
    c.xs = c.xs * c.w.reshape(-1, 1).to(c.xs.dtype)


@mutation(after="weights", attacks="rows", forms=PLAIN)
def sorted_weight_on_input(m: Block, c: Flow) -> None:
    c.xs = c.xs * c.wg.unsqueeze(-1).to(c.xs.dtype)


@mutation(after="up", attacks="elementwise")
def weight_before_activation(m: Block, c: Flow) -> None:
    c.h = c.h * (c.wg if m.c.grouped else c.w.reshape(-1)).unsqueeze(-1).to(c.h.dtype)


@mutation(after="act", attacks="elementwise")
def weight_before_down(m: Block, c: Flow) -> None:
    c.a = c.a * (c.wg if m.c.grouped else c.w.reshape(-1)).unsqueeze(-1).to(c.a.dtype)


@mutation(after="weigh", attacks="weight", forms=GROUPED)
def scaled_by_sorted_position(m: Block, c: Flow) -> None:
    c.z = c.z * torch.arange(1, c.z.shape[0] + 1).unsqueeze(-1).to(c.z.dtype)


@mutation(after="down", attacks="meaning", must_refuse=False)
def scaled_by_expert(m: Block, c: Flow) -> None:
    c.y = c.y * m.correction[c.order if m.c.grouped else c.ids].unsqueeze(-1).to(c.y.dtype)


@mutation("combine", attacks="combine", needs=several)
def mean_over_slots(m: Block, c: Flow) -> None:
    c.out = c.z.view(c.x.shape[0], m.k, -1).mean(dim=1).to(c.x.dtype)


@mutation("combine", attacks="combine", needs=lambda c: several(c) and c.shared != "inplace")  # amax saves its result
def max_over_slots(m: Block, c: Flow) -> None:
    c.out = c.z.view(c.x.shape[0], m.k, -1).amax(dim=1).to(c.x.dtype)


@mutation("combine", attacks="combine", needs=several)
def slot_major_sum(m: Block, c: Flow) -> None:
    c.out = c.z.view(m.k, c.x.shape[0], -1).sum(dim=0).to(c.x.dtype)


@mutation("combine", attacks="combine", needs=several)
def last_slot_dropped(m: Block, c: Flow) -> None:
    c.out = c.z.view(c.x.shape[0], m.k, -1)[:, :-1].sum(dim=1).to(c.x.dtype)


@mutation("combine", attacks="combine", needs=several)
def hidden_major_view(m: Block, c: Flow) -> None:
    c.out = c.z.view(c.x.shape[0], -1, m.k).sum(dim=2).to(c.x.dtype)


# The activation, and what stands inside the region.


@mutation("halves", attacks="halves", needs=halved)
def halves_overlap(m: Block, c: Flow) -> None:
    c.g, c.u = c.h[:, : m.c.I], c.h[:, m.c.I - 1 : -1]


@mutation("halves", attacks="meaning", needs=gated, must_refuse=False)
def one_half_twice(m: Block, c: Flow) -> None:
    c.g = c.u = c.h[:, : m.c.I]


@mutation("act", attacks="meaning", needs=gated, must_refuse=False)
def halves_swapped(m: Block, c: Flow) -> None:
    c.a = F.silu(c.u) * c.g


@mutation("act", attacks="meaning", needs=gated, must_refuse=False)
def activated_product(m: Block, c: Flow) -> None:
    c.a = F.silu(c.g * c.u)


@mutation("act", attacks="elementwise", needs=lambda c: c.gated and fp32(c))
def bf16_inside(m: Block, c: Flow) -> None:
    c.a = F.silu(c.g.to(torch.bfloat16)).to(c.g.dtype) * c.u


@mutation(after="act", attacks="elementwise")
def features_rolled(m: Block, c: Flow) -> None:
    c.a = c.a.roll(1, -1)


@mutation(after="act", attacks="elementwise")
def rows_flipped(m: Block, c: Flow) -> None:
    c.a = c.a.flip(0)


@mutation(after="act", attacks="elementwise")
def softmax_over_rows(m: Block, c: Flow) -> None:
    c.a = c.a.softmax(0)


@mutation(after="act", attacks="elementwise")
def summed_over_rows(m: Block, c: Flow) -> None:
    c.a = c.a.cumsum(0)


@mutation(after="act", attacks="elementwise")
def normalised_inside(m: Block, c: Flow) -> None:
    c.a = F.rms_norm(c.a, c.a.shape[-1:])


@mutation(after="act", attacks="elementwise")
def dropped_out(m: Block, c: Flow) -> None:
    c.a = F.dropout(c.a, 0.5, training=True)


@mutation(after="act", attacks="elementwise")
def scaled_by_input(m: Block, c: Flow) -> None:
    c.a = c.a * c.xs[:, :1]


@mutation(after="act", attacks="elementwise")
def expert_zero_silenced(m: Block, c: Flow) -> None:
    c.a = c.a * ((c.order if m.c.grouped else c.ids) != 0).unsqueeze(-1)


@mutation(after="down", attacks="residual")
def residual_inside(m: Block, c: Flow) -> None:
    c.y = c.y + c.xs


@mutation(after="act", attacks="gradient")
def detached_inside(m: Block, c: Flow) -> None:
    c.a = c.a.detach()


@mutation(after="rows", attacks="gradient", forms=(*PLAIN, *BATCHED), needs=several)
def rows_detached(m: Block, c: Flow) -> None:
    c.xs = c.xs.detach()


@mutation("act", attacks="gradient", needs=lambda c: c.train)  # else there is no gradient to lose
def no_grad_inside(m: Block, c: Flow) -> None:
    with torch.no_grad():
        activate(m, c)


@mutation("halves", attacks="gradient", needs=halved)
def gate_detached(m: Block, c: Flow) -> None:
    c.g, c.u = c.h.chunk(2, dim=-1)
    c.g = c.g.detach()


@mutation(after="up", attacks="interior")
def preactivation_returned(m: Block, c: Flow) -> None:
    c.extra.append(c.h)


@mutation(after="act", attacks="interior")
def activation_returned(m: Block, c: Flow) -> None:
    c.extra.append(c.a.abs().amax())


@mutation(after="down", attacks="interior")
def expert_rows_returned(m: Block, c: Flow) -> None:
    c.extra.append(c.y)


@mutation(after="weigh", attacks="interior")
def weighted_rows_returned(m: Block, c: Flow) -> None:
    c.extra.append(c.z)


@mutation(after="up", attacks="interior")
def preactivation_stashed(m: Block, c: Flow) -> None:
    m.stash.copy_(c.h.detach()[0])


@mutation(after="rows", attacks="meaning", must_refuse=False)
def gathered_rows_returned(m: Block, c: Flow) -> None:
    c.extra.append(c.xs.mean())


@mutation(after="up", attacks="meaning", must_refuse=False)
def doubled_through_a_view(m: Block, c: Flow) -> None:
    c.h = c.h.clone()
    c.h.view(-1).mul_(2)


@mutation("up", attacks="matmuls", forms=PLAIN, needs=halved)
def gate_and_up_from_two_inputs(m: Block, c: Flow) -> None:
    first, second = oriented(m, m.w1).chunk(2, dim=-1)
    c.h = torch.cat(
        [grouped_mm(c.xs, first.contiguous(), c.offs), grouped_mm(c.xs * 2, second.contiguous(), c.offs)], -1
    )


@mutation("up", attacks="matmuls", forms=BATCHED, needs=halved)
def halves_from_two_experts(m: Block, c: Flow) -> None:
    here, next_one = batched_mm(m, c.xs, m.w1[c.ids]), batched_mm(m, c.xs, m.w1[(c.ids + 1) % m.e])
    c.h = torch.cat([here[:, : m.c.I], next_one[:, m.c.I :]], -1)
