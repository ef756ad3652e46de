"""Seams of a Mixture-of-Experts block as plain functions: dispatches, experts, activations and combines to compose.

Each step reads and writes the values of one forward pass by name; axes as in ``moe_block``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.moe_block import Block, Config, Flow, Step
from tests.moe_routers import ROUTERS


def weight_dtype(m: Block, c: Flow) -> None:
    if m.c.combine == "model":
        c.w = c.w.to(c.x.dtype)


def flatten(m: Block, c: Flow) -> None:
    c.ids = c.idx.reshape(-1)


# Grouped dispatch: c.perm, c.order, c.xs [S, H], c.wg, c.offs [E].


def sort_ids(m: Block, c: Flow) -> None:
    c.order, c.perm = torch.sort(c.ids)


def argsort_ids(m: Block, c: Flow) -> None:
    c.perm = torch.argsort(c.ids)
    c.order = c.ids[c.perm]


def sorted_rows(m: Block, c: Flow) -> None:
    c.xs = c.x[c.perm // m.k]


def token_rows(m: Block, c: Flow) -> None:
    token = torch.arange(c.x.shape[0]).unsqueeze(1).expand(-1, m.k).reshape(-1)
    c.xs = c.x[token][c.perm]


def sorted_weights(m: Block, c: Flow) -> None:
    c.wg = c.w.reshape(-1)[c.perm]


def counted_offsets(m: Block, c: Flow) -> None:
    counts = torch.histc(c.order.float(), bins=m.e, min=0, max=m.e - 1)
    c.offs = torch.cumsum(counts, dim=0, dtype=torch.int32)


def mask_dropped(m: Block, c: Flow) -> None:
    c.dropped = (c.order >= m.e).unsqueeze(-1)
    c.order.clamp_(max=m.e - 1)
    c.xs.masked_fill_(c.dropped, 0.0)


def grouped_mm(rows: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """[S, in] @ [E, in, out] by groups that end at ``offs``: transformers' spellings, and a loop for the float64 truth.

    Rows past the last offset are zero in fp32 and fp64, uninitialised in bf16.
    """
    if weight.dtype == torch.float64:
        ends = offs.tolist()
        parts = [rows[a:b] @ w for a, b, w in zip([0, *ends], ends, weight, strict=False)]
        return torch.cat([*parts, rows.new_zeros(rows.shape[0] - sum(map(len, parts)), weight.shape[2])])
    if weight.dtype == torch.bfloat16:
        return torch._grouped_mm(rows.to(weight.dtype), weight, offs=offs)
    return torch.ops.transformers.grouped_mm_fallback(rows.to(weight.dtype), weight, offs)


def oriented(m: Block, weight: Tensor) -> Tensor:
    return weight.transpose(-2, -1) if m.c.out_in else weight


def grouped_up(m: Block, c: Flow) -> None:
    c.h = grouped_mm(c.xs, oriented(m, m.w1), c.offs)
    if m.b1 is not None:
        c.h.add_(m.b1[c.order])


def grouped_down(m: Block, c: Flow) -> None:
    c.y = grouped_mm(c.a, oriented(m, m.w2), c.offs)
    if m.b2 is not None:
        c.y = c.y + m.b2[c.order]


def mask_up(m: Block, c: Flow) -> None:
    c.h = c.h.masked_fill(c.dropped, 0.0)


def mask_down(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill(c.dropped, 0.0)


def weigh_sorted(m: Block, c: Flow) -> None:
    c.z = c.y * c.wg.unsqueeze(-1)


def scatter_inverse(m: Block, c: Flow) -> None:
    c.inv = torch.empty_like(c.perm)
    c.inv[c.perm] = torch.arange(c.perm.size(0))


def argsort_inverse(m: Block, c: Flow) -> None:
    c.inv = torch.argsort(c.perm)


def restore(m: Block, c: Flow) -> None:
    c.z = c.z[c.inv]


# Batched dispatch: one gathered weight a slot.


def slot_rows(m: Block, c: Flow) -> None:
    c.xs = c.x.repeat_interleave(m.k, dim=0)


def batched_mm(m: Block, rows: Tensor, weight: Tensor) -> Tensor:
    """[S, in] by [S, out, in] (or [S, in, out]) slot by slot."""
    if m.c.form == "batched_wx":
        return torch.bmm(weight if m.c.out_in else weight.transpose(-2, -1), rows.unsqueeze(-1)).squeeze(-1)
    return torch.bmm(rows.unsqueeze(1), oriented(m, weight)).squeeze(1)


def batched_up(m: Block, c: Flow) -> None:
    c.h = batched_mm(m, c.xs, m.w1[c.ids])
    if m.b1 is not None:
        c.h.add_(m.b1[c.ids])


def batched_down(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a, m.w2[c.ids])
    if m.b2 is not None:
        c.y = c.y + m.b2[c.ids]


def weigh_slots(m: Block, c: Flow) -> None:
    c.z = c.y * c.w.reshape(-1).unsqueeze(-1)


# Experts and combine.


def split_halves(m: Block, c: Flow) -> None:
    if m.c.halves == "single":
        c.g = c.u = c.h
    elif m.c.halves == "interleaved":
        c.g, c.u = c.h[..., ::2], c.h[..., 1::2]
    elif m.c.halves == "gate_up":
        c.g, c.u = c.h.chunk(2, dim=-1)
    else:
        c.u, c.g = c.h.chunk(2, dim=-1)


#: Where clamps bend: half way between two bf16 numbers, so that rounding once never takes a value to the other side,
#: where the derivative is another.
NEAR, FAR = 1 + 2**-8, 1.5 + 2**-8


def clamped_glu(m: Block, g: Tensor, u: Tensor) -> Tensor:
    g, u = g.clamp(max=FAR), u.clamp(min=-FAR, max=FAR)
    return (u + 1) * (g * torch.sigmoid(g * 1.702))


def clamped_silu(m: Block, g: Tensor, u: Tensor) -> Tensor:
    return F.silu(g.clamp(max=NEAR)) * u.clamp(min=-NEAR, max=NEAR)


ACTIVATIONS: dict[str, Callable[[Block, Tensor, Tensor], Tensor]] = {
    "silu": lambda m, g, u: F.silu(g) * u,
    "gelu": lambda m, g, u: F.gelu(g) * u,
    "gelu_tanh": lambda m, g, u: F.gelu(g, approximate="tanh") * u,
    "relu": lambda m, g, u: F.relu(g) * u,
    "relu2": lambda m, g, u: F.relu(g).square() * u,
    "clamped_glu": clamped_glu,
    "clamped_silu": clamped_silu,
    "fp32_detour": lambda m, g, u: (F.silu(g.to(m.wide)) * u.to(m.wide)).to(m.w2.dtype),
    "softcap": lambda m, g, u: F.silu(torch.tanh(g / 3.0) * 3.0) * u,
}
UNGATED: dict[str, Callable[[Block, Tensor], Tensor]] = {
    "silu": lambda m, h: F.silu(h),
    "gelu": lambda m, h: F.gelu(h),
    "gelu_tanh": lambda m, h: F.gelu(h, approximate="tanh"),
    "relu": lambda m, h: F.relu(h),
    "relu2": lambda m, h: torch.square(F.relu(h)),
}


def activate(m: Block, c: Flow) -> None:
    name = m.c.activation
    c.a = ACTIVATIONS[name](m, c.g, c.u) if m.c.gated else UNGATED[name](m, c.h)


def combine(m: Block, c: Flow) -> None:
    if m.c.combine == "rows_cast":
        c.z = c.z.to(c.x.dtype)
    c.out = c.z.view(c.x.shape[0], m.k, -1).sum(dim=1).to(c.x.dtype)


def finish(m: Block, c: Flow) -> None:
    """A shared expert beside the routed ones, and the router's loss."""
    if m.c.shared != "none":
        shared = F.silu(F.linear(c.x, m.shared_w))
        if m.c.shared == "gated":
            shared = shared * torch.sigmoid(F.linear(c.x, m.shared_gate))
        if m.c.shared == "inplace":
            c.out += shared
        else:
            c.out = c.out + shared
    if m.c.aux:
        c.extra.append(c.logits.float().logsumexp(-1).square().mean())


