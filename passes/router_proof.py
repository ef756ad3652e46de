"""The proof that routing weights and expert ids are what a :class:`~moe_inductor.router_spec.RouterSpec` says.

Read from the weights upwards: casts, scale, division by the sum, a function of the chosen scores, the choice, scores,
logits. Arithmetic in a narrow dtype is float32 arithmetic and a rounding, so of the casts after a step only the
narrowest counts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..router_spec import Floor, Norm, RouterSpec, Scale, Scaling, Score
from ..spec import DTYPES
from .dispatch import first
from .refusal import Refused, require
from .router_groups import groups_of, masked_of
from .router_steps import Undetached, opaque, rounded, shown, topk, unwidened
from .values import Table, Value


@dataclass(frozen=True, slots=True)
class Router:
    """A proved router and its values; ``idx`` is the index that the choice gives."""

    spec: RouterSpec
    logits: Value
    bias: Value | None
    idx: Value


def prove(weights: Value, ids: Value, table: Table) -> Router:
    """The router whose choice is ``ids`` [T, K] and whose weights are ``weights`` [T, K]. Raises Refused."""
    require(len(weights.shape) == 2, "router", f"the weights are not [T, K]: {shown(weights)}", weights)
    while ids.op in ("cast", "reshape"):
        ids = first(ids)
    base, top_k, experts = _choice(ids)
    value, dtype = rounded(weights)
    scale, value, dtype = _scale(value, dtype)
    norm, value, dtype = _norm(value, dtype)
    gathered, value, dtype = _function(value, dtype)
    scores, from_values = _chosen(value, ids)
    without = Undetached(table)
    bare = without(base)
    grouped, masked = masked_of(bare)
    if from_values:  # the weights are the masked scores, which the mask leaves as they are where it chooses
        scores = masked_of(base)[0] if masked is not None else base
    score, score_dtype, logits = _score(scores)
    require(
        score is not Score.IDENTITY or gathered is not Score.IDENTITY,
        "router",
        f"the scores are neither a softmax nor a sigmoid over the experts: {shown(scores)}",
        scores,
    )
    flat = grouped if grouped.shape == bare.shape else table.reshape(grouped, bare.shape)
    bias, bias_dtype = _bias(flat, without(scores), experts)
    groups = None
    if masked is not None:
        groups = groups_of(masked, flat, grouped, experts, table)
        size = experts // groups.count
        rounding = bias_dtype or score_dtype
        require(flat.dtype is rounding, "router", f"groups are ranked in {flat.dtype}, not {rounding}", masked.at)
        require(top_k <= groups.kept * size, "router", f"{groups.kept} groups of {size} experts for {top_k}", masked.at)
        require(score is not Score.IDENTITY or not from_values, "router", "masked logits are the weights", masked.at)
    spec = RouterSpec(
        experts, top_k, score, score_dtype, bias_dtype, groups, gathered, dtype, norm, scale, weights.dtype
    )  # fmt: skip
    return Router(spec, logits, bias, ids)


def _choice(ids: Value) -> tuple[Value, int, int]:
    """(what is chosen from [T, E], K, E) of the index of a top-k along the last axis."""
    found = topk(ids, 1)
    if found is None:
        raise Refused("router", f"the experts are not the index of a top-k: {shown(ids)}", ids)
    base, top_k = found
    experts = base.shape[-1]
    if len(base.shape) != 2 or not isinstance(experts, int):
        raise Refused("router", f"the choice is not among [T, E]: {shown(base)}", base)
    return base, top_k, experts


def _scale(value: Value, dtype: torch.dtype) -> tuple[Scale | None, Value, torch.dtype]:
    """A constant factor or divisor, and what it is applied to with its rounding."""
    if value.op not in ("mul", "div") or len(value.args) != 2:
        return None, value, dtype
    a, b = value.args
    if value.op == "mul" and isinstance(a, (int, float)):
        a, b = b, a
    if not isinstance(a, Value) or not isinstance(b, (int, float)):
        return None, value, dtype
    return Scale(Scaling(value.op), float(b), dtype), *rounded(a)


def _norm(value: Value, dtype: torch.dtype) -> tuple[Norm | None, Value, torch.dtype]:
    """Division by the sum over K, and what is divided with its rounding."""
    if value.op != "div" or len(value.args) != 2:
        return None, value, dtype
    above, below = value.args
    assert isinstance(above, Value)
    require(isinstance(below, Value), "router", f"the weights are divided by {below} after a scale", value)
    assert isinstance(below, Value)
    if below.op == "expand":
        below = first(below)
    total, sum_dtype = rounded(below)
    floor, eps = Floor.NONE, 0.0
    if (bounded := _floor(total)) is not None:
        floor, eps, inner = bounded
        total, own = rounded(inner)
        require(own is sum_dtype, "router", f"a sum in {own} is bounded in {sum_dtype}", below)
    summed = first(total) if total.op == "reshape" else total
    tokens = value.shape[0]
    require(
        summed.op == "sum" and summed.args[1] == (1,) and below.shape == (tokens, 1),
        "router",
        f"the weights are divided by something else than their sum over a token's experts: {shown(summed)}",
        value,
    )
    require(unwidened(first(summed)) is unwidened(above), "router", "the weights are divided by another sum", value)
    return Norm(floor, eps, sum_dtype, dtype), *rounded(above)


def _floor(total: Value) -> tuple[Floor, float, Value] | None:
    """(kind, eps, sum) where ``total`` is a sum kept away from zero."""
    args = total.args
    if total.op == "add" and len(args) == 2:
        a, b = args if isinstance(args[0], Value) else args[::-1]
        if isinstance(a, Value) and isinstance(b, (int, float)):
            return Floor.ADD, float(b), a
    if total.op in ("clamp", "clamp_min") and isinstance(args[0], Value) and args[2:] in ((), (None,)):
        if isinstance(args[1], (int, float)):
            return Floor.CLAMP, float(args[1]), args[0]
    return None


def _function(value: Value, dtype: torch.dtype) -> tuple[Score, Value, torch.dtype]:
    """The function of the chosen scores, its operand, and the rounding of its result."""
    how, operand = _named(value)
    if how is Score.IDENTITY:
        return how, value, dtype
    inner, narrow = rounded(operand)
    require(narrow is inner.dtype, "router", f"the chosen scores are rounded to {narrow}", value)
    return how, inner, dtype


def _named(value: Value) -> tuple[Score, Value]:
    """The function of the last axis that gives ``value``, and its operand."""
    if value.op == "sigmoid":
        return Score.SIGMOID, first(value)
    args = opaque(value, "_softmax.0")
    if args is None:
        return Score.IDENTITY, value
    operand, axis, _half_to_float = args
    assert isinstance(operand, Value)
    rank = len(operand.shape)
    require(axis in (-1, rank - 1), "router", f"a softmax along axis {axis}, not over the experts", value)
    return Score.SOFTMAX, operand


def _chosen(value: Value, ids: Value) -> tuple[Value, bool]:
    """(what ``value`` [T, K] was chosen from, whether by the top-k itself): the scores at ``ids``."""
    require(value.op != "detach", "router", "gradients are switched off between the logits and the weights", value)
    if value.op == "pick":
        scores, axis, index = value.args[:3]
        assert isinstance(scores, Value)
        require(axis in (1, -1) and index is ids, "router", "the weights are gathered by another index", value)
        return scores, False
    found = topk(value, 0)
    if found is None:
        raise Refused("router", f"the weights are not the scores of the chosen experts: {shown(value)}", value)
    require(value.args[2:] == ids.args[2:], "router", "the weights and the experts come from two choices", value)
    return found[0], True


def _score(scores: Value) -> tuple[Score, torch.dtype, Value]:
    """(function, rounding, logits) of the scores [T, E]."""
    inner, dtype = rounded(scores)
    how, operand = _named(inner)
    if how is Score.IDENTITY:
        logits = unwidened(scores)
        return how, logits.dtype, logits
    return how, dtype, unwidened(operand)


def _bias(choice: Value, scores: Value, experts: int) -> tuple[Value | None, torch.dtype | None]:
    """(bias of E elements, rounding of the sum) where ``choice`` is ``scores`` with a bias, (None, None) without."""
    scores = unwidened(scores)
    if unwidened(choice) is scores:
        return None, None
    total, dtype = rounded(choice)
    if total.op != "add" or len(total.args) != 2 or not all(isinstance(a, Value) for a in total.args):
        raise Refused("router", f"experts are chosen by something else than their scores: {shown(total)}", total)
    a, b = (unwidened(v) for v in total.operands)
    if b is scores:
        a, b = b, a
    require(a is scores, "router", f"experts are chosen by something else than their scores: {shown(total)}", total)
    while b.op in ("reshape", "expand") or (b.op == "cast" and unwidened(b) is not b):
        b = first(b)
    require(
        b.shape in ((experts,), (1, experts)) and b.dtype in DTYPES,
        "router",
        f"what is added to the scores is no bias of the experts: {shown(b)}",
        total,
    )
    return b, dtype
