"""The proved router as one operator: what is fused, what is left, values and gradients against eager."""

# ruff: noqa: E501  (snapshots)

from __future__ import annotations

import json

import pytest
import torch
from expecttest import TestCase
from torch import Tensor, nn

from moe_inductor import policy
from moe_inductor.backend import fuse
from moe_inductor.kernels import router_reference
from moe_inductor.outcomes import Fused, Reject
from moe_inductor.report import last, report, reset
from tests import families, models, router_proofs
from tests.near_misses import H, T
from tests.router_forms import FORMS, Routed, softmax_topk, softmax_topk_renorm
from tests.router_near_misses import NEAR_MISSES
from tests.test_recognise import calls, graph_of

REFERENCE = {"moe.kernel": "reference", "moe.verify": "all"}
F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


def one() -> Fused:
    """The only region of the last compile, which was fused."""
    entry = last()
    assert entry is not None and not entry.refused
    (fused,) = entry.fused
    return fused


def spec_of(name: str, dtype: torch.dtype) -> str:
    """The spec of a family's router."""
    module, width = families.build(name, "grouped_mm", dtype)
    graph_of(module, *families.inputs(name, width, dtype), options=REFERENCE)
    router = one().router
    assert isinstance(router, str) and "verified" in router and "not verified" not in router
    return router.split(" ")[0]


