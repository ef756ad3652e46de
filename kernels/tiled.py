"""Grouped matmuls in plain Triton for every NVIDIA GPU from sm_80 on: bfloat16, float16 and float32, any widths, any
number of experts. Imported where Triton is present. The oracle is :mod:`reference`.

A tile is at most 16 to 128 rows of one expert times a block of columns. Its operands come by pointer, gathered or not,
through stages of ``cp.async``; sums are float32 and rounded once. Row tiles of an expert lie side by side and take
turns in groups on the same columns: its weights stay in the second level cache. The grid has a static bound; what lies
past the true number of tiles does nothing. float32 operands multiply in tf32 only where torch allows it. Deterministic:
no atomics, no split sums. Configurations: :mod:`tuning`.
"""
# Triton checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

import functools
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_inductor.spec import Halves

from . import tuning
from .family import Gather
from .generated import triton_activation

#: Row tiles that take turns with one column tile of weights.
GROUP = 8
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _load(at, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The block at ``at``, zero outside ``rows`` where ROWS says that they count, and outside ``columns`` likewise."""
    if ROWS and COLUMNS:
        block = tl.load(at, mask=rows & columns, other=0.0)
    elif ROWS:
        block = tl.load(at, mask=rows, other=0.0)
    elif COLUMNS:
        block = tl.load(at, mask=columns, other=0.0)
    else:
        block = tl.load(at)
    return block


@triton.jit
def _weights(w, ldw, depth, col, IN_OUT: tl.constexpr):
    """Addresses of an expert's block [depth, col]; one of its two strides is 1."""
    if IN_OUT:
        at = w + depth.to(tl.int64)[:, None] * ldw + col[None, :]
    else:
        at = w + depth[:, None] + col.to(tl.int64)[None, :] * ldw
    return at


@triton.jit
def _biased(acc, bias, col, width, dtype: tl.constexpr, BIASED: tl.constexpr):
    """``acc`` plus the bias of its columns, rounded to ``dtype``."""
    if BIASED:
        acc += tl.load(bias + col, mask=col < width, other=0.0).to(tl.float32)[None, :]
    return acc.to(dtype)


@triton.jit(do_not_specialize=["bound"])
def _rows_kernel(
    a, lda, index, w, lde, ldw, bias, ldb, out, ldo, h, ldh, tiles, num_tiles, bound, num_n, K, N,
    GATHER: tl.constexpr, SLOTS: tl.constexpr, IN_OUT: tl.constexpr, BIASED: tl.constexpr, FORM: tl.constexpr,
    SWAPPED: tl.constexpr, SAVE: tl.constexpr, ACT: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Tiles of ``out``. FORM: "plain", out is the product; "single", out is ACT of it; "pair", of its blocks BN from
    columns 0 and N on; "mixed", of its even and odd columns. N: columns of ``out``, but of the product for "mixed"."""
    lane, deep, wide = tl.arange(0, BM), tl.arange(0, BK), tl.arange(0, BN)
    # small tiles are mostly padding and wait for memory: what is not there is not read
    THIN: tl.constexpr = BM < 64
    for t in range(tl.program_id(0), bound * num_n, tl.num_programs(0)):
        # places come from the bound: the number of tiles and the tile are read side by side
        first = t // (GROUP * num_n) * GROUP
        size = tl.minimum(bound - first, GROUP)
        m = first + t % (GROUP * num_n) % size
        n = t % (GROUP * num_n) // size
        num_m = tl.load(num_tiles)
        e = tl.load(tiles + 3 * m).to(tl.int64)
        row0, rows = tl.load(tiles + 3 * m + 1), tl.load(tiles + 3 * m + 2)
        if m < num_m:
            held = (lane < rows)[:, None]
            col = n * BN + wide
            here = (col < N)[None, :]
            at_w = _weights(w + e * lde, ldw, deep, col, IN_OUT)
            acc = tl.zeros((BM, BN), tl.float32)
            if FORM == "pair":
                at_v = _weights(w + e * lde, ldw, deep, col + N, IN_OUT)
                acc_v = tl.zeros((BM, BN), tl.float32)
            source = (row0 + tl.minimum(lane, rows - 1)).to(tl.int64)
            if GATHER:
                source = (tl.load(index + source).to(tl.int32) // SLOTS).to(tl.int64)
            at_a = a + source[:, None] * lda + deep[None, :]
            for k in range(0, K, BK):
                # weights first: they need not wait for the index
                y = _load(at_w, (deep < K - k)[:, None], here, not EVEN_K, not EVEN_N)
                if FORM == "pair":
                    z = _load(at_v, (deep < K - k)[:, None], here, not EVEN_K, not EVEN_N)
                x = _load(at_a, held, (deep < K - k)[None, :], THIN, not EVEN_K)
                acc = tl.dot(x, y, acc, input_precision=PRECISION)
                if FORM == "pair":
                    acc_v = tl.dot(x, z, acc_v, input_precision=PRECISION)
                at_a += BK
                if IN_OUT:
                    at_w += ldw.to(tl.int64) * BK
                    if FORM == "pair":
                        at_v += ldw.to(tl.int64) * BK
                else:
                    at_w += BK
                    if FORM == "pair":
                        at_v += BK
            row = (row0 + lane).to(tl.int64)[:, None]
            dtype: tl.constexpr = out.dtype.element_ty
            g = _biased(acc, bias + e * ldb, col, N, dtype, BIASED)
            at_h = h + row * ldh + col[None, :]
            if FORM == "pair":
                u = _biased(acc_v, bias + e * ldb + N, col, N, dtype, BIASED)
                if SAVE:
                    tl.store(at_h + N, u, mask=held & here)
            if SAVE:
                tl.store(at_h, g, mask=held & here)
            if FORM == "mixed":
                g, u = tl.split(tl.reshape(g, (BM, BN // 2, 2)))
                col = n * (BN // 2) + tl.arange(0, BN // 2)
                here = (col < N // 2)[None, :]
            if FORM == "single":
                u = g
            if FORM != "plain":
                if SWAPPED:
                    g = ACT(u.to(tl.float32), g.to(tl.float32)).to(dtype)
                else:
                    g = ACT(g.to(tl.float32), u.to(tl.float32)).to(dtype)
            tl.store(out + row * ldo + col[None, :], g, mask=held & here)


@triton.jit
def _wgrad_kernel(
    left, ldl, right, ldr, index, offsets, out, M, N, num_m, num_n,
    GATHER: tl.constexpr, SLOTS: tl.constexpr, TRANSPOSED: tl.constexpr, EVEN_M: tl.constexpr, EVEN_N: tl.constexpr,
    PRECISION: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """One tile of left^T right of one expert; GATHER reads ``left``, where TRANSPOSED ``right``, through ``index``."""
    t = tl.program_id(0)
    e = t // (num_m * num_n)
    m, n = t % num_m, t // num_m % num_n
    start, end = tl.load(offsets + e - 1, mask=e > 0, other=0), tl.load(offsets + e)
    cm, cn = m * BM + tl.arange(0, BM), n * BN + tl.arange(0, BN)
    here_m, here_n = (cm < M)[:, None], (cn < N)[None, :]
    acc = tl.zeros((BM, BN), tl.float32)
    for k in range(start, end, BK):
        row = k + tl.arange(0, BK)
        live = row < end  # of both operands: another expert's row may hold NaN, and 0 * NaN is NaN
        at_l, at_r = row.to(tl.int64), row.to(tl.int64)
        if GATHER:
            source = (tl.load(index + row, mask=live, other=0).to(tl.int32) // SLOTS).to(tl.int64)
            if TRANSPOSED:
                at_r = source
            else:
                at_l = source
        x = _load(left + cm[:, None] + at_l[None, :] * ldl, here_m, live[None, :], not EVEN_M, True)
        y = _load(right + at_r[:, None] * ldr + cn[None, :], live[:, None], here_n, True, not EVEN_N)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    at = out + e.to(tl.int64) * M * N + cm.to(tl.int64)[:, None] * N + cn[None, :]
    tl.store(at, acc.to(out.dtype.element_ty), mask=here_m & here_n)


def tile_rows(n: int, experts: int, dtype: torch.dtype, *, gathered: bool = False) -> int:
    """Rows of the row tiles that the functions here expect for ``n`` routed rows: 16, 32, 64 or 128."""
    return tuning.tile_height(n / experts, dtype)


def rows_mm(
    a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor]
) -> Tensor:  # fmt: skip
    """[N, out] in a's dtype: the rows of ``a`` [N, in] (of what ``gather`` reads from it) times their expert's ``w``
    [E, in, out], plus ``bias`` [E, out]. Rows of no tile hold anything. ``tiles``: the list, in :func:`tile_rows` rows,
    and its length int32 [1]. Raises ValueError where the list is of another height."""
    n = a.shape[0] if gather is None else gather.index.shape[0]
    out = a.new_empty(n, w.shape[2])
    _rows(a, gather, w, bias, tiles, out)
    return out


def up(
    x: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, activation: str, halves: Halves,
    tiles: tuple[Tensor, Tensor], *, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(a [N, I], h [N, W] or None): h as :func:`rows_mm` in the parameter's own order of columns, a = ``activation`` of
    the rounded h. Raises ValueError for an activation that reads constants of the call."""
    n = x.shape[0] if gather is None else gather.index.shape[0]
    width = w.shape[2]
    a = x.new_empty(n, width if halves is Halves.SINGLE else width // 2)
    h = x.new_empty(n, width) if save else None
    _rows(x, gather, w, bias, tiles, a, h, triton_activation(activation)[0], halves)
    return a, h


_FORMS = {Halves.GATE_UP: "pair", Halves.UP_GATE: "pair", Halves.INTERLEAVED: "mixed", Halves.SINGLE: "single"}


def _rows(
    a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor], out: Tensor,
    h: Tensor | None = None, act=None, halves: Halves | None = None,
) -> None:  # fmt: skip
    n, (experts, depth, width) = out.shape[0], w.shape
    height = tile_rows(n, experts, a.dtype)
    bound = tiles[0].shape[0]
    if bound != n // height + min(n, experts):
        raise ValueError(f"{bound} tiles given: {n} rows of {experts} experts are cut into tiles of {height} rows")
    form = "plain" if halves is None else _FORMS[halves]
    columns = width // 2 if form == "pair" else width
    if n == 0 or columns == 0:
        return
    a, bias = (t if t is None or t.stride(1) == 1 else t.contiguous() for t in (a, bias))
    w = w if 1 in w.stride()[1:] else w.contiguous()
    in_out = w.stride(2) == 1
    ldw = w.stride(1 if in_out else 2)
    kind = {"plain": "rows", "pair": "pair"}.get(form, "whole")
    c = tuning.config(kind, _capability(a.device), n / experts, a.dtype)
    if not _aligned((a, w), a.stride(0), w.stride(0), ldw, depth, columns):
        c = tuning.unaligned(c, a.dtype)
    block = c.columns // 2 if form == "pair" else c.columns
    num_n = triton.cdiv(columns, block)
    programs = bound * num_n
    if c.persistent:
        programs = min(programs, c.persistent * _multiprocessors(a.device))
    _rows_kernel[(programs,)](
        a, a.stride(0), tiles[0] if gather is None else gather.index, w, w.stride(0), ldw,
        a if bias is None else bias, 0 if bias is None else bias.stride(0), out, out.stride(0),
        out if h is None else h, 0 if h is None else h.stride(0), *tiles, bound, num_n, depth, columns,
        GATHER=gather is not None, SLOTS=1 if gather is None else gather.slots, IN_OUT=in_out, BIASED=bias is not None,
        FORM=form, SWAPPED=halves is Halves.UP_GATE, SAVE=h is not None, ACT=act, EVEN_K=depth % c.depth == 0,
        EVEN_N=columns % block == 0, PRECISION=_precision(a.dtype), BM=height, BN=block, BK=c.depth, GROUP=GROUP,
        num_warps=c.warps, num_stages=c.stages,
    )  # fmt: skip


def wgrad(gathered: Tensor, gather: Gather | None, dense: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """[E, M, N] in the operands' dtype, the sum over each expert's rows of gathered^T dense, for the rows [., M] that
    ``gather`` reads (without it, those of ``gathered``) and ``dense`` [rows, N]; ``transposed``: [E, N, M]. Zero for
    experts without rows. ``offsets`` int32 [E], the experts' cumulative ends."""
    gathered, dense = (t if t.stride(1) == 1 else t.contiguous() for t in (gathered, dense))
    rows, experts = dense.shape[0], offsets.shape[0]
    left, right = (dense, gathered) if transposed else (gathered, dense)
    m, n = left.shape[1], right.shape[1]
    out = dense.new_empty(experts, m, n)
    if out.numel() == 0:
        return out
    c = tuning.config("wgrad", _capability(dense.device), rows / experts, dense.dtype)
    if not _aligned((left, right), left.stride(0), right.stride(0), m, n):
        c = replace(tuning.unaligned(c, dense.dtype), rows=min(c.rows, 64))
    num_m, num_n = triton.cdiv(m, c.rows), triton.cdiv(n, c.columns)
    stages = c.stages if gather is not None else c.stages // 2 + 1  # the table's leave room for the indices
    _wgrad_kernel[(experts * num_m * num_n,)](
        left, left.stride(0), right, right.stride(0), offsets if gather is None else gather.index, offsets, out, m, n,
        num_m, num_n, GATHER=gather is not None, SLOTS=1 if gather is None else gather.slots, TRANSPOSED=transposed,
        EVEN_M=m % c.rows == 0, EVEN_N=n % c.columns == 0, PRECISION=_precision(dense.dtype), BM=c.rows, BN=c.columns,
        BK=c.depth, num_warps=c.warps, num_stages=stages,
    )  # fmt: skip
    return out


def takes(a: Tensor, w: Tensor) -> bool:
    """Whether rows like ``a`` can be multiplied by matrices ``w``."""
    return a.dtype in DTYPES and w.dtype is a.dtype and a.shape[0] < 1 << 31


def takes_up(x: Tensor, w: Tensor, bias: Tensor | None, activation: str, halves: Halves) -> bool:
    """Whether :func:`up` takes these."""
    return takes(x, w)


def takes_wgrad(gathered: Tensor, dense: Tensor) -> bool:
    """Whether the operands' weight gradient can be computed."""
    return takes(gathered, dense)


def _aligned(tensors: tuple[Tensor, ...], *lengths: int) -> bool:
    """Whether Triton can prove copies of 16 bytes: it knows of a number whether 16 divides it."""
    return all(length % 16 == 0 for length in lengths) and all(t.data_ptr() % 16 == 0 for t in tensors)


def _precision(dtype: torch.dtype) -> str:
    """How operands multiply: ``tf32`` for float32 where torch allows it. Only ``fp32_precision`` can be read whichever
    of torch's two ways set it."""
    tf32 = dtype is torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


@functools.lru_cache(maxsize=16)
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@functools.lru_cache(maxsize=16)
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


__all__ = ["DTYPES", "rows_mm", "takes", "takes_wgrad", "tile_rows", "up", "wgrad"]
