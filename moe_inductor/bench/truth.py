"""Errors of an arm's output and gradients against float32, one expert after another so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..spec import Layout
from .operands import Operands, gated
from .shapes import Shape


class _Distance:
    """|got - true| / |true| in the Frobenius norm, from pieces."""

    def __init__(self, device: torch.device) -> None:
        self.difference = torch.zeros((), dtype=torch.float64, device=device)
        self.size = torch.zeros((), dtype=torch.float64, device=device)

    def add(self, got: Tensor, true: Tensor) -> None:
        self.difference += (got.detach().float() - true).square().sum(dtype=torch.float64)
        self.size += true.square().sum(dtype=torch.float64)

    def __float__(self) -> float:
        return float((self.difference / self.size.clamp(min=torch.finfo(torch.float64).tiny)).sqrt())


def errors(shape: Shape, o: Operands, dy: Tensor | None, got: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative errors by name: ``y``, and ``dx``, ``ds``, ``dw1``... for those in ``got`` (needs ``dy``)."""
    device = o.x.device
    distances = {name: _Distance(device) for name in got}
    y = torch.zeros(o.x.shape, dtype=torch.float32, device=device)
    dx, ds = torch.zeros_like(y), torch.zeros(o.s.numel(), dtype=torch.float32, device=device)
    with _full_float32():
        for e, rows in _experts(o.idx, shape.experts):
            part, grads = _expert(shape, o, dy, e, rows)
            tokens = rows // shape.top_k
            y.index_add_(0, tokens, part)
            if grads:
                dx.index_add_(0, tokens, grads["x"])
                ds[rows] = grads["s"]
            for name in ("w1", "b1", "w2", "b2"):
                if f"d{name}" in got:
                    distances[f"d{name}"].add(got[f"d{name}"][e], grads[name])
    for name, true in {"y": y, "dx": dx, "ds": ds.view(o.s.shape)}.items():
        if name in got:
            distances[name].add(got[name], true)
    return {name: float(d) for name, d in distances.items()}


def _expert(shape: Shape, o: Operands, dy: Tensor | None, e: int, rows: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    """(weighted rows [n, H], gradients by operand) of expert ``e``; the gradients are empty without ``dy``."""
    tokens = rows // shape.top_k
    pick = {"x": o.x[tokens], "s": o.s.reshape(-1)[rows]}
    pick |= {name: t[e] for name, t in o.leaves().items() if name not in pick}
    v = {name: t.detach().float().requires_grad_(dy is not None) for name, t in pick.items()}
    out_in = shape.layout is Layout.OUT_IN
    with torch.set_grad_enabled(dy is not None):
        h = v["x"] @ (v["w1"].t() if out_in else v["w1"])
        a = gated(shape)(h + v["b1"] if "b1" in v else h)
        row = a @ (v["w2"].t() if out_in else v["w2"])
        row = (row + v["b2"] if "b2" in v else row) * v["s"].unsqueeze(-1)
    if dy is None:
        return row, {}
    grads = torch.autograd.grad(row, list(v.values()), dy[tokens].float())
    return row.detach(), dict(zip(v, grads, strict=True))


def _experts(idx: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """(expert, its slots) for every expert, those without rows too: their gradients are zeros."""
    order = torch.argsort(idx.reshape(-1), stable=True)
    counts = torch.bincount(idx.reshape(-1), minlength=experts).tolist()
    yield from enumerate(torch.split(order, counts))


@contextmanager
def _full_float32() -> Iterator[None]:
    """Without TF32."""
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(was)
