"""Grouped matmuls for Hopper in CUDA C++ (``cuda/grouped.cu``), a core of the fused families for bf16: ping-pong tiles
of 128 x 192, and clusters of two programs that share what both read of the weights. Forms that it has no kernel for are
left to the next core.

``tiles`` as in ``wgmma.py``, with up to 128 rows for each program of a cluster.
"""

from __future__ import annotations

import functools
import re

import torch
from torch import Tensor

from moe_inductor.activation import Call, Expr, parse
from moe_inductor.spec import Halves

from .cuda.driver import Divide, RowsArgs, Tiles, WgradArgs, launch, ready, tensor_map
from .family import Gather
from .rowwise import largest_first

#: Programs that share weights, 1 or 2: where rows are gathered, which each program copies at its own pace, or not.
CLUSTER_GATHERED, CLUSTER_DENSE = 1, 2
#: Rows an expert from which two warpgroups share a tile of a weight gradient; with fewer, results take longer than
#: matmuls, and the two take turns. Not measured below 1024.
SHARED_ROWS = 768
#: Rows and columns of a program's tile, columns that are loaded at a time, depth of a stage.
ROWS, COLUMNS, PART, DEPTH = 128, 192, 96, 64

_NUMBER = r"(-?[0-9.e+-]+)"
#: The factors of gpt-oss's activation, in the order of their text.
_CLAMPED = (
    re.compile(rf"add\(clamp_max\(clamp_min\(u, {_NUMBER}\), {_NUMBER}\), 1\.0\)\Z"),
    re.compile(rf"clamp_max\(g, {_NUMBER}\)\Z"),
    re.compile(rf"sigmoid\(mul\(clamp_max\(g, {_NUMBER}\), {_NUMBER}\)\)\Z"),
)


def tile_rows(n: int, experts: int, dtype: torch.dtype, *, gathered: bool = False) -> int:
    """Rows of a row tile."""
    return ROWS * _cluster(gathered)


def takes(a: Tensor, w: Tensor) -> bool:
    """Whether there is a kernel for rows of ``a`` [., in] times matrices ``w`` [E, in, out], without activation."""
    depth, columns = w.shape[1:]
    dense = w.is_contiguous() or w.transpose(1, 2).is_contiguous()
    even = depth % DEPTH == 0 and columns % 8 == 0 and a.stride(0) % 8 == 0 and a.stride(1) == 1
    aligned = a.data_ptr() % 16 == 0 and w.data_ptr() % 16 == 0
    small = _reached(a) and w.shape[0] * max(depth, columns) < 1 << 31
    return a.dtype is w.dtype is torch.bfloat16 and dense and even and aligned and small and ready(a.device)


def takes_up(x: Tensor, w: Tensor, bias: Tensor | None, activation: str, halves: Halves) -> bool:
    """Whether there is a kernel for :func:`up`. The activation's columns are stored 16 bytes at a time."""
    even = w.shape[2] % 16 == 0 and (bias is None or bias.data_ptr() % 4 == 0)
    return takes(x, w) and even and _form(w, bias, activation, halves) is not None


def takes_wgrad(gathered: Tensor, dense: Tensor) -> bool:
    """Whether there is a kernel for the weight gradient of rows ``gathered`` [., M] and ``dense`` [., N]."""
    return ready(dense.device) and all(
        t.dtype is torch.bfloat16 and t.stride(0) % 8 == 0 and t.stride(1) == 1 and t.data_ptr() % 16 == 0
        and t.shape[1] % 8 == 0 and t.shape[1] < 1 << 22 and _reached(t)
        for t in (gathered, dense)
    )  # fmt: skip


