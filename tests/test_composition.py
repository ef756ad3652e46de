"""With the rest of PyTorch: higher-order bodies, compiled autograd, Inductor's own options."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from moe_inductor.report import report, reset
from tests import models

HIDDEN = models.HIDDEN


@pytest.fixture(autouse=True)
def clean():
    counters.clear()
    reset()


def compare(call, model, x, *, fused):
    twin = models.eager_twin(model)
    models.assert_equal(models.pull(call, model, x), models.pull(twin, twin, x))
    assert (models.matched(), report().refused) == (fused, ()), str(report())


@torch.compiler.nested_compile_region
def layer(block, x):
    return x + block(x)


class Regions(models.Residual):
    """Every block through one region that is compiled once."""

    def forward(self, x):
        for block in self.blocks:
            x = layer(block, x)
        return x


@pytest.mark.parametrize("form", ["grouped_mm", "batched_mm"])
def test_a_region_that_is_compiled_once_is_fused_once(form):
    model = Regions(3, form=form)
    compare(torch.compile(model, backend=models.aot_eager(), fullgraph=True), model, models.rows(1, 7, HIDDEN), fused=1)


class Scaled(torch.autograd.Function):
    """y = 2 block(x) with a backward of its own: 3 dy."""

    @staticmethod
    def forward(ctx, x, gate, w1, w2, block):
        return 2 * torch.func.functional_call(
            block, {"gate.weight": gate, "experts.gate_up_proj": w1, "experts.down_proj": w2}, (x,)
        )

    @staticmethod
    def backward(ctx, dy):
        return 3 * dy, None, None, None, None


class Own(models.Residual):
    """The block inside an ``autograd.Function``."""

    def forward(self, x):
        for block in self.blocks:
            weights = block.gate.weight, block.experts.gate_up_proj, block.experts.down_proj
            x = x + Scaled.apply(x, *weights, block)
        return x


def test_the_forward_of_an_autograd_function_is_inference():
    """Autograd does not look inside, so the operator that saves nothing runs."""
    model = Own()
    compare(torch.compile(model, backend=models.aot_eager(), fullgraph=True), model, models.rows(1, 7, HIDDEN), fused=1)
    assert not report().fused[0].spec.training


def test_compiled_autograd():
    model, x = models.Residual(2), models.rows(1, 7, HIDDEN)
    twin = models.eager_twin(model)
    backend = models.aot_eager()
    call = torch.compile(model, backend=backend)
    model.zero_grad()
    own = x.detach().clone().requires_grad_()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        y = call(own)
        y.backward(torch.ones_like(y))
    other = x.detach().clone().requires_grad_()
    twin(other).backward(torch.ones_like(y))
    mine, theirs = ({n: p.grad for n, p in m.named_parameters()} for m in (model, twin))
    models.assert_equal(mine | {"x": own.grad}, theirs | {"x": other.grad})
    assert counters["compiled_autograd"]["captures"] == 1 and models.matched() == 2


def test_other_backends_in_the_same_process_keep_their_graphs():
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    seen = []

    def other(graph, inputs):
        seen.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    models.pull(torch.compile(model, backend=models.aot_eager()), model, x)
    torch._dynamo.reset()
    models.pull(torch.compile(model, backend=other), model, x)
    assert any("grouped_mm" in name for name in seen) and not any("megamoe" in name for name in seen)


def broken(*args, **kwargs):
    raise ZeroDivisionError("mine")


@pytest.mark.parametrize(
    "place", ["window.find", "functions.drop_unread_outputs", "selective.carry", "recogniser.recognise"]
)
def test_an_error_of_the_pass_is_not_an_error_of_the_model(monkeypatch, place):
    monkeypatch.setattr(f"moe_inductor.passes.{place}", broken)
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    twin = models.eager_twin(model)
    models.assert_equal(
        models.pull(torch.compile(model, backend=models.aot_eager()), model, x), models.pull(twin, twin, x)
    )
    assert [(r.code, "ZeroDivisionError" in r.why) for r in report().refused] == [("internal", True)]
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="mine"):
        torch.compile(model, backend=models.aot_eager(), options={"moe.strict": True})(x)


def test_a_functional_transform_of_parameters():
    """torch.func.functional_call with stand-ins for the parameters."""
    model, x = models.Residual(), models.rows(1, 7, HIDDEN)
    stand_ins = {name: nn.Parameter(p.detach() * 2) for name, p in model.named_parameters()}

    def run(x):
        return torch.func.functional_call(model, stand_ins, (x,))

    compiled = torch.compile(run, backend=models.aot_eager(), fullgraph=True)
    y = compiled(x)
    models.assert_equal({"y": y.detach()}, {"y": run(x).detach()})
    y.sum().backward()
    assert all(p.grad is not None for p in stand_ins.values()) and models.matched() == 1


class Counting(torch._inductor.custom_graph_pass.CustomGraphPass):
    """A user's pass that notes the operators it is shown."""

    def __init__(self):
        self.seen = []

    def __call__(self, graph):
        self.seen.extend(str(n.target) for n in graph.nodes)

    def uuid(self):
        return "tests.test_composition.Counting"


@pytest.mark.slow
@pytest.mark.parametrize("key", ["joint_custom_pre_pass", "post_grad_custom_pre_pass"])
def test_a_users_own_inductor_pass_sees_the_fused_graph(key):
    model, mine = models.Residual(), Counting()
    call = torch.compile(model, backend="megamoe", options={key: mine, "moe.strict": True})
    with torch._inductor.config.patch(force_disable_caches=True):
        compare(call, model, models.rows(1, 7, HIDDEN), fused=1)
    assert "megamoe.experts_down.default" in mine.seen


@pytest.mark.slow
def test_a_mode_for_gpus_is_accepted_on_cpu():
    model = models.Residual()
    compare(torch.compile(model, backend="megamoe", mode="reduce-overhead"), model, models.rows(1, 7, HIDDEN), fused=1)


def test_an_operator_that_inductor_could_trace_runs_whole_in_other_families():
    """Only the cpu family's inference is traced into; Inductor refuses a fallback for what has a decomposition."""
    model = models.Residual(1).eval()
    x = models.rows(1, 7, HIDDEN)
    compiled = torch.compile(model, backend="megamoe", options={"moe.kernel": "reference"}, fullgraph=True)
    with torch.no_grad():
        models.assert_equal({"y": compiled(x)}, {"y": model(x)})
    assert models.matched() == 1
