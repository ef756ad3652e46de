"""A Mixture-of-Experts block that is assembled from steps, and the choices that a sample makes.

Axes: T tokens, K experts a token, E experts, H hidden width, I inner width, N1 output columns of the up projection (2I
where gated), S = T*K rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import transformers.integrations.moe  # noqa: F401  (registers transformers::grouped_mm_fallback)
from torch import Tensor, nn

GROUPED = ("grouped", "grouped_argsort", "grouped_sentinel")
BATCHED = ("batched_wx", "batched_xw")
#: transformers 5.0 has no fallback op: there only bf16 can be grouped under a compiler.
HAS_FALLBACK = hasattr(torch.ops.transformers, "grouped_mm_fallback")


@dataclass(frozen=True, slots=True)
class Config:
    """One positive sample: a choice at every seam, and sizes."""

    seed: int
    form: str
    router: str
    T: int
    H: int
    I: int  # noqa: E741  (the field's name for the inner width)
    E: int
    K: int
    halves: str  #: gate_up, up_gate, interleaved or single
    out_in: bool  #: weights are [E, out, in]
    bias: bool
    activation: str
    combine: str  #: model, wide or rows_cast
    dtype: torch.dtype
    shared: str  #: none, plain, gated or inplace
    aux: bool  #: the router's logits are read again, and returned as a loss
    dynamic: bool
    train: bool
    rank3: bool  #: hidden states are [1, T, H]

    @property
    def gated(self) -> bool:
        """Whether the up projection has two halves."""
        return self.halves != "single"

    @property
    def grouped(self) -> bool:
        """Whether rows are sorted by expert and multiplied in groups."""
        return self.form in GROUPED


class Flow:
    """Values of one forward pass by name: x, w, idx, ids, perm, order (sorted ids), xs, offs, h, g, u, a, y, z..."""


class Block(nn.Module):
    """A block that runs ``steps`` in order; see ``moe_forms.steps_of`` for those of a positive sample."""

    def __init__(self, config: Config, steps: tuple[Callable[[Block, Flow], None], ...]) -> None:
        super().__init__()
        c, gen = config, torch.Generator().manual_seed(config.seed)
        n1 = 2 * c.I if c.gated else c.I

        def param(*shape: int, std: float = 0.4) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=gen) * std).to(c.dtype))

        self.c, self.steps = config, steps
        self.k, self.e = c.K, c.E
        self.wide = torch.float32
        self.router = param(c.E, c.H)
        self.w1 = param(*((c.E, n1, c.H) if c.out_in else (c.E, c.H, n1)))
        self.w2 = param(*((c.E, c.H, c.I) if c.out_in else (c.E, c.I, c.H)))
        self.b1 = param(c.E, n1) if c.bias else None
        self.b2 = param(c.E, c.H) if c.bias else None
        self.shared_w = param(c.H, c.H)
        self.shared_gate = param(1, c.H)
        self.register_buffer("correction", torch.randn(c.E, generator=gen) * 0.1)
        self.register_buffer("table", torch.randint(0, c.E, (11, c.K), generator=gen))
        self.register_buffer("stash", torch.zeros(n1, dtype=c.dtype))
        self.forced: Tensor | None = None
        self.recording = False
        self.seen: Tensor | None = None

    def pick(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """Top-k of ``scores``; with ``forced`` indices theirs, so that a float64 truth routes as the model did."""
        if self.forced is not None:
            return scores.gather(-1, self.forced), self.forced
        w, idx = scores.topk(self.k, dim=-1)
        if self.recording:
            self.seen = idx
        return w, idx

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        c = Flow()
        c.x = x.view(-1, x.shape[-1]) if self.c.rank3 else x
        c.extra = []
        for step in self.steps:
            step(self, c)
        return (c.out.view(x.shape) if self.c.rank3 else c.out, *c.extra)


Step = Callable[[Block, Flow], None]
