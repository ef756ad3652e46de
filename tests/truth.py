"""What a low-precision run should have computed: the same in float64, with the same discrete decisions.

A top-k in bf16 may choose another expert than one in float64, and then every number after it differs for a reason that
is no error. So :class:`Recorder` keeps what a run decided, and :class:`Exact` repeats it:

* a decision is the integer or boolean result of a floating-point operation in the forward (top-k, argmax, sort, a
  comparison). The values that come with chosen indices are gathered from the float64 operand, so they and their
  gradients are exact;
* random numbers are repeated, for generators draw differently in another dtype;
* a cast to a narrower float, or a tensor made in one, is float64: the truth rounds nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

Values = Mapping[str, "Tensor | None"]


class Diverged(Exception):
    """The exact run asked for another decision than the recorded run had made."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One result to be repeated."""

    op: str
    value: Tensor


def _random(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


#: Integers from floats without a choice: counts that were kept in floats.
_COUNTS = ("aten::cumsum",)


#: What a broadcast operand's gradient is added up by.
_SUMS = (torch.ops.aten.sum.default, torch.ops.aten.sum.dim_IntList)


def _floats(tree: Any) -> bool:
    return any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves(tree))


def _decided(func: Any, args: Any, out: Any) -> Tensor | None:
    """The part of ``out`` that a rounding error could have made another one."""
    if _random(func):
        return out if isinstance(out, Tensor) else None
    if torch._C._current_autograd_node() is not None or func.name() in _COUNTS or not _floats(args):
        return None  # a backward follows from its forward: its masks are of the values that were saved
    return next((t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_floating_point()), None)


