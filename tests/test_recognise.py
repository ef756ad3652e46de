"""What is recognised and what the graph becomes: snapshots of the spec, the rewritten calls and the report."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from expecttest import TestCase
from torch import nn

from moe_inductor.backend import fuse
from moe_inductor.outcomes import Fused
from moe_inductor.passes import shadow, window
from moe_inductor.passes.recogniser import Recogniser
from moe_inductor.passes.values import Value
from moe_inductor.report import last, reset
from tests import families
from tests.moe_forms import grouped_mm
from tests.near_misses import Batched, Grouped, H, T


def graph_of(
    module: nn.Module, *args: Any, options: dict[str, Any] | None = None, **compile_options: Any
) -> torch.fx.GraphModule:
    """The graph after the pass."""
    kept: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        kept.append(fuse(graph, inputs, {"moe.strict": True, "moe.verify": "off", **(options or {})}))
        return graph.forward

    reset()
    torch._dynamo.reset()
    torch.compile(module, backend=backend, fullgraph=True, **compile_options)(*args)
    (graph,) = kept
    return graph


def calls(graph: torch.fx.GraphModule) -> str:
    """The calls of ``graph``, one a line, with the digest masked."""
    lines = []
    for node in graph.graph.nodes:
        if node.op in ("call_function", "call_method"):
            args = ", ".join(map(str, node.args))
            lines.append(f"{window.name_of(node)}({re.sub(r', [0-9a-f]{12}$', ', DIGEST', args)})")
    return "\n".join(lines)


def spec_of(name: str, impl: str, dtype: torch.dtype, **compile_options: Any) -> str:
    """The spec of a family's block."""
    module, width = families.build(name, impl, dtype)
    graph_of(module, *families.inputs(name, width, dtype), **compile_options)
    entry = last()
    assert entry is not None
    (fused,) = entry.fused
    return str(fused.spec)


