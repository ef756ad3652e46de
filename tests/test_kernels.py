"""Values and gradients of every kernel family against a float64 loop over tokens."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from experts_case import (
    ACTIVATIONS,
    CONSTS,
    SINGLE,
    Operands,
    assert_close,
    bound,
    cut,
    make,
    run,
    spec_of,
    truth,
    whole,
)
from torch.fx.experimental.proxy_tensor import make_fx

from moe_inductor import ops
from moe_inductor.spec import Combine, ExpertsSpec, Halves, Layout

FAMILIES = ["reference", "cpu", "library"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
HIDDEN, INTER = 16, 8
BOTH = [cut, whole]


def check(o: Operands, spec: ExpertsSpec, family: str, form=cut, only: frozenset[str] | None = None) -> None:
    want = run(truth, o.copied(torch.float64, only), spec)
    got = run(form, o.copied(only=only), spec, f"{family}/auto")
    widest = max(o.x.shape[1], o.w2.shape[1], o.w2.shape[2]) + o.idx.numel()
    assert_close(got, want, bound(o.w1.dtype, widest))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", BOTH)
def test_every_layout(form, family: str, dtype: torch.dtype) -> None:
    acts = itertools.cycle(ACTIVATIONS)
    singles = itertools.cycle(SINGLE)
    for n, (w1, w2, halves) in enumerate(itertools.product(Layout, Layout, Halves)):
        act = next(singles) if halves is Halves.SINGLE else next(acts)
        combine = list(Combine)[n // 2 % 2]
        spec = spec_of(dtype, w1=w1, w2=w2, halves=halves, activation=act, combine=combine)
        check(make(spec, dtype, hidden=HIDDEN, inter=INTER, biases=n % 3 == 0, dropped=n % 4 == 1), spec, family, form)


@pytest.mark.parametrize("activation", [*ACTIVATIONS, *SINGLE])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_activation_with_biases(family: str, activation: str) -> None:
    halves = Halves.SINGLE if activation in SINGLE else Halves.INTERLEAVED
    for dtype in (torch.float32, torch.bfloat16):
        spec = spec_of(dtype, activation=activation, halves=halves)
        check(make(spec, dtype, biases=True), spec, family)


@pytest.mark.parametrize("tokens", [0, 1, 7, 33])
@pytest.mark.parametrize("top_k", [1, 2, 3, 4])
@pytest.mark.parametrize("dropped", [False, True], ids=["all", "dropped"])
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_tokens_and_choices(family: str, dropped: bool, top_k: int, tokens: int) -> None:
    for dtype, form in itertools.product((torch.float32, torch.bfloat16), BOTH):
        for combine in Combine:
            spec = spec_of(dtype, top_k=top_k, combine=combine)
            check(make(spec, dtype, tokens=tokens, dropped=dropped, biases=True), spec, family, form)


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_symbolic_top_k_is_read_off_the_shapes(family: str, tokens: int) -> None:
    for form, combine in itertools.product(BOTH, Combine):
        spec = spec_of(torch.float32, top_k=2, combine=combine)
        o = make(spec, torch.float32, tokens=tokens, biases=True)
        check(o, dataclasses.replace(spec, top_k=0), family, form)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_odd_widths_and_one_expert(family: str, dtype: torch.dtype) -> None:
    for experts, top_k in ((5, 2), (1, 1)):
        spec = spec_of(dtype, experts=experts, top_k=top_k)
        check(make(spec, dtype, hidden=11, inter=5, biases=True, dropped=True), spec, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_more_rows_than_a_tile(family: str) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        spec = spec_of(dtype, experts=3, top_k=1)
        check(make(spec, dtype, tokens=150, hidden=12, inter=6), spec, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_routing_weights_keep_their_dtype(family: str) -> None:
    spec = spec_of(torch.bfloat16, weight_dtype=torch.float32, combine_dtype=torch.float32)
    o = make(spec, torch.bfloat16, weights_dtype=torch.float32)
    check(o, spec, family)
    y = run(cut, o.copied(), spec, f"{family}/auto")
    assert y["dweights"].dtype == torch.float32 and y["y"].dtype == torch.bfloat16


@pytest.mark.parametrize("family", FAMILIES)
def test_output_dtype_wider_than_the_experts(family: str) -> None:
    spec = spec_of(torch.bfloat16, out_dtype=torch.float32)
    check(make(spec, torch.bfloat16, biases=True), spec, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", BOTH)
def test_gradients_only_where_asked(form, family: str) -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32, biases=True)
    for size in range(len(Operands.NAMES) + 1):
        for only in itertools.combinations(Operands.NAMES, size):
            check(o, spec, family, form, frozenset(only))


@pytest.mark.parametrize("family", FAMILIES)
def test_strided_operands(family: str) -> None:
    spec = spec_of(torch.float32)
    o = make(spec, torch.float32)
    for name in ("x", "weights", "w1", "w2"):
        t = getattr(o, name)
        setattr(o, name, torch.stack([t, t], -1)[..., 0] if name in ("x", "weights") else t.mT.contiguous().mT)
    want = run(truth, o.copied(torch.float64), spec)
    leaves = {name: t.detach().requires_grad_() for name, t in o.floats().items()}
    got = run(cut, Operands(idx=o.idx.t().contiguous().t(), b1=None, b2=None, **leaves), spec, f"{family}/auto")
    assert_close(got, want, bound(torch.float32, 32))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_repeated_choice_counts_twice(family: str) -> None:
    spec = spec_of(torch.float32, top_k=3)
    o = make(spec, torch.float32)
    o.idx[:, 1:] = o.idx[:, :1]
    check(o, spec, family)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("form", BOTH)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_nan_stays_in_its_token(dtype: torch.dtype, value: float, form, family: str) -> None:
    spec = spec_of(dtype, experts=6)
    o = make(spec, dtype, tokens=40)
    o.idx = torch.arange(40)[:, None] % 5 // 2 * 2 + torch.arange(2)  # pairs (0, 1), (2, 3), (4, 5)
    clean = run(form, o.copied(), spec, f"{family}/auto")
    o.x[6] = value
    own, others = o.idx[6].tolist(), [e for e in range(6) if e not in o.idx[6].tolist()]
    dirty = run(form, o.copied(), spec, f"{family}/auto")
    keep = torch.arange(40) != 6
    for name in ("y", "dx", "dweights"):
        torch.testing.assert_close(dirty[name][keep], clean[name][keep], rtol=0, atol=0)
    assert dirty["y"][6].isnan().all() or value == float("inf")
    assert not dirty["y"][6].isfinite().all()
    for name in ("dw1", "dw2"):
        torch.testing.assert_close(dirty[name][others], clean[name][others], rtol=0, atol=0)
        assert not dirty[name][own].isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_dropped_slot_touches_nothing(family: str) -> None:
    spec = spec_of(torch.bfloat16)
    o = make(spec, torch.bfloat16, tokens=9, biases=True, dropped=True)
    gone = (o.idx < 0) | (o.idx >= spec.experts)
    clean = run(cut, o.copied(), spec, f"{family}/auto")
    o.weights[gone] = float("nan")
    o.idx[4], o.x[4] = spec.experts, float("nan")
    got = run(cut, o.copied(), spec, f"{family}/auto")
    assert (got["dweights"][gone] == 0).all() and (got["y"][4] == 0).all() and (got["dx"][4] == 0).all()
    keep = torch.arange(9) != 4
    torch.testing.assert_close(got["y"][keep], clean["y"][keep], rtol=0, atol=0)
    assert all(got[name].isfinite().all() for name in ("y", "dx", "dw1", "db1", "dw2", "db2"))


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """Uninitialised memory holds NaN (the largest value in integers)."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize("family", FAMILIES)
def test_uninitialised_memory_is_never_read(family: str, poison) -> None:
    assert torch.empty(3).isnan().all()
    for dtype, form in itertools.product(DTYPES[:3], BOTH):
        for top_k, tokens in ((2, 7), (4, 3)):
            spec = spec_of(dtype, top_k=top_k)
            check(make(spec, dtype, tokens=tokens, dropped=True, biases=True), spec, family, form)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_forty_runs_give_the_same_bits(family: str, dtype: torch.dtype) -> None:
    spec = spec_of(dtype, experts=8, top_k=3)
    o = make(spec, dtype, tokens=65, hidden=24, inter=16, biases=True)
    first = run(cut, o.copied(), spec, f"{family}/auto")
    for _ in range(39):
        again = run(cut, o.copied(), spec, f"{family}/auto")
        assert all(torch.equal(again[name], first[name]) for name in first)


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputed_gradients_have_the_bits_of_saved_ones(family: str) -> None:
    spec = spec_of(torch.bfloat16)
    o = make(spec, torch.bfloat16, biases=True)
    apart = run(cut, o.copied(), spec, f"{family}/auto")
    together = run(whole, o.copied(), spec, f"{family}/auto")
    assert all(torch.equal(apart[name], together[name]) for name in apart if name != "y")


