"""The fused router in Triton; the readable oracle is :mod:`router_reference`. Imported where Triton is present.

One program takes a few rows of logits and keeps each in registers, E padded to a power of two (G groups of E / G, both
padded). Scores and choice are computed once; K rounds each take the largest of a row. A value and its column are one
64-bit key: the value's bits in an order in which NaN is the largest and both zeros are one, then the column reversed,
so that the largest key is the largest value in the smallest column. The chosen logits are read again by their columns:
a weight is the score that was compared, to the bit. The backward computes the scores again from the logits.

float32 arithmetic, no atomics; a NaN in one token's logits stays in that token. Row offsets are computed in 64 bits.
"""
# Triton checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_inductor.router_spec import Best, Floor, RouterSpec

#: Experts, and so columns of a program, that the kernels take.
MAX_EXPERTS = 1024
#: Elements of a program, in at most so many whole rows: 8 a thread, and enough programs for few experts.
ELEMENTS, ROWS = 1024, 16
#: Below every key, and below every ordered float.
_LEAST = tl.constexpr(-(2**63))
_LOW = tl.constexpr(-(2**31))
_HIGH = tl.constexpr(2**31 - 1)


def refuse(spec: RouterSpec, logits: torch.dtype) -> str | None:
    """Why these kernels do not take ``spec`` on ``logits`` of that dtype, None where they do."""
    wide = sorted(str(d) for d in spec.dtypes | {logits} if d not in _TRITON)
    if wide:
        return f"the router computes in {wide[0]}"
    if _columns(spec) > MAX_EXPERTS:
        return f"{spec.experts} experts take {_columns(spec)} columns, the kernels have {MAX_EXPERTS}"
    return None


@triton.jit
def _round(x, DTYPE: tl.constexpr):
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _ordered(x):
    """int32 in the order of the float32 ``x``: zeros are equal, NaN is the largest."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    return tl.where(x != x, _HIGH, bits ^ ((bits >> 31) & _HIGH))


@triton.jit
def _unordered(bits):
    """The float32 whose order ``bits`` is."""
    return (bits ^ ((bits >> 31) & _HIGH)).to(tl.float32, bitcast=True)


@triton.jit
def _score(x, top, total, HOW: tl.constexpr):
    """softmax or sigmoid of ``x``; ``top`` and ``total`` as :func:`_statistics` gives them."""
    y = x
    if HOW == "softmax":
        y = tl.exp(x - top[:, None]) / total[:, None]
    elif HOW == "sigmoid":
        y = 1.0 / (1.0 + tl.exp(-x))
    return y


@triton.jit
def _statistics(x, held, HOW: tl.constexpr):
    """(largest, sum of exponentials) of each row of ``x`` where ``held``; of a softmax only."""
    top = tl.zeros((x.shape[0],), tl.float32)
    total = top
    if HOW == "softmax":
        x = tl.where(held, x, float("-inf"))
        top = tl.max(x, 1)
        total = tl.sum(tl.exp(x - top[:, None]), 1)
    return top, total


@triton.jit
def _weigh(
    chosen, held, GATHERED: tl.constexpr, GATHERED_DTYPE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    SUM_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, SCALE: tl.constexpr, BY: tl.constexpr, SCALE_DTYPE: tl.constexpr,
):  # fmt: skip
    """(weights, scores after their function [ROWS, K], sum and divisor [ROWS]) of the chosen scores."""
    top, total = _statistics(chosen, held, GATHERED)
    gathered = _round(_score(chosen, top, total, GATHERED), GATHERED_DTYPE)
    gathered = tl.where(held, gathered, 0.0)
    sums = tl.full((chosen.shape[0],), 1.0, tl.float32)
    divisor = sums
    w = gathered
    if NORM != "raw":
        sums = _round(tl.sum(gathered, 1), SUM_DTYPE)
        divisor = sums
        if NORM == "add":
            divisor = _round(sums + EPS, SUM_DTYPE)
        elif NORM == "clamp":
            divisor = _round(tl.where(sums < EPS, EPS, sums), SUM_DTYPE)  # NaN stays
        w = _round(w / divisor[:, None], NORM_DTYPE)
    if SCALE == "mul":
        w = _round(w * BY, SCALE_DTYPE)
    elif SCALE == "div":
        w = _round(w / BY, SCALE_DTYPE)
    return w, gathered, sums, divisor


@triton.jit
def _kept(choice, valid, G: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, DTYPE: tl.constexpr,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """bool [ROWS, GROUPS * WIDTH]: whether a column's group is among the ``KEPT`` best of ``G``."""
    ordered = tl.reshape(tl.where(valid, _ordered(choice), _LOW), (ROWS, GROUPS, WIDTH))
    g = tl.arange(0, GROUPS)
    if BEST == "max":
        best = tl.max(ordered, 2)
    else:
        key = (ordered.to(tl.int64) << 32) | tl.arange(0, WIDTH)[None, None, :]
        first = tl.max(key, 2)
        second = tl.max(tl.where(key == first[:, :, None], _LEAST, key), 2)
        both = _unordered((first >> 32).to(tl.int32)) + _unordered((second >> 32).to(tl.int32))
        best = tl.where((g < G)[None, :], _ordered(_round(both, DTYPE)), _LOW)
    mine, other = best[:, :, None], best[:, None, :]
    ahead = (other > mine) | ((other == mine) & (g[None, None, :] < g[None, :, None]))
    kept = (tl.sum(ahead.to(tl.int32), 2) < KEPT).to(tl.int32)
    return tl.reshape(tl.broadcast_to(kept[:, :, None], (ROWS, GROUPS, WIDTH)), (ROWS, GROUPS * WIDTH)) != 0


