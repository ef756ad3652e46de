"""A kernel that computes something else is found out before it is used."""

import contextlib

import pytest
import torch
from torch._dynamo.utils import counters

from moe_inductor import opdef
from moe_inductor.kernels import cpu
from moe_inductor.passes import verdicts, verify
from moe_inductor.report import last, report, reset
from tests import models


@pytest.fixture(autouse=True)
def clean(monkeypatch, tmp_path):
    """No verdict of another test is remembered, and none of these outlives them."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    reset()


def swapped_tokens(result):
    return result.roll(1, 0)


def off_by_a_percent(result):
    return result * 1.01


def one_entry(result):
    spoiled = result.clone()
    spoiled.view(-1)[-1] += spoiled.abs().max()
    return spoiled


def half_zeroed(result):
    return torch.cat([result[: result.shape[0] // 2], torch.zeros_like(result[result.shape[0] // 2 :])])


def broken(kernel, spoil, at=None):
    """``kernel`` with its result, or its result number ``at``, spoiled."""

    def run(*args):
        out = kernel(*args)
        if at is None:
            return spoil(out)
        return tuple(spoil(o) if i == at and o is not None else o for i, o in enumerate(out))

    return run


def outcome(mode=contextlib.nullcontext, options=None, backward=True):
    """The step of a compiled block is eager's; gives the report's last entry."""
    model = models.Residual()
    twin, x = models.eager_twin(model), models.rows(1, 9, models.HIDDEN)
    call = torch.compile(model, backend=models.aot_eager(), options=options)
    if backward:
        models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))
    else:
        with mode():
            models.assert_equal({"y": call(x)}, {"y": twin(x)})
    return last()


def assert_refused(entry):
    assert [r.code for r in entry.refused] == ["verify"] and not entry.fused
    assert counters["megamoe"]["refused:verify"] == 1
    assert "allowed" in entry.refused[0].why and "moe.py:" in entry.refused[0].where


@pytest.mark.parametrize("spoil", [swapped_tokens, off_by_a_percent, one_entry, half_zeroed])
@pytest.mark.parametrize(("kernel", "at"), [("up", 0), ("down", None)])
def test_a_wrong_forward_is_refused_in_training(monkeypatch, kernel, at, spoil):
    monkeypatch.setattr(cpu, kernel, broken(getattr(cpu, kernel), spoil, at))
    assert_refused(outcome())


@pytest.mark.parametrize("spoil", [off_by_a_percent, one_entry])
@pytest.mark.parametrize(
    ("kernel", "at"),
    [("up_backward", 0), ("up_backward", 1), ("down_backward", 0), ("down_backward", 1), ("down_backward", 2)],
)
def test_a_wrong_gradient_is_refused(monkeypatch, kernel, at, spoil):
    monkeypatch.setattr(cpu, kernel, broken(getattr(cpu, kernel), spoil, at))
    entry = outcome()
    assert_refused(entry)
    assert "the gradient of" in entry.refused[0].why


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_wrong_forward_is_refused_without_gradients(monkeypatch, mode):
    monkeypatch.setattr(cpu, "experts", broken(cpu.experts, off_by_a_percent))
    assert_refused(outcome(mode, backward=False))


def test_a_kernel_that_raises_is_refused(monkeypatch):
    def raises(*args):
        raise RuntimeError("no such tile")

    monkeypatch.setattr(cpu, "down", raises)
    entry = outcome()
    assert_refused(entry)
    assert "no such tile" in entry.refused[0].why


def test_switched_off_it_lets_everything_through(monkeypatch):
    monkeypatch.setattr(cpu, "down", broken(cpu.down, off_by_a_percent))
    with pytest.raises(AssertionError, match="differs"):
        outcome(options={"moe.verify": "off"})
    assert "moe.verify is off" in last().fused[0].verified


def test_the_random_state_and_the_weights_stay():
    model, x = models.Residual(), models.rows(1, 9, models.HIDDEN)
    weights, state = [p.detach().clone() for p in model.parameters()], torch.get_rng_state()
    torch.compile(model, backend=models.aot_eager())(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, w) and p.grad is None for p, w in zip(model.parameters(), weights, strict=True))
    assert "verified: " in last().fused[0].verified


def test_gradients_that_cancel_do_not_fail_the_check():
    """One expert a token with its weight normalised: the router's gradient is rounding and nothing else."""
    model, x = models.Residual(top_k=1, experts=3), models.rows(1, 9, models.HIDDEN)
    models.pull(torch.compile(model, backend=models.aot_eager()), model, x)
    assert "verified: " in last().fused[0].verified


def test_a_verdict_is_kept_for_the_next_process_but_not_for_other_code(monkeypatch):
    runs = []
    compare = verify._compare
    monkeypatch.setattr(verify, "_compare", lambda *args: runs.append(1) or compare(*args))
    for digest, expected in (("a", 1), ("a", 1), ("b", 2)):
        torch._dynamo.reset()
        monkeypatch.setattr(verdicts, "package_digest", lambda digest=digest: digest)
        outcome()
        assert len(runs) == expected
    outcome(options={"moe.verify": "all"})
    assert len(runs) == 3 and len(report().fused) == 1
    assert opdef.FAMILIES["cpu"] is cpu