class TestSnapshots(TestCase):
    def test_calls_in_training(self) -> None:
        self.assertExpectedInline(calls(graph_of(Grouped(), torch.randn(T, H))), """\
linear(l_x_, l_self_parameters_router_)
softmax(linear, -1)
topk(softmax, 2)
getitem(topk, 0)
getitem(topk, 1)
route_metadata(idx, E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, cpu/f32, DIGEST)
getitem(route_metadata_default, 0)
getitem(route_metadata_default, 1)
getitem(route_metadata_default, 2)
experts_up(l_x_, getitem_9, getitem_10, getitem_11, l_self_parameters_w1_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, cpu/f32, DIGEST)
getitem(experts_up_default, 0)
getitem(experts_up_default, 1)
experts_down(getitem_12, getitem_13, getitem_9, getitem_10, getitem_11, w, l_self_parameters_w2_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, cpu/f32, DIGEST)""")

    def test_calls_in_inference(self) -> None:
        with torch.no_grad():
            graph = graph_of(Batched(), torch.randn(T, H))
        self.assertExpectedInline(calls(graph), """\
linear(l_x_, l_self_parameters_router_)
softmax(linear, -1)
topk(softmax, 2)
getitem(topk, 0)
getitem(topk, 1)
experts(l_x_, idx, w, l_self_parameters_w1_, None, l_self_parameters_w2_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, cpu/f32, DIGEST)""")

    def test_calls_with_recompute(self) -> None:
        graph = graph_of(Batched(), torch.randn(T, H), options={"moe.recompute": "all"})
        self.assertExpectedInline(calls(graph), """\
linear(l_x_, l_self_parameters_router_)
softmax(linear, -1)
topk(softmax, 2)
getitem(topk, 0)
getitem(topk, 1)
experts(l_x_, idx, w, l_self_parameters_w1_, None, l_self_parameters_w2_, None, [], E4;K2;swiglu;gate_up;out_in;out_in;weighted_sum;f32;f32;f32, cpu/f32, DIGEST)""")

    def test_calls_with_a_norm_after_the_experts(self) -> None:
        module, width = families.build("muse_spark", "grouped_mm", torch.float32)
        graph = graph_of(module, *families.inputs("muse_spark", width, torch.float32))
        self.assertExpectedInline(calls(graph), """\
view(l_hidden_states_, -1, 32)
type(hidden_states, torch.float32)
type(l_self_modules_gate_parameters_weight_, torch.float32)
linear(type_1, type_2)
mul(router_logits, 0.1767766952966369)
sigmoid(router_logits_1)
add(routing_weights, l_self_modules_gate_buffers_e_score_correction_bias_)
topk(scores_for_choice)
getitem(topk, 1)
gather(routing_weights, 1, topk_indices)
sum(top_k_weights)
add(sum_1, 1e-15)
truediv(top_k_weights, add_1)
mul(top_k_weights_1, 1.0)
view(l_hidden_states_, -1, 32)
linear(hidden_states_1, l_self_modules_pre_expert_proj_parameters_weight_, None)
float(hidden_states_2)
pow(float_1, 2)
mean(pow_1, -1)
add(mean, 1e-05)
rsqrt(add_2)
mul(float_1, rsqrt)
add(1.0, l_self_modules_pre_expert_norm_parameters_weight_)
float(add_3)
mul(output, float_2)
reshape(top_k_weights_2, -1)
reshape(topk_indices, -1)
sort(expert_ids)
getitem(sort, 1)
getitem(sample_weights, perm)
route_metadata(topk_indices, E8;K2;swiglu;gate_up;out_in;out_in;rows;f32;f32;f32, cpu/f32, DIGEST)
getitem(route_metadata_default, 0)
getitem(route_metadata_default, 1)
getitem(route_metadata_default, 2)
experts_up(output_1, getitem_9, getitem_10, getitem_11, l_self_modules_experts_parameters_gate_up_proj_, None, [], E8;K2;swiglu;gate_up;out_in;out_in;rows;f32;f32;f32, cpu/f32, DIGEST)
getitem(experts_up_default, 0)
getitem(experts_up_default, 1)
experts_down(getitem_12, getitem_13, getitem_9, getitem_10, getitem_11, None, l_self_modules_experts_parameters_down_proj_, None, [], E8;K2;swiglu;gate_up;out_in;out_in;rows;f32;f32;f32, cpu/f32, DIGEST)
getitem(experts_down_default, perm)
float(getitem_14)
add(1.0, l_self_modules_experts_modules_post_expert_norm_parameters_weight_)
float(add_4)
mul(float_4, float_5)
type_as(output_2, getitem_14)
float(type_as_1)
pow(float_6, 2)
mean(pow_2, -1)
add(mean_1, 1e-08)
rsqrt(add_5)
mul(float_6, rsqrt_1)
type_as(output_3, getitem_14)
unsqueeze(sample_weights_g, -1)
mul(proj_out_1, unsqueeze)
empty_like(perm)
arange(64)
setitem(inv_perm, perm, arange)
getitem(weighted_out, inv_perm)
view(weighted_out_1, 32, 2, 16)
sum(view_2)
to(final_hidden_states, torch.float32)
linear(hidden_states_4, l_self_modules_post_expert_proj_parameters_weight_, None)
view(linear_2, 2, 16, 32)""")

    def test_specs(self) -> None:
        names = [
            "qwen3_moe",
            "mixtral",
            "gpt_oss",
            "deepseek_v3",
            "nemotron_h",
            "aria",
            "beam",
            "inkling2",
            "muse_spark",
        ]
        lines = [f"{name}: {spec_of(name, 'grouped_mm', torch.float32)}" for name in names]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