@triton.jit
def _forward_kernel(
    logits, ld, bias, weights, idx, T,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, SCORE_DTYPE: tl.constexpr, BIAS: tl.constexpr,
    BIAS_DTYPE: tl.constexpr, G: tl.constexpr, KEPT: tl.constexpr, BEST: tl.constexpr, MASKED: tl.constexpr,
    GATHERED: tl.constexpr, GATHERED_DTYPE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr,
    SUM_DTYPE: tl.constexpr, NORM_DTYPE: tl.constexpr, SCALE: tl.constexpr, BY: tl.constexpr,
    SCALE_DTYPE: tl.constexpr, ROWS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    COLUMNS: tl.constexpr = GROUPS * WIDTH
    SIZE: tl.constexpr = E // G
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    e = j // WIDTH * SIZE + j % WIDTH
    valid = ((j // WIDTH < G) & (j % WIDTH < SIZE))[None, :]
    x = tl.load(logits + row[:, None] * ld + e[None, :], mask=valid & (row < T)[:, None], other=0.0).to(tl.float32)
    top, total = _statistics(x, valid, SCORE)
    choice = _round(_score(x, top, total, SCORE), SCORE_DTYPE)
    if BIAS:
        choice = _round(choice + tl.load(bias + e, mask=j // WIDTH < G, other=0.0).to(tl.float32)[None, :], BIAS_DTYPE)
    if KEPT < G:
        kept = _kept(choice, valid, G, KEPT, BEST, BIAS_DTYPE if BIAS else SCORE_DTYPE, ROWS, GROUPS, WIDTH)
        choice = tl.where(kept, choice, float("-inf") if MASKED == "inf" else 0.0)
    key = (_ordered(choice).to(tl.int64) << 32) | (COLUMNS - 1 - j).to(tl.int64)[None, :]
    key = tl.where(valid, key, _LEAST)
    slot = tl.arange(0, SLOTS)[None, :]
    chosen = tl.zeros((ROWS, SLOTS), tl.int32)
    for k in range(K):
        best = tl.max(key, 1)[:, None]
        key = tl.where(key == best, _LEAST, key)
        at = COLUMNS - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        chosen = tl.where(slot == k, at // WIDTH * SIZE + at % WIDTH, chosen)
    held = (slot < K) & (row < T)[:, None]
    x = tl.load(logits + row[:, None] * ld + chosen, mask=held, other=0.0).to(tl.float32)
    x = _round(_score(x, top, total, SCORE), SCORE_DTYPE)
    w, _gathered, _sums, _divisor = _weigh(
        x, slot < K, GATHERED, GATHERED_DTYPE, NORM, EPS, SUM_DTYPE, NORM_DTYPE, SCALE, BY, SCALE_DTYPE
    )
    tl.store(weights + row[:, None] * K + slot, w.to(weights.dtype.element_ty), mask=held)
    tl.store(idx + row[:, None] * K + slot, chosen.to(tl.int64), mask=held)


@triton.jit
def _pull(y, dy, HOW: tl.constexpr):
    """The gradient of x where ``y`` is the score of x."""
    dx = dy
    if HOW == "softmax":
        dx = y * (dy - tl.sum(y * dy, 1)[:, None])
    elif HOW == "sigmoid":
        dx = dy * y * (1.0 - y)
    return dx


@triton.jit
def _backward_kernel(
    dweights, logits, ld, idx, dlogits, T,
    E: tl.constexpr, K: tl.constexpr, SCORE: tl.constexpr, SCORE_DTYPE: tl.constexpr, GATHERED: tl.constexpr,
    GATHERED_DTYPE: tl.constexpr, NORM: tl.constexpr, EPS: tl.constexpr, SUM_DTYPE: tl.constexpr,
    NORM_DTYPE: tl.constexpr, SCALE: tl.constexpr, BY: tl.constexpr, SCALE_DTYPE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    e, slot = tl.arange(0, COLUMNS)[None, :], tl.arange(0, SLOTS)[None, :]
    here = (row < T)[:, None]
    x = tl.load(logits + row[:, None] * ld + e, mask=(e < E) & here, other=0.0).to(tl.float32)
    top, total = _statistics(x, e < E, SCORE)
    y = tl.where(e < E, _score(x, top, total, SCORE), 0.0)
    held = (slot < K) & here
    chosen = tl.load(idx + row[:, None] * K + slot, mask=held, other=0).to(tl.int32)
    grad = tl.load(dweights + row[:, None] * K + slot, mask=held, other=0.0).to(tl.float32)
    v = tl.load(logits + row[:, None] * ld + chosen, mask=held, other=0.0).to(tl.float32)
    v = _round(_score(v, top, total, SCORE), SCORE_DTYPE)
    _w, gathered, sums, divisor = _weigh(
        v, slot < K, GATHERED, GATHERED_DTYPE, NORM, EPS, SUM_DTYPE, NORM_DTYPE, SCALE, BY, SCALE_DTYPE
    )
    if SCALE == "mul":
        grad = grad * BY
    elif SCALE == "div":
        grad = grad / BY
    if NORM != "raw":
        through = tl.sum(grad * gathered, 1) / (divisor * divisor)
        if NORM == "clamp":
            through = tl.where(sums < EPS, 0.0, through)
        grad = grad / divisor[:, None] - through[:, None]
    grad = tl.where(slot < K, _pull(gathered, grad, GATHERED), 0.0)
    dense = tl.zeros((ROWS, COLUMNS), tl.float32)
    for k in range(K):
        at = tl.sum(tl.where(slot == k, chosen, 0), 1)[:, None]
        dense = tl.where(e == at, tl.sum(tl.where(slot == k, grad, 0.0), 1)[:, None], dense)
    dx = _pull(y, dense, SCORE).to(dlogits.dtype.element_ty)
    tl.store(dlogits + row[:, None] * E + e, dx, mask=(e < E) & here)


def forward(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    """(weights [T, K], idx int64 [T, K]) of ``logits`` [T, E] and ``bias`` (E elements), each row's largest first.
    ValueError where :func:`refuse` gives a reason."""
    _require(spec, logits)
    tokens, groups = logits.shape[0], spec.groups
    weights = logits.new_empty(tokens, spec.top_k, dtype=spec.out_dtype)
    idx = logits.new_empty(tokens, spec.top_k, dtype=torch.int64)
    count = 1 if groups is None else groups.count
    pairs = triton.next_power_of_2(count) ** 2  # groups are ranked each against each
    rows = max(1, min(ROWS, ELEMENTS // max(_columns(spec), pairs)))
    if tokens:
        logits = _rows(logits)
        _forward_kernel[(triton.cdiv(tokens, rows),)](
            logits, logits.stride(0), logits if bias is None else bias.contiguous(), weights, idx, tokens,
            BIAS=spec.bias_dtype is not None, BIAS_DTYPE=_TRITON[spec.bias_dtype or torch.float32], G=count,
            KEPT=count if groups is None else groups.kept, BEST=(Best.MAX if groups is None else groups.best).value,
            MASKED="zero" if groups is None or groups.fill == 0 else "inf", ROWS=rows,
            GROUPS=triton.next_power_of_2(count), WIDTH=triton.next_power_of_2(spec.experts // count),
            num_warps=4, **_steps(spec),
        )  # fmt: skip
    return weights, idx


def backward(dweights: Tensor, logits: Tensor, idx: Tensor, spec: RouterSpec) -> Tensor:
    """The gradient [T, E] of ``logits``, in their dtype, from that of the weights [T, K]; roundings count as none.
    ValueError where :func:`refuse` gives a reason."""
    _require(spec, logits)
    tokens, columns = logits.shape[0], triton.next_power_of_2(spec.experts)
    dlogits, rows = logits.new_empty(logits.shape), max(1, min(ROWS, ELEMENTS // columns))
    if tokens:
        logits = _rows(logits)
        _backward_kernel[(triton.cdiv(tokens, rows),)](
            dweights.contiguous(), logits, logits.stride(0), idx.contiguous(), dlogits, tokens, ROWS=rows,
            COLUMNS=columns, num_warps=4, **_steps(spec),
        )  # fmt: skip
    return dlogits


def _require(spec: RouterSpec, logits: Tensor) -> None:
    why = refuse(spec, logits.dtype)
    if why is not None:
        raise ValueError(f"no Triton kernel for the router {spec}: {why}")


def _columns(spec: RouterSpec) -> int:
    count = 1 if spec.groups is None else spec.groups.count
    return triton.next_power_of_2(count) * triton.next_power_of_2(spec.experts // count)


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _steps(spec: RouterSpec) -> dict[str, Any]:
    """The kernels' common constants."""
    norm, scale, single = spec.norm, spec.scale, tl.float32
    return {
        "E": spec.experts,
        "K": spec.top_k,
        "SLOTS": triton.next_power_of_2(spec.top_k),
        "SCORE": spec.score.value,
        "SCORE_DTYPE": _TRITON[spec.score_dtype],
        "GATHERED": spec.gathered.value,
        "GATHERED_DTYPE": _TRITON[spec.gathered_dtype],
        "NORM": "raw" if norm is None else norm.floor.value,
        "EPS": 0.0 if norm is None or norm.floor is Floor.NONE else norm.eps,
        "SUM_DTYPE": single if norm is None else _TRITON[norm.sum_dtype],
        "NORM_DTYPE": single if norm is None else _TRITON[norm.dtype],
        "SCALE": "unscaled" if scale is None else scale.how.value,
        "BY": 1.0 if scale is None else scale.by,
        "SCALE_DTYPE": single if scale is None else _TRITON[scale.dtype],
    }


_TRITON = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
