"""Patterns over values: a pattern reads like the expression that it recognises.

``match(P.op("gather", P.any("x"), P.op("floor_divide", P.any("perm"), P.int("k"))), value)`` gives the captures by
name, or None. A name that occurs twice must capture the same value both times.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import sympy

from .values import Arg, Value


@dataclass(frozen=True, slots=True)
class Pattern:
    """One node of a pattern; see the constructors of :class:`P`."""

    kind: str
    name: str = ""
    parts: tuple[Any, ...] = ()


class P:
    """Constructors."""

    @staticmethod
    def any(name: str) -> Pattern:
        """Any value."""
        return Pattern("any", name)

    @staticmethod
    def int(name: str) -> Pattern:
        """A number or a symbolic size."""
        return Pattern("int", name)

    @staticmethod
    def op(op: str, *parts: Pattern | Arg) -> Pattern:
        """The operation ``op``; literal arguments must be equal."""
        return Pattern("op", op, parts)

    @staticmethod
    def op_list(*parts: Pattern | Arg) -> Pattern:
        """A list argument."""
        return Pattern("list", "", parts)

    @staticmethod
    def commuted(op: str, a: Pattern, b: Pattern) -> Pattern:
        """A commutative operation, in either order."""
        return Pattern("alt", "", (Pattern("op", op, (a, b)), Pattern("op", op, (b, a))))

    @staticmethod
    def alt(*parts: Pattern) -> Pattern:
        """The first of ``parts`` that fits."""
        return Pattern("alt", "", parts)

    @staticmethod
    def reshaped(part: Pattern) -> Pattern:
        """``part``, or a reshape of it."""
        return Pattern("alt", "", (Pattern("op", "reshape", (part, Pattern("skip"))), part))

    @staticmethod
    def through(op: str, part: Pattern) -> Pattern:
        """``part``, or ``op`` of it with any further arguments (a cast, a mask)."""
        return Pattern("through", op, (part,))


def match(pattern: Pattern, value: Arg) -> SimpleNamespace | None:
    """The captures of the first way in which ``pattern`` fits ``value``."""
    for captures in _ways(pattern, value, {}):
        return SimpleNamespace(**captures)
    return None


def matches(pattern: Pattern, value: Arg) -> Iterator[SimpleNamespace]:
    """The captures of every way in which ``pattern`` fits."""
    for captures in _ways(pattern, value, {}):
        yield SimpleNamespace(**captures)


def _ways(pattern: Pattern, value: Arg, seen: dict[str, Arg]) -> Iterator[dict[str, Arg]]:
    if pattern.kind == "skip":
        yield seen
    elif pattern.kind in ("any", "int"):
        fits = isinstance(value, Value) if pattern.kind == "any" else isinstance(value, (int, sympy.Expr))
        known = seen.get(pattern.name)
        if fits and (known is None or known is value or (pattern.kind == "int" and known == value)):
            yield {**seen, pattern.name: value}
    elif pattern.kind == "alt":
        for part in pattern.parts:
            yield from _ways(part, value, seen)
    elif pattern.kind == "list":
        if isinstance(value, tuple) and len(value) == len(pattern.parts):
            yield from _all(list(zip(pattern.parts, value, strict=True)), seen)
    elif pattern.kind == "through":
        if isinstance(value, Value) and value.op == pattern.name:
            yield from _ways(pattern.parts[0], value.args[0], seen)
        yield from _ways(pattern.parts[0], value, seen)
    elif isinstance(value, Value) and value.op == pattern.name and len(value.args) == len(pattern.parts):
        yield from _all(list(zip(pattern.parts, value.args, strict=True)), seen)


def _all(pairs: list[tuple[Pattern | Arg, Arg]], seen: dict[str, Arg]) -> Iterator[dict[str, Arg]]:
    if not pairs:
        yield seen
        return
    (part, arg), rest = pairs[0], pairs[1:]
    if isinstance(part, Pattern):
        for captures in _ways(part, arg, seen):
            yield from _all(rest, captures)
    elif part is arg or (not isinstance(part, Value) and type(part) is type(arg) and part == arg):
        yield from _all(rest, seen)
