"""Values and derivatives of the activation expressions of :mod:`moe_inductor.activation`, and the two halves of h.

Derivatives at a kink are PyTorch's: ``clamp`` passes the gradient at its bound, ``relu`` and ``abs`` do not at zero.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from moe_inductor import activation
from moe_inductor.activation import Call, Expr, Number, Var
from moe_inductor.spec import ExpertsSpec, Halves

Operand: TypeAlias = Tensor | float
aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rule:
    """An operation and, for each operand that may be a tensor, its gradient ``(grad, out, *operands) -> grad``."""

    value: Callable[..., Tensor]
    grads: tuple[Callable[..., Tensor], ...]


RULES: dict[str, Rule] = {
    "add": Rule(torch.add, (lambda d, o, a, b: d, lambda d, o, a, b: d)),
    "sub": Rule(torch.sub, (lambda d, o, a, b: d, lambda d, o, a, b: -d)),
    "mul": Rule(torch.mul, (lambda d, o, a, b: d * b, lambda d, o, a, b: d * a)),
    "div": Rule(torch.div, (lambda d, o, a, b: d / b, lambda d, o, a, b: -d * (o / b))),
    "neg": Rule(torch.neg, (lambda d, o, a: -d,)),
    "exp": Rule(torch.exp, (lambda d, o, a: d * o,)),
    "log": Rule(torch.log, (lambda d, o, a: d / a,)),
    "log1p": Rule(torch.log1p, (lambda d, o, a: d / (a + 1),)),
    "sqrt": Rule(torch.sqrt, (lambda d, o, a: d / (2 * o),)),
    "rsqrt": Rule(torch.rsqrt, (lambda d, o, a: -0.5 * d * o**3,)),
    "abs": Rule(torch.abs, (lambda d, o, a: d * a.sign(),)),
    "square": Rule(torch.square, (lambda d, o, a: d * (2 * a),)),
    "sigmoid": Rule(torch.sigmoid, (lambda d, o, a: aten.sigmoid_backward(d, o),)),
    "tanh": Rule(torch.tanh, (lambda d, o, a: aten.tanh_backward(d, o),)),
    "erf": Rule(torch.erf, (lambda d, o, a: d * (2 / math.sqrt(math.pi)) * torch.exp(-a * a),)),
    "relu": Rule(torch.relu, (lambda d, o, a: aten.threshold_backward(d, a, 0),)),
    "silu": Rule(torch.nn.functional.silu, (lambda d, o, a: aten.silu_backward(d, a),)),
    "gelu": Rule(torch.nn.functional.gelu, (lambda d, o, a: aten.gelu_backward(d, a),)),
    "gelu_tanh": Rule(
        functools.partial(torch.nn.functional.gelu, approximate="tanh"),
        (lambda d, o, a: aten.gelu_backward(d, a, approximate="tanh"),),
    ),
    "softplus": Rule(torch.nn.functional.softplus, (lambda d, o, a: aten.softplus_backward(d, a, 1, 20),)),
    "clamp_min": Rule(torch.clamp_min, (lambda d, o, a, b: torch.where(a >= b, d, 0),)),
    "clamp_max": Rule(torch.clamp_max, (lambda d, o, a, b: torch.where(a <= b, d, 0),)),
}


Pull: TypeAlias = Callable[[Tensor], tuple[Tensor, Tensor | None]]


def evaluate(text: str, g: Tensor, u: Tensor | None, consts: Sequence[float]) -> Tensor:
    """The activation ``text`` of gate ``g`` and up ``u`` (both [n, I], float32 or float64), [n, I] in their dtype.

    Raises ValueError where the expression reads a constant or a half that is not given.
    """
    calls = subexpressions(text)
    return _tensor(_values(calls, g, u, consts)[calls[-1]], g)


def differentiate(text: str, g: Tensor, u: Tensor | None, consts: Sequence[float]) -> tuple[Tensor, Pull]:
    """The activation [n, I] and the function that takes its gradient to those of the gate and the up half (None without
    an up half). Raises as :func:`evaluate`."""
    calls = subexpressions(text)
    values = _values(calls, g, u, consts)

    def pull(grad: Tensor) -> tuple[Tensor, Tensor | None]:
        grads: dict[Expr, Tensor] = {calls[-1]: grad}
        for call in reversed(calls):
            if not isinstance(call, Call) or call not in grads or not isinstance(values[call], Tensor):
                continue
            operands = [_operand(arg, values, consts) for arg in call.args]
            rules = RULES[call.op].grads
            if any(isinstance(o, Tensor) for o in operands[len(rules) :]):
                raise ValueError(f"{call.op} has no gradient for a bound that is not a constant")
            for arg, operand, rule in zip(call.args, operands, rules, strict=False):
                if isinstance(operand, Tensor):
                    share = rule(grads[call], values[call], *operands)
                    grads[arg] = grads[arg] + share if arg in grads else share
        dg = grads.get(Var("g"), g.new_zeros(()).expand_as(g))
        return dg, None if u is None else grads.get(Var("u"), u.new_zeros(()).expand_as(u))

    return _tensor(values[calls[-1]], g), pull


def evaluate_scratch(text: str, g: Tensor, u: Tensor | None, consts: Sequence[float]) -> Tensor:
    """:func:`evaluate` of halves that nobody reads afterwards: they may be overwritten."""
    if text == "swiglu" and u is not None:
        return torch.nn.functional.silu(g, inplace=True).mul_(u)
    return evaluate(text, g, u, consts)


def differentiate_scratch(text: str, g: Tensor, u: Tensor | None, consts: Sequence[float]) -> tuple[Tensor, Pull]:
    """:func:`differentiate` of halves that nobody reads afterwards. The function may overwrite the halves and the
    activation, and may return the halves themselves, holding their gradients."""
    if text != "swiglu" or u is None:
        return differentiate(text, g, u, consts)
    gate = torch.nn.functional.silu(g)
    a = gate * u

    def pull(grad: Tensor) -> tuple[Tensor, Tensor | None]:
        dgate = torch.mul(grad, u, out=a)
        torch.mul(grad, gate, out=u)
        aten.silu_backward(dgate, g, grad_input=g)
        return g, u

    return a, pull


def split(h: Tensor, spec: ExpertsSpec) -> tuple[Tensor, Tensor | None]:
    """Views of gate and up in the pre-activation ``h`` [n, 2I]; (h, None) for non-gated experts."""
    inter = h.shape[-1] // 2
    match spec.halves:
        case Halves.GATE_UP:
            return h[..., :inter], h[..., inter:]
        case Halves.UP_GATE:
            return h[..., inter:], h[..., :inter]
        case Halves.INTERLEAVED:
            return h[..., ::2], h[..., 1::2]
        case Halves.SINGLE:
            return h, None


@functools.lru_cache(maxsize=256)
def subexpressions(text: str) -> tuple[Expr, ...]:
    """Distinct subexpressions that need computing, operands first; the last one is the whole expression."""
    seen: dict[Expr, None] = {}

    def visit(expr: Expr) -> None:
        if isinstance(expr, Call) and expr not in seen:
            for arg in expr.args:
                visit(arg)
            seen[expr] = None

    root = activation.parse(text)
    visit(root)
    return tuple(seen) or (root,)


def _values(calls: Sequence[Expr], g: Tensor, u: Tensor | None, consts: Sequence[float]) -> dict[Expr, Operand]:
    values: dict[Expr, Operand] = {Var("g"): g}
    if u is not None:
        values[Var("u")] = u
    for call in calls:
        if not isinstance(call, Call):
            values[call] = _operand(call, values, consts)
            continue
        operands = [_operand(arg, values, consts) for arg in call.args]
        value = RULES[call.op].value
        if any(isinstance(o, Tensor) for o in operands):
            # a leading number must be a tensor; a zero-dim one on the CPU costs no transfer and no sync
            head = operands[0] if isinstance(operands[0], Tensor) else torch.tensor(operands[0], dtype=g.dtype)
            values[call] = value(head, *operands[1:])
        else:
            values[call] = float(value(*(torch.tensor(o, dtype=torch.float64) for o in operands)))
    return values


def _operand(expr: Expr, values: Mapping[Expr, Operand], consts: Sequence[float]) -> Operand:
    if isinstance(expr, Number):
        return expr.value
    if isinstance(expr, Var) and expr.constant is not None:
        if expr.constant >= len(consts):
            raise ValueError(f"the activation reads {expr}, but {len(consts)} constants are given")
        return consts[expr.constant]
    if expr not in values:
        raise ValueError(f"the activation reads {expr}, but these experts have no such half")
    return values[expr]


def _tensor(value: Operand, like: Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else torch.full_like(like, value)
