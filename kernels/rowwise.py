"""The steps around the grouped matmuls in Triton: order of rows, tile lists, combine, backward of the activation.
Deterministic, without atomics and without a host synchronisation. Imported where Triton is present.

Axes as in :mod:`family`. All row offsets are computed in 64 bits.
"""
# Triton checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .family import Rows

#: Slots a program ranks among themselves.
SLOTS = 256
#: Rows of a row tile of the grouped matmuls.
TILE = 128


@triton.jit
def _count_kernel(idx, hist, n, E, SLOTS: tl.constexpr, BINS: tl.constexpr):
    """hist[program, e] = slots of this block that chose e; those that chose no expert count as E."""
    at = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    e = tl.load(idx + at, mask=at < n, other=-1)
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    e = tl.where(at < n, e, BINS - 1)
    tl.store(hist + tl.program_id(0) * BINS + tl.arange(0, BINS), tl.histogram(e, BINS))


@triton.jit
def _scan_kernel(hist, totals, blocks, BINS: tl.constexpr, COLS: tl.constexpr, STEP: tl.constexpr):
    """hist becomes the number of earlier slots that chose the same expert, block by block; totals their sum."""
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    before = tl.zeros((COLS,), tl.int32)
    for start in range(0, blocks, STEP):
        row = start + tl.arange(0, STEP)
        at = hist + row[:, None] * BINS + col[None, :]
        count = tl.load(at, mask=(row < blocks)[:, None], other=0)
        tl.store(at, before[None, :] + tl.cumsum(count, 0) - count, mask=(row < blocks)[:, None])
        before += tl.sum(count, 0)
    tl.store(totals + col, before)


@triton.jit
def _starts_kernel(totals, starts, offsets, counts, E, BINS: tl.constexpr):
    bins = tl.arange(0, BINS)
    total = tl.where(bins <= E, tl.load(totals + bins), 0)
    upto = tl.cumsum(total, 0)
    tl.store(starts + bins, upto - total)
    tl.store(offsets + bins, upto, mask=bins < E)
    tl.store(counts + bins, total.to(tl.int64), mask=bins < E)


