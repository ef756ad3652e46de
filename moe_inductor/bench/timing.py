"""Clocks. On CUDA a job is a CUDA graph, replayed after the second-level cache was overwritten and timed by events;
what cannot be captured is called as it is, and says so. On a CPU a job is called and the clock is the host's."""

from __future__ import annotations

import gc
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

#: More than twice the largest second-level cache of a GPU so far.
FLUSH_BYTES = 256 << 20
DISCARDED = 3


@dataclass(slots=True)
class Job:
    """Something to time. ``uncaptured`` says why there is no graph, ``outputs`` are those of the graph."""

    run: Callable[[], object]
    captured: bool = False
    uncaptured: str = ""
    outputs: list[Tensor] = field(default_factory=list)


class Clock:
    """The host's clock, for a CPU. The methods are those that the benchmarks need of any device."""

    device = "cpu"

    @contextmanager
    def session(self) -> Iterator[None]:
        """Where operands are made and everything runs."""
        yield

    def job(self, fn: Callable[[], object], uncaptured: str = "") -> Job:
        """``fn`` made ready to be timed."""
        for _ in range(2):
            fn()
        return Job(fn, uncaptured=uncaptured or "no CUDA device")

    def once(self, job: Job, *, flush: bool) -> float:
        """ms of one run."""
        start = time.perf_counter()
        job.run()
        return 1e3 * (time.perf_counter() - start)

    def laps(self, step: Callable[[], object], count: int) -> list[float]:
        """ms of each of ``count`` steps that follow one another."""
        marks = [time.perf_counter()]
        for _ in range(count):
            step()
            marks.append(time.perf_counter())
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Wait for the device."""

    def allocated(self) -> int:
        """Bytes that are held; 0 where that cannot be known."""
        return 0

    def peak(self, fn: Callable[[], object]) -> int | None:
        """Bytes that ``fn`` and its results add at most; None where that cannot be known."""
        return None

    def poison(self) -> None:
        """Leave NaN in memory that will be handed out again."""


class CudaClock(Clock):
    """CUDA graphs on one side stream, which is current for all work of the session, operands included: a backward runs
    on the stream of its forward, and every tensor belongs to the stream that is captured."""

    device = "cuda"

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
        self.pool: Any = None

    @contextmanager
    def session(self) -> Iterator[None]:
        """Make the side stream current; graphs of a session share one memory pool."""
        self.stream.wait_stream(torch.cuda.current_stream())
        before = torch.cuda.current_stream()
        torch.cuda.set_stream(self.stream)
        self.pool = torch.cuda.graph_pool_handle()
        try:
            yield
        finally:
            self.stream.synchronize()
            torch.cuda.set_stream(before)
            self.pool = None
            release()

    def job(self, fn: Callable[[], object], uncaptured: str = "") -> Job:
        """Capture ``fn`` after two calls of it. That nothing in it waits for the device is what a capture proves.

        Graphs share memory: a replay overwrites the outputs of the others.
        """
        for _ in range(2):
            fn()
        torch.cuda.synchronize()
        if uncaptured:
            return Job(fn, uncaptured=uncaptured)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                made = fn()
        except RuntimeError as error:
            self.synchronize()
            return Job(fn, uncaptured=str(error).strip().splitlines()[0])
        return Job(graph.replay, captured=True, outputs=tensors(made))

    def once(self, job: Job, *, flush: bool) -> float:
        """ms between two events around one run. The flush also hides the launch behind work of its own."""
        if flush:
            self.flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        job.run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def laps(self, step: Callable[[], object], count: int) -> list[float]:
        """ms between events around each step; the host runs ahead, as in training."""
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        marks[0].record()
        for mark in marks[1:]:
            step()
            mark.record()
        torch.cuda.synchronize()
        return [float(a.elapsed_time(b)) for a, b in itertools.pairwise(marks)]

    def synchronize(self) -> None:
        """Wait for the device."""
        torch.cuda.synchronize()

    def allocated(self) -> int:
        """Bytes of live tensors."""
        return torch.cuda.memory_allocated()

    def peak(self, fn: Callable[[], object]) -> int | None:
        """Peak of allocated bytes during ``fn`` over those before; its results are alive until the peak is read."""
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        made = fn()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
        del made
        return peak

    def poison(self) -> None:
        """Write NaN over free memory (half of it, at most 40 GiB) and hand it back to the allocator, which serves from
        it next. What is kept from such memory keeps all of it: move results to the host."""
        release()
        size = min(torch.cuda.mem_get_info()[0] // 2, 40 << 30)
        torch.empty(size // 2, dtype=torch.bfloat16, device="cuda").fill_(float("nan"))


def clock(device: str) -> Clock:
    """The clock of a device type."""
    return CudaClock() if device == "cuda" else Clock()


def release() -> None:
    """Give memory that nobody holds back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def tensors(value: object) -> list[Tensor]:
    """The tensors in a result."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in tensors(item)]
    return []


def replays_truly(clock: Clock, job: Job, expected: Sequence[Tensor]) -> dict[str, Any]:
    """Fill the graph's outputs with NaN, replay, and compare: ``finite`` for all of them, ``difference`` the largest
    relative one from the leading outputs in ``expected``. Drops the outputs, whose memory other graphs may take."""
    if not job.captured:
        return {}
    for out in job.outputs:
        out.detach().fill_(float("nan"))
    job.run()
    clock.synchronize()
    finite = all(bool(out.isfinite().all()) for out in job.outputs)
    pairs = zip(job.outputs, expected, strict=False)
    gaps = [math.inf if math.isnan(gap := _gap(got, true.to(got.device))) else gap for got, true in pairs]
    job.outputs = []
    return {"finite": finite, "difference": max(gaps, default=0.0)}


def _gap(got: Tensor, true: Tensor) -> float:
    return float((got.float() - true.float()).norm() / true.float().norm())


def interleave(
    clock: Clock, jobs: Mapping[Any, Job], samples: int, *, flush: bool = True, seed: int = 0
) -> dict[Any, list[float]]:
    """ms of ``samples`` runs of each job after DISCARDED others, all jobs once a round in an order drawn anew."""
    order, draw = list(jobs), random.Random(seed)
    times: dict[Any, list[float]] = {key: [] for key in jobs}
    for turn in range(DISCARDED + samples):
        draw.shuffle(order)
        for key in order:
            ms = clock.once(jobs[key], flush=flush)
            if turn >= DISCARDED:
                times[key].append(ms)
    return times


def summary(samples: Sequence[float]) -> dict[str, Any]:
    """Median and minimum in ms beside the samples."""
    return {"median": statistics.median(samples), "min": min(samples), "samples": [round(s, 5) for s in samples]}


def host_ms(clock: Clock, fn: Callable[[], object], repeats: int = 20) -> float:
    """Median ms that the host needs to issue ``fn``, the device idle before."""
    taken = []
    for _ in range(repeats):
        clock.synchronize()
        start = time.perf_counter()
        fn()
        taken.append(1e3 * (time.perf_counter() - start))
    clock.synchronize()
    return statistics.median(taken)