GROUPED_SEAMS: dict[str, Step] = {
    "weight_dtype": weight_dtype,
    "flatten": flatten,
    "sort": sort_ids,
    "rows": sorted_rows,
    "weights": sorted_weights,
    "offsets": counted_offsets,
    "up": grouped_up,
    "halves": split_halves,
    "act": activate,
    "down": grouped_down,
    "weigh": weigh_sorted,
    "inverse": scatter_inverse,
    "restore": restore,
    "combine": combine,
    "finish": finish,
}
BATCHED_SEAMS: dict[str, Step] = {
    "weight_dtype": weight_dtype,
    "flatten": flatten,
    "rows": slot_rows,
    "up": batched_up,
    "halves": split_halves,
    "act": activate,
    "down": batched_down,
    "weigh": weigh_slots,
    "combine": combine,
    "finish": finish,
}


def steps_of(config: Config) -> dict[str, list[Step]]:
    """The steps of a positive sample by seam, in the order they run."""
    seams = {"router": ROUTERS[config.router]} | (GROUPED_SEAMS if config.grouped else BATCHED_SEAMS)
    if config.form == "grouped_argsort":
        seams |= {"sort": argsort_ids, "rows": token_rows, "inverse": argsort_inverse}
    steps = {name: [step] for name, step in seams.items()}
    if config.form == "grouped_sentinel":
        steps["offsets"].append(mask_dropped)
        steps["up"].append(mask_up)
        steps["down"].append(mask_down)
    return steps
