"""A composition of PyTorch's CUDA operators that never reads a device value on the host, so it can be captured.

bfloat16 on sm_80 and newer runs on ``torch._grouped_mm``, where 16-byte strides and addresses allow. Everything else
runs on *tiles*: the rows are cut into at most ceil(N / B) + E tiles of B rows, none of which holds rows of two experts;
the bound is static, so unused tiles are computed as zeros. ``torch._grouped_mm`` itself would read the offsets on the
host for those dtypes. Tiles cost E*B rows of padding and one copy of W a tile, made TILE_BYTES at a time: about twice
the time of dense matmuls where experts have B rows or more, and never more memory than the operands.

Deterministic: sorts are stable, every sum has a fixed order, no scatter has duplicate indices.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_inductor.spec import ExpertsSpec, Grad, Layout

from . import pointwise
from .family import Need, Rows, accumulator, in_out
from .family import sort_by_expert as route

#: Bytes of gathered weights or partial products that the tiled matmuls hold at once.
TILE_BYTES = 256 << 20
#: Elements of h a pointwise step works on: 64 MiB as float32, about the second level cache of an H200.
BLOCK = 1 << 24


def up(
    x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
) -> tuple[Tensor, Tensor]:
    """(a [N, I], h [N, W])."""
    dropped = _dropped(rows)
    h = _grouped_mm(x.index_select(0, rows.tokens), in_out(w1, spec.w1), rows)
    if b1 is not None:
        h += b1.index_select(0, _expert_of(rows))
    h.masked_fill_(dropped, 0)
    return pointwise.activate(h, consts, spec, block=BLOCK).masked_fill_(dropped, 0), h


def up_backward(
    dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [T, H], dw1 like w1, db1 [E, W])."""
    dx = dw1 = db1 = None
    dh = dh.contiguous()
    if Grad.X in need:
        back = _grouped_mm(dh, in_out(w1, spec.w1).transpose(1, 2), rows).masked_fill_(_dropped(rows), 0)
        dx = _sum_slots(back, rows, None, x.dtype)
    if Grad.W1 in need:
        dw1 = wgrad(x.index_select(0, rows.tokens), dh, rows, spec.w1)
    if Grad.B1 in need:
        db1 = _grouped_sum(dh, None, rows).to(w1.dtype)
    return dx, dw1, db1


