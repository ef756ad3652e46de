"""Routers whose experts were not found: a choice among the columns of a linear layer that goes on to experts.

A choice alone is no router: detection heads, beam search and sparse attention choose too. What tells a router is where
its scores come from, a linear layer with one row an expert, and where its indices go.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch

from ..report import Reject
from ..source import where
from .window import MOVES, example, name_of

#: More columns than this are a vocabulary, not experts.
MAX_EXPERTS = 4096
#: How many nodes the way from the linear layer to the choice may have.
CLIMB = 24

_CHOICES = frozenset({"topk", "argmax", "sort", "argsort"})
_LINEAR = frozenset({"linear", "matmul", "mm", "addmm"})
_COUNTS = frozenset({"one_hot", "histc", "bincount"})
#: What a router does to its scores before it chooses.
_SCORES = MOVES | frozenset(
    "softmax sigmoid log_softmax softplus tanh sqrt mul add sub truediv div iadd imul add_ mul_ where scatter scatter_"
    " masked_fill_ exp log relu clamp".split()
)


def unfused(graph: torch.fx.Graph) -> Iterator[Reject]:
    """A Reject for each router of ``graph`` whose indices reach no operator of ours and no expert matmul."""
    for node in graph.nodes:
        if name_of(node) in _CHOICES and _chooses_columns(node) and (linear := _linear_above(node)) is not None:
            ends = set(_reached(node))
            if ends and "experts" not in ends:
                shown = " and ".join(sorted(ends))
                why = f"a router over {_rows(linear)} columns whose indices reach {shown}, but no experts in this graph"
                yield Reject(where(node), "router", why)


def _chooses_columns(node: torch.fx.Node) -> bool:
    """Whether the choice is along the last axis."""
    scores = example(node.all_input_nodes[0]) if node.all_input_nodes else None
    if scores is None or not scores.dtype.is_floating_point or scores.dim() < 2:
        return False
    at = 2 if name_of(node) == "topk" else 1
    axis = node.kwargs.get("dim", node.args[at] if len(node.args) > at else -1 if name_of(node) != "argmax" else None)
    return isinstance(axis, int) and axis % scores.dim() == scores.dim() - 1


def _linear_above(node: torch.fx.Node) -> torch.fx.Node | None:
    """The linear layer [.., E] whose columns the scores are."""
    columns = example(node.all_input_nodes[0])
    assert columns is not None
    for _ in range(CLIMB):
        node = node.all_input_nodes[0]
        value = example(node)
        if name_of(node) in _LINEAR:
            return node if value is not None and value.shape[-1] == columns.shape[-1] and _has_weight(node) else None
        if node.op not in ("call_function", "call_method") or name_of(node) not in _SCORES or not node.all_input_nodes:
            return None
    return None


def _has_weight(linear: torch.fx.Node) -> bool:
    rows = _rows(linear)
    return (
        isinstance(rows, int) and 1 < rows <= MAX_EXPERTS and any(_is_parameter(n) for n in linear.all_input_nodes[1:])
    )


def _rows(linear: torch.fx.Node) -> object:
    value = example(linear)
    return None if value is None else value.shape[-1]


def _is_parameter(node: torch.fx.Node) -> bool:
    for _ in range(4):
        if node.op in ("placeholder", "get_attr"):
            held = example(node)
            return held is not None and held.dim() <= 2 and isinstance(held, torch.nn.Parameter)
        if name_of(node) not in MOVES or not node.all_input_nodes:
            return False
        node = node.all_input_nodes[0]
    return False


def _reached(choice: torch.fx.Node) -> Iterator[str]:
    """Where the indices go: ``"experts"`` for our operators and for matmuls with expert weights, else what makes the
    choice a router's."""
    indices = [choice] if name_of(choice) in ("argmax", "argsort") else [
        u for u in choice.users if u.target is operator.getitem and u.args[1] == 1
    ]  # fmt: skip
    queue, seen = list(indices), set(indices)
    while queue:
        node = queue.pop()
        for user in node.users:
            if user in seen:
                continue
            seen.add(user)
            name, value = name_of(user), example(user)
            if user.op == "output":
                yield "the end of the graph"
            elif isinstance(user.target, torch._ops.OpOverload) and user.target.namespace == "megamoe":
                yield "experts"
            elif name in _COUNTS:
                yield name
                queue.append(user)
            elif name == "getitem" and _picks_matrix(user, node):
                yield "a gathered weight"
            elif name in ("grouped_mm", "_grouped_mm", "grouped_mm_fallback"):
                yield "experts"
            elif value is None or not value.dtype.is_floating_point:
                queue.append(user)


def _picks_matrix(user: torch.fx.Node, index: torch.fx.Node) -> bool:
    base = user.all_input_nodes[0]
    held = example(base)
    return base is not index and held is not None and held.dim() >= 3 and held.dtype.is_floating_point
