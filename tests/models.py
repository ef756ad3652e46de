"""Small whole models of the five families, and how their training step is compared with eager's."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

HIDDEN, INTER, EXPERTS, TOP_K, VOCAB = 32, 16, 4, 2, 64

_ATTENTION: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": INTER,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": VOCAB,
    "use_cache": False,
}
#: family -> (config class, what it needs beside ``_ATTENTION``)
FAMILIES: dict[str, tuple[type[Any], dict[str, Any]]] = {
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        {"moe_intermediate_size": INTER, "num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "head_dim": 16},
    ),
    "mixtral": (transformers.MixtralConfig, {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K}),
    "gpt_oss": (
        transformers.GptOssConfig,
        {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "head_dim": 16, "sliding_window": 8},
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        {
            "moe_intermediate_size": INTER,
            "n_routed_experts": EXPERTS,
            "num_experts_per_tok": TOP_K,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 16,
            "num_key_value_heads": 2,
        },
    ),
    "olmoe": (transformers.OlmoeConfig, {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}),
}


def causal_lm(family: str, *, layers: int = 2, **changes: Any) -> nn.Module:
    """The family's CausalLM with random weights, in training mode."""
    config_class, settings = FAMILIES[family]
    config = config_class(**_ATTENTION | settings | {"num_hidden_layers": layers} | changes)
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config).train()


def moe_layers(model: nn.Module) -> int:
    """How many layers route tokens to experts."""
    return sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)


def batch(tokens: int = 12, *, sequences: int = 2, seed: int = 1) -> dict[str, Tensor]:
    """Random token ids with themselves as labels."""
    ids = torch.randint(VOCAB, (sequences, tokens), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def step(call: Callable[..., Any], model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor | None]:
    """The loss, the auxiliary loss where there is one, and every gradient of one training step."""
    model.zero_grad(set_to_none=True)
    out = call(**inputs)
    out.loss.backward()
    found: dict[str, Tensor | None] = {"loss": out.loss.detach()}
    if (aux := getattr(out, "aux_loss", None)) is not None:
        found["aux loss"] = aux.detach()
    return found | {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def bound(dtype: torch.dtype = torch.float32, *, layers: int = 2, width: int = HIDDEN) -> float:
    """Between two right results of a model's step, relative to a gradient's norm: 2 eps sqrt(width) for each of about
    five roundings a layer, and the same once more on the way back."""
    return 2 * torch.finfo(dtype).eps * math.sqrt(width) * 10 * layers


def assert_equal(
    mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None], allowed: float | None = None
) -> None:
    """The same tensors are there and each differs by at most ``allowed`` of its norm.

    A norm below a hundredth of the typical one counts as that: a gradient that is all rounding has no relative error.
    """
    allowed = bound() if allowed is None else allowed
    assert mine.keys() == theirs.keys()
    norms = [float(t.double().norm()) / math.sqrt(max(t.numel(), 1)) for t in theirs.values() if t is not None]
    typical = 0.01 * sum(norms) / len(norms)
    for name, b in theirs.items():
        a = mine[name]
        assert (a is None) == (b is None), f"{name}: {'no' if a is None else 'a'} gradient, unlike eager"
        if a is not None and b is not None:
            assert a.dtype == b.dtype and a.shape == b.shape, name
            floor = typical * math.sqrt(b.numel())
            error = float((a.double() - b.double()).norm()) / max(float(b.double().norm()), floor, 1e-30)
            assert error <= allowed, f"{name} differs by {error:.2e} of its norm, allowed is {allowed:.2e}"


def matched() -> int:
    """Regions rewritten since the counters were cleared."""
    return counters["megamoe"]["matched"]


def eager_twin(model: nn.Module) -> nn.Module:
    """A copy to run without any compiler."""
    return copy.deepcopy(model)


class Residual(nn.Module):
    """Qwen3 blocks with residual connections and nothing else: [B, S, H] to [B, S, H]."""

    def __init__(
        self,
        layers: int = 1,
        *,
        hidden: int = HIDDEN,
        inter: int = INTER,
        experts: int = EXPERTS,
        top_k: int = TOP_K,
        form: str = "grouped_mm",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        config = transformers.Qwen3MoeConfig(
            hidden_size=hidden,
            moe_intermediate_size=inter,
            num_experts=experts,
            num_experts_per_tok=top_k,
            norm_topk_prob=True,
        )
        config._experts_implementation = form
        self.blocks = nn.ModuleList(Qwen3MoeSparseMoeBlock(config) for _ in range(layers))
        gen = torch.Generator().manual_seed(0)
        for p in self.parameters():
            nn.init.normal_(p, std=p.shape[-1] ** -0.5, generator=gen)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def rows(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> Tensor:
    """Random activations that require a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def pull(call: Callable[..., Tensor], model: nn.Module, *inputs: Tensor) -> dict[str, Tensor | None]:
    """Output and every gradient of ``call(*inputs)`` for a fixed cotangent."""
    model.zero_grad(set_to_none=True)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    y = call(*leaves)
    if y.requires_grad:
        y.backward(torch.cos(torch.arange(y.numel(), dtype=torch.float32)).view(y.shape).to(y.dtype))
    grads = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach().clone()} | grads | {f"input {i}": x.grad for i, x in enumerate(leaves)}


@functools.cache
def aot_eager() -> Callable[..., Any]:
    """A backend: our pass, then AOTAutograd with eager kernels."""
    from torch._dynamo.backends.debugging import aot_eager as compiler

    from moe_inductor.backend import with_inner

    return with_inner(compiler)
