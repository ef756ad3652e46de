"""Experts in parallel on the CPU: same results in any number of threads, and no trace left in the process."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from experts_case import make, run, spec_of, whole

from moe_inductor.kernels import workers


@pytest.fixture(autouse=True)
def _two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_every_item_runs_once_on_two_threads() -> None:
    both = threading.Barrier(2, timeout=60)
    seen: list[tuple[int, int]] = []

    def task(i: int) -> None:
        if i < 2:
            both.wait()  # passes only where two tasks run at a time
        seen.append((i, threading.get_ident()))

    workers.run_all(task, range(50))
    assert sorted(i for i, _ in seen) == list(range(50))
    assert len({t for _, t in seen}) == 2
    assert torch.get_num_threads() == 2


def test_operators_in_a_task_stay_on_its_thread() -> None:
    a = torch.randn(2, 512, 512)
    out = torch.empty(2, 512, 512)
    workers.run_all(lambda i: torch.mm(a[i], a[i], out=out[i]), range(2))
    assert torch.equal(out, torch.stack([a[i] @ a[i] for i in range(2)]))


def test_tasks_see_the_callers_inference_mode_and_no_gradient() -> None:
    seen: list[tuple[bool, bool]] = []
    with torch.inference_mode():
        workers.run_all(lambda i: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())), range(4))
    workers.run_all(lambda i: seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled())), range(4))
    assert seen == [(True, False)] * 4 + [(False, False)] * 4


def test_a_failing_task_raises_in_the_caller() -> None:
    def task(i: int) -> None:
        if i == 3:
            raise RuntimeError("task 3")

    with pytest.raises(RuntimeError, match="task 3"):
        workers.run_all(task, range(8))


def test_one_thread_needs_no_workers() -> None:
    torch.set_num_threads(1)
    seen: list[int] = []
    workers.run_all(lambda i: seen.append(threading.get_ident()), range(8))
    assert set(seen) == {threading.get_ident()}


def test_without_an_openmp_runtime_tasks_run_in_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "_fork_region", lambda: None)
    seen: list[int] = []
    workers.run_all(lambda i: seen.append(threading.get_ident()), range(8))
    assert workers.worker_count() == 1
    assert seen == [threading.get_ident()] * 8


def test_a_forked_child_works_in_its_one_thread() -> None:
    workers.run_all(lambda i: None, range(8))
    child = os.fork()
    if child == 0:
        seen: list[int] = []
        workers.run_all(seen.append, range(8))
        os._exit(0 if seen == list(range(8)) and workers.worker_count() == 1 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inference_tensors_and_parameters(dtype: torch.dtype) -> None:
    spec = spec_of(dtype, experts=8)
    o = make(spec, dtype, tokens=300)
    want = run(whole, o, spec, "cpu/auto")["y"]
    with torch.inference_mode():
        again = whole(o.copied(), spec, "cpu/auto")
    assert torch.equal(again, want)
