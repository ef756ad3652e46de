"""Whole models of five families: every layer fused, losses and gradients those of eager."""

import pytest
import torch
from torch._dynamo.utils import counters

from moe_inductor.report import report, reset
from tests import models

FAMILIES = list(models.FAMILIES)
LAYERS = {"deepseek_v3": 3}  # its first layer is dense


@pytest.fixture(autouse=True)
def clean():
    counters.clear()
    reset()


def lm(family, **changes):
    return models.causal_lm(family, layers=LAYERS.get(family, 2), **changes)


def compare(model, inputs, *, allowed=None, backend=None, **settings):
    """One training step of ``model``, compiled as a whole, is eager's, and every layer is fused."""
    twin = models.eager_twin(model)
    compiled = torch.compile(model, backend=backend or models.aot_eager(), **settings)
    mine = models.step(compiled, model, inputs)
    models.assert_equal(mine, models.step(twin, twin, inputs), allowed)
    report().require(models.moe_layers(model))
    assert not report().refused
    assert counters["megamoe"]["matched"] == models.moe_layers(model) * counters["stats"]["unique_graphs"]


def some_slow(*fast, of=FAMILIES):
    """All of ``of``, those that are not among ``fast`` marked slow."""
    return [pytest.param(f, marks=() if f in fast else pytest.mark.slow) for f in of]


@pytest.mark.parametrize("family", FAMILIES)
def test_training(family):
    attention = "eager" if family in ("gpt_oss", "mixtral") else "sdpa"  # sdpa knows no attention sinks
    compare(lm(family, attn_implementation=attention), models.batch(), fullgraph=True)


def checkpointed(model, *, reentrant=False):
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()  # a reentrant checkpoint wants an input that requires a gradient
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_gradient_checkpointing(family):
    compare(checkpointed(lm(family)), models.batch())


@pytest.mark.parametrize("family", some_slow("mixtral"))
def test_reentrant_gradient_checkpointing(family):
    compare(checkpointed(lm(family), reentrant=True), models.batch())


WITH_AUXILIARY = ["qwen3_moe", "mixtral", "gpt_oss", "olmoe"]


def with_auxiliary(family):
    model = lm(family, output_router_logits=True, router_aux_loss_coef=0.1)
    assert "aux loss" in models.step(model, model, models.batch())  # and the hooks are in place that record logits
    return model


@pytest.mark.parametrize("family", some_slow("qwen3_moe", "gpt_oss", of=WITH_AUXILIARY))
def test_the_auxiliary_loss_reads_the_router_too(family):
    compare(with_auxiliary(family), models.batch(), fullgraph=True)


@pytest.mark.parametrize("family", some_slow("olmoe", of=WITH_AUXILIARY))
def test_the_auxiliary_loss_under_checkpointing(family):
    """The hooks that record logits append to a list, which Dynamo takes inside a checkpoint if this setting says so."""
    with torch._dynamo.config.patch(skip_fwd_side_effects_in_bwd_under_checkpoint=True):
        compare(checkpointed(with_auxiliary(family)), models.batch())


def test_logits_recorded_inside_a_checkpoint_break_its_graph():
    """Without that setting PyTorch runs checkpointed layers eager, under any backend: right values, and a count."""
    model = checkpointed(with_auxiliary("mixtral"))
    twin = models.eager_twin(model)
    mine = models.step(torch.compile(model, backend=models.aot_eager()), model, models.batch())
    models.assert_equal(mine, models.step(twin, twin, models.batch()))
    with pytest.raises(RuntimeError, match="0 MoE regions fused, 2 required"):
        report().require(2)


@pytest.mark.parametrize("family", some_slow("qwen3_moe", "deepseek_v3"))
def test_each_block_compiled_on_its_own(family):
    """All layers of one class share one compiled graph for each kind of layer: matched counts backend calls."""
    model = lm(family)
    twin = models.eager_twin(model)
    for layer in model.model.layers:
        layer.compile(backend=models.aot_eager())
    models.assert_equal(models.step(model, model, models.batch()), models.step(twin, twin, models.batch()))
    assert not report().refused
    holding = [g for g in report().graphs if g.fused]
    assert holding and all(len(g.fused) == 1 for g in holding)
    assert counters["megamoe"]["matched"] == len(holding)


@pytest.mark.parametrize("family", some_slow("gpt_oss"))
def test_batched_form(family):
    compare(lm(family, experts_implementation="batched_mm"), models.batch())


@pytest.mark.parametrize("family", some_slow("qwen3_moe", of=["qwen3_moe", "gpt_oss"]))
def test_bfloat16(family):
    """Both are rounded at every step, so the bound is that between two bfloat16 results."""
    model = lm(family).bfloat16()
    compare(model, models.batch(), allowed=models.bound(torch.bfloat16, layers=2))


@pytest.mark.parametrize("family", some_slow("deepseek_v3"))
def test_evaluation(family):
    model = lm(family).eval()
    twin = models.eager_twin(model)
    compiled = torch.compile(model, backend=models.aot_eager(), fullgraph=True)
    inputs = models.batch()
    with torch.no_grad():
        mine, theirs = compiled(**inputs), twin(**inputs)
    models.assert_equal({"logits": mine.logits}, {"logits": theirs.logits})
    report().require(models.moe_layers(model))
    assert not any(f.spec.training for f in report().fused)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_the_whole_backend(family):
    """Inductor's code, by the backend's name."""
    compare(lm(family), models.batch(), backend="megamoe")
