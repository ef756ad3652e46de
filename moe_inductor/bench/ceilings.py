"""What the device can do, measured in the same run: copies, dense matmuls of the layer's sizes, one large matmul."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from .floor import kernels
from .shapes import Shape
from .timing import Clock, Job, interleave

PEAK = 8192
COPY_BYTES = 1 << 30


@functools.cache
def machine(clock: Clock, samples: int) -> dict[str, float]:
    """``memory`` in bytes/s and ``matmul`` in FLOP/s, measured once for each clock."""
    return {"memory": memory(clock, samples), "matmul": peak(clock, samples)}


def memory(clock: Clock, samples: int) -> float:
    """Bytes a second of a 1 GiB copy, read and written ones counted."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=clock.device).zero_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / _seconds(clock, lambda: target.copy_(source), samples)


def peak(clock: Clock, samples: int) -> float:
    """FLOP/s of a dense bf16 matmul of PEAK cubed."""
    return 2 * PEAK**3 / _dense(clock, PEAK, PEAK, PEAK, samples)


def dense(clock: Clock, shape: Shape, tokens: int, samples: int) -> dict[str, dict[str, Any]]:
    """``ms`` and ``flops`` (a second) of one dense matmul for each of the layer's, M, N and K being the same."""
    found = {}
    for kernel in kernels(shape, tokens):
        if kernel.gemm is not None:
            seconds = _dense(clock, *kernel.gemm, samples)
            found[kernel.name] = {"gemm": kernel.gemm, "ms": 1e3 * seconds, "flops": kernel.flops / seconds}
    return found


def _dense(clock: Clock, m: int, n: int, k: int, samples: int) -> float:
    """Seconds of [M, K] x [K, N], both operands contiguous along K as in a linear layer. Random operands: a matmul of
    zeros draws less power and runs faster."""
    a = torch.randn(m, k, dtype=torch.bfloat16, device=clock.device)
    b = torch.randn(n, k, dtype=torch.bfloat16, device=clock.device)
    out = torch.empty(m, n, dtype=torch.bfloat16, device=clock.device)
    return _seconds(clock, lambda: torch.mm(a, b.t(), out=out), samples)


def _seconds(clock: Clock, fn: Callable[[], object], samples: int) -> float:
    for _ in range(2):
        fn()
    return statistics.median(interleave(clock, {"": Job(fn)}, samples)[""]) / 1e3
