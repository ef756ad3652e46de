"""Whole blocks on a CUDA device under the backend. Run with ``-m gpu``."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from moe_inductor.report import report, reset
from tests import models

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
#: Widths that every core takes.
WIDTHS = {"hidden": 128, "inter": 64, "experts": 8, "top_k": 2}
DTYPES = [torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def _clean() -> None:
    counters.clear()
    reset()
    torch._dynamo.reset()


def block(dtype: torch.dtype, layers: int = 2) -> models.Residual:
    return models.Residual(layers, **WIDTHS, dtype=dtype).cuda()


def step(call: nn.Module, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """y and all gradients, for a fixed cotangent, in memory of their own."""
    model.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_()
    y = call(x)
    y.float().square().mean().backward()
    out = {"y": y.detach().clone(), "dx": x.grad.clone()}
    return out | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    """By relative norm. Two layers of three matmuls each round by half of eps four times, in both arms."""
    allowed = 16 * torch.finfo(dtype).eps + 1e-4
    assert got.keys() == want.keys()
    for name, true in want.items():
        error = float((got[name].double() - true.double()).norm() / true.double().norm())
        assert error <= allowed, f"{name}: {error:.1e}, allowed {allowed:.1e}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_training(dtype: torch.dtype) -> None:
    model = block(dtype)
    x = models.rows(2, 65, WIDTHS["hidden"], dtype=dtype).cuda()
    twin = copy.deepcopy(model)
    want = step(twin, twin, x)
    compiled = torch.compile(model, backend="megamoe", options={"moe.require": "all"}, fullgraph=True)
    close(step(compiled, model, x), want, dtype)
    assert models.matched() == 2 and report().refused == (), str(report())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_inference(dtype: torch.dtype) -> None:
    model = block(dtype).eval()
    x = models.rows(1, 33, WIDTHS["hidden"], dtype=dtype).cuda().detach()
    with torch.no_grad():
        want = model(x)
        got = torch.compile(model, backend="megamoe", options={"moe.require": "all"}, fullgraph=True)(x)
    close({"y": got}, {"y": want}, dtype)
    assert models.matched() == 2


@pytest.mark.parametrize("train", [True, False], ids=["training", "inference"])
def test_cuda_graphs_replay_with_changed_routing(train: bool) -> None:
    """mode reduce-overhead: a capture would fail on a host synchronisation, and a replay must follow the new ids."""
    dtype = torch.bfloat16
    model = block(dtype).train(train)
    twin = copy.deepcopy(model)
    compiled = torch.compile(
        model, backend="megamoe", options={"moe.mode": "reduce-overhead", "moe.require": "all"}, fullgraph=True
    )
    for seed in range(6):  # two warm-up runs, a capture, replays
        x = models.rows(2, 40, WIDTHS["hidden"], dtype=dtype, seed=seed).cuda()
        torch.compiler.cudagraph_mark_step_begin()
        if train:
            close(step(compiled, model, x), step(twin, twin, x), dtype)
        else:
            with torch.no_grad():
                close({"y": compiled(x.detach()).clone()}, {"y": twin(x.detach())}, dtype)
    assert counters["inductor"]["cudagraph_skips"] == 0
