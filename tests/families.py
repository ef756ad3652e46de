"""Tiny, randomly initialised MoE blocks of every family in transformers 5.24, for tests and match-rate tables.

``F``                           name -> how to build it (72 variants of about 67 families)
``build(name, impl, dtype)``    -> (module, hidden size); impl is "grouped_mm", "batched_mm" or "eager"
``inputs(name, H, dtype)``      -> the block's positional arguments, [2, T, H] hidden states first
``decorated(name)``             -> whether the family takes an experts implementation at all (the others are loops or
                                   dense forms)

doge and vitpose_backbone are not expert matmuls in this sense: nothing should be fused there. inkling2 keeps an fp32
router weight: casting the whole block to bf16 breaks the model itself.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")

import torch
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.sizes import Size

F: dict[str, dict[str, Any]] = {}


def fam(
    name: str,
    block: str,
    sub: str | None = None,
    mt: str | None = None,
    cfg: dict[str, Any] | None = None,
    args: tuple[str, ...] = (),
    inp: str = "h",
    moddir: str | None = None,
) -> None:
    """Register a variant.

    ``block`` is the class in ``modeling_<moddir>``, ``sub`` the path from the model's config to the block's, ``mt`` the
    model type, ``cfg`` overrides of the config (a function gives the value for a ``Size``), ``args`` further arguments
    of the constructor, ``inp`` the kind of inputs.
    """
    F[name] = {
        "block": block,
        "sub": sub,
        "mt": mt or name,
        "cfg": cfg or {},
        "args": args,
        "inp": inp,
        "moddir": moddir or name,
    }


fam("qwen3_moe", "Qwen3MoeSparseMoeBlock", cfg={"norm_topk_prob": True})
fam("qwen2_moe", "Qwen2MoeSparseMoeBlock")
fam("mixtral", "MixtralSparseMoeBlock", cfg={"router_jitter_noise": 0.0})
fam("mixtral_jitter", "MixtralSparseMoeBlock", mt="mixtral", moddir="mixtral", cfg={"router_jitter_noise": 0.1})
fam("olmoe", "OlmoeSparseMoeBlock")
fam("flex_olmo", "FlexOlmoSparseMoeBlock")
fam("deepseek_v2", "DeepseekV2Moe", cfg={"topk_method": "greedy"})
fam(
    "deepseek_v2_group",
    "DeepseekV2Moe",
    mt="deepseek_v2",
    moddir="deepseek_v2",
    cfg={"topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1},
)
fam("deepseek_v3", "DeepseekV3MoE", cfg={"n_group": 2, "topk_group": 1})
fam("deepseek_v32", "DeepseekV32MoE", cfg={"n_group": 2, "topk_group": 1})
fam("deepseek_v4", "DeepseekV4SparseMoeBlock", args=("layer0",), cfg={"mlp_layer_types": ["moe"] * 4})
fam("gpt_oss", "GptOssMLP")
fam("glm4_moe", "Glm4MoeMoE")
fam("glm4_moe_lite", "Glm4MoeLiteMoE")
fam("glm4v_moe", "Glm4vMoeTextMoE", sub="text_config")
fam("granitemoe", "GraniteMoeMoE")
fam("granitemoeshared", "GraniteMoeSharedMoE")
fam("granitemoehybrid", "GraniteMoeHybridMoE")
fam("phimoe", "PhimoeSparseMoeBlock", cfg={"input_jitter_noise": 0.0})
fam(
    "phimoe_jitter",
    "PhimoeSparseMoeBlock",
    mt="phimoe",
    moddir="phimoe",
    cfg={"input_jitter_noise": 0.01, "router_jitter_noise": 0.01},
)
fam("llama4", "Llama4TextMoe", sub="text_config")
fam("ernie4_5_moe", "Ernie4_5_MoeSparseMoeBlock")
fam(
    "ernie4_5_vl_moe",
    "Ernie4_5_VLMoeMoeBlock",
    sub="text_config",
    cfg={"moe_intermediate_size": lambda s: [s.inter] * 2},
)
fam("dbrx", "DbrxFFN", inp="h")
fam("jamba", "JambaSparseMoeBlock")
fam("lfm2_moe", "Lfm2MoeSparseMoeBlock")
fam("hunyuan_v1_moe", "HunYuanMoEV1Moe", args=("layer0",))
fam("hy_v3", "HYV3MoE")
fam("qwen3_next", "Qwen3NextSparseMoeBlock")
fam("qwen3_5_moe", "Qwen3_5MoeSparseMoeBlock", sub="text_config")
fam("qwen3_vl_moe", "Qwen3VLMoeTextSparseMoeBlock", sub="text_config")
fam("switch_transformers", "SwitchTransformersSparseMLP")
fam("nllb_moe", "NllbMoeSparseMLP", mt="nllb-moe", args=("ffn",))
fam("minimax", "MiniMaxSparseMoeBlock")
fam("minimax_m2", "MiniMaxM2SparseMoeBlock")
fam("minimax_m3_vl", "MiniMaxM3VLSparseMoeBlock", sub="text_config")
fam("aria", "AriaTextMoELayer", sub="text_config")
fam("afmoe", "AfmoeSparseMoeBlock")
fam("dots1", "Dots1MoE")
fam("longcat_flash", "LongcatFlashMoE")
fam("jetmoe", "JetMoeMoE")
fam("nemotron_h", "NemotronHMoE")
fam("solar_open", "SolarOpenMoE")
fam("mistral4", "Mistral4MoE")
fam("mimo_v2_flash", "MiMoV2FlashMoE")
fam("openai_privacy_filter", "OpenAIPrivacyFilterMLP")
fam("exaone_moe", "ExaoneMoeSparseMoEBlock")
fam("doge", "DogeCDMoE")
fam("step3p7", "Step3p7SparseMoeBlock", sub="text_config")
fam("cohere2_moe", "Cohere2MoeSparseMoeBlock")
fam("laguna", "LagunaSparseMoeBlock")
fam("zaya", "ZayaSparseMoeBlock", args=("layer0",))
fam("inkling", "InklingMoE", mt="inkling_mm_model", sub="text_config")
fam("inkling2", "Inkling2SparseMoeBlock", sub="text_config")
fam("kolibri1", "Kolibri1SparseMoeBlock")
fam("muse_spark", "MuseSparkMoE", sub="text_config")
fam("glm5_next", "Glm5NextTextMoE", sub="text_config")
fam("beam", "BeamMoE")
fam("axk1", "AXK1MoE")
fam("axk2", "AXK2MoE")
fam("hy_v4", "HYV4MoE")
fam("kimi_linear", "KimiLinearMoE")
fam("bailing_hybrid", "BailingHybridMoE")
fam("mellum", "MellumSparseMoeBlock")
fam("flint", "FlintSparseMoeBlock")
fam("lara_mini", "LaraMiniSparseMoeBlock")
fam("qwen4_exp", "Qwen4ExpTextSparseMoeBlock", sub="text_config")
fam("mistral_large4", "MistralLarge4TextMoE", sub="text_config")
fam("glm_moe_dsa", "GlmMoeDsaMoE")
fam(
    "vitpose_backbone",
    "VitPoseBackboneMoeMLP",
    inp="vitpose",
    cfg={"num_experts": lambda s: s.experts, "part_features": 8},
)
fam(
    "gemma4_experts",
    "Gemma4TextExperts",
    sub="text_config",
    mt="gemma4",
    moddir="gemma4",
    inp="gemma4",
    cfg={"enable_moe_block": True, "top_k_experts": lambda s: s.top_k},
)
fam(
    "qwen3_omni_talker",
    "Qwen3OmniMoeTalkerTextSparseMoeBlock",
    mt="qwen3_omni_moe_talker",
    moddir="qwen3_omni_moe",
    sub="text_config",
)


DEFAULT = Size()
#: The default size attributes.
TINY = DEFAULT.config()


def getsub(config: Any, path: str | None) -> Any:
    """The sub-config at a dotted path, the config itself for None."""
    for part in (path or "").split("."):
        if part:
            config = getattr(config, part)
    return config


def _put(config: Any, values: dict[str, Any], *, force: bool) -> None:
    for key, value in values.items():
        if force or hasattr(config, key):
            with contextlib.suppress(Exception):  # read-only properties and validated fields keep their own value
                setattr(config, key, value)


def _config(name: str, size: Size) -> Any:
    f = F[name]
    if f["mt"] == "qwen3_omni_moe_talker":
        from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeTalkerTextConfig

        cfg = Qwen3OmniMoeTalkerTextConfig()
        cfg.shared_expert_intermediate_size = size.inter
    else:
        cfg = getsub(CONFIG_MAPPING[f["mt"]](), f["sub"])
    _put(cfg, size.config(), force=False)
    _put(cfg, {key: value(size) if callable(value) else value for key, value in f["cfg"].items()}, force=True)
    if name == "dbrx":
        ffn = {
            "hidden_size": size.hidden,
            "ffn_hidden_size": size.inter,
            "moe_num_experts": size.experts,
            "moe_top_k": size.top_k,
        }
        _put(cfg.ffn_config, ffn, force=True)
    return cfg


def _module(name: str) -> Any:
    folder = F[name]["moddir"]
    return importlib.import_module(f"transformers.models.{folder}.modeling_{folder}")


def build(
    name: str, impl: str, dtype: torch.dtype, *, size: Size = DEFAULT, seed: int = 0, bias_scale: float = 0.0
) -> tuple[torch.nn.Module, int]:
    """The block with seeded weights in ``dtype`` and its hidden size; ``bias_scale`` is the biases' deviation."""
    f = F[name]
    cls = getattr(_module(name), f["block"])
    cfg = _config(name, size)
    with contextlib.suppress(Exception):
        cfg._experts_implementation = impl
    args = [0 if a == "layer0" else size.inter for a in f["args"]]
    ctor = {"layer_idx": 0} if "layer_idx" in inspect.signature(cls.__init__).parameters and not args else {}
    torch.manual_seed(seed)
    module = cls(cfg, *args, **ctor)
    with torch.no_grad():
        for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if tensor.is_floating_point():
                tensor.normal_(0, bias_scale if key.endswith("bias") else size.scale)
    return module.to(dtype), getattr(cfg, "hidden_size", size.hidden)


def inputs(
    name: str, H: int, dtype: torch.dtype, T: int | None = None, *, rg: bool = True, size: Size = DEFAULT
) -> tuple[torch.Tensor, ...]:
    """Positional arguments of the block: [batch, T, H] hidden states, and what else it takes."""
    batch, tokens = size.batch, size.tokens if T is None else T
    x = torch.randn(batch, tokens, H, dtype=dtype)
    kind = F[name]["inp"]
    if kind == "vitpose":
        return (x.requires_grad_(rg), torch.randint(0, size.experts, (batch,)))
    if kind == "gemma4":
        rows = batch * tokens
        idx = torch.stack([torch.randperm(size.experts)[: size.top_k] for _ in range(rows)])
        return (x.reshape(-1, H).requires_grad_(rg), idx, torch.rand(rows, size.top_k, dtype=dtype).requires_grad_(rg))
    return (x.requires_grad_(rg),)


def available(name: str) -> bool:
    """Whether this release of transformers has the family."""
    try:
        return hasattr(_module(name), F[name]["block"])
    except ImportError:
        return False


def decorated(name: str) -> bool:
    """Whether the family's experts take an implementation by name."""
    return "@use_experts_implementation" in Path(_module(name).__file__).read_text()
