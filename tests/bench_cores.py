"""The grouped matmuls of one layer, core against core and against one dense matmul of the same size, on a GPU.

    python tests/bench_cores.py [--shapes 30B,235B] [--products dX] [pingpong pingpong:CLUSTER_DENSE=1]

Training form, bf16, 16384 tokens, uniform routing. For each: ms of a run from idle (the median of five), ms, TF/s, SM
clock and power of runs back to back, where the card settles at its limit of power, and the largest difference from the
first core's result over that result's largest value. After a colon a core's constants have other values; ``cubin`` is
the file that ``pingpong`` loads.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from unittest import mock

import torch
from torch import Tensor

from moe_inductor.kernels import rowwise
from moe_inductor.kernels.cuda import driver
from moe_inductor.kernels.family import Gather, Rows
from moe_inductor.spec import Halves

#: Hidden size, expert inner width, experts, experts of a token.
SHAPES = {
    "30B": (2048, 768, 128, 8),
    "235B": (4096, 1536, 128, 8),
    "olmoe": (2048, 1024, 64, 8),
    "mixtral": (4096, 14336, 8, 2),
    "deepseek": (7168, 2048, 256, 8),
    "gpt-oss": (2880, 2880, 32, 4),
}
TOKENS = 16384
BF16 = torch.bfloat16


def normal(*size: int) -> Tensor:
    return torch.randn(*size, device="cuda", dtype=BF16)


def products(shape: str) -> Iterator[tuple[str, tuple[int, int, int], Callable[[object], Tensor]]]:
    """(name, (M, N, K) of the dense matmul, the product by a core)."""
    hidden, inter, experts, top_k = SHAPES[shape]
    idx = torch.rand(TOKENS, experts, device="cuda").topk(top_k).indices
    rows = Rows(*rowwise.sort_by_expert(idx, experts)[:3], top_k)
    n, gather = TOKENS * top_k, Gather(rows.order, top_k)
    lists: dict[int, tuple[Tensor, Tensor]] = {}

    def tiles(core, gathered: bool) -> tuple[Tensor, Tensor]:
        tall = core.tile_rows(n, experts, BF16, gathered=gathered)
        return lists.setdefault(tall, rowwise.row_tiles(rows, tall))

    x, dy, a, dh = normal(TOKENS, hidden), normal(TOKENS, hidden), normal(n, inter), normal(n, 2 * inter)
    w1, w2 = (normal(experts, out, into) * into**-0.5 for out, into in ((2 * inter, hidden), (hidden, inter)))

    def up(core) -> Tensor:
        made = core.up(x, gather, w1.mT, None, "swiglu", Halves.GATE_UP, tiles(core, True), save=True)
        return made[0]

    yield "up", (n, 2 * inter, hidden), up
    yield "down", (n, hidden, inter), lambda core: core.rows_mm(a, None, w2.mT, None, tiles(core, False))
    yield "dA", (n, inter, hidden), lambda core: core.rows_mm(dy, gather, w2, None, tiles(core, True))
    yield "dX", (n, hidden, 2 * inter), lambda core: core.rows_mm(dh, None, w1, None, tiles(core, False))
    yield "dW1", (2 * inter, hidden, n), lambda core: core.wgrad(x, gather, dh, rows.offsets, transposed=True)
    yield "dW2", (hidden, inter, n), lambda core: core.wgrad(dy, gather, a, rows.offsets, transposed=False)


def from_idle(fn: Callable[[], object]) -> float:
    """ms of a run after the card has rested."""
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        time.sleep(0.05)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        fn()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times)


def sustained(fn: Callable[[], object], seconds: float) -> tuple[float, float, float]:
    """(ms, MHz, W) of runs back to back, the first third left out of clock and power."""
    once = from_idle(fn)
    count = max(3, int(1e3 * seconds / once))
    with tempfile.TemporaryFile("w+") as log:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits", "-lms", "20"]
        with subprocess.Popen(query, stdout=log, stderr=subprocess.DEVNULL) as watch:
            time.sleep(0.2)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(count):
                fn()
            end.record()
            end.synchronize()
            watch.terminate()
        log.seek(0)
        seen = [tuple(map(float, line.split(","))) for line in log if line.count(",") == 1]
    busy = sorted(seen, key=lambda pair: pair[1])[-max(1, int(0.5 * seconds / 0.02)) :]
    clock, power = (statistics.median(column) for column in zip(*busy, strict=True)) if busy else (0.0, 0.0)
    return start.elapsed_time(end) / count, clock, power


def report(name: str, flops: float, fn: Callable[[], object], seconds: float, differs: str = "") -> None:
    fn()
    first = from_idle(fn)
    ms, clock, power = sustained(fn, seconds)
    print(f"{name:28s} first {first:7.3f} ms  sustained {ms:7.3f} ms {flops / ms / 1e9:5.0f} TF/s {clock:5.0f} MHz "
          f"{power:4.0f} W {differs}", flush=True)  # fmt: skip


@contextlib.contextmanager
def configured(label: str) -> Iterator[ModuleType]:
    """The core that ``label`` names, with its constants. AttributeError for one that it does not have."""
    core_name, _, changes = label.partition(":")
    core = importlib.import_module(f"moe_inductor.kernels.{core_name}")
    with contextlib.ExitStack() as stack:
        for name, value in (change.split("=") for change in changes.split(",") if change):
            module, new = (driver, Path(value)) if name == "cubin" else (core, int(value))
            stack.enter_context(mock.patch.object(module, name.upper(), new))
        for cached in (driver._library, driver._kernel, driver.ready):
            cached.cache_clear()
        yield core


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="30B")
    parser.add_argument("cores", nargs="*", default=["wgmma", "pingpong"], metavar="CORE[:NAME=VALUE,...]")
    parser.add_argument("--products", default="up,down,dA,dX,dW1,dW2")
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    torch.manual_seed(0)
    for shape in args.shapes.split(","):
        for name, (m, n, k), fn in products(shape):
            if name not in args.products.split(","):
                continue
            left, right = normal(m, k), normal(k, n)
            report(f"{shape} {name} dense", 2 * m * n * k, lambda a=left, b=right: a @ b, args.seconds)
            del left, right
            reference: Tensor | None = None
            for label in args.cores:
                with configured(label) as core:
                    try:
                        got = fn(core).float()
                        torch.cuda.synchronize()
                    except Exception as error:  # the other cores still count
                        print(f"{shape} {name} {label}: {error}", flush=True)
                        continue
                    reference = got if reference is None else reference
                    off = float((got - reference).abs().max() / reference.abs().max())
                    del got
                    run = functools.partial(fn, core)
                    report(f"{shape} {name} {label}", 2 * m * n * k, run, args.seconds, f"off {off:.1e}")


if __name__ == "__main__":
    main()
