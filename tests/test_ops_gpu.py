"""The operators, and the pass in front of Inductor, on a CUDA device."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from moe_inductor import ops
from moe_inductor.backend import megamoe
from moe_inductor.report import report, reset
from moe_inductor.spec import Combine, ExpertsSpec, Halves, Layout
from tests.experts_case import CONSTS, Operands, assert_close, bound, cut, make, run, spec_of, truth, whole
from tests.near_misses import Grouped, H

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device answers"),
]

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
FORMS = [cut, whole]


def to(o: Operands, device: str) -> Operands:
    move = {n: t.to(device) for n, t in {**o.floats(), "idx": o.idx}.items()}
    return Operands(**{n: move.get(n) for n in (*Operands.NAMES, "idx")})


def check(spec: ExpertsSpec, dtype: torch.dtype, form: Callable[..., Tensor], **sizes: object) -> None:
    o = make(spec, dtype, **sizes)  # type: ignore[arg-type]
    want = run(truth, o.copied(torch.float64), spec)
    got = run(form, to(o, "cuda").copied(), spec, "library/auto")
    widest = max(o.x.shape[1], o.w2.shape[1], o.w2.shape[2]) + o.x.shape[0] * spec.top_k
    assert_close(got, want, bound(dtype, widest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_layout(form: Callable[..., Tensor], dtype: torch.dtype) -> None:
    for n, (w1, w2, halves) in enumerate(itertools.product(Layout, Layout, Halves)):
        act = "relu2" if halves is Halves.SINGLE else "swiglu"
        spec = spec_of(dtype, w1=w1, w2=w2, halves=halves, activation=act, combine=list(Combine)[n // 2 % 2])
        check(spec, dtype, form, hidden=64, inter=32, tokens=40, biases=n % 3 == 0, dropped=n % 4 == 1)


@pytest.mark.parametrize("tokens", [0, 1, 7, 257])
@pytest.mark.parametrize("hidden, inter", [(64, 32), (13, 7), (72, 40)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_size(dtype: torch.dtype, hidden: int, inter: int, tokens: int) -> None:
    for top_k, form in itertools.product((1, 2, 4), FORMS):
        check(spec_of(dtype, top_k=top_k), dtype, form, hidden=hidden, inter=inter, tokens=tokens, dropped=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_captured_graph_follows_the_routing(dtype: torch.dtype) -> None:
    """Capture fails on any host synchronisation; a replay with other routing shows that nothing was read on the host."""
    spec = spec_of(dtype)
    o = to(make(spec, dtype, hidden=64, inter=32, tokens=48), "cuda")
    dy = torch.randn(48, 64, device="cuda", dtype=dtype)
    key = (str(spec), "library/auto", "")

    def step() -> tuple[Tensor, ...]:
        order, inverse, offsets, _ = ops.route_metadata(o.idx, *key)
        a, h = ops.experts_up(o.x, order, inverse, offsets, o.w1, None, CONSTS, *key)
        y = ops.experts_down(a, h, order, inverse, offsets, o.weights, o.w2, None, CONSTS, *key)
        dh, dweights, dw2, _ = ops.experts_down_backward(
            dy, h, order, inverse, offsets, o.weights, o.w2, None, CONSTS, *key, "x,weights,w2"
        )
        dx, dw1, _ = ops.experts_up_backward(dh, o.x, order, inverse, offsets, o.w1, *key, "x,w1")
        return y, dx, dw1, dweights, dw2

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = step()
    for _ in range(3):
        o.idx.copy_(torch.rand(48, spec.experts, device="cuda").topk(spec.top_k).indices)
        o.x.normal_()
        graph.replay()
        torch.cuda.synchronize()
        for got, want in zip(outs, step(), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_poisoned_memory_reaches_no_result(dtype: torch.dtype) -> None:
    spec = spec_of(dtype)
    o = make(spec, dtype, hidden=64, inter=32, tokens=40, dropped=True)
    want = run(truth, o.copied(torch.float64), spec)
    for _ in range(3):
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        del poison  # its blocks are what the next allocations get
        got = run(cut, to(o, "cuda").copied(), spec, "library/auto")
        assert_close(got, want, bound(dtype, 64 + 40 * spec.top_k))


def test_repeats_are_bitwise_equal() -> None:
    spec = spec_of(torch.bfloat16)
    o = to(make(spec, torch.bfloat16, hidden=64, inter=32, tokens=200), "cuda")
    first = run(cut, o.copied(), spec, "library/auto")
    for _ in range(39):
        again = run(cut, o.copied(), spec, "library/auto")
        assert all(torch.equal(first[k], again[k]) for k in first)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_backend_trains_a_block(dtype: torch.dtype) -> None:
    reset()
    torch._dynamo.reset()
    module = Grouped(dtype).cuda()
    x = torch.randn(24, H, device="cuda", dtype=dtype, requires_grad=True)
    grads = []
    for fn in (module, torch.compile(module, backend=megamoe)):
        module.zero_grad()
        x.grad = None
        y = fn(x)
        y.float().square().sum().backward()
        grads.append([y.detach(), x.grad, *(p.grad for p in module.parameters())])
    assert len(report().fused) == 1, str(report())
    for eager, ours in zip(*grads, strict=True):
        error = float((eager.float() - ours.float()).norm() / eager.float().norm())
        assert error <= 8 * torch.finfo(dtype).eps
