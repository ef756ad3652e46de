"""Values: what the nodes of a graph compute, in one normal form, whatever way they were spelled.

Two tensors are proved equal by being the same object: a table hash-conses every value, and views, casts that change
nothing, copies and the method, function and in-place spellings of an operation all end in the same form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import sympy
import torch

Dim: TypeAlias = "int | sympy.Expr"
Scalar: TypeAlias = "int | float | bool | sympy.Expr"
Arg: TypeAlias = "Value | Scalar | torch.dtype | str | None | tuple[Arg, ...]"


def dim(size: int | torch.SymInt) -> Dim:
    """A size as a number or a simplified sympy expression."""
    if isinstance(size, int):
        return size
    node = size.node
    expr = sympy.sympify(node.shape_env.simplify(node.expr))
    return int(expr) if expr.is_Integer else expr


def scalar(value: Any) -> Scalar:
    """A number as it is, a symbolic one as its expression."""
    if isinstance(value, torch.SymInt):
        return dim(value)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        expr = value.node.expr
        return float(expr) if isinstance(expr, sympy.Number) else expr
    return value


@dataclass(slots=True, eq=False)
class Value:
    """One value: ``op`` applied to ``args``. Compare with ``is``."""

    op: str
    args: tuple[Arg, ...]
    shape: tuple[Dim, ...]
    dtype: torch.dtype
    origin: torch.fx.Node | None = field(default=None, repr=False)  #: the source node that first computed it

    @property
    def operands(self) -> list[Value]:
        """The values among the arguments."""
        found: list[Value] = []
        stack: list[Arg] = list(reversed(self.args))
        while stack:
            arg = stack.pop()
            if isinstance(arg, Value):
                found.append(arg)
            elif isinstance(arg, tuple):
                stack.extend(reversed(arg))
        return found


def numel(shape: Sequence[Dim]) -> Dim:
    """The product of the sizes."""
    out: Dim = 1
    for size in shape:
        out = out * size
    return out


class Table:
    """Makes values, each once, and keeps them in normal form."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Any, ...], Value] = {}
        self._fresh = 0
        self.at: torch.fx.Node | None = None  #: source node that is running, the origin of new values

    def make(self, op: str, args: tuple[Arg, ...], shape: Sequence[Dim], dtype: torch.dtype) -> Value:
        """The value ``op(args)``. ``shape`` and ``dtype`` follow from the operands, so they are not part of the key,
        except that a number of another type is another argument (``1`` is not ``1.0``)."""
        key = (op, tuple(map(_key, args)), tuple(shape), dtype)
        found = self._interned.get(key)
        if found is None:
            found = self._interned[key] = Value(op, args, tuple(shape), dtype, self.at)
        return found

    def fresh(self, name: str, operands: Sequence[Arg], shape: Sequence[Dim], dtype: torch.dtype) -> Value:
        """A value about which nothing is known but what it was computed from."""
        self._fresh += 1
        return self.make("opaque", (name, self._fresh, *operands), shape, dtype)

    def leaf(self, index: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
        """Input number ``index`` of the window."""
        return self.make("leaf", (index,), shape, dtype)

    def reshape(self, v: Value, shape: Sequence[Dim]) -> Value:
        """The elements of ``v`` in the same row-major order."""
        if v.op == "reshape":
            v = _value(v.args[0])
        shape = tuple(shape)
        return v if shape == v.shape else self.make("reshape", (v, shape), shape, v.dtype)

    def permute(self, v: Value, dims: Sequence[int]) -> Value:
        """Axis ``i`` of the result is axis ``dims[i]`` of ``v``."""
        dims = tuple(d % len(v.shape) for d in dims)
        if v.op == "permute":
            inner = v.args[1]
            assert isinstance(inner, tuple)
            dims = tuple(inner[d] for d in dims)
            v = _value(v.args[0])
        if dims == tuple(range(len(dims))):
            return v
        moved = [d for d in dims if v.shape[d] != 1]
        if moved == sorted(moved):  # only axes of size one change places
            return self.reshape(v, [v.shape[d] for d in dims])
        return self.make("permute", (v, dims), [v.shape[d] for d in dims], v.dtype)

    def expand(self, v: Value, shape: Sequence[Dim]) -> Value:
        """``v`` repeated along axes of size one, new axes in front."""
        shape = tuple(shape)
        if len(shape) > len(v.shape):
            v = self.reshape(v, (1,) * (len(shape) - len(v.shape)) + v.shape)
        return v if shape == v.shape else self.make("expand", (v, shape), shape, v.dtype)

    def cast(self, v: Value, dtype: torch.dtype) -> Value:
        """``v`` in another dtype."""
        return v if dtype == v.dtype else self.make("cast", (v, dtype), v.shape, dtype)

    def slice(self, v: Value, axis: int, start: Dim, stop: Dim, step: int, shape: Sequence[Dim]) -> Value:
        """Elements ``start:stop:step`` along ``axis``; ``shape`` is the result's."""
        if start == 0 and step == 1 and tuple(shape) == v.shape:
            return v
        return self.make("slice", (v, axis % len(v.shape), start, stop, step), shape, v.dtype)

    def gather(self, v: Value, index: Value) -> Value:
        """Rows ``v[index]``: the index picks along the first axis."""
        return self.make("gather", (v, index), index.shape + v.shape[1:], v.dtype)


def _value(arg: Arg) -> Value:
    assert isinstance(arg, Value)
    return arg


def _key(arg: Arg) -> Any:
    if isinstance(arg, Value):
        return id(arg)
    if isinstance(arg, tuple):
        return tuple(map(_key, arg))
    if isinstance(arg, (int, float, bool)):
        return (type(arg), repr(arg))  # 0.0 and -0.0, 1 and True differ
    return arg
