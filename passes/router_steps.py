"""What the proof of a router looks through, and the operations that have no normal form: top-k, softmax, maximum."""

from __future__ import annotations

import torch

from ..spec import DTYPES
from .dispatch import first
from .refusal import describe, require
from .values import Arg, Table, Value
from .window import name_of


def topk(value: Value, output: int) -> tuple[Value, int] | None:
    """(operand, k) where ``value`` is output number ``output`` of a top-k of the largest along the last axis. The order
    of an unsorted one is free, so ours will do."""
    args = opaque(value, f"topk.{output}")
    if args is None:
        return None
    base, top_k, axis, largest, _sorted = args
    assert isinstance(base, Value)
    require(largest is True, "router", "the smallest are chosen, not the largest", value)
    along = axis in (-1, len(base.shape) - 1) and isinstance(top_k, int)
    require(along, "router", f"the choice is of {top_k} along axis {axis}, not of a fixed number of experts", value)
    assert isinstance(top_k, int)
    return base, top_k


def opaque(value: Value, name: str) -> tuple[Arg, ...] | None:
    """The operands of an operation that has no normal form."""
    return value.args[2:] if value.op == "opaque" and value.args[0] == name else None


def constant(arg: Arg) -> Arg:
    """The number that every element of ``arg`` is, ``arg`` itself where that is not known."""
    if isinstance(arg, Value):
        if arg.op == "full":
            return arg.args[0]
        made = opaque(arg, "scalar_tensor.0")
        return arg if made is None else made[0]
    return arg


def shown(value: Value) -> str:
    """``value`` for a person; what comes from before the router by the name of its operation."""
    name = "" if value.op != "leaf" or value.origin is None else name_of(value.origin) or value.origin.name
    return f"{name} [{', '.join(map(str, value.shape))}]" if name else describe(value)


def narrower(a: torch.dtype, b: torch.dtype, at: Value) -> torch.dtype:
    """Of two dtypes, the one whose numbers the other holds. Refuses where neither is."""
    require(a in DTYPES and b in DTYPES, "router", f"rounded to {a} and to {b}, one of them not known", at)
    wide = torch.promote_types(a, b)
    require(wide in (a, b), "router", f"rounded to {a} and to {b}", at)
    return b if wide is a else a


def rounded(value: Value) -> tuple[Value, torch.dtype]:
    """``value`` without its casts, and the dtype that it is rounded to in all."""
    dtype = value.dtype
    while value.op == "cast":
        value = first(value)
        dtype = narrower(dtype, value.dtype, value)
    return value, dtype


def unwidened(value: Value) -> Value:
    """``value`` without the casts that change no number."""
    while value.op == "cast" and narrower(value.dtype, first(value).dtype, value) is first(value).dtype:
        value = first(value)
    return value


class Undetached:
    """Values as they are where autograd does not matter: without the marks of switched-off gradients."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._known: dict[int, tuple[Value, Value]] = {}

    def __call__(self, value: Value) -> Value:
        """``value`` without the marks."""
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = value, self._plain(value)
        return found[1]

    def _plain(self, value: Value) -> Value:
        if value.op == "detach":
            return self(first(value))
        args = tuple(map(self._arg, value.args))
        if all(a is b for a, b in zip(args, value.args, strict=True)):
            return value
        if value.op == "reshape":
            return self._table.reshape(args[0], value.shape)  # type: ignore[arg-type]
        if value.op == "expand":
            return self._table.expand(args[0], value.shape)  # type: ignore[arg-type]
        if value.op == "cast":
            return self._table.cast(args[0], value.dtype)  # type: ignore[arg-type]
        return self._table.make(value.op, args, value.shape, value.dtype)

    def _arg(self, arg: Arg) -> Arg:
        if isinstance(arg, Value):
            return self(arg)
        if isinstance(arg, tuple):
            new = tuple(map(self._arg, arg))
            return arg if all(a is b for a, b in zip(new, arg, strict=True)) else new
        return arg
