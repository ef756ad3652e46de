"""top_k=1 (renormalised: router grad 0), top_k=E, E=5/7, hidden 13, ffn 7 - nothing divisible by 8.
Run: pytest -q tests/cases/case_13_topk_extremes_odd_sizes.py"""
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

class MoE(nn.Module):  # per-slot bmm form
    def __init__(s, H=16, I=24, E=4, k=2):
        super().__init__(); s.k, s.E = k, E; s.r = nn.Linear(H, E, bias=False)
        s.gu = nn.Parameter(torch.randn(E, H, 2 * I) * .2); s.dn = nn.Parameter(torch.randn(E, I, H) * .2)
    def forward(s, x):
        t = x.reshape(-1, x.shape[-1]); w, i = s.r(t).softmax(-1).topk(s.k, -1); w = w / w.sum(-1, keepdim=True)
        g, u = torch.bmm(t.repeat_interleave(s.k, 0)[:, None], s.gu[i.flatten()]).chunk(2, -1)
        y = torch.bmm(F.silu(g) * u, s.dn[i.flatten()]).squeeze(1)
        return (y.view(*i.shape, -1) * w[..., None]).sum(1).view_as(x)

def X(H): return (torch.randn(3, 5, H, requires_grad=True),)
def test_k1(): check(MoE(13, 7, 5, 1), X(13))
def test_k1_router_grad_zero():
    m = MoE(13, 7, 5, 1); torch._dynamo.reset(); _, g = run(torch.compile(m, backend=BACKEND), m, X(13)); assert g["r.weight"].abs().max() < 1e-6
def test_k_eq_E(): check(MoE(13, 7, 5, 5), X(13))
def test_E7(): check(MoE(9, 3, 7, 3), X(9))
def test_E1(): check(MoE(13, 7, 1, 1), X(13))
def test_bf16_odd_grouped():  # 13*2 bytes is not a multiple of 16: eager grouped_mm on CPU accepts or rejects; compile must agree
    w, offs = torch.randn(3, 13, 7).bfloat16(), torch.tensor([2, 2, 5], dtype=torch.int32); x = torch.randn(5, 13).bfloat16()
    f = lambda x, w: F.grouped_mm(x, w, offs=offs); torch._dynamo.reset()
    def att(g):
        try: return g(x, w)
        except Exception as e: return type(e)
    a, b = att(f), att(torch.compile(f, backend=BACKEND))
    assert isinstance(a, torch.Tensor) == isinstance(b, torch.Tensor), (a, b)
    if isinstance(a, torch.Tensor): torch.testing.assert_close(a, b, rtol=5e-2, atol=5e-2)
