"""The fused families on CUDA: grouped matmuls with the gathers, the biases and the activation inside, from one of the
cores (``wgmma.py`` for Hopper, ``tiled.py`` for every GPU), and row-wise kernels (``rowwise.py``) around them. What no
core takes (float64, activations with constants that only the call gives) runs on :mod:`library`, operator by operator.
Nothing reads a device value on the host.

A core is a module with ``rows_mm``, ``up`` and ``wgrad`` as in ``wgmma.py``; ``tile_rows``, the height of a row tile;
``takes(a, w)``, whether it multiplies rows like ``a`` by matrices ``w`` [E, in, out]; ``takes_up``, whether it does so
with an activation; and ``takes_wgrad``. It may have ``pull_mm`` and ``takes_pull`` as in ``pingpong.py``.

Rows of dropped slots hold anything in a and h.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from moe_inductor.spec import Combine, ExpertsSpec, Grad, Layout

from . import library
from .family import Gather, Need, Rows, in_out

#: Rows of an expert, in the mean, up to which the last core is the fastest: it streams weights in tiles of 16 to 64
#: rows. H200, 16 rows: 344 against 359 us for 128 experts of 3 x 2048 x 768, 32 rows: 421 against 457 for 32 of
#: 3 x 2880 x 2880; 64 rows: 411 against 375.
FEW_ROWS = 32

#: Row tiles by their height.
Lists: TypeAlias = dict[int, tuple[Tensor, Tensor]]


class Fused:
    """A family over ``cores``, names of modules beside this one, the first that takes the operands of a matmul."""

    def __init__(self, *cores: str) -> None:
        self.cores = cores

    def route(self, idx: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(order, inverse, offsets, counts), as :func:`family.sort_by_expert`."""
        return tuple(_module("rowwise").sort_by_expert(idx, experts))

    def up(
        self, x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, consts: Sequence[float], spec: ExpertsSpec
    ) -> tuple[Tensor, Tensor]:
        """(a [N, I], h [N, W])."""
        made = self._up(x, rows, w1, b1, spec, save=True)
        if made is None:
            return library.up(x, rows, w1, b1, consts, spec)
        return made

    def _up(
        self, x: Tensor, rows: Rows, w1: Tensor, b1: Tensor | None, spec: ExpertsSpec, *, save: bool,
        lists: Lists | None = None,
    ) -> tuple[Tensor, Any] | None:
        """(a, h where ``save`` says so), or None where no core takes this."""
        if not _module("generated").is_fixed(spec.activation):
            return None
        w, x = in_out(w1, spec.w1), _rows(x)
        bias = None if b1 is None else b1.contiguous()
        able = (c for c in self._ranked(rows) if c.takes_up(x, w, bias, spec.activation, spec.halves))
        core = next(able, None)
        if core is None:
            return None
        source = Gather(rows.order, rows.top_k)
        tiles = _tiles(core, rows, x, lists, gathered=True)
        a, h = core.up(x, source, w, bias, spec.activation, spec.halves, tiles, save=save)
        return a, h

    def up_backward(
        self, dh: Tensor, x: Tensor, rows: Rows, w1: Tensor, spec: ExpertsSpec, need: Need
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(dx [T, H], dw1 like w1, db1 [E, W])."""
        dh, x, back = dh.contiguous(), _rows(x), in_out(w1, spec.w1).transpose(1, 2)
        core = self._core(dh, back, rows)
        if core is None:
            return library.up_backward(dh, x, rows, w1, spec, need)
        rowwise = _module("rowwise")
        dx = dw1 = db1 = None
        if Grad.X in need:
            out = core.rows_mm(dh, None, back, None, _tiles(core, rows, dh))
            dx = rowwise.combine(out, rows, None, x.dtype, x.dtype)
            del out
        if Grad.W1 in need:
            source = Gather(rows.order, rows.top_k)
            dw1 = self._wgrad(x, source, dh, rows, transposed=spec.w1 is Layout.OUT_IN)
        if Grad.B1 in need:
            db1 = rowwise.sum_rows(dh, None, rows.offsets)
        return dx, dw1, db1

    def down(
        self, a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec
    ) -> Tensor:
        """y [T, H], or [N, H] in slot order."""
        return self._down(a, rows, weights, w2, b2, spec)

    def _down(
        self, a: Tensor, rows: Rows, weights: Tensor | None, w2: Tensor, b2: Tensor | None, spec: ExpertsSpec,
        lists: Lists | None = None,
    ) -> Tensor:  # fmt: skip
        a, w = a.contiguous(), in_out(w2, spec.w2)
        core = self._core(a, w, rows)
        if core is None:
            return library.down(a, rows, weights, w2, b2, spec)
        out = core.rows_mm(a, None, w, None if b2 is None else b2.contiguous(), _tiles(core, rows, a, lists))
        single = rows if weights is not None else Rows(rows.order, rows.inverse, rows.offsets, 1)
        y: Tensor = _module("rowwise").combine(out, single, weights, spec.weight_dtype, spec.out_dtype)
        return y

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
        dy, h, back = dy.to(w2.dtype).contiguous(), h.contiguous(), in_out(w2, spec.w2).transpose(1, 2)
        core = self._core(dy, back, rows)
        if core is None or not _module("generated").is_fixed(spec.activation):
            return library.down_backward(dy, h, rows, weights, w2, b2, consts, spec, need)
        rowwise = _module("rowwise")
        source = Gather(rows.order, 1 if spec.combine is Combine.ROWS else rows.top_k)
        need_w = Grad.WEIGHTS in need and weights is not None
        if b2 is None and need >= {Grad.X, Grad.W2} and _pulls(core, dy, back, h, spec):
            dh, scaled, dots = core.pull_mm(
                dy, source, back, h, None if weights is None else weights.to(spec.weight_dtype).float().contiguous(),
                spec.halves, _tiles(core, rows, dy, gathered=True),
            )  # fmt: skip
            dweights = rowwise.slot_sums(dots, rows, weights) if need_w else None
        else:
            da = dots = None
            if need & {Grad.X, Grad.WEIGHTS}:
                da = core.rows_mm(dy, source, back, None, _tiles(core, rows, dy, gathered=True))
            if need_w and b2 is not None:
                dots = _dots(dy, b2)
            dh, scaled, dweights = rowwise.pull(
                h, da, rows, weights, dots, spec, need_h=Grad.X in need, need_a=Grad.W2 in need, need_w=need_w
            )
            del da
        dw2 = db2 = None
        if scaled is not None:
            dw2 = self._wgrad(dy, source, scaled, rows, transposed=spec.w2 is Layout.IN_OUT)
        if Grad.B2 in need:
            db2 = rowwise.sum_rows(dy, source, rows.offsets, weights, spec.weight_dtype)
        return dh, dweights, dw2, db2

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
        """``down(up(...))``, h in registers only."""
        lists: Lists = {}
        made = self._up(x, rows, w1, b1, spec, save=False, lists=lists)
        a = library.up(x, rows, w1, b1, consts, spec)[0] if made is None else made[0]
        return self._down(a, rows, weights, w2, b2, spec, lists)

    def _wgrad(self, gathered: Tensor, source: Gather, dense: Tensor, rows: Rows, *, transposed: bool) -> Tensor:
        """[E, M, N] (``transposed``: [E, N, M]) of the rows [., M] read through ``source`` and ``dense`` [., N]."""
        core = next((c for c in map(_module, self.cores) if c.takes_wgrad(gathered, dense)), None)
        if core is None:
            copied = gathered.index_select(0, torch.div(source.index, source.slots, rounding_mode="floor"))
            x, dy = (dense, copied) if transposed else (copied, dense)
            return library.wgrad(x, dy, rows, Layout.IN_OUT)
        dw: Tensor = core.wgrad(gathered, source, dense, rows.offsets, transposed=transposed)
        return dw

    def _core(self, a: Tensor, w: Tensor, rows: Rows) -> ModuleType | None:
        """The core that multiplies rows like ``a`` by matrices ``w`` [E, in, out]."""
        return next((core for core in self._ranked(rows) if core.takes(a, w)), None)

    def _ranked(self, rows: Rows) -> Iterator[ModuleType]:
        """The cores, the fastest for such rows first."""
        many = rows.order.numel() > FEW_ROWS * rows.offsets.numel()
        return map(_module, self.cores if many else self.cores[::-1])


def _pulls(core: ModuleType, dy: Tensor, w: Tensor, h: Tensor, spec: ExpertsSpec) -> bool:
    """Whether ``core`` has dA with the backward of the activation inside."""
    return hasattr(core, "takes_pull") and core.takes_pull(dy, w, h, spec.activation, spec.halves)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _tiles(
    core: ModuleType, rows: Rows, a: Tensor, lists: Lists | None = None, *, gathered: bool = False
) -> tuple[Tensor, Tensor]:
    """The row tiles for a product of rows like ``a``, and a place for them in ``lists``."""
    tile = core.tile_rows(rows.order.numel(), rows.offsets.numel(), a.dtype, gathered=gathered)
    lists = {} if lists is None else lists
    if tile not in lists:
        lists[tile] = _module("rowwise").row_tiles(rows, tile)
    return lists[tile]


def _dots(dy: Tensor, b2: Tensor) -> Tensor:
    """float32 [., E], each row of ``dy`` times each expert's bias: its share of the gradient of a routing weight."""
    if dy.dtype is torch.float32:
        return dy @ b2.t()
    return torch.mm(dy, b2.t(), out_dtype=torch.float32)


@functools.cache
def _module(name: str) -> ModuleType:
    """A module that needs Triton, imported when a kernel is first asked for."""
    return importlib.import_module(f".{name}", __package__)


__all__ = ["Fused"]
