"""World-size-1 gloo: autograd all_to_all dispatch/combine (even and data-dependent splits) and FSDP2-sharded experts.
Run: pytest -q tests/cases/case_24_ep_all_to_all_and_fsdp.py"""
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

import torch.distributed as dist, torch.distributed._functional_collectives as fc
import pytest
@pytest.fixture(scope="module", autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1); yield; dist.destroy_process_group()
class EP(nn.Module):
    def __init__(s, dyn, H=16, I=16, E=4, k=2):
        super().__init__(); s.k, s.E, s.dyn = k, E, dyn; s.r = nn.Linear(H, E, bias=False)
        s.w1, s.w3, s.w2 = (nn.Parameter((torch.randn(E, *d) * .2).bfloat16()) for d in ((H, I), (H, I), (I, H)))
    def forward(s, x):
        w, i = s.r(x.to(s.r.weight.dtype)).float().softmax(-1).topk(s.k, -1); fl = i.flatten(); order = fl.argsort(stable=True); cnt = (fl[:, None] == torch.arange(s.E)).sum(0)
        sp = [int(cnt.sum().item())] if s.dyn else [fl.numel()]; G = dist.group.WORLD
        a = fc.all_to_all_single_autograd(x[order // s.k].bfloat16(), sp, sp, G); offs = cnt.cumsum(0).to(torch.int32)
        h = F.silu(F.grouped_mm(a, s.w1, offs=offs)) * F.grouped_mm(a, s.w3, offs=offs)
        b = fc.all_to_all_single_autograd(F.grouped_mm(h, s.w2, offs=offs), sp, sp, G)
        return torch.zeros_like(x).index_add(0, order // s.k, b.float() * w.flatten()[order][:, None])
XS = [(torch.randn(t, 16, requires_grad=True),) for t in (6, 10)]
def test_even(): check(EP(False), *XS, fullgraph=True, tol=6e-2)
def test_data_dependent_splits():
    with torch._dynamo.config.patch(capture_scalar_outputs=True): check(EP(True), *XS, fullgraph=True, tol=6e-2)
def test_fsdp2():
    from torch.distributed.fsdp import fully_shard; from torch.distributed.device_mesh import init_device_mesh
    m = EP(False).bfloat16(); ref = copy.deepcopy(m); fully_shard(m, mesh=init_device_mesh("cpu", (1,))); torch._dynamo.reset(); c = torch.compile(m, backend=BACKEND)
    for x in XS:
        a, b = run(ref, ref, x), run(c, m, x); same(a, (b[0], {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in b[1].items()}), 6e-2)
