"""T=0, T=1 and back: empty batch on a rank must give empty output and finite (zero) grads.
Run: pytest -q tests/cases/case_11_zero_and_one_token.py"""
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

class SortMoE(nn.Module):  # sort + grouped_mm, torchtitan-like shape
    def __init__(s, H=16, I=24, E=4, k=2):
        super().__init__(); s.k, s.E = k, E; s.r = nn.Linear(H, E, bias=False)
        s.w1, s.w3, s.w2 = (nn.Parameter(torch.randn(E, *d) * .2) for d in ((H, I), (H, I), (I, H)))
    def forward(s, x):
        w, i = s.r(x).softmax(-1).topk(s.k, -1); order = i.flatten().argsort(stable=True)
        offs = (i.flatten()[:, None] == torch.arange(s.E)).sum(0).cumsum(0).to(torch.int32); xs = x[order // s.k]
        h = F.silu(F.grouped_mm(xs, s.w1, offs=offs)) * F.grouped_mm(xs, s.w3, offs=offs)
        y = F.grouped_mm(h, s.w2, offs=offs) * w.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, order // s.k, y)
def X(*ts, dt=torch.bfloat16): return [(torch.randn(t, 16).to(dt).requires_grad_(),) for t in ts]
def mk(): return SortMoE().bfloat16()
def test_t1(): check(mk(), *X(1, 5, 1), tol=6e-2)
def zero(dynamic, warm):  # explicit truth for T=0 (eager itself may raise): shape (0,H), every grad exists and is 0
    m = mk(); torch._dynamo.reset(); c = torch.compile(m, backend=BACKEND, dynamic=dynamic)
    for x in X(*warm): run(c, m, x)
    o, g = run(c, m, X(0)[0]); assert o[0].shape == (0, 16); assert all(v is not None and v.abs().sum() == 0 for v in g.values())
def test_t0(): zero(None, ())
def test_t5_then_t0(): zero(None, (5,))
def test_t0_dynamic(): zero(True, (4, 6))
def test_t0_then_t3(): check(mk(), *X(4, 3), tol=6e-2)
def test_fp32(): check(SortMoE(), *X(6, 3, dt=torch.float32))  # eager CPU grouped_mm takes fp32; compile should too
