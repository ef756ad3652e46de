"""The pass: every graph of a compile, window by window, from recognition to the edited graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from dataclasses import replace as replaced
from typing import Any

import torch

from .. import policy
from ..options import OptionError, Options, Recompute
from ..report import Fused, Outcome, Reject
from ..source import where
from . import functions, router_check, router_fusion, routers, selective, window
from .modules import Body, bodies
from .recognise import Match
from .recogniser import Recogniser, fingerprint
from .rewrite import emit, replace

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Proposal:
    """A proved region with its plan, before it is written into its graph."""

    body: Body
    window: window.Window
    autocasts: tuple[torch.fx.Node, ...]  #: regions of the graph open at the window's first node
    match: Match
    plan: str
    recompute_all: bool
    parameters: tuple[str, ...]
    fingerprint: str  #: of the window, the same in every process


Verify = Callable[[Proposal], "str | Reject"]


def fuse(module: torch.fx.GraphModule, options: Options, verify: Verify) -> list[Outcome]:
    """Rewrite the regions of ``module`` and of the bodies it names; the outcomes in graph order.

    ``verify`` gives what the report says of a proposal's numeric check, or a Reject that keeps the region as it is. An
    exception on the way leaves the region as it is too, with the code ``internal``, unless ``options.strict``.
    """
    recogniser = Recogniser()
    outcomes: list[Outcome] = []
    try:
        for body in bodies(module):
            functions.drop_unread_outputs(body.module)
            outcomes.extend(_fuse_body(body, options, verify, recogniser))
        selective.carry(module)
    except OptionError:
        raise
    except Exception as e:
        if options.strict:
            raise
        outcomes.append(_internal(next(iter(module.graph.nodes)), e))
    return outcomes


def _fuse_body(body: Body, options: Options, verify: Verify, recogniser: Recogniser) -> list[Outcome]:
    graph = body.module.graph
    outcomes: list[Outcome] = []
    proposals: list[tuple[int, Proposal]] = []
    modes: dict[torch.fx.Node, Any] | None = None
    for found in list(window.find(graph)):
        if isinstance(found, Reject):
            outcomes.append(found)
            continue
        modes = window.modes(graph) if modes is None else modes
        try:
            proposal = _propose(found, modes, body, options, recogniser)
            verdict = verify(proposal) if isinstance(proposal, Proposal) else proposal
        except OptionError:
            raise
        except Exception as e:
            if options.strict:
                raise
            verdict = _internal(found.down, e)
        if isinstance(verdict, str) and isinstance(proposal, Proposal):
            proposals.append((len(outcomes), proposal))
            outcomes.append(Fused(where(found.down), proposal.match.spec, proposal.plan, proposal.parameters, verdict))
        elif isinstance(verdict, Reject):
            outcomes.append(verdict)
    if proposals:
        _write(body, proposals, outcomes, options)
        _fuse_routers(body, proposals, outcomes, options)
    if not any(isinstance(o, Reject) for o in outcomes):  # else the reason has been given
        outcomes.extend(routers.unfused(graph if not proposals else body.module.graph))
    return outcomes


def _propose(
    found: window.Window, modes: dict[torch.fx.Node, Any], body: Body, options: Options, recogniser: Recogniser
) -> Proposal | Reject:
    match = recogniser(found, modes)
    if isinstance(match, Reject):
        return match
    names = parameters(match, body)
    value = window.example(match.x.node)
    assert value is not None
    plan = policy.choose(match.spec, policy.Device.of(value.device), options, names=names, where=where(match.end))
    if isinstance(plan, Reject):
        return plan
    autocasts = modes[found.nodes[0]][1]
    recompute_all = options.recompute is Recompute.ALL
    return Proposal(body, found, autocasts, match, plan, recompute_all, names, fingerprint(found, modes))


def parameters(match: Match, body: Body) -> tuple[str, ...]:
    """The names of the expert parameters of ``match``; the name of a weight that the graph computes is that of the
    first parameter it is computed from."""
    operands = (match.w1, match.b1, match.w2, match.b2)
    found = (_named(o.node, body) for o in operands if o is not None)
    return tuple(name for name in found if name is not None)


def _named(node: torch.fx.Node, body: Body) -> str | None:
    for _ in range(8):
        if node in body.names:
            return body.names[node]
        if not node.all_input_nodes:
            return None
        node = node.all_input_nodes[0]
    return None


def _write(body: Body, proposals: Sequence[tuple[int, Proposal]], outcomes: list[Outcome], options: Options) -> None:
    """Edit the graph; where that fails, put the untouched one back."""
    untouched = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    output = untouched.graph_copy(body.module.graph, copies, return_output_node=True)
    assert output is not None
    for node, copy in copies.items():  # Dynamo notes things on nodes, which a copy leaves out
        vars(copy).update({name: noted for name, noted in vars(node).items() if name not in vars(copy)})
    try:
        graph = body.module.graph
        emitted = [emit(graph, p.match, p.plan, recompute_all=p.recompute_all) for _, p in proposals]
        for one, (_, proposal) in zip(emitted, proposals, strict=True):
            selective.note(one.added, proposal.window)
        replace(graph, emitted)
        graph.lint()
    except Exception as e:
        untouched.output(output[0])  # type: ignore[index]
        body.module.graph = untouched
        if options.strict:
            raise
        for i, proposal in proposals:
            outcomes[i] = _internal(proposal.match.end, e)
    body.module.recompile()


def _fuse_routers(
    body: Body, proposals: Sequence[tuple[int, Proposal]], outcomes: list[Outcome], options: Options
) -> None:
    """The routers of the regions that were written; a router that is left is no refusal of its region."""
    written = [(i, p) for i, p in proposals if isinstance(outcomes[i], Fused)]
    regions = [(p.match, p.plan) for _, p in written]
    found: Sequence[str | Reject | None]
    try:
        found = router_fusion.fuse(body.module.graph, regions, router_check.Checker(options.verify))
    except Exception as e:
        if options.strict:
            raise
        found = [_internal(p.match.idx.node, e) for _, p in written]
    for (i, _), router in zip(written, found, strict=True):
        fused = outcomes[i]
        assert isinstance(fused, Fused)
        outcomes[i] = replaced(fused, router=router)
    body.module.recompile()


def _internal(node: torch.fx.Node, error: Exception) -> Reject:
    log.debug("the pass failed at %s", where(node), exc_info=error)
    return Reject(where(node), "internal", f"{type(error).__name__}: {error}")
