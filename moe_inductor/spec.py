"""What a Mixture-of-Experts region computes, as a value: no graph, no kernel, no device in it.

Axes: T tokens, K experts a token (top-k), E experts, H hidden width, I expert inner width, N = T*K routed rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from enum import Enum

import sympy
import torch

from . import activation

DTYPES: dict[torch.dtype, str] = {
    torch.bfloat16: "bf16",
    torch.float16: "f16",
    torch.float32: "f32",
    torch.float64: "f64",
}
_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Halves(Enum):
    """How gate and up share the output columns of the up projection."""

    GATE_UP = "gate_up"  # [gate; up], I columns each
    UP_GATE = "up_gate"
    INTERLEAVED = "interleaved"  # gate 0, up 0, gate 1, up 1, ...
    SINGLE = "single"  # non-gated: no up half


class Layout(Enum):
    """Which axis of an expert weight is the output."""

    OUT_IN = "out_in"  # [E, out, in], as nn.Linear
    IN_OUT = "in_out"  # [E, in, out], "transposed" in transformers


class Combine(Enum):
    """What becomes of the rows after the down projection."""

    WEIGHTED_SUM = "weighted_sum"  # y[t] = sum over k of weight[t, k] * row[t, k], out [T, H]
    ROWS = "rows"  # unweighted rows in slot order, out [T*K, H]: a row-wise op stands before the weight


class Grad(Enum):
    """Inputs whose gradient is wanted."""

    X = "x"
    WEIGHTS = "weights"
    W1 = "w1"
    B1 = "b1"
    W2 = "w2"
    B2 = "b2"


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The part of a region that an operator must know, and its text form ``str(spec)``, an argument of the operators.

    ``activation`` is a name or an expression of :mod:`moe_inductor.activation`. Routing slots whose index is outside
    ``[0, E)`` are dropped: they add nothing to the output and have zero gradients.
    """

    experts: int
    top_k: int  #: 0 where it is symbolic: the operators read it off the shapes
    activation: str
    halves: Halves
    w1: Layout
    w2: Layout
    combine: Combine
    weight_dtype: torch.dtype  #: of the routing weight as it is applied
    combine_dtype: torch.dtype  #: of a weighted row; rows are summed in float32 (float64) all the same
    out_dtype: torch.dtype

    def __str__(self) -> str:
        return ";".join(
            (
                f"E{self.experts}",
                f"K{self.top_k}",
                self.activation,
                self.halves.value,
                self.w1.value,
                self.w2.value,
                self.combine.value,
                DTYPES[self.weight_dtype],
                DTYPES[self.combine_dtype],
                DTYPES[self.out_dtype],
            )
        )

    @property
    def gated(self) -> bool:
        """Whether the up projection has two halves."""
        return self.halves is not Halves.SINGLE


@functools.lru_cache(maxsize=512)
def parse(text: str) -> ExpertsSpec:
    """The spec whose text is ``text``. Raises ValueError where it is not one."""
    parts = text.split(";")
    if len(parts) != len(fields(ExpertsSpec)) or not (parts[0].startswith("E") and parts[1].startswith("K")):
        raise ValueError(f"not an experts spec: {text!r}")
    activation.parse(parts[2])
    try:
        weight, combine, out = (_BY_NAME[p] for p in parts[7:])
    except KeyError as e:
        raise ValueError(f"experts spec {text!r}: unknown dtype {e}") from None
    return ExpertsSpec(
        experts=int(parts[0][1:]),
        top_k=int(parts[1][1:]),
        activation=parts[2],
        halves=Halves(parts[3]),
        w1=Layout(parts[4]),
        w2=Layout(parts[5]),
        combine=Combine(parts[6]),
        weight_dtype=weight,
        combine_dtype=combine,
        out_dtype=out,
    )


@dataclass(frozen=True, slots=True)
class MoESpec:
    """Everything that was proved about one region: the key of the policy, of verification, and of what tests compare.

    ``tokens`` is a sympy expression or a number; :attr:`rows` follows from it.
    """

    ops: ExpertsSpec
    tokens: sympy.Expr
    top_k: sympy.Expr
    hidden: int  #: H, input width of the up projection
    inter: int  #: I, width of one half
    out_hidden: int  #: output width of the down projection
    dtype: torch.dtype  #: of the expert matmuls
    bias1: bool
    bias2: bool
    training: bool  #: the region's output takes part in autograd
    grads: frozenset[Grad]
    device: str  #: torch.device.type

    @property
    def rows(self) -> sympy.Expr:
        """Routed rows N = T*K."""
        return self.top_k * self.tokens

    def __str__(self) -> str:
        o = self.ops
        biases = "".join(b for b, on in ((" b1", self.bias1), (" b2", self.bias2)) if on)
        grads = ",".join(g.value for g in Grad if g in self.grads) or "none"
        return (
            f"T={self.tokens} K={self.top_k} E={o.experts} H={self.hidden} I={self.inter} {DTYPES[self.dtype]}"
            f" {o.activation} {o.halves.value} w1={o.w1.value} w2={o.w2.value}{biases} weight={DTYPES[o.weight_dtype]}"
            f" combine={o.combine.value}:{DTYPES[o.combine_dtype]} out={DTYPES[o.out_dtype]}"
            f" {'training' if self.training else 'inference'} grads={grads} {self.device}"
        )
