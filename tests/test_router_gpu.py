"""The fused router on a GPU: bf16 roundings, determinism, sizes of real models, and whole blocks against eager."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

from moe_inductor import router as operators  # noqa: F401  registers the operator
from moe_inductor.digest import digest
from moe_inductor.kernels import router, router_reference
from moe_inductor.report import last, reset
from moe_inductor.router_spec import Score
from tests import models
from tests.router_cases import BF16, DEEPSEEK, F32, NORM, SPECS, TOP2, spec
from tests.router_forms import FORMS, Routed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

#: Of the six shapes, in the dtypes of transformers' bf16 models.
REAL = {
    "qwen3": spec(128, 8, norm=replace(NORM, dtype=BF16), out_dtype=BF16),
    "olmoe": spec(64, 8, gathered_dtype=BF16, out_dtype=BF16),
    "mixtral": spec(8, 2, norm=NORM),
    "gpt_oss": spec(
        32, 4, Score.IDENTITY, score_dtype=BF16, gathered=Score.SOFTMAX, gathered_dtype=BF16, out_dtype=BF16
    ),
    "deepseek_v3": spec(
        256, 8, Score.SIGMOID, bias_dtype=F32, groups=replace(TOP2, count=8, kept=4), norm=DEEPSEEK[0],
        scale=DEEPSEEK[1],
    ),
    "largest": spec(1024, 32, norm=NORM),
}  # fmt: skip


def drawn(s, tokens: int = 16384) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Random bf16 logits, with ties, and a bias."""
    gen = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(tokens, s.experts, generator=gen, device="cuda").to(BF16)
    bias = None if s.bias_dtype is None else torch.randn(s.experts, generator=gen, device="cuda") * 0.1
    return logits, bias


@pytest.mark.parametrize("name", REAL)
def test_real_sizes(name: str) -> None:
    """The experts chosen are as good as the oracle's: exponentials differ in the last place, which moves near ties."""
    s = REAL[name]
    logits, bias = drawn(s)
    weights, idx = router.forward(logits, bias, s)
    expected, order = router_reference.forward(logits, bias, s)
    choice = router_reference.choice(logits, bias, s)
    mine, theirs = choice.gather(1, idx), choice.gather(1, order)
    same = (idx == order).all(1)
    assert same.float().mean() > 0.999
    if s.groups is None:  # a group on edge changes many
        torch.testing.assert_close(mine, theirs, rtol=64 * torch.finfo(F32).eps, atol=1e-7)
    assert (idx.sort(1).values.diff(dim=1) > 0).all() and (idx >= 0).all() and (idx < s.experts).all()
    eps = torch.finfo(s.out_dtype).eps
    torch.testing.assert_close(weights[same], expected[same], rtol=2 * eps + 1e-5, atol=1e-7)
    dweights = torch.randn(weights.shape, device="cuda").to(s.out_dtype)
    grad = router.backward(dweights, logits, order, s).float()
    truth = router_reference.backward(dweights.double(), logits.double(), order, s).float()
    rows = (grad - truth).norm(dim=1) / (truth.norm(dim=1).square().mean().sqrt() + truth.norm(dim=1))
    assert float(rows.max()) <= 2 * torch.finfo(BF16).eps * (1 if s.norm is None else 2)


@pytest.mark.parametrize("name", REAL)
def test_forty_runs_give_the_same_bits(name: str) -> None:
    s = REAL[name]
    logits, bias = drawn(s, 4096)
    first = router.forward(logits, bias, s)
    grad = router.backward(first[0], logits, first[1], s)
    for _ in range(39):
        again = router.forward(logits, bias, s)
        assert all(map(torch.equal, again, first))
        assert torch.equal(router.backward(first[0], logits, first[1], s), grad)


@pytest.mark.parametrize("name", ["normed", "groups"])
def test_scratch_that_holds_nan_never_shows(name: str) -> None:
    s = SPECS[name]
    logits, bias = drawn(s, 333)
    clean = router.forward(logits, bias, s)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(mode=True)
    try:
        poisoned = router.forward(logits, bias, s)
        grad = router.backward(clean[0], logits, clean[1], s)
    finally:
        torch.use_deterministic_algorithms(mode=False)
    assert all(map(torch.equal, clean, poisoned)) and grad.isfinite().all()


@pytest.mark.parametrize("tokens", [0, 1, 7])
@pytest.mark.parametrize("name", ["normed", "groups", "topk_softmax"])
def test_opcheck(name: str, tokens: int) -> None:
    s = SPECS[name]
    logits, bias = drawn(s, tokens)
    key = (str(s), "triton/bf16", digest())
    torch.library.opcheck(torch.ops.megamoe.route_topk.default, (logits.requires_grad_(), bias, *key))


def step(call, module, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor | None]:
    """Output and every gradient of ``call(x)`` for the cotangent ``dy``."""
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    y = call(leaf)
    y.backward(dy)
    return {"y": y.detach(), "x": leaf.grad} | {name: p.grad for name, p in module.named_parameters()}


@pytest.mark.parametrize("kernel", ["triton", "hopper"])
@pytest.mark.parametrize("name", FORMS)
def test_blocks_against_eager(name: str, kernel: str) -> None:
    if kernel == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper family needs compute capability 9.0")
    module = Routed(FORMS[name]).cuda()
    twin = models.eager_twin(module)
    x, dy = torch.randn(2, 64, 16, device="cuda")
    reset()
    options = {"moe.kernel": kernel, "moe.verify": "all", "moe.strict": True}
    compiled = torch.compile(module, backend=models.aot_eager(), options=options, fullgraph=True)
    mine, theirs = step(compiled, module, x, dy), step(twin, twin, x, dy)
    entry = last()
    assert entry is not None and entry.routers == 1, entry
    # matmuls in TF32 only where torch allows it, so float32 throughout; exponentials of up to 16 lose 16 eps
    models.assert_equal(mine, theirs, models.bound(F32, layers=1) + 32 * torch.finfo(F32).eps * math.sqrt(4))


def test_a_captured_router_replays_with_other_logits() -> None:
    s = REAL["qwen3"]
    logits, _ = drawn(s, 256)
    router.forward(logits, None, s)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, idx = router.forward(logits, None, s)
    logits.copy_(logits.flip(1))
    graph.replay()
    assert all(map(torch.equal, (weights, idx), router.forward(logits, None, s)))