qwen3_moe: T=32 K=2 E=8 H=32 I=24 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
mixtral: T=32 K=2 E=8 H=32 I=24 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
gpt_oss: T=32 K=2 E=8 H=32 I=24 f32 mul(mul(sigmoid(mul(clamp_max(g, 7.0), 1.702)), clamp_max(g, 7.0)), add(clamp_max(clamp_min(u, -7.0), 7.0), 1.0)) interleaved w1=in_out w2=in_out b1 b2 weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,b1,w2,b2 cpu
deepseek_v3: T=32 K=2 E=8 H=32 I=24 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
nemotron_h: T=32 K=2 E=8 H=32 I=24 f32 relu2 single w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
aria: T=32 K=2 E=8 H=32 I=24 f32 swiglu gate_up w1=in_out w2=in_out weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
beam: T=32 K=2 E=8 H=32 I=24 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
inkling2: T=32 K=2 E=8 H=32 I=24 f32 mul(mul(mul(tanh(div(g, 4.0)), 4.0), sigmoid(g)), mul(tanh(div(u, 25.0)), 25.0)) gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=x,weights,w1,w2 cpu
muse_spark: T=32 K=2 E=8 H=16 I=24 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=rows:f32 out=f32 training grads=x,w1,w2 cpu""",
        )

    def test_specs_under_dynamic_shapes(self) -> None:
        lines = [
            re.sub(r"\bs\d+", "s", f"{impl}: {spec_of(name, impl, torch.bfloat16, dynamic=True)}")
            for name, impl in [("mixtral", "grouped_mm"), ("gpt_oss", "batched_mm"), ("gemma4_experts", "grouped_mm")]
        ]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
grouped_mm: T=s*s K=2 E=8 H=32 I=24 bf16 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=bf16 training grads=x,weights,w1,w2 cpu
batched_mm: T=s*s K=2 E=8 H=32 I=24 bf16 mul(mul(sigmoid(mul(clamp_max(g, c1), c2)), clamp_max(g, c1)), add(clamp_max(clamp_min(u, c0), c1), 1.0)) interleaved w1=in_out w2=in_out b1 b2 weight=bf16 combine=weighted_sum:bf16 out=bf16 training grads=x,weights,w1,b1,w2,b2 cpu
grouped_mm: T=32 K=s E=8 H=32 I=24 bf16 geglu_tanh gate_up w1=out_in w2=out_in weight=bf16 combine=weighted_sum:bf16 out=bf16 training grads=x,weights,w1,w2 cpu""",
        )

    def test_report(self) -> None:
        graph_of(Grouped(), torch.randn(T, H))
        text = re.sub(r"\d+\.\d+ s", "SECONDS", re.sub(r"\S+/(\w+\.py):\d+", r"\1:LINE", str(last())))
        self.assertExpectedInline(text, """\
1 of 1 MoE region fused in 1 graph, SECONDS in the pass, about 1.5 KiB of activations not kept
  fused  moe_forms.py:LINE  cpu/f32
    T=6 K=2 E=4 H=16 I=8 f32 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=f32 training grads=weights,w1,w2 cpu
    not verified: moe.verify is off""")


class Widened(Batched):
    """The sum, rounded to the experts' dtype, goes on in float32."""

    def __init__(self) -> None:
        super().__init__(torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.bfloat16()).float()


def test_a_widened_sum_keeps_its_rounding() -> None:
    graph_of(Widened(), torch.randn(T, H))
    entry = last()
    assert entry is not None
    assert entry.fused[0].spec.ops.out_dtype is torch.bfloat16


def test_identical_layers_are_recognised_once() -> None:
    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(Grouped() for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    seen: list[Recogniser] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        recogniser, modes = Recogniser(), window.modes(graph.graph)
        seen.append(recogniser)
        for found in window.find(graph.graph):
            assert isinstance(found, window.Window)
            recogniser(found, modes)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(Stack(), backend=backend, fullgraph=True)(torch.randn(T, H, requires_grad=True) * 1)
    assert [r.distinct for r in seen] == [1]


def values_of(fn: Any, *args: torch.Tensor, dynamic: bool = False) -> shadow.Shadow:
    """The shadow of the whole graph of ``fn``."""
    kept: list[shadow.Shadow] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        nodes = [n for n in graph.graph.nodes if n.op in ("call_function", "call_method")]
        leaves = [n for n in graph.graph.nodes if n.op == "placeholder"]
        kept.append(shadow.run(nodes, leaves, lambda node: False))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return kept[0]


def result(seen: shadow.Shadow) -> list[Value | tuple[Value | None, ...]]:
    return list(seen.ran.values())


def test_spellings_of_one_value_are_one_value() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.mul(x, 2), x.mul(2), x * 2, x.clone().mul_(2), (x.view(-1) * 2).view(2, 3)

    (*_,) = seen = result(values_of(fn, torch.randn(2, 3)))
    products = {id(v) for v in seen if isinstance(v, Value) and v.op == "mul" and v.shape == (2, 3)}
    assert len(products) == 1


def test_a_view_follows_its_base_through_mutation() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        base = x * 1
        view = base[1:]
        base.add_(1)
        return view + 0

    (*_, out) = result(values_of(fn, torch.randn(3, 2)))
    assert isinstance(out, Value)
    (sliced,) = out.operands
    assert sliced.op == "slice"
    assert sliced.operands[0].op == "add"


def test_a_slice_that_is_written_makes_its_base_unknown() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        base = x * 1
        base[1:].add_(1)
        return base + 0

    (*_, out) = result(values_of(fn, torch.randn(3, 2)))
    assert isinstance(out, Value)
    assert out.operands[0].args[0] == "overwritten"


def test_inputs_that_share_memory_do_not_survive_a_write() -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return b + 0

    base = torch.zeros(4)
    (*_, out) = result(values_of(fn, base[:2], base[1:3]))
    assert isinstance(out, Value)
    assert out.operands[0].op == "opaque"


def test_a_wish_to_guard_is_refused_and_adds_none() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        (leaf,) = [n for n in graph.graph.nodes if n.op == "placeholder" and window.example(n) is not None]
        size = window.example(leaf).shape[0]  # type: ignore[union-attr]
        env = size.node.shape_env
        before = len(env.guards)
        asking = torch.fx.Graph()
        node = asking.call_function(lambda t: t.new_empty(3 if t.shape[0] == 6 else 4), (leaf,))
        with pytest.raises(shadow.NeedsGuard):
            shadow.run([node], [leaf], lambda n: False)
        assert len(env.guards) == before
        return graph.forward

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, dynamic=True)(torch.randn(6))


