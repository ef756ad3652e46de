"""What every kernel family provides, and what they share. A family is a module whose functions are those of
:class:`Family`; ``ops.py`` picks it by the first word of the plan.

Axes: T tokens, K experts a token, N = T*K routed rows in expert order, E experts, H hidden, I expert inner width,
W = 2I for gated experts, else I. Row ``r`` holds slot ``order[r]`` = t*K + k; expert e owns rows
``offsets[e-1] : offsets[e]``; rows from ``offsets[-1]`` on are dropped slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from moe_inductor.spec import Combine, ExpertsSpec, Grad, Layout

Need = frozenset[Grad]


@dataclass(frozen=True, slots=True)
class Rows:
    """The order of routed rows: ``order`` and ``inverse`` int64 [N], ``offsets`` int32 [E], cumulative ends."""

    order: Tensor
    inverse: Tensor
    offsets: Tensor
    top_k: int

    @property
    def tokens(self) -> Tensor:
        """int64 [N], the token of each row."""
        return self.order if self.top_k == 1 else torch.div(self.order, self.top_k, rounding_mode="floor")

    def slots(self) -> Tensor:
        """int64 [T, K], the row of each slot."""
        return self.inverse.view(-1, self.top_k)

    def gradient_rows(self, spec: ExpertsSpec) -> Tensor:
        """int64 [N], the row of the output's gradient that belongs to each routed row."""
        return self.order if spec.combine is Combine.ROWS else self.tokens


@dataclass(frozen=True, slots=True)
class Gather:
    """Rows to read through an index: row r of the operand is row ``index[r] // slots`` of the tensor. At most 2**31 - 1
    rows."""

    index: Tensor
    slots: int


class Family(Protocol):
    """One implementation of the operators. Inputs may have any strides; outputs are contiguous and alias nothing.

    ``need`` names the gradients wanted; the others come back as None. In :meth:`down_backward` ``Grad.X`` is dh.
    """

    def route(self, idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(order [N], inverse [N], offsets int32 [E], counts [E]) of the choices ``idx`` [T, K]: a stable order, with
        slots whose choice is no expert last."""
        ...

    def up(
        self, x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
    ) -> tuple[Tensor, Tensor]:
        """(a [N, I], h [N, W]): h = x[token] W1 + b1 and a = act(h). Dropped rows hold anything."""
        ...

    def up_backward(
        self, dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx [T, H], dw1 like w1, db1 [E, W])."""
        ...

    def down(
        self, a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec
    ) -> Tensor:
        """y [T, H], or [N, H] in slot order, in ``spec.out_dtype``."""
        ...

    def down_backward(
        self,
        dy: Tensor,
        h: Tensor,
        rows: Rows,
        weights: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        consts: Sequence[float],
        spec: ExpertsSpec,
        need: Need,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """(dh [N, W], dweights [T, K], dw2 like w2, db2 [E, H])."""
        ...

    def experts(
        self,
        x: Tensor,
        rows: Rows,
        weights: Tensor | None,
        w1: Tensor,
        b1: Tensor | None,
        w2: Tensor,
        b2: Tensor | None,
        consts: Sequence[float],
        spec: ExpertsSpec,
    ) -> Tensor:
        """``down(up(...))``, nothing kept for a backward."""
        ...


def accumulator(*tensors: Tensor | None) -> torch.dtype:
    """float64 where any operand is, else float32: the dtype of everything between two roundings."""
    return torch.float64 if any(t is not None and t.dtype is torch.float64 for t in tensors) else torch.float32


def in_out(weight: Tensor, layout: Layout) -> Tensor:
    """A view of ``weight`` [E, ...] (or one expert's) as [..., in, out]."""
    return weight if layout is Layout.IN_OUT else weight.transpose(-2, -1)


def width(weight: Tensor, layout: Layout) -> int:
    """Number of output columns of an expert weight."""
    return weight.shape[-2] if layout is Layout.OUT_IN else weight.shape[-1]


def sort_by_expert(idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(order [N], inverse [N], offsets int32 [E], counts [E]) of the choices ``idx`` [T, K], without a host sync.

    The ends come from a search in the sorted ids, since a histogram of them syncs (bincount) or needs atomics (histc).
    """
    ids = idx.reshape(-1)
    ids = torch.where((ids < 0) | (ids >= experts), experts, ids)
    ranked, order = torch.sort(ids, stable=True)
    inverse = torch.empty_like(order).scatter(0, order, torch.arange(order.numel(), device=order.device))
    ends = torch.searchsorted(ranked, torch.arange(experts, device=ids.device, dtype=ids.dtype), right=True)
    counts = ends - torch.nn.functional.pad(ends[:-1], (1, 0))
    return order, inverse, ends.to(torch.int32), counts
