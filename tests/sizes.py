"""Widths and counts of the tiny blocks of ``families``: the default and the awkward ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Size:
    """One block and its input [batch, tokens, hidden]; ``scale`` is the standard deviation of every weight."""

    hidden: int = 32
    inter: int = 24
    experts: int = 8
    top_k: int = 2
    batch: int = 2
    tokens: int = 16
    scale: float = 0.05

    def config(self) -> dict[str, Any]:
        """A value for every size attribute that any of transformers' configs has."""
        return {
            "hidden_size": self.hidden,
            "intermediate_size": self.inter,
            "moe_intermediate_size": self.inter,
            "num_experts": self.experts,
            "num_local_experts": self.experts,
            "n_routed_experts": self.experts,
            "moe_num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_topk": self.top_k,
            "moe_k": self.top_k,
            "moe_top_k": self.top_k,
            "n_group": 1,
            "topk_group": 1,
            "n_shared_experts": 1,
            "num_shared_experts": 1,
            "moe_num_shared_experts": 1,
            "shared_expert_intermediate_size": self.inter,
            "shared_intermediate_size": self.inter,
            "moe_shared_expert_intermediate_size": self.inter,
            "expert_ffn_hidden_size": self.inter,
            "intermediate_size_mlp": self.inter,
            "zero_expert_num": 2,
            "d_model": self.hidden,
            "d_ff": self.inter,
            "ffn_dim": self.inter,
            "expert_capacity": 16,
            "router_hidden_size": 16,
            "moe_hidden_size": 16,
            "vocab_size": 64,
            "num_hidden_layers": 1,
        }


#: torch's grouped matmul wants rows of a multiple of 16 bytes, so eager's ``grouped_mm`` refuses the odd widths;
#: ``uneven`` has widths that it takes, and counts that are no power of two either.
SIZES: dict[str, Size] = {
    "tiny": Size(),
    "odd": Size(hidden=33, inter=19, experts=6, top_k=3, batch=1, tokens=7),
    "uneven": Size(hidden=40, inter=56, experts=10, top_k=3, batch=1, tokens=13),
    "top1": Size(experts=6, top_k=1),
    "all": Size(experts=4, top_k=4, batch=1, tokens=9),
    "one_token": Size(batch=1, tokens=1),
    "loud": Size(hidden=64, inter=48, scale=0.5),  # wide pre-activations: clamps and saturation take part
    "wide": Size(hidden=128, inter=96, experts=32, top_k=4, tokens=33),
}
