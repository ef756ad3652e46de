"""Layer shapes by name or from a model's config. Axes: T tokens, K experts a token, E experts, H hidden, I inner."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..spec import Halves, Layout
from .errors import BenchError


@dataclass(frozen=True, slots=True)
class Shape:
    """Widths, counts and expert form of one layer. ``alpha`` and ``limit`` belong to ``clamped_swiglu``:
    (clamp(u, -limit, limit) + 1) * g' * sigmoid(alpha g') with g' = min(g, limit)."""

    name: str
    hidden: int
    inter: int
    experts: int
    top_k: int
    activation: str = "swiglu"  #: or geglu, geglu_tanh, reglu, clamped_swiglu
    halves: Halves = Halves.GATE_UP  #: or INTERLEAVED
    layout: Layout = Layout.OUT_IN  #: of both weights
    bias: bool = False
    alpha: float = 1.702
    limit: float = 7.0

    @property
    def plain(self) -> bool:
        """Whether this is the form that every peer takes: swiglu over [gate; up], [E, out, in], no biases."""
        return (self.activation, self.halves, self.layout, self.bias) == (
            "swiglu", Halves.GATE_UP, Layout.OUT_IN, False,
        )  # fmt: skip

    @property
    def expert_bytes(self) -> int:
        """bf16 bytes of one expert's parameters."""
        return 2 * (3 * self.hidden * self.inter + (2 * self.inter + self.hidden) * self.bias)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self) | {"halves": self.halves.value, "layout": self.layout.value}


def _gpt_oss(hidden: int, inter: int, experts: int, top_k: int, *, alpha: float = 1.702, limit: float = 7.0) -> Shape:
    return Shape(
        "gpt-oss", hidden, inter, experts, top_k, "clamped_swiglu", Halves.INTERLEAVED, Layout.IN_OUT,
        bias=True, alpha=alpha, limit=limit,
    )  # fmt: skip


#: The shapes of published models; ``tiny`` tries the harness.
SHAPES: dict[str, Shape] = {
    s.name: s
    for s in (
        Shape("qwen3-30b", 2048, 768, 128, 8),
        Shape("qwen3-235b", 4096, 1536, 128, 8),
        Shape("olmoe", 2048, 1024, 64, 8),
        Shape("mixtral-8x7b", 4096, 14336, 8, 2),
        Shape("deepseek-v3", 7168, 2048, 256, 8),
        replace(_gpt_oss(2880, 2880, 32, 4), name="gpt-oss-20b"),
        Shape("gpt-oss-20b-plain", 2880, 2880, 32, 4),
        Shape("tiny", 64, 32, 8, 2),
        replace(_gpt_oss(64, 32, 8, 2), name="tiny-gpt-oss"),
    )
}


def named(name: str) -> Shape:
    """The shape called ``name``. Raises BenchError with the nearest name where there is none."""
    if name in SHAPES:
        return SHAPES[name]
    close = difflib.get_close_matches(name, SHAPES, n=1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(SHAPES)}"
    raise BenchError(f"no shape is called {name!r}; {hint}")


_GATED = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu", "gelu_pytorch_tanh": "geglu_tanh", "relu": "reglu"}


def from_config(config: Mapping[str, Any], name: str = "") -> Shape:
    """The experts of a transformers config (its dictionary). Raises BenchError where it names no gated experts."""
    config = config.get("text_config") or config
    model = str(config.get("model_type", "config"))

    def first(*keys: str) -> int:
        for key in keys:
            value = config.get(key)
            if isinstance(value, int) and value > 0:
                return value
        raise BenchError(f"the config of {model} has none of {', '.join(keys)}: it names no experts")

    hidden = first("hidden_size")
    inter = first("moe_intermediate_size", "intermediate_size")
    experts = first("num_experts", "num_local_experts", "n_routed_experts")
    top_k = first("num_experts_per_tok", "moe_topk", "moe_k")
    if top_k > experts:
        raise BenchError(f"the config of {model} chooses {top_k} of {experts} experts")
    name = name or model
    if model == "gpt_oss":
        alpha, limit = config.get("swiglu_alpha", 1.702), config.get("swiglu_limit", 7.0)
        return replace(_gpt_oss(hidden, inter, experts, top_k, alpha=alpha, limit=limit), name=name)
    act = str(config.get("hidden_act", "silu"))
    if act not in _GATED:
        raise BenchError(f"hidden_act {act!r} of {model} has no gated form here; known: {', '.join(_GATED)}")
    return Shape(name, hidden, inter, experts, top_k, _GATED[act])


def from_path(path: Path) -> Shape:
    """:func:`from_config` of a config.json, or of the folder that holds one."""
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read a config from {file}: {error}") from error
    if not isinstance(config, dict):
        raise BenchError(f"{file} holds no object")
    return from_config(config, file.resolve().parent.name if path.is_dir() else file.stem)
