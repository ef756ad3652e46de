"""The steps around the grouped matmuls in Triton: order of rows, tile lists, combine, backward of the activation, sums
of rows. Deterministic, without atomics and without a host synchronisation. Imported where Triton is present.

Axes as in :mod:`family`. All row offsets are computed in 64 bits.
"""
# Triton checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_inductor.spec import Combine, ExpertsSpec

from .family import Gather, Rows
from .generated import triton_activation

#: Slots a program ranks among themselves.
SLOTS = 256
#: Slots that are compared each with each.
FEW = 4096
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


@triton.jit
def _few_kernel(idx, order, inverse, offsets, counts, n, E, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Everything at once, by comparing a block of slots, and of experts, with all slots."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.load(idx + at, mask=at < n, other=-1)
    e = tl.where((e >= 0) & (e < E), e, E).to(tl.int32)
    row = tl.zeros((BLOCK,), tl.int32)
    below = tl.zeros((BLOCK,), tl.int32)
    own = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, n, CHUNK):
        other = start + tl.arange(0, CHUNK)
        f = tl.load(idx + other, mask=other < n, other=-1)
        f = tl.where((f >= 0) & (f < E), f, E).to(tl.int32)
        f = tl.where(other < n, f, E + 1)
        before = (f[None, :] < e[:, None]) | ((f[None, :] == e[:, None]) & (other[None, :] < at[:, None]))
        row += tl.sum(before.to(tl.int32), 1)
        below += tl.sum((f[None, :] < at[:, None]).to(tl.int32), 1)
        own += tl.sum((f[None, :] == at[:, None]).to(tl.int32), 1)
    tl.store(order + row, at.to(tl.int64), mask=at < n)
    tl.store(inverse + at, row.to(tl.int64), mask=at < n)
    tl.store(offsets + at, below + own, mask=at < E)
    tl.store(counts + at, own.to(tl.int64), mask=at < E)