class TestSnapshots(TestCase):
    def test_specs_of_families(self) -> None:
        names = [
            "qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe", "deepseek_v2_group", "deepseek_v3", "glm4_moe",
            "ernie4_5_moe", "lfm2_moe", "kolibri1", "openai_privacy_filter",
        ]  # fmt: skip
        found = "\n".join(f"{n}: {spec_of(n, BF16)}" for n in names if families.available(n))
        self.assertExpectedInline(
            found,
            """\
qwen3_moe: E8;K2;softmax:f32;unbiased;all;identity:f32;norm:none:0.0:f32:bf16;unscaled;bf16
mixtral: E8;K2;softmax:f32;unbiased;all;identity:f32;norm:none:0.0:f32:f32;unscaled;f32
olmoe: E8;K2;softmax:f32;unbiased;all;identity:bf16;raw;unscaled;bf16
gpt_oss: E8;K2;identity:bf16;unbiased;all;softmax:bf16;raw;unscaled;bf16
granitemoe: E8;K2;identity:bf16;unbiased;all;softmax:bf16;raw;unscaled;bf16
deepseek_v2_group: E8;K2;softmax:f32;unbiased;1of2:max:0.0;identity:f32;raw;mul:1.0:f32;f32
deepseek_v3: E8;K2;sigmoid:f32;bias:f32;1of2:top2:-inf;identity:f32;norm:add:1e-20:f32:f32;mul:2.5:f32;f32
glm4_moe: E8;K2;sigmoid:f32;bias:f32;1of1:top2:-inf;identity:f32;norm:add:1e-20:f32:f32;mul:1.0:f32;f32
ernie4_5_moe: E8;K2;softmax:f32;bias:f32;all;identity:f32;norm:clamp:1e-12:f32:bf16;unscaled;bf16
lfm2_moe: E8;K2;sigmoid:bf16;bias:bf16;all;identity:bf16;norm:add:1e-06:bf16:bf16;mul:1.0:bf16;bf16
kolibri1: E8;K2;identity:f32;bias:f32;all;sigmoid:f32;raw;unscaled;f32
openai_privacy_filter: E8;K2;identity:f32;unbiased;all;softmax:f32;raw;div:2.0:f32;f32""",
        )

    def test_calls_of_a_router(self) -> None:
        graph = graph_of(Routed(softmax_topk_renorm), torch.randn(T, H), options=REFERENCE)
        self.assertExpectedInline(
            calls(graph),
            """\
linear(l_x_, l_self_dict_parameters_router_)
route_topk(linear, None, E4;K2;softmax:f32;unbiased;all;identity:f32;norm:none:0.0:f32:f32;unscaled;f32, reference/f32, DIGEST)
getitem(route_topk_default, 0)
getitem(route_topk_default, 1)
route_metadata(getitem_15, E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)
getitem(route_metadata_default, 0)
getitem(route_metadata_default, 1)
getitem(route_metadata_default, 2)
experts_up(l_x_, getitem_9, getitem_10, getitem_11, l_self_dict_parameters_w1_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)
getitem(experts_up_default, 0)
getitem(experts_up_default, 1)
experts_down(getitem_12, getitem_13, getitem_9, getitem_10, getitem_11, getitem_14, l_self_dict_parameters_w2_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)""",
        )

    def test_calls_of_a_router_with_groups(self) -> None:
        module, width = families.build("deepseek_v3", "grouped_mm", F32)
        with torch.no_grad():
            graph = graph_of(module, *families.inputs("deepseek_v3", width, F32), options=REFERENCE)
        self.assertExpectedInline(
            "\n".join(calls(graph).splitlines()[:8]),
            """\
view(l_hidden_states_, -1, 32)
type(hidden_states, torch.float32)
type(l_self_modules_gate_parameters_weight_, torch.float32)
linear(type_1, type_2)
route_topk(router_logits, l_self_modules_gate_buffers_e_score_correction_bias_, E8;K2;sigmoid:f32;bias:f32;1of2:top2:-inf;identity:f32;norm:add:1e-20:f32:f32;mul:2.5:f32;f32, reference/f32, DIGEST)
getitem(route_topk_default, 0)
getitem(route_topk_default, 1)
view(l_hidden_states_, -1, 32)""",
        )

    def test_probabilities_that_are_read_elsewhere_keep_their_producer(self) -> None:
        graph = graph_of(WithLoss(), torch.randn(T, H), options=REFERENCE)
        self.assertExpectedInline(
            calls(graph),
            """\
linear(l_x_, l_self_dict_parameters_router_)
softmax(linear, -1)
route_topk(linear, None, E4;K2;softmax:f32;unbiased;all;identity:f32;norm:none:0.0:f32:f32;unscaled;f32, reference/f32, DIGEST)
getitem(route_topk_default, 0)
getitem(route_topk_default, 1)
one_hot(getitem_15, 4)
to(one_hot, torch.float32)
mean(to, (0, 1))
mean(p, 0)
mul(share, mean_1)
sum(mul)
route_metadata(getitem_15, E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)
getitem(route_metadata_default, 0)
getitem(route_metadata_default, 1)
getitem(route_metadata_default, 2)
experts_up(l_x_, getitem_9, getitem_10, getitem_11, l_self_dict_parameters_w1_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)
getitem(experts_up_default, 0)
getitem(experts_up_default, 1)
experts_down(getitem_12, getitem_13, getitem_9, getitem_10, getitem_11, getitem_14, l_self_dict_parameters_w2_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, reference/f32, DIGEST)""",
        )

    def test_report_of_a_fused_router(self) -> None:
        graph_of(Routed(softmax_topk), torch.randn(T, H), options=REFERENCE | {"moe.verify": "off"})
        self.assertExpectedInline(
            str(last()).splitlines()[-1],
            """    router fused: E4;K2;softmax:f32;unbiased;all;identity:f32;raw;unscaled;f32 reference/f32, not verified: moe.verify is off""",
        )

    def test_report_of_a_router_that_was_left(self) -> None:
        graph_of(Routed(next(iter(NEAR_MISSES))), torch.randn(T, H), options=REFERENCE)
        left = one().router
        assert isinstance(left, Reject)
        self.assertExpectedInline(
            str(last()).splitlines()[-1].replace(left.where, "FILE"),
            """    router not fused: FILE  a softmax along axis 0, not over the experts""",
        )


