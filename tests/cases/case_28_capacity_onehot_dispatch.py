"""GShard/Switch einsum dispatch with capacity and token dropping: dropped tokens give zero; must not be treated as dropless.
Run: pytest -q tests/cases/case_28_capacity_onehot_dispatch.py"""
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

class Cap(nn.Module):
    def __init__(s, C=3, H=16, I=12, E=4, k=2):
        super().__init__(); s.C, s.k, s.E = C, k, E; s.r = nn.Linear(H, E, bias=False)
        s.gu = nn.Parameter(torch.randn(E, H, 2 * I) * .2); s.dn = nn.Parameter(torch.randn(E, I, H) * .2)
    def forward(s, x):
        w, i = s.r(x).softmax(-1).topk(s.k, -1); oh = F.one_hot(i, s.E).transpose(0, 1).reshape(-1, s.E)   # slot-major priority
        pos = (oh.cumsum(0) - 1) * oh; keep = (pos < s.C) * oh
        d = (keep[..., None] * F.one_hot(pos.clamp(max=s.C - 1), s.C)).view(s.k, -1, s.E, s.C).float()      # k,T,E,C
        xe = torch.einsum("ktec,th->ech", d, x); g, u = torch.bmm(xe, s.gu).chunk(2, -1); ye = torch.bmm(F.silu(g) * u, s.dn)
        return torch.einsum("ktec,tk,ech->th", d, w, ye)
def test_drop(): check(Cap(3), (torch.randn(10, 16, requires_grad=True),), fullgraph=True)
def test_no_drop(): check(Cap(20), (torch.randn(10, 16, requires_grad=True),), fullgraph=True)
def test_some_token_really_dropped():
    m = Cap(1); torch._dynamo.reset(); y = torch.compile(m, backend=BACKEND)(torch.randn(10, 16)); assert (y.abs().sum(-1) == 0).any()
