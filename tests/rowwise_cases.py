"""What the row-wise Triton kernels must do; ``test_rowwise.py`` runs it."""

from __future__ import annotations

import pytest
import torch

from moe_inductor.kernels import family, rowwise

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
def test_the_order_is_that_of_a_stable_sort(tokens: int, top_k: int, experts: int, dtype: torch.dtype) -> None:
    idx = choices(tokens, top_k, experts).to(dtype)
    want = family.sort_by_expert(idx, experts)
    got = rowwise.sort_by_expert(idx, experts)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b.to(a.dtype))


@pytest.mark.parametrize(("tokens", "top_k", "experts"), SHAPES)
def test_tiles_cover_each_row_once(tokens: int, top_k: int, experts: int) -> None:
    rows = rows_of(choices(tokens, top_k, experts), experts)
    tiles, number = rowwise.row_tiles(rows)
    want, start = [], 0
    for e, end in enumerate(rows.offsets.tolist()):
        want += [[e, row, min(128, end - row)] for row in range(start, end, 128)]
        start = end
    assert tiles[: int(number)].tolist() == want and len(want) <= len(tiles)


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
@pytest.mark.parametrize("weighted", [False, True])
def test_the_backward_of_the_activation(inter: int, weighted: bool) -> None:
    tokens, top_k, experts = 37, 3, 5
    rows = rows_of(choices(tokens, top_k, experts), experts)
    n, end = tokens * top_k, int(rows.offsets[-1])
    h, da = torch.randn(n, 2 * inter, device=DEVICE), torch.randn(n, inter, device=DEVICE)
    weights = torch.rand(tokens, top_k, device=DEVICE) if weighted else None
    needs = {"need_h": True, "need_a": True, "need_w": weighted}
    dh, scaled, dweights = rowwise.pull_swiglu(h, da, rows, weights, torch.float32, **needs)
    leaf = h.clone().requires_grad_()
    slots = torch.ones(tokens, top_k, device=DEVICE) if weights is None else weights.clone()
    slots.requires_grad_()
    scale = torch.where(rows.slots() < end, slots, 0).reshape(-1)[rows.order][:, None]
    a = torch.nn.functional.silu(leaf[:, :inter]) * leaf[:, inter:]
    (a * scale * da).sum().backward()
    torch.testing.assert_close(dh, leaf.grad)
    torch.testing.assert_close(scaled[:end], (a * scale)[:end].detach())
    if weighted:
        torch.testing.assert_close(dweights, slots.grad)
    assert rowwise.pull_swiglu(h, None, rows, weights, torch.float32, need_h=False, need_a=False, need_w=False) == (
        None,
        None,
        None,
    )
