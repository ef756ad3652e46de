"""Experts in parallel on the CPU: the threads of one OpenMP region, each running whole experts on its own core.

A matmul of 64 rows is too small for two threads: split inside each operation, the work of a layer takes 1.25 (bfloat16)
to 1.4 (float32) times as long as with one expert a thread, whose rows also stay in that core's cache. Inside a parallel
region PyTorch's operators, oneDNN and MKL run on the thread that calls them, and release the interpreter lock. The
threads are those of PyTorch's own OpenMP runtime: threads of ours would compete for the cores with its helpers, which
spin for milliseconds after each operation. What a task computes does not depend on the thread that runs it, so results
are the same bits in any schedule.
"""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: More Python threads than this would wait for the interpreter lock.
MAX_WORKERS = 16

_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def worker_count() -> int:
    """How many tasks run at a time, given PyTorch's number of threads; 1 where PyTorch does not run on an OpenMP
    runtime that can be called (macOS, Windows) and in a forked process (GCC's runtime does not survive a fork): its
    operators then use their own threads."""
    return 1 if _fork_region() is None else min(torch.get_num_threads(), MAX_WORKERS)


def run_all(task: Callable[[T], object], items: Sequence[T], *, share: bool = True) -> None:
    """``task(item)`` for every item, in parallel, started in the order given; returns when all are done.

    Tasks must write to disjoint memory; they see the caller's inference mode, no gradients and no autocast. Runs in the
    calling thread, with threads inside each operation, where there are fewer items than workers or ``share`` is false.
    An exception in a task is raised here, after the tasks already started. Raises KeyboardInterrupt where a signal
    ended the caller's part.
    """
    workers, fork_region = worker_count(), _fork_region()
    left = deque(items)
    raised: list[BaseException] = []
    inference = torch.is_inference_mode_enabled()
    caller, finished = threading.get_ident(), False

    def work(_: int | None) -> None:
        nonlocal finished
        try:
            with torch.inference_mode() if inference else torch.no_grad(), _no_autocast():  # all are per thread
                while left and not raised:
                    try:
                        item = left.popleft()
                    except IndexError:
                        break
                    task(item)
        except BaseException as e:  # nothing may leave a callback; raised below
            raised.append(e)
        if threading.get_ident() == caller:
            finished = True  # last: Python runs signal handlers where functions begin and after calls, ctypes drops theirs

    if not share or workers == 1 or fork_region is None or len(items) < workers:
        work(None)
    else:
        fork_region(_Body(work), None, workers, 0)
    if raised:
        raise raised.pop(0)
    if not finished:
        raise KeyboardInterrupt


def _no_autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True
    _fork_region.cache_clear()


os.register_at_fork(after_in_child=_after_fork)


@functools.cache
def _fork_region() -> Any | None:
    """``GOMP_parallel(body, data, threads, flags)`` of the OpenMP runtime PyTorch uses, the entry that GCC's, LLVM's
    and Intel's runtimes share on Linux; None where there is none."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    if _forked or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        entry = ctypes.CDLL(library).GOMP_parallel  # searches what the library itself is linked to
    except (OSError, AttributeError):
        return None
    entry.argtypes, entry.restype = (_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return entry
