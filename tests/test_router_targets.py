"""The router kernels compiled for GPUs that are not there, as a user's launch would: none may spill."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("Triton interprets kernels in this process and compiles none", allow_module_level=True)

from moe_inductor.kernels import router
from moe_inductor.router_spec import RouterSpec
from tests.router_cases import DEEPSEEK, NORM, SPECS, TOP2, Score, spec
from tests.test_compile_targets import TARGETS, compile_for, meta, sound

__all__ = ["compile_for"]  # a fixture

BF16 = torch.bfloat16
#: Of the six shapes, and the largest that the kernels take.
WIDE = {
    "qwen3": spec(128, 8, norm=replace(NORM, dtype=BF16), out_dtype=BF16),
    "gpt_oss": spec(
        32, 4, Score.IDENTITY, score_dtype=BF16, gathered=Score.SOFTMAX, gathered_dtype=BF16, out_dtype=BF16
    ),
    "deepseek_v3": spec(
        256, 8, Score.SIGMOID, bias_dtype=torch.float32, groups=replace(TOP2, count=8, kept=4),
        norm=DEEPSEEK[0], scale=DEEPSEEK[1],
    ),
    "many_experts": spec(512, 10, norm=NORM),
    "largest": spec(1024, 1024, norm=NORM),
    "largest_groups": spec(1024, 8, Score.SIGMOID, groups=replace(TOP2, count=32, kept=4)),
}  # fmt: skip


def launch(s: RouterSpec, dtype: torch.dtype) -> None:
    logits = meta(4096, s.experts, dtype=dtype)
    bias = None if s.bias_dtype is None else meta(s.experts, dtype=s.bias_dtype)
    weights, idx = router.forward(logits, bias, s)
    router.backward(weights, logits, idx, s)


@pytest.mark.parametrize("name", WIDE)
@pytest.mark.parametrize("device", TARGETS)
def test_common_shapes(compile_for: Callable, device: str, name: str) -> None:
    compiled = compile_for(device, lambda: launch(WIDE[name], BF16))
    sound(device, compiled)
    assert [c.name for c in compiled] == ["_forward_kernel", "_backward_kernel"]
    assert all(c.spills == 0 for c in compiled)


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("device", TARGETS)
def test_every_form(compile_for: Callable, device: str, name: str) -> None:
    compiled = compile_for(device, lambda: launch(SPECS[name], torch.float32))
    sound(device, compiled)
    assert len(compiled) == 2 and all(c.spills == 0 for c in compiled)
