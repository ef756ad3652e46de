"""Step time of the fused operators against the unfused grouped form, both under Inductor, on CPU.

    python tests/bench_cpu.py [--dtype fp32|bf16] [--mode train|infer] [--steps N] [--json]

Four ``Qwen3MoeSparseMoeBlock`` layers with residual connections, H=512, I=256, E=32, k=4, T=512. Steps of the two
stacks alternate, so that both see the same machine; medians and their ratio are printed. The second ratio is that of
the 10th percentiles, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from moe_inductor import ops  # noqa: F401  registers torch.ops.megamoe
from moe_inductor.digest import digest
from moe_inductor.spec import Combine, ExpertsSpec, Halves, Layout

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Stack(nn.Module):
    """Residual MoE blocks, nothing else."""

    def __init__(self, config: Qwen3MoeConfig, layers: int) -> None:
        super().__init__()
        self.config = config
        self.blocks = nn.ModuleList(Qwen3MoeSparseMoeBlock(config) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """Hidden states [1, T, H] to hidden states."""
        for block in self.blocks:
            x = x + block(x)
        return x


def fuse(stack: Stack, *, training: bool) -> Stack:
    """A copy of ``stack`` whose experts call the fused operators."""
    fused = copy.deepcopy(stack)
    dtype = next(fused.parameters()).dtype
    spec = str(ExpertsSpec(
        experts=fused.config.num_experts,
        top_k=fused.config.num_experts_per_tok,
        activation="swiglu",
        halves=Halves.GATE_UP,
        w1=Layout.OUT_IN,
        w2=Layout.OUT_IN,
        combine=Combine.WEIGHTED_SUM,
        weight_dtype=dtype,
        combine_dtype=dtype,
        out_dtype=dtype,
    ))  # fmt: skip
    key = spec, "cpu/auto", digest()
    mm = torch.ops.megamoe

    def train(self: nn.Module, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        order, inverse, offsets, _ = mm.route_metadata(idx, *key)
        a, h = mm.experts_up(x, order, inverse, offsets, self.gate_up_proj, None, [], *key)
        return mm.experts_down(a, h, order, inverse, offsets, weights, self.down_proj, None, [], *key)

    def infer(self: nn.Module, x: Tensor, idx: Tensor, weights: Tensor) -> Tensor:
        return mm.experts(x, idx, weights, self.gate_up_proj, None, self.down_proj, None, [], *key)

    for block in fused.blocks:
        block.experts.forward = types.MethodType(train if training else infer, block.experts)
    return fused


def measure(dtype: torch.dtype, *, training: bool, steps: int) -> dict[str, float]:
    """Median step times in ms, the ratios fused/stock of medians and of 10th percentiles, the largest relative
    difference of the outputs."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=512, moe_intermediate_size=256, num_experts=32, num_experts_per_tok=4, norm_topk_prob=True
    )
    config._experts_implementation = "grouped_mm"
    stock = Stack(config, 4)
    for p in stock.parameters():
        nn.init.normal_(p, std=0.02)
    stock = stock.to(dtype)
    models = {"stock": stock, "fused": fuse(stock, training=training)}
    x = torch.randn(1, 512, 512, dtype=dtype, requires_grad=training)
    grad = torch.randn_like(x)

    def stepper(model: nn.Module) -> Callable[[], Tensor]:
        compiled = torch.compile(model, backend="inductor", fullgraph=True)

        def train() -> Tensor:
            y = compiled(x)
            y.backward(grad)
            for p in model.parameters():
                p.grad = None
            x.grad = None
            return y.detach()

        def infer() -> Tensor:
            with torch.no_grad():
                return compiled(x)

        return train if training else infer

    step = {name: stepper(model) for name, model in models.items()}
    outputs = {name: run() for name, run in step.items()}
    error = (outputs["stock"].double() - outputs["fused"].double()).abs().max() / outputs["stock"].double().abs().max()
    times: dict[str, list[float]] = {name: [] for name in step}
    for i in range(steps + 3):
        for name in sorted(step, reverse=bool(i % 2)):
            start = time.perf_counter()
            step[name]()
            if i >= 3:
                times[name].append((time.perf_counter() - start) * 1e3)
    median = {name: statistics.median(t) for name, t in times.items()}
    low = {name: statistics.quantiles(t, n=10)[0] for name, t in times.items()}
    return {
        **median,
        "ratio": median["fused"] / median["stock"],
        "ratio_p10": low["fused"] / low["stock"],
        "error": float(error),
    }


def main() -> None:
    """Measure the asked cells and print one line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=[*DTYPES], action="append")
    parser.add_argument("--mode", choices=["train", "infer"], action="append")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    for name in args.dtype or DTYPES:
        for mode in args.mode or ["train", "infer"]:
            cell = measure(DTYPES[name], training=mode == "train", steps=args.steps)
            if args.json:
                print(json.dumps({"dtype": name, "mode": mode, **cell}), flush=True)
            else:
                line = f"stock {cell['stock']:7.2f} ms  fused {cell['fused']:7.2f} ms  ratio {cell['ratio']:.3f}"
                print(f"{name} {mode:5} {line}  (p10 {cell['ratio_p10']:.3f})  error {cell['error']:.1e}", flush=True)


if __name__ == "__main__":
    main()
