"""The second rewrite: a proved router that feeds a fused region becomes one operator.

Only the weights and the index of the choice are replaced. What else reads a step of the router (an auxiliary loss the
probabilities) keeps that step; logits are an operand, and anyone may read them. Where the choice itself would have to
stay, nothing is gained and nothing is done.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from .. import (
    _torch,
    router,  # noqa: F401  registers the operators
)
from ..digest import package_digest
from ..report import Reject
from ..router_spec import RouterSpec
from ..source import where
from . import shadow
from .effects import Effects, computes
from .recognise import Match
from .refusal import Refused, require
from .router_proof import prove
from .runner import Unsupported
from .values import Value
from .window import MOVES, example, modes, name_of

#: Family of the experts' plan -> kernels of the router. The others have none, and their routers stay as they are.
KERNELS = {"hopper": "triton", "triton": "triton", "reference": "reference"}
#: How many nodes a router may have.
REACH = 96
#: Besides moves, what lies between logits and weights; everything else is where a router begins.
_STEPS = MOVES | frozenset(
    "softmax sigmoid topk gather sum truediv div itruediv div_ mul imul mul_ add iadd add_ sub clamp clamp_min clamp_"
    " masked_fill masked_fill_ where scatter scatter_ zeros_like ones_like new_zeros new_ones invert bitwise_not"
    " logical_not bool eq ne max amax detach clone int long type_as float half bfloat16 double type to getitem".split()
)
Modes = dict[torch.fx.Node, tuple[bool | None, tuple[torch.fx.Node, ...]]]


@dataclass(frozen=True, slots=True)
class Found:
    """A proved router: its operands, the nodes whose values the operator gives, and those that go with them."""

    spec: str
    kernels: str  #: the operator's plan
    at: torch.fx.Node  #: the top-k
    before: torch.fx.Node  #: where the operator goes: not behind the top-k, and gradients are on where they have to be
    logits: torch.fx.Node
    bias: torch.fx.Node | None
    weights: torch.fx.Node
    idx: torch.fx.Node
    nodes: tuple[torch.fx.Node, ...]  #: of the graph, consecutive, up to the last of ``weights`` and ``idx``
    leaves: tuple[torch.fx.Node, ...]
    dead: frozenset[torch.fx.Node]
    effects: Effects
    autocasts: tuple[torch.fx.Node, ...]


Check = Callable[[Found], "str | Reject"]


def fuse(graph: torch.fx.Graph, regions: Sequence[tuple[Match, str]], check: Check) -> list[str | Reject | None]:
    """Rewrite the routers of fused regions, each with its plan, in ``graph``. Of each, what the report says, or why it
    was left; None where the plan has no router kernels. ``check`` compares numbers before anything is edited."""
    if not any(plan.partition("/")[0] in KERNELS for _, plan in regions):
        return [None] * len(regions)
    known, order = modes(graph), {n: i for i, n in enumerate(graph.nodes)}
    outcomes: list[str | Reject | None] = []
    accepted: dict[tuple[torch.fx.Node, torch.fx.Node], Found] = {}  # two regions may share a router
    for match, plan in regions:
        family, _, dtype = plan.partition("/")
        if family not in KERNELS:
            outcomes.append(None)
            continue
        found = find(match, f"{KERNELS[family]}/{dtype}", known, order)
        verdict = found if isinstance(found, Reject) else check(found)
        if isinstance(found, Found) and isinstance(verdict, str):
            verdict = f"{found.spec} {found.kernels}, {verdict}"
            accepted.setdefault((found.weights, found.idx), found)
        outcomes.append(verdict)
    for found in accepted.values():
        replace(graph, found)
    return outcomes


def find(match: Match, kernels: str, known: Modes, order: dict[torch.fx.Node, int]) -> Found | Reject:
    """The proof that the weights and the choice of ``match`` are a router's, or why there is none."""
    if match.weights is None:
        return Reject(where(match.idx.node), "router", "the weights are applied outside of the region")
    weights, idx = match.weights.node, match.idx.node
    try:
        return _prove(weights, idx, kernels, known, order)
    except shadow.NeedsGuard as e:
        return Reject(where(weights), "router", f"needs a guard: {e}")
    except Unsupported as e:
        return Reject(where(weights), "router", str(e))
    except Refused as refused:
        at = weights if refused.at is None or refused.at.origin is None else refused.at.origin
        return Reject(where(at), refused.code, refused.why)


