"""HF DeepSeek-V3 router: sigmoid scores, group limit, shared experts, correction bias changed in place between calls.
Run: pytest -q tests/cases/case_03_dsv3_group_bias.py"""
import copy, os, torch, torch.nn as nn, torch.nn.functional as F
BACKEND = os.environ.get("MEGAMOE_BACKEND", "megamoe")
torch.manual_seed(0)
def run(fn, m, xs):  # outputs + every grad (None stays None) for a fixed cotangent
    m.zero_grad(set_to_none=True)
    xs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    outs = [t for t in torch.utils._pytree.tree_leaves(fn(*xs)) if isinstance(t, torch.Tensor)]
    loss = sum((o.float() * torch.cos(torch.arange(o.numel())).view(o.shape)).sum() for o in outs if o.requires_grad)
    if isinstance(loss, torch.Tensor) and loss.requires_grad: loss.backward()
    g = {n: p.grad for n, p in m.named_parameters()} | {f"x{i}": x.grad for i, x in enumerate(xs)}
    return [o.detach().clone() for o in outs], {k: None if v is None else v.clone() for k, v in g.items()}
def same(a, b, tol=1e-4):
    torch.testing.assert_close(a[0], b[0], rtol=tol, atol=tol, equal_nan=True)
    for k in a[1]:
        assert (a[1][k] is None) == (b[1][k] is None), f"grad None-ness of {k} differs"
        if a[1][k] is not None: torch.testing.assert_close(a[1][k], b[1][k], rtol=tol, atol=tol, equal_nan=True, msg=lambda s: f"grad {k}: {s}")
def check(m, *inputs, tol=1e-4, **kw):
    torch._dynamo.reset(); ref = copy.deepcopy(m); c = torch.compile(m, backend=BACKEND, **kw)
    for xs in inputs: same(run(ref, ref, xs), run(c, m, xs), tol)

from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
def make():
    c = DeepseekV3Config(hidden_size=24, moe_intermediate_size=12, n_routed_experts=8, num_experts_per_tok=3, n_group=4, topk_group=2,
                         n_shared_experts=2, routed_scaling_factor=2.5, norm_topk_prob=True)
    c._experts_implementation = "grouped_mm"; m = DeepseekV3MoE(c)
    for p in m.parameters(): nn.init.normal_(p, std=.2)
    for b in m.buffers(): b.zero_()
    return m
def test_bias_update_not_stale():
    m = make(); ref = copy.deepcopy(m); torch._dynamo.reset(); c = torch.compile(m, backend=BACKEND); x = (torch.randn(2, 5, 24, requires_grad=True),)
    for step in range(3):
        same(run(ref, ref, x), run(c, m, x))
        for mm in (m, ref):  # load-balancing update outside autograd
            with torch.no_grad(): mm.gate.e_score_correction_bias.add_(torch.linspace(-1, 1, 8) * (step + 1))
