"""bfloat16 on Hopper: our own grouped matmuls (``wgmma.py``) with the gathers and the activation inside, and row-wise
Triton kernels (``rowwise.py``) around them. What those do not take (biases, other activations, widths that TMA cannot
address) runs on :mod:`library`, operator by operator. Nothing reads a device value on the host.

Rows of dropped slots hold anything in a and h.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace

import torch
from torch import Tensor

from moe_inductor.spec import Combine, ExpertsSpec, Grad, Halves, Layout

from . import library, pointwise
from .family import Need, Rows, in_out


def route(idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order, inverse, offsets, counts), as :func:`family.sort_by_expert`."""
    return tuple(_triton().rowwise.sort_by_expert(idx, experts))


def up(
    x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
) -> tuple[Tensor, Tensor]:
    """(a [N, I], h [N, W])."""
    w = in_out(w1, spec.w1)
    if b1 is not None or not _addressable(x, w):
        return library.up(x, rows, w1, b1, consts, spec)
    t = _triton()
    tiles, source = t.rowwise.row_tiles(rows), t.wgmma.Gather(rows.order, rows.top_k)
    if _swiglu(spec) and spec.w1 is Layout.OUT_IN:
        a, h = t.wgmma.up_swiglu(x, source, w, tiles, save=True)
        return a, h
    h = t.wgmma.rows_mm(x, source, w, tiles)
    return pointwise.activate(h, consts, spec, block=library.BLOCK), h


def up_backward(
    dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [T, H], dw1 like w1, db1 [E, W])."""
    dh = dh.contiguous()
    back = in_out(w1, spec.w1).transpose(1, 2)
    if Grad.B1 in need or not (_addressable(dh, back) and _addressable(x, in_out(w1, spec.w1))):
        return library.up_backward(dh, x, rows, w1, spec, need)
    t = _triton()
    dx = dw1 = None
    if Grad.X in need:
        out = t.wgmma.rows_mm(dh, None, back, t.rowwise.row_tiles(rows))
        dx = t.rowwise.combine(out, rows, None, x.dtype, x.dtype)
    if Grad.W1 in need:
        dw1 = _wgrad(x, rows.order, rows.top_k, dh, rows, transposed=spec.w1 is Layout.OUT_IN)
    return dx, dw1, None


def down(a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """y [T, H], or [N, H] in slot order."""
    a, w = a.contiguous(), in_out(w2, spec.w2)
    if b2 is not None or not _addressable(a, w):
        return library.down(a, rows, weights, w2, b2, spec)
    t = _triton()
    out = t.wgmma.rows_mm(a, None, w, t.rowwise.row_tiles(rows))
    single = rows if weights is not None else Rows(rows.order, rows.inverse, rows.offsets, 1)
    y: Tensor = t.rowwise.combine(out, single, weights, spec.weight_dtype, spec.out_dtype)
    return y


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
    dy, h = dy.to(w2.dtype).contiguous(), h.contiguous()
    back = in_out(w2, spec.w2).transpose(1, 2)
    if b2 is not None or not _swiglu(spec) or not _addressable(dy, back):
        return library.down_backward(dy, h, rows, weights, w2, b2, consts, spec, need)
    t = _triton()
    slots = 1 if spec.combine is Combine.ROWS else rows.top_k
    da = None
    if need & {Grad.X, Grad.WEIGHTS}:
        da = t.wgmma.rows_mm(dy, t.wgmma.Gather(rows.order, slots), back, t.rowwise.row_tiles(rows))
    dh, scaled, dweights = t.rowwise.pull_swiglu(
        h,
        da,
        rows,
        weights,
        spec.weight_dtype,
        need_h=Grad.X in need,
        need_a=Grad.W2 in need,
        need_w=Grad.WEIGHTS in need and weights is not None,
    )
    dw2 = None
    if scaled is not None:
        dw2 = _wgrad(dy, rows.order, slots, scaled, rows, transposed=spec.w2 is Layout.IN_OUT)
    return dh, dweights, dw2, None


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
    """``down(up(...))``, h in registers only."""
    w = in_out(w1, spec.w1)
    if b1 is None and _swiglu(spec) and spec.w1 is Layout.OUT_IN and _addressable(x, w):
        t = _triton()
        a, _ = t.wgmma.up_swiglu(x, t.wgmma.Gather(rows.order, rows.top_k), w, t.rowwise.row_tiles(rows), save=False)
    else:
        a, _ = up(x, rows, w1, b1, consts, spec)
    return down(a, rows, weights, w2, b2, spec)


def _wgrad(gathered: Tensor, index: Tensor, slots: int, dense: Tensor, rows: Rows, *, transposed: bool) -> Tensor:
    """[E, M, N] (``transposed``: [E, N, M]) of the rows [., M] read through ``index`` and ``dense`` [N rows, N]."""
    m, n = gathered.shape[1], dense.shape[1]
    t = _triton()
    if (n % t.wgmma.BN if transposed else m % t.wgmma.BM) or min(m, n) % 16:
        copied = gathered.index_select(0, index if slots == 1 else rows.tokens)
        x, dy = (dense, copied) if transposed else (copied, dense)
        return library.wgrad(x, dy, rows, Layout.IN_OUT)
    dw: Tensor = t.wgmma.wgrad(gathered, t.wgmma.Gather(index, slots), dense, rows.offsets, transposed=transposed)
    return dw


def _swiglu(spec: ExpertsSpec) -> bool:
    return spec.activation == "swiglu" and spec.halves is Halves.GATE_UP


def _addressable(a: Tensor, w: Tensor) -> bool:
    """Whether TMA takes rows of ``a`` [., in] and the matrices ``w`` [E, in, out]: bfloat16, addresses and strides in
    multiples of 16 bytes, matrices without gaps, and no stage that reaches into another expert's matrix."""
    depth, columns = w.shape[1:]
    dense = w.is_contiguous() or w.transpose(1, 2).is_contiguous()
    even = depth % 64 == 0 and columns % 16 == 0 and a.stride(0) % 8 == 0 and a.stride(1) == 1
    aligned = a.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    return a.dtype is torch.bfloat16 and dense and even and aligned and 0 < a.shape[0] < 1 << 31


@functools.cache
def _triton() -> SimpleNamespace:
    """The modules that need Triton, imported when a kernel is first asked for."""
    from . import rowwise, wgmma

    return SimpleNamespace(rowwise=rowwise, wgmma=wgmma)


__all__ = ["down", "down_backward", "experts", "route", "up", "up_backward"]
