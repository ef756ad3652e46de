"""The numeric check: a window as it was and as it would become, run on the layer's own parameters before it is used.

Both run eagerly, forward and backward, on random activations; outputs and every gradient are compared. Nothing of the
model is copied or changed, and the random state is put back.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from .. import _torch
from ..options import Verify
from ..report import Reject
from ..source import where
from ..spec import ExpertsSpec, MoESpec
from . import verdicts
from .fuse import Proposal
from .recognise import Match
from .recogniser import moved
from .rewrite import rewrite
from .runner import run_nodes
from .values import dim
from .window import MOVES, Window, example, name_of

#: Extra memory that the check may take: this many bytes, and this share of what is free.
MAX_BYTES, MAX_SHARE = 2 << 30, 0.05
#: Matmul rates, in FLOP/s, below which no device that we know falls: they turn FLOPs into the one second of the budget.
RATES, MAX_SECONDS = {"cpu": 2e10, "cuda": 5e13}, 1.0
#: Size given to a symbolic axis: a few tokens.
SYMBOL_SIZE = 5
#: Rows may differ by this many rounding steps of the experts' dtype, and by SPREAD sqrt(L) of the accumulator's for
#: sums of L terms: two right orders of float32 sums were seen 81 steps apart (a routing weight's gradient, L = 2048).
#: A wrong row, a missing expert or a stale scale is off by far more.
STEPS, SPREAD = 16, 4
#: Where a clamp or a relu bends, the derivative jumps, and two right roundings may fall on either side of it: of 500
#: bf16 layers of H <= 24 with a clamp and a bias, 15 had a row of a gradient that did. Values do not jump. So gradients
#: that differ are drawn for again, up to so many times in all.
DRAWS = 3


class Unverifiable(Exception):
    """Why the check could not be made."""


@dataclass(slots=True)
class Verifier:
    """The check for one backend call. ``inputs`` are the real inputs of the outer graph, in order."""

    verify: Verify
    inputs: dict[torch.fx.Node, Any]
    _passed: dict[str, str] = field(default_factory=dict)

    def __call__(self, proposal: Proposal) -> str | Reject:
        """What the report says of the check, or a Reject with the code ``verify`` where the two differ."""
        if self.verify is Verify.OFF:
            return "not verified: moe.verify is off"
        key = verdicts.key_of(proposal)
        remembered = self.verify is Verify.FIRST
        if remembered and (known := self._passed.get(key) or verdicts.read(key)) is not None:
            return known
        try:
            why = _over_budget(proposal) if remembered else None
            if why is not None:
                return f"not verified: {why}"
            bound = _bound(proposal.match.spec)
            for draw in range(DRAWS):
                worst = _compare(proposal, self.inputs, draw)
                if all(e <= bound for e in worst.values()) or not worst.get("the output", math.nan) <= bound:
                    break
        except Unverifiable as e:
            return f"not verified: {e}"
        name, error = max(worst.items(), key=lambda item: item[1])
        if not error <= bound:  # NaN fails too
            return Reject(
                where(proposal.match.end),
                "verify",
                f"{name} differs by {error:.2e} of its norm, allowed is {bound:.2e}",
            )
        text = f"verified: {len(worst)} tensors, largest difference {error:.1e} ({name}), allowed {bound:.1e}"
        if remembered:
            self._passed[key] = text
            verdicts.write(key, text)
        return text


def _compare(proposal: Proposal, inputs: dict[torch.fx.Node, Any], draw: int) -> dict[str, float]:
    """Tensor name -> largest relative difference of a row: the output, and the gradients where they leave the region.
    ``draw`` seeds the activations.

    A router's own gradient is no measure: its terms may cancel to nothing, as those of one weight normalised to 1 do,
    and what is left is rounding. The gradient of the weights that the region takes in has no such step.
    """
    window, match = proposal.window, proposal.match
    was, old = _copy(window, match.end)
    becomes, new = _copy(window, match.end)
    before, after = moved(match, old.__getitem__), moved(match, new.__getitem__)
    rewrite(becomes, after, proposal.plan, recompute_all=proposal.recompute_all)
    with contextlib.ExitStack() as stack:
        stack.enter_context(_torch.eager())
        stack.enter_context(torch.random.fork_rng(devices=_torch.seeded_devices()))  # manual_seed reseeds them all
        torch.manual_seed(2 * draw)
        leaves = _leaves(proposal, inputs)
        outs = []
        for graph, own in ((was, before), (becomes, after)):
            torch.manual_seed(2 * draw + 1)  # the router may draw numbers
            try:
                outs.append(_run(graph, own, leaves, proposal.autocasts))
            except (RuntimeError, ValueError, IndexError, TypeError) as e:
                if graph is becomes:
                    return {f"an error ({type(e).__name__}: {e})": float("nan")}
                raise Unverifiable(f"the region could not run alone ({type(e).__name__}: {e})") from e
    worst: dict[str, float] = {}
    for name, a in outs[0].items():
        b = outs[1][name]
        if a is not None and b is not None:
            worst[name] = _difference(a, b)
        elif (a is None) != (b is None):
            worst[f"whether there is {name}"] = float("nan")
    return worst


def _difference(a: Tensor, b: Tensor) -> float:
    """The largest norm of a difference of rows, over the norm of the row or of a typical one, whichever is larger."""
    if a.shape != b.shape or a.numel() == 0:
        return 0.0 if a.shape == b.shape else float("nan")
    a, b = (t.detach().reshape(t.shape[0] if t.dim() > 1 else 1, -1).float() for t in (a, b))
    norms = a.norm(dim=1)
    floor = norms.square().mean().sqrt() + torch.finfo(torch.float32).tiny
    return float(((a - b).norm(dim=1) / torch.maximum(norms, floor)).max())


def _copy(window: Window, end: torch.fx.Node) -> tuple[torch.fx.Graph, dict[torch.fx.Node, torch.fx.Node]]:
    """The window up to ``end`` as a graph of its own, and where its nodes went."""
    graph, to = torch.fx.Graph(), {}
    for leaf in window.leaves:
        to[leaf] = graph.placeholder(leaf.name)
        to[leaf].meta = dict(leaf.meta)
    for node in window.nodes:
        to[node] = graph.node_copy(node, to.__getitem__)
        if node is end:
            break
    graph.output(to[end])
    return graph, to


def _run(
    graph: torch.fx.Graph, match: Match, leaves: Sequence[Any], autocasts: Sequence[torch.fx.Node]
) -> dict[str, Tensor | None]:
    """The output of ``graph`` and, for a fixed cotangent, the gradients of the operands of ``match``."""
    backward = match.spec.training
    nodes = [n for n in graph.nodes if n.op in ("call_function", "call_method")]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    env: dict[torch.fx.Node, Any] = {}
    written = frozenset().union(*match.effects.writes.values())
    for node, leaf in zip(placeholders, leaves, strict=True):
        if isinstance(leaf, Tensor) and match.effects.storages.get(node, written) & written:
            leaf = leaf.clone()  # the model's own buffer stays as it is
        fresh = isinstance(leaf, Tensor) and leaf.is_floating_point() and not leaf.is_inference()
        env[node] = leaf.detach() if fresh else leaf
        if fresh and backward and _takes_gradient(node):
            env[node].requires_grad_()
    with torch.set_grad_enabled(backward):
        # a leaf that takes a gradient cannot be written into; a copy of it can
        for node, tensor in list(env.items()):
            if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.dim() < 3:
                env[node] = tensor * 1
        run_nodes(nodes, env, autocasts)
        out = env[next(n for n in reversed(graph.nodes) if n.op == "output").args[0]]
    results: dict[str, Tensor | None] = {"the output": out.detach()}
    operands = {
        f"the gradient of {grad.value}": env[operand.node]
        for grad, operand in match.operands.items()
        if operand is not None and grad in match.spec.grads and env[operand.node].requires_grad
    }
    if backward and out.requires_grad and operands:
        cotangent = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
        grads = torch.autograd.grad(out, list(operands.values()), cotangent, allow_unused=True)
        results.update(zip(operands, grads, strict=True))
    return results


def _takes_gradient(node: torch.fx.Node) -> bool:
    """Whether the leaf takes part in autograd in the model."""
    held = example(node)
    return held is not None and held.requires_grad


def _leaves(proposal: Proposal, inputs: dict[torch.fx.Node, Any]) -> list[Any]:
    """A value for each leaf: the model's own tensor where it is an input of the outer graph that does not depend on
    the batch, random numbers else."""
    window, match = proposal.window, proposal.match
    sizes: dict[sympy.Symbol, int] = {}
    own = {o.node for o in (match.w1, match.b1, match.w2, match.b2) if o is not None}
    chosen = _source(match.idx.node, window)
    weights = None if match.weights is None else _source(match.weights.node, window)
    out: list[Any] = []
    for leaf in window.leaves:
        held = example(leaf)
        outer = proposal.body.inputs.get(leaf)
        real = inputs.get(outer) if outer is not None else None
        if held is None:
            out.append(_plain(leaf, real, sizes))
        elif leaf in proposal.body.names or (leaf in own and isinstance(real, Tensor)):
            if not isinstance(real, Tensor) or _torch.is_fake(real) or real.is_meta or type(real) not in _PLAIN:
                raise Unverifiable("the parameters are not plain tensors with data")
            out.append(real)
        else:
            shape = [_size(s, sizes) for s in held.shape]
            if held.is_floating_point():
                drawn = torch.rand(shape) if leaf is weights else torch.randn(shape)
                out.append(drawn.to(held.device, held.dtype))
            elif leaf is chosen:
                out.append(_choice(shape, match.spec.ops).to(held.device, held.dtype))
            elif held.dtype is torch.bool:
                out.append(torch.zeros(shape, dtype=torch.bool, device=held.device))
            else:
                raise Unverifiable(f"the integers {leaf.name} have an unknown range")
    return out


_PLAIN = (Tensor, torch.nn.Parameter, torch.nn.Buffer)


def _plain(leaf: torch.fx.Node, real: Any, sizes: dict[sympy.Symbol, int]) -> Any:
    value = leaf.meta.get("example_value", real)
    if isinstance(value, torch.SymInt):
        return _size(value, sizes)
    if isinstance(value, torch.SymFloat):
        hint = value.node.hint
        if hint is None:
            raise Unverifiable(f"the number {leaf.name} is not known")
        return float(hint)
    if isinstance(value, torch.Size):
        return torch.Size(_size(s, sizes) for s in value)
    if leaf.op == "get_attr":
        module: Any = leaf.graph.owning_module
        for part in str(leaf.target).split("."):
            module = getattr(module, part)
        return module
    if isinstance(value, (bool, int, float)):
        return value
    raise Unverifiable(f"the input {leaf.name} is not a tensor or a number")


def _size(size: int | torch.SymInt, sizes: dict[sympy.Symbol, int]) -> int:
    expr = dim(size)
    if isinstance(expr, int):
        return expr
    for symbol in sorted(expr.free_symbols, key=str):
        sizes.setdefault(symbol, SYMBOL_SIZE + len(sizes))
    return int(expr.subs(sizes))


def _source(node: torch.fx.Node, window: Window) -> torch.fx.Node:
    """The leaf that ``node`` is a view of; ``node`` itself where it is computed in the window."""
    while node not in window.leaves and name_of(node) in MOVES and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _choice(shape: list[int], spec: ExpertsSpec) -> Tensor:
    """Random routing: different experts for a token's slots."""
    n = torch.Size(shape).numel()
    top_k = min(spec.top_k or shape[-1], spec.experts)
    rows = torch.rand(-(-n // max(top_k, 1)), spec.experts).topk(top_k, dim=-1).indices
    return rows.reshape(-1)[:n].reshape(shape)


def _rows(spec: MoESpec) -> int:
    """Routed rows of the check."""
    rows = spec.rows
    return int(rows) if rows.is_number else int(rows.subs(dict.fromkeys(rows.free_symbols, SYMBOL_SIZE + 2)))


def _bound(spec: MoESpec) -> float:
    """The largest difference of a row over its norm that passes."""
    eps, accumulator = (torch.finfo(d).eps for d in (spec.dtype, torch.promote_types(spec.dtype, torch.float32)))
    return STEPS * eps + SPREAD * accumulator * math.sqrt(max(_rows(spec), spec.hidden, spec.inter, spec.out_hidden))


def _over_budget(proposal: Proposal) -> str | None:
    """Why the check would take too much, None where it would not."""
    spec = proposal.match.spec
    n = _rows(spec)
    halves = 2 if spec.ops.gated else 1
    weights = spec.ops.experts * spec.inter * (halves * spec.hidden + spec.out_hidden)
    # per row of the unfused form and its gradients: x, h, a, y, weighted and unpermuted y; twice the weights' gradients
    elements = 2 * n * (spec.hidden + (halves + 2) * spec.inter + 3 * spec.out_hidden) + 2 * weights * spec.training
    need = elements * max(spec.dtype.itemsize, spec.ops.combine_dtype.itemsize)
    have = _torch.free_memory(spec.device)
    allowed = min(MAX_BYTES, MAX_SHARE * have)
    if need > allowed:
        return f"needs {need / 2**30:.2f} GiB, the budget is {allowed / 2**30:.2f}"
    flops = 2 * n * spec.inter * (halves * spec.hidden + spec.out_hidden) * (3 if spec.training else 1) * 2
    seconds = flops / RATES.get(spec.device, RATES["cpu"])
    return f"needs {seconds:.1f} s" if seconds > MAX_SECONDS else None