def _prove(
    weights: torch.fx.Node, idx: torch.fx.Node, kernels: str, known: Modes, order: dict[torch.fx.Node, int]
) -> Found:
    nodes, leaves = _window(weights, idx, order)
    held = example(weights)
    assert held is not None  # else they were no weights
    blocked = {n: held.requires_grad and known[n][0] is False for n in nodes}
    autocasts = known[nodes[0]][1]
    seen = shadow.run(nodes, leaves, blocked.__getitem__, autocasts)
    value, ids = seen.ran.get(weights), seen.ran.get(idx)
    if not isinstance(value, Value) or not isinstance(ids, Value):
        raise Refused("router", "the weights or the experts are not tensors")
    proved = prove(value, ids, seen.table)
    at = proved.idx.origin
    choice = next((n for n in nodes if seen.ran.get(n) is proved.idx), None)
    if at is None or at not in order or choice is None:
        raise Refused("router", "the choice is not in the graph", proved.idx)

    def operand(value: Value, name: str) -> torch.fx.Node:
        node = next((n for n, v in seen.ran.items() if v is value and seen.now.get(n) is value), None)
        require(node is not None and order[node] < order[at], "router", f"no node holds the {name}", value)
        assert node is not None
        written = frozenset().union(*(seen.effects.writes.get(n, frozenset()) for n in nodes))
        require(not seen.effects.storages[node] & written, "router", f"the {name} are overwritten", value)
        return node

    logits = operand(proved.logits, "logits")
    bias = None if proved.bias is None else operand(proved.bias, "biases")
    given = example(logits)
    assert given is not None
    if not _torch.is_fake(given) or _torch.is_transformed(held):  # a tensor of several devices, or under torch.func
        raise Refused("router", f"the logits are no plain tensor but a {type(given).__name__}", proved.logits)
    ready = max(order[n] for n in (logits, bias) if n is not None)
    places = [n for n in nodes if ready < order[n] <= order[at]]
    before = next(
        (n for n in reversed(places) if (given.requires_grad and known[n][0] is not False) is held.requires_grad), None
    )
    if before is None:
        raise Refused("router", "the gradient stops between the logits and the weights", value)
    kept = seen.now.get(weights) is value and seen.now.get(choice) is proved.idx
    require(kept, "router", "the weights or the experts are overwritten", value)
    why = _refused(kernels, proved.spec, given.dtype)
    if why is not None:
        raise Refused("router", why, value)
    nodes_above = _above({weights, choice}, {logits, bias}, set(nodes))
    dead = _dead(nodes, leaves, {weights, choice}, {logits, bias}, seen.effects)
    require(at in dead, "router", "the choice is read elsewhere too", proved.idx)
    for node in nodes_above - dead - {weights, choice}:
        for user in node.users:
            waits = isinstance(user.target, torch._ops.HigherOrderOperator) or name_of(user) in _HOOKS
            require(not waits, "router", f"{user} waits for the gradient of {node}, inside the router", value)
    return Found(
        str(proved.spec), kernels, at, before, logits, bias, weights, choice, tuple(nodes), tuple(leaves), dead,
        seen.effects, autocasts,
    )  # fmt: skip


_HOOKS = frozenset({"register_hook", "retain_grad", "register_post_accumulate_grad_hook", "grad"})


