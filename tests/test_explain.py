"""Against a stand-in for the pass, so that what is tested is what ``explain`` adds to it."""

import sys
import types

import pytest
import torch

from moe_inductor.explain import explain
from moe_inductor.options import OptionError, Options, Precision
from moe_inductor.report import Reject, record, report


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.linear(x)))


@pytest.fixture(autouse=True)
def calls(monkeypatch):
    """(gradients on, options) of each call of the stand-in."""
    seen = []

    def fuse(graph, inputs, options):
        seen.append((torch.is_grad_enabled(), options))
        record([Reject("m.py:1", "order", "stand-in")], seconds=0.0)
        return graph

    backend = types.ModuleType("moe_inductor.backend")
    backend.fuse = fuse
    monkeypatch.setitem(sys.modules, "moe_inductor.backend", backend)
    return seen


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_the_model_the_random_state_and_the_process_report_stay_as_they_were():
    model, x = Layer(), torch.randn(8, 4)
    model(x).sum().backward()
    state, rng = state_of(model), torch.get_rng_state()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    before = len(report().graphs)
    answer = explain(model, x)
    assert (answer.compiles, len(answer.refused)) == (1, 1)
    assert len(report().graphs) == before
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(torch.equal(p.grad, gradients[name]) for name, p in model.named_parameters())


def test_options_and_the_callers_mode_reach_the_pass(calls):
    with torch.no_grad():
        options = {"moe.precision": "bf16", "moe.require": "all", "max_autotune": True}
        explain(Layer(), torch.randn(8, 4), options=options)
    explain(Layer(), torch.randn(8, 4))
    assert [grad for grad, _ in calls] == [False, True]
    assert calls[0][1] == Options(precision=Precision.BF16)
    with pytest.raises(OptionError, match="did you mean"):
        explain(Layer(), torch.randn(8, 4), options={"moe.precisio": "bf16"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"no_such_thing_at_all": 1}, "Inductor has no option 'no_such_thing_at_all'$"),
        ({"triton.cudagraph": True}, "did you mean 'triton.cudagraphs'?"),
        ({"max_autotune": 1}, "max_autotune, got int should be bool"),
    ],
)
def test_options_that_inductor_would_not_take_are_refused(calls, options, words):
    with pytest.raises(OptionError, match=words):
        explain(Layer(), torch.randn(8, 4), options=options)
    assert not calls


def test_a_disabled_backend_is_one_refusal(calls, monkeypatch):
    monkeypatch.setenv("MEGAMOE_DISABLE", "1")
    model = torch.nn.Sequential(Layer(), torch.nn.ReLU())
    answer = explain(model, torch.randn(8, 4))
    assert not calls and answer.compiles == 1
    assert [r.code for r in answer.refused] == ["disabled"]
    with pytest.raises(RuntimeError, match="MEGAMOE_DISABLE"):
        answer.require(1)


def test_a_graph_break_is_told_with_its_place():
    def broken(x):
        y = x.sin()
        torch._dynamo.graph_break()
        return y.cos()

    answer = explain(broken, torch.randn(4))
    assert answer.compiles == 2
    (found,) = answer.breaks
    assert "test_explain.py:" in found.where and "graph_break" in found.why and "\n" not in found.why
    assert f"ran eager  {found.where}  because " in str(answer)


@pytest.mark.parametrize("compiled", ["wrapped", "in place", "a part in place"])
def test_a_compiled_model_is_explained_as_a_whole_and_stays_compiled(compiled):
    runs = []

    def eager(graph, inputs):
        runs.append(graph)
        return graph.forward

    model, x = torch.nn.Sequential(Layer(), torch.nn.ReLU()), torch.randn(8, 4)
    used = model
    if compiled == "wrapped":
        used = torch.compile(model, backend=eager)
    elif compiled == "in place":
        model.compile(backend=eager)
    else:
        model[0].compile(backend=eager)
    used(x)
    builds = len(runs)
    assert explain(used, x).compiles == 1
    used(x)
    assert len(runs) == builds > 0


def test_an_error_of_the_model_comes_through_with_everything_put_back():
    class Fails(Layer):
        def forward(self, x):
            super().forward(x)
            raise RuntimeError("mine")

    model, x = Fails(), torch.randn(8, 4)
    state, rng = state_of(model), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mine"):
        explain(model, x)
    assert torch.equal(torch.get_rng_state(), rng)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
