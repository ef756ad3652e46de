"""The numeric check of a router: the nodes as they were and the operator that takes their place, on the same logits.

Both run eagerly at the graph's sizes, forward and backward. Logits of a row are all different, so that there is one
right choice; where rounding to a narrow dtype makes two of them one again, a row may choose either.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy
import torch
from torch import Tensor

from .. import _torch, router_spec
from ..digest import package_digest
from ..kernels import router_reference
from ..options import Verify
from ..report import Reject
from ..router_spec import RouterSpec
from ..source import where
from .router_fusion import Found
from .runner import run_nodes
from .values import dim
from .window import example

#: Rows of weights may differ by this many rounding steps of the router's narrowest dtype: six steps round by half of
#: one each. Autograd rounds about as often once more, and the gradient to the logits' dtype. Both may differ by SPREAD
#: sqrt(L) of float32 for sums of L terms besides, as in :mod:`.verify`.
WEIGHT_STEPS, GRADIENT_STEPS, SPREAD = 4, 8, 4
#: Memory that the check may take, in bytes.
MAX_BYTES = 1 << 30
#: Different rows of logits; the rows of the graph repeat them.
ROWS = 32
#: Logits of a row are this far apart, less where that many would not fit between 1.5 and -14.5 and are not rounded.
APART = 0.25
#: Size given to a symbolic axis.
SYMBOL_SIZE = 5


WEIGHTS, GRADIENT = "a row of weights", "a row of the gradient"


class Unverifiable(Exception):
    """Why the check could not be made."""


@dataclass(slots=True)
class Checker:
    """The check for one graph; routers that are the same but for their nodes' names are checked once."""

    verify: Verify
    _known: dict[Any, str | Reject] = field(default_factory=dict)

    def __call__(self, found: Found) -> str | Reject:
        """What the report says of the check, or a Reject with the code ``verify`` where the two differ."""
        if self.verify is Verify.OFF:
            return "not verified: moe.verify is off"
        key = _key(found)
        if self.verify is Verify.FIRST and (need := _bytes(found)) > MAX_BYTES:
            return f"not verified: needs {need / 2**30:.2f} GiB, the budget is {MAX_BYTES / 2**30:.2f}"
        if self.verify is Verify.ALL or key not in self._known:
            self._known[key] = _check(found)
        return self._known[key]


def _bytes(found: Found) -> int:
    """Memory of the check: about twelve [T, E] in float32, the steps of both and of their gradients."""
    held = example(found.logits)
    sizes: dict[sympy.Symbol, int] = {}
    return 0 if held is None else 12 * 4 * torch.Size(_size(s, sizes) for s in held.shape).numel()


def _key(found: Found) -> Any:
    """The nodes without their names, and what their operands are."""
    place = {n: f"%{i}" for i, n in enumerate((*found.leaves, *found.nodes))}
    nodes = tuple((n.op, n.target, repr(torch.fx.map_arg((n.args, n.kwargs), place.__getitem__))) for n in found.nodes)
    leaves = tuple(
        repr(n.meta.get("example_value")) for n in (*found.leaves, found.logits, *filter(None, [found.bias]))
    )
    autocasts = tuple(repr(a.args) for a in found.autocasts)
    return nodes, leaves, autocasts, found.spec, found.kernels


def _check(found: Found) -> str | Reject:
    """The check of one router."""
    spec = router_spec.parse(found.spec)
    try:
        with _torch.eager():
            differences = _compare(found, spec)
    except Unverifiable as e:
        return f"not verified: {e}"
    logits = example(found.logits)
    assert logits is not None
    own = max(torch.finfo(d).eps for d in spec.dtypes)
    sums = SPREAD * torch.finfo(torch.float32).eps * math.sqrt(spec.experts)
    bounds = {
        WEIGHTS: WEIGHT_STEPS * own + sums,
        GRADIENT: GRADIENT_STEPS * max(own, torch.finfo(logits.dtype).eps) + sums,
    }
    texts = []
    for name, error in differences.items():
        allowed = bounds.get(name, 0.0)
        if not error <= allowed:  # NaN fails too
            why = f"the router: {name} differs by {error:.2e} of its norm, allowed is {allowed:.2e}"
            return Reject(where(found.at), "verify", why)
        texts.append(f"{name} differs by {error:.1e}, allowed {allowed:.1e}")
    return f"verified: {', '.join(texts)}"


def _compare(found: Found, spec: RouterSpec) -> dict[str, float]:
    """What is compared -> the largest difference of a row, over its norm or a typical one."""
    leaves = _leaves(found, spec)
    weights, idx, logits = _run_nodes(found, leaves)
    mine = leaves[found.logits].detach().requires_grad_(logits.requires_grad)
    bias = None if found.bias is None else leaves[found.bias]
    try:
        with torch.set_grad_enabled(logits.requires_grad):
            w, i = torch.ops.megamoe.route_topk(mine, bias, found.spec, found.kernels, package_digest())
    except (RuntimeError, ValueError) as e:
        return {f"an error ({type(e).__name__}: {e})": math.nan}
    if w.shape != weights.shape or w.dtype is not weights.dtype or i.dtype is not idx.dtype:
        return {"the form of the results": math.nan}
    (theirs, order), (ours, own) = idx.sort(1), i.sort(1)
    same = (theirs == ours).all(1)
    if not _either(mine.detach(), bias, theirs[~same], ours[~same], same, spec):
        return {"the choice": math.nan}
    out = {WEIGHTS: _difference(weights.gather(1, order)[same], w.gather(1, own)[same])}
    if weights.requires_grad and w.requires_grad:
        cotangent = _random(torch.Size((idx.shape[0], spec.experts)), 1).to(weights)
        grads, terms = [], []
        for values, at, leaf in ((weights, idx, logits), (w, i, mine)):
            by_slot = cotangent.gather(1, at)
            terms.append((by_slot * values.detach()).float().norm(dim=1))
            (grad,) = torch.autograd.grad(values, [leaf], by_slot)
            grads.append(grad[same])
        out[GRADIENT] = _difference(grads[0], grads[1], terms[0][same])
    elif weights.requires_grad or w.requires_grad:
        out["whether there is a gradient"] = math.nan
    return out


