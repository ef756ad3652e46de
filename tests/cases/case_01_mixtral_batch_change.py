"""HF Mixtral, grouped_mm experts, batch/sequence change between steps (train).
Run: pytest -q tests/cases/case_01_mixtral_batch_change.py"""
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

from transformers import MixtralConfig, MixtralForCausalLM
def make(impl):
    c = MixtralConfig(vocab_size=64, hidden_size=32, intermediate_size=40, num_hidden_layers=1, num_attention_heads=4,
                      num_key_value_heads=2, num_local_experts=6, num_experts_per_tok=2, use_cache=False)
    c._experts_implementation = impl
    class W(nn.Module):
        def __init__(s): super().__init__(); s.m = MixtralForCausalLM._from_config(c, attn_implementation="eager")
        def forward(s, ids): return s.m(input_ids=ids.long(), use_cache=False).logits
    return W()
IDS = [(torch.randint(0, 64, (b, t)),) for b, t in [(2, 7), (3, 7), (2, 5), (1, 9)]]
def test_grouped(): check(make("grouped_mm"), *[(i[0].float(),) for i in IDS])
def test_batched(): check(make("batched_mm"), *[(i[0].float(),) for i in IDS])
