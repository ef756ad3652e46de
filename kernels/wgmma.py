"""Grouped matmuls for Hopper in Gluon. Imported where Triton and a GPU of compute capability 9.0 are present.

One persistent program an SM. The producer (4 warps) fills a ring of shared-memory stages: dense operands by TMA,
gathered ones row by row with ``cp.async``. In products of rows two consumers (4 warps each) own the upper and the lower
64 rows of a 128 x 256 tile: they share every stage but nothing else, so one may store its half while the other keeps
the tensor cores busy, and a tile of at most 64 rows costs half. Weight gradients have one consumer of 8 warps. Results
leave through shared memory by TMA; only the last rows of an expert, beside which another expert's rows lie, are stored
under a mask.

``tiles`` int32 [M, 3]: expert, first row and number of rows (at most 128) of each row tile, ``num_tiles`` int32 [1] of
them; all tiles of an expert lie side by side, so that its weights stay in the second level cache. Every launch has at
least one stage for each program that takes part, and no program waits for another.
"""
# Gluon checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

#: Rows and columns of a tile, depth of a stage, stages in the ring: 144 KiB of stages and 64 KiB for results.
BM, BN, BK, STAGES = 128, 256, 64, 3
#: Row tiles that take turns with one column tile of weights.
GROUP = 8
#: Registers of a thread of a consumer of rows, of its producer, and of the producer of weight gradients; ptxas sees
#: 168 for all.
CONSUMER_REGISTERS, PRODUCER_REGISTERS, WGRAD_REGISTERS = 232, 40, 56


