"""The CUDA kernels for Hopper, run on the host thread by thread: barriers, copies, swizzles, epilogues.

Operands are multiples of 1/8 in [-1, 1], so that fp32 sums are exact in any order and a matmul has one right result in
bf16. An activation, computed from such values, may round the other way: one step of bf16.
"""

from __future__ import annotations

import platform
import random
import shutil
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from moe_inductor.kernels.cuda.driver import Divide, RowsArgs, Tiles, WgradArgs
from moe_inductor.kernels.family import Gather
from moe_inductor.spec import Halves
from tests.emulate.host import (
    PART,
    TALL,
    Guarded,
    Lanes,
    Machine,
    build,
    cluster_of,
    kernel_names,
    tensor_map,
)

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ to build the kernels with"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the fibers switch in x86-64 assembly"),
]

ALPHA, LIMIT = 1.702, 1.5
SPARE = 5  # rows past the last expert's


@dataclass(frozen=True, slots=True)
class Rows:
    """A kernel over row tiles: which h, where the weights' columns lie, whether rows are gathered."""

    name: str
    gated: str = ""  # "", "halves" or "interleaved"
    bias: bool = False
    in_out: bool = False
    gathered: bool = False


ROWS = (
    Rows("up_silu", gated="halves", gathered=True),
    Rows("up_clamped_bias", gated="interleaved", bias=True, in_out=True, gathered=True),
    Rows("rows"),
    Rows("rows_bias", bias=True),
    Rows("rows_in_out", in_out=True),
    Rows("rows_bias_in_out", bias=True, in_out=True),
    Rows("rows_gathered", gathered=True),
    Rows("rows_gathered_in_out", in_out=True, gathered=True),
)
WGRADS = ("wgrad", "wgrad_transposed", "wgrad_turns", "wgrad_transposed_turns")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build(tmp_path_factory.mktemp("emulated"))


PULLS = ("pull_silu", "pull_silu_in_out")  # by way of the core


def test_every_kernel_of_the_source_is_tested() -> None:
    assert kernel_names() == [k.name for k in ROWS] + [*PULLS, *WGRADS]


def eighths(*shape: int) -> torch.Tensor:
    return (torch.randint(-8, 9, shape) / 8).bfloat16()


def steps_apart(got: torch.Tensor, want: torch.Tensor) -> int:
    """The most steps of bf16 between two tensors; NaN is like NaN only."""
    assert torch.equal(got.isnan(), want.isnan())

    def ordered(t: torch.Tensor) -> torch.Tensor:
        bits = t.bfloat16().nan_to_num(0.0).view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((ordered(got) - ordered(want)).abs().max()) if got.numel() else 0


def row_tiles(counts: Sequence[int], tall: int, seed: int) -> torch.Tensor:
    """[M, 3]: expert, first row, rows; in any order."""
    tiles, first = [], 0
    for expert, count in enumerate(counts):
        tiles += [(expert, first + at, min(tall, count - at)) for at in range(0, count, tall)]
        first += count
    random.Random(seed).shuffle(tiles)
    return torch.tensor(tiles, dtype=torch.int32).view(-1, 3)


def activated(kind: str, h: torch.Tensor) -> torch.Tensor:
    """``h`` [N, 2I] in bf16, gate | up or in turn, to [N, I] in fp64."""
    h = h.double()
    if kind == "halves":
        gate, up = h.chunk(2, dim=1)
        return gate * gate.sigmoid() * up
    gate, up = h[:, ::2].clamp(max=LIMIT), h[:, 1::2].clamp(-LIMIT, LIMIT)
    return (up + 1) * gate * (ALPHA * gate).sigmoid()