def test_gradients_switched_off_around_a_float_are_seen() -> None:
    class Blocked(Batched):
        def act(self, h: torch.Tensor, xs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                return super().act(h, xs)

    graph_of(Blocked(), torch.randn(T, H))
    entry = last()
    assert entry is not None
    assert [r.code for r in entry.refused] == ["activation"]


def test_a_region_without_gradients_inside_a_graph_with_them_is_fused() -> None:
    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = Grouped()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                target = self.moe(x)
            return (x - target).square().mean()

    graph_of(Teacher(), torch.randn(T, H, requires_grad=True))
    entry = last()
    assert entry is not None
    (fused,) = entry.outcomes
    assert isinstance(fused, Fused)
    assert not fused.spec.training


def matched(module: nn.Module, x: torch.Tensor) -> int:
    """How many regions of ``module`` are fused, once its values and gradients were found equal to eager's."""
    results = []
    for fn in (module, torch.compile(module, backend=lambda g, i: fuse(g, i, {"moe.strict": True}).forward)):
        module.zero_grad()
        y = fn(x)
        y.square().sum().backward()
        results.append([y.detach(), *(p.grad for p in module.parameters())])
    entry = last()
    assert entry is not None
    fused = len(entry.fused)
    for eager, ours in zip(*results, strict=True):  # 16 roundings a layer, as verification allows
        assert float((ours - eager).norm() / eager.norm()) <= 16 * fused * torch.finfo(torch.float32).eps
    return fused


def test_the_end_of_one_region_may_be_the_start_of_the_next() -> None:
    assert matched(nn.Sequential(Grouped(), Batched(), Grouped()), torch.randn(T, H)) == 3


def test_regions_beside_each_other_may_share_their_routing() -> None:
    class Twice(Grouped):
        """Two banks of experts behind one router, their nodes interleaved."""

        def __init__(self) -> None:
            super().__init__()
            self.w3, self.w4 = nn.Parameter(self.w1.detach() * 2), nn.Parameter(self.w2.detach() * 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            w, idx = self.route(x)
            ids = idx.reshape(-1)
            ordered, perm = self.order(ids)
            ends = self.ends(self.counts(ids, ordered))
            rows = [self.gather(x, perm), self.gather(x, perm)]
            hidden = [grouped_mm(r, w.mT, ends) for r, w in zip(rows, (self.w1, self.w3), strict=True)]
            down = [grouped_mm(self.act(h, x), w.mT, ends) for h, w in zip(hidden, (self.w2, self.w4), strict=True)]
            z = [y * self.weights(w, perm).unsqueeze(-1) for y in down]
            return self.total(z[0][self.inverse(perm)]) + self.total(z[1][self.inverse(perm)])

    assert matched(Twice(), torch.randn(T, H)) == 2


def test_a_failure_of_the_pass_leaves_the_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken")

    module, x = Grouped(), torch.randn(T, H)
    for target in ("window.find", "modules.bodies", "recogniser.recognise", "rewrite._emit", "routers.unfused"):
        with monkeypatch.context() as patch:
            where = f"moe_inductor.passes.{target}"
            patch.setattr("moe_inductor.passes.fuse.bodies" if target == "modules.bodies" else where, fail)
            torch._dynamo.reset()
            compiled = torch.compile(module, backend=lambda g, i: fuse(g, i, {"moe.verify": "off"}).forward)
            torch.testing.assert_close(compiled(x), module(x))
            entry = last()
            assert entry is not None
            assert [r.code for r in entry.refused] == ["internal"], target
            torch._dynamo.reset()
            strict = torch.compile(module, backend=lambda g, i: fuse(g, i, {"moe.strict": True}).forward)
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="broken"):
                strict(x)