class Recorder(TorchDispatchMode):
    """Keeps the decisions made under it, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.decisions: list[Decision] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        decided = _decided(func, args, out)
        if decided is not None:
            self.decisions.append(Decision(str(func), decided.clone()))
        return out


class Exact(TorchDispatchMode):
    """Runs in float64 what was recorded in another dtype, with ``decisions`` repeated."""

    def __init__(self, decisions: Sequence[Decision]) -> None:
        super().__init__()
        self._left = list(decisions)
        self._summed: dict[float, float] = {}

    def summed(self, grad: Tensor | None) -> float:
        """The norm of the terms that the backward added up to a gradient of one element; 0 where it added none."""
        return self._summed.get(float(grad), 0.0) if grad is not None and grad.numel() == 1 else 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if (dtype := kwargs.get("dtype")) is not None and dtype.is_floating_point:
            kwargs["dtype"] = torch.float64
        out = func(*args, **kwargs)
        decided = _decided(func, args, out)
        if decided is None:
            if func in _SUMS and out.numel() == 1 < args[0].numel() and torch._C._current_autograd_node() is not None:
                self._summed[float(out)] = float(args[0].norm())  # by value: views and copies do not change it
            return out
        repeated = self._next(str(func), decided)
        if _random(func):
            return out.copy_(repeated)
        if isinstance(out, Tensor):
            return repeated.to(out.dtype)
        return _gathered(func, args, kwargs, repeated)

    def _next(self, op: str, decided: Tensor) -> Tensor:
        found = self._left.pop(0) if self._left else None
        if found is None or found.op != op or found.value.shape != decided.shape:
            recorded = f"{found.op} {tuple(found.value.shape)}" if found else "nothing more"
            raise Diverged(f"float64 decides by {op} {tuple(decided.shape)}, the recorded run by {recorded}")
        return found.value


def _gathered(func: Any, args: Any, kwargs: Any, indices: Tensor) -> tuple[Tensor, Tensor]:
    """(values, indices) of top-k, sort and the like along their ``dim``."""
    at = {a.name: i for i, a in enumerate(func._schema.arguments)}
    default = func._schema.arguments[at["dim"]].default_value
    dim = kwargs.get("dim", args[at["dim"]] if len(args) > at["dim"] else default)
    dropped = indices.dim() < args[0].dim()
    values = args[0].gather(dim, indices.unsqueeze(dim) if dropped else indices)
    return (values.squeeze(dim) if dropped else values), indices


def to_double(tree: Any) -> Any:
    """``tree`` with every floating tensor in float64 and everything else as it is."""
    return tree_map(lambda t: t.double() if isinstance(t, Tensor) and t.is_floating_point() else t, tree)


#: Roundings to the run's dtype between an input and a gradient that our operators make: up, activation, down, weighted
#: row and sum on the way out; the rows' gradient, the activation's, the halves' and the gathered sum on the way back.
ROUNDINGS = 9
#: A small gradient keeps the rounding of larger terms: below this part of the largest one's root mean square, that is
#: the measure. The second number is for one that is zero but for rounding in float64 as well, as a router's is where
#: the weights are divided by the sum of a single one: nothing is left of it but its terms.
FLOOR, CANCELLED = 0.01, 0.1
#: The norm of many errors is close to its expectation; that of a single element is one draw, and a normal one is
#: beyond 4 standard deviations once in 16000.
ONE_DRAW = 4.0


@dataclass(frozen=True, slots=True)
class Worst:
    """The tensor closest to, or furthest beyond, its bound. Errors are relative, see :func:`compare`."""

    name: str
    error: float
    eager: float  #: eager's own error
    allowed: float

    @property
    def used(self) -> float:
        """Part of the bound that the error takes; above 1 the value is wrong."""
        return math.inf if math.isnan(self.error) else self.error / self.allowed

    def __str__(self) -> str:
        return f"{self.name}: off by {self.error:.2e}, eager by {self.eager:.2e}, allowed {self.allowed:.2e}"


def compare(
    ours: Values,
    eager: Values,
    truth: Values,
    dtype: torch.dtype,
    *,
    terms: int,
    summed: Mapping[str, float] = MappingProxyType({}),
) -> Worst:
    """The worst of ``ours`` against ``truth``, where ``eager`` may be wrong too.

    The error of a tensor is the norm of the difference over the norm of the truth. Allowed is the sum of

    * 1.5 times eager's own error: as many roundings, in another order;
    * eps(dtype) * sqrt(ROUNDINGS / 12), for where eager was lucky or rounds less: one rounding is uniform within
      eps / 2 of an element, so eps / sqrt(12) of the norm, and independent ones add in quadrature;
    * eps(float32) * sqrt(terms): every sum is kept in float32, and in another order one of ``terms`` numbers moves by a
      random walk of its roundings. It matters in float32 only.

    In a tensor of many elements what cancels in one is made up for in another, so that errors are relative to its norm.
    A gradient of one element is a single sum: each term t_j carries its own roundings, which leave eps * c * norm(t) in
    it, however small the sum is. Its error is relative to norm(t), from ``summed`` by name, and eager's own error says
    little: it may be zero by chance. There the last two terms are multiplied by ``ONE_DRAW``.

    Raises AssertionError where a gradient is there for one of the two only, or shapes or dtypes differ.
    """
    slack = torch.finfo(dtype).eps * math.sqrt(ROUNDINGS / 12) + torch.finfo(torch.float32).eps * math.sqrt(terms)
    worst = Worst("nothing to compare", 0.0, 0.0, 1.0)
    largest = {kind: max(_rms(t) for n, t in truth.items() if _kind(n) == kind) for kind in map(_kind, truth)}
    for name, reference in eager.items():
        value, exact = ours[name], truth[name]
        assert (value is None) == (reference is None), (
            f"{name}: {'no' if value is None else 'a'} gradient, unlike eager"
        )
        if value is None or reference is None:
            continue
        assert (value.dtype, value.shape) == (reference.dtype, reference.shape), f"{name}: another dtype or shape"
        if not value.numel():
            continue
        assert exact is not None, f"{name}: the truth has no gradient"
        scale = max(_scale(_rms(exact), largest[_kind(name)]), summed.get(name, 0.0))
        mine, theirs = (_rms(t.double() - exact) / scale for t in (value, reference))
        found = Worst(name, mine, theirs, 1.5 * theirs + slack * (ONE_DRAW if value.numel() == 1 else 1.0))
        if not found.used <= worst.used:
            worst = found
    return worst


def _scale(size: float, largest: float) -> float:
    """What an error is relative to, given the root mean squares of its tensor and of the largest one."""
    noise = torch.finfo(torch.float32).eps * largest
    return max(size, (CANCELLED if size <= noise else FLOOR) * largest, 1e-300)


def _kind(name: str) -> str:
    return name.split()[0]


def _rms(tensor: Tensor | None) -> float:
    return 0.0 if tensor is None or not tensor.numel() else float(tensor.double().norm()) / math.sqrt(tensor.numel())
