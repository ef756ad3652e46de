"""Experts in parallel on the CPU: same results in any number of threads, and no trace left in the process."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import pytest
import torch
from experts_case import cut, make, run, spec_of, whole

from moe_inductor.kernels import cpu, workers


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


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_tasks_run_in_the_same_modes_on_every_path(*, share: bool, inference: bool) -> None:
    def modes() -> tuple[bool, bool, bool]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

    seen: list[tuple[bool, bool, bool]] = []
    with torch.inference_mode(inference), torch.autocast("cpu", torch.bfloat16):
        before = modes()
        workers.run_all(lambda i: seen.append(modes()), range(4), share=share)
        assert modes() == before == (inference, not inference, True)
    assert seen == [(inference, False, False)] * 4


def test_tasks_that_are_not_shared_run_in_the_caller_on_one_thread() -> None:
    seen: list[tuple[int, int]] = []
    workers.run_all(lambda i: seen.append((threading.get_ident(), torch.get_num_threads())), range(8), share=False)
    assert seen == [(threading.get_ident(), 1)] * 8
    assert torch.get_num_threads() == 2
    with pytest.raises(ZeroDivisionError):
        workers.run_all(lambda i: 1 / i, range(8), share=False)
    assert torch.get_num_threads() == 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # ctypes reports it as well
@pytest.mark.parametrize(("moment", "of"), [("call", None), ("c_return", threading.get_ident)], ids=["begin", "end"])
def test_an_interrupt_at_the_edge_of_the_callback_is_raised(moment: str, of: object) -> None:
    """Python runs a signal's handler as the caller's callback begins, or as its last call returns: ctypes prints what
    is raised there and goes on."""

    def interrupt(frame: FrameType, event: str, function: object) -> None:
        ours = frame.f_code.co_name == "work" and frame.f_code.co_filename == workers.__file__
        if ours and event == moment and function is of:
            sys.setprofile(None)
            raise KeyboardInterrupt

    done: list[int] = []
    sys.setprofile(interrupt)  # in this thread alone
    try:
        with pytest.raises(KeyboardInterrupt):
            workers.run_all(done.append, range(8))
    finally:
        sys.setprofile(None)
    assert sorted(done) == list(range(8))  # the other thread, or this one before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_no_interrupt_is_lost() -> None:
    def handler(*_: object) -> None:
        hits.append(1)
        raise KeyboardInterrupt

    hits: list[int] = []
    raised = 0
    draw = random.Random(0)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        for _ in range(60):
            done: list[int] = []
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 3e-3))
                workers.run_all(lambda i, done=done: done.append(sum(range(20_000))), range(6))
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert len(done) == 6
            except KeyboardInterrupt:
                raised += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        torch.set_grad_enabled(True)  # an interrupt may also have ended the exit of no_grad
    assert raised == len(hits) > 0


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


@pytest.mark.parametrize("least", [0, 1 << 60], ids=["shared", "alone"])
@pytest.mark.parametrize("form", [cut, whole])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_experts_give_the_bits_of_one_thread(
    dtype: torch.dtype, form: Callable[..., torch.Tensor], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(dtype, experts=8)
    o = make(spec, dtype, tokens=300, biases=True, dropped=True)
    torch.set_num_threads(1)
    want = run(form, o.copied(), spec, "cpu/auto")
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu, "MIN_SHARED", least)
    shared = _shares(monkeypatch)
    got = run(form, o.copied(), spec, "cpu/auto")
    assert set(shared) == {least == 0}
    assert all(torch.equal(t, want[name]) for name, t in got.items() if t is not None)


def test_little_work_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(torch.float32, experts=8)
    o = make(spec, torch.float32, tokens=16, hidden=256, inter=128)  # 2^21 multiply-adds in up, 2^20 in down
    shared = _shares(monkeypatch)
    for least, expected in (
        (cpu.MIN_SHARED, [False, False, False, True]),  # up, down, and both gradients of each: 2^21 and 2^22
        (1 << 21, [True, False, True, True]),
        ((1 << 22) + 1, [False] * 4),
    ):
        monkeypatch.setattr(cpu, "MIN_SHARED", least)
        shared.clear()
        run(cut, o.copied(), spec, "cpu/auto")
        assert shared == expected


def _shares(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What the kernels tell ``run_all`` from now on."""
    seen: list[bool] = []

    def run_all(task: Callable[..., object], items: Sequence[object], *, share: bool) -> None:
        seen.append(share)
        workers.run_all(task, items, share=share)

    monkeypatch.setattr(cpu, "run_all", run_all)
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_inference_tensors_and_parameters(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "MIN_SHARED", 0)
    spec = spec_of(dtype, experts=8)
    o = make(spec, dtype, tokens=300)
    want = run(whole, o, spec, "cpu/auto")["y"]
    with torch.inference_mode():
        again = whole(o.copied(), spec, "cpu/auto")
    assert torch.equal(again, want)
