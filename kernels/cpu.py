"""What runs on the CPU: rows in expert order, one matmul an expert written into its slice of the result, pointwise work
in blocks that stay in cache. The choices below and what they were measured against are in ``NOTES.md``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moe_inductor.spec import ExpertsSpec, Grad

from . import pointwise
from .family import Need, Rows, accumulator, in_out

#: Elements of h a pointwise step works on: 1 MiB as float32, a second level cache of Zen 4. Twice as fast as 4 MiB.
BLOCK = 1 << 18


def up(
    x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
) -> tuple[Tensor, Tensor]:
    """(a [N, I], h [N, W])."""
    sizes = _sizes(rows)
    h = _grouped_mm(_gather(x, rows.tokens), in_out(w1, spec.w1), b1, sizes)
    a = pointwise.activate(h, consts, spec, block=BLOCK)
    _zero_tail(a, sizes)
    return a, h


def up_backward(
    dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [T, H], dw1 like w1, db1 [E, W])."""
    dx = dw1 = db1 = None
    dh, sizes = dh.contiguous(), _sizes(rows)
    if Grad.X in need:
        dx = _sum_slots(_grouped_mm(dh, in_out(w1, spec.w1).transpose(1, 2), None, sizes), rows, None)
    if Grad.W1 in need:
        dw1 = w1.new_empty(w1.shape)
        _wgrad(_gather(x, rows.tokens), dh, sizes, out=in_out(dw1, spec.w1))
    if Grad.B1 in need:
        db1 = _bgrad(dh, sizes)
    return dx, dw1, db1


def down(
    a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec
) -> Tensor:
    """y [T, H], or [N, H] in slot order."""
    sizes = _sizes(rows)
    out = _grouped_mm(a.contiguous(), in_out(w2, spec.w2), b2, sizes)
    if weights is None:
        return _gather(out, rows.inverse).to(spec.out_dtype)
    return _sum_slots(out, rows, _applied(weights, rows, sizes, spec), spec.out_dtype)


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
    sizes, acc = _sizes(rows), accumulator(w2, weights)
    drow = _gather(dy.to(w2.dtype), rows.gradient_rows(spec))
    scale = None if weights is None else _scale(weights, rows, sizes, spec)
    da = None
    if need & {Grad.X, Grad.WEIGHTS}:
        da = _grouped_mm(drow, in_out(w2, spec.w2).transpose(1, 2), None, sizes)
    pulled = pointwise.pull(h, da, scale, consts, spec, need, block=BLOCK)
    dweights = dw2 = db2 = None
    if pulled.dh is not None:
        _zero_tail(pulled.dh, sizes)
    if pulled.row_dots is not None and weights is not None:
        dots = pulled.row_dots
        if b2 is not None:
            dots += _bias_dots(drow, b2, sizes, acc)
        _zero_tail(dots, sizes)
        dweights = dots.index_select(0, rows.inverse).view(weights.shape).to(weights.dtype)
    if pulled.scaled_a is not None:
        dw2 = w2.new_empty(w2.shape)
        _wgrad(pulled.scaled_a, drow, sizes, out=in_out(dw2, spec.w2))
    if Grad.B2 in need:
        db2 = _bgrad(drow, sizes, scale)
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
    """y. Without b2 the routing weight goes into a, where it is one more factor before the rounding: the combine is then
    a plain sum, a third of the time of a weighted one in bfloat16."""
    if weights is None or b2 is not None:
        return down(up(x, rows, w1, b1, consts, spec)[0], rows, weights, w2, b2, spec)
    sizes = _sizes(rows)
    h = _grouped_mm(_gather(x, rows.tokens), in_out(w1, spec.w1), b1, sizes)
    a = pointwise.activate(h, consts, spec, block=BLOCK, scale=_scale(weights, rows, sizes, spec))
    return _sum_slots(_grouped_mm(a, in_out(w2, spec.w2), None, sizes), rows, None, spec.out_dtype)


def _sizes(rows: Rows) -> list[int]:
    """Rows of each expert, and of dropped slots at the end: E + 1 numbers with sum N."""
    ends = [0, *rows.offsets.tolist(), rows.order.numel()]
    return [end - start for start, end in zip(ends, ends[1:], strict=False)]


