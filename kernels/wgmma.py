"""Grouped matmuls for Hopper in Gluon, the core of the family ``hopper``. Imported where Triton and a GPU of compute
capability 9.0 are present. Device code: ``wgmma_rows.py`` and ``wgmma_wgrad.py``, one persistent program an SM.

``tiles`` int32 [M, 3]: expert, first row and number of rows (at most 128) of each row tile, ``num_tiles`` int32 [1] of
them; all tiles of an expert lie side by side, so that its weights stay in the second level cache. Every launch has at
least one stage for each program that takes part, and no program waits for another.
"""
# mypy: disable-error-code="no-untyped-call,no-any-return"

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from moe_inductor.spec import Halves

from .family import Gather
from .generated import gluon_activation
from .rowwise import largest_first
from .wgmma_rows import rows_kernel
from .wgmma_wgrad import wgrad_kernel

#: Rows and columns of a tile, depth of a stage.
BM, BN, BK = 128, 256, 64
#: Stages in the ring, 48 KiB each. Where rows are gathered a fourth gains 2 to 4 % on the H200 and leaves 32 KiB for
#: results, which then leave 64 columns at a time; in dense products whole tiles leave at once, which gains 4 to 6 %.
STAGES, DENSE_STAGES = 4, 3
#: Row tiles that take turns with one column tile of weights.
GROUP = 8
#: Columns of a block of results.
OUT = 64
#: Registers of a thread of a consumer of rows, of its producer, and of the producer of weight gradients; ptxas sees
#: 168 for all.
CONSUMER_REGISTERS, PRODUCER_REGISTERS, WGRAD_REGISTERS = 232, 40, 56



def tile_rows(n: int, experts: int, dtype: torch.dtype, *, gathered: bool = False) -> int:
    """Rows of a row tile."""
    return BM


def takes(a: Tensor, w: Tensor) -> bool:
    """Whether TMA takes rows of ``a`` [., in] and the matrices ``w`` [E, in, out]: addresses and strides in multiples
    of 16 bytes, matrices without gaps, and no stage that reaches into another expert's matrix."""
    depth, columns = w.shape[1:]
    dense = w.is_contiguous() or w.transpose(1, 2).is_contiguous()
    even = depth % BK == 0 and columns % 16 == 0 and a.stride(0) % 8 == 0 and a.stride(1) == 1
    aligned = a.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    return a.dtype in _GLUON and w.dtype is a.dtype and dense and even and aligned and 0 < a.shape[0] < 1 << 31


def takes_up(x: Tensor, w: Tensor, bias: Tensor | None, activation: str, halves: Halves) -> bool:
    """Whether :func:`up` takes these."""
    return takes(x, w)


def takes_wgrad(gathered: Tensor, dense: Tensor) -> bool:
    """Whether TMA takes rows ``dense`` [., N] and copies of 16 bytes those of ``gathered`` [., M]."""
    sound = all(t.stride(0) % 8 == 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0 for t in (gathered, dense))
    even = gathered.shape[1] % 16 == 0 and dense.shape[1] % 16 == 0
    return sound and even and gathered.dtype in _GLUON and 0 < gathered.shape[0] < 1 << 31 and dense.shape[0] > 0


def rows_mm(a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor]) -> Tensor:
    """[N, out] like ``a``: the rows of ``a`` [N, in] (of what ``gather`` reads from it) times their expert's ``w``
    [E, in, out], plus ``bias`` [E, out]. Rows of no tile hold anything. ``tiles``: the list and its length."""
    out = a.new_empty(a.shape[0] if gather is None else gather.index.shape[0], w.shape[2])
    o = _desc(out, [64, BN if gather is None else OUT])
    _rows(a, gather, w, bias, out, o, None, o, o, tiles, halves="none", act=None)
    return out