class WithLoss(Routed):
    """The loss of load balancing, from probabilities and choice."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__(WithLoss.balanced, dtype)

    def balanced(self, x: Tensor) -> tuple[Tensor, Tensor]:
        p = self.logits(x).softmax(-1)
        w, idx = p.topk(2)
        share = nn.functional.one_hot(idx, p.shape[-1]).to(p.dtype).mean((0, 1))
        self.extra.append((share * p.mean(0)).sum())
        return w / w.sum(-1, keepdim=True), idx


class FromBody(Routed):
    """The router's weights and its logits are outputs too."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        super().__init__(FromBody.returned, dtype)

    def returned(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.logits(x)
        w, idx = logits.softmax(-1).topk(2)
        w = w / w.sum(-1, keepdim=True)
        self.extra += [w, logits]
        return w, idx


def step(call: nn.Module, module: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Outputs and every gradient, for fixed cotangents."""
    module.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    out = call(leaf)
    outs = out if isinstance(out, tuple) else (out,)
    gen = torch.Generator().manual_seed(3)
    torch.autograd.backward(outs, [torch.randn(o.shape, generator=gen, dtype=o.dtype) for o in outs])
    named = {f"output {i}": o.detach() for i, o in enumerate(outs)} | {"x": leaf.grad}
    return named | {name: p.grad for name, p in module.named_parameters()}


def same_step(module: nn.Module, dtype: torch.dtype, **options: object) -> None:
    """A training step of ``module`` compiled is eager's, which rounds as often, and the router is fused."""
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(5), dtype=F64).to(dtype)
    twin = models.eager_twin(module)
    reset()
    compiled = torch.compile(module, backend=models.aot_eager(), options=REFERENCE | options, fullgraph=True)
    mine, theirs = step(compiled, module, x), step(twin, twin, x)
    models.assert_equal(mine, theirs, models.bound(dtype, layers=1))
    entry = last()
    assert entry is not None and entry.routers == 1, entry


@pytest.mark.parametrize("dtype", [F32, F64], ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    same_step(Routed(FORMS[name], dtype), dtype)


@pytest.mark.parametrize("form", [WithLoss, FromBody])
def test_values_and_gradients_where_steps_are_read_elsewhere(form: type[Routed]) -> None:
    same_step(form(F64), F64)


def test_recomputed_experts_take_the_operator_too() -> None:
    same_step(Routed(softmax_topk_renorm), F32, **{"moe.recompute": "all"})


@pytest.mark.parametrize("name", ["grouped_top2", "softmax_topk_renorm"])
def test_symbolic_tokens(name: str) -> None:
    module = Routed(FORMS[name])
    twin = models.eager_twin(module)
    reset()
    compiled = torch.compile(module, backend=models.aot_eager(), options=REFERENCE, dynamic=True, fullgraph=True)
    for tokens in (6, 9, 1):
        x = torch.randn(tokens, H)
        models.assert_equal(step(compiled, module, x), step(twin, twin, x))
    assert [g.routers for g in report().graphs] == [1] * report().compiles


@pytest.mark.parametrize("route", NEAR_MISSES, ids=lambda r: r.__name__)
def test_near_misses_keep_their_router(route) -> None:
    graph = graph_of(Routed(route), torch.randn(T, H), options=REFERENCE)
    left = one().router
    assert isinstance(left, Reject) and NEAR_MISSES[route] in left.why
    assert "router_near_misses.py:" in left.where or "router_forms.py:" in left.where
    assert "route_topk" not in calls(graph)


@pytest.mark.parametrize("kernel", ["cpu", "auto"])
def test_plans_without_router_kernels_leave_the_graph_alone(kernel: str) -> None:
    graph = graph_of(Routed(softmax_topk), torch.randn(T, H), options={"moe.kernel": kernel})
    assert one().router is None and "softmax" in calls(graph)
    assert "router fused" not in str(last()) and "router not fused" not in str(last())


@pytest.mark.parametrize(
    ("plan", "kernels"), [("hopper/f32", "triton/f32"), ("triton/f32", "triton/f32"), ("library/f32", None)]
)
def test_kernels_of_the_plans_for_gpus(plan: str, kernels: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(policy, "choose", lambda *args, **kwargs: plan)
    graph = fuse(router_proofs.trace(softmax_topk), [], {"moe.verify": "off", "moe.strict": True})
    plans = [n.args[3] for n in graph.graph.nodes if n.target is torch.ops.megamoe.route_topk.default]
    assert plans == ([] if kernels is None else [kernels])


def test_what_the_triton_kernels_do_not_take_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    monkeypatch.setattr(policy, "choose", lambda *args, **kwargs: "triton/f64")
    fuse(router_proofs.trace(softmax_topk, F64), [], {"moe.verify": "off", "moe.strict": True})
    left = one().router
    assert isinstance(left, Reject) and "the router computes in torch.float64" in left.why


def test_a_wrong_operator_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, choice and gradient, each spoiled: the router stays, the experts are fused all the same."""
    forward, backward = router_reference.forward, router_reference.backward

    def worse(at: int, spoil):
        def run(*args):
            out = list(forward(*args))
            out[at] = spoil(out[at])
            return tuple(out)

        return run

    spoiled = {
        "a row of weights": ("forward", worse(0, lambda w: w * 1.001)),
        "the choice": ("forward", worse(1, lambda i: (i + 1) % 4)),
        "a row of the gradient": ("backward", lambda *args: backward(*args).roll(1, 0)),
        "no such tile": ("forward", lambda *args: (_ for _ in ()).throw(RuntimeError("no such tile"))),
    }
    for words, (name, kernel) in spoiled.items():
        with monkeypatch.context() as patch:
            patch.setattr(router_reference, name, kernel)
            graph = graph_of(Routed(FORMS["sigmoid_scaled"]), torch.randn(T, H), options=REFERENCE)
        left = one().router
        assert isinstance(left, Reject) and left.code == "verify" and words in left.why
        assert "route_topk" not in calls(graph) and "sigmoid" in calls(graph)
    graph_of(Routed(FORMS["sigmoid_scaled"]), torch.randn(T, H), options=REFERENCE)
    assert isinstance(one().router, str)


def test_a_failure_of_the_pass_leaves_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    from moe_inductor.passes import router_fusion

    def fails(*args):
        raise RuntimeError("no way")

    monkeypatch.setattr(router_fusion, "prove", fails)
    with pytest.raises(Exception, match="no way"):
        graph_of(Routed(softmax_topk), torch.randn(T, H), options=REFERENCE)
    graph = graph_of(Routed(softmax_topk), torch.randn(T, H), options=REFERENCE | {"moe.strict": False})
    left = one().router
    assert isinstance(left, Reject) and left.code == "internal" and "softmax" in calls(graph)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_whole_models_with_checkpointing(family: str) -> None:
    model = models.causal_lm(family, layers=3)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    twin = models.eager_twin(model)
    reset()
    compiled = torch.compile(model, backend=models.aot_eager(), options={"moe.kernel": "reference"})
    mine = models.step(compiled, model, models.batch())
    models.assert_equal(mine, models.step(twin, twin, models.batch()), models.bound(layers=3))
    assert sum(g.routers for g in report().graphs) == models.moe_layers(model)


def test_the_auxiliary_loss_of_a_model() -> None:
    model = models.causal_lm("qwen3_moe", output_router_logits=True, router_aux_loss_coef=0.1)
    models.step(model, model, models.batch())  # and the hooks are in place that record logits
    twin = models.eager_twin(model)
    reset()
    compiled = torch.compile(model, backend=models.aot_eager(), options={"moe.kernel": "reference"}, fullgraph=True)
    mine, theirs = models.step(compiled, model, models.batch()), models.step(twin, twin, models.batch())
    assert "aux loss" in mine
    models.assert_equal(mine, theirs)
    assert report().graphs[0].routers == models.moe_layers(model)


def test_counts_in_json() -> None:
    graph_of(Routed(softmax_topk), torch.randn(T, H), options=REFERENCE)
    entry = last()
    assert entry is not None
    found = json.loads(entry.to_json())
    assert found["routers"] == 1 and found["outcomes"][0]["router"].startswith("router fused: E4;K2;softmax:f32;")


def test_every_proof_holds_something_up() -> None:
    broken = router_proofs.needed()
    assert len(broken) > 30
    assert not [site for site, names in broken.items() if not names]