def _zero_tail(rows: Tensor, sizes: Sequence[int]) -> None:
    if sizes[-1]:
        rows[-sizes[-1] :].zero_()


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, contiguous. Copied as 8-byte words where rows allow: index_select moves an element at a time."""
    rows = rows.contiguous()
    offset = rows.storage_offset() * rows.element_size()
    if rows.numel() == 0 or rows.shape[1] * rows.element_size() % 8 or offset % 8:
        return rows.index_select(0, index)
    return rows.view(torch.int64).index_select(0, index).view(rows.dtype)


def _grouped_mm(rows: Tensor, weights: Tensor, bias: Tensor | None, sizes: Sequence[int]) -> Tensor:
    """rows [N, in] times each expert's [in, out] of ``weights``, plus its bias; [N, out], zero in dropped rows."""
    if bias is None and _native(rows, weights):
        ends = torch.tensor(sizes[:-1], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        out = torch._grouped_mm(rows, weights, offs=ends)
        _zero_tail(out, sizes)
        return out
    parts, experts = rows.split_with_sizes(sizes), weights.unbind(0)
    biases = [None] * len(experts) if bias is None else bias.unbind(0)
    linear = _linear(rows)
    if linear is not None:
        made = [linear(r, w.t(), b) for r, w, b in zip(parts, experts, biases, strict=False) if r.shape[0]]
        return torch.cat([*made, rows.new_zeros(sizes[-1], weights.shape[2])])
    out = rows.new_empty(rows.shape[0], weights.shape[2])
    for r, w, b, o in zip(parts, experts, biases, out.split_with_sizes(sizes), strict=False):
        if r.shape[0] == 0:
            continue
        if b is None:
            torch.mm(r, w, out=o)
        else:
            torch.addmm(b, r, w, out=o)
    _zero_tail(out, sizes)
    return out


def _native(rows: Tensor, weights: Tensor) -> bool:
    """Whether ``torch._grouped_mm`` takes these operands: the same matmuls as below, called from C++. It wants 16-byte
    strides. Its float32 form is MKL's."""
    return rows.dtype is torch.bfloat16 and all(
        min(t.stride()[-2:]) == 1 and all(stride == 1 or stride % 8 == 0 for stride in t.stride()) and t.numel() > 0
        for t in (rows, weights)
    )


def _linear(rows: Tensor) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
    """oneDNN's float32 linear layer, 1.25 to 1.35 times as fast as ``mm`` (MKL) at 64 rows of 512 on Zen 4; else None.
    bfloat16 ``mm`` is oneDNN's already."""
    if rows.dtype is not torch.float32 or not _HAS_LINEAR:
        return None
    pointwise = torch.ops.mkldnn._linear_pointwise
    return lambda r, w, b: pointwise(r, w, b, "none", [], "")


_HAS_LINEAR = torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _wgrad(x: Tensor, dy: Tensor, sizes: Sequence[int], *, out: Tensor) -> None:
    """out[e] = x[rows of e]^T dy[rows of e] for ``out`` [E, in, out], zero for experts without rows."""
    grads = out.unbind(0)
    for xs, dys, dw in zip(x.t().split_with_sizes(sizes, 1), dy.split_with_sizes(sizes), grads, strict=False):
        if dys.shape[0]:
            torch.mm(xs, dys, out=dw)
        else:
            dw.zero_()


def _bgrad(dy: Tensor, sizes: Sequence[int], scale: Tensor | None = None) -> Tensor:
    """[E, out], the sum of each expert's rows of ``dy`` (times ``scale`` [N, 1])."""
    db = dy.new_empty(len(sizes) - 1, dy.shape[1])
    acc = accumulator(dy, scale)
    scales = None if scale is None else scale.split_with_sizes(sizes)
    for e, rows in enumerate(dy.split_with_sizes(sizes)[:-1]):
        total = rows.to(acc).sum(0) if scales is None else (rows.to(acc) * scales[e]).sum(0)
        db[e] = total
    return db


def _bias_dots(drow: Tensor, b2: Tensor, sizes: Sequence[int], acc: torch.dtype) -> Tensor:
    """[N], each row of ``drow`` times its expert's bias; anything in dropped rows."""
    dots = drow.new_zeros(drow.shape[0], dtype=acc)
    for rows, b, out in zip(drow.split_with_sizes(sizes), b2.unbind(0), dots.split_with_sizes(sizes), strict=False):
        torch.mv(rows.to(acc), b.to(acc), out=out)
    return dots


def _applied(weights: Tensor, rows: Rows, sizes: Sequence[int], spec: ExpertsSpec) -> Tensor:
    """[T, K], the routing weights as they are applied, zero for dropped slots (whose weight may be anything)."""
    weights = weights.to(spec.weight_dtype)
    if sizes[-1]:
        weights = weights.masked_fill(rows.slots() >= rows.order.numel() - sizes[-1], 0)
    return weights


def _scale(weights: Tensor, rows: Rows, sizes: Sequence[int], spec: ExpertsSpec) -> Tensor:
    """[N, 1], the routing weight of each row in the accumulator's dtype."""
    by_slot = _applied(weights, rows, sizes, spec).reshape(-1)
    return by_slot.index_select(0, rows.order).unsqueeze(1).to(accumulator(weights))


def _sum_slots(rows_: Tensor, rows: Rows, weights: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """[T, out], each token's rows (times ``weights`` [T, K]) summed in float32 (float64), in ``dtype`` or that of the
    rows. embedding_bag gathers and sums in one pass, but wants one dtype for rows, weights and result."""
    dtype = dtype or rows_.dtype
    if {rows_.dtype, dtype} | ({weights.dtype} if weights is not None else set()) != {dtype}:
        acc = accumulator(rows_, weights)
        rows_, weights = rows_.to(acc), None if weights is None else weights.to(acc)
    if rows_.shape[0] == 0:
        return rows_.new_zeros(0, rows_.shape[1], dtype=dtype)
    bags = torch.nn.functional.embedding_bag(
        rows.slots(), rows_, mode="sum", per_sample_weights=None if weights is None else weights.contiguous()
    )
    return bags.to(dtype)


__all__ = ["down", "down_backward", "experts", "up", "up_backward"]
