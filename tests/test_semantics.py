"""Training around the fused layers means what it means in eager: state, modes, frozen parts, odd inputs."""

import copy
import types

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from moe_inductor import opdef
from moe_inductor.kernels import cpu
from moe_inductor.report import report, reset
from moe_inductor.spec import Grad
from tests import models

HIDDEN = models.HIDDEN
FORMS = ["grouped_mm", "batched_mm"]


@pytest.fixture(autouse=True)
def clean():
    counters.clear()
    reset()


def compiled(model, **settings):
    return torch.compile(model, backend=models.aot_eager(), **settings)


def compare(model, *inputs, regions=None, allowed=None, **settings):
    """One step, compiled, is eager's; ``regions`` (one a block) are fused and none is refused."""
    twin = models.eager_twin(model)
    mine = models.pull(compiled(model, **settings), model, *inputs)
    models.assert_equal(mine, models.pull(twin, twin, *inputs), allowed)
    assert models.matched() == (len(model.blocks) if regions is None else regions), str(report())
    assert not report().refused
    return mine


@pytest.fixture
def kernels(monkeypatch):
    """(kernel, gradients it was asked for) of each call of the CPU kernels."""
    calls = []

    def recording(name, kernel):
        def run(*args):
            need = args[-1] if name.endswith("_backward") else ()
            calls.append((name, ",".join(g.value for g in Grad if g in need)))
            return kernel(*args)

        return run

    monkeypatch.setitem(
        opdef.FAMILIES,
        "cpu",
        types.SimpleNamespace(**{name: recording(name, getattr(cpu, name)) for name in cpu.__all__}),
    )
    return calls


@pytest.mark.parametrize("form", FORMS)
def test_forty_repeats_are_bitwise_equal(form):
    model, x = models.Residual(2, form=form), models.rows(2, 9, HIDDEN)
    call = compiled(model)
    first = models.pull(call, model, x)
    for _ in range(39):
        again = models.pull(call, model, x)
        assert all(torch.equal(first[name], again[name]) for name in first)
    assert models.matched() == 2


def test_two_hundred_steps_end_where_eager_ends():
    x, target = models.rows(4, 8, HIDDEN).detach(), models.rows(4, 8, HIDDEN, seed=2).detach()
    model = models.Residual(2)
    losses = {}
    for name in ("eager", "fused"):
        own = models.eager_twin(model)
        call = compiled(own) if name == "fused" else own
        optimizer = torch.optim.AdamW(own.parameters(), lr=2e-3)
        for _ in range(200):
            optimizer.zero_grad()
            loss = (call(x) - target).square().mean()
            loss.backward()
            optimizer.step()
        losses[name] = (float((own(x) - target).square().mean().detach()), float(loss.detach()))
    assert losses["eager"][1] < 0.2 * float((model(x) - target).square().mean()), "nothing was learned"
    assert losses["fused"] == pytest.approx(losses["eager"], rel=1e-3)
    assert models.matched() == 2


def test_gradients_accumulate():
    model, twin = models.Residual(2), models.Residual(2)
    call = compiled(model)
    for seed in range(3):
        for run in (call, twin):
            run(models.rows(1, 7, HIDDEN, seed=seed)).square().mean().backward()
    mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (model, twin))
    models.assert_equal(mine, theirs)


def test_one_bank_of_experts_in_two_layers():
    model = models.Residual(2)
    model.blocks[1].experts = model.blocks[0].experts
    compare(model, models.rows(1, 7, HIDDEN))


def test_weights_changed_between_steps_are_the_weights_used():
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    call = compiled(model)
    experts = model.blocks[0].experts

    def same():
        twin = models.eager_twin(model)
        models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))

    same()
    with torch.no_grad():
        experts.down_proj.mul_(2)
    same()
    experts.gate_up_proj.data.add_(0.1)  # does not move the version counter
    same()
    experts.gate_up_proj.data = torch.flip(experts.gate_up_proj.data, (0,))
    same()
    model.load_state_dict(models.Residual(experts=models.EXPERTS).state_dict())
    same()
    assert models.matched() == 1


def test_state_goes_out_and_in_under_the_same_names(tmp_path):
    model, x = models.Residual(2), models.rows(1, 7, HIDDEN)
    names = list(model.state_dict())
    before = [p.data_ptr() for p in model.parameters()]
    model.compile(backend=models.aot_eager())
    models.pull(model, model, x)
    assert list(model.state_dict()) == names and [p.data_ptr() for p in model.parameters()] == before
    torch.save(model.state_dict(), tmp_path / "state.pt")
    other = models.Residual(2)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    models.assert_equal(models.pull(other, other, x), models.pull(model, model, x))
    assert models.matched() == 2


@pytest.mark.parametrize("before", [torch.no_grad, torch.inference_mode])
def test_inference_first_and_training_later_with_one_object(before):
    model, x = models.Residual(2), models.rows(1, 7, HIDDEN)
    twin, call = models.eager_twin(model), compiled(model)
    for _ in range(2):
        with before():
            models.assert_equal({"y": call(x)}, {"y": twin(x)})
        models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))
    assert [f.spec.training for g in report().graphs for f in g.fused] == [False] * 2 + [True] * 2