def down(a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """y [T, H], or [N, H] in slot order."""
    out = _grouped_mm(a.contiguous(), in_out(w2, spec.w2), rows)
    if b2 is not None:
        out += b2.index_select(0, _expert_of(rows))
    out.masked_fill_(_dropped(rows), 0)
    if weights is None:
        return out.index_select(0, rows.inverse).to(spec.out_dtype)
    return _sum_slots(out, rows, _applied(weights, rows, spec), spec.out_dtype)


def down_backward(
    dy: Tensor,
    h: Tensor,
    rows: Rows,
    weights: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    consts: Sequence[float],
    spec: ExpertsSpec,
    need: Need,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """(dh [N, W], dweights [T, K], dw2 like w2, db2 [E, H])."""
    acc, dropped = accumulator(w2, weights), _dropped(rows)
    drow = dy.to(w2.dtype).index_select(0, rows.gradient_rows(spec))
    scale = None
    if weights is not None:
        scale = _applied(weights, rows, spec).reshape(-1).index_select(0, rows.order).unsqueeze(1).to(acc)
    da = None
    if need & {Grad.X, Grad.WEIGHTS}:
        da = _grouped_mm(drow, in_out(w2, spec.w2).transpose(1, 2), rows)
    pulled = pointwise.pull(h, da, scale, consts, spec, need, block=BLOCK)
    dweights = dw2 = db2 = None
    if pulled.dh is not None:
        pulled.dh.masked_fill_(dropped, 0)
    if pulled.row_dots is not None and weights is not None:
        dots = pulled.row_dots
        if b2 is not None:
            dots += (drow.to(acc) * b2.index_select(0, _expert_of(rows))).sum(1)
        dots.masked_fill_(dropped.squeeze(1), 0)
        dweights = dots.index_select(0, rows.inverse).view(weights.shape).to(weights.dtype)
    if pulled.scaled_a is not None:
        dw2 = wgrad(pulled.scaled_a, drow, rows, spec.w2)
    if Grad.B2 in need:
        db2 = _grouped_sum(drow, scale, rows).to(w2.dtype)
    return pulled.dh, dweights, dw2, db2


def experts(
    x: Tensor,
    rows: Rows,
    weights: Tensor | None,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    consts: Sequence[float],
    spec: ExpertsSpec,
) -> Tensor:
    """``down(up(...))``."""
    return down(up(x, rows, w1, b1, consts, spec)[0], rows, weights, w2, b2, spec)


@dataclass(frozen=True, slots=True)
class Tiles:
    """A cut of the rows into M tiles of B. ``expert`` [M]; ``row`` [M, B] with ``padding`` [M, B] where a tile has no
    such row; ``place`` [N], where in the M*B tile rows a row went (a dropped row: anywhere)."""

    expert: Tensor
    row: Tensor
    padding: Tensor
    place: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Tiles:
        """Tiles of a power of two between 16 and 128 rows, as near the mean rows of an expert."""
        n, e = rows.order.numel(), rows.offsets.numel()
        size = min(128, max(16, 1 << (max(1, n // e) - 1).bit_length()))
        tiles = torch.arange(n // size + min(n, e), device=rows.order.device)
        ends = rows.offsets.long()
        starts = torch.nn.functional.pad(ends, (1, 0))[:-1]
        tile_ends = torch.div(ends - starts + size - 1, size, rounding_mode="floor").cumsum(0)
        tile_starts = torch.nn.functional.pad(tile_ends, (1, 0))[:-1]
        expert = torch.searchsorted(tile_ends, tiles, right=True).clamp_(max=e - 1)
        first = starts[expert] + (tiles - tile_starts[expert]) * size
        row = first[:, None] + torch.arange(size, device=tiles.device)
        of_row = _expert_of(rows)
        place = tile_starts[of_row] * size + torch.arange(n, device=tiles.device) - starts[of_row]
        last = tiles.numel() * size - 1
        return cls(expert, row.clamp(max=n - 1), row >= ends[expert, None], place.clamp(max=last))

    def cut(self, rows: Tensor) -> Tensor:
        """[M, B, width], padding taken from other rows."""
        return rows.index_select(0, self.row.view(-1)).view(*self.row.shape, rows.shape[1])

    def cut_zeroed(self, rows: Tensor) -> Tensor:
        """[M, B, width], padding zero: a NaN there would spread along a reduction over rows."""
        return self.cut(rows).masked_fill_(self.padding[:, :, None], 0)


def _grouped_mm(rows_in: Tensor, weights: Tensor, rows: Rows) -> Tensor:
    """[N, out] of rows [N, in] and ``weights`` [E, in, out]; anything in dropped rows."""
    if rows_in.shape[0] == 0:
        return rows_in.new_empty(0, weights.shape[2])
    if _native(rows_in, weights):
        return torch._grouped_mm(rows_in, weights, offs=rows.offsets)
    tiles = Tiles.of(rows)
    cut = tiles.cut(rows_in)
    out = cut.new_empty(*cut.shape[:2], weights.shape[2])
    for own in _chunks(tiles, weights):
        torch.bmm(cut[own], _pick(weights, tiles.expert[own]), out=out[own])
    return out.flatten(0, 1).index_select(0, tiles.place)


def wgrad(x: Tensor, dy: Tensor, rows: Rows, layout: Layout) -> Tensor:
    """A weight's gradient in its layout: the sum over each expert's rows of x^T dy, zero for experts without rows."""
    left, right = (x, dy) if layout is Layout.IN_OUT else (dy, x)
    experts = rows.offsets.numel()
    if x.shape[0] == 0:
        return left.new_zeros(experts, left.shape[1], right.shape[1])
    if _native(left, right):
        dw = torch._grouped_mm(left.t(), right, offs=rows.offsets)
        # an empty reduction may leave its output unwritten
        return dw.masked_fill_(_sizes(rows).eq(0)[:, None, None], 0)
    acc, tiles = accumulator(x), Tiles.of(rows)
    dw = left.new_zeros(experts, left.shape[1], right.shape[1], dtype=acc)
    lefts, rights = tiles.cut_zeroed(left), tiles.cut_zeroed(right)
    for own in _chunks(tiles, dw):
        partial = torch.bmm(lefts[own].to(acc).transpose(1, 2), rights[own].to(acc))
        dw.index_put_((tiles.expert[own],), partial, accumulate=True)
    return dw.to(x.dtype)


def _grouped_sum(dy: Tensor, scale: Tensor | None, rows: Rows) -> Tensor:
    """[E, width], the sum of each expert's rows of ``dy`` times ``scale`` [N, 1], in the accumulator's dtype."""
    acc = accumulator(dy, scale)
    total = dy.new_zeros(rows.offsets.numel(), dy.shape[1], dtype=acc)
    if dy.shape[0] == 0:
        return total
    tiles = Tiles.of(rows)
    partial = tiles.cut_zeroed(dy.to(acc) if scale is None else dy * scale).sum(1)
    return total.index_put_((tiles.expert,), partial, accumulate=True)


def _sum_slots(rows_in: Tensor, rows: Rows, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, width], each token's rows times ``weights`` [T, K], summed slot after slot in the accumulator's dtype."""
    acc, slots = accumulator(rows_in, weights), rows.slots()
    total = rows_in.new_zeros(slots.shape[0], rows_in.shape[1], dtype=acc)
    for k in range(rows.top_k):
        row = rows_in.index_select(0, slots[:, k]).to(acc)
        if weights is None:
            total += row
        else:
            total.addcmul_(row, weights[:, k, None].to(acc))
    return total.to(dtype)


def _native(*operands: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes these operands without reading the offsets on the host."""
    return all(
        t.dtype is torch.bfloat16
        and _tensor_cores(t.device)
        and t.data_ptr() % 16 == 0
        and min(t.stride()[-2:]) == 1
        and all(stride == 1 or stride % 8 == 0 for stride in t.stride())
        and t.shape[-1] % 8 == 0
        and t.shape[-2] > 0
        for t in operands
    )


@functools.lru_cache(maxsize=64)
def _tensor_cores(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 0)


def _chunks(tiles: Tiles, weights: Tensor) -> list[slice]:
    """Ranges of tiles whose weights take at most TILE_BYTES."""
    count = tiles.expert.numel()
    step = max(1, TILE_BYTES // max(1, weights[0].numel() * weights.element_size()))
    return [slice(start, min(start + step, count)) for start in range(0, count, step)]


def _pick(weights: Tensor, expert: Tensor) -> Tensor:
    """``weights[expert]``, copied along the axis that is contiguous."""
    if weights.stride(-1) == 1:
        return weights.index_select(0, expert)
    return weights.transpose(1, 2).index_select(0, expert).transpose(1, 2)


def _sizes(rows: Rows) -> Tensor:
    """int32 [E], rows of each expert."""
    return torch.diff(rows.offsets, prepend=rows.offsets.new_zeros(1))


def _expert_of(rows: Rows) -> Tensor:
    """int64 [N], the expert of each row; the last one for dropped rows."""
    index = torch.arange(rows.order.numel(), device=rows.order.device, dtype=rows.offsets.dtype)
    return torch.searchsorted(rows.offsets, index, right=True).clamp_(max=rows.offsets.numel() - 1)


def _dropped(rows: Rows) -> Tensor:
    """bool [N, 1]."""
    index = torch.arange(rows.order.numel(), device=rows.order.device, dtype=rows.offsets.dtype)
    return (index >= rows.offsets[-1:]).unsqueeze(1)


def _applied(weights: Tensor, rows: Rows, spec: ExpertsSpec) -> Tensor:
    """[T, K], the routing weights as they are applied, zero for dropped slots (whose weight may be anything)."""
    return weights.to(spec.weight_dtype).masked_fill(rows.slots() >= rows.offsets[-1:], 0)


__all__ = ["down", "down_backward", "experts", "route", "up", "up_backward", "wgrad"]
