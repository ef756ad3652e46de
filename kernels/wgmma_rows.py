"""Rows times their expert's matrix on Hopper, in Gluon: the device code of ``wgmma.py``.

The producer (4 warps) fills a ring of shared-memory stages: weights and dense rows by TMA, gathered rows one by one
with ``cp.async``. Two consumers (4 warps each) own the upper and the lower 64 rows of a 128 x 256 tile: they share
every stage but nothing else, so one may store its half while the other keeps the tensor cores busy, and a tile of at
most 64 rows costs half. Results leave through shared memory by TMA; only where another expert's rows lie beside an
expert's last ones are they stored under a mask.
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

# Triton 3.9 renamed the copies.
tma_load = getattr(tma, "async_load", tma.async_copy_global_to_shared)
tma_store = getattr(tma, "async_store", tma.async_copy_shared_to_global)
row_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)


@gluon.jit
def _row_tile(t, num_m, num_n, tiles, GROUP: gl.constexpr):
    """(expert, first row, rows, column tile) of the t-th tile."""
    width = GROUP * num_n
    first = (t // width) * GROUP
    size = gl.maximum(gl.minimum(num_m - first, GROUP), 1)
    m = first + t % width % size
    n = t % width // size
    return gl.load(tiles + 3 * m), gl.load(tiles + 3 * m + 1), gl.load(tiles + 3 * m + 2), n


@gluon.jit
def tell(t, i, slots, told, heard):
    """Hand the i-th tile of this program to its consumers."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    mbarrier.wait(heard.index(i % 2), ((i // 2) & 1) ^ 1)
    slots.index(i % 2).store(gl.full([1], t, gl.int32, ONE))
    mbarrier.arrive(told.index(i % 2), count=1)


