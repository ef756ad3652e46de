"""What a layer is called with, and the two plain forms of it that transformers runs.

x [T, H], idx int64 [T, K], s [T, K], w1 [E, 2I, H] and w2 [E, H, I] (Layout.IN_OUT: [E, H, 2I] and [E, I, H]), biases
[E, 2I] and [E, H] or None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..spec import Halves, Layout
from .routing import route
from .shapes import Shape

#: (x, idx, s, w1, b1, w2, b2) -> y [T, H]
Form = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Operands:
    """One layer's inputs and parameters; the float ones are leaves that require gradients."""

    x: Tensor
    idx: Tensor
    s: Tensor
    w1: Tensor
    b1: Tensor | None
    w2: Tensor
    b2: Tensor | None

    def args(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """In the order of :data:`Form`."""
        return self.x, self.idx, self.s, self.w1, self.b1, self.w2, self.b2

    def leaves(self) -> dict[str, Tensor]:
        """The differentiable operands by name."""
        every = {"x": self.x, "s": self.s, "w1": self.w1, "b1": self.b1, "w2": self.w2, "b2": self.b2}
        return {name: t for name, t in every.items() if t is not None}


def make(
    shape: Shape, tokens: int, routing: str, device: str, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> Operands:
    """Random operands; routing weights sum to 1 in a row, outputs have about unit variance."""
    gen = torch.Generator(device).manual_seed(seed)
    e, h, i = shape.experts, shape.hidden, shape.inter

    def normal(*size: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(size, generator=gen, device=device, dtype=dtype)
        return made.mul_(scale).requires_grad_()

    def weight(out: int, inside: int) -> Tensor:
        size = (e, out, inside) if shape.layout is Layout.OUT_IN else (e, inside, out)
        return normal(*size, scale=inside**-0.5)

    idx = route(routing, tokens, e, shape.top_k, gen)
    s = torch.rand(tokens, shape.top_k, generator=gen, device=device).softmax(-1).to(dtype).requires_grad_()
    return Operands(
        x=normal(tokens, h),
        idx=idx,
        s=s,
        w1=weight(2 * i, h),
        b1=normal(e, 2 * i, scale=0.1) if shape.bias else None,
        w2=weight(h, i),
        b2=normal(e, h, scale=0.1) if shape.bias else None,
    )


def gated(shape: Shape) -> Callable[[Tensor], Tensor]:
    """h [., 2I] -> a [., I], in plain torch."""
    if shape.activation == "clamped_swiglu":
        alpha, limit = shape.alpha, shape.limit

        def clamped(h: Tensor) -> Tensor:
            g, u = h[..., ::2].clamp(max=limit), h[..., 1::2].clamp(-limit, limit)
            return (u + 1) * (g * torch.sigmoid(g * alpha))

        return clamped
    known: dict[str, Callable[[Tensor], Tensor]] = {
        "swiglu": F.silu,
        "geglu": F.gelu,
        "geglu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "reglu": F.relu,
    }
    act = known[shape.activation]
    interleaved = shape.halves is Halves.INTERLEAVED

    def plain(h: Tensor) -> Tensor:
        g, u = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
        return act(g) * u

    return plain


def grouped(shape: Shape) -> Form:
    """Rows sorted by expert and multiplied in groups."""
    activate, out_in = gated(shape), shape.layout is Layout.OUT_IN

    def form(x: Tensor, idx: Tensor, s: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        experts, top_k = w1.shape[0], idx.shape[1]
        ids, perm = torch.sort(idx.reshape(-1))
        counts = torch.histc(ids.int() if ids.is_cuda else ids.float(), bins=experts, min=0, max=experts - 1)
        offs = torch.cumsum(counts, 0, dtype=torch.int32)
        h = F.grouped_mm(x[perm // top_k], w1.transpose(1, 2) if out_in else w1, offs=offs)
        if b1 is not None:
            h = h + b1[ids]
        rows = F.grouped_mm(activate(h), w2.transpose(1, 2) if out_in else w2, offs=offs)
        if b2 is not None:
            rows = rows + b2[ids]
        rows = rows * s.reshape(-1)[perm].unsqueeze(-1)
        inverse = torch.empty_like(perm)
        inverse[perm] = torch.arange(perm.shape[0], device=perm.device)
        return rows[inverse].view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)

    return form


def batched(shape: Shape) -> Form:
    """One matrix a row, gathered from the parameters: for a few tokens."""
    activate, out_in = gated(shape), shape.layout is Layout.OUT_IN

    def mm(rows: Tensor, w: Tensor) -> Tensor:
        if out_in:
            return torch.bmm(w, rows.unsqueeze(-1)).squeeze(-1)
        return torch.bmm(rows.unsqueeze(1), w).squeeze(1)

    def form(x: Tensor, idx: Tensor, s: Tensor, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None) -> Tensor:
        top_k, ids = idx.shape[1], idx.reshape(-1)
        h = mm(x.repeat_interleave(top_k, dim=0), w1[ids])
        if b1 is not None:
            h = h + b1[ids]
        rows = mm(activate(h), w2[ids])
        if b2 is not None:
            rows = rows + b2[ids]
        rows = rows * s.reshape(-1).unsqueeze(-1)
        return rows.view(-1, top_k, x.shape[1]).sum(1).to(x.dtype)

    return form
