"""Activation expressions (:mod:`moe_inductor.activation`) as device functions, whose source is written from the
expression. Imported where Triton is present.

Blocks are float32. The rules are those of :mod:`activations` in device arithmetic: a clamp passes the gradient at its
bound, relu and abs do not at zero, NaN passes through.
"""

from __future__ import annotations

import functools
import hashlib
import linecache
import math
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import triton
import triton.language as tl

from moe_inductor.activation import Call, Expr, Number, Var

from . import activations

#: Operation -> its value and, for each operand that may be a block, the share of the gradient ``{d}``; ``{o}`` is the
#: value, ``{a}`` and ``{b}`` the operands.
RULES: dict[str, tuple[str, ...]] = {
    "add": ("{a} + {b}", "{d}", "{d}"),
    "sub": ("{a} - {b}", "{d}", "-{d}"),
    "mul": ("{a} * {b}", "{d} * {b}", "{d} * {a}"),
    "div": ("{a} / {b}", "{d} / {b}", "-{d} * ({o} / {b})"),
    "neg": ("-{a}", "-{d}"),
    "exp": ("tl.exp({a})", "{d} * {o}"),
    "log": ("tl.log({a})", "{d} / {a}"),
    "log1p": ("_log1p({a})", "{d} / ({a} + 1.0)"),
    "sqrt": ("tl.sqrt({a})", "{d} / (2.0 * {o})"),
    "rsqrt": ("1.0 / tl.sqrt({a})", "-0.5 * {d} * {o} * {o} * {o}"),
    "abs": ("tl.abs({a})", "tl.where({a} > 0.0, {d}, tl.where({a} < 0.0, -{d}, {d} * {a}))"),
    "square": ("{a} * {a}", "{d} * (2.0 * {a})"),
    "sigmoid": ("_sigmoid({a})", "{d} * ({o} * (1.0 - {o}))"),
    "tanh": ("_tanh({a})", "{d} * (1.0 - {o} * {o})"),
    "erf": ("tl.erf({a})", f"{{d}} * ({2 / math.sqrt(math.pi)} * tl.exp(-{{a}} * {{a}}))"),
    "relu": ("tl.where({a} < 0.0, 0.0, {a})", "tl.where({a} <= 0.0, 0.0, {d})"),
    "silu": ("{a} * _sigmoid({a})", "{d} * (_sigmoid({a}) * (1.0 + {a} * (1.0 - _sigmoid({a}))))"),
    "gelu": ("{a} * _normal({a})", "{d} * (_normal({a}) + {a} * _density({a}))"),
    "gelu_tanh": ("{a} * _inner({a})", "{d} * _inner_pull({a})"),
    "softplus": ("tl.where({a} > 20.0, {a}, _log1p(tl.exp({a})))", "tl.where({a} > 20.0, {d}, {d} * _sigmoid({a}))"),
    "clamp_min": ("tl.where({a} < {b}, {b}, {a})", "tl.where({a} >= {b}, {d}, 0.0)"),
    "clamp_max": ("tl.where({a} > {b}, {b}, {a})", "tl.where({a} <= {b}, {d}, 0.0)"),
}

#: Functions of one block that the rules call. 1 - exp(-2|x|) cancels below 1e-3, where x - x^3/3 is exact to float32.
_HELPERS = {
    "_sigmoid": "1.0 / (1.0 + tl.exp(-x))",
    "_log1p": "tl.where(1.0 + x == 1.0, x, tl.log(1.0 + x) * (x / ((1.0 + x) - 1.0)))",
    "_tanh": "tl.where(tl.abs(x) < 1e-3, x - x * x * x / 3.0, 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0))",
    "_normal": f"0.5 * (1.0 + tl.erf(x * {math.sqrt(0.5)}))",
    "_density": f"{1 / math.sqrt(2 * math.pi)} * tl.exp(-0.5 * x * x)",
    "_inner": f"_sigmoid({2 * math.sqrt(2 / math.pi)} * (x + 0.044715 * x * x * x))",
    "_inner_pull": "_inner(x) * (1.0 + x * (1.0 - _inner(x))"
    f" * {2 * math.sqrt(2 / math.pi)} * (1.0 + {3 * 0.044715} * x * x))",
}

#: The same in fewer instructions, with what only the GPU has: 2 units in the last place, zero below 2^-126.
_FAST = {
    "_sigmoid": 'tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1; add.f32 $0, $0, 0f3F800000; '
    'rcp.approx.ftz.f32 $0, $0;", "=f,f", [x * -1.4426950408889634], dtype=tl.float32, is_pure=True, pack=1)',
}


def is_fixed(text: str) -> bool:
    """Whether the activation reads no constant that is known only when the operator runs."""
    return not any(isinstance(a, Var) and a.constant is not None for a in _operands(text))


