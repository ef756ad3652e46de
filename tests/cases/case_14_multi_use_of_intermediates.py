"""top-k indices, weights and per-expert outputs are also returned / used in a loss: they must survive a rewrite.
Run: pytest -q tests/cases/case_14_multi_use_of_intermediates.py"""
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

class Multi(nn.Module):
    def __init__(s, H=16, I=12, E=5, k=2):
        super().__init__(); s.k, s.E = k, E; s.r = nn.Linear(H, E, bias=False)
        s.gu = nn.Parameter(torch.randn(E, H, 2 * I) * .2); s.dn = nn.Parameter(torch.randn(E, I, H) * .2)
    def forward(s, x):
        lg = s.r(x); p = lg.softmax(-1); w, i = p.topk(s.k, -1)
        g, u = torch.bmm(x.repeat_interleave(s.k, 0)[:, None], s.gu[i.flatten()]).chunk(2, -1)
        h = F.silu(g) * u; y = torch.bmm(h, s.dn[i.flatten()]).squeeze(1).view(*i.shape, -1)
        load = F.one_hot(i, s.E).float().sum((0, 1)) / i.numel()           # 2nd use of the indices
        aux = s.E * (load * p.mean(0)).sum() + lg.logsumexp(-1).square().mean()  # load + z loss
        div = (y[:, 0] * y[:, 1]).mean()                                   # 2nd use of expert outputs before combine
        return (y * w[..., None]).sum(1), aux, div, i, h.abs().amax()      # hidden activation also observed
def test_multi(): check(Multi(), (torch.randn(9, 16, requires_grad=True),), fullgraph=True)
