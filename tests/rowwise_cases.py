"""What the row-wise Triton kernels must do; ``test_rowwise.py`` runs it."""

from __future__ import annotations

import pytest
import torch

from moe_inductor.kernels import activations, family, rowwise
from moe_inductor.spec import Combine, Halves
from tests.experts_case import ACTIVATIONS, SINGLE, spec_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = [(1, 1, 1), (7, 2, 4), (300, 4, 13), (100, 8, 128), (40, 3, 200)]


def choices(tokens: int, top_k: int, experts: int) -> torch.Tensor:
    """Random ids, some of which are no expert's."""
    gen = torch.Generator().manual_seed(tokens)
    return torch.randint(-2, experts + 2, (tokens, top_k), generator=gen).to(DEVICE)


def rows_of(idx: torch.Tensor, experts: int) -> family.Rows:
    return family.Rows(*rowwise.sort_by_expert(idx, experts)[:3], idx.shape[1])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize(("tokens", "top_k", "experts"), [*SHAPES, (0, 2, 4), (64, 1, 3)])
@pytest.mark.parametrize("few", [0, 4096], ids=["sorted", "compared"])
def test_the_order_is_that_of_a_stable_sort(
    few: int, tokens: int, top_k: int, experts: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rowwise, "FEW", few)
    idx = choices(tokens, top_k, experts).to(dtype)
    want = family.sort_by_expert(idx, experts)
    got = rowwise.sort_by_expert(idx, experts)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize("tile", [16, 128])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_tiles_cover_each_row_once_largest_experts_first(tokens: int, top_k: int, experts: int, tile: int) -> None:
    rows = rows_of(choices(tokens, top_k, experts), experts)
    tiles, number = rowwise.row_tiles(rows, tile)
    ends = rows.offsets.tolist()
    starts = [0, *ends[:-1]]
    ranked = sorted(range(experts), key=lambda e: starts[e] - ends[e])
    want = [[e, row, min(tile, ends[e] - row)] for e in ranked for row in range(starts[e], ends[e], tile)]
    assert tiles[: int(number[0])].tolist() == want and len(want) <= len(tiles)
    assert number[1:].tolist() == [0, 0]
    order, counters = rowwise.largest_first(rows.offsets)
    assert order.tolist() == ranked and counters.tolist() == [0, 0, 0]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_combine(tokens: int, top_k: int, experts: int, weighted: bool) -> None:
    rows = rows_of(choices(tokens, top_k, experts), experts)
    out = torch.randn(tokens * top_k, 48, device=DEVICE)
    kept = rows.slots() < rows.offsets[-1]
    out[int(rows.offsets[-1]) :] = float("nan")  # dropped rows hold anything
    weights = torch.rand(tokens, top_k, device=DEVICE) if weighted else None
    y = rowwise.combine(out, rows, weights, torch.float16, torch.float32)
    scale = torch.ones_like(kept, dtype=torch.float32) if weights is None else weights.half().float()
    want = (torch.where(kept[..., None], out[rows.slots()], 0) * scale[..., None]).sum(1)
    torch.testing.assert_close(y, want)


@pytest.mark.parametrize("inter", [16, 40, 384])
@pytest.mark.parametrize("combine", [Combine.WEIGHTED_SUM, Combine.ROWS])
@pytest.mark.parametrize("halves", Halves)
def test_the_backward_of_the_activation(inter: int, combine: Combine, halves: Halves) -> None:
    tokens, top_k, experts = 37, 3, 5
    rows = rows_of(choices(tokens, top_k, experts), experts)
    n, end = tokens * top_k, int(rows.offsets[-1])
    activation = "relu2" if halves is Halves.SINGLE else "geglu_tanh"
    weight = {"activation": activation, "halves": halves, "combine": combine, "experts": experts, "top_k": top_k}
    spec = spec_of(torch.float32, **weight)
    h = torch.randn(n, inter if halves is Halves.SINGLE else 2 * inter, device=DEVICE)
    da = torch.randn(n, inter, device=DEVICE)
    weights = torch.rand(tokens, top_k, device=DEVICE) if combine is Combine.WEIGHTED_SUM else None
    dots = torch.randn(n if weights is None else tokens, experts, device=DEVICE)
    needs = {"need_h": True, "need_a": True, "need_w": weights is not None}
    dh, scaled, dweights = rowwise.pull(h, da, rows, weights, dots, spec, **needs)
    leaf = h.clone().requires_grad_()
    slots = torch.ones(tokens, top_k, device=DEVICE) if weights is None else weights.clone()
    slots.requires_grad_()
    scale = torch.where(rows.slots() < end, slots, 0).reshape(-1)[rows.order][:, None]
    a = (ACTIVATIONS | SINGLE)[activation](*activations.split(leaf, spec))
    (a * scale * da).sum().backward()
    torch.testing.assert_close(dh, leaf.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scaled[:end], (a * scale)[:end].detach(), atol=1e-4, rtol=1e-4)
    if weights is not None:
        e = torch.searchsorted(rows.offsets, torch.arange(end, device=DEVICE), right=True)
        slot = rows.order[:end]
        want = slots.grad.view(-1)
        want[slot] += dots[slot // top_k, e]
        torch.testing.assert_close(dweights.view(-1), want, atol=1e-3, rtol=1e-4)
    assert rowwise.pull(h, None, rows, weights, None, spec, need_h=False, need_a=False, need_w=False) == (None,) * 3


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_sums_of_a_slots_parts(tokens: int, top_k: int, experts: int) -> None:
    rows = rows_of(choices(tokens, top_k, experts), experts)
    parts = torch.randn(tokens * top_k, 5, device=DEVICE)
    kept = rows.slots() < rows.offsets[-1]
    parts[int(rows.offsets[-1]) :] = float("nan")  # dropped rows hold anything
    got = rowwise.slot_sums(parts, rows, torch.empty(top_k, tokens, dtype=torch.float16, device=DEVICE).t())
    want = torch.where(kept, parts.sum(1)[rows.slots()], 0.0)
    assert got.dtype is torch.float16 and got.is_contiguous()
    torch.testing.assert_close(got, want.half())


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("gathered", [False, True])
def test_sums_of_rows(gathered: bool, weighted: bool) -> None:
    tokens, top_k, experts = 150, 2, 5
    rows = rows_of(choices(tokens, top_k, experts), experts)
    x = torch.randn(tokens if gathered or weighted else tokens * top_k, 70, device=DEVICE)
    x[0] = float("nan")  # of one expert, or two
    source = family.Gather(rows.order, top_k) if gathered or weighted else None
    weights = torch.rand(tokens, top_k, device=DEVICE) if weighted else None
    got = rowwise.sum_rows(x, source, rows.offsets, weights, torch.float16 if weighted else None)
    start = 0
    for e, end in enumerate(rows.offsets.tolist()):
        own = x[rows.tokens[start:end]] if source is not None else x[start:end]
        if weights is not None:
            own = own * weights.half().float().view(-1)[rows.order[start:end]][:, None]
        torch.testing.assert_close(got[e], own.sum(0), equal_nan=True)
        start = end