def up(
    x: Tensor, gather: Gather, w: Tensor, bias: Tensor | None, activation: str, halves: Halves,
    tiles: tuple[Tensor, Tensor], *, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(a [N, I], h [N, W] or None) like ``x``: h = rows of x times ``w`` [E, in, W] plus ``bias`` [E, W], and a the
    activation of the rounded h."""
    n, width = gather.index.shape[0], w.shape[2]
    a = x.new_empty(n, width if halves is Halves.SINGLE else width // 2)
    h = x.new_empty(n, width) if save else None
    o = g = u = _desc(a, [64, OUT])
    if h is not None:
        g = u = _desc(h, [64, OUT])
        if halves in (Halves.GATE_UP, Halves.UP_GATE):
            g, u = (_desc(half, [64, OUT]) for half in h.chunk(2, 1))
            if halves is Halves.UP_GATE:
                g, u = u, g
    _rows(x, gather, w, bias, a, o, h, g, u, tiles, halves=halves.value, act=gluon_activation(activation))
    return a, h


def _rows(
    a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, out: Tensor, o: TensorDescriptor,
    h: Tensor | None, g: TensorDescriptor, u: TensorDescriptor, tiles: tuple[Tensor, Tensor], *, halves: str, act: Any,
) -> None:  # fmt: skip
    in_out = w.stride(2) == 1
    width = BN // 2 if halves in (Halves.GATE_UP.value, Halves.UP_GATE.value) else BN
    b = _desc(w.flatten(0, 1), [BK, width]) if in_out else _desc(w.transpose(1, 2).flatten(0, 1), [width, BK])
    index, slots = (tiles[0], 1) if gather is None else (gather.index, gather.slots)
    stages, buffers, block = (DENSE_STAGES, 1, BN) if gather is None else (STAGES, 2, OUT)
    # A second product in flight takes registers that these forms lack: ptxas would serialise all of them.
    ahead = int(a.dtype is torch.bfloat16 and halves != Halves.INTERLEAVED.value and bias is None and not in_out)
    rows_kernel[(_programs(a.device),)](
        _desc(a, [BM, BK]), a, a.stride(0), index, b, o, out, g, u, out if h is None else h,
        out if bias is None else bias, *tiles, w.shape[1], w.shape[2], GATHER=gather is not None, SLOTS=slots,
        HALVES=halves, ACT=act, SAVE=h is not None, BIAS=bias is not None, IN_OUT=in_out, AHEAD=ahead, BM=BM, BN=BN,
        BK=BK, OUT=block, STAGES=stages, BUFFERS=buffers, GROUP=GROUP, CONSUMER=CONSUMER_REGISTERS,
        PRODUCER=PRODUCER_REGISTERS, num_warps=4,
    )  # fmt: skip


def wgrad(gathered: Tensor, gather: Gather | None, dense: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """[E, M, N] like ``dense``, the sum over each expert's rows of gathered^T dense, for the rows [., M] that
    ``gather`` reads and ``dense`` [rows, N]; ``transposed``: [E, N, M]. Zero for experts without rows."""
    m, n, experts = gathered.shape[1], dense.shape[1], offsets.shape[0]
    out = dense.new_empty((experts, n, m) if transposed else (experts, m, n))
    index, slots = (offsets, 1) if gather is None else (gather.index, gather.slots)
    wgrad_kernel[(_programs(dense.device),)](
        _desc(gathered, [BK, BM]), gathered, gathered.stride(0), index, _desc(dense, [BK, BN]), dense, dense.stride(0),
        offsets, largest_first(offsets)[0], _desc(out.flatten(0, 1), [OUT, BM] if transposed else [BM, OUT]), out,
        experts, m, n, -(-m // BM), -(-n // BN), GATHER=gather is not None, SLOTS=slots, TRANSPOSED=transposed, BM=BM,
        BN=BN, BK=BK, STAGES=STAGES, ROWS_FIRST=True, PRODUCER=WGRAD_REGISTERS, num_warps=8,
    )  # fmt: skip
    return out


def _desc(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor.from_tensor(t, block, gl.NVMMASharedLayout.get_default_for(block, _GLUON[t.dtype]))


@functools.lru_cache(maxsize=16)
def _programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_GLUON = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
