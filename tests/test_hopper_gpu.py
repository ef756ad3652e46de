"""The Hopper kernels at sizes that they take, none of which may fall back on the library. Run with ``-m gpu``."""

from __future__ import annotations

import itertools

import pytest
import torch
from experts_case import ACTIVATIONS, SINGLE, assert_close, bound, cut, cut_by_key, make, run, spec_of, truth, whole
from test_ops_gpu import to_cuda

from moe_inductor.kernels import fused
from moe_inductor.spec import Combine, Halves, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
]
PLAN = "hopper/bf16"
BF16 = torch.bfloat16


class NoLibrary:
    """Stands for the library: every use is an error."""

    def __getattr__(self, name: str) -> None:
        raise AssertionError(f"library.{name} was asked for")


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "library", NoLibrary())


def check(o, spec, form=cut) -> None:
    want = run(truth, to_cuda(o.copied(torch.float64)), spec)
    got = run(form, to_cuda(o.copied()), spec, PLAN)
    rows = o.x.shape[1] + o.w2.shape[1] + o.w2.shape[2] + o.x.shape[0] * spec.top_k
    assert_close(got, want, bound(o.w1.dtype, rows))


@pytest.mark.parametrize("form", [cut, whole])
@pytest.mark.parametrize("combine", Combine)
@pytest.mark.parametrize("tokens", [1, 7, 130, 700])
@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
def test_any_number_of_rows(dropped: bool, tokens: int, combine: Combine, form, alone) -> None:
    for experts, top_k in ((4, 1), (4, 3), (9, 2)):
        spec = spec_of(BF16, experts=experts, top_k=top_k, combine=combine)
        check(make(spec, BF16, tokens=tokens, hidden=256, inter=128, dropped=dropped), spec, form)


@pytest.mark.parametrize(("hidden", "inter"), [(128, 384), (640, 128), (256, 640), (2048, 768)])
def test_widths(hidden: int, inter: int, alone) -> None:
    spec = spec_of(BF16, experts=5, top_k=2)
    check(make(spec, BF16, tokens=200, hidden=hidden, inter=inter), spec)


@pytest.mark.parametrize(("hidden", "inter"), [(64, 32), (192, 96), (320, 208), (64, 1024)])
def test_widths_that_fill_no_tile(hidden: int, inter: int) -> None:
    for w1, w2 in itertools.product(Layout, Layout):
        spec = spec_of(BF16, experts=5, top_k=2, w1=w1, w2=w2)
        check(make(spec, BF16, tokens=200, hidden=hidden, inter=inter, dropped=True), spec)


GATED = [name for name in ACTIVATIONS if "c1" not in name]


@pytest.mark.parametrize("dtype", [BF16, torch.float16], ids=str)
@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("halves", Halves)
def test_every_form(halves: Halves, biases: bool, dtype: torch.dtype, alone) -> None:
    names = list(SINGLE) if halves is Halves.SINGLE else GATED
    for n, (w1, w2, combine) in enumerate(itertools.product(Layout, Layout, Combine)):
        activation = names[n % len(names)]
        spec = spec_of(dtype, experts=5, w1=w1, w2=w2, halves=halves, activation=activation, combine=combine)
        o = make(spec, dtype, tokens=150, hidden=320, inter=192, biases=biases, dropped=n % 2 == 0)
        check(o, spec, whole if n % 3 == 0 else cut)


@pytest.mark.parametrize("weights_dtype", [torch.float32, BF16], ids=str)
def test_routing_weights_of_another_dtype(weights_dtype: torch.dtype, alone) -> None:
    spec = spec_of(BF16, weight_dtype=weights_dtype)
    check(make(spec, BF16, tokens=90, hidden=256, inter=128, weights_dtype=torch.float32), spec)


def test_one_expert_takes_everything(alone) -> None:
    spec = spec_of(BF16, experts=8, top_k=1)
    o = make(spec, BF16, tokens=500, hidden=256, inter=128)
    o.idx[:] = 5
    check(o, spec)


def test_nan_of_one_expert_reaches_no_other(alone) -> None:
    """The rows beside an expert's last ones are another's: a NaN there must not pass through 0 * NaN."""
    spec = spec_of(BF16, experts=4, top_k=1)
    o = make(spec, BF16, tokens=300, hidden=256, inter=256)
    o.idx = torch.arange(300)[:, None] % 3
    clean = run(cut, to_cuda(o.copied()), spec, PLAN)
    o.x[1::3] = float("nan")  # all of expert 1
    dirty = run(cut, to_cuda(o.copied()), spec, PLAN)
    rows = torch.arange(300) % 3 != 1
    for name, part in (("y", rows), ("dx", rows), ("dweights", rows), ("dw1", [0, 2, 3]), ("dw2", [0, 2, 3])):
        assert torch.equal(dirty[name][part], clean[name][part]), name
        assert clean[name][part].isfinite().all()


def test_forty_runs_give_the_same_bits_and_poison_never_shows(alone) -> None:
    spec = spec_of(BF16, experts=16, top_k=4)
    o = make(spec, BF16, tokens=600, hidden=256, inter=384, dropped=True)
    first = run(cut, to_cuda(o.copied()), spec, PLAN)
    for _ in range(39):
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(32)]
        del poison  # the allocator hands these blocks out again
        again = run(cut, to_cuda(o.copied()), spec, PLAN)
        assert all(torch.equal(again[name], first[name]) for name in first)


def test_gradients_only_where_asked(alone) -> None:
    spec = spec_of(BF16)
    o = make(spec, BF16, tokens=70, hidden=256, inter=256)
    for names in (("x",), ("w1",), ("w2",), ("weights",), ("x", "w2"), ("w1", "weights")):
        only = frozenset(names)
        want = run(truth, to_cuda(o.copied(torch.float64, only)), spec)
        got = run(cut, to_cuda(o.copied(only=only)), spec, PLAN)
        assert_close(got, want, bound(BF16, 256 + 256 + 140))


def test_captured_step_replays_with_new_routing(alone) -> None:
    spec = spec_of(BF16, experts=8, top_k=2)
    first = make(spec, BF16, tokens=300, hidden=256, inter=256)
    other = make(spec, BF16, tokens=300, hidden=256, inter=256)
    other.idx = torch.stack([torch.randperm(3)[:2] for _ in range(300)])
    o = to_cuda(first.copied())
    leaves, dy = list(o.floats().values()), torch.ones(300, 256, device="cuda", dtype=BF16)

    def step() -> tuple[torch.Tensor, ...]:
        y = cut_by_key(o, (str(spec), PLAN, ""))
        return (y, *torch.autograd.grad(y, leaves, dy))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
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
        graph.replay()
        eager = step()
        assert all(torch.equal(a, b) for a, b in zip(outputs, eager, strict=True))


def test_the_single_operator_equals_the_cut(alone) -> None:
    spec = spec_of(BF16, experts=8, top_k=2)
    o = make(spec, BF16, tokens=333, hidden=256, inter=256)
    a, b = (run(form, to_cuda(o.copied()), spec, PLAN) for form in (cut, whole))
    assert all(torch.equal(a[name], b[name]) for name in a)
