"""Step time of ``backend="megamoe"`` against ``backend="inductor"`` on the same unmodified blocks, on CPU.

    python tests/bench_step.py [--dtype fp32|bf16] [--mode train|infer] [--form grouped_mm|batched_mm] [--steps N]

Four ``Qwen3MoeSparseMoeBlock`` layers with residual connections, H=512, I=256, E=32, k=4, T=512. Steps of the two
alternate and take turns in going first, so that both see the same machine. One JSON object a line: medians and 10th
percentiles in ms with their ratios megamoe/inductor (the 10th percentile is what a busy machine disturbs least), the
median token's difference of outputs over its norm (in bf16 a few tokens of deep stacks choose other experts, as they
do between eager and Inductor), and compile seconds. ``bench_cpu.py`` measures the
operators alone, without the pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from tests import models

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HIDDEN, INTER, EXPERTS, TOP_K, TOKENS, LAYERS = 512, 256, 32, 4, 512, 4
BACKENDS = ("inductor", "megamoe")


def stepper(model: torch.nn.Module, backend: str, x: torch.Tensor, *, training: bool) -> Callable[[], torch.Tensor]:
    """One step of the compiled model: forward and backward, or forward alone."""
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    cotangent = torch.randn(x.shape, generator=torch.Generator().manual_seed(2)).to(x.dtype)

    def train() -> torch.Tensor:
        y: torch.Tensor = compiled(x)
        y.backward(cotangent)
        for tensor in (x, *model.parameters()):
            tensor.grad = None
        return y.detach()

    def infer() -> torch.Tensor:
        with torch.no_grad():
            y: torch.Tensor = compiled(x)
        return y

    return train if training else infer


def measure(dtype: torch.dtype, *, training: bool, form: str, steps: int) -> dict[str, Any]:
    """The figures of one cell."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = models.Residual(LAYERS, hidden=HIDDEN, inter=INTER, experts=EXPERTS, top_k=TOP_K, form=form, dtype=dtype)
    x = models.rows(1, TOKENS, HIDDEN, dtype=dtype)
    outputs, compile_seconds, step = {}, {}, {}
    for backend in BACKENDS:
        step[backend] = stepper(
            models.eager_twin(model), backend, x.detach().requires_grad_(training), training=training
        )
        start = time.perf_counter()
        outputs[backend] = step[backend]().double()
        compile_seconds[backend] = time.perf_counter() - start
    assert models.matched() == LAYERS, f"{models.matched()} of {LAYERS} layers fused"
    times: dict[str, list[float]] = {backend: [] for backend in BACKENDS}
    warm_up = 3
    for i in range(steps + warm_up):
        for backend in BACKENDS if i % 2 else BACKENDS[::-1]:
            start = time.perf_counter()
            step[backend]()
            if i >= warm_up:
                times[backend].append((time.perf_counter() - start) * 1e3)
    median = {b: statistics.median(t) for b, t in times.items()}
    low = {b: statistics.quantiles(t, n=10)[0] for b, t in times.items()}
    reference, ours = (outputs[b].flatten(0, 1) for b in BACKENDS)
    return {
        "median_ms": median,
        "p10_ms": low,
        "ratio": median["megamoe"] / median["inductor"],
        "ratio_p10": low["megamoe"] / low["inductor"],
        "difference": float(((reference - ours).norm(dim=1) / reference.norm(dim=1)).median()),
        "compile_seconds": compile_seconds,
    }


def rounded(value: Any) -> Any:
    """Figures to four digits."""
    if isinstance(value, dict):
        return {name: rounded(v) for name, v in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) else value


def main() -> None:
    """Measure the asked cells, all of them where none is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--mode", choices=("train", "infer"), action="append")
    parser.add_argument("--form", choices=("grouped_mm", "batched_mm"), default="grouped_mm")
    parser.add_argument("--steps", type=int, default=20)
    asked = parser.parse_args()
    for dtype in asked.dtype or DTYPES:
        for mode in asked.mode or ("train", "infer"):
            cell = measure(DTYPES[dtype], training=mode == "train", form=asked.form, steps=asked.steps)
            print(json.dumps({"dtype": dtype, "mode": mode, "form": asked.form} | rounded(cell)), flush=True)


if __name__ == "__main__":
    main()