@gluon.jit
def _row_tile(t, num_m, num_n, tiles, GROUP: gl.constexpr):
    """(expert, first row, rows, column tile) of the t-th tile."""
    width = GROUP * num_n
    first = (t // width) * GROUP
    size = gl.minimum(num_m - first, GROUP)
    m = first + t % width % size
    n = t % width // size
    return gl.load(tiles + 3 * m), gl.load(tiles + 3 * m + 1), gl.load(tiles + 3 * m + 2), n


@gluon.jit
def _store(stage, value, desc, out, ld, row0, rows, col, cols, WIDTH: gl.constexpr):
    """One consumer's [64, WIDTH] results, of which ``rows`` count. ``stage`` must be free."""
    stage.store(value)
    if rows >= 64:
        fence_async_shared()
        tma.async_copy_shared_to_global(desc, [row0, col], stage)
    else:
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
        r = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        c = col + gl.arange(0, WIDTH, gl.SliceLayout(0, WIDE))
        at = out + (row0 + r).to(gl.int64)[:, None] * ld + c[None, :]
        gl.store(at, stage.load(WIDE), mask=(r < rows)[:, None] & (c < cols)[None, :])


@gluon.jit
def _rows_producer(
    a_desc, a_ptr, lda, index, b_desc, tiles, num_tiles, num_n, K, W, a_bufs, b_bufs, ready, empty,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr, IN_OUT: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BN // 2
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_m = gl.load(num_tiles)
    it = 0
    for t in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        e, row0, rows, n = _row_tile(t, num_m, num_n, tiles, GROUP)
        if GATHER:
            r = gl.arange(0, BM, gl.SliceLayout(1, COPY))
            source = gl.load(index + row0 + gl.minimum(r, rows - 1)).to(gl.int32) // SLOTS
            c = gl.arange(0, BK, gl.SliceLayout(0, COPY))
            ptr = a_ptr + source.to(gl.int64)[:, None] * lda + c[None, :]
        for k in range(0, K, BK):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(s)
            if GATHER:
                mbarrier.expect(bar, BN * BK * 2)
            else:
                mbarrier.expect(bar, (BN + BM) * BK * 2)
                tma.async_copy_global_to_shared(a_desc, [row0, k], bar, a_bufs.index(s))
            if IN_OUT:
                tma.async_copy_global_to_shared(b_desc, [e * K + k, n * BN], bar, b_bufs.index(s))
            elif GATED:
                gate = e * W + n * HALF
                tma.async_copy_global_to_shared(b_desc, [gate, k], bar, b_bufs.index(s).slice(0, HALF))
                tma.async_copy_global_to_shared(b_desc, [gate + W // 2, k], bar, b_bufs.index(s).slice(HALF, HALF))
            else:
                tma.async_copy_global_to_shared(b_desc, [e * W + n * BN, k], bar, b_bufs.index(s))
            if GATHER:
                async_copy.async_copy_global_to_shared(a_bufs.index(s), ptr)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                ptr += BK
            it += 1


@gluon.jit
def _rows_consumer(
    o_desc, o_ptr, ldo, g_desc, u_desc, h_ptr, ldh, tiles, num_tiles, num_n, K, W, a_bufs, b_bufs, ready, empty, stage,
    UPPER: gl.constexpr, GATED: gl.constexpr, SAVE: gl.constexpr, IN_OUT: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BN // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    num_m = gl.load(num_tiles)
    it = 0
    for t in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        e, row0, rows, n = _row_tile(t, num_m, num_n, tiles, GROUP)
        row0 += 64 * UPPER
        rows -= 64 * UPPER
        if rows > 0:
            acc = gl.zeros((64, BN), gl.float32, ACC)
            for k in range(0, K, BK):
                s = it % STAGES
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                fence_async_shared()
                a = a_bufs.index(s).slice(64 * UPPER, 64)
                if IN_OUT:
                    acc = warpgroup_mma(a, b_bufs.index(s), acc, use_acc=k > 0, is_async=True)
                else:
                    acc = warpgroup_mma(a, b_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_wait(1, deps=(acc,))
                if k > 0:
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
                it += 1
            acc = warpgroup_mma_wait(0, deps=(acc,))
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            tma.store_wait(0)
            if GATED:
                gate, up = acc.reshape([64, 2, HALF]).permute(0, 2, 1).split()
                gate = gate.to(gl.bfloat16)
                up = up.to(gl.bfloat16)
                if SAVE:
                    _store(stage.index(0), gate, g_desc, h_ptr, ldh, row0, rows, n * HALF, W // 2, HALF)
                    _store(stage.index(1), up, u_desc, h_ptr + W // 2, ldh, row0, rows, n * HALF, W // 2, HALF)
                x = gate.to(gl.float32)
                x = x / (1.0 + gl.exp(-x)) * up.to(gl.float32)
                if SAVE:
                    tma.store_wait(1)
                _store(stage.index(0), x.to(gl.bfloat16), o_desc, o_ptr, ldo, row0, rows, n * HALF, W // 2, HALF)
            else:
                _store(stage.index(0), acc.to(gl.bfloat16), o_desc, o_ptr, ldo, row0, rows, n * BN, W, BN)
        else:
            for _ in range(0, K, BK):
                s = it % STAGES
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(s), count=1)
                it += 1
    tma.store_wait(0)


@gluon.jit
def _rows_kernel(
    a_desc, a_ptr, lda, index, b_desc, o_desc, o_ptr, ldo, g_desc, u_desc, h_ptr, ldh, tiles, num_tiles, num_n,
    K, W,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, GATED: gl.constexpr, SAVE: gl.constexpr, IN_OUT: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    CONSUMER: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BM, BK], gl.bfloat16)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BM, BK], A)
    if IN_OUT:
        b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], b_desc.layout)
    else:
        b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BN, BK], b_desc.layout)
    if GATED:
        lower = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BN // 2], o_desc.layout)
        upper = gl.allocate_shared_memory(gl.bfloat16, [2, 64, BN // 2], o_desc.layout)
    else:
        lower = gl.allocate_shared_memory(gl.bfloat16, [1, 64, BN], o_desc.layout)
        upper = gl.allocate_shared_memory(gl.bfloat16, [1, 64, BN], o_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        if GATHER:
            mbarrier.init(ready.index(i), count=129)  # each copying thread, and the TMA bytes
        else:
            mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_rows_consumer, (o_desc, o_ptr, ldo, g_desc, u_desc, h_ptr, ldh, tiles, num_tiles, num_n, K, W, a_bufs,
                              b_bufs, ready, empty, lower, 0, GATED, SAVE, IN_OUT, BN, BK, STAGES, GROUP)),
            (_rows_consumer, (o_desc, o_ptr, ldo, g_desc, u_desc, h_ptr, ldh, tiles, num_tiles, num_n, K, W, a_bufs,
                              b_bufs, ready, empty, upper, 1, GATED, SAVE, IN_OUT, BN, BK, STAGES, GROUP)),
            (_rows_producer, (a_desc, a_ptr, lda, index, b_desc, tiles, num_tiles, num_n, K, W, a_bufs, b_bufs,
                              ready, empty, GATHER, SLOTS, GATED, IN_OUT, BM, BN, BK, STAGES, GROUP)),
        ],
        [4, 4],
        [CONSUMER, PRODUCER],
    )  # fmt: skip


@gluon.jit
def _wgrad_tile(t, num_m, num_n, offsets, ROWS_FIRST: gl.constexpr):
    """(expert, first row, last row + 1, row tile, column tile) of the t-th tile of the weight gradients."""
    e = t // (num_m * num_n)
    r = t % (num_m * num_n)
    if ROWS_FIRST:
        m = r % num_m
        n = r // num_m
    else:
        m = r // num_n
        n = r % num_n
    start = gl.load(offsets + e - 1, mask=e > 0, other=0)
    return e, start, gl.load(offsets + e), m, n


@gluon.jit
def _wgrad_producer(
    a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, E, M, N, num_m, num_n, a_bufs, b_bufs, ready, empty,
    SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), E * num_m * num_n, gl.num_programs(0)):
        _, start, end, m, n = _wgrad_tile(t, num_m, num_n, offsets, ROWS_FIRST)
        ca = m * BM + gl.arange(0, BM, gl.SliceLayout(0, A))
        ra = start + gl.arange(0, BK, gl.SliceLayout(1, A))
        ahead = gl.load(index + ra, mask=ra < end, other=0)  # a stage early: the rows wait for it
        for k in range(start, end, BK):
            s = it % STAGES
            bar = ready.index(s)
            source = ahead.to(gl.int32) // SLOTS
            ra = k + gl.arange(0, BK, gl.SliceLayout(1, A))
            ahead = gl.load(index + ra + BK, mask=ra + BK < end, other=0)
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            # beside an expert's last rows lie another's: both operands are zero there, since 0 * NaN is not
            if k + BK <= end:
                mbarrier.expect(bar, BN * BK * 2)
                tma.async_copy_global_to_shared(b_desc, [k, n * BN], bar, b_bufs.index(s))
            else:
                mbarrier.arrive(bar, count=1)
                rb = k + gl.arange(0, BK, gl.SliceLayout(1, B))
                cb = n * BN + gl.arange(0, BN, gl.SliceLayout(0, B))
                async_copy.async_copy_global_to_shared(
                    b_bufs.index(s),
                    b_ptr + rb.to(gl.int64)[:, None] * ldb + cb[None, :],
                    mask=(rb < end)[:, None] & (cb < N)[None, :],
                )
            async_copy.async_copy_global_to_shared(
                a_bufs.index(s),
                a_ptr + source.to(gl.int64)[:, None] * lda + ca[None, :],
                mask=(ra < end)[:, None] & (ca < M)[None, :],
            )
            async_copy.mbarrier_arrive(bar, increment_count=False)
            it += 1