def check_rows(
    machine: Machine,
    kernel: Rows,
    name: str,
    counts: Sequence[int],
    columns: int,
    depth: int,
    *,
    per_row: int,
    grid: int,
    seed: int,
    lanes: Lanes = Lanes.TOGETHER,
    saved: bool = True,
    swapped: bool = False,
) -> None:
    """One launch against fp64, in every element; what it may not write stays as it was."""
    torch.manual_seed(seed)
    cluster, experts, total = cluster_of(name), len(counts), sum(counts)
    weights = eighths(experts, columns, depth)  # [E, out, in]
    stored = weights.transpose(1, 2).contiguous() if kernel.in_out else weights
    bias = eighths(experts, columns)
    if kernel.gathered:
        x = torch.full(((total + per_row - 1) // per_row + SPARE, depth + 8), float("nan"), dtype=torch.bfloat16)
        x[:-SPARE, :depth] = eighths(x.shape[0] - SPARE, depth)
        index = torch.randperm((x.shape[0] - SPARE) * per_row)[:total]
        rows = x[index // per_row, :depth]
    else:
        x = torch.full((total + SPARE, depth), float("nan"), dtype=torch.bfloat16)
        x[:total] = eighths(total, depth)
        index, rows = torch.zeros(1, dtype=torch.int64), x[:total]
    tiles = row_tiles(counts, TALL * cluster, seed)
    counters = torch.tensor([len(tiles), 0, 0], dtype=torch.int32)
    out = Guarded((total + SPARE, columns // 2 if kernel.gated else columns))
    h = Guarded((total + SPARE, columns))
    args = RowsArgs(
        b=tensor_map(stored.flatten(0, 1), 64 // cluster if kernel.in_out else PART),
        tiles=Tiles(tiles.data_ptr(), counters.data_ptr(), None, experts),
        divide=Divide.by(per_row),
        out=out.value.data_ptr(),
        h=h.value.data_ptr() if kernel.gated and saved else 0,
        bias=bias.data_ptr() if kernel.bias else 0,
        depth=depth,
        columns=columns,
        gate=columns // 2 if swapped else 0,
        up=0 if swapped else columns // 2,
        alpha=ALPHA,
        limit=LIMIT,
    )
    if kernel.gathered:
        args.x, args.stride, args.index = x.data_ptr(), x.stride(0) // 8, index.data_ptr()
    else:
        args.a = tensor_map(x, TALL)
    error = machine.run(name, args, grid=grid, seed=seed, lanes=lanes)
    assert error == ""
    assert counters.tolist() == [len(tiles), 0, 0]

    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    sums = torch.empty(total, columns, dtype=torch.float64)
    for e in range(experts):
        sums[owner == e] = rows[owner == e].double() @ weights[e].double().T + (bias[e].double() if kernel.bias else 0)
    want = sums.bfloat16()
    if not kernel.gated:
        assert torch.equal(out.value[:total], want)
    else:
        if saved:
            assert torch.equal(h.value[:total], want)
        if swapped:
            want = torch.cat(want.chunk(2, dim=1)[::-1], dim=1)
        assert steps_apart(out.value[:total], activated(kernel.gated, want)) <= 1
    assert out.untouched_beyond(total)
    assert h.untouched_beyond(total if kernel.gated and saved else 0)


UNEVEN = ((1, 0, 63, 129, 64), (300, 65), (128, 200), (256,), (0, 0, 1))
SHAPES = (
    # columns, gated columns, depth, per_row, programs
    (192, 192, 64, 1, 2),
    (320, 160, 192, 4, 6),
    (400, 400, 128, 4, 4),
)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("kernel", ROWS, ids=lambda k: k.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[2]}")
def test_rows_of_every_expert(machine: Machine, kernel: Rows, cluster: int, shape: tuple[int, ...]) -> None:
    columns, gated, depth, per_row, grid = shape
    for seed, counts in enumerate(UNEVEN[:3] if depth == 64 else UNEVEN[2:]):
        check_rows(
            machine,
            kernel,
            f"{kernel.name}_{cluster}",
            counts,
            gated if kernel.gated else columns,
            depth,
            per_row=per_row,
            grid=grid,
            seed=seed,
            lanes=Lanes(seed),
            saved=seed != 1,
            swapped=kernel.gated == "halves" and seed == 0,
        )


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("kernel", ROWS, ids=lambda k: k.name)
def test_tiles_of_more_steps_than_the_ring_has_stages(machine: Machine, kernel: Rows, cluster: int) -> None:
    for seed in range(2):
        name = f"{kernel.name}_{cluster}"
        check_rows(machine, kernel, name, (200, 0, 65), 400, 64 * (6 + 5 * seed), per_row=2, grid=2, seed=seed)


def check_wgrad(
    machine: Machine,
    name: str,
    counts: Sequence[int],
    rows: int,
    columns: int,
    *,
    per_row: int,
    grid: int,
    seed: int,
    poisoned: int | None = None,
    lanes: Lanes = Lanes.TOGETHER,
) -> None:
    """One launch against fp64; the rows of expert ``poisoned``, those past the end and row 0 of x are NaN."""
    torch.manual_seed(seed)
    experts, total = len(counts), sum(counts)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    x = eighths(total + SPARE, rows + 8)  # one row of x for each of b, or for ``per_row`` of them
    x[:, rows:] = float("nan")
    b = eighths(total + SPARE, columns)
    b[total:] = float("nan")
    index = torch.randperm(total * per_row)[:total]
    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    if poisoned is not None:
        b[:total][owner == poisoned] = float("nan")
        x[0] = float("nan")  # what is copied where no row counts, and one expert's at most
        index[(index < per_row) & (owner != poisoned)] = per_row
    order = torch.randperm(experts).to(torch.int32)
    counters = torch.tensor([77, 0, 0], dtype=torch.int32)
    transposed = "transposed" in name
    out = Guarded((experts, columns, rows) if transposed else (experts, rows, columns))
    args = WgradArgs(
        b=tensor_map(b, 64 // cluster_of(name)),
        tiles=Tiles(order.data_ptr(), counters.data_ptr(), ends.data_ptr(), experts),
        x=x.data_ptr(),
        stride=x.stride(0) // 8,
        index=index.data_ptr(),
        divide=Divide.by(per_row),
        out=out.value.data_ptr(),
        rows=rows,
        columns=columns,
    )
    error = machine.run(name, args, grid=grid, seed=seed, lanes=lanes)
    assert error == ""
    assert counters.tolist() == [77, 0, 0]
    gathered = x[index // per_row, :rows].double()
    want = torch.stack([gathered[owner == e].T @ b[:total][owner == e].double() for e in range(experts)]).bfloat16()
    assert steps_apart(out.value.transpose(1, 2) if transposed else out.value, want) == 0
    assert out.untouched_beyond(experts)


WGRAD_SHAPES = (
    # rows, columns, per_row, programs
    (128, 192, 1, 2),
    (136, 200, 4, 6),
    (320, 96, 4, 4),
    (72, 456, 2, 4),
)


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", WGRADS)
@pytest.mark.parametrize("shape", WGRAD_SHAPES, ids=lambda s: f"{s[0]}x{s[1]}")
def test_weight_gradients_of_every_expert(machine: Machine, name: str, cluster: int, shape: tuple[int, ...]) -> None:
    rows, columns, per_row, grid = shape
    for seed, counts in enumerate(UNEVEN[:3] if columns == 200 else UNEVEN[2:]):
        poisoned = 2 if len(counts) > 2 else None
        check_wgrad(
            machine,
            f"{name}_{cluster}",
            counts,
            rows,
            columns,
            per_row=per_row,
            grid=grid,
            seed=seed,
            poisoned=poisoned,
            lanes=Lanes(seed),
        )


@pytest.mark.parametrize("cluster", [1, 2])
@pytest.mark.parametrize("name", WGRADS)
def test_weight_gradients_over_more_steps_than_the_ring_has_stages(machine: Machine, name: str, cluster: int) -> None:
    for seed in range(2):
        counts = (450, 63, 0, 384 + 65 * seed)
        check_wgrad(machine, f"{name}_{cluster}", counts, 200, 200, per_row=2, grid=2, seed=seed, poisoned=1)


@pytest.mark.parametrize("cluster", [1, 2])
def test_no_tiles_leave_everything_as_it_was(machine: Machine, cluster: int) -> None:
    for kernel in ROWS[:3]:
        check_rows(machine, kernel, f"{kernel.name}_{cluster}", (0, 0), 192, 64, per_row=1, grid=4, seed=0)


def _ranked(ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands for :func:`rowwise.largest_first`, smallest first."""
    return ends.diff(prepend=ends.new_zeros(1)).argsort().int(), ends.new_zeros(3)


@pytest.fixture(params=[1, 2], ids=["alone", "pairs"])
def core(request: pytest.FixtureRequest, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> object:
    """pingpong.py on the emulated machine."""
    pingpong = pytest.importorskip("moe_inductor.kernels.pingpong", reason="needs Triton")

    def launch(name: str, args: RowsArgs | WgradArgs, programs: int, device: torch.device) -> None:
        error = machine.run(name, args, grid=programs, seed=len(name))
        assert error == "", error

    monkeypatch.setattr(pingpong, "CLUSTER_GATHERED", request.param)
    monkeypatch.setattr(pingpong, "CLUSTER_DENSE", request.param)
    monkeypatch.setattr(pingpong, "launch", launch)
    monkeypatch.setattr(pingpong, "ready", lambda device: True)
    monkeypatch.setattr(pingpong, "tensor_map", tensor_map)
    monkeypatch.setattr(pingpong, "largest_first", _ranked)
    monkeypatch.setattr(pingpong, "_programs", lambda device, cluster: 4)
    return pingpong


CLAMPED = (
    f"mul(mul(sigmoid(mul(clamp_max(g, {LIMIT}), {ALPHA})), clamp_max(g, {LIMIT})), "
    f"add(clamp_max(clamp_min(u, -{LIMIT}), {LIMIT}), 1.0))"
)


@pytest.mark.parametrize("form", ["swiglu", "swapped", "clamped"])
def test_the_core_multiplies_and_activates(core, form: str) -> None:
    torch.manual_seed(0)
    counts, depth, inter = (70, 0, 200, 131), 128, 112
    experts, total = len(counts), sum(counts)
    x, w = eighths(total, depth), eighths(experts, 2 * inter, depth)
    bias = eighths(experts, 2 * inter) if form == "clamped" else None
    halves = {"swiglu": Halves.GATE_UP, "swapped": Halves.UP_GATE, "clamped": Halves.INTERLEAVED}[form]
    activation = CLAMPED if form == "clamped" else "swiglu"
    inner = w.mT.contiguous() if form == "clamped" else w.mT
    order = torch.randperm(2 * total)[:total]
    tall = core.tile_rows(total, experts, x.dtype)
    listed = row_tiles(counts, tall, 0)
    tiles = listed, torch.tensor([len(listed), 0, 0], dtype=torch.int32)
    assert core.takes_up(x, inner, bias, activation, halves)
    a, h = core.up(x, Gather(order, 2), inner, bias, activation, halves, tiles, save=True)
    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    exact = torch.einsum("nk,nwk->nw", x[order // 2].double(), w[owner].double())
    want = (exact + (0 if bias is None else bias[owner].double())).bfloat16()
    assert steps_apart(h, want) == 0
    if form == "swapped":
        want = torch.cat(want.chunk(2, 1)[::-1], 1)
    assert steps_apart(a, activated("interleaved" if form == "clamped" else "halves", want).bfloat16()) <= 1
    alone, none = core.up(x, Gather(order, 2), inner, bias, activation, halves, tiles, save=False)
    assert none is None and torch.equal(alone, a)


def test_the_core_takes_only_what_it_has_a_kernel_for(core) -> None:
    x, w = eighths(64, 128), eighths(4, 192, 128)
    bias = eighths(4, 192)
    for halves, activation, with_bias, inner, taken in (
        (Halves.GATE_UP, "mul(u, silu(g))", None, w.mT, True),
        (Halves.GATE_UP, "geglu", None, w.mT, False),
        (Halves.GATE_UP, "swiglu", bias, w.mT, False),
        (Halves.GATE_UP, "swiglu", None, w.mT.contiguous(), False),
        (Halves.INTERLEAVED, CLAMPED, bias, w.mT.contiguous(), True),
        (Halves.INTERLEAVED, CLAMPED.replace(f"-{LIMIT}", "-2.5"), bias, w.mT.contiguous(), False),
        (Halves.INTERLEAVED, "swiglu", bias, w.mT.contiguous(), False),
        (Halves.SINGLE, "silu", None, w.mT, False),
    ):
        assert core.takes_up(x, inner, with_bias, activation, halves) is taken, (halves, activation)
    narrow = eighths(4, 200, 128)  # 100 columns of gate: not 16 bytes at a time
    assert core.takes(x, narrow.mT) and not core.takes_up(x, narrow.mT, None, "swiglu", Halves.GATE_UP)
    assert not core.takes_up(x, narrow.mT.contiguous(), eighths(4, 200), CLAMPED, Halves.INTERLEAVED)
    odd = eighths(4 * 192 + 1)[1:].view(4, 192)  # a view into a larger parameter
    assert not core.takes_up(x, w.mT.contiguous(), odd, CLAMPED, Halves.INTERLEAVED)
    assert core.takes(x, w.mT) and core.takes(x, w.mT.contiguous())
    assert not core.takes(x[:, :96], w.mT[:, :96]), "depth"
    assert not core.takes(x.half(), w.mT.half()), "dtype"
    assert not core.takes(x.flatten()[1:-127].view(63, 128), w.mT), "alignment"
    assert core.takes_wgrad(x, w[0]) and not core.takes_wgrad(x[:, :100], w[0]) and not core.takes_wgrad(x.half(), w[0])


@pytest.mark.parametrize("in_out", [False, True])
@pytest.mark.parametrize("form", ["dense", "gathered", "biased"])
def test_the_core_multiplies_rows(core, form: str, in_out: bool) -> None:
    torch.manual_seed(1)
    counts, depth, columns = (30, 290, 64), 192, 256
    experts, total = len(counts), sum(counts)
    x, w = eighths(total, depth), eighths(experts, columns, depth)
    bias = eighths(experts, columns) if form == "biased" else None
    gather = Gather(torch.randperm(3 * total)[:total], 3) if form == "gathered" else None
    listed = row_tiles(counts, core.tile_rows(total, experts, x.dtype), 1)
    tiles = listed, torch.tensor([len(listed), 0, 0], dtype=torch.int32)
    got = core.rows_mm(x, gather, w.mT.contiguous() if in_out else w.mT, bias, tiles)
    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    read = x if gather is None else x[gather.index // 3]
    want = torch.einsum("nk,nwk->nw", read.double(), w[owner].double())
    assert steps_apart(got, (want + (0 if bias is None else bias[owner].double())).bfloat16()) == 0


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shared_rows", [90, 100], ids=["shared", "turns"])
def test_the_core_makes_weight_gradients(
    core, transposed: bool, shared_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(2)
    names, plain = [], core.launch
    monkeypatch.setattr(core, "launch", lambda name, *args: (names.append(name), plain(name, *args)))
    monkeypatch.setattr(core, "SHARED_ROWS", shared_rows)
    counts, m, n = (30, 0, 290, 64), 192, 256
    total = sum(counts)
    x, dense = eighths(total, m), eighths(total, n)
    ends = torch.tensor(counts, dtype=torch.int32).cumsum(0).to(torch.int32)
    gather = Gather(torch.randperm(3 * total)[:total], 3)
    got = core.wgrad(x, gather, dense, ends, transposed=transposed)
    read = x[gather.index // 3].double().split(list(counts))
    want = torch.stack([a.T @ b for a, b in zip(read, dense.double().split(list(counts)), strict=True)]).bfloat16()
    assert steps_apart(got.mT if transposed else got, want) == 0
    assert ["turns" in name for name in names] == [shared_rows > total / len(counts)]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("in_out", "swapped", "inter"), [(True, False, 232), (False, True, 192), (True, True, 48)])
def test_the_core_pulls_gradients_through_the_activation(
    core, in_out: bool, swapped: bool, inter: int, weighted: bool
) -> None:
    torch.manual_seed(3)
    counts, depth = (70, 0, 200, 131), 384
    experts, total = len(counts), sum(counts)
    dy, w, h = eighths(total, depth), eighths(experts, inter, depth), eighths(total, 2 * inter)
    order = torch.randperm(2 * total)[:total]
    scale = torch.rand(2 * total) if weighted else None
    listed = row_tiles(counts, core.tile_rows(total, experts, dy.dtype), 3)
    tiles = listed, torch.tensor([len(listed), 0, 0], dtype=torch.int32)
    halves = Halves.UP_GATE if swapped else Halves.GATE_UP
    inner = w.mT.contiguous() if in_out else w.mT
    assert core.takes_pull(dy, inner, h, "swiglu", halves) and not core.takes_pull(dy, inner, h, "geglu", halves)
    dh, scaled, dots = core.pull_mm(dy, Gather(order, 2), inner, h, scale, halves, tiles)
    owner = torch.repeat_interleave(torch.arange(experts), torch.tensor(counts))
    da = torch.einsum("nk,nwk->nw", dy[order // 2].double(), w[owner].double()).bfloat16().double()
    leaf = h.double().requires_grad_()
    gate, up = leaf.chunk(2, 1)[::-1] if swapped else leaf.chunk(2, 1)
    a = gate * gate.sigmoid() * up
    s = torch.ones(total, 1, dtype=torch.float64) if scale is None else scale[order, None].double()
    a.backward(da * s)
    assert leaf.grad is not None
    assert steps_apart(scaled, (s * a).detach().bfloat16()) <= 1
    # float32 arithmetic, rounded once to bf16; gradients near zero are differences of larger terms
    torch.testing.assert_close(dh.double(), leaf.grad, rtol=2**-8, atol=1e-5)
    assert dots.shape == (total, -(-inter // 192))
    torch.testing.assert_close(dots.double().sum(1), (da * a.detach()).sum(1), rtol=1e-5, atol=1e-4)
