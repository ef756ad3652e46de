"""The operators on a CUDA device: values, gradients, no host synchronisation. Run with ``-m gpu``."""

from __future__ import annotations

import itertools

import pytest
import torch
from experts_case import CONSTS, Operands, assert_close, bound, cut, cut_by_key, make, run, spec_of, truth, whole

from moe_inductor import ops
from moe_inductor.spec import Combine, Halves, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
PLAN = "library/auto"


@pytest.fixture(autouse=True, params=["library", "triton", "hopper"])
def _family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the hopper family needs compute capability 9.0")
    monkeypatch.setattr(f"{__name__}.PLAN", f"{request.param}/auto")


@pytest.fixture(autouse=True)
def _ieee_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)


def to_cuda(o: Operands) -> Operands:
    """``o`` on the device, as leaves."""
    moved = {name: t.detach().cuda().requires_grad_(t.requires_grad) for name, t in o.floats().items()}
    return Operands(**{"weights": None, "b1": None, "b2": None} | moved | {"idx": o.idx.cuda()})


def check(o: Operands, spec, form=cut) -> None:
    want = run(truth, to_cuda(o.copied(torch.float64)), spec)
    got = run(form, to_cuda(o.copied()), spec, PLAN)
    rows = o.x.shape[1] + o.w2.shape[1] + o.w2.shape[2] + o.x.shape[0] * spec.top_k
    assert_close(got, want, bound(o.w1.dtype, rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_layout(dtype: torch.dtype) -> None:
    for n, (w1, w2, halves) in enumerate(itertools.product(Layout, Layout, Halves)):
        activation = "gelu" if halves is Halves.SINGLE else "swiglu"
        spec = spec_of(dtype, w1=w1, w2=w2, halves=halves, activation=activation, combine=list(Combine)[n // 2 % 2])
        check(make(spec, dtype, tokens=50, hidden=64, inter=32, biases=n % 3 == 0, dropped=n % 4 == 1), spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7, 300])
@pytest.mark.parametrize("form", [cut, whole])
def test_any_number_of_tokens(form, tokens: int, dtype: torch.dtype) -> None:
    for top_k, dropped in itertools.product((1, 2, 4), (False, True)):
        spec = spec_of(dtype, top_k=top_k)
        check(make(spec, dtype, tokens=tokens, hidden=32, inter=16, dropped=dropped, biases=True), spec, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_widths_that_the_grouped_matmul_refuses(dtype: torch.dtype) -> None:
    spec = spec_of(dtype, experts=5)
    check(make(spec, dtype, tokens=40, hidden=11, inter=5, biases=True), spec)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unaligned_weights(dtype: torch.dtype) -> None:
    spec = spec_of(dtype)
    o = make(spec, dtype, tokens=20)
    want = run(truth, to_cuda(o.copied(torch.float64)), spec)
    moved = to_cuda(o.copied())
    for name in ("w1", "w2"):
        t = getattr(o, name)
        store = torch.empty(t.numel() + 1, dtype=dtype, device="cuda")
        setattr(moved, name, store[1:].view(t.shape).copy_(t.cuda()).requires_grad_())
    assert_close(run(cut, moved, spec, PLAN), want, bound(dtype, 128))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_captured_step_replays_with_new_routing(dtype: torch.dtype) -> None:
    """A capture that succeeds proves that nothing synchronises; the replay has other counts per expert, some zero."""
    spec = spec_of(dtype, experts=8, top_k=2)
    first = make(spec, dtype, tokens=64, hidden=64, inter=32, biases=True)
    other = make(spec, dtype, tokens=64, hidden=64, inter=32, biases=True)
    other.idx = torch.stack([torch.randperm(3)[:2] for _ in range(64)])
    other.idx[5:9] = spec.experts
    o = to_cuda(first.copied())
    key = (str(spec), PLAN, "")
    leaves = list(o.floats().values())
    dy = torch.ones(64, 64, device="cuda", dtype=dtype)

    def step() -> tuple[torch.Tensor, ...]:
        y = cut_by_key(o, key)
        return (y, *torch.autograd.grad(y, leaves, dy))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for case in (first, other):
        with torch.no_grad():
            o.idx.copy_(case.idx)
            for name, t in o.floats().items():
                t.copy_(getattr(case, name))
        for t in outputs:
            t.fill_(float("nan"))
        graph.replay()
        truths = case.copied(torch.float64)
        y = truth(truths, spec)
        y.backward(torch.ones_like(y))
        want = {"y": y.detach()} | {f"d{name}": t.grad for name, t in truths.floats().items()}
        got = dict(zip(["y", *[f"d{name}" for name in o.floats()]], outputs, strict=True))
        assert_close(got, want, bound(dtype, 64 + 64 + 64 * 2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forty_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    spec = spec_of(dtype, experts=8, top_k=3)
    o = make(spec, dtype, tokens=500, hidden=64, inter=32, biases=True)
    first = run(cut, to_cuda(o.copied()), spec, PLAN)
    for _ in range(39):
        again = run(cut, to_cuda(o.copied()), spec, PLAN)
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_and_uninitialised_memory_stay_out(dtype: torch.dtype) -> None:
    spec = spec_of(dtype, experts=6, top_k=2)
    o = make(spec, dtype, tokens=40, hidden=32, inter=16)
    o.idx = torch.arange(40)[:, None] % 5 // 2 * 2 + torch.arange(2)  # pairs (0, 1), (2, 3), (4, 5)
    o.idx[3] = 6
    clean = run(cut, to_cuda(o.copied()), spec, PLAN)
    o.x[6] = float("nan")
    poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(64)]
    del poison  # the allocator hands these blocks out again
    dirty = run(cut, to_cuda(o.copied()), spec, PLAN)
    keep, others = torch.arange(40) != 6, [e for e in range(6) if e not in o.idx[6].tolist()]
    assert dirty["y"][6].isnan().all()
    for name, part in (("y", keep), ("dx", keep), ("dweights", keep), ("dw1", others), ("dw2", others)):
        assert torch.equal(dirty[name][part], clean[name][part]), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_opcheck(dtype: torch.dtype) -> None:
    spec = spec_of(dtype)
    o = to_cuda(make(spec, dtype, tokens=9, biases=True).copied())
    key = (str(spec), PLAN, "")
    rows = ops.route_metadata(o.idx, *key)[:3]
    a, h = ops.experts_up(o.x.detach(), *rows, o.w1.detach(), o.b1.detach(), CONSTS, *key)
    for op, args in (
        (ops.experts_up, (o.x, *rows, o.w1, o.b1, CONSTS, *key)),
        (ops.experts_down, (a, h.requires_grad_(), *rows, o.weights, o.w2, o.b2, CONSTS, *key)),
        (ops.experts, (o.x, o.idx, o.weights, o.w1, o.b1, o.w2, o.b2, CONSTS, *key)),
    ):
        torch.library.opcheck(op, args, rtol=1e-2, atol=1e-2)
