"""What the definitions of the operators share: the choice of kernels, schemas' common parts, checks, and the names of
wanted gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import spec as specs
from .kernels import cpu, library, reference
from .kernels.family import Family, Need, Rows
from .kernels.fused import Fused
from .spec import Combine, ExpertsSpec, Grad

FAMILIES: dict[str, Family] = {
    "reference": reference,
    "cpu": cpu,
    "library": library,
    "triton": Fused("tiled"),
    "hopper": Fused("pingpong", "wgmma", "tiled"),
}

#: Operands keep the strides they were traced with: a weight may be a transposed view, which the kernels take as it is.
_TAGS = (torch.Tag.needs_exact_strides,)
KEY = "str spec, str plan, str digest"
ROWS = "Tensor order, Tensor inverse, Tensor offsets"


def family(plan: str) -> Family:
    """The kernels that ``plan`` names. Raises ValueError, naming the families there are."""
    name = plan.partition("/")[0]
    try:
        return FAMILIES[name]
    except KeyError:
        raise ValueError(f"plan {plan!r}: no kernel family {name!r}; there are {', '.join(FAMILIES)}") from None


def define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    """The custom operator ``megamoe::name``; the first argument of ``kernel`` is a tensor on the operator's device."""

    def run(*args: Any) -> Any:
        with no_autocast(args[0].device.type):
            return kernel(*args)

    op = torch.library.custom_op(f"megamoe::{name}", run, mutates_args=(), schema=schema, tags=_TAGS)
    op.register_fake(fake)
    return op


def no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Operands already have the dtype that each matmul has under the region's autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def same_dtype(op: str, **operands: Tensor | None) -> None:
    """Raise TypeError, naming dtypes, where the operands of ``op`` differ in dtype."""
    dtypes = {name: t.dtype for name, t in operands.items() if t is not None}
    if len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"megamoe::{op} takes operands of one dtype, but {given}")


def or_empty(like: Tensor, *grads: Tensor | None) -> tuple[Tensor, ...]:
    """An operator's outputs are tensors: what was not asked for is an empty one."""
    return tuple(like.new_empty(0) if g is None else g for g in grads)


def parse_need(text: str) -> Need:
    """The gradients that an operator's ``need`` names."""
    return frozenset(Grad(name) for name in text.split(",") if name)


def asked(ctx: Any, **positions: int) -> str:
    """The gradients that autograd wants, as ``need``: names of ``Grad`` whose input at that position requires one."""
    return ",".join(name for name, at in positions.items() if ctx.needs_input_grad[at])


def if_wanted(need: str, name: str, grad: Tensor) -> Tensor | None:
    """``grad`` where ``need`` names it, None for the empty tensor that stands in its place."""
    return grad if name in need.split(",") else None


def rows_of(spec: ExpertsSpec, tokens: int, order: Tensor, inverse: Tensor, offsets: Tensor) -> Rows:
    """The row order of ``tokens`` tokens; a spec without a fixed top_k takes it from the shapes."""
    return Rows(order, inverse, offsets, spec.top_k or max(order.shape[0] // max(tokens, 1), 1))


def combined(spec: str, topk_weights: Tensor | None) -> ExpertsSpec:
    """The spec, after a check that it goes with or without routing weights (ValueError)."""
    s = specs.parse(spec)
    if (topk_weights is None) != (s.combine is Combine.ROWS):
        raise ValueError(f"combine={s.combine.value} {'needs' if topk_weights is None else 'takes no'} topk_weights")
    return s