def sort_by_expert(idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order int64 [N], inverse int64 [N], offsets int32 [E], counts int64 [E]) of the choices ``idx`` [T, K], in four
    launches, of at most :data:`FEW` slots in one. Slots that chose no expert come last, in their order."""
    n = idx.numel()
    order, inverse = (idx.new_empty(n, dtype=torch.int64) for _ in range(2))
    if n == 0:
        return order, inverse, idx.new_zeros(experts, dtype=torch.int32), idx.new_zeros(experts, dtype=torch.int64)
    offsets, counts = idx.new_empty(experts, dtype=torch.int32), idx.new_empty(experts, dtype=torch.int64)
    idx = idx.contiguous()
    if n <= FEW:
        _few_kernel[(triton.cdiv(max(n, experts), 32),)](
            idx, order, inverse, offsets, counts, n, experts, BLOCK=32,
            CHUNK=max(16, min(128, triton.next_power_of_2(n))),
        )  # fmt: skip
        return order, inverse, offsets, counts
    blocks, bins = triton.cdiv(n, SLOTS), triton.next_power_of_2(experts + 2)
    hist, totals, starts = (idx.new_empty(m, bins, dtype=torch.int32) for m in (blocks, 1, 1))
    cols = min(8, bins)
    _count_kernel[(blocks,)](idx, hist, n, experts, SLOTS=SLOTS, BINS=bins)
    _scan_kernel[(bins // cols,)](hist, totals, blocks, BINS=bins, COLS=cols, STEP=256)
    _starts_kernel[(1,)](totals, starts, offsets, counts, experts, BINS=bins)
    _rank_kernel[(blocks,)](
        idx, hist, starts, order, inverse, n, experts, SLOTS=SLOTS, BINS=bins, CHUNK=32, num_warps=8
    )  # fmt: skip
    return order, inverse, offsets, counts


@triton.jit
def _sizes(offsets, e, E):
    """(last row + 1, rows) of the experts ``e``, (0, -1) past the last."""
    end = tl.load(offsets + e, mask=e < E, other=0)
    return end, tl.where(e < E, end - tl.load(offsets + e - 1, mask=(e > 0) & (e < E), other=0), -1)


@triton.jit
def _ahead(offsets, start, e, rows, E, CHUNK: tl.constexpr):
    """(bool [CHUNK, len(e)], rows [CHUNK]): which of the experts from ``start`` on come before ``e``, largest first."""
    f = start + tl.arange(0, CHUNK)
    _end, others = _sizes(offsets, f, E)
    larger = others[:, None] > rows[None, :]
    return larger | ((others[:, None] == rows[None, :]) & (f[:, None] < e[None, :])), others


@triton.jit
def _tiles_kernel(
    offsets, tiles, num, E, BINS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """The tiles of all experts, one expert after another, largest first."""
    e = tl.arange(0, BINS)
    end, rows = _sizes(offsets, e, E)
    first = tl.zeros((BINS,), tl.int32)
    for start in range(0, E, CHUNK):
        ahead, others = _ahead(offsets, start, e, rows, E, CHUNK)
        first += tl.sum(tl.where(ahead, (tl.maximum(others, 0) + TILE - 1)[:, None] // TILE, 0), 0)
    count = (tl.maximum(rows, 0) + TILE - 1) // TILE
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mine = (m[:, None] >= first[None, :]) & (m[:, None] < (first + count)[None, :])
    row = tl.sum(tl.where(mine, (end - rows - first * TILE)[None, :], 0), 1) + m * TILE
    left = tl.sum(tl.where(mine, end[None, :], 0), 1) - row
    some = left > 0
    tl.store(tiles + 3 * m, tl.sum(tl.where(mine, e[None, :], 0), 1), mask=some)
    tl.store(tiles + 3 * m + 1, row, mask=some)
    tl.store(tiles + 3 * m + 2, tl.minimum(left, TILE), mask=some)
    if tl.program_id(0) == 0:
        tl.store(num, tl.sum(count, 0))
        tl.store(num + 1, 0)
        tl.store(num + 2, 0)


def row_tiles(rows: Rows, tile: int = 128) -> tuple[Tensor, Tensor]:
    """(tiles int32 [bound, 3], their number and two zeros int32 [3]): expert, first row and rows of each tile of at
    most ``tile`` rows of one expert, largest experts first. ``bound`` is N / tile + E, whatever the routing."""
    n, experts = rows.order.numel(), rows.offsets.numel()
    bound = n // tile + min(n, experts)
    tiles, num = rows.offsets.new_empty(bound, 3), rows.offsets.new_empty(3)
    bins = triton.next_power_of_2(experts)
    block = max(1, min(64, (1 << 13) // bins))
    _tiles_kernel[(max(triton.cdiv(bound, block), 1),)](
        rows.offsets, tiles, num, experts, BINS=bins, TILE=tile, BLOCK=block, CHUNK=16
    )
    return tiles, num


@triton.jit
def _ranked_kernel(offsets, ranked, E, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    e = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _end, rows = _sizes(offsets, e, E)
    rank = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, E, CHUNK):
        ahead, _others = _ahead(offsets, start, e, rows, E, CHUNK)
        rank += tl.sum(ahead.to(tl.int32), 0)
    tl.store(ranked + rank, e, mask=e < E)
    tl.store(ranked + e, 0, mask=(e >= E) & (e < E + 3))


def largest_first(offsets: Tensor) -> tuple[Tensor, Tensor]:
    """(int32 [E], the experts by their rows, most first; three zeros int32, counters for who hands out their tiles).
    ``offsets`` as in :class:`Rows`."""
    experts = offsets.numel()
    ranked = offsets.new_empty(experts + 3)
    _ranked_kernel[(triton.cdiv(experts + 3, 64),)](offsets, ranked, experts, BLOCK=64, CHUNK=16)
    return ranked[:experts], ranked[experts:]


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
    h, da, dh, scaled, dweights, order, weights, offsets, bias_dots, E, inter, n,
    WEIGHTED: tl.constexpr, CAST: tl.constexpr, NEED_H: tl.constexpr, NEED_A: tl.constexpr, NEED_W: tl.constexpr,
    HALVES: tl.constexpr, PULL: tl.constexpr, BIAS: tl.constexpr, SLOTS: tl.constexpr, BINS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a few rows: dh from da, s * a, and the routing gradient a . da in the slot's place; zeros for dropped rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    kept = row < tl.load(offsets + E - 1)
    slot = tl.load(order + row, mask=row < n, other=0)
    scale = tl.full((ROWS,), 1.0, tl.float32)
    if WEIGHTED:
        scale = tl.load(weights + slot, mask=kept, other=0.0).to(CAST).to(tl.float32)
    WIDE: tl.constexpr = 1 if HALVES == "single" else 2
    one, two = row[:, None] * inter, row[:, None] * WIDE * inter
    gate, up = 0, inter
    if HALVES == "up_gate":
        gate, up = inter, 0
    dot = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(0, inter, BLOCK):
        col = start + tl.arange(0, BLOCK)[None, :]
        held, last = (col < inter) & kept[:, None], (col < inter) & (row < n)[:, None]
        if HALVES == "interleaved":
            pair = 2 * start + tl.arange(0, 2 * BLOCK)[None, :]
            both = tl.load(h + two + pair, mask=(pair < 2 * inter) & kept[:, None], other=0.0).to(tl.float32)
            g, u = tl.split(tl.reshape(both, (ROWS, BLOCK, 2)))
        else:
            g = tl.load(h + two + gate + col, mask=held, other=0.0).to(tl.float32)
            u = g
            if HALVES != "single":
                u = tl.load(h + two + up + col, mask=held, other=0.0).to(tl.float32)
        d = tl.zeros((ROWS, BLOCK), tl.float32)
        if NEED_H or NEED_W:
            d = tl.load(da + one + col, mask=held, other=0.0).to(tl.float32)
        a, dg, du = PULL(g, u, d * scale[:, None])
        a = tl.where(held, a, 0.0)
        if NEED_A:
            tl.store(scaled + one + col, (a * scale[:, None]).to(scaled.dtype.element_ty), mask=last)
        if NEED_W:
            dot += d * a
        if NEED_H:
            dg = tl.where(held, dg, 0.0).to(dh.dtype.element_ty)
            du = tl.where(held, du, 0.0).to(dh.dtype.element_ty)
            if HALVES == "interleaved":
                pair = 2 * start + tl.arange(0, 2 * BLOCK)[None, :]
                both = tl.reshape(tl.join(dg, du), (ROWS, 2 * BLOCK))
                tl.store(dh + two + pair, both, mask=(pair < 2 * inter) & (row < n)[:, None])
            else:
                tl.store(dh + two + gate + col, dg, mask=last)
                if HALVES != "single":
                    tl.store(dh + two + up + col, du, mask=last)
    if NEED_W:
        total = tl.sum(dot, 1)
        if BIAS:
            bins = tl.arange(0, BINS)
            end = tl.load(offsets + bins, mask=bins < E, other=0)
            e = tl.sum(((end[None, :] <= row[:, None]) & (bins < E)[None, :]).to(tl.int32), 1)
            total += tl.load(bias_dots + slot // SLOTS * E + e, mask=kept, other=0.0)
        tl.store(dweights + slot, total.to(dweights.dtype.element_ty), mask=row < n)


def pull(
    h: Tensor, da: Tensor | None, rows: Rows, weights: Tensor | None, bias_dots: Tensor | None, spec: ExpertsSpec, *,
    need_a: bool, need_h: bool, need_w: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:  # fmt: skip
    """(dh like ``h`` [N, W], s * a [N, I], dweights [T, K]) of the activation, given ``da`` [N, I], the gradient of a
    before the routing weight; None for what is not needed. ``bias_dots`` float32 [T, E] (or [N, E], by slot): what an
    expert's output bias adds to the gradient of a routing weight."""
    n, inter = h.shape[0], h.shape[1] // 2 if spec.gated else h.shape[1]
    dh = torch.empty_like(h) if need_h else None
    scaled = h.new_empty(n, inter) if need_a else None
    dweights = None
    if need_w and weights is not None:
        dweights = torch.empty_like(weights, memory_format=torch.contiguous_format)
    if n:
        block = min(1024, max(128, inter & -inter))  # no lanes without columns where I is a multiple of 128
        rows_each = max(1, 1024 // block)
        _pull_kernel[(triton.cdiv(n, rows_each),)](
            h, h if da is None else da, h if dh is None else dh, h if scaled is None else scaled,
            h if dweights is None else dweights, rows.order, h if weights is None else weights.contiguous(),
            rows.offsets, h if bias_dots is None else bias_dots, rows.offsets.numel(), inter, n,
            WEIGHTED=weights is not None, CAST=_TRITON[spec.weight_dtype], NEED_H=need_h, NEED_A=need_a,
            NEED_W=dweights is not None, HALVES=spec.halves.value, PULL=triton_activation(spec.activation)[1],
            BIAS=bias_dots is not None, SLOTS=1 if spec.combine is Combine.ROWS else rows.top_k,
            BINS=triton.next_power_of_2(rows.offsets.numel()), ROWS=rows_each, BLOCK=block, num_warps=4,
        )  # fmt: skip
    return dh, scaled, dweights


@triton.jit
def _slot_sums_kernel(parts, out, inverse, offsets, E, n, C, BLOCK: tl.constexpr):
    slot = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(inverse + slot, mask=slot < n, other=0)
    kept = (slot < n) & (row < tl.load(offsets + E - 1))
    total = tl.zeros((BLOCK,), tl.float32)
    for c in range(C):
        total += tl.load(parts + row * C + c, mask=kept, other=0.0)
    tl.store(out + slot, total.to(out.dtype.element_ty), mask=slot < n)


def slot_sums(parts: Tensor, rows: Rows, like: Tensor) -> Tensor:
    """Like ``like`` [T, K]: each slot's row of ``parts``, float32 [N, C], summed in order; zero for dropped slots."""
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    n = rows.order.numel()
    _slot_sums_kernel[(triton.cdiv(n, 256),)](
        parts, out, rows.inverse, rows.offsets, rows.offsets.numel(), n, parts.shape[1], BLOCK=256
    )
    return out


@triton.jit
def _sum_kernel(
    x, ldx, index, weights, offsets, out, width, GATHER: tl.constexpr, SLOTS: tl.constexpr, WEIGHTED: tl.constexpr,
    CAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    col = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start = tl.load(offsets + e - 1, mask=e > 0, other=0)
    end = tl.load(offsets + e)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(start, end, ROWS):
        row = first + tl.arange(0, ROWS)
        own = row < end
        source = row.to(tl.int64)
        if GATHER:
            slot = tl.load(index + row, mask=own, other=0)
            source = slot // SLOTS
        held = own[:, None] & (col < width)[None, :]
        value = tl.load(x + source[:, None] * ldx + col[None, :], mask=held, other=0.0).to(tl.float32)
        if WEIGHTED:
            value *= tl.load(weights + slot, mask=own, other=0.0).to(CAST).to(tl.float32)[:, None]
        total += value
    tl.store(out + e.to(tl.int64) * width + col, tl.sum(total, 0).to(out.dtype.element_ty), mask=col < width)


def sum_rows(
    x: Tensor, gather: Gather | None, offsets: Tensor, weights: Tensor | None = None, applied: torch.dtype | None = None
) -> Tensor:
    """[E, width] like ``x``: the sum of each expert's rows of ``x`` [N, width] (of what ``gather`` reads from it),
    times the ``weights`` of their slots in ``applied`` where given, in float32."""
    experts, width = offsets.numel(), x.shape[1]
    out = x.new_empty(experts, width)
    block = 64
    _sum_kernel[(experts, triton.cdiv(width, block))](
        x, x.stride(0), offsets if gather is None else gather.index, x if weights is None else weights.contiguous(),
        offsets, out, width, GATHER=gather is not None, SLOTS=1 if gather is None else gather.slots,
        WEIGHTED=weights is not None, CAST=_TRITON[applied or torch.float32], ROWS=64, BLOCK=block, num_warps=4,
    )  # fmt: skip
    return out


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float64: tl.float64}
