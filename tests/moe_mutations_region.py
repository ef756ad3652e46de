"""Changes of meaning around the experts, one each: masks, dtypes, memory that is overwritten, matmuls without a
partner, routers without experts, and steps that cannot be followed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.moe_block import BATCHED, GROUPED, HAS_FALLBACK, Block, Config, Flow
from tests.moe_changes import PLAIN, bf16, biased, fp32, inference, mutation
from tests.moe_forms import batched_mm, counted_offsets, grouped_mm, oriented


def row_ids(m: Block, c: Flow) -> Tensor:
    """The expert of each row."""
    return c.order if m.c.grouped else c.ids


def repeated(config: Config) -> bool:
    """Gathered rows are another tensor than the tokens."""
    return config.grouped or config.K > 1


# Masks: only rows of ids past the last expert may be zeroed.


def on_product(config: Config) -> bool:
    """A mask is read at the matmul. Right after the reshape of an unbiased batched one it is row-wise work."""
    return config.grouped or config.bias


@mutation(after="rows", attacks="mask", forms=(*PLAIN, *BATCHED))
def last_expert_masked_at_rows(m: Block, c: Flow) -> None:
    c.xs = c.xs.masked_fill((row_ids(m, c) >= m.e - 1).unsqueeze(-1), 0.0)


@mutation(after="up", attacks="mask", needs=on_product)
def last_expert_masked_at_up(m: Block, c: Flow) -> None:
    c.h = c.h.masked_fill((row_ids(m, c) >= m.e - 1).unsqueeze(-1), 0.0)


@mutation(after="down", attacks="mask", needs=on_product)
def last_expert_masked_at_down(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill((row_ids(m, c) >= m.e - 1).unsqueeze(-1), 0.0)


@mutation(after="down", attacks="mask", needs=on_product)
def last_expert_filled(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill((row_ids(m, c) >= m.e - 1).unsqueeze(-1), 0.5)


@mutation(after="down", attacks="mask", needs=on_product)
def all_but_first_expert_masked(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill((row_ids(m, c) > 0).unsqueeze(-1), 0.0)


@mutation(after="down", attacks="mask", needs=on_product)
def last_row_masked(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill((torch.arange(c.y.shape[0]) == c.y.shape[0] - 1).unsqueeze(-1), 0.0)


@mutation(after="down", attacks="mask", needs=on_product)
def negative_values_masked(m: Block, c: Flow) -> None:
    c.y = c.y.masked_fill(c.y < 0, 0.0)


# Dtypes: up and down compute in one.


def cast_down(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a.to(m.w2.dtype), m.w2[c.ids])
    if m.b2 is not None:
        c.y = c.y + m.b2[c.ids]


def narrow_up(m: Block, c: Flow, dtype: torch.dtype) -> None:
    c.h = batched_mm(m, c.xs.to(dtype), m.w1.to(dtype)[c.ids])
    if m.b1 is not None:
        c.h = c.h + m.b1.to(dtype)[c.ids]


@mutation("up", attacks="dtype", forms=BATCHED, needs=fp32, also={"down": cast_down})
def up_in_bf16(m: Block, c: Flow) -> None:
    narrow_up(m, c, torch.bfloat16)


@mutation("up", attacks="dtype", forms=BATCHED, needs=fp32, also={"down": cast_down})
def up_in_fp16(m: Block, c: Flow) -> None:
    narrow_up(m, c, torch.float16)


@mutation("down", attacks="dtype", forms=BATCHED, needs=bf16)
def down_widened_after_gather(m: Block, c: Flow) -> None:
    c.y = batched_mm(m, c.a.float(), m.w2[c.ids].float())


@mutation("down", attacks="dtype", needs=lambda c: bf16(c) and (HAS_FALLBACK or not c.grouped))
def down_in_fp32(m: Block, c: Flow) -> None:
    if m.c.grouped:
        c.y = grouped_mm(c.a.float(), oriented(m, m.w2.float()), c.offs)
    else:
        c.y = batched_mm(m, c.a.float(), m.w2.float()[c.ids])


# Memory: what the region reads is there when the region ends.


@mutation("rows", attacks="meaning", forms=BATCHED, must_refuse=False)
def input_mutated_after_gather(m: Block, c: Flow) -> None:
    c.x = c.x.clone()
    c.xs = c.x.repeat_interleave(m.k, dim=0)
    c.x.mul_(2)


@mutation("rows", attacks="meaning", forms=PLAIN, must_refuse=False)
def input_mutated_after_sort(m: Block, c: Flow) -> None:
    c.x = c.x.clone()
    c.xs = c.x[c.perm // m.k]
    c.x.mul_(2)


@mutation(after="up", attacks="meaning", needs=lambda c: c.router != "topk_softmax", must_refuse=False)
def weights_mutated_late(m: Block, c: Flow) -> None:
    c.w.mul_(0.5)


@mutation(after="offsets", attacks="mutation", forms=PLAIN, needs=inference, must_refuse=False)
def index_mutated_late(m: Block, c: Flow) -> None:
    c.idx.fill_(0)


def offsets_then_zero_ids(m: Block, c: Flow) -> None:
    counted_offsets(m, c)
    c.ids.zero_()


@mutation("flatten", attacks="mutation", forms=PLAIN, also={"offsets": offsets_then_zero_ids})
def ids_overwritten(m: Block, c: Flow) -> None:
    c.ids = (c.idx.reshape(-1) + 1) % m.e


@mutation("rows", attacks="mutation", needs=repeated)
def tokens_overwritten(m: Block, c: Flow) -> None:
    tokens = c.x * 1.25
    c.xs = tokens[c.perm // m.k] if m.c.grouped else tokens.repeat_interleave(m.k, dim=0)
    tokens.zero_()


@mutation("rows", attacks="mutation", needs=repeated)
def first_token_overwritten(m: Block, c: Flow) -> None:
    tokens = c.x * 1.25
    c.xs = tokens[c.perm // m.k] if m.c.grouped else tokens.repeat_interleave(m.k, dim=0)
    tokens[0].zero_()


@mutation("weights", attacks="mutation", forms=GROUPED)
def weights_overwritten(m: Block, c: Flow) -> None:
    w = c.w * 1.25
    c.wg = w.reshape(-1)[c.perm]
    w.zero_()


@mutation("down", attacks="mutation", forms=BATCHED)
def bank_overwritten(m: Block, c: Flow) -> None:
    bank = m.w2 * 1.25
    c.y = batched_mm(m, c.a, bank[c.ids])
    bank.zero_()


@mutation("up", attacks="mutation", forms=BATCHED, needs=biased)
def bias_overwritten(m: Block, c: Flow) -> None:
    bias = m.b1 * 1.25
    c.h = batched_mm(m, c.xs, m.w1[c.ids]) + bias[c.ids]
    bias.zero_()


# Partners: two matmuls of which one follows from the other, and experts behind every router.


def dense_up(m: Block, c: Flow) -> None:
    c.h = c.xs.to(m.w1.dtype) @ oriented(m, m.w1).mean(0)


def dense_down(m: Block, c: Flow) -> None:
    c.y = c.a @ oriented(m, m.w2).mean(0)


@mutation("up", attacks="pair")
def up_averaged(m: Block, c: Flow) -> None:
    dense_up(m, c)


@mutation("down", attacks="pair")
def down_averaged(m: Block, c: Flow) -> None:
    dense_down(m, c)


@mutation(after="act", attacks="pair", needs=lambda c: c.I <= c.H)
def down_of_the_tokens(m: Block, c: Flow) -> None:
    c.extra.append(c.h.float().mean())
    c.a = c.a.shape[-1] * F.linear(c.xs, m.shared_w)[:, : m.c.I].contiguous()


def scored(config: Config) -> bool:
    """Experts are chosen by their scores."""
    return config.router != "index_table"


@mutation("up", attacks="router", needs=scored, also={"down": dense_down})
def experts_averaged(m: Block, c: Flow) -> None:
    dense_up(m, c)
    c.extra.append(F.one_hot(c.idx, m.e).float().mean((0, 1)).square().sum())


def one_hot_rows(m: Block, c: Flow, rows: Tensor, weight: Tensor) -> Tensor:
    """[S, in] @ [E, in, out], where each row meets the expert after its own."""
    ids = F.one_hot(row_ids(m, c), m.e).roll(1, -1).to(weight.dtype)
    return torch.einsum("si,eio,se->so", rows.to(weight.dtype), weight, ids)


def one_hot_down(m: Block, c: Flow) -> None:
    c.y = one_hot_rows(m, c, c.a, oriented(m, m.w2))


@mutation("up", attacks="router", needs=scored, also={"down": one_hot_down})
def experts_by_one_hot(m: Block, c: Flow) -> None:
    c.h = one_hot_rows(m, c, c.xs, oriented(m, m.w1))


# Steps that cannot be followed: a region of autocast that ends between the router and the sum, a body that writes.


def starts_at_choice(config: Config) -> bool:
    """The region starts at the router's choice: no view of the tokens and no look-up stands before it."""
    return scored(config) and not config.rank3


