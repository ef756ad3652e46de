"""``megamoe::route_topk`` and its readable oracle: gradients, fake forms, texts of specs, wrong operands."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_inductor import (
    router,  # noqa: F401  registers the operator
    router_spec,
)
from moe_inductor.digest import digest
from moe_inductor.router_spec import Best, Floor, Groups, Norm, RouterSpec, Scale, Scaling, Score

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
NORM = Norm(Floor.ADD, 1e-3, F64, F64)
PLAIN = RouterSpec(6, 3, Score.SOFTMAX, F64, None, None, Score.IDENTITY, F64, None, None, F64)
SPECS = {
    "softmax": PLAIN,
    "normed": replace(PLAIN, norm=NORM),
    "topk_softmax": replace(PLAIN, score=Score.IDENTITY, gathered=Score.SOFTMAX, scale=Scale(Scaling.DIV, 3.0, F64)),
    "topk_sigmoid": replace(PLAIN, score=Score.IDENTITY, gathered=Score.SIGMOID, norm=NORM),
    "deepseek": replace(
        PLAIN, score=Score.SIGMOID, bias_dtype=F64, groups=Groups(3, 2, Best.TOP2, -math.inf), norm=NORM,
        scale=Scale(Scaling.MUL, 2.5, F64),
    ),
    "clamped": replace(PLAIN, norm=Norm(Floor.CLAMP, 0.75, F64, F64)),
    "unbounded": replace(PLAIN, score=Score.SIGMOID, norm=Norm(Floor.NONE, 0.0, F64, F64)),
}  # fmt: skip


def operands(spec: RouterSpec, tokens: int = 5, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor | None]:
    gen = torch.Generator().manual_seed(1)
    bias = None if spec.bias_dtype is None else torch.randn(spec.experts, generator=gen, dtype=F64) * 0.1
    return torch.randn(tokens, spec.experts, generator=gen, dtype=F64).to(dtype), bias


def route(logits: Tensor, bias: Tensor | None, spec: RouterSpec) -> tuple[Tensor, Tensor]:
    weights, idx = torch.ops.megamoe.route_topk(logits, bias, str(spec), "reference/f64", digest())
    return weights, idx


@pytest.mark.parametrize("name", SPECS)
def test_gradient_is_that_of_finite_differences(name: str) -> None:
    logits, bias = operands(SPECS[name])
    logits.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: route(x, bias, SPECS[name])[0], logits)


@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ["normed", "deepseek"])
def test_opcheck(name: str, tokens: int, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    if dtype is not F64:
        norm = replace(NORM, sum_dtype=F32, dtype=dtype)
        spec = replace(spec, score_dtype=F32, gathered_dtype=F32, norm=norm, scale=None, out_dtype=dtype)
        spec = replace(spec, bias_dtype=None if spec.bias_dtype is None else F32)
    logits, bias = operands(spec, tokens, dtype)
    key = (str(spec), "reference/f64", digest())
    torch.library.opcheck(torch.ops.megamoe.route_topk.default, (logits.requires_grad_(), bias, *key))
    weights, idx = route(logits.detach(), bias, spec)
    torch.library.opcheck(torch.ops.megamoe.route_topk_backward.default, (weights, logits.detach(), idx, *key))


def test_no_gradient_for_the_bias() -> None:
    spec = SPECS["deepseek"]
    logits, bias = operands(spec)
    assert bias is not None
    bias.requires_grad_()
    weights, idx = route(logits.requires_grad_(), bias, spec)
    weights.sum().backward()
    assert bias.grad is None and logits.grad is not None and not idx.requires_grad


@pytest.mark.parametrize("name", SPECS)
def test_text_of_a_spec_reads_back(name: str) -> None:
    assert router_spec.parse(str(SPECS[name])) == SPECS[name]


@pytest.mark.parametrize(
    "text", ["", "E8;K2", str(PLAIN)[:-3], str(PLAIN).replace("softmax", "softmin"), "x" + str(PLAIN)]
)
def test_other_text_is_no_spec(text: str) -> None:
    with pytest.raises(ValueError, match="not a router spec"):
        router_spec.parse(text)


def test_operands_that_are_not_the_specs() -> None:
    logits, bias = operands(SPECS["deepseek"])
    with pytest.raises(ValueError, match=r"takes logits \[T, 6\]"):
        route(logits[:, :5], bias, SPECS["deepseek"])
    with pytest.raises(ValueError, match="got no bias"):
        route(logits, None, SPECS["deepseek"])
    with pytest.raises(ValueError, match="no router kernels 'cpu'"):
        torch.ops.megamoe.route_topk(logits, None, str(PLAIN), "cpu/f64", digest())