@pytest.mark.parametrize("form", FORMS)
def test_autocast_over_float32_weights(form):
    """The matmuls run in the dtype that eager's have. Eager rounds rows to bfloat16 where we may not, so the bound is
    that of bfloat16; the dtypes are equal."""
    model, x = models.Residual(2, form=form), models.rows(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        compare(model, x, allowed=models.bound(torch.bfloat16))


class LowRank(nn.Module):
    """W + scale * B A, one pair for each expert."""

    def __init__(self, weight, rank=2):
        super().__init__()
        e, n, k = weight.shape
        self.a, self.b = nn.Parameter(torch.randn(e, rank, k) * 0.1), nn.Parameter(torch.randn(e, n, rank) * 0.1)

    def forward(self, weight):
        return weight + 2.0 * torch.bmm(self.b, self.a)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("frozen", [False, True])
def test_low_rank_weights_computed_in_the_graph(form, frozen):
    model = models.Residual(form=form)
    experts = model.blocks[0].experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(experts, name).requires_grad_(not frozen)
        nn.utils.parametrize.register_parametrization(experts, name, LowRank(weight))
    grads = compare(model, models.rows(1, 7, HIDDEN))
    weight = "blocks.0.experts.parametrizations.down_proj"
    assert (grads[f"{weight}.original"] is None) == frozen and grads[f"{weight}.0.a"] is not None


@pytest.mark.parametrize("part", ["experts", "gate", "gate and input", "up", "input", "all but the gate"])
def test_frozen_parts_skip_their_kernels(kernels, part):
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    block = model.blocks[0]
    frozen = {
        "experts": [*block.experts.parameters()],
        "gate": [*block.gate.parameters()],
        "gate and input": [*block.gate.parameters(), x],
        "up": [block.experts.gate_up_proj],
        "input": [x],
        "all but the gate": [*block.experts.parameters(), x],
    }[part]
    for tensor in frozen:
        tensor.requires_grad_(False)
    twin, call = models.eager_twin(model), compiled(model)
    models.pull(call, model, x)
    kernels.clear()  # those of the check at compile time
    models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))
    assert not report().refused
    assert (
        dict(kernels[3:])
        == {
            "experts": {"down_backward": "x,weights", "up_backward": "x"},
            "gate": {"down_backward": "x,weights,w2", "up_backward": "x,w1"},  # the weights follow from x too
            "gate and input": {"down_backward": "x,w2", "up_backward": "w1"},
            "up": {"down_backward": "x,weights,w2", "up_backward": "x"},
            "input": {"down_backward": "x,weights,w2", "up_backward": "w1"},
            "all but the gate": {"down_backward": "weights"},
        }[part]
    )


def test_with_nothing_to_train_one_kernel_runs(kernels):
    model, x = models.Residual().requires_grad_(requires_grad=False), models.rows(1, 7, HIDDEN).detach()
    call = compiled(model)
    call(x)
    kernels.clear()
    call(x)
    assert kernels == [("route", ""), ("experts", "")]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("form", FORMS)
def test_a_bad_row_spoils_what_it_spoils_in_eager(form, bad):
    model, x = models.Residual(form=form), models.rows(1, 7, HIDDEN).detach()
    x[0, 3] = bad
    twin = models.eager_twin(model)
    with torch.no_grad():
        mine, theirs = compiled(model)(x), twin(x)
    assert torch.equal(mine.isfinite(), theirs.isfinite())
    assert mine.isfinite().all(-1).sum() == 6
    good = theirs.isfinite()
    models.assert_equal({"y": mine[good]}, {"y": theirs[good]})


@pytest.mark.parametrize("form", FORMS)
def test_no_token_and_one(form):
    model = models.Residual(form=form)
    for tokens in (0, 1):
        torch._dynamo.reset()
        counters.clear()
        compare(model, models.rows(1, tokens, HIDDEN))


@pytest.mark.parametrize(("experts", "top_k"), [(4, 4), (1, 1), (3, 1), (16, 2)])
def test_every_expert_one_expert_and_experts_without_rows(experts, top_k):
    compare(models.Residual(experts=experts, top_k=top_k), models.rows(1, 5, HIDDEN))


def test_all_tokens_on_one_expert():
    model = models.Residual(top_k=1)
    x = models.rows(1, 7, HIDDEN).detach().abs()
    model.blocks[0].gate.weight.data.zero_()[2] = 1.0
    grads = compare(model, x.requires_grad_())
    assert [int(g.count_nonzero()) > 0 for g in grads["blocks.0.experts.down_proj"]] == [False, False, True, False]


@pytest.mark.parametrize("form", FORMS)
def test_many_lengths_take_two_compiles(form):
    model = models.Residual(form=form)
    twin, call = models.eager_twin(model), compiled(model, dynamic=True)
    for tokens in (7, 5, 12, 3, 31, 2):
        x = models.rows(2, tokens, HIDDEN, seed=tokens)
        models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))
    assert report().compiles <= 2
    assert all(len(g.fused) == 1 for g in report().graphs)


def test_a_copied_model_keeps_working():
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    model.compile(backend=models.aot_eager())
    models.pull(model, model, x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.blocks[0].experts.down_proj.neg_()
    twin = models.Residual()
    twin.load_state_dict(other.state_dict())
    models.assert_equal(models.pull(other, other, x), models.pull(twin, twin, x))
