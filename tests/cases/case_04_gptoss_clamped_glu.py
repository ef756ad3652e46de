"""HF GPT-OSS experts: interleaved gate/up, biases, clamp, (up+1)*gate*sigmoid(alpha*gate) - not plain SwiGLU.
Run: pytest -q tests/cases/case_04_gptoss_clamped_glu.py"""
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

from transformers import GptOssConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
def make(impl):
    c = GptOssConfig(hidden_size=24, intermediate_size=24, num_local_experts=5, num_experts_per_tok=2); c._experts_implementation = impl
    m = GptOssMLP(c)
    for p in m.parameters(): nn.init.normal_(p, std=1.5)  # big enough that the clamp is active
    return m
X = (torch.randn(2, 5, 24, requires_grad=True),)
def test_grouped(): check(make("grouped_mm"), X, tol=1e-3)
def test_batched(): check(make("batched_mm"), X, tol=1e-3)
