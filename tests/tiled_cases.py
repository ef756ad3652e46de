"""What the portable grouped matmuls must do; ``test_tiled.py`` runs it. Truths are float64, expert by expert."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moe_inductor.kernels import tiled, tuning
from moe_inductor.kernels.family import Gather
from moe_inductor.spec import Halves, Layout

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# the interpreter computes bfloat16 products wrongly
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
NAN = float("nan")
SWIGLU = "swiglu"
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _ieee_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def randn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def ends(*counts: int) -> Tensor:
    return torch.tensor(counts, device=DEVICE).cumsum(0).to(torch.int32)


def weight(layout: Layout, experts: int, depth: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[E, in, out] as a view of the parameter."""
    if layout is Layout.IN_OUT:
        return randn(experts, depth, columns, dtype=dtype)
    return randn(experts, columns, depth, dtype=dtype).transpose(1, 2)


def tiles_of(offsets: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The list of row tiles, last first: a tile that wrote into the next one's rows would show. What lies past its end
    points at memory that is not there."""
    height, experts = tiled.tile_rows(n, len(offsets), dtype), len(offsets)
    found, start = [], 0
    for e, end in enumerate(offsets.tolist()):
        found += [[e, row, min(height, end - row)] for row in range(start, end, height)]
        start = end
    bound = n // height + min(n, experts)
    padded = found[::-1] + [[1 << 30, 1 << 30, height]] * (bound - len(found))
    return torch.tensor(padded, dtype=torch.int32).view(-1, 3).to(DEVICE), torch.tensor(
        [len(found)], dtype=torch.int32, device=DEVICE
    )


def ranges(offsets: Tensor) -> list[tuple[int, int]]:
    own = offsets.tolist()
    return list(zip([0, *own[:-1]], own, strict=True))


def close(got: Tensor, true: Tensor, norm: Tensor, length: int) -> None:
    """Every entry within half an ulp of the true one and the error of a float32 sum of ``length`` products whose
    squares' sum has the root ``norm``. Rounding to nearest: a sum of 2^-24 parts of a random walk's places, 0.3 2^-24
    sqrt(length) norm in the mean with the tail exp(-t) of a product of normals, 18 times that in 10^8 entries (3.8
    2^-24 sqrt(length) norm seen in 10^6 such sums of 2880); tensor cores truncate after 8 or 16 products: at most 2^-23
    of a partial sum each time."""
    info = torch.finfo(got.dtype)
    exact = got.dtype is torch.float32
    sums = 6 * 2**-24 * math.sqrt(length) if exact else 2**-23 * (length / 4 + 2)
    allowed = 0.51 * info.eps * true.abs() + sums * norm + info.smallest_normal * info.eps
    error = (got.double() - true).abs()
    assert got.shape == true.shape and bool((error <= allowed).all()), float((error / allowed.clamp(min=1e-30)).max())


def product(
    a: Tensor, index: Tensor | None, slots: int, w: Tensor, bias: Tensor | None, offsets: Tensor
) -> tuple[Tensor, Tensor]:
    """The true rows_mm and its norm (see :func:`close`) of the rows that some expert owns."""
    rows = (a if index is None else a[index // slots]).double()
    parts = [(rows[s:e], w[i].double(), i) for i, (s, e) in enumerate(ranges(offsets))]
    true = [x @ m + (0 if bias is None else bias[i].double()) for x, m, i in parts]
    return torch.cat(true), torch.cat([(x.square() @ m.square()).sqrt() for x, m, _ in parts])


def check_rows(
    dtype: torch.dtype, counts: tuple[int, ...], depth: int, columns: int, layout: Layout, *, gathered: bool = True,
    biased: bool = True, dropped: int = 3,
) -> None:  # fmt: skip
    """rows_mm at these sizes; ``dropped`` rows of no expert hold NaN, and so does the result's memory before."""
    offsets, slots = ends(*counts), 3
    n = sum(counts) + dropped
    index = torch.randperm(n, device=DEVICE) if gathered else None
    a = randn(-(-n // slots) if gathered else n, depth, dtype=dtype)
    if not gathered:
        a[n - dropped :] = NAN
    w = weight(layout, len(counts), depth, columns, dtype)
    bias = randn(len(counts), columns, dtype=dtype) if biased else None
    gather = None if index is None else Gather(index, slots)
    got = tiled.rows_mm(a, gather, w, bias, tiles_of(offsets, n, dtype))
    close(got[: n - dropped], *product(a, index, slots, w, bias, offsets), depth + 1)


@dtypes
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize(("depth", "columns"), [(64, 64), (72, 100), (33, 1), (1, 40), (160, 130)])
def test_products_of_any_width(depth: int, columns: int, layout: Layout, dtype: torch.dtype) -> None:
    check_rows(dtype, (3, 0, 17, 1), depth, columns, layout)
    check_rows(dtype, (3, 0, 17, 1), depth, columns, layout, gathered=False, biased=False)


@dtypes
@pytest.mark.parametrize("rows", [1, 12, 20, 50, 150])
def test_products_at_every_height_of_tile(rows: int, dtype: torch.dtype) -> None:
    check_rows(dtype, (rows, rows + 37, 0), 40, 72, Layout.OUT_IN)
    check_rows(dtype, (2 * rows,), 40, 72, Layout.IN_OUT, dropped=0)


@dtypes
def test_many_experts_and_few_rows(dtype: torch.dtype) -> None:
    counts = [0] * 512
    for e in (0, 7, 8, 300, 511):
        counts[e] = 1
    check_rows(dtype, tuple(counts), 48, 32, Layout.OUT_IN, dropped=0)
    check_rows(dtype, tuple(counts), 48, 32, Layout.IN_OUT)


@dtypes
def test_nothing_to_do(dtype: torch.dtype) -> None:
    w, empty = weight(Layout.OUT_IN, 3, 16, 8, dtype), randn(0, 16, dtype=dtype)
    nothing = tiles_of(ends(0, 0, 0), 0, dtype)
    assert tiled.rows_mm(empty, None, w, None, nothing).shape == (0, 8)
    assert [t.shape for t in tiled.up(empty, None, w, None, SWIGLU, Halves.UP_GATE, nothing, save=True)] == [
        (0, 4),
        (0, 8),
    ]
    gather = Gather(torch.zeros(0, dtype=torch.int64, device=DEVICE), 1)
    dw = tiled.wgrad(empty, gather, randn(0, 8, dtype=dtype), ends(0, 0, 0), transposed=False)
    assert dw.shape == (3, 16, 8) and not dw.any()


def test_tiles_of_another_height_are_refused() -> None:
    offsets, w = ends(600), weight(Layout.OUT_IN, 1, 16, 8, torch.float16)
    tiles, number = tiles_of(offsets, 600, torch.float16)
    with pytest.raises(ValueError, match="tiles of 128 rows"):
        tiled.rows_mm(randn(600, 16, dtype=torch.float16), None, w, None, (tiles.repeat(2, 1), number))


@dtypes
def test_weights_and_rows_of_any_strides(dtype: torch.dtype) -> None:
    offsets = ends(9, 0, 20)
    tiles = tiles_of(offsets, 29, dtype)
    a = randn(29, 2, 24, dtype=dtype)[:, 1]
    for w in (
        randn(24, 3, 40, dtype=dtype).transpose(0, 1),  # [in, E, out]
        randn(40, 3, 24, dtype=dtype).permute(1, 2, 0),  # [out, E, in]
        randn(3, 24, 80, dtype=dtype)[:, :, ::2],  # neither axis contiguous
        randn(1, 24, 40, dtype=dtype).expand(3, 24, 40),
    ):
        close(tiled.rows_mm(a, None, w, None, tiles), *product(a, None, 1, w, None, offsets), 24)
    strided = randn(24, 29, dtype=dtype).t()
    bias = randn(40, 3, dtype=dtype).t()
    got = tiled.rows_mm(strided, None, w, bias, tiles)
    close(got, *product(strided, None, 1, w, bias, offsets), 25)


def silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


#: Activation text -> its meaning, written without the package.
GATED = {
    SWIGLU: lambda g, u: silu(g) * u,
    "mul(add(clamp_max(u, 1.5), 1.0), silu(g))": lambda g, u: (u.clamp(max=1.5) + 1) * silu(g),
}
SINGLE = {"relu2": lambda g, u: g.clamp(min=0).square()}


def halves_of(h: Tensor, halves: Halves) -> tuple[Tensor, Tensor]:
    inter = h.shape[1] // 2
    return {
        Halves.GATE_UP: (h[:, :inter], h[:, inter:]),
        Halves.UP_GATE: (h[:, inter:], h[:, :inter]),
        Halves.INTERLEAVED: (h[:, ::2], h[:, 1::2]),
        Halves.SINGLE: (h, h),
    }[halves]


def check_up(
    dtype: torch.dtype, counts: tuple[int, ...], depth: int, inter: int, halves: Halves, layout: Layout
) -> None:  # fmt: skip
    """``up``: h as the product; a within the roundings of float32 arithmetic on h as saved, and the same unsaved."""
    offsets, n = ends(*counts), sum(counts) + 2
    width = inter if halves is Halves.SINGLE else 2 * inter
    index, x = torch.randperm(n, device=DEVICE), randn(-(-n // 2), depth, dtype=dtype)
    w = weight(layout, len(counts), depth, width, dtype) / math.sqrt(depth)
    bias, tiles = randn(len(counts), width, dtype=dtype), tiles_of(offsets, n, dtype)
    for activation, meaning in (SINGLE if halves is Halves.SINGLE else GATED).items():
        a, h = tiled.up(x, Gather(index, 2), w, bias, activation, halves, tiles, save=True)
        assert h is not None
        h, own = h[: n - 2], slice(0, n - 2)
        close(h, *product(x, index, 2, w, bias, offsets), depth + 1)
        g, u = halves_of(h.double(), halves)
        true = meaning(g, u)
        # value and slope of these activations are at most (|g| + 1) (|u| + 2), and no chain has eight operations
        close_to = 0.51 * torch.finfo(dtype).eps * true.abs() + 8 * 2**-24 * (g.abs() + 1) * (u.abs() + 2)
        assert bool(((a[own].double() - true).abs() <= close_to + torch.finfo(dtype).smallest_normal).all())
        again, none = tiled.up(x, Gather(index, 2), w, bias, activation, halves, tiles, save=False)
        assert none is None and torch.equal(again[own], a[own])


@dtypes
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("halves", Halves)
def test_activations_in_the_epilogue(halves: Halves, layout: Layout, dtype: torch.dtype) -> None:
    check_up(dtype, (20, 0, 3), 48, 64, halves, layout)
    check_up(dtype, (2, 1, 0, 0), 36, 25, halves, layout)
    check_up(dtype, (150, 130), 36, 50, halves, layout)


def check_wgrad(
    dtype: torch.dtype, counts: tuple[int, ...], m: int, n: int, *, transposed: bool, gathered: bool = True
) -> None:  # fmt: skip
    """``wgrad``, with NaN in the rows of no expert."""
    offsets, slots, rows = ends(*counts), 2, sum(counts) + 4
    index = torch.randperm(rows, device=DEVICE) if gathered else None
    x, dense = randn(-(-rows // slots) if gathered else rows, m, dtype=dtype), randn(rows, n, dtype=dtype)
    dense[rows - 4 :] = NAN
    gather = None if index is None else Gather(index, slots)
    dw = tiled.wgrad(x, gather, dense, offsets, transposed=transposed)
    read = (x if index is None else x[index // slots]).double()
    for e, (s, end) in enumerate(ranges(offsets)):
        left, right = read[s:end].t(), dense[s:end].double()
        norm = (left.square() @ right.square()).sqrt()
        close(dw[e].t() if transposed else dw[e], left @ right, norm, max(end - s, 1))


@dtypes
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients(transposed: bool, dtype: torch.dtype) -> None:
    check_wgrad(dtype, (3, 0, 17, 1), 24, 40, transposed=transposed)
    check_wgrad(dtype, (70, 130), 100, 72, transposed=transposed)
    check_wgrad(dtype, (0, 0, 33), 128, 256, transposed=transposed)
    check_wgrad(dtype, (0, 5) * 20, 1, 3, transposed=transposed)
    check_wgrad(dtype, (3, 0, 17, 1), 24, 40, transposed=transposed, gathered=False)


@dtypes
def test_nan_of_one_expert_reaches_no_other(dtype: torch.dtype) -> None:
    counts = (21, 30, 1, 40)
    offsets, n = ends(*counts), sum(counts)
    gather = Gather(torch.arange(n, device=DEVICE), 1)
    x, dense = randn(n, 48, dtype=dtype), randn(n, 40, dtype=dtype)
    w, tiles = weight(Layout.OUT_IN, 4, 48, 40, dtype), tiles_of(offsets, n, dtype)
    for owner, (s, end) in enumerate(ranges(offsets)):
        for poisoned in ("x", "dense", "w"):
            bad = {"x": x, "dense": dense, "w": w} | {poisoned: {"x": x, "dense": dense, "w": w}[poisoned].clone()}
            bad[poisoned][owner if poisoned == "w" else slice(s, end)] = NAN
            others = [e for e in range(4) if e != owner]
            keep = torch.ones(n, dtype=torch.bool, device=DEVICE)
            keep[s:end] = False
            for transposed in (False, True):
                clean = tiled.wgrad(x, gather, dense, offsets, transposed=transposed)
                dirty = tiled.wgrad(bad["x"], gather, bad["dense"], offsets, transposed=transposed)
                assert torch.equal(dirty[others], clean[others]) and clean.isfinite().all()
            clean = tiled.rows_mm(x, gather, w, None, tiles)
            dirty = tiled.rows_mm(bad["x"], gather, bad["w"], None, tiles)
            assert torch.equal(dirty[keep], clean[keep]) and clean.isfinite().all()
            assert dirty[s:end].isnan().all() or poisoned == "dense"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_height_of_tiles_is_that_of_the_table(dtype: torch.dtype) -> None:
    for mean in (0.01, 1, 8.5, 17, 40, 1000):
        height = tuning.tile_height(mean, dtype)
        for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
            for kind in ("rows", "pair", "whole"):
                assert tuning.config(kind, capability, mean, dtype).rows == height
