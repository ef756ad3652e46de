"""The experts seam: two matmuls on the rows of each expert, with what stands between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import sympy
import torch

from .. import activation
from ..activation import Call, Expr, Number, Var
from ..spec import Halves, Layout
from .dispatch import Axes, Order, first, slot_ids
from .refusal import Refused, describe, require
from .values import Arg, Dim, Table, Value, numel


@dataclass(frozen=True, slots=True)
class ExpertMatmul:
    """``rows`` [N, in] times the weight of their expert.

    ``weight`` is [E, out, in] or [E, in, out] by ``layout``; ``groups`` the int32 ends of the experts' row ranges
    where rows are grouped; ``ids`` the expert of each row where every row has its gathered matrix.
    """

    rows: Value
    weight: Value
    layout: Layout
    groups: Value | None
    ids: Value | None
    bias: Value | None
    bias_ids: Value | None

    @property
    def experts(self) -> Dim:
        """E."""
        return self.weight.shape[0]

    @property
    def width(self) -> Dim:
        """Columns of the result."""
        return self.weight.shape[1 if self.layout is Layout.OUT_IN else 2]


def rows_of(value: Value) -> Value:
    """``value`` without a reshape around it."""
    return first(value) if value.op == "reshape" else value


def matmul(value: Value, table: Table, strip: Callable[[Value], Value]) -> ExpertMatmul:
    """The expert matmul, with its bias, whose result ``value`` is. ``strip`` takes masks off."""
    value = strip(rows_of(value))
    bias: Value | None = None
    bias_ids: Value | None = None
    if value.op == "add" and len(value.args) == 2:
        for a, b in (value.args, value.args[::-1]):
            if (
                isinstance(a, Value)
                and isinstance(b, Value)
                and rows_of(b).op == "gather"
                and _is_product(strip(rows_of(a)))
            ):
                found = rows_of(b)
                bias, picked = first(found), found.args[1]
                assert isinstance(picked, Value)
                bias_ids = picked
                require(value.dtype is a.dtype, "bias", f"the bias widens its product to {value.dtype}", value)
                value = strip(rows_of(a))
                break
    if not _is_product(value):
        raise Refused("experts", f"not the product of rows with their expert's matrix: {describe(value)}", value)
    if value.op == "grouped_mm":
        rows, weight, groups = value.args
        assert isinstance(rows, Value) and isinstance(weight, Value) and isinstance(groups, Value)
        weight, layout = _untransposed(weight, Layout.IN_OUT, table)
        return ExpertMatmul(rows, weight, layout, groups, None, bias, bias_ids)
    left, right = value.args
    assert isinstance(left, Value) and isinstance(right, Value)
    for rows, matrices, layout in ((left, right, Layout.IN_OUT), (right, left, Layout.OUT_IN)):
        one, width = (1, 2) if layout is Layout.IN_OUT else (2, 1)  # rows are [N, 1, in] or [N, in, 1]
        gathered = _bare(matrices)
        if rows.shape[one] == 1 and gathered.base.op == "gather" and len(gathered.base.shape) == 3:
            weight, ids = gathered.base.args
            assert isinstance(weight, Value) and isinstance(ids, Value)
            weight, layout = _untransposed(weight, _turned(layout) if gathered.turned else layout, table)
            flat = table.reshape(rows, (rows.shape[0], rows.shape[width]))
            return ExpertMatmul(flat, table.cast(weight, matrices.dtype), layout, None, ids, bias, bias_ids)
    raise Refused("experts", f"not the product of rows with their expert's matrix: {describe(value)}", value)


def _is_product(value: Value) -> bool:
    return value.op in ("grouped_mm", "bmm")


@dataclass(frozen=True, slots=True)
class _Bare:
    """Matrices without transposes around them and without one cast: a second one would round on purpose."""

    base: Value
    turned: bool


def _bare(matrices: Value) -> _Bare:
    turned = cast = False
    while (matrices.op == "cast" and not cast) or (matrices.op == "permute" and matrices.args[1] == (0, 2, 1)):
        cast, turned = cast or matrices.op == "cast", turned ^ (matrices.op == "permute")
        matrices = first(matrices)
    return _Bare(matrices, turned)


def _turned(layout: Layout) -> Layout:
    return Layout.OUT_IN if layout is Layout.IN_OUT else Layout.IN_OUT


def _untransposed(weight: Value, layout: Layout, table: Table) -> tuple[Value, Layout]:
    """The parameter itself where the product reads its transpose, so that its gradient has the parameter's layout."""
    bare = _bare(weight)
    return table.cast(bare.base, weight.dtype), _turned(layout) if bare.turned else layout


def bias_of(product: ExpertMatmul, ids: Value, order: Order, axes: Axes) -> Value | None:
    """The bias [E, out] of ``product``, whose rows have the slot ids ``ids``."""
    if product.bias is None or product.bias_ids is None:
        return None
    require(
        product.bias.shape == (axes.experts, product.width),
        "bias",
        f"the bias is {describe(product.bias)}, not one row an expert",
        product.bias,
    )
    if order.perm is None:
        same = product.bias_ids is ids
    else:
        same = slot_ids(product.bias_ids, order, axes) is ids
    require(same, "bias", "the bias is gathered for other experts than the rows'", product.bias_ids)
    return product.bias


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands between the two products: an expression over the halves of ``hidden``, and the symbolic floats in
    it, in the order of c0, c1, ..."""

    expr: Expr
    halves: Halves
    hidden: Value
    constants: tuple[sympy.Expr, ...]


_UNARY = {
    "neg", "exp", "log", "log1p", "sqrt", "rsqrt", "abs", "square", "sigmoid", "tanh", "erf", "relu", "silu",
}  # fmt: skip
_BINARY = {"add", "sub", "mul", "div"}


class GateReader:
    """Reads the expression from the rows of the down projection up to the product of the up projection."""

    def __init__(self, hidden: Value) -> None:
        self._hidden = hidden
        self._width = numel(hidden.shape[1:])  # [N, 2I], [N, 1, 2I] or [N, 2I, 1]
        self._known: dict[int, Expr] = {}
        self.constants: list[sympy.Expr] = []
        self.halves: set[str] = set()

    def read(self, value: Value) -> Expr:
        """The expression of ``value``. Raises Refused where something else than element-wise work is in the way."""
        found = self._known.get(id(value))
        if found is None:
            found = self._known[id(value)] = self._read(value)
        return found

    def _read(self, value: Value) -> Expr:
        half = self._half(value)
        if half is not None:
            self.halves.add(half)
            return Var(half)
        if value.op in ("cast", "reshape"):
            inner = first(value)
            if value.op == "cast":
                self._check_width(value)
            else:
                require(inner.shape[-1] == value.shape[-1], "activation", "columns move inside the activation", value)
            return self.read(inner)
        self._check_width(value)
        if value.op == "full" and isinstance(value.args[0], (int, float)):
            return Number(float(torch.tensor(value.args[0], dtype=value.dtype)))
        args = value.args
        if value.op in _UNARY and len(args) == 1:
            return Call(value.op, (self._operand(args[0]),))
        if value.op in _BINARY and len(args) == 2:
            return Call(value.op, (self._operand(args[0]), self._operand(args[1])))
        if value.op == "rsub" and len(args) == 2:
            return Call("sub", (self._operand(args[1]), self._operand(args[0])))
        if value.op == "reciprocal":
            return Call("div", (Number(1.0), self._operand(args[0])))
        if value.op == "gelu":
            return Call("gelu_tanh" if args[1] == "tanh" else "gelu", (self._operand(args[0]),))
        if value.op == "softplus" and args[1:] == (1, 20):
            return Call("softplus", (self._operand(args[0]),))
        if value.op == "pow" and isinstance(args[0], Value) and args[1] in (2, 0.5, -0.5):
            return Call({2: "square", 0.5: "sqrt", -0.5: "rsqrt"}[args[1]], (self._operand(args[0]),))
        if value.op in ("clamp", "clamp_min", "clamp_max"):  # hardtanh passes no gradient at its bounds
            return self._clamp(value)
        raise Refused("activation", f"not element-wise on the rows of the up projection: {describe(value)}", value)

    def _clamp(self, value: Value) -> Expr:
        out = self._operand(value.args[0])
        bounds = value.args[1:]
        low, high = {"clamp_min": (*bounds, None), "clamp_max": (None, *bounds)}.get(value.op, (*bounds, None))[:2]
        for op, bound in (("clamp_min", low), ("clamp_max", high)):
            if bound is not None:
                limit = self._operand(bound)
                constant = isinstance(limit, Number) or (isinstance(limit, Var) and limit.constant is not None)
                require(constant, "activation", f"a bound of {op} differs from row to row", value)
                out = Call(op, (out, limit))
        return out

    def _operand(self, arg: Arg) -> Expr:
        if isinstance(arg, Value):
            return self.read(arg)
        if isinstance(arg, (int, float)) and not isinstance(arg, bool):
            return Number(float(arg))
        if isinstance(arg, sympy.Expr):
            if arg not in self.constants:
                self.constants.append(arg)
            return Var(f"c{self.constants.index(arg)}")
        raise Refused("activation", f"an operand of the activation is neither a row value nor a number: {arg}")

    def _check_width(self, value: Value) -> None:
        """A value narrower than the up projection's result rounds on purpose, and the kernels would not."""
        require(
            value.dtype is self._hidden.dtype
            or (value.dtype is torch.float32 and self._hidden.dtype is not torch.float64),
            "activation",
            f"the activation is in {value.dtype} inside, the experts in {self._hidden.dtype}",
            value,
        )

    def _half(self, value: Value) -> str | None:
        """Which part of the up projection ``value`` is: ``low`` and ``high`` columns, ``even`` and ``odd``, or all."""
        if self._is_hidden(value):
            return "all"
        sliced = first(value) if value.op == "reshape" else value
        if sliced.op != "slice" or not self._is_hidden(base := first(sliced)):
            return None
        axis, start, stop, step = sliced.args[1:]
        rank, wide = len(base.shape), base.shape[-1]
        if axis == rank - 1 and wide == self._width and isinstance(wide, int) and wide % 2 == 0:
            parts = {(0, wide // 2, 1): "low", (wide // 2, wide, 1): "high", (0, wide, 2): "even", (1, wide, 2): "odd"}
            return parts.get((start, stop, step))  # type: ignore[arg-type]
        if rank == 3 and base.shape[1:] == (2, value.shape[-1]) and axis == 1:  # h.view(N, 2, I)
            return "high" if start == 1 else "low"
        if rank == 3 and base.shape[1:] == (value.shape[-1], 2) and axis == 2:  # h.view(N, I, 2)
            return "odd" if start == 1 else "even"
        return None

    def _is_hidden(self, value: Value) -> bool:
        return rows_of(value) is self._hidden


_PARTS: dict[frozenset[str], tuple[Halves, dict[str, str]]] = {
    frozenset({"all"}): (Halves.SINGLE, {"all": "g"}),
    frozenset({"low", "high"}): (Halves.GATE_UP, {"low": "g", "high": "u"}),
    frozenset({"even", "odd"}): (Halves.INTERLEAVED, {"even": "g", "odd": "u"}),
}


def gate(rows: Value, is_hidden: Callable[[Value], bool]) -> Gate:
    """The activation whose result ``rows`` [N, I] is."""
    hidden = _nearest(rows, is_hidden)
    reader = GateReader(hidden)
    expr = reader.read(rows)
    parts = frozenset(reader.halves)
    require(
        parts in _PARTS,
        "activation",
        f"the activation reads {' and '.join(sorted(parts))} columns of the up projection",
        rows,
    )
    halves, rename = _PARTS[parts]
    expr = activation.canonical(_renamed(expr, rename))
    if halves is Halves.GATE_UP and _is_up_first(expr):
        expr, halves = activation.canonical(activation.swap_halves(expr)), Halves.UP_GATE
    return Gate(expr, halves, hidden, tuple(reader.constants))


def _nearest(rows: Value, is_hidden: Callable[[Value], bool]) -> Value:
    """The result of the up projection that ``rows`` follow from."""
    queue, seen = [rows], set()
    while queue:
        value = rows_of(queue.pop(0))
        if is_hidden(value):
            return value
        if id(value) not in seen:
            seen.add(id(value))
            queue.extend(value.operands)
    raise Refused("activation", "the rows of the down projection do not follow from an up projection", rows)


def _renamed(expr: Expr, names: dict[str, str]) -> Expr:
    if isinstance(expr, Call):
        return Call(expr.op, tuple(_renamed(a, names) for a in expr.args))
    return Var(names.get(expr.name, expr.name)) if isinstance(expr, Var) else expr


def _is_up_first(expr: Expr) -> bool:
    """Whether exchanging the halves gives an activation with a name: then the first half is the up one."""
    return (
        activation.name_of(expr) not in activation.NAMED
        and activation.name_of(activation.swap_halves(expr)) in activation.NAMED
    )
