"""What runs on the CPU: the whole chain of a few experts (gather, matmul, activation, matmul, weight gradient) as one
task on one core, its rows in that core's cache. The choices here and what they were measured against: ``NOTES.md``.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_inductor.spec import ExpertsSpec, Grad

from . import activations, pointwise
from .family import Need, Rows, accumulator, in_out
from .family import sort_by_expert as route
from .workers import run_all, worker_count

#: Elements of h a pointwise step works on: 1 MiB as float32, a second level cache of Zen 4.
BLOCK = 1 << 18
#: Rows of a task.
GROUP = 256
#: Multiply-adds of a call below which one thread does it: its time over that of two (Xeon with AMX, H=512, I=256, K=4,
#: T=1 to 32, bf16 and float32) is 0.6 to 0.8 at 2^20, 0.6 to 1.0 at 2^21, 0.7 to 1.1 at 2^22, 0.8 to 1.4 at 2^23.
MIN_SHARED = 1 << 22
Outputs = Sequence[Tensor | None]


def up(
    x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
) -> tuple[Tensor, Tensor]:
    """(a [N, I], h [N, W])."""
    w, tokens = in_out(w1, spec.w1), rows.tokens
    h = x.new_empty(rows.order.numel(), w.shape[2])
    a = h.new_empty(h.shape[0], pointwise.inter(h, spec))

    def run(group: Group) -> None:
        own = group.rows
        _matmul(_gather(x, tokens[own]), w, b1, group, out=h[own])
        pointwise.activate(h[own], consts, spec, block=BLOCK, out=a[own])

    _each_group(run, rows, row_work=w[0].numel(), zero=(h, a))
    return a, h


def up_backward(
    dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx [T, H], dw1 like w1, db1 [E, W])."""
    w, tokens, dh = in_out(w1, spec.w1), rows.tokens, dh.contiguous()
    back = x.new_empty(dh.shape[0], x.shape[1]) if Grad.X in need else None
    dw1 = w1.new_empty(w1.shape) if Grad.W1 in need else None
    db1 = w1.new_empty(w1.shape[0], dh.shape[1]) if Grad.B1 in need else None

    def run(group: Group) -> None:
        own = dh[group.rows]
        if back is not None:
            _matmul(own, w.transpose(1, 2), None, group, out=back[group.rows])
        if dw1 is not None:
            _wgrad(_gather(x, tokens[group.rows]), own, group, out=in_out(dw1, spec.w1))
        if db1 is not None:
            _bgrad(own.to(accumulator(own)), group, out=db1)

    _each_group(run, rows, row_work=w[0].numel() * len(need & {Grad.X, Grad.W1}), zero=(back,), per_expert=(dw1, db1))
    return None if back is None else _sum_slots(back, rows, None, x.dtype), dw1, db1


