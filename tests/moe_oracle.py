"""A sample against eager: outputs, gradients and buffers, and what the report must say."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.moe_block import Block, Config
from tests.moe_samples import Sample

Backend = str | Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What happened to a sample. ``error`` is empty where everything that was promised held."""

    seed: int
    label: str
    changes: tuple[str, ...]
    attacks: str
    fused: int
    refused: int
    codes: tuple[str, ...]
    error: str


def hidden_states(config: Config, tokens: int) -> Tensor:
    """[T, H] or [1, T, H], seeded by the sample and the length."""
    gen = torch.Generator().manual_seed(config.seed * 31 + tokens)
    x = torch.randn(tokens, config.H, generator=gen).to(config.dtype)
    return x.unsqueeze(0) if config.rank3 else x


def run(call: Callable[[Tensor], tuple[Tensor, ...]], block: Block, x: Tensor) -> dict[str, Tensor | None]:
    """Outputs, buffers and, in training, the gradients for a fixed cotangent."""
    torch.manual_seed(7)
    block.zero_grad(set_to_none=True)
    x = x.detach().clone().requires_grad_(block.c.train)
    with torch.set_grad_enabled(block.c.train):
        outputs = call(x)
    values: dict[str, Tensor | None] = {f"out{i}": o.detach().clone() for i, o in enumerate(outputs)}
    if block.c.train:
        total = sum((o * torch.cos(torch.arange(o.numel())).view(o.shape).to(o.dtype)).sum() for o in outputs)
        total.backward()
        values |= {f"grad {n}": p.grad for n, p in block.named_parameters()} | {"grad x": x.grad}
    return values | {"buffer stash": block.stash.clone()}


def truth_of(eager: Block, x: Tensor) -> dict[str, Tensor | None]:
    """The same in float64, routed as ``eager`` routed ``x``."""
    eager.recording = True
    run(eager, eager, x)
    eager.recording = False
    truth = copy.deepcopy(eager).double()
    truth.wide = torch.float64
    truth.forced, eager.seen = eager.seen, None
    return run(truth, truth, x.double())


def difference(
    ours: dict[str, Tensor | None], eager: dict[str, Tensor | None], truth: dict[str, Tensor | None] | None
) -> str:
    """The first value that is wrong, in words; empty where none is. Without a truth, equality to the bit.

    With one, 1.5 times eager's own error and 4 eps of the largest value: the rounding of one more sum in another order.
    Largest of all gradients, because a gradient that cancels (of a router that is renormalised over one expert, say)
    keeps the rounding of the terms.
    """
    scale: dict[str, float] = {}
    for name, exact in (truth or {}).items():
        if exact is not None and exact.numel():
            scale[name[:4]] = max(scale.get(name[:4], 0.0), exact.abs().max().item())
    for name, reference in eager.items():
        value = ours[name]
        if value is None or reference is None:
            if value is not reference:
                return f"{name}: gradient is {'missing' if value is None else 'there'}, eager's is not"
            continue
        if value.shape != reference.shape or value.dtype != reference.dtype:
            return f"{name}: {value.dtype} {tuple(value.shape)}, eager {reference.dtype} {tuple(reference.shape)}"
        if truth is None:
            if not torch.equal(value.nan_to_num(), reference.nan_to_num()):
                return f"{name}: differs by {(value - reference).abs().max():.2e}"
            continue
        exact = truth[name]
        assert exact is not None, name
        ours_off, eager_off = ((v.double() - exact).abs().max().item() for v in (value, reference))
        allowed = 1.5 * eager_off + 4 * torch.finfo(value.dtype).eps * scale[name[:4]]
        if not ours_off <= allowed:
            return f"{name}: off by {ours_off:.2e}, eager by {eager_off:.2e}, allowed {allowed:.2e}"
    return ""


def plain(gm: torch.fx.GraphModule, example_inputs: Sequence[object]) -> Callable[..., Any]:
    """An inner compiler that runs the graph as it is."""
    return gm.forward


def fused_backend() -> Backend:
    """Our pass, then eager."""
    from moe_inductor.backend import with_inner

    return with_inner(plain)


def check(s: Sample, backend: Backend, *, ours: bool = True) -> Result:
    """Run a sample under ``backend`` and say what happened; ``ours`` is False for a backend that fuses nothing."""
    from moe_inductor.report import report, reset

    torch._dynamo.reset()
    reset()
    eager, block = s.build(), s.build()
    compiled = torch.compile(block, backend=backend, dynamic=s.config.dynamic, fullgraph=True)
    lengths = (s.config.T, s.config.T + 2) if s.config.dynamic else (s.config.T,)
    inputs = [hidden_states(s.config, t) for t in lengths]
    error = ""
    try:
        pairs = [(run(eager, eager, x), run(compiled, block, x)) for x in inputs]
    except Exception as e:
        return _result(s, 0, [], f"{type(e).__name__}: {e}"[:400])
    graphs = report().graphs if ours else ()
    fused = sum(len(g.fused) for g in graphs)
    refused = [r for g in graphs for r in g.refused]
    for (reference, value), x in zip(pairs, inputs, strict=True):
        error = error or difference(value, reference, truth_of(eager, x) if fused else None)
    if ours:
        error = error or _broken_promise(s, fused, len(graphs), refused)
    return _result(s, fused, refused, error)


def _broken_promise(s: Sample, fused: int, graphs: int, refused: Sequence[Any]) -> str:
    if s.must_refuse and fused:
        return "fused, although no correct rewrite exists"
    if s.label == "positive" and fused != graphs:
        return "a positive was refused: " + "; ".join(f"{r.code}: {r.why} ({r.where})" for r in refused)
    if fused < graphs and not refused:
        return "neither fused nor refused: nothing was reported"
    for r in refused:
        file, _, line = r.where.rpartition(":")
        if not (r.code and r.why and file.endswith(".py") and line.isdigit()):
            return f"a refusal lacks a code, a reason or a source line: {r}"
    return ""


def _result(s: Sample, fused: int, refused: Sequence[Any], error: str) -> Result:
    attacks = s.changes[0].attacks if s.changes else ""
    codes = tuple(sorted({r.code for r in refused}))
    names = tuple(c.name for c in s.changes)
    return Result(s.config.seed, s.label, names, attacks, fused, len(refused), codes, error)