@gluon.jit
def hear(i, slots, told, heard, WARPS: gl.constexpr):
    """The i-th tile of this program, negative after the last."""
    ONE: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    mbarrier.wait(told.index(i % 2), (i // 2) & 1)
    t = gl.max(slots.index(i % 2).load(ONE), 0)
    mbarrier.arrive(heard.index(i % 2), count=1)
    return t


@gluon.jit
def leave(counters):
    """The last program to leave sets ``counters``, tiles given out and programs gone, to zero for the next launch."""
    if gl.atomic_add(counters + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counters, 0)
        gl.store(counters + 1, 0)


@gluon.jit
def halves(value):
    """The left and the right half of the columns."""
    wide: gl.constexpr = value.shape[1] // 2
    return value.reshape([value.shape[0], 2, wide]).permute(0, 2, 1).split()


@gluon.jit
def _pairs(value):
    """The even and the odd columns."""
    return value.reshape([value.shape[0], value.shape[1] // 2, 2]).split()


@gluon.jit
def _side_by_side(left, right):
    """:func:`halves` undone."""
    both = gl.join(left, right).permute(0, 2, 1)
    return both.reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def _biased(value, bias, col, cols, BIAS: gl.constexpr):
    """``value`` plus the biases of its columns, from ``col`` on."""
    if BIAS:
        c = col + gl.arange(0, value.shape[1], gl.SliceLayout(0, value.type.layout))
        value += gl.load(bias + c, mask=c < cols, other=0.0).to(gl.float32)[None, :]
    return value


@gluon.jit
def _store(stage, at: gl.constexpr, value, desc, out, ld, row0, rows, col, cols):
    """One consumer's ``at``-th block of 64 rows of results, of which ``rows`` count, through the buffers in turn. The
    number of blocks of a tile is a multiple of that of the buffers."""
    BUFFERS: gl.constexpr = stage.shape[0]
    buffer = stage.index(at % BUFFERS)
    if rows >= 64:
        tma.store_wait(BUFFERS - 1)
        buffer.store(value)
        fence_async_shared()
        tma_store(desc, [row0, col], buffer)
    else:
        tma.store_wait(0)  # nothing is pending afterwards: the next wait counts from here
        buffer.store(value)
        WIDE: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        r = gl.arange(0, 64, gl.SliceLayout(1, WIDE))
        c = col + gl.arange(0, value.shape[1], gl.SliceLayout(0, WIDE))
        place = out + (row0 + r).to(gl.int64)[:, None] * ld + c[None, :]
        gl.store(place, buffer.load(WIDE), mask=(r < rows)[:, None] & (c < cols)[None, :])


@gluon.jit
def _rows_producer(
    a_desc, a_ptr, lda, index, b_desc, tiles, num_tiles, K, W, a_bufs, b_bufs, ready, empty, slots, told, heard,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, HALVES: gl.constexpr, IN_OUT: gl.constexpr, BM: gl.constexpr,
    BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BN // 2
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    num_m = gl.load(num_tiles)
    num_n = (W + BN - 1) // BN
    it = 0
    i = 0
    t = gl.program_id(0)
    while t < num_m * num_n:
        tell(t, i, slots, told, heard)
        e, row0, rows, n = _row_tile(t, num_m, num_n, tiles, GROUP)
        t = gl.num_programs(0) + gl.atomic_add(num_tiles + 1, 1)
        i += 1
        if GATHER:
            r = gl.arange(0, BM, gl.SliceLayout(1, COPY))
            source = gl.load(index + row0 + gl.minimum(r, rows - 1)).to(gl.int32) // SLOTS
            c = gl.arange(0, BK, gl.SliceLayout(0, COPY))
            ptr = a_ptr + source.to(gl.int64)[:, None] * lda + c[None, :]
        if HALVES == "gate_up":
            col, apart = n * HALF, W // 2
        elif HALVES == "up_gate":
            col, apart = W // 2 + n * HALF, -(W // 2)
        else:
            col, apart = n * BN, 0
        for k in range(0, K, BK):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            bar = ready.index(s)
            b = b_bufs.index(s)
            if GATHER:
                mbarrier.expect(bar, BN * BK * 2)
            else:
                mbarrier.expect(bar, (BN + BM) * BK * 2)
                tma_load(a_desc, [row0, k], bar, a_bufs.index(s))
            if HALVES != "gate_up" and HALVES != "up_gate":
                if IN_OUT:
                    tma_load(b_desc, [e * K + k, col], bar, b)
                else:
                    tma_load(b_desc, [e * W + col, k], bar, b)
            elif IN_OUT:
                tma_load(b_desc, [e * K + k, col], bar, b.slice(0, HALF, 1))
                tma_load(b_desc, [e * K + k, col + apart], bar, b.slice(HALF, HALF, 1))
            else:
                tma_load(b_desc, [e * W + col, k], bar, b.slice(0, HALF))
                tma_load(b_desc, [e * W + col + apart, k], bar, b.slice(HALF, HALF))
            if GATHER:
                row_load(a_bufs.index(s), ptr)
                async_copy.mbarrier_arrive(bar, increment_count=False)
                ptr += BK
            it += 1
    tell(-1, i, slots, told, heard)
    leave(num_tiles + 1)


@gluon.jit
def _rows_consumer(
    o_desc, o_ptr, g_desc, u_desc, h_ptr, bias, tiles, num_tiles, K, W, a_bufs, b_bufs, ready, empty,
    stage, slots, told, heard,
    UPPER: gl.constexpr, GATHER: gl.constexpr, HALVES: gl.constexpr, ACT: gl.constexpr, SAVE: gl.constexpr,
    BIAS: gl.constexpr, IN_OUT: gl.constexpr, AHEAD: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = BN // 2
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    num_m = gl.load(num_tiles)
    num_n = (W + BN - 1) // BN
    it = 0
    i = 0
    t = hear(i, slots, told, heard, 4)
    while t >= 0:
        i += 1
        e, row0, rows, n = _row_tile(t, num_m, num_n, tiles, GROUP)
        row0 += 64 * UPPER
        rows -= 64 * UPPER
        if rows > 0:
            acc = gl.zeros((64, BN), gl.float32, ACC)
            for k in range(0, K, BK):
                s = it % STAGES
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                if GATHER:
                    fence_async_shared()
                a = a_bufs.index(s).slice(64 * UPPER, 64)
                if IN_OUT:
                    acc = warpgroup_mma(a, b_bufs.index(s), acc, use_acc=k > 0, is_async=True)
                else:
                    acc = warpgroup_mma(a, b_bufs.index(s).permute((1, 0)), acc, use_acc=k > 0, is_async=True)
                acc = warpgroup_mma_wait(AHEAD, deps=(acc,))
                if AHEAD == 0:
                    mbarrier.arrive(empty.index(s), count=1)
                elif k > 0:
                    mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
                it += 1
            if AHEAD > 0:
                acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
            at = bias + e.to(gl.int64) * W
            if HALVES == "none" and not GATHER:
                _store(stage, 0, _biased(acc, at, n * BN, W, BIAS).to(dtype), o_desc, o_ptr, W, row0, rows, n * BN, W)
            else:
                left, right = halves(acc)
                for half in gl.static_range(2):
                    if HALVES == "gate_up" or HALVES == "up_gate":
                        # columns of gate, columns of up; both halves of h are W // 2 wide
                        first, second = halves(left)[half], halves(right)[half]
                        col = n * HALF + 64 * half
                        other, cols, narrow, turn = col, W // 2, W // 2, half
                        if HALVES == "gate_up":
                            gate, up = 0, W // 2
                        else:
                            gate, up = W // 2, 0
                    else:
                        if half == 0:
                            first, second = halves(left)
                        else:
                            first, second = halves(right)
                        col = n * BN + HALF * half
                        other, cols, gate, up = col + 64, W, 0, 0
                        if HALVES == "interleaved":
                            narrow, turn = W // 2, half
                        else:
                            narrow, turn = W, 0
                    first = _biased(first, at + gate, col, cols, BIAS).to(dtype)
                    second = _biased(second, at + up, other, cols, BIAS).to(dtype)
                    if HALVES == "none":
                        _store(stage, 0, first, o_desc, o_ptr, W, row0, rows, col, cols)
                        _store(stage, 1, second, o_desc, o_ptr, W, row0, rows, other, cols)
                    else:
                        if SAVE:
                            _store(stage, turn, first, g_desc, h_ptr + gate, W, row0, rows, col, cols)
                            _store(stage, 1 - turn, second, u_desc, h_ptr + up, W, row0, rows, other, cols)
                        x = first.to(gl.float32)
                        y = second.to(gl.float32)
                        if HALVES == "single":
                            _store(stage, 0, ACT(x, x).to(dtype), o_desc, o_ptr, narrow, row0, rows, col, narrow)
                            _store(stage, 1, ACT(y, y).to(dtype), o_desc, o_ptr, narrow, row0, rows, other, narrow)
                        else:
                            if HALVES == "interleaved":
                                g0, u0 = _pairs(x)
                                g1, u1 = _pairs(y)
                                x = _side_by_side(ACT(g0, u0), ACT(g1, u1))
                            else:
                                x = ACT(x, y)
                            col = n * HALF + 64 * half
                            _store(stage, half, x.to(dtype), o_desc, o_ptr, narrow, row0, rows, col, narrow)
        else:
            for _ in range(0, K, BK):
                s = it % STAGES
                mbarrier.wait(ready.index(s), (it // STAGES) & 1)
                mbarrier.arrive(empty.index(s), count=1)
                it += 1
        t = hear(i, slots, told, heard, 4)
    tma.store_wait(0)


@gluon.jit
def rows_kernel(
    a_desc, a_ptr, lda, index, b_desc, o_desc, o_ptr, g_desc, u_desc, h_ptr, bias, tiles, num_tiles, K, W,
    GATHER: gl.constexpr, SLOTS: gl.constexpr, HALVES: gl.constexpr, ACT: gl.constexpr, SAVE: gl.constexpr,
    BIAS: gl.constexpr, IN_OUT: gl.constexpr, AHEAD: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr,
    OUT: gl.constexpr, STAGES: gl.constexpr, BUFFERS: gl.constexpr, GROUP: gl.constexpr, CONSUMER: gl.constexpr,
    PRODUCER: gl.constexpr,
):  # fmt: skip
    """Rows of ``a`` (through ``index``) times ``b``, plus ``bias``, into ``o``; with an activation, h into ``h``."""
    dtype: gl.constexpr = o_ptr.dtype.element_ty
    a_bufs = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], a_desc.layout)
    if IN_OUT:
        b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BK, BN], b_desc.layout)
    else:
        b_bufs = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], b_desc.layout)
    lower = gl.allocate_shared_memory(dtype, [BUFFERS, 64, OUT], o_desc.layout)
    upper = gl.allocate_shared_memory(dtype, [BUFFERS, 64, OUT], o_desc.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    slots = gl.allocate_shared_memory(gl.int32, [2, 1], mbarrier.MBarrierLayout())
    told = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    heard = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(told.index(i), count=1)
        mbarrier.init(heard.index(i), count=2)
    for i in gl.static_range(STAGES):
        if GATHER:
            mbarrier.init(ready.index(i), count=129)  # each copying thread, and the TMA bytes
        else:
            mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    gl.warp_specialize(
        [
            (_rows_consumer, (o_desc, o_ptr, g_desc, u_desc, h_ptr, bias, tiles, num_tiles, K, W,
                              a_bufs, b_bufs, ready, empty, lower, slots, told, heard, 0, GATHER, HALVES, ACT, SAVE,
                              BIAS, IN_OUT, AHEAD, BN, BK, STAGES, GROUP)),
            (_rows_consumer, (o_desc, o_ptr, g_desc, u_desc, h_ptr, bias, tiles, num_tiles, K, W,
                              a_bufs, b_bufs, ready, empty, upper, slots, told, heard, 1, GATHER, HALVES, ACT, SAVE,
                              BIAS, IN_OUT, AHEAD, BN, BK, STAGES, GROUP)),
            (_rows_producer, (a_desc, a_ptr, lda, index, b_desc, tiles, num_tiles, K, W, a_bufs, b_bufs, ready,
                              empty, slots, told, heard, GATHER, SLOTS, HALVES, IN_OUT, BM, BN, BK, STAGES, GROUP)),
        ],
        [4, 4],
        [CONSUMER, PRODUCER],
    )  # fmt: skip