def _refused(kernels: str, spec: RouterSpec, logits: torch.dtype) -> str | None:
    if kernels.startswith("reference"):
        return None
    try:
        from ..kernels import router as triton_router
    except ImportError as e:
        return f"Triton does not import: {e}"
    why: str | None = triton_router.refuse(spec, logits)
    return why


def _window(
    weights: torch.fx.Node, idx: torch.fx.Node, order: dict[torch.fx.Node, int]
) -> tuple[list[torch.fx.Node], list[torch.fx.Node]]:
    """The calls from where the router begins to the last of ``weights`` and ``idx``, and what they read from before."""
    above: set[torch.fx.Node] = set()
    stack = [weights, idx]
    while stack and len(above) < REACH:
        node = stack.pop()
        if node not in above and node.op in ("call_function", "call_method") and name_of(node) in _STEPS:
            above.add(node)
            stack.extend(node.all_input_nodes)
    require(weights in above and idx in above, "router", "the weights or the experts are no step of a router")
    start, stop = min(map(order.__getitem__, above)), max(order[weights], order[idx])
    nodes = [n for n in itertools.islice(order, start, stop + 1) if n.op in ("call_function", "call_method")]
    inside = set(nodes)
    return nodes, list(dict.fromkeys(a for n in nodes for a in n.all_input_nodes if a not in inside))


def _above(
    start: set[torch.fx.Node], stop: set[torch.fx.Node | None], within: set[torch.fx.Node]
) -> set[torch.fx.Node]:
    """``start`` and what it follows from, in ``within``, without ``stop`` and what only that follows from."""
    found: set[torch.fx.Node] = set()
    stack = list(start)
    while stack:
        node = stack.pop()
        if node in within and node not in found and node not in stop:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return found


def _dead(
    nodes: Sequence[torch.fx.Node],
    leaves: Sequence[torch.fx.Node],
    replaced: set[torch.fx.Node],
    read: set[torch.fx.Node | None],
    effects: Effects,
) -> frozenset[torch.fx.Node]:
    """The nodes that nobody misses once the users of ``replaced`` read another tensor, made from those ``read``: the
    largest set whose members are read by members only and write what members only hold."""
    held = [*leaves, *nodes]
    pure = {n for n in nodes if n not in effects.other and n not in read}
    dead = {n for n in pure if computes(n) or (n.users and _is_number(n))}
    while True:
        kept = {
            n
            for n in dead
            if (n not in replaced and not all(u in dead for u in n.users))
            or any(h not in dead for s in effects.writes.get(n, ()) for h in effects.touching(s, held))
        }
        if not kept:
            return frozenset(dead)
        dead -= kept


def _is_number(node: torch.fx.Node) -> bool:
    return isinstance(node.meta.get("example_value"), (int, float, torch.SymInt, torch.SymFloat))


def replace(graph: torch.fx.Graph, found: Found) -> torch.fx.Node:
    """Write the operator, let its results take the places of the weights and the choice, erase what is dead. Gives the
    operator's node. The graph is a valid one after every step."""
    with graph.inserting_before(found.before):
        node = graph.call_function(
            torch.ops.megamoe.route_topk.default,
            (found.logits, found.bias, found.spec, found.kernels, package_digest()),
        )
        results = [graph.call_function(operator.getitem, (node, i)) for i in range(2)]
    for new, old in ((node, found.at), *zip(results, (found.weights, found.idx), strict=True)):
        new.stack_trace = old.stack_trace
        if "nn_module_stack" in old.meta:
            new.meta["nn_module_stack"] = old.meta["nn_module_stack"]
    for new, old in zip(results, (found.weights, found.idx), strict=True):
        new.meta["example_value"] = old.meta["example_value"]
        old.replace_all_uses_with(new)
    node.meta["example_value"] = tuple(new.meta["example_value"] for new in results)
    for old in reversed(found.nodes):
        if old in found.dead:
            graph.erase_node(old)
    return node
