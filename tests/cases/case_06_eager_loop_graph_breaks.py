"""HF 'eager' experts loop (nonzero + per-expert where): values, no graph break, few recompiles, fullgraph.
Run: pytest -q tests/cases/case_06_eager_loop_graph_breaks.py"""
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

from transformers import OlmoeConfig
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from torch._dynamo.utils import counters
def make():
    c = OlmoeConfig(hidden_size=16, intermediate_size=12, num_experts=6, num_experts_per_tok=2); c._experts_implementation = "eager"
    m = OlmoeSparseMoeBlock(c)
    for p in m.parameters(): nn.init.normal_(p, std=.3)
    return m
XS = [(torch.randn(1, t, 16, requires_grad=True),) for t in (2, 9, 4, 17)]  # different experts hit each time
def test_values(): check(make(), *XS)
def test_no_graph_break():
    counters.clear(); check(make(), *XS[:2]); assert sum(counters["graph_break"].values()) == 0, dict(counters["graph_break"])
def test_fullgraph(): check(make(), *XS[:2], fullgraph=True)
def test_compile_count():
    counters.clear(); check(make(), *XS); n = counters["stats"]["unique_graphs"]; assert n <= 2, n