@triton.jit
def _rank_kernel(
    idx, hist, starts, order, inverse, n, E, SLOTS: tl.constexpr, BINS: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The stable counting sort: row of a slot = rows of smaller experts + earlier slots of the same expert."""
    first = tl.program_id(0) * SLOTS
    lane = tl.arange(0, SLOTS)
    at = first + lane
    e = tl.load(idx + at, mask=at < n, other=-1)
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    row = tl.load(starts + e) + tl.load(hist + tl.program_id(0) * BINS + e)
    for start in tl.static_range(0, SLOTS, CHUNK):
        other = start + tl.arange(0, CHUNK)
        f = tl.load(idx + first + other, mask=first + other < n, other=-1)
        f = tl.where((f >= 0) & (f < E), f, E).to(tl.int32)
        row += tl.sum(((e[:, None] == f[None, :]) & (other[None, :] < lane[:, None])).to(tl.int32), 1)
    tl.store(order + row, at.to(tl.int64), mask=at < n)
    tl.store(inverse + at, row.to(tl.int64), mask=at < n)


def sort_by_expert(idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order int64 [N], inverse int64 [N], offsets int32 [E], counts int64 [E]) of the choices ``idx`` [T, K], in four
    launches. Slots that chose no expert come last, in their order."""
    n = idx.numel()
    order, inverse = (idx.new_empty(n, dtype=torch.int64) for _ in range(2))
    if n == 0:
        return order, inverse, idx.new_zeros(experts, dtype=torch.int32), idx.new_zeros(experts, dtype=torch.int64)
    offsets, counts = idx.new_empty(experts, dtype=torch.int32), idx.new_empty(experts, dtype=torch.int64)
    blocks, bins = triton.cdiv(n, SLOTS), triton.next_power_of_2(experts + 2)
    hist, totals, starts = (idx.new_empty(m, bins, dtype=torch.int32) for m in (blocks, 1, 1))
    cols = min(8, bins)
    idx = idx.contiguous()
    _count_kernel[(blocks,)](idx, hist, n, experts, SLOTS=SLOTS, BINS=bins)
    _scan_kernel[(bins // cols,)](hist, totals, blocks, BINS=bins, COLS=cols, STEP=256)
    _starts_kernel[(1,)](totals, starts, offsets, counts, experts, BINS=bins)
    _rank_kernel[(blocks,)](
        idx, hist, starts, order, inverse, n, experts, SLOTS=SLOTS, BINS=bins, CHUNK=32, num_warps=8
    )  # fmt: skip
    return order, inverse, offsets, counts


@triton.jit
def _tiles_kernel(offsets, tiles, num, E, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The tiles of 128 rows of all experts, one expert after another."""
    bins = tl.arange(0, BINS)
    end = tl.load(offsets + bins, mask=bins < E, other=0)
    start = tl.load(offsets + bins - 1, mask=(bins > 0) & (bins < E), other=0)
    count = (end - start + TILE - 1) // TILE
    upto = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.sum((upto[None, :] <= m[:, None]).to(tl.int32), 1)
    e = tl.minimum(e, E - 1)
    mine = bins[None, :] == e[:, None]
    first = tl.sum(tl.where(mine, (start - (upto - count) * TILE)[None, :], 0), 1) + m * TILE
    last = tl.sum(tl.where(mine, end[None, :], 0), 1)
    tl.store(tiles + 3 * m, e, mask=m < total)
    tl.store(tiles + 3 * m + 1, first, mask=m < total)
    tl.store(tiles + 3 * m + 2, tl.minimum(last - first, TILE), mask=m < total)
    if tl.program_id(0) == 0:
        tl.store(num, total)


def row_tiles(rows: Rows) -> tuple[Tensor, Tensor]:
    """(tiles int32 [bound, 3], their number int32 [1]): expert, first row and rows of each tile of at most 128 rows of
    one expert. ``bound`` is N / 128 + E, whatever the routing."""
    n, experts = rows.order.numel(), rows.offsets.numel()
    bound = n // TILE + min(n, experts)
    tiles, num = rows.offsets.new_empty(bound, 3), rows.offsets.new_empty(1)
    block = 64
    _tiles_kernel[(max(triton.cdiv(bound, block), 1),)](
        rows.offsets, tiles, num, experts, BINS=triton.next_power_of_2(experts), TILE=TILE, BLOCK=block
    )
    return tiles, num


@triton.jit
def _combine_kernel(
    y, out, inverse, weights, offsets, E, H, ldo, K: tl.constexpr, WEIGHTED: tl.constexpr, CAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """y[t] = sum over k of weights[t, k] * out[inverse[t, k]], in float32, k by k; dropped slots add nothing."""
    t = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = tl.load(offsets + E - 1)
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(K):
        row = tl.load(inverse + t * K + k)
        width = tl.where(row < kept, H, 0)
        value = tl.load(out + row * ldo + col, mask=col < width, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + t * K + k, mask=row < kept, other=0.0).to(CAST).to(tl.float32)
        total += value
    tl.store(y + t * H + col, total.to(y.dtype.element_ty), mask=col < H)


def combine(out: Tensor, rows: Rows, weights: Tensor | None, applied: torch.dtype, dtype: torch.dtype) -> Tensor:
    """[T, H] in ``dtype``: each token's rows of ``out`` [N, H], times ``weights`` [T, K] in ``applied`` where given."""
    tokens, h = rows.order.numel() // rows.top_k, out.shape[1]
    y = out.new_empty(tokens, h, dtype=dtype)
    if tokens == 0:
        return y
    block = min(2048, triton.next_power_of_2(h))
    _combine_kernel[(tokens, triton.cdiv(h, block))](
        y, out, rows.inverse, out if weights is None else weights.contiguous(), rows.offsets, rows.offsets.numel(), h,
        out.stride(0), K=rows.top_k, WEIGHTED=weights is not None, CAST=_TRITON[applied], BLOCK=block,
        num_warps=max(1, min(8, block // 256)),
    )  # fmt: skip
    return y


@triton.jit
def _pull_kernel(
    h, da, dh, scaled, dweights, order, weights, offsets, E, inter, n,
    WEIGHTED: tl.constexpr, CAST: tl.constexpr, NEED_H: tl.constexpr, NEED_A: tl.constexpr, NEED_W: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a few rows: dh from da, s * a, and the routing gradient a . da in the slot's place; zeros for dropped rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = row < tl.load(offsets + E - 1)
    slot = tl.load(order + row, mask=row < n, other=0)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        scale = tl.load(weights + slot, mask=kept, other=0.0).to(CAST).to(tl.float32)
    one, two = row[:, None] * inter, row[:, None] * 2 * inter
    dot = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, inter, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        held, last = (col < inter) & kept[:, None], (col < inter) & (row < n)[:, None]
        g = tl.load(h + two + col, mask=held, other=0.0).to(tl.float32)
        u = tl.load(h + two + inter + col, mask=held, other=0.0).to(tl.float32)
        sig = 1.0 / (1.0 + tl.exp(-g))
        act = g * sig
        if NEED_A:
            tl.store(scaled + one + col, (act * u * scale[:, None]).to(scaled.dtype.element_ty), mask=last)
        if NEED_H or NEED_W:
            d = tl.load(da + one + col, mask=held, other=0.0).to(tl.float32)
            if NEED_W:
                dot += d * act * u
            if NEED_H:
                d *= scale[:, None]
                dg = d * u * sig * (1.0 + g * (1.0 - sig))
                tl.store(dh + two + col, dg.to(dh.dtype.element_ty), mask=last)
                tl.store(dh + two + inter + col, (d * act).to(dh.dtype.element_ty), mask=last)
    if NEED_W:
        tl.store(dweights + slot, tl.sum(dot, 1).to(dweights.dtype.element_ty), mask=row < n)


def pull_swiglu(
    h: Tensor, da: Tensor | None, rows: Rows, weights: Tensor | None, applied: torch.dtype, *, need_a: bool,
    need_h: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dh [N, 2I], s * a [N, I], dweights [T, K]) of swiglu with gate before up in ``h`` [N, 2I], given ``da`` [N, I],
    the gradient of a before the routing weight; None for what is not needed."""
    n, inter = h.shape[0], h.shape[1] // 2
    dh = torch.empty_like(h) if need_h else None
    scaled = h.new_empty(n, inter) if need_a else None
    dweights = torch.empty_like(weights, memory_format=torch.contiguous_format) if need_w else None
    if n:
        block = min(1024, max(128, inter & -inter))  # no lanes without columns where I is a multiple of 128
        rows_each = max(1, 1024 // block)
        _pull_kernel[(triton.cdiv(n, rows_each),)](
            h, h if da is None else da, h if dh is None else dh, h if scaled is None else scaled,
            h if dweights is None else dweights, rows.order, h if weights is None else weights.contiguous(),
            rows.offsets, rows.offsets.numel(), inter, n, WEIGHTED=weights is not None, CAST=_TRITON[applied],
            NEED_H=need_h, NEED_A=need_a, NEED_W=need_w, ROWS=rows_each, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dh, scaled, dweights


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
