"""Gradients of the experts' matrices on Hopper, in Gluon: the device code of ``wgmma.py``.

The producer (4 warps) fills a ring of shared-memory stages of rows, those of the dense operand by TMA, those of a
gathered one with ``cp.async``; one consumer (8 warps) multiplies them into a 128 x 256 tile, which leaves through
shared memory by TMA. At an expert's last rows both operands are zero where the next expert's lie.
"""
# Gluon checks the types of these functions itself.
# mypy: ignore-errors

from __future__ import annotations

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

from .wgmma_rows import halves, row_load, tma_load, tma_store


@gluon.jit
def _wgrad_tile(t, num_m, num_n, offsets, ranked, ROWS_FIRST: gl.constexpr):
    """(expert, first row, last row + 1, row tile, column tile) of the t-th tile of the weight gradients."""
    e = gl.load(ranked + t // (num_m * num_n))
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
    a_desc, a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, ranked, E, M, N, num_m, num_n, a_bufs, b_bufs, ready,
    empty,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, ROWS_FIRST: gl.constexpr,
):  # fmt: skip
    A: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    B: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    it = 0
    for t in range(gl.program_id(0), E * num_m * num_n, gl.num_programs(0)):
        _, start, end, m, n = _wgrad_tile(t, num_m, num_n, offsets, ranked, ROWS_FIRST)
        ca = m * BM + gl.arange(0, BM, gl.SliceLayout(0, A))
        ra = start + gl.arange(0, BK, gl.SliceLayout(1, A))
        if GATHER:
            ahead = gl.load(index + ra, mask=ra < end, other=0)  # a stage early: the rows wait for it
        for k in range(start, end, BK):
            s = it % STAGES
            bar = ready.index(s)
            ra = k + gl.arange(0, BK, gl.SliceLayout(1, A))
            source = ra
            if GATHER:
                source = ahead.to(gl.int32) // SLOTS
                ahead = gl.load(index + ra + BK, mask=ra + BK < end, other=0)
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            # beside an expert's last rows lie another's: both operands are zero there, since 0 * NaN is not
            whole = k + BK <= end
            if whole:
                if GATHER:
                    mbarrier.expect(bar, BN * BK * 2)
                else:
                    mbarrier.expect(bar, (BN + BM) * BK * 2)
                    tma_load(a_desc, [k, m * BM], bar, a_bufs.index(s))
                tma_load(b_desc, [k, n * BN], bar, b_bufs.index(s))
            else:
                mbarrier.arrive(bar, count=1)
                rb = k + gl.arange(0, BK, gl.SliceLayout(1, B))
                cb = n * BN + gl.arange(0, BN, gl.SliceLayout(0, B))
                row_load(
                    b_bufs.index(s),
                    b_ptr + rb.to(gl.int64)[:, None] * ldb + cb[None, :],
                    mask=(rb < end)[:, None] & (cb < N)[None, :],
                )
            if GATHER or not whole:
                row_load(
                    a_bufs.index(s),
                    a_ptr + source.to(gl.int64)[:, None] * lda + ca[None, :],
                    mask=(ra < end)[:, None] & (ca < M)[None, :],
                )
            async_copy.mbarrier_arrive(bar, increment_count=False)
            it += 1


@gluon.jit
def _wgrad_consumer(
    o_desc, o_ptr, offsets, ranked, E, M, N, num_m, num_n, a_bufs, b_bufs, ready, empty, stage,
    TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr,
    ROWS_FIRST: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BN, 16])
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    last = E * num_m * num_n - 1
    it = 0
    e, start, end, m, n = _wgrad_tile(gl.minimum(gl.program_id(0), last), num_m, num_n, offsets, ranked, ROWS_FIRST)
    for t in range(gl.program_id(0), last + 1, gl.num_programs(0)):
        # loaded a tile early: two dependent loads, 5 % of a tile's time
        then_e, then_start, then_end, then_m, then_n = _wgrad_tile(
            gl.minimum(t + gl.num_programs(0), last), num_m, num_n, offsets, ranked, ROWS_FIRST
        )
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
        left, right = halves(acc)
        for half in gl.static_range(2):
            if half == 0:
                one, two = halves(left.to(dtype))
            else:
                one, two = halves(right.to(dtype))
            col = n * BN + half * (BN // 2)
            _store_wgrad(stage.index(0), one, o_desc, o_ptr, e, m * BM, col, M, N, TRANSPOSED)
            _store_wgrad(stage.index(1), two, o_desc, o_ptr, e, m * BM, col + 64, M, N, TRANSPOSED)
        e = then_e
        start = then_start
        end = then_end
        m = then_m
        n = then_n
    tma.store_wait(0)


@gluon.jit
def _store_wgrad(buffer, value, desc, out, e, row, col, M, N, TRANSPOSED: gl.constexpr):
    """[128, 64] of a gradient [E, M, N], or [E, N, M], through the buffer of the last store but one."""
    ROWS: gl.constexpr = value.shape[0]
    if TRANSPOSED:
        first, width, at, over = col, 64, e * N + col, N
    else:
        first, width, at, over = row, ROWS, e * M + row, M
    if first + width <= over:
        tma.store_wait(1)
        if TRANSPOSED:
            buffer.permute((1, 0)).store(value)
            fence_async_shared()
            tma_store(desc, [at, row], buffer)
        else:
            buffer.store(value)
            fence_async_shared()
            tma_store(desc, [at, col], buffer)
    elif first < over:
        tma.store_wait(0)  # nothing is pending afterwards: the next wait counts from here
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
        if TRANSPOSED:
            buffer.permute((1, 0)).store(value)
            r = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
            c = row + gl.arange(0, ROWS, gl.SliceLayout(0, WIDE))
            ld = M
        else:
            buffer.store(value)
            r = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
            c = col + gl.arange(0, 64, gl.SliceLayout(0, WIDE))
            ld = N
        held = (r < over - first)[:, None] & (c < ld)[None, :]
        gl.store(out + (at + r).to(gl.int64)[:, None] * ld + c[None, :], buffer.load(WIDE), mask=held)
    else:
        tma.store_wait(0)


@gluon.jit
def wgrad_kernel(
    a_desc, a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, ranked, o_desc, o_ptr, E, M, N, num_m, num_n,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, TRANSPOSED: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, STAGES: gl.constexpr, ROWS_FIRST: gl.constexpr, PRODUCER: gl.constexpr,
):  # fmt: skip
    """Sums over each expert's rows of ``a`` (through ``index``), transposed, times ``b``, into ``o``."""
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BM], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], b_desc.layout)
    if TRANSPOSED:
        stage = gl.allocate_shared_memory(dtype, [2, 64, BM], o_desc.layout)
    else:
        stage = gl.allocate_shared_memory(dtype, [2, BM, 64], o_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(ready.index(i), count=129)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (_wgrad_consumer, (o_desc, o_ptr, offsets, ranked, E, M, N, num_m, num_n, a_bufs, b_bufs, ready, empty,
                               stage, TRANSPOSED, BM, BN, BK, STAGES, ROWS_FIRST)),
            (_wgrad_producer, (a_desc, a_ptr, lda, index, b_desc, b_ptr, ldb, offsets, ranked, E, M, N, num_m, num_n,
                               a_bufs, b_bufs, ready, empty, GATHER, SLOTS, BM, BN, BK, STAGES, ROWS_FIRST)),
        ],
        [4],
        [PRODUCER],
    )  # fmt: skip