def traced_by_inductor(o: Operands, spec: ExpertsSpec, plan: str) -> torch.fx.GraphModule:
    """What Inductor makes of the single operator, with sizes of tokens left open."""
    from torch._inductor.decomposition import select_decomp_table

    def call(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
        return ops.experts(x, idx, weights, o.w1, o.b1, o.w2, o.b2, CONSTS, str(spec), plan, "")

    with torch.no_grad():
        return make_fx(call, select_decomp_table(), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            o.x, o.idx, o.weights
        )


@pytest.mark.parametrize("combine", Combine)
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inductor_sees_through_the_cpu_experts(dtype: torch.dtype, activation: str, combine: Combine) -> None:
    halves = Halves.SINGLE if activation in SINGLE else Halves.INTERLEAVED
    spec = spec_of(dtype, activation=activation, halves=halves, combine=combine, w2=Layout.IN_OUT)
    o = make(spec, dtype, biases=True, dropped=True)
    graph = traced_by_inductor(o, spec, "cpu/auto")
    called = [n.target for n in graph.graph.nodes if n.op == "call_function"]
    assert called.count(torch.ops.megamoe.cpu_grouped_mm.default) == 2
    assert torch.ops.megamoe.experts.default not in called
    assert not [t for t in called if isinstance(t, torch._ops.OpOverload) and t._schema.is_mutable]
    other = make(spec, dtype, biases=True, dropped=True, tokens=31)
    for given in (o, dataclasses.replace(o, x=other.x, idx=other.idx, weights=other.weights)):
        with torch.no_grad():
            got = graph(given.x, given.idx, given.weights)
        want = run(truth, given.copied(torch.float64), spec)
        assert_close({"y": got}, {"y": want["y"]}, bound(dtype, 16, given.idx.numel()))


def test_inductor_keeps_the_operator_of_other_families() -> None:
    spec = spec_of(torch.float32)
    graph = traced_by_inductor(make(spec, torch.float32), spec, "reference/auto")
    assert torch.ops.megamoe.experts.default in [n.target for n in graph.graph.nodes]