def triton_activation(text: str) -> tuple[Any, Any]:
    """``value(g, u) -> a`` and ``pull(g, u, d) -> (a, dg, du)``, JIT functions of Triton on float32 blocks of one
    shape; those of a single half ignore ``u`` and give zeros for ``du``. Raises ValueError where not
    :func:`is_fixed`."""
    return _functions(text, triton.jit, tl)


def gluon_activation(text: str) -> Any:
    """``value`` of :func:`triton_activation` for Gluon."""
    from triton.experimental import gluon

    return _functions(text, gluon.jit, gluon.language)[0]


@functools.lru_cache(maxsize=256)
def _functions(text: str, jit: Callable[[Any], Any], language: ModuleType) -> tuple[Any, Any]:
    if not is_fixed(text):
        raise ValueError(f"activation {text!r} reads a constant that only the call gives")
    lines, names = _value(text)
    root = names[activations.subexpressions(text)[-1]]
    value = _define("value", "g, u", [*lines, f"return {_block(root)}"], jit, language)
    lines, grads = _pull(text)
    results = (_block(root), *(grads.get(Var(v), "tl.zeros_like(g)") for v in "gu"))
    return value, _define("pull", "g, u, d", [*lines, f"return {', '.join(results)}"], jit, language)


def _value(text: str) -> tuple[list[str], dict[Expr, str | float]]:
    """Lines that compute the distinct subexpressions, and the name or number of each."""
    lines: list[str] = []
    names: dict[Expr, str | float] = {Var("g"): "g", Var("u"): "u"}
    for call in activations.subexpressions(text):
        if not isinstance(call, Call):
            names[call] = _operand(call, names)
            continue
        operands = [_operand(arg, names) for arg in call.args]
        if all(isinstance(o, float) for o in operands):
            folded = activations.RULES[call.op].value(*(torch.tensor(o, dtype=torch.float64) for o in operands))
            names[call] = float(folded)
            continue
        names[call] = f"v{len(lines)}"
        lines.append(f"{names[call]} = {RULES[call.op][0].format(**_named(operands))}")
    return lines, names


def _pull(text: str) -> tuple[list[str], dict[Expr, str]]:
    """Lines that compute the value and its gradients, and the name of each subexpression's gradient."""
    lines, names = _value(text)
    calls = activations.subexpressions(text)
    grads: dict[Expr, str] = {calls[-1]: "d"}
    for call in reversed(calls):
        if not isinstance(call, Call) or call not in grads or isinstance(names[call], float):
            continue
        operands = [_operand(arg, names) for arg in call.args]
        rules = RULES[call.op][1:]
        if any(isinstance(o, str) for o in operands[len(rules) :]):
            raise ValueError(f"{call.op} has no gradient for a bound that is not a constant")
        for arg, operand, rule in zip(call.args, operands, rules, strict=False):
            if isinstance(operand, float):
                continue
            share = rule.format(d=grads[call], o=names[call], **_named(operands))
            name = f"d{len(lines)}"
            lines.append(f"{name} = {grads[arg]} + {share}" if arg in grads else f"{name} = {share}")
            grads[arg] = name
    return lines, grads


def _define(name: str, args: str, body: list[str], jit: Callable[[Any], Any], language: ModuleType) -> Any:
    """A JIT function from source text; the compiler's caches key on the text."""
    space: dict[str, Any] = {"tl": language, "__name__": __name__}
    for helper, text in (_HELPERS if language is tl else _HELPERS | _FAST).items():
        space[helper] = _compile(helper, "x", [f"return {text}"], jit, space)
    return _compile(name, args, body, jit, space)


def _compile(name: str, args: str, body: list[str], jit: Callable[[Any], Any], space: dict[str, Any]) -> Any:
    source = f"def {name}({args}):\n" + "".join(f"    {line}\n" for line in body)
    file = f"<activation {name} {hashlib.sha256(source.encode()).hexdigest()[:8]} {space['tl'].__name__}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    made: dict[str, Any] = {}
    exec(compile(source, file, "exec"), space, made)
    return jit(made[name])


def _operand(expr: Expr, names: Mapping[Expr, str | float]) -> str | float:
    return float(expr.value) if isinstance(expr, Number) else names[expr]


def _operands(text: str) -> list[Expr]:
    return [
        arg for call in activations.subexpressions(text) for arg in (call.args if isinstance(call, Call) else (call,))
    ]


def _named(operands: list[str | float]) -> dict[str, str]:
    return dict(zip("ab", (o if isinstance(o, str) else f"({o!r})" for o in operands), strict=False))


def _block(value: str | float) -> str:
    return value if isinstance(value, str) else f"tl.zeros_like(g) + {value!r}"


__all__ = ["gluon_activation", "is_fixed", "triton_activation"]