def rows_mm(a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor]) -> Tensor:
    """[N, out] like ``a``: the rows of ``a`` [N, in] (of what ``gather`` reads from it) times their expert's ``w``
    [E, in, out], plus ``bias`` [E, out], which goes with no ``gather``. Rows of no tile hold anything. ``tiles``: the
    list and its length."""
    out = a.new_empty(a.shape[0] if gather is None else gather.index.shape[0], w.shape[2])
    if bias is not None and bias.data_ptr() % 4 != 0:  # a view into a larger parameter; two columns are read at a time
        bias = bias.clone()
    name = "rows" + ("" if gather is None else "_gathered") + ("" if bias is None else "_bias")
    _run(name + ("_in_out" if w.stride(2) == 1 else ""), a, gather, w, bias, tiles, RowsArgs(out=out.data_ptr()))
    return out


def up(
    x: Tensor, gather: Gather, w: Tensor, bias: Tensor | None, activation: str, halves: Halves,
    tiles: tuple[Tensor, Tensor], *, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(a [N, I], h [N, W] or None) like ``x``: h = rows of x times ``w`` [E, in, W] plus ``bias`` [E, W], and a the
    activation of the rounded h. For what :func:`takes_up` takes."""
    form = _form(w, bias, activation, halves)
    assert form is not None
    name, alpha, limit = form
    n, width = gather.index.shape[0], w.shape[2]
    a, h = x.new_empty(n, width // 2), x.new_empty(n, width) if save else None
    args = RowsArgs(out=a.data_ptr(), h=None if h is None else h.data_ptr(), alpha=alpha, limit=limit)
    args.gate, args.up = (width // 2, 0) if halves is Halves.UP_GATE else (0, width // 2)
    _run(name, x, gather, w, bias, tiles, args)
    return a, h


def takes_pull(dy: Tensor, w: Tensor, h: Tensor, activation: str, halves: Halves) -> bool:
    """Whether there is a kernel for :func:`pull_mm`."""
    form = _factors(parse(activation)) == ["silu(g)", "u"] and halves in (Halves.GATE_UP, Halves.UP_GATE)
    return form and takes(dy, w) and h.dtype is dy.dtype and h.data_ptr() % 16 == 0


def pull_mm(
    dy: Tensor, gather: Gather, w: Tensor, h: Tensor, scale: Tensor | None, halves: Halves,
    tiles: tuple[Tensor, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dh [N, 2I], s * a [N, I], float32 [N, C]) of the activation of ``h`` [N, 2I], where da, the gradient of a before
    the routing weight, is the rows of ``dy`` that ``gather`` reads times their expert's ``w`` [E, in, I], rounded. The
    last sum to da . a over the columns. ``scale``: s, float32, of each slot; ``gather.index`` has slots. Rows of no
    tile hold anything. For what :func:`takes_pull` takes."""
    n, inter = gather.index.shape[0], w.shape[2]
    dh, scaled = torch.empty_like(h), h.new_empty(n, inter)
    dots = h.new_empty(n, -(-inter // COLUMNS), dtype=torch.float32)
    args = RowsArgs(out=scaled.data_ptr(), h=dh.data_ptr(), saved=h.data_ptr(), dots=dots.data_ptr())
    args.scale = None if scale is None else scale.data_ptr()
    args.gate, args.up = (inter, 0) if halves is Halves.UP_GATE else (0, inter)
    _run("pull_silu" + ("_in_out" if w.stride(2) == 1 else ""), dy, gather, w, None, tiles, args)
    return dh, scaled, dots


def wgrad(gathered: Tensor, gather: Gather, dense: Tensor, offsets: Tensor, *, transposed: bool) -> Tensor:
    """[E, M, N] like ``dense``, the sum over each expert's rows of gathered^T dense, for the rows [., M] that
    ``gather`` reads and ``dense`` [rows, N]; ``transposed``: [E, N, M]. Zero for experts without rows."""
    m, n, experts = gathered.shape[1], dense.shape[1], offsets.shape[0]
    out = dense.new_empty((experts, n, m) if transposed else (experts, m, n))
    ranked, counters = largest_first(offsets)
    cluster = _cluster(True)
    args = WgradArgs(
        b=tensor_map(dense, DEPTH // cluster, 64),
        tiles=Tiles(ranked.data_ptr(), counters.data_ptr(), offsets.data_ptr(), experts),
        x=gathered.data_ptr(), stride=gathered.stride(0) // 8, index=gather.index.data_ptr(),
        divide=Divide.by(gather.slots), out=out.data_ptr(), rows=m, columns=n,
    )  # fmt: skip
    turns = gather.index.shape[0] < SHARED_ROWS * experts
    name = f"wgrad{'_transposed' if transposed else ''}{'_turns' if turns else ''}"
    launch(f"{name}_{cluster}", args, _programs(dense.device, cluster), dense.device)
    return out


def _form(w: Tensor, bias: Tensor | None, activation: str, halves: Halves) -> tuple[str, float, float] | None:
    """(kernel, alpha, limit) of :func:`up`, None where there is none."""
    in_out = w.stride(2) == 1
    if halves in (Halves.GATE_UP, Halves.UP_GATE) and bias is None and not in_out:
        return ("up_silu", 0.0, 0.0) if _factors(parse(activation)) == ["silu(g)", "u"] else None
    if halves is Halves.INTERLEAVED and bias is not None and in_out:
        constants = clamped(activation)
        return None if constants is None else ("up_clamped_bias", *constants)
    return None


def clamped(activation: str) -> tuple[float, float] | None:
    """(alpha, limit) where ``activation`` is (clamp(u, -limit, limit) + 1) * g' * sigmoid(alpha * g'), g' = min(g,
    limit), else None."""
    factors = _factors(parse(activation))
    if len(factors) != len(_CLAMPED):
        return None
    found = [pattern.match(factor) for pattern, factor in zip(_CLAMPED, factors, strict=True)]
    if not all(found):
        return None
    low, *limits, alpha = (float(number) for match in found if match for number in match.groups())
    return (alpha, limits[0]) if {*limits, -low} == {limits[0]} and limits[0] > 0 else None


def _factors(expr: Expr) -> list[str]:
    """The text of the factors of a product, sorted: a product may be spelled in any order."""
    if isinstance(expr, Call) and expr.op == "mul":
        return sorted(factor for arg in expr.args for factor in _factors(arg))
    return [str(expr)]


def _run(
    name: str, a: Tensor, gather: Gather | None, w: Tensor, bias: Tensor | None, tiles: tuple[Tensor, Tensor],
    args: RowsArgs,
) -> None:  # fmt: skip
    cluster = _cluster(gather is not None)
    if w.stride(2) == 1:
        args.b = tensor_map(w.flatten(0, 1), DEPTH // cluster, 64)
    else:
        args.b = tensor_map(w.transpose(1, 2).flatten(0, 1), PART, DEPTH)
    if gather is None:
        args.a = tensor_map(a, ROWS, DEPTH)
    else:
        args.x, args.stride = a.data_ptr(), a.stride(0) // 8
        args.index, args.divide = gather.index.data_ptr(), Divide.by(gather.slots)
    if bias is not None:
        args.bias = bias.data_ptr()
    args.tiles = Tiles(tiles[0].data_ptr(), tiles[1].data_ptr(), None, w.shape[0])
    args.depth, args.columns = w.shape[1], w.shape[2]
    launch(f"{name}_{cluster}", args, _programs(a.device, cluster), a.device)


def _reached(t: Tensor) -> bool:
    """Whether rows of ``t`` have 31-bit numbers, and lie at 32-bit multiples of 16 bytes as the gathers count them."""
    return 0 < t.shape[0] < 1 << 31 and t.shape[0] * t.stride(0) < 1 << 35


def _cluster(gathered: bool) -> int:  # noqa: FBT001
    return CLUSTER_GATHERED if gathered else CLUSTER_DENSE


@functools.cache
def _programs(device: torch.device, cluster: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count // cluster * cluster
