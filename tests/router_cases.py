"""The router kernels against their oracle, in the interpreter or on a GPU; see ``test_router.py``."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_inductor.kernels import router, router_reference
from moe_inductor.router_spec import Best, Floor, Groups, Norm, RouterSpec, Scale, Scaling, Score

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def spec(experts: int, top_k: int, score: Score = Score.SOFTMAX, **changes: object) -> RouterSpec:
    """A router in float32 without bias, groups, function of the chosen scores, norm and scale."""
    plain = RouterSpec(experts, top_k, score, F32, None, None, Score.IDENTITY, F32, None, None, F32)
    return replace(plain, **changes)


NORM = Norm(Floor.NONE, 0.0, F32, F32)
DEEPSEEK = Norm(Floor.ADD, 1e-20, F32, F32), Scale(Scaling.MUL, 2.5, F32)
TOP2 = Groups(4, 2, Best.TOP2, -math.inf)
SPECS = {
    "softmax": spec(16, 2),
    "normed": spec(128, 8, norm=NORM),
    "odd": spec(60, 5, norm=NORM),
    "all_experts": spec(11, 11, norm=NORM),
    "one_expert": spec(1, 1),
    "one_of_many": spec(40, 1),
    "topk_softmax": spec(32, 4, Score.IDENTITY, gathered=Score.SOFTMAX),
    "topk_softmax_scaled": spec(32, 3, Score.IDENTITY, gathered=Score.SOFTMAX, scale=Scale(Scaling.DIV, 3.0, F32)),
    "topk_sigmoid": spec(32, 4, Score.IDENTITY, bias_dtype=F32, gathered=Score.SIGMOID, norm=NORM),
    "sigmoid_biased": spec(24, 4, Score.SIGMOID, bias_dtype=F32, norm=DEEPSEEK[0], scale=DEEPSEEK[1]),
    "groups": spec(32, 6, Score.SIGMOID, bias_dtype=F32, groups=TOP2, norm=DEEPSEEK[0], scale=DEEPSEEK[1]),
    "odd_groups": spec(21, 5, Score.SIGMOID, bias_dtype=F32, groups=Groups(3, 2, Best.TOP2, 0.0), norm=NORM),
    "many_groups": spec(24, 3, groups=Groups(12, 3, Best.MAX, 0.0)),
    "pairs": spec(20, 2, groups=Groups(10, 1, Best.TOP2, -math.inf)),
    "clamped": spec(12, 3, norm=Norm(Floor.CLAMP, 0.4, F32, F32)),
    "many_chosen": spec(100, 70, norm=NORM),
}


def logits_of(s: RouterSpec, tokens: int = 19, dtype: torch.dtype = F32) -> tuple[Tensor, Tensor | None]:
    """(logits, bias), the logits of a row all different."""
    gen = torch.Generator().manual_seed(s.experts)
    rank = torch.rand(tokens, s.experts, generator=gen).argsort(1)
    logits = (1.5 - min(0.25, 8 / s.experts) * rank).to(DEVICE, dtype)
    bias = None if s.bias_dtype is None else torch.randn(s.experts, generator=gen).to(DEVICE) * 0.1
    return logits, bias


def close(mine: Tensor, theirs: Tensor, s: RouterSpec) -> None:
    """Rows differ by at most what exponentials of up to 16 and sums of E terms may lose in float32: an exponential's
    argument is rounded to 2^-24 of 16, its value and each of six steps to two units, a sum to sqrt(E)."""
    eps = torch.finfo(F32).eps
    allowed = eps * (16 + 2 * 7 + math.sqrt(s.experts))
    scale = torch.maximum(theirs.norm(dim=1), theirs.norm(dim=1).square().mean().sqrt())
    error = (mine.float() - theirs.float()).norm(dim=1) / (scale + 1e-30)
    assert float(error.max()) <= allowed


@pytest.mark.parametrize("name", SPECS)
def test_choice_and_weights(name: str) -> None:
    s = SPECS[name]
    logits, bias = logits_of(s)
    weights, idx = router.forward(logits, bias, s)
    expected, order = router_reference.forward(logits, bias, s)
    assert idx.dtype is torch.int64 and torch.equal(idx, order)
    close(weights, expected, s)


@pytest.mark.parametrize("name", SPECS)
def test_gradient(name: str) -> None:
    s = SPECS[name]
    logits, bias = logits_of(s)
    _, idx = router_reference.forward(logits, bias, s)
    dweights = torch.randn(idx.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    mine = router.backward(dweights, logits, idx, s)
    theirs = router_reference.backward(dweights, logits, idx, s)
    # measured against the terms, which cancel where the weights are normed
    floor = theirs.norm(dim=1).square().mean().sqrt() + dweights.norm(dim=1).mean() * 0.25
    error = (mine - theirs).norm(dim=1).max() / floor
    assert float(error) <= torch.finfo(F32).eps * (16 + 2 * 12 + 2 * math.sqrt(s.experts))


#: The interpreter truncates to bfloat16 where a GPU rounds to nearest.
NARROW = [F16, BF16] if DEVICE == "cuda" else [F16]


@pytest.mark.parametrize("dtype", NARROW)
def test_narrow_logits_and_roundings(dtype: torch.dtype) -> None:
    """Each step is rounded as the spec says, so weights of a narrow dtype differ by a step where float32 is on edge."""
    s = spec(
        24, 4, Score.SIGMOID, score_dtype=dtype, bias_dtype=dtype, gathered_dtype=dtype,
        norm=Norm(Floor.ADD, 1e-6, dtype, dtype), scale=Scale(Scaling.MUL, 1.5, dtype), out_dtype=dtype,
    )  # fmt: skip
    logits, bias = logits_of(s, dtype=dtype)
    weights, idx = router.forward(logits, bias, s)
    expected, order = router_reference.forward(logits, bias, s)
    assert weights.dtype is dtype and torch.equal(idx, order)
    steps = (weights.float() - expected.float()).abs() / (expected.float().abs() * torch.finfo(dtype).eps)
    assert float(steps.max()) <= 2 and float((steps > 0).float().mean()) <= 0.05
    assert len(weights.unique()) > 20  # and not all one


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_narrow_logits_in_float32_steps(dtype: torch.dtype) -> None:
    s = SPECS["groups"]
    logits, bias = logits_of(s, dtype=dtype)
    weights, idx = router.forward(logits, bias, s)
    expected, order = router_reference.forward(logits, bias, s)
    assert torch.equal(idx, order)
    close(weights, expected, s)


@pytest.mark.parametrize("tokens", [0, 1, 3, 130])
def test_any_number_of_tokens(tokens: int) -> None:
    s = SPECS["groups"]
    logits, bias = logits_of(s, tokens)
    weights, idx = router.forward(logits, bias, s)
    assert weights.shape == idx.shape == (tokens, s.top_k)
    assert torch.equal(idx, router_reference.forward(logits, bias, s)[1])
    assert router.backward(weights, logits, idx, s).shape == logits.shape


def test_ties_go_to_the_smaller_expert() -> None:
    s = spec(9, 4, Score.SIGMOID)
    logits = torch.tensor([[0.0, -0.0, 1.0, 0.0, 1.0, -1.0, 0.0, 1.0, -0.0], [2.0] * 9], device=DEVICE)
    assert router.forward(logits, None, s)[1].tolist() == [[2, 4, 7, 0], [0, 1, 2, 3]]
    raw = replace(s, score=Score.IDENTITY, gathered=Score.SIGMOID)
    assert router.forward(logits[:1, [0, 1, 3, 5, 6, 8]], None, replace(raw, experts=6))[1].tolist() == [[0, 1, 2, 4]]


def test_ties_of_groups_go_to_the_smaller_group() -> None:
    s = spec(8, 2, Score.SIGMOID, groups=Groups(4, 1, Best.TOP2, -math.inf))
    logits = torch.tensor([[0.0, 1.0, 2.0, 0.5, 0.5, 2.0, 0.0, 0.0]], device=DEVICE)
    assert router.forward(logits, None, s)[1].tolist() == [[2, 3]]


@pytest.mark.parametrize("name", ["normed", "topk_softmax", "groups", "sigmoid_biased"])
def test_nan_stays_in_its_token_and_counts_as_the_largest(name: str) -> None:
    s = SPECS[name]
    logits, bias = logits_of(s)
    clean, order = router.forward(logits, bias, s)
    spoiled = logits.clone()
    spoiled[3, 7] = math.nan
    weights, idx = router.forward(spoiled, bias, s)
    others = torch.arange(logits.shape[0], device=DEVICE) != 3
    assert torch.equal(weights[others], clean[others]) and torch.equal(idx[others], order[others])
    assert torch.equal(idx, router_reference.forward(spoiled, bias, s)[1])
    assert weights[3].isnan().any() and (7 in idx[3].tolist() or s.score is Score.SOFTMAX)
    grad = router.backward(torch.ones_like(weights), spoiled, idx, s)
    assert grad[3].isnan().any() and grad[others].isfinite().all()


def test_infinite_logits() -> None:
    """Experts that may not be chosen have -inf; they are chosen last, and have no weight."""
    s = spec(6, 4, norm=NORM)
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 3.0, -math.inf, 2.0]], device=DEVICE)
    weights, idx = router.forward(logits, None, s)
    assert idx.tolist() == [[3, 5, 1, 0]] and float(weights[0, 3]) == 0 and weights.isfinite().all()
    grad = router.backward(torch.ones_like(weights), logits, idx, s)
    assert grad.isfinite().all() and float(grad[0, 0]) == 0


def test_rows_with_any_stride() -> None:
    s = SPECS["normed"]
    logits, _ = logits_of(s)
    wide = torch.full((19, 200), math.nan, device=DEVICE)
    wide[:, 30:158] = logits
    for view in (wide[:, 30:158], logits.t().contiguous().t()):
        weights, idx = router.forward(view, None, s)
        assert torch.equal(idx, router.forward(logits, None, s)[1])
        grad = router.backward(weights.t().contiguous().t(), view, idx, s)
        assert grad.is_contiguous() and torch.equal(grad, router.backward(weights, logits, idx, s))


def test_what_the_kernels_do_not_take() -> None:
    with pytest.raises(ValueError, match="2048 columns"):
        router.forward(torch.zeros(1, 1025, device=DEVICE), None, spec(1025, 1))
    with pytest.raises(ValueError, match="float64"):
        router.forward(torch.zeros(1, 4, dtype=torch.float64, device=DEVICE), None, spec(4, 1))
    assert router.refuse(spec(1024, 1024), BF16) is None