@mutation("flatten", attacks="followed", needs=starts_at_choice)
def autocast_ends_inside(m: Block, c: Flow) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        c.w = c.w * torch.sigmoid(F.linear(c.x, m.shared_gate)).to(c.w.dtype)
        c.ids = c.idx.reshape(-1)


@mutation(after="up", attacks="followed")
def up_written_under_checkpoint(m: Block, c: Flow) -> None:
    c.h = checkpoint(lambda h: h.mul_(2), c.h, use_reentrant=False)


@mutation(after="act", attacks="followed")
def activation_written_under_checkpoint(m: Block, c: Flow) -> None:
    c.a = checkpoint(lambda a: a.mul_(2), c.a.clone(), use_reentrant=False)


# Transforms of torch.func: a step runs for a batch of factors at once.


def scaled(m: Block, rows: Tensor, weight: Tensor, factors: tuple[float, ...]) -> Tensor:
    """The mean over ``factors`` of the product of scaled rows."""
    return torch.vmap(lambda by: batched_mm(m, rows * by, weight))(rows.new_tensor(factors)).mean(0)


@mutation("up", attacks="transform", forms=BATCHED)
def up_under_vmap(m: Block, c: Flow) -> None:
    c.h = scaled(m, c.xs, m.w1[c.ids], (0.5, 1.0))


@mutation("down", attacks="transform", forms=BATCHED)
def down_under_vmap(m: Block, c: Flow) -> None:
    c.y = scaled(m, c.a, m.w2[c.ids], (0.5, 1.0))


@mutation(after="act", attacks="transform")
def activation_under_vmap(m: Block, c: Flow) -> None:
    c.a = torch.vmap(lambda by: c.a * by)(c.a.new_tensor((0.5, 1.0))).mean(0)
