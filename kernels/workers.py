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
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch

T = TypeVar("T")

#: More Python threads than this would wait for the interpreter lock.
MAX_WORKERS = 16

_LIBRARY = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
_Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def worker_count() -> int:
    """How many tasks run at a time, given PyTorch's number of threads; 1 where PyTorch does not run on an OpenMP
    runtime that can be called (macOS, Windows) and in a forked process (GCC's runtime does not survive a fork): its
    operators then use their own threads."""
    return 1 if _fork_region() is None else min(torch.get_num_threads(), MAX_WORKERS)


def run_all(task: Callable[[T], object], items: Sequence[T], *, share: bool = True) -> None:
    """``task(item)`` for every item, in parallel, started in the order given; returns when all are done.

    Tasks must write to disjoint memory; they see the caller's inference mode, no gradients and no autocast. All run in
    the calling thread where ``share`` is false, which is faster for little work, or there are fewer items than workers,
    then with threads inside each operation. An exception in a task is raised here, after the tasks already started.
    Raises KeyboardInterrupt where a signal ended the caller's part.
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
            finished = True  # last: signal handlers run where functions begin and calls end, and ctypes drops errors

    if fork_region is None or workers == 1:
        work(None)
    elif not share:
        with _alone():
            work(None)
    elif len(items) < workers:
        work(None)
    else:
        fork_region(_Body(work), None, workers, 0)
    if raised:
        raise raised.pop(0)
    if not finished:
        raise KeyboardInterrupt


def _no_autocast() -> AbstractContextManager[object]:
    return torch.autocast("cpu", enabled=False) if torch.is_autocast_enabled("cpu") else nullcontext()


@contextmanager
def _alone() -> Iterator[None]:
    """This thread's operators start no other threads. With the second core busy, a bf16 matmul of 4 rows by 512 x 512
    took 10 ms on two threads and 0.1 ms on one."""
    omp, mkl = _thread_setters()
    threads, before = torch.get_num_threads(), 0
    try:
        omp(1)
        before = mkl(1)
        yield
    finally:
        omp(threads)
        mkl(before)


@functools.cache
def _thread_setters() -> tuple[Callable[[int], Any], Callable[[int], int]]:
    """OpenMP's and MKL's number of threads for the calling thread; MKL's returns the one before, 0 for the global."""
    library = ctypes.PyDLL(_LIBRARY)  # keeps the interpreter lock: another thread would hold it for milliseconds
    return library.omp_set_num_threads, getattr(library, "MKL_Set_Num_Threads_Local", lambda _: 0)


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
    if _forked or "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        entry = ctypes.CDLL(_LIBRARY).GOMP_parallel  # searches what the library itself is linked to
    except (OSError, AttributeError):
        return None
    entry.argtypes, entry.restype = (_Body, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return entry
