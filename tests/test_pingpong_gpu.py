"""The kernels in CUDA C++ at sizes that they take, in the place of the Gluon ones. Run with ``-m gpu``."""

from __future__ import annotations

import itertools

import pytest
import torch
from experts_case import CLAMPED, assert_close, bound, cut, make, run, spec_of, truth, whole
from test_hopper_gpu import BF16, PLAN, NoLibrary, check
from test_ops_gpu import to_cuda

from moe_inductor import opdef
from moe_inductor.kernels import fused
from moe_inductor.kernels.cuda import driver
from moe_inductor.spec import Combine, Halves, Layout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs compute capability 9.0",
    ),
    pytest.mark.skipif(not driver.CUBIN.exists(), reason="needs the compiled kernels: make cubin"),
]


@pytest.fixture(autouse=True, params=[(1, 0), (1, 1 << 31), (2, 0)], ids=["alone", "turns", "pairs"])
def launched(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the kernels that ran, less which programs and warpgroups share what."""
    from moe_inductor.kernels import pingpong

    names: set[str] = set()
    plain = driver.launch

    def launch(name, args, programs, device) -> None:
        names.add(name.rpartition("_")[0].removesuffix("_turns"))
        plain(name, args, programs, device)

    cluster, shared = request.param
    monkeypatch.setattr(pingpong, "CLUSTER_GATHERED", cluster)
    monkeypatch.setattr(pingpong, "CLUSTER_DENSE", cluster)
    monkeypatch.setattr(pingpong, "SHARED_ROWS", shared)
    monkeypatch.setattr(pingpong, "launch", launch)
    monkeypatch.setattr(fused, "FEW_ROWS", 0)
    monkeypatch.setattr(fused, "library", NoLibrary())
    monkeypatch.setitem(opdef.FAMILIES, "hopper", fused.Fused("pingpong", "tiled"))
    return names


@pytest.mark.parametrize("form", [cut, whole])
@pytest.mark.parametrize("combine", Combine)
@pytest.mark.parametrize("tokens", [1, 7, 130, 700, 3000])
@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
def test_any_number_of_rows(dropped: bool, tokens: int, combine: Combine, form, launched: set[str]) -> None:
    for experts, top_k in ((4, 1), (4, 3), (9, 2)):
        spec = spec_of(BF16, experts=experts, top_k=top_k, combine=combine)
        check(make(spec, BF16, tokens=tokens, hidden=256, inter=192, dropped=dropped), spec, form)
    trained = {"up_silu", "rows", "rows_in_out", "pull_silu_in_out", "wgrad", "wgrad_transposed"}
    assert launched >= (trained if form is cut else {"up_silu", "rows"})


@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
def test_frozen_experts(dropped: bool, launched: set[str]) -> None:
    """Without the gradient of w2 nobody needs s * a: dA is a product of its own."""
    spec = spec_of(BF16, experts=9, top_k=2)
    o = make(spec, BF16, tokens=700, hidden=256, inter=192, dropped=dropped)
    only = frozenset({"x", "weights"})
    want = run(truth, to_cuda(o.copied(torch.float64, only)), spec)
    got = run(cut, to_cuda(o.copied(only=only)), spec, PLAN)
    assert_close(got, want, bound(BF16, 256, 384, 192, 1400))
    assert "rows_gathered_in_out" in launched and not launched & {"pull_silu_in_out", "wgrad", "wgrad_transposed"}


@pytest.mark.parametrize("w1", Layout)
@pytest.mark.parametrize("w2", Layout)
@pytest.mark.parametrize(("hidden", "inter"), [(128, 384), (640, 128), (320, 192), (2048, 768), (448, 1024)])
def test_widths(hidden: int, inter: int, w1: Layout, w2: Layout) -> None:
    for halves in (Halves.GATE_UP, Halves.UP_GATE):
        spec = spec_of(BF16, experts=5, top_k=2, halves=halves, w1=w1, w2=w2)
        check(make(spec, BF16, tokens=400, hidden=hidden, inter=inter), spec)


@pytest.mark.parametrize(("hidden", "inter"), [(256, 192), (2880, 2880), (192, 320)])
def test_clamped_and_interleaved_with_biases(hidden: int, inter: int, launched: set[str]) -> None:
    spec = spec_of(
        BF16, experts=5, top_k=2, halves=Halves.INTERLEAVED, w1=Layout.IN_OUT, w2=Layout.IN_OUT, activation=CLAMPED
    )
    check(make(spec, BF16, tokens=300, hidden=hidden, inter=inter, biases=True), spec)
    assert "up_clamped_bias" in launched and "rows_bias_in_out" in launched


def test_nan_of_one_expert_reaches_no_other() -> None:
    for tokens, period in itertools.product((300, 1000), (3, 7)):
        spec = spec_of(BF16, experts=8, top_k=1)
        o = make(spec, BF16, tokens=tokens, hidden=256, inter=256)
        o.idx = torch.arange(tokens)[:, None] % period
        clean = run(cut, to_cuda(o.copied()), spec, PLAN)
        o.x[1::period] = float("nan")  # all of expert 1
        dirty = run(cut, to_cuda(o.copied()), spec, PLAN)
        rows = torch.arange(tokens) % period != 1
        others = [e for e in range(8) if e != 1]
        for name, part in (("y", rows), ("dx", rows), ("dweights", rows), ("dw1", others), ("dw2", others)):
            assert torch.equal(dirty[name][part], clean[name][part]), name
            assert clean[name][part].isfinite().all()


def test_forty_runs_give_the_same_bits_and_poison_never_shows() -> None:
    spec = spec_of(BF16, experts=16, top_k=4)
    o = make(spec, BF16, tokens=2000, hidden=256, inter=384, dropped=True)
    first = run(cut, to_cuda(o.copied()), spec, PLAN)
    for _ in range(39):
        poison = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(32)]
        del poison  # the allocator hands these blocks out again
        again = run(cut, to_cuda(o.copied()), spec, PLAN)
        assert all(torch.equal(again[name], first[name]) for name in first)
