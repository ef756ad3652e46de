"""FLOP formulas of the operators for :class:`torch.utils.flop_counter.FlopCounterMode`: the matmuls, two a
multiply-add, of all N = T*K routed rows (a dropped slot counts, since counting it out would read the device)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

Shape = tuple[int, ...]


def register() -> None:
    """Register the formulas; ``torch.ops.megamoe`` must be complete."""
    formulas: dict[str, Callable[..., int]] = {
        "experts_up": _up,
        "experts_up_backward": _up_backward,
        "experts_down": _down,
        "experts_down_backward": _down_backward,
        "experts": _experts,
        "experts_backward": _experts_backward,
    }
    for name, formula in formulas.items():
        register_flop_formula(getattr(torch.ops.megamoe, name))(formula)


def _matmul(rows: int, weight: Shape) -> int:
    return 2 * rows * weight[1] * weight[2]


def _up(x: Shape, order: Shape, inverse: Shape, offsets: Shape, w1: Shape, *_: Any, **__: Any) -> int:
    return _matmul(order[0], w1)


def _up_backward(
    dh: Shape, x: Shape, order: Shape, inverse: Shape, offsets: Shape, w1: Shape, *key: Any, **_: Any
) -> int:
    return _matmul(order[0], w1) * _count(key[-1], "x", "w1")


def _down(
    a: Shape, h: Shape, order: Shape, inverse: Shape, offsets: Shape, weights: Shape | None, w2: Shape,
    *_: Any, **__: Any,
) -> int:  # fmt: skip
    return _matmul(order[0], w2)


def _down_backward(
    dy: Shape, h: Shape, order: Shape, inverse: Shape, offsets: Shape, weights: Shape | None, w2: Shape,
    *key: Any, **_: Any,
) -> int:  # fmt: skip
    """dA serves both h and the routing weights."""
    return _matmul(order[0], w2) * (bool(_count(key[-1], "x", "weights")) + _count(key[-1], "w2"))


def _experts(
    x: Shape, idx: Shape, weights: Shape | None, w1: Shape, b1: Shape | None, w2: Shape, *_: Any, **__: Any
) -> int:
    return _matmul(idx[0] * idx[1], w1) + _matmul(idx[0] * idx[1], w2)


def _experts_backward(
    dy: Shape, x: Shape, idx: Shape, weights: Shape | None, w1: Shape, b1: Shape | None, w2: Shape, *key: Any, **_: Any
) -> int:
    """The up projection runs again; what lies below h needs dA."""
    up, down = _matmul(idx[0] * idx[1], w1), _matmul(idx[0] * idx[1], w2)
    through_h = bool(_count(key[-1], "x", "weights", "w1", "b1"))
    return up * (1 + _count(key[-1], "x", "w1")) + down * (through_h + _count(key[-1], "w2"))


def _count(need: str, *names: str) -> int:
    return len(set(names) & set(need.split(",")))
