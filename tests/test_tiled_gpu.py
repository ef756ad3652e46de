"""The portable grouped matmuls on a GPU, at widths and counts too large for the interpreter. Run with ``-m gpu``."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from moe_inductor.kernels import tiled
from moe_inductor.kernels.family import Gather
from moe_inductor.spec import Halves, Layout
from tests.tiled_cases import (
    NAN,
    SWIGLU,
    _ieee_float32,  # noqa: F401
    check_rows,
    check_up,
    check_wgrad,
    ends,
    product,
    randn,
    tiles_of,
    weight,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
WIDTHS = [(2048, 1536), (2880, 2880), (72, 100), (100, 2880), (2880, 72)]
#: Experts and rows: one expert, empty ones between, one row each, all rows with one of many.
COUNTS = [(700,), (5, 0, 300), (1,) * 40 + (0,) * 472, (0,) * 300 + (900,) + (0,) * 211, (30,) * 20]
#: Those of hundreds of experts go with narrow weights: wide ones take 6 GiB in float32.
WIDE_COUNTS = [counts for counts in COUNTS if len(counts) < 40]


def poison() -> None:
    """What the allocator hands out next holds NaN."""
    blocks = [torch.full((1 << 20,), NAN, device="cuda") for _ in range(64)]
    del blocks


@pytest.fixture(autouse=True)
def _poisoned() -> None:
    poison()


@dtypes
@pytest.mark.parametrize(("depth", "columns"), WIDTHS)
def test_products(depth: int, columns: int, dtype: torch.dtype) -> None:
    for n, counts in enumerate(WIDE_COUNTS if depth * columns > 1 << 20 else COUNTS):
        check_rows(dtype, counts, depth, columns, list(Layout)[n % 2], gathered=n % 3 > 0, biased=n % 2 > 0)


@dtypes
@pytest.mark.parametrize("halves", Halves)
def test_activations(halves: Halves, dtype: torch.dtype) -> None:
    for n, (depth, inter) in enumerate([(2048, 768), (72, 100), (100, 50), (2880, 1440)]):
        for counts in WIDE_COUNTS if depth * inter > 1 << 20 else COUNTS:
            check_up(dtype, counts, depth, inter, halves, list(Layout)[n % 2])


@dtypes
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients(transposed: bool, dtype: torch.dtype) -> None:
    for m, n in WIDTHS:
        for counts in WIDE_COUNTS if m * n > 1 << 20 else COUNTS:
            check_wgrad(dtype, counts, m, n, transposed=transposed)


@dtypes
def test_forty_runs_give_the_same_bits(dtype: torch.dtype) -> None:
    offsets, n = ends(100, 0, 3, 400), 503
    gather, x = Gather(torch.randperm(n, device="cuda"), 1), randn(n, 200, dtype=dtype)
    w, tiles = weight(Layout.OUT_IN, 4, 200, 304, dtype), tiles_of(offsets, n, dtype)

    def step() -> list[Tensor]:
        a, h = tiled.up(x, gather, w, None, SWIGLU, Halves.GATE_UP, tiles, save=True)
        assert h is not None
        back = tiled.rows_mm(h, None, w.transpose(1, 2), None, tiles)
        return [a, h, back, *(tiled.wgrad(x, gather, h, offsets, transposed=t) for t in (False, True))]

    first = step()
    for _ in range(39):
        poison()
        assert all(torch.equal(a, b) for a, b in zip(step(), first, strict=True))


def test_tf32_where_torch_allows_it() -> None:
    """Operands lose all but 10 bits of mantissa: each product up to 2^-9 of itself, toward zero. What that takes from a
    sum is that part of it, and a random walk of 0.4 2^-10 norm, of which ten times are allowed."""
    offsets, n = ends(90, 0, 110), 200
    a, w = randn(n, 512, dtype=torch.float32), weight(Layout.OUT_IN, 3, 512, 320, torch.float32)
    tiles = tiles_of(offsets, n, torch.float32)
    gather, dense = Gather(torch.arange(n, device="cuda"), 1), randn(n, 320, dtype=torch.float32)
    exact = tiled.rows_mm(a, None, w, None, tiles), tiled.wgrad(a, gather, dense, offsets, transposed=True)
    torch.backends.cuda.matmul.allow_tf32 = True
    fast = tiled.rows_mm(a, None, w, None, tiles), tiled.wgrad(a, gather, dense, offsets, transposed=True)
    true, norm = product(a, None, 1, w, None, offsets)
    assert bool(((fast[0].double() - true).abs() <= 2**-9 * true.abs() + 2**-8 * norm).all())
    assert not any(torch.equal(one, other) for one, other in zip(exact, fast, strict=True))
    squares = tiled.wgrad(a.square(), gather, dense.square(), offsets, transposed=True).sqrt()
    allowed = 2**-9 * exact[1].abs() + 2**-8 * squares
    assert bool(((fast[1] - exact[1]).abs() <= allowed).all())


@dtypes
def test_captured_kernels_replay_with_other_counts(dtype: torch.dtype) -> None:
    """A capture that succeeds proves that nothing waits for the device."""
    n, experts = 300, 6
    x, w = randn(n, 128, dtype=dtype), weight(Layout.OUT_IN, experts, 128, 192, dtype) / math.sqrt(128)
    cases = [ends(100, 0, 50, 20, 0, 130), ends(0, 290, 0, 0, 10, 0)]
    offsets, order = cases[0].clone(), torch.arange(n, device="cuda")
    tiles = tiles_of(offsets, n, dtype)
    gather = Gather(order, 1)

    def step() -> list[Tensor]:
        a, h = tiled.up(x, gather, w, None, SWIGLU, Halves.INTERLEAVED, tiles, save=True)
        assert h is not None
        return [a, h, tiled.wgrad(x, gather, h, offsets, transposed=False)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = step()
    for case in cases:
        offsets.copy_(case)
        order.copy_(torch.randperm(n, device="cuda"))
        for kept, new in zip(tiles, tiles_of(case, n, dtype), strict=True):
            kept.copy_(new)
        for t in outputs:
            t.fill_(NAN)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(outputs, step(), strict=True))
