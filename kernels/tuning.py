"""The configurations of the portable grouped matmuls (:mod:`tiled`), chosen by device class, rows per expert and dtype.
A pure table: nothing is measured in a user's step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

#: The kernels: products of rows; the same with the activation in the epilogue, "pair" of two accumulators, "whole" of
#: one; weight gradients.
Kind = Literal["rows", "pair", "whole", "wgrad"]
#: Device classes: A100; Ampere, Ada and Blackwell cards with 99 KiB of shared memory; Hopper; B200 and B300.
DEVICES = ("sm_80", "small", "sm_90", "sm_100")
#: Rows per expert up to which a bucket reaches, and the height of its row tiles.
BUCKETS = ((0.25, 16), (8.0, 16), (16.0, 32), (32.0, 64), (float("inf"), 128))
#: float32 keeps to tiles of 64 rows: twice the bytes of a stage, and without tf32 one multiply-add at a time.
TALLEST_FLOAT32 = 64


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a kernel. ``rows`` and ``columns`` of a tile (of both halves together where there are two), in
    weight gradients of the result; ``depth`` of a stage along the sum; ``warps``; ``stages``; ``persistent`` programs a
    multiprocessor, 0 for one program a tile."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    persistent: int = 0


def bucket(rows_per_expert: float) -> int:
    """Which of :data:`BUCKETS`."""
    return next(i for i, (most, _) in enumerate(BUCKETS) if rows_per_expert <= most)


def tile_height(rows_per_expert: float, dtype: torch.dtype) -> int:
    """Rows of a row tile: about twice the mean, so that most experts need one."""
    height = BUCKETS[bucket(rows_per_expert)][1]
    return min(height, TALLEST_FLOAT32) if dtype.itemsize == 4 else height


def device_class(capability: tuple[int, int]) -> str:
    """One of :data:`DEVICES`. What is not known has at least the shared memory of the small ones."""
    if capability == (8, 0):
        return "sm_80"
    return {9: "sm_90", 10: "sm_100"}.get(capability[0], "small")


def config(kind: Kind, capability: tuple[int, int], rows_per_expert: float, dtype: torch.dtype) -> Config:
    """The configuration for ``rows_per_expert``, the mean over all experts; ``rows`` is :func:`tile_height` but for
    weight gradients."""
    return _TABLE[device_class(capability), dtype.itemsize][kind][bucket(rows_per_expert)]


def unaligned(c: Config, dtype: torch.dtype) -> Config:
    """``c`` for operands that copies of 16 bytes cannot address: every element of a stage waits in a register, beside
    its address, so that tiles of 256 columns would spill 1.5 to 3 KB a thread."""
    return replace(c, columns=min(c.columns, 64), depth=min(c.depth, 64 // dtype.itemsize))


# One accumulator of 256 columns and its activation spilled 96 bytes a thread on Hopper, 272 on Blackwell (Triton 3.9).
#
# In weight gradients the rows' indices are a stage of their own for each of the rows': 2 n + 1 stages hold n blocks.

# Below 16 rows an expert a step reads weights and does little else. Narrow columns make enough programs where four or
# eight experts are active: 384 for 8 experts of 1536 columns; the stages keep about 96 KiB a multiprocessor in flight.
_THIN = (Config(16, 32, 128, 4, 5), Config(16, 64, 128, 4, 4), Config(32, 64, 128, 4, 4))
# H200, 128 experts of 2048 x 1536 in bf16, T = 1, 4, 16, 64: 15, 46, 123, 182 us, 78 to 100 % of reading the weights at
# 4.3 TB/s; 32 columns 19, 60, 156 us. 16 rows an expert (T = 256): 192 us, 98 %.
_THIN_HOPPER = (Config(16, 64, 128, 4, 4), Config(16, 64, 128, 4, 4), Config(32, 128, 128, 8, 3))
_THIN_SMALL = (Config(16, 32, 128, 4, 4), Config(16, 64, 64, 4, 4), Config(32, 64, 64, 4, 4))
_THIN_FLOAT32 = (Config(16, 32, 64, 4, 4), Config(16, 64, 32, 4, 4), Config(32, 64, 32, 4, 4))
_FLOAT32: dict[Kind, tuple[Config, ...]] = {
    "rows": (*_THIN_FLOAT32, Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 3)),
    "pair": (*_THIN_FLOAT32, Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 3)),
    "whole": (*_THIN_FLOAT32, Config(64, 64, 32, 4, 3), Config(64, 64, 32, 4, 3)),
    "wgrad": (Config(64, 64, 16, 4, 3),) * 2 + (Config(64, 64, 32, 4, 5),) * 3,
}

_TABLE: dict[tuple[str, int], dict[Kind, tuple[Config, ...]]] = {
    ("sm_80", 2): {
        "rows": (*_THIN, Config(64, 128, 64, 4, 3), Config(128, 128, 32, 4, 4)),
        "pair": (*_THIN, Config(64, 128, 64, 4, 3), Config(128, 128, 32, 8, 4)),
        "whole": (*_THIN, Config(64, 128, 64, 4, 3), Config(128, 128, 32, 8, 4)),
        "wgrad": (Config(128, 128, 16, 4, 3),) * 2 + (Config(128, 128, 32, 4, 7),) * 3,
    },
    ("small", 2): {
        "rows": (*_THIN_SMALL, Config(64, 128, 32, 4, 4), Config(128, 128, 32, 4, 4)),
        "pair": (*_THIN_SMALL, Config(64, 128, 32, 4, 4), Config(128, 128, 32, 8, 4)),
        "whole": (*_THIN_SMALL, Config(64, 128, 32, 4, 4), Config(128, 128, 32, 8, 4)),
        "wgrad": (Config(128, 128, 16, 4, 3),) * 2 + (Config(128, 128, 32, 4, 7),) * 3,
    },
    ("sm_90", 2): {
        "rows": (*_THIN_HOPPER, Config(64, 128, 64, 4, 4), Config(128, 256, 64, 8, 3)),
        "pair": (*_THIN_HOPPER, Config(64, 128, 64, 4, 4), Config(128, 256, 64, 8, 3)),
        "whole": (*_THIN_HOPPER, Config(64, 128, 64, 4, 4), Config(128, 128, 64, 8, 4)),
        "wgrad": (Config(128, 128, 32, 4, 3),) * 3 + (Config(128, 128, 64, 8, 5), Config(128, 256, 64, 8, 5)),
    },
    ("sm_100", 2): {
        "rows": (*_THIN, Config(64, 128, 64, 4, 4), Config(128, 256, 64, 8, 3)),
        "pair": (*_THIN, Config(64, 128, 64, 4, 4), Config(128, 256, 64, 8, 3)),
        "whole": (*_THIN, Config(64, 128, 64, 4, 4), Config(128, 128, 64, 8, 4)),
        "wgrad": (Config(128, 128, 32, 4, 3),) * 3 + (Config(128, 128, 64, 8, 5), Config(128, 256, 64, 8, 5)),
    },
}
_TABLE.update({(device, 4): _FLOAT32 for device in DEVICES})
