"""What a router computes from its logits, as a value: which experts a token goes to, and with which weights.

Axes: T tokens, K experts a token (top-k), E experts, G groups of E / G experts. In this order:

1. scores [T, E] = softmax or sigmoid of the logits, or the logits themselves;
2. choice [T, E] = scores, plus a bias [E] that counts for the choice only; only experts of the best groups may win;
3. idx [T, K] = the K largest of the choice, ties to the smaller expert, NaN the largest; weights = the scores there;
4. weights become their softmax over K or their sigmoid, are divided by their sum over K, and scaled.

All arithmetic is in float32 (float64 where the spec names it); a ``dtype`` beside a step is what its result is rounded
to. Gradients flow from the weights to the logits; none through the choice, the bias or the groups.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from enum import Enum

import torch

from .spec import DTYPES

_BY_NAME = {name: dtype for dtype, name in DTYPES.items()}


class Score(Enum):
    """A function of scores."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    IDENTITY = "identity"


class Best(Enum):
    """What a group of experts is ranked by."""

    MAX = "max"  # its largest choice
    TOP2 = "top2"  # the sum of its two largest


class Floor(Enum):
    """What keeps the sum that the weights are divided by away from zero."""

    NONE = "none"
    ADD = "add"  # sum + eps
    CLAMP = "clamp"  # max(sum, eps); no gradient through a sum below eps


class Scaling(Enum):
    """How weights meet their constant."""

    MUL = "mul"
    DIV = "div"


@dataclass(frozen=True, slots=True)
class Groups:
    """Only the ``kept`` best of ``count`` groups may be chosen from; the choice of all other experts is ``fill``."""

    count: int
    kept: int
    best: Best
    fill: float  #: 0.0 or -inf


@dataclass(frozen=True, slots=True)
class Norm:
    """Division by the sum over K. ``sum_dtype`` is that of the sum and of ``eps`` added to it, or its lower bound."""

    floor: Floor
    eps: float
    sum_dtype: torch.dtype
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Scale:
    """A constant factor, or divisor."""

    how: Scaling
    by: float
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """A router, and its text form ``str(spec)``, an argument of the operators."""

    experts: int
    top_k: int
    score: Score
    score_dtype: torch.dtype
    bias_dtype: torch.dtype | None  #: of score + bias; None without a bias
    groups: Groups | None
    gathered: Score  #: applied to the chosen scores; a softmax is over K
    gathered_dtype: torch.dtype
    norm: Norm | None
    scale: Scale | None
    out_dtype: torch.dtype  #: of the weights

    def __str__(self) -> str:
        g, n, s = self.groups, self.norm, self.scale
        return ";".join(
            (
                f"E{self.experts}",
                f"K{self.top_k}",
                f"{self.score.value}:{DTYPES[self.score_dtype]}",
                "unbiased" if self.bias_dtype is None else f"bias:{DTYPES[self.bias_dtype]}",
                "all" if g is None else f"{g.kept}of{g.count}:{g.best.value}:{g.fill!r}",
                f"{self.gathered.value}:{DTYPES[self.gathered_dtype]}",
                "raw" if n is None else f"norm:{n.floor.value}:{n.eps!r}:{DTYPES[n.sum_dtype]}:{DTYPES[n.dtype]}",
                "unscaled" if s is None else f"{s.how.value}:{s.by!r}:{DTYPES[s.dtype]}",
                DTYPES[self.out_dtype],
            )
        )

    @property
    def dtypes(self) -> frozenset[torch.dtype]:
        """Every dtype that something is rounded to."""
        found = {self.score_dtype, self.gathered_dtype, self.out_dtype}
        if self.bias_dtype is not None:
            found.add(self.bias_dtype)
        if self.norm is not None:
            found |= {self.norm.sum_dtype, self.norm.dtype}
        if self.scale is not None:
            found.add(self.scale.dtype)
        return frozenset(found)


@functools.lru_cache(maxsize=512)
def parse(text: str) -> RouterSpec:
    """The spec whose text is ``text``. Raises ValueError where it is not one."""
    try:
        experts, top_k, score, bias, groups, gathered, norm, scale, out = (p.split(":") for p in text.split(";"))
        spec = RouterSpec(
            experts=int(experts[0].removeprefix("E")),
            top_k=int(top_k[0].removeprefix("K")),
            score=Score(score[0]),
            score_dtype=_BY_NAME[score[1]],
            bias_dtype=_BY_NAME[bias[1]] if bias != ["unbiased"] else None,
            groups=None if groups == ["all"] else _groups(*groups),
            gathered=Score(gathered[0]),
            gathered_dtype=_BY_NAME[gathered[1]],
            norm=None
            if norm == ["raw"]
            else Norm(Floor(norm[1]), float(norm[2]), _BY_NAME[norm[3]], _BY_NAME[norm[4]]),
            scale=None if scale == ["unscaled"] else Scale(Scaling(scale[0]), float(scale[1]), _BY_NAME[scale[2]]),
            out_dtype=_BY_NAME[out[0]],
        )
    except (ValueError, KeyError, IndexError, TypeError) as e:
        raise ValueError(f"not a router spec: {text!r}") from e
    if str(spec) != text:
        raise ValueError(f"not a router spec: {text!r} reads as {spec}")
    return spec


def _groups(counts: str, best: str, fill: str) -> Groups:
    found = re.fullmatch(r"(\d+)of(\d+)", counts)
    if found is None:
        raise ValueError(counts)
    return Groups(int(found[2]), int(found[1]), Best(best), float(fill))
