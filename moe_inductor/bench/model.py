"""A training step of a slice of Qwen3-30B-A3B at full width, eager, under Inductor and under megamoe, beside the same
layer alone: how much of what a layer saves arrives in the step."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..report import collecting
from .errors import BenchError
from .layer import BOTH, FORWARD, line, medians
from .peers import Choice, backend
from .timing import Clock, release

ARMS = ("eager", "inductor", "megamoe")
STEPS, FIRST = 20, 6  # the mean of steps 6 to 20, counted from 1
#: So small that the weights, and with them the routing, stay what they were: every arm sees the same work.
LEARNING_RATE = 1e-9


@dataclass(frozen=True, slots=True)
class Slice:
    """Layers kept and the batch. ``widths`` replaces values of the config, for a trial."""

    layers: int = 12
    batch: int = 1
    sequence: int = 16384
    widths: Mapping[str, int] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.sequence


def config(part: Slice) -> Any:
    """Qwen3-30B-A3B, cut to the slice. Raises BenchError without transformers."""
    try:
        from transformers import Qwen3MoeConfig
    except ImportError as error:
        raise BenchError(f"bench model builds a transformers model: pip install transformers ({error})") from error
    values: dict[str, Any] = {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": part.layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
        "use_cache": False,
        "dtype": torch.bfloat16,
    }
    return Qwen3MoeConfig(**(values | dict(part.widths)))


def build(part: Slice, device: str) -> Any:
    """The model in training mode on ``device``, bf16, full activation checkpointing, random weights."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config(part), dtype=torch.bfloat16)
    model.set_experts_implementation("grouped_mm")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def measure(
    part: Slice,
    names: tuple[str, ...],
    choice: Choice,
    layer: Mapping[str, Any],
    clock: Clock,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The cell of one batch. ``layer`` is the layer's cell of the same run at as many tokens."""
    cell: dict[str, Any] = {
        "layers": part.layers,
        "batch": part.batch,
        "sequence": part.sequence,
        "optimizer": "AdamW(fused=True)",
        "steps": [FIRST, STEPS],
        "layer": {"times": {form: medians(layer, form) for form in (FORWARD, BOTH)}, "cell": dict(layer)},
        "arms": {},
    }
    model = build(part, clock.device)
    cell["parameters"] = sum(p.numel() for p in model.parameters())
    cell["attention"] = model.config._attn_implementation
    tokens = torch.randint(model.config.vocab_size, (part.batch, part.sequence), device=clock.device)
    for name in names:
        say(f"{part.layers} layers, {part.batch} x {part.sequence}: {name}")
        torch.compiler.reset()
        release()
        try:
            cell["arms"][name] = _arm(name, model, tokens, part, choice, clock)
        except Exception as error:
            cell["arms"][name] = {"error": line(error)}
        model.zero_grad(set_to_none=True)
    del model, tokens
    release()
    return cell | summarise(cell)


def _arm(name: str, model: Any, tokens: torch.Tensor, part: Slice, choice: Choice, clock: Clock) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    call = _compiled(name, model, choice)

    def step() -> torch.Tensor:
        loss: torch.Tensor = call(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    found: dict[str, Any] = {}
    start = time.perf_counter()
    with collecting() as graphs:
        first = float(step())
    found["first_step_seconds"] = time.perf_counter() - start
    if name == "megamoe":
        outcomes = [g.as_dict() for g in graphs]
        plans = {plan for g in outcomes for plan in g["plans"]}
        found["fused"] = {"layers": sum(g["matched"] for g in outcomes), "plans": sorted(plans)}
        refused = [o for g in outcomes for o in g["outcomes"] if not o["fused"]]
        if found["fused"]["layers"] < part.layers or refused:
            raise BenchError(f"{found['fused']['layers']} of {part.layers} layers fused; {refused}")
    found["static_bytes"] = clock.allocated()
    samples = clock.laps(step, STEPS - 1)  # steps 2 to STEPS
    kept = samples[FIRST - 2 :]
    peak = clock.peak(step)
    found |= {
        "step": {"mean": statistics.mean(kept), "median": statistics.median(kept), "samples": samples},
        "peak_bytes": None if peak is None else found["static_bytes"] + peak,
        "loss": [first, float(step())],
    }
    return found if clock.device == "cpu" else found | _shares(step)


def _compiled(name: str, model: Any, choice: Choice) -> Callable[..., Any]:
    if name == "eager":
        return model  # type: ignore[no-any-return]
    if name == "inductor":
        compiled: Callable[..., Any] = torch.compile(model, dynamic=False)
        return compiled
    options: dict[str, Any] = {"moe.kernel": choice.kernels[0]}
    fused: Callable[..., Any] = torch.compile(model, backend=backend(choice), options=options, dynamic=False)
    return fused


def _shares(step: Callable[[], object]) -> dict[str, Any]:
    """Device ms of one step by kernel (the longest 30), in total, and in attention: which backend ran."""
    from .phases import profile

    try:
        found = profile(step, repeats=1)
    except Exception as error:
        return {"profile": {"error": line(error)}}
    kernels = found["kernels"]
    attention = [k for k in kernels if _attends(k["name"])]
    operators: dict[str, float] = defaultdict(float)
    for op, by in found["operators"].items():
        operators[op] += sum(by.values())
    return {
        "profile": {
            "total_ms": sum(k["ms"] for k in kernels),
            "kernels": kernels[:30],
            "attention": {"ms": sum(k["ms"] for k in attention), "kernels": [k["name"] for k in attention]},
            "operators": dict(operators),
        }
    }


def _attends(name: str) -> bool:
    """Whether a kernel is attention's own; Inductor also names its pointwise kernels after what they fuse."""
    name = name.lower()
    return not name.startswith("triton_") and any(word in name for word in ("flash", "fmha", "attention", "sdpa"))


def layer_step(layer: Mapping[str, Mapping[str, float]], prefix: str) -> float | None:
    """ms of twice the forward and the backward of one layer, as checkpointing runs it, by the fastest of the arms whose
    names start with ``prefix``."""
    times = [
        layer[FORWARD][name] + layer[BOTH][name]
        for name in layer[FORWARD]
        if name.startswith(prefix) and name in layer[BOTH]
    ]
    return min(times, default=None)


def summarise(cell: Mapping[str, Any]) -> dict[str, Any]:
    """``moe_share`` of the step by arm, from the layer's times, and the ``saving`` of megamoe against each other arm:
    of the step, of all layers alone, and their ratio."""
    steps = {name: arm["step"]["mean"] for name, arm in cell["arms"].items() if "step" in arm}
    alone = {name: layer_step(cell["layer"]["times"], name) for name in steps}
    shares = {name: cell["layers"] * ms / steps[name] for name, ms in alone.items() if ms is not None}
    saving = {}
    ours = alone.get("megamoe")
    for name, ms in alone.items():
        if name != "megamoe" and ms is not None and ours is not None:
            step, layers = steps[name] - steps["megamoe"], cell["layers"] * (ms - ours)
            saving[name] = {"step_ms": step, "layers_ms": layers, "ratio": step / layers if layers > 0 else None}
    return {"moe_share": shares, "saving": saving}
