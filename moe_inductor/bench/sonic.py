"""SonicMoE as an arm: its token-choice layer, with the routing given.

No parameter is copied. ``w1`` [E, 2I, H], gate rows before up rows, and ``w2`` [E, H, I] go in as views with the expert
last, ``concat_layout=True`` says that gate and up are two halves and not interleaved, and gradients come back in the
strides of the parameters. The casts that its kernels ask for, int32 ids and fp32 routing weights, are part of the call.

The first call of a shape compiles and times 80 candidates, its inference form 9 more, which takes minutes.
``QUACK_CACHE_DIR`` keeps the objects and the choices for the matmuls, ``TRITON_CACHE_DIR`` with
``TRITON_CACHE_AUTOTUNING=1`` those for the rest.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

#: (x, idx, s, w1, w2) -> y
Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

#: Device generations with both a bf16 gathered matmul in QuACK and a place in SonicMoE's own support.
GENERATIONS = (9, 10)


def available() -> str | None:
    """Why SonicMoE cannot run here; None where it can."""
    try:
        importlib.import_module("sonicmoe.functional")
    except ModuleNotFoundError as error:
        return "not installed" if error.name == "sonicmoe" else f"cannot be imported: {error}"
    except (Exception, SystemExit) as error:
        return f"cannot be imported: {type(error).__name__}: {error}"
    if not torch.cuda.is_available():
        return "needs a CUDA device"
    major = torch.cuda.get_device_capability()[0]
    return None if major in GENERATIONS else f"needs a device of generation {GENERATIONS}, this is {major}"


def build(x: Tensor, idx: Tensor, s: Tensor, w1: Tensor, w2: Tensor) -> Layer:
    """The layer for operands like these: x [T, H] bf16, idx [T, K] of integers in [0, E), s [T, K] of floats,
    w1 [E, 2I, H] and w2 [E, H, I] bf16. It is differentiable in x, s, w1 and w2; without gradients its inference form
    runs, which writes no h. Raises ValueError for operands of another kind."""
    experts, hidden = w1.shape[0], x.shape[1]
    if w1.shape != (experts, 2 * w2.shape[-1], hidden) or w2.shape != (experts, hidden, w2.shape[-1]):
        raise ValueError(f"w1 {tuple(w1.shape)} and w2 {tuple(w2.shape)} are not [E, 2I, H] and [E, H, I], H={hidden}")
    if idx.shape != s.shape or idx.shape[0] != x.shape[0]:
        raise ValueError(f"idx {tuple(idx.shape)} and s {tuple(s.shape)} are not [T, K], T={x.shape[0]}")
    if {x.dtype, w1.dtype, w2.dtype} != {torch.bfloat16}:
        raise ValueError(f"x, w1 and w2 are {x.dtype}, {w1.dtype} and {w2.dtype}, not bfloat16")
    sonic: Any = importlib.import_module("sonicmoe.functional")
    swiglu = sonic.ActivationType.SWIGLU

    def layer(x: Tensor, idx: Tensor, s: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        tokens, top_k = idx.shape
        rows = tokens * top_k

        def ints(size: int) -> Tensor:
            return torch.empty(size, dtype=torch.int32, device=x.device)

        counts, offsets, token, slot, place = ints(experts), ints(experts + 1), ints(rows), ints(rows), ints(rows)
        sonic.TC_topk_router_metadata_triton(idx.int(), experts, counts, offsets, token, slot, place)
        inference = not torch.is_grad_enabled()
        a, h = sonic._UpProjection.apply(
            x, w1.permute(1, 2, 0), None, offsets, rows, top_k, token, slot, place, None, False, swiglu, inference, True
        )
        y: Tensor = sonic._DownProjection.apply(
            a, h, w2.permute(1, 2, 0), None, s.float(), offsets, tokens, top_k, token, slot, place, None, False, swiglu
        )
        return y

    return layer