def down(a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """y [T, H], or [N, H] in slot order."""
    w, a = in_out(w2, spec.w2), a.contiguous()
    out = a.new_empty(a.shape[0], w.shape[2])

    def run(group: Group) -> None:
        _matmul(a[group.rows], w, b2, group, out=out[group.rows])

    _each_group(run, rows, row_work=w[0].numel(), zero=(out,))
    return _combine(out, rows, weights, spec)


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
    acc, w, dy, of_row = accumulator(w2, weights), in_out(w2, spec.w2), dy.to(w2.dtype), rows.gradient_rows(spec)
    scale = None if weights is None else _scale(weights, rows, spec)
    dh = h.new_empty(h.shape) if Grad.X in need else None
    dots = h.new_empty(h.shape[0], dtype=acc) if Grad.WEIGHTS in need and weights is not None else None
    dw2 = w2.new_empty(w2.shape) if Grad.W2 in need else None
    db2 = w2.new_empty(w2.shape[0], dy.shape[1]) if Grad.B2 in need else None

    def run(group: Group) -> None:
        own = group.rows
        drow = _gather(dy, of_row[own])
        da = None
        if dh is not None or dots is not None:
            da = _matmul(drow, w.transpose(1, 2), None, group, out=h.new_empty(drow.shape[0], w.shape[1]))
        by = None if scale is None else scale[own]
        pulled = pointwise.pull(h[own], da, by, consts, spec, need, block=BLOCK, dh=None if dh is None else dh[own])
        if dots is not None and pulled.row_dots is not None:
            dots[own] = pulled.row_dots if b2 is None else pulled.row_dots + _bias_dots(drow.to(acc), b2, group)
        if dw2 is not None and pulled.scaled_a is not None:
            _wgrad(pulled.scaled_a, drow, group, out=in_out(dw2, spec.w2))
        if db2 is not None:
            _bgrad(drow.to(acc) if by is None else drow * by, group, out=db2)

    work = w[0].numel() * len(need & {Grad.X if dots is None else Grad.WEIGHTS, Grad.W2})
    _each_group(run, rows, row_work=work, zero=(dh, dots), per_expert=(dw2, db2))
    dweights = None
    if dots is not None and weights is not None:
        dweights = dots.index_select(0, rows.inverse).view(weights.shape).to(weights.dtype)
    return dh, dweights, dw2, db2


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
    """y. Written for Inductor to trace (``whole.py``): everything but the matmuls becomes its loops."""
    acc = accumulator(w2, weights)
    h = grouped_mm(x.index_select(0, rows.tokens), in_out(w1, spec.w1), b1, rows.offsets)
    g, u = activations.split(h.to(accumulator(h)), spec)
    a = activations.evaluate(spec.activation, g, u, consts).to(h.dtype)
    out = grouped_mm(a, in_out(w2, spec.w2), b2, rows.offsets)
    kept = (rows.slots() < rows.offsets[-1]).unsqueeze(-1)
    slots = out[rows.slots()].to(acc)
    if weights is None:
        return torch.where(kept, slots, 0).flatten(0, 1).to(spec.out_dtype)
    applied = weights.to(spec.weight_dtype).unsqueeze(-1).to(acc)
    return torch.where(kept, slots * applied, 0).sum(1).to(spec.out_dtype)


def _grouped_mm(x: Tensor, w: Tensor, bias: Tensor | None, offsets: Tensor) -> Tensor:
    ends = offsets.tolist()
    out = x.new_empty(x.shape[0], w.shape[2])
    none = (None,) * w.shape[0]
    experts = tuple(zip(w.unbind(), none if bias is None else bias.unbind(), strict=True))

    def run(own: slice) -> None:
        start = ends[own.start - 1] if own.start else 0
        mine = slice(start, ends[own.stop - 1])
        sizes = [end - begin for begin, end in zip([start, *ends[own]], ends[own], strict=False)]
        blocks = zip(sizes, x[mine].split(sizes), experts[own], out[mine].split(sizes), strict=True)
        for size, xs, (weight, b), into in blocks:
            if size and b is None:
                torch.mm(xs, weight, out=into)
            elif size and b is not None:
                torch.addmm(b, xs, weight, out=into)

    workers = worker_count()
    cuts = [bisect.bisect_left(ends, ends[-1] * i // workers) for i in range(workers)] + [len(ends)]
    share = ends[-1] * w[0].numel() >= MIN_SHARED
    run_all(run, [slice(a, b) for a, b in itertools.pairwise(cuts) if a < b], share=share)
    return out


#: ``megamoe::cpu_grouped_mm(x [N, in], w [E, in, out], bias [E, out] or None, offsets int32 [E]) -> [N, out]``, experts
#: in parallel; rows from ``offsets[-1]`` on hold anything. ``torch._grouped_mm`` runs one expert after another, each on
#: all threads.
grouped_mm = torch.library.custom_op(
    "megamoe::cpu_grouped_mm",
    _grouped_mm,
    mutates_args=(),
    schema="(Tensor x, Tensor w, Tensor? bias, Tensor offsets) -> Tensor",
    tags=(torch.Tag.needs_exact_strides,),
)
grouped_mm.register_fake(lambda x, w, bias, offsets: x.new_empty(x.shape[0], w.shape[2]))


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbouring experts whose rows one task takes: ``rows`` of them all, and for each expert that has rows its index
    and its rows counted from the first of the group."""

    rows: slice
    experts: tuple[tuple[int, slice], ...]


def _groups(sizes: Sequence[int]) -> list[Group]:
    """Groups of experts with GROUP rows or just more, fewer where that leaves less than four tasks a worker. A larger
    group makes fewer small operations, each of which hands over the interpreter lock."""
    target = min(GROUP, sum(sizes) // (4 * worker_count()))
    groups: list[Group] = []
    members: list[tuple[int, slice]] = []
    start = end = 0
    for e, size in enumerate(sizes):
        if size:
            members.append((e, slice(end - start, end - start + size)))
            end += size
        if members and (end - start >= target or e == len(sizes) - 1):
            groups.append(Group(slice(start, end), tuple(members)))
            members, start = [], end
    return groups


def _each_group(
    run: Callable[[Group], object], rows: Rows, *, row_work: int, zero: Outputs, per_expert: Outputs = ()
) -> None:
    """``run`` for all groups of experts with rows, of ``row_work`` multiply-adds a row, in parallel unless those are
    few; dropped rows of ``zero`` and the entries of ``per_expert`` whose expert has no rows are set to zero."""
    ends = [0, *rows.offsets.tolist()]
    sizes = [end - start for start, end in zip(ends, ends[1:], strict=False)]
    for t in zero:
        if t is not None and ends[-1] < t.shape[0]:
            t[ends[-1] :].zero_()
    without = [e for e, size in enumerate(sizes) if size == 0]
    for t, e in itertools.product(per_expert, without):
        if t is not None:
            t[e].zero_()
    groups = sorted(_groups(sizes), key=lambda g: g.rows.start - g.rows.stop)
    run_all(run, groups, share=ends[-1] * row_work >= MIN_SHARED)


def _gather(rows: Tensor, index: Tensor) -> Tensor:
    """``rows[index]``, contiguous. Copied as 8-byte words where rows allow: index_select moves an element at a time."""
    offset = rows.storage_offset() * rows.element_size()
    if not rows.is_contiguous() or rows.shape[1] * rows.element_size() % 8 or offset % 8 or rows.numel() == 0:
        return rows.index_select(0, index)
    return rows.view(torch.int64).index_select(0, index).view(rows.dtype)


def _matmul(rows: Tensor, weights: Tensor, bias: Tensor | None, group: Group, *, out: Tensor) -> Tensor:
    """The group's rows [n, in] times each expert's [in, out] of ``weights`` plus its bias, in ``out`` [n, out]."""
    for e, own in group.experts:
        if bias is None:
            torch.mm(rows[own], weights[e], out=out[own])
        else:
            torch.addmm(bias[e], rows[own], weights[e], out=out[own])
    return out


def _wgrad(x: Tensor, dy: Tensor, group: Group, *, out: Tensor) -> None:
    """out[e] = x^T dy over the rows of each expert, ``out`` [E, in, out]."""
    for e, own in group.experts:
        torch.mm(x[own].t(), dy[own], out=out[e])


def _bgrad(dy: Tensor, group: Group, *, out: Tensor) -> None:
    """out[e] = the sum of each expert's rows of ``dy``, rounded once."""
    for e, own in group.experts:
        out[e] = dy[own].sum(0)


def _bias_dots(drow: Tensor, b2: Tensor, group: Group) -> Tensor:
    """[n], each row of ``drow`` times its expert's bias."""
    return torch.cat([torch.mv(drow[own], b2[e].to(drow.dtype)) for e, own in group.experts])


def _combine(out: Tensor, rows: Rows, weights: Tensor | None, spec: ExpertsSpec) -> Tensor:
    """y of the rows [N, H] of all experts."""
    if weights is None:
        return _gather(out, rows.inverse).to(spec.out_dtype)
    return _sum_slots(out, rows, _applied(weights, rows, spec), spec.out_dtype)


def _applied(weights: Tensor, rows: Rows, spec: ExpertsSpec) -> Tensor:
    """[T, K], the routing weights as they are applied, zero for dropped slots (whose weight may be anything)."""
    weights = weights.to(spec.weight_dtype)
    kept = int(rows.offsets[-1])
    return weights if kept == rows.order.numel() else weights.masked_fill(rows.slots() >= kept, 0)


def _scale(weights: Tensor, rows: Rows, spec: ExpertsSpec) -> Tensor:
    """[N, 1], the routing weight of each row in the accumulator's dtype."""
    by_slot = _applied(weights, rows, spec).reshape(-1)
    return by_slot.index_select(0, rows.order).unsqueeze(1).to(accumulator(weights))


def _sum_slots(rows_in: Tensor, rows: Rows, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[T, out], each token's rows (times ``weights`` [T, K]) summed in float32 (float64), in ``dtype``. embedding_bag
    gathers and sums in one pass, but wants one dtype for rows, weights and result."""
    if rows_in.shape[0] == 0:
        return rows_in.new_zeros(0, rows_in.shape[1], dtype=dtype)
    if any(t is not None and t.dtype != dtype for t in (rows_in, weights)):
        acc = accumulator(rows_in, weights)
        rows_in, weights = rows_in.to(acc), None if weights is None else weights.to(acc)
    return torch.nn.functional.embedding_bag(
        rows.slots(), rows_in, mode="sum", per_sample_weights=None if weights is None else weights.contiguous()
    ).to(dtype)


__all__ = ["down", "down_backward", "experts", "route", "up", "up_backward"]
