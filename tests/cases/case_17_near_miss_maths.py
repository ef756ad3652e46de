"""Graphs that look like SwiGLU-MoE but are not: each must equal ITS OWN eager value (wrong rewrite = silent error).
Run: pytest -q tests/cases/case_17_near_miss_maths.py"""
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

KINDS = {"weight_on_input": 0, "weight_before_act": 1, "gate_up_swapped": 2, "gelu_tanh": 3, "relu2": 4, "residual_inside": 5, "silu_on_both": 6,
         "weight_squared": 7, "sum_of_logits": 8, "extra_scale": 9, "max_combine": 10, "act_after_mul": 11}
class NM(nn.Module):
    def __init__(s, kind, H=16, I=16, E=4, k=2):
        super().__init__(); s.kind, s.k = kind, k; s.r = nn.Linear(H, E, bias=False)
        s.gu = nn.Parameter(torch.randn(E, H, 2 * I) * .3); s.dn = nn.Parameter(torch.randn(E, I, H) * .3)
    def forward(s, x):
        K = s.kind; lg = s.r(x); w, i = (lg if K == 8 else lg.softmax(-1)).topk(s.k, -1); xs = x.repeat_interleave(s.k, 0); wf = w.reshape(-1, 1)
        if K == 0: xs = xs * wf
        a = torch.bmm(xs[:, None], s.gu[i.flatten()]).squeeze(1); a = a * wf if K == 1 else a; g, u = a.chunk(2, -1)
        if K == 2: g, u = u, g
        h = {3: lambda: F.gelu(g, approximate="tanh") * u, 4: lambda: F.relu(g).square() * u, 6: lambda: F.silu(g) * F.silu(u),
             11: lambda: F.silu(g * u), 9: lambda: F.silu(g * 1.702) * u}.get(K, lambda: F.silu(g) * u)()
        if K == 5: h = h + xs
        y = torch.bmm(h[:, None], s.dn[i.flatten()]).view(*i.shape, -1); ww = torch.ones_like(w) if K in (0, 1) else (w * w if K == 7 else w)
        return (y * ww[..., None]).amax(1) if K == 10 else (y * ww[..., None]).sum(1)
import pytest
@pytest.mark.parametrize("kind", list(KINDS))
def test_near_miss(kind): check(NM(KINDS[kind]), (torch.randn(5, 16, requires_grad=True),), fullgraph=True)
