"""Experts in parallel on the CPU: a few Python threads, each running whole experts on its share of the cores.

A matmul of 64 rows is too small for two threads: split inside each operation, the work of a layer takes 1.25 (bfloat16)
to 1.4 (float32) times as long as with one expert a thread, whose rows also stay in that core's cache. PyTorch releases
the interpreter lock inside operators. What a task computes does not depend on the thread that runs it, so results are
the same bits in any schedule.
"""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")

#: More Python threads than this would wait for the interpreter lock; further cores go to the operations.
MAX_WORKERS = 16


def worker_count() -> int:
    """How many tasks run at a time, given PyTorch's number of threads."""
    return min(torch.get_num_threads(), MAX_WORKERS)


def run_all(task: Callable[[T], object], items: Sequence[T]) -> None:
    """``task(item)`` for every item, in parallel, started in the order given; returns when all are done.

    Tasks must write to disjoint memory. Runs in the calling thread where there are fewer items than workers. An
    exception in a task is raised here.
    """
    workers = worker_count()
    if workers == 1 or len(items) < workers:
        for item in items:
            task(item)
        return
    left = deque(items)
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both are per thread
            while left:
                try:
                    item = left.popleft()
                except IndexError:
                    return
                task(item)

    for done in [_pool(workers, torch.get_num_threads()).submit(work) for _ in range(workers)]:
        done.result()


@functools.lru_cache(maxsize=4)
def _pool(workers: int, threads: int) -> ThreadPoolExecutor:
    """``workers`` threads that share ``threads`` cores."""
    ready = threading.Barrier(workers + 1)

    def start() -> None:
        torch.set_num_threads(threads // workers)
        ready.wait()

    pool = ThreadPoolExecutor(workers, thread_name_prefix="moe_inductor", initializer=start)
    for _ in range(workers):
        pool.submit(lambda: None)
    ready.wait()
    torch.set_num_threads(threads)  # threads started later take their number from the last call
    return pool


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork
