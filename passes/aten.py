"""ATen operations in normal form: one rule an operation, chosen by its name without overload or in-place underscore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .values import Arg, Dim, Table, Value, dim, scalar

#: Element-wise operations: the result at a place depends on the operands at that place only.
POINTWISE = frozenset(
    "add sub rsub mul div neg exp log log1p sqrt rsqrt abs square pow sigmoid tanh erf relu silu gelu softplus"
    " clamp clamp_min clamp_max reciprocal ge gt le lt eq ne logical_not logical_and bitwise_not bitwise_and where"
    " masked_fill floor_divide remainder maximum minimum hardtanh".split()
)


@dataclass(frozen=True, slots=True)
class View:
    """How a result follows from the tensor ``base`` whose storage it shares."""

    base: torch.Tensor
    derive: Callable[[Value], Value]
    invert: Callable[[Value], Value] | None = None


@dataclass(slots=True)
class Translation:
    """One call, its operands already as values."""

    table: Table
    name: str
    overload: str
    args: list[Any]  #: positional and keyword arguments by schema name, tensors as values
    named: dict[str, Any]
    tensors: dict[str, Any]  #: the same, untranslated
    dtype: torch.dtype | None  #: of an element-wise result before an in-place store

    def inplace(self, tensor: torch.Tensor) -> Value:
        """What an in-place call stores in ``tensor``."""
        shape = [dim(s) for s in tensor.shape]
        if self.name == "copy":
            return self.table.cast(self.table.expand(self.named["src"], shape), tensor.dtype)
        if self.name in ("fill", "zero"):
            return self.table.make("full", (self.named.get("value", 0),), shape, tensor.dtype)
        if self.name in POINTWISE:
            return self.table.cast(self._pointwise(shape, self.dtype or tensor.dtype), tensor.dtype)
        if self.name in ("index_put", "scatter", "scatter_add", "index_add"):
            return self.table.make(self.name, self._operands(), shape, tensor.dtype)
        return self.table.fresh(self.name, self._operands(), shape, tensor.dtype)

    def output(self, i: int, tensor: torch.Tensor) -> tuple[Value, View | None]:
        """Result number ``i`` and, where it is a view, of what."""
        shape, dtype = [dim(s) for s in tensor.shape], tensor.dtype
        if (view := self._view(i, tensor, shape)) is not None:
            return view.derive(self.named["self"]), view
        if self.name in _RULES:
            return _RULES[self.name](self, i, shape, dtype), None
        if self.name in POINTWISE:
            return self._pointwise(shape, dtype), None
        return self.table.fresh(f"{self.name}.{i}", self._operands(), shape, dtype), None

    def _pointwise(self, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
        return self.table.make(self.name, self._operands(), shape, dtype)

    def _operands(self) -> tuple[Arg, ...]:
        return tuple(map(_frozen, self.args))

    def _view(self, i: int, tensor: torch.Tensor, shape: list[Dim]) -> View | None:
        t, base = self.table, self.tensors.get("self")
        if not isinstance(base, torch.Tensor):
            return None
        was = [dim(s) for s in base.shape]
        if self.name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze", "flatten", "alias", "lift_fresh"):
            if self.overload == "dtype":
                return None
            return View(base, lambda v: t.reshape(v, shape), lambda v: t.reshape(v, was))
        if self.name == "detach" and not tensor.dtype.is_floating_point:
            return View(base, lambda v: v, lambda v: v)
        if self.name in ("t", "transpose", "permute"):
            order = _order(self.name, self.named, len(was))
            back = [order.index(a) for a in range(len(order))]
            return View(base, lambda v: t.permute(v, order), lambda v: t.permute(v, back))
        if self.name == "expand":
            return View(base, lambda v: t.expand(v, shape))
        if self.name == "slice":
            axis = self.named.get("dim", 0) % len(was)
            start = _bound(self.named.get("start"), 0, was[axis])
            stop = _bound(self.named.get("end"), was[axis], was[axis])
            step = self.named.get("step", 1)
            return View(base, lambda v: t.slice(v, axis, start, stop, step, shape))
        if self.name in ("split", "split_with_sizes", "chunk"):
            axis = self.named.get("dim", 0) % len(was)
            sizes = self.named.get("split_size", self.named.get("split_sizes"))
            start = sum(sizes[:i]) if isinstance(sizes, (tuple, list)) else i * (sizes or 0)
            return View(base, lambda v: t.slice(v, axis, start, start + shape[axis], 1, shape))
        if self.name in ("select", "unbind"):
            axis = self.named.get("dim", 0) % len(was)
            at = _bound(self.named["index"], 0, was[axis]) if self.name == "select" else i
            one = was[:axis] + [1] + was[axis + 1 :]
            return View(base, lambda v: t.reshape(t.slice(v, axis, at, at + 1, 1, one), shape))
        return None


Rule = Callable[[Translation, int, Sequence[Dim], torch.dtype], Value]


def _cast(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    device = c.tensors.get("device")
    if device is not None and torch.device(device).type != c.tensors["self"].device.type:
        return c.table.fresh("to_device", c._operands(), shape, dtype)
    return c.table.cast(c.named["self"], dtype)


def _same(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    value: Value = c.named["self"]
    return value


def _gather(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    """``x[index]`` with one integer index along the first axis."""
    indices = c.named.get("indices")
    index = c.named.get("index") if indices is None else indices[0] if len(indices) == 1 else None
    if isinstance(index, Value) and index.dtype in (torch.int64, torch.int32) and c.named.get("dim", 0) == 0:
        return c.table.gather(c.named["self"], index)
    return c.table.make("index", c._operands(), shape, dtype)


def _pick(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    """``torch.gather``, on one axis the same as indexing."""
    v, index = c.named["self"], c.named["index"]
    return c.table.gather(v, index) if len(v.shape) == 1 else c.table.make("pick", c._operands(), shape, dtype)


def _sort(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    v: Value = c.named["self"]
    axis = c.named.get("dim", -1) % len(v.shape)
    order = "descending" if c.named.get("descending", False) else "ascending"
    return c.table.make("sort_index" if i == 1 or c.name == "argsort" else "sort", (v, axis, order), shape, dtype)


def _reduce(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    v: Value = c.named["self"]
    axes = c.named.get("dim")
    axes = range(len(v.shape)) if axes is None or axes == [] else [axes] if isinstance(axes, int) else axes
    axes = tuple(sorted(a % len(v.shape) for a in axes))
    kept = [s for a, s in enumerate(v.shape) if a not in axes]
    if c.name == "sum":
        v = c.table.cast(v, dtype)
    return c.table.reshape(c.table.make(c.name, (v, axes), kept, dtype), shape)


def _cumsum(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    v: Value = c.named["self"]
    return c.table.make("cumsum", (v, c.named["dim"] % len(v.shape)), shape, dtype)


def _div(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    if c.named.get("rounding_mode") == "floor":
        return c.table.make("floor_divide", (_frozen(c.named["self"]), _frozen(c.named["other"])), shape, dtype)
    return c._pointwise(shape, dtype)


def _matmul(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    return c.table.make(c.name, c._operands(), shape, dtype)


def _grouped(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    """Rows of ``a`` times the matrix of their group; ``b`` is [groups, in, out]."""
    a, b, offs = (*c.args, None, None)[:3]
    if len(c.args) != 3 or not isinstance(offs, Value):  # a bias or another output dtype
        return c.table.fresh(c.name, c._operands(), shape, dtype)
    return c.table.make("grouped_mm", (a, b, offs), shape, dtype)


def _full(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    fill = c.named.get("fill_value", 1 if "ones" in c.name else 0)
    return c.table.make("full", (_frozen(fill),), shape, dtype)


def _arange(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    start, step = c.named.get("start", 0), c.named.get("step", 1)
    return c.table.make("arange", (_frozen(start), _frozen(c.named["end"]), _frozen(step)), shape, dtype)


def _histc(c: Translation, i: int, shape: Sequence[Dim], dtype: torch.dtype) -> Value:
    bounds = (c.named.get("bins", 100), c.named.get("min", 0), c.named.get("max", 0))
    return c.table.make("histc", (c.named["self"], *map(_frozen, bounds)), shape, dtype)


_RULES: dict[str, Rule] = {
    "_to_copy": _cast,
    "clone": _same,
    "contiguous": _same,
    "lift_fresh_copy": _same,
    "index": _gather,
    "index_select": _gather,
    "gather": _pick,
    "sort": _sort,
    "argsort": _sort,
    "sum": _reduce,
    "mean": _reduce,
    "amax": _reduce,
    "cumsum": _cumsum,
    "div": _div,
    "mm": _matmul,
    "bmm": _matmul,
    "addmm": _matmul,
    "baddbmm": _matmul,
    "_grouped_mm": _grouped,
    "grouped_mm": _grouped,
    "grouped_mm_fallback": _grouped,
    "full": _full,
    "full_like": _full,
    "zeros": _full,
    "zeros_like": _full,
    "new_zeros": _full,
    "ones": _full,
    "ones_like": _full,
    "arange": _arange,
    "histc": _histc,
    "index_put": _matmul,
    "scatter": _matmul,
    "scatter_add": _matmul,
    "index_add": _matmul,
    "detach": lambda c, i, shape, dtype: c.table.make("detach", (c.named["self"],), shape, dtype),
}


def translate(
    table: Table,
    func: torch._ops.OpOverload,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    value: Callable[[torch.Tensor], Value],
) -> Translation:
    """The call ``func(*args, **kwargs)`` with its tensors as values."""
    namespace, _, name = func._schema.name.partition("::")
    raw: dict[str, Any] = {}
    for i, schema_arg in enumerate(func._schema.arguments):
        if i < len(args):
            raw[schema_arg.name] = args[i]
        elif schema_arg.name in kwargs:
            raw[schema_arg.name] = kwargs[schema_arg.name]
    named = {key: _translated(arg, value) for key, arg in raw.items()}
    mutable = func._schema.is_mutable
    if mutable and name.endswith("_"):
        name = name[:-1]
    if namespace not in ("aten", "transformers"):
        name = func._schema.name
    dtype = None
    if mutable and name in POINTWISE:
        operands = [a for a in raw.values() if isinstance(a, (torch.Tensor, int, float)) and not isinstance(a, bool)]
        dtype = torch.result_type(operands[0], operands[1]) if len(operands) > 1 else None
    bound = {**{a.name: a.default_value for a in func._schema.arguments if a.has_default_value()}, **named}
    operands_in_order = [bound[a.name] for a in func._schema.arguments if a.name in bound and _matters(a, bound)]
    return Translation(table, name, func._overloadname, operands_in_order, named, raw, dtype)


def _matters(schema_arg: Any, bound: dict[str, Any]) -> bool:
    """Layout arguments are no part of a value, nor are arguments left at None or at an ``alpha`` of one."""
    if schema_arg.name in ("memory_format", "layout", "device", "pin_memory", "non_blocking"):
        return False
    if schema_arg.name == "alpha" and bound["alpha"] == 1:
        return False
    return not (schema_arg.name in ("dtype", "rounding_mode", "out_dtype", "bias") and bound[schema_arg.name] is None)


def _translated(arg: Any, value: Callable[[torch.Tensor], Value]) -> Any:
    if isinstance(arg, torch.Tensor):
        return value(arg)
    if isinstance(arg, (tuple, list)):
        return [_translated(a, value) for a in arg]
    return scalar(arg)


def _frozen(arg: Any) -> Arg:
    return tuple(map(_frozen, arg)) if isinstance(arg, (tuple, list)) else arg


def _order(name: str, named: dict[str, Any], rank: int) -> list[int]:
    order = list(range(rank))
    if name == "permute":
        return [d % rank for d in named["dims"]]
    a, b = (0, 1) if name == "t" else (named["dim0"] % rank, named["dim1"] % rank)
    if rank > 1:
        order[a], order[b] = order[b], order[a]
    return order


def _bound(given: Any, default: Dim, size: Dim) -> Dim:
    """A slice bound as a non-negative offset, the size where it is past the end."""
    if given is None:
        return default
    if isinstance(given, int) and isinstance(size, int):
        return max(0, given + size) if given < 0 else min(given, size)
    if isinstance(given, int) and given >= 2**62:
        return size
    return given if not isinstance(given, int) or given >= 0 else given + size