@gluon.jit
def _wgrad_consumer(
    o_desc, offsets, E, M, N, num_m, num_n, a_bufs, b_bufs, ready, empty, stage,
    TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    it = 0
    for t in range(gl.program_id(0), E * num_m * num_n, gl.num_programs(0)):
        e, start, end, m, n = _wgrad_tile(t, num_m, num_n, offsets, ROWS_FIRST)
        acc = gl.zeros((BM, BN), gl.float32, ACC)
        for k in range(start, end, BK):
            s = it % STAGES
            mbarrier.wait(ready.index(s), (it // STAGES) & 1)
            fence_async_shared()
            acc = warpgroup_mma(a_bufs.index(s).permute((1, 0)), b_bufs.index(s), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            if k > start:
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            it += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        if end > start:
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        tma.store_wait(0)
        if TRANSPOSED:
            stage.permute((1, 0)).store(acc.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [e * N + n * BN, m * BM], stage)
        else:
            stage.store(acc.to(gl.bfloat16))
            fence_async_shared()
            tma.async_copy_shared_to_global(o_desc, [e * M + m * BM, n * BN], stage)
    tma.store_wait(0)


@gluon.jit
def _wgrad_kernel(
    a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, o_desc, E, M, N, num_m, num_n,
    SLOTS: gl.constexpr, TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, ROWS_FIRST: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BK, BM], gl.bfloat16)
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BM], A)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [STAGES, BK, BN], b_desc.layout)
    if TRANSPOSED:
        stage = gl.allocate_shared_memory(gl.bfloat16, [BN, BM], o_desc.layout)
    else:
        stage = gl.allocate_shared_memory(gl.bfloat16, [BM, BN], o_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=129)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_wgrad_consumer, (o_desc, offsets, E, M, N, num_m, num_n, a_bufs, b_bufs, ready, empty, stage,
                               TRANSPOSED, BM, BN, BK, STAGES, ROWS_FIRST)),
            (_wgrad_producer, (a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, E, M, N, num_m, num_n, a_bufs,
                               b_bufs, ready, empty, SLOTS, BM, BN, BK, STAGES, ROWS_FIRST)),
        ],
        [4],
        [PRODUCER],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows to read through an index: row r of the operand is row ``index[r] // slots`` of the tensor. At most 2**31 - 1
    rows."""

    index: Tensor
    slots: int


def rows_mm(a: Tensor, gather: Gather | None, w: Tensor, tiles: tuple[Tensor, Tensor]) -> Tensor:
    """[N, out] in bfloat16: the rows of ``a`` [N, in] (of what ``gather`` reads from it) times their expert's ``w``
    [E, in, out]. Rows of no tile hold anything. ``tiles``: the list and its length."""
    in_out = w.stride(2) == 1
    out = a.new_empty(a.shape[0] if gather is None else gather.index.shape[0], w.shape[2])
    b = _flat(w if in_out else w.transpose(1, 2), [BK, BN] if in_out else [BN, BK])
    _rows(a, gather, b, w, out, None, tiles, in_out=in_out, gated=False)
    return out


def up_swiglu(
    x: Tensor, gather: Gather, w: Tensor, tiles: tuple[Tensor, Tensor], *, save: bool
) -> tuple[Tensor, Tensor | None]:
    """(a [N, I], h [N, 2I] or None) in bfloat16: h = rows of x times ``w`` [E, in, 2I], contiguous along ``in``, gate
    before up; a = silu(gate) up of the rounded h."""
    n = gather.index.shape[0]
    a = x.new_empty(n, w.shape[2] // 2)
    h = x.new_empty(n, w.shape[2]) if save else None
    _rows(x, gather, _flat(w.transpose(1, 2), [BN // 2, BK]), w, a, h, tiles, in_out=False, gated=True)
    return a, h


def _rows(
    a: Tensor, gather: Gather | None, b: TensorDescriptor, w: Tensor, out: Tensor, h: Tensor | None,
    tiles: tuple[Tensor, Tensor], *, in_out: bool, gated: bool,
) -> None:  # fmt: skip
    width = BN // 2 if gated else BN
    o = _desc(out, [64, width])
    gate, up = (o, o) if h is None else (_desc(half, [64, width]) for half in h.chunk(2, 1))
    index, slots = (tiles[0], 1) if gather is None else (gather.index, gather.slots)
    _rows_kernel[(_programs(a.device),)](
        _desc(a, [BM, BK]), a, a.stride(0), index, b, o, out, out.stride(0), gate, up, out if h is None else h,
        0 if h is None else h.stride(0), *tiles, -(-out.shape[1] // width), w.shape[1], w.shape[2],
        GATHER=gather is not None, SLOTS=slots, GATED=gated, SAVE=h is not None, IN_OUT=in_out, BM=BM, BN=BN, BK=BK,
        STAGES=STAGES, GROUP=GROUP, CONSUMER=CONSUMER_REGISTERS, PRODUCER=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip


def wgrad(gathered: Tensor, gather: Gather, dense: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """[E, M, N] in bfloat16, the sum over each expert's rows of gathered^T dense, for the rows [., M] that ``gather``
    reads and ``dense`` [rows, N]; ``transposed``: [E, N, M]. Zero for experts without rows. The first of the result's
    two axes must be a multiple of its tile, 128 for M and 256 for N."""
    m, n, experts = gathered.shape[1], dense.shape[1], offsets.shape[0]
    out = dense.new_empty((experts, n, m) if transposed else (experts, m, n))
    _wgrad_kernel[(_programs(dense.device),)](
        gathered, gathered.stride(0), gather.index, _desc(dense, [BK, BN]), dense, dense.stride(0),
        offsets, _desc(out.flatten(0, 1), [BN, BM] if transposed else [BM, BN]), experts, m, n, -(-m // BM),
        -(-n // BN), SLOTS=gather.slots, TRANSPOSED=transposed, BM=BM, BN=BN, BK=BK, STAGES=STAGES, ROWS_FIRST=True,
        PRODUCER=WGRAD_REGISTERS, num_warps=8,
    )  # fmt: skip
    return out


def _desc(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, block, gl.NVMMASharedLayout.get_default_for(block, gl.bfloat16))


def _flat(w: Tensor, block: list[int]) -> TensorDescriptor:
    """The experts' matrices one below the other: what a tile reads past its own matrix meets zeros or is not stored."""
    return _desc(w.flatten(0, 1), block)


@functools.lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
