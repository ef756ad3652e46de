"""Expert activations as small expressions over the two halves of the up projection.

An activation is written as a call expression, for example ``mul(silu(g), u)``: ``g`` is the gate, ``u`` the up half
(non-gated experts have ``g`` only), numbers are literals, and ``c0``, ``c1``... stand for floats that the compiler
keeps symbolic. The text is the value: it is an argument of the operators, part of every cache key, and what a snapshot
shows.

Every intermediate is computed in float32 (float64 for float64 experts) and rounded once, so an expression is never less
accurate than the sequence of low-precision operations it stands for.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass

#: name -> number of operands; an operand is an expression, a number or a symbolic constant.
OPERATIONS: dict[str, int] = {
    "add": 2,  # a + b
    "sub": 2,  # a - b
    "mul": 2,  # a * b
    "div": 2,  # a / b
    "neg": 1,
    "exp": 1,
    "log": 1,
    "log1p": 1,
    "sqrt": 1,
    "rsqrt": 1,
    "abs": 1,
    "square": 1,
    "sigmoid": 1,
    "tanh": 1,
    "erf": 1,
    "relu": 1,
    "silu": 1,
    "gelu": 1,  # x * Phi(x), the exact form
    "gelu_tanh": 1,
    "softplus": 1,
    "clamp_min": 2,  # max(a, b), b a constant
    "clamp_max": 2,  # min(a, b), b a constant
}

#: Expressions with a name of their own. The kernels may have a faster form for these; the meaning is the expression.
NAMED: dict[str, str] = {
    "swiglu": "mul(silu(g), u)",
    "geglu": "mul(gelu(g), u)",
    "geglu_tanh": "mul(gelu_tanh(g), u)",
    "reglu": "mul(relu(g), u)",
    "silu": "silu(g)",
    "gelu": "gelu(g)",
    "gelu_tanh": "gelu_tanh(g)",
    "relu": "relu(g)",
    "relu2": "square(relu(g))",
}

_TOKEN = re.compile(r"\s*([(),]|[^\s(),]+)")
_SYMBOLIC = re.compile(r"c(\d+)\Z")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation of :data:`OPERATIONS` on its operands."""

    op: str
    args: tuple[Expr, ...]

    def __str__(self) -> str:
        return f"{self.op}({', '.join(map(str, self.args))})"


@dataclass(frozen=True, slots=True)
class Var:
    """``g`` (gate, or the only half of non-gated experts), ``u`` (up), or a symbolic constant ``c<i>``."""

    name: str

    def __str__(self) -> str:
        return self.name

    @property
    def constant(self) -> int | None:
        """The index of a symbolic constant, None for the halves."""
        found = _SYMBOLIC.match(self.name)
        return int(found[1]) if found else None


@dataclass(frozen=True, slots=True)
class Number:
    """A literal, printed so that it reads back exactly."""

    value: float

    def __str__(self) -> str:
        return repr(self.value)


Expr = Call | Var | Number


@functools.lru_cache(maxsize=256)
def parse(text: str) -> Expr:
    """Read an expression, or one of the :data:`NAMED` ones by name.

    Raises ValueError on unknown operations, a wrong number of operands, or trailing text.
    """
    tokens = _TOKEN.findall(NAMED.get(text, text))
    expr, rest = _parse(tokens, text)
    if rest:
        raise ValueError(f"activation {text!r}: unexpected {rest[0]!r}")
    return expr


def _parse(tokens: list[str], text: str) -> tuple[Expr, list[str]]:
    if not tokens:
        raise ValueError(f"activation {text!r} ends too early")
    head, rest = tokens[0], tokens[1:]
    if rest and rest[0] == "(":
        if head not in OPERATIONS:
            raise ValueError(f"activation {text!r}: unknown operation {head!r}")
        args: list[Expr] = []
        rest = rest[1:]
        while True:
            arg, rest = _parse(rest, text)
            args.append(arg)
            if not rest:
                raise ValueError(f"activation {text!r}: missing ')'")
            if rest[0] == ")":
                break
            if rest[0] != ",":
                raise ValueError(f"activation {text!r}: unexpected {rest[0]!r}")
            rest = rest[1:]
        if len(args) != OPERATIONS[head]:
            raise ValueError(f"activation {text!r}: {head} takes {OPERATIONS[head]} operands, not {len(args)}")
        return Call(head, tuple(args)), rest[1:]
    if head in ("g", "u") or _SYMBOLIC.match(head):
        return Var(head), rest
    try:
        return Number(float(head)), rest
    except ValueError:
        raise ValueError(f"activation {text!r}: unknown name {head!r}") from None


def variables(expr: Expr) -> frozenset[str]:
    """The halves and symbolic constants that ``expr`` reads."""
    if isinstance(expr, Var):
        return frozenset({expr.name})
    if isinstance(expr, Call):
        return frozenset().union(*map(variables, expr.args))
    return frozenset()


def swap_halves(expr: Expr) -> Expr:
    """``expr`` with ``g`` and ``u`` exchanged."""
    if isinstance(expr, Call):
        return Call(expr.op, tuple(map(swap_halves, expr.args)))
    if isinstance(expr, Var):
        return Var({"g": "u", "u": "g"}.get(expr.name, expr.name))
    return expr


def canonical(expr: Expr) -> Expr:
    """A normal form for matching: operands of ``add`` and ``mul`` in a fixed order, and the long spellings of silu and
    of a square folded. Each rule is an identity over the reals; results may differ in the last bit."""
    if not isinstance(expr, Call):
        return expr
    args = tuple(map(canonical, expr.args))
    if expr.op in ("add", "mul"):
        args = tuple(sorted(args, key=_order))
        if expr.op == "mul" and args[0] == args[1]:
            return Call("square", args[:1])
        if expr.op == "mul":
            for a, b in (args, args[::-1]):
                if a == Call("sigmoid", (b,)):  # b * sigmoid(b)
                    return Call("silu", (b,))
    return Call(expr.op, args)


def _order(expr: Expr) -> tuple[int, int, str]:
    """Calls before variables before numbers, larger first: ``mul(silu(g), u)``."""
    rank = 0 if isinstance(expr, Call) else 1 if isinstance(expr, Var) else 2
    text = str(expr)
    return rank, -len(text), text


_NAME_OF = {str(canonical(parse(text))): name for name, text in NAMED.items()}


def name_of(expr: Expr) -> str:
    """The short name where ``expr`` has one, else the text of its canonical form."""
    text = str(canonical(expr))
    return _NAME_OF.get(text, text)