def _either(logits: Tensor, bias: Tensor | None, theirs: Tensor, ours: Tensor, same: Tensor, spec: RouterSpec) -> bool:
    """Whether rows with another choice had one: they are few, and the experts that differ are equally good."""
    if 2 * int((~same).sum()) > same.numel():
        return False
    narrow = max((torch.finfo(d).eps for d in (spec.score_dtype, spec.bias_dtype or spec.score_dtype)), default=0.0)
    if theirs.numel() == 0:
        return True
    if spec.groups is not None:
        return False
    choice = router_reference.choice(logits[~same], bias, spec)
    a, b = (choice.gather(1, at).sort(1).values for at in (theirs, ours))
    return bool(((a - b).abs() <= 2 * narrow * choice.abs().amax(1, keepdim=True)).all())


def _difference(a: Tensor, b: Tensor, scale: Tensor | None = None) -> float:
    """The largest norm of a difference of rows, over that of the row, of a typical row or ``scale``, the largest."""
    if a.shape != b.shape or a.numel() == 0:
        return 0.0 if a.shape == b.shape else math.nan
    a, b = a.detach().float(), b.detach().float()
    norms = a.norm(dim=1)
    floor = norms.square().mean().sqrt() + torch.finfo(torch.float32).tiny
    norms = torch.maximum(norms, floor if scale is None else torch.maximum(scale, floor))
    return float(((a - b).norm(dim=1) / norms).max())


def _run_nodes(found: Found, leaves: dict[torch.fx.Node, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """(weights, idx, the logits that take the gradient) of the nodes as they are."""
    held, given = example(found.weights), example(found.logits)
    assert held is not None and given is not None
    env = dict(leaves)
    logits = env[found.logits] = leaves[found.logits].detach().requires_grad_(held.requires_grad)
    try:
        with torch.set_grad_enabled(held.requires_grad):
            run_nodes(_needed(found), env, found.autocasts)
    except (RuntimeError, ValueError, IndexError, TypeError) as e:
        raise Unverifiable(f"the router could not run alone ({type(e).__name__}: {e})") from e
    return env[found.weights], env[found.idx], logits


def _needed(found: Found) -> Sequence[torch.fx.Node]:
    """Of the nodes, those that weights and choice follow from, below the logits, with what writes into them."""
    operands = {found.logits, found.bias, *found.leaves}
    needed: set[torch.fx.Node] = set()
    stack = [found.weights, found.idx]
    while stack:
        node = stack.pop()
        if node in needed or node in operands:
            continue
        needed.add(node)
        stack.extend(node.all_input_nodes)
        held = found.effects.storages.get(node, frozenset())
        stack.extend(n for n in found.nodes if found.effects.writes.get(n, frozenset()) & held)
    modes = [n for n in found.nodes if _torch.enters_autocast(n) or _torch.exits_autocast(n)]
    return [n for n in found.nodes if n in needed or n in modes]


def _leaves(found: Found, spec: RouterSpec) -> dict[torch.fx.Node, Any]:
    """A value for each input of the nodes; random but for sizes."""
    sizes: dict[sympy.Symbol, int] = {}
    inputs = [found.logits, *filter(None, [found.bias]), *found.leaves]
    out: dict[torch.fx.Node, Any] = {}
    for leaf in dict.fromkeys(inputs):
        held = leaf.meta.get("example_value")
        if isinstance(held, Tensor):
            shape = torch.Size(_size(s, sizes) for s in held.shape)
            drawn = _logits(shape, held.dtype, spec) if leaf is found.logits else _random(shape, 0)
            if held.is_floating_point():
                out[leaf] = _placed(drawn, held)
        elif isinstance(held, (int, torch.SymInt)):
            out[leaf] = _size(held, sizes)
        elif isinstance(held, torch.Size):
            out[leaf] = torch.Size(_size(s, sizes) for s in held)
    needed = _needed(found)
    for node in needed:
        for arg in node.all_input_nodes:
            if arg not in out and arg not in needed:
                raise Unverifiable(f"the input {arg} is not known")
    return out


def _placed(drawn: Tensor, like: Tensor) -> Tensor:
    try:
        return drawn.to(like.device, like.dtype)
    except (RuntimeError, AssertionError) as e:
        raise Unverifiable(f"nothing can be put on {like.device} ({e})") from e


def _logits(shape: torch.Size, dtype: torch.dtype, spec: RouterSpec) -> Tensor:
    """Rows of evenly spaced logits, each in an order of its own."""
    tokens, experts = shape
    narrow = any(torch.finfo(d).eps > 1e-6 for d in spec.dtypes | {dtype})
    apart = APART if narrow else min(APART, 16 / experts)
    rank = _random(torch.Size((ROWS, experts)), 2).argsort(1)
    rows = 1.5 - apart * rank
    return rows.repeat(-(-tokens // ROWS), 1)[:tokens]


def _random(shape: torch.Size, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _size(size: int | torch.SymInt, sizes: dict[sympy.Symbol, int]) -> int:
    expr = dim(size)
    if isinstance(expr, int):
        return expr
    for symbol in sorted(expr.free_symbols, key=str):
        sizes.setdefault(symbol, SYMBOL_SIZE + len(sizes))
    return int(expr.subs(sizes))
