"""The fused operators, ``torch.ops.megamoe.*``: schemas, fake forms, autograd and FLOP formulas.

Training is cut in three, ``route_metadata`` -> ``experts_up`` -> ``experts_down``, with the pre-activation h as the one
differentiable edge, so that activation checkpointing recomputes the up projection only. ``experts`` is the whole in one
operator that saves its inputs only: for inference, and for training that would rather recompute than keep h.

``spec`` is the text of an :class:`~moe_inductor.spec.ExpertsSpec`, ``plan`` is ``<family>/<precision>``, ``digest`` is
:func:`moe_inductor.digest.digest` (not read here: it keys compile caches). ``consts`` are the activation's c0, c1, ...
Axes and row order: :mod:`moe_inductor.kernels.family`. ValueError on an unknown spec or family, TypeError on operands
whose dtypes differ.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import flops
from . import spec as specs
from .kernels import cpu, library, reference
from .kernels.family import Family, Need, Rows, sort_by_expert, width
from .spec import Combine, ExpertsSpec, Grad

FAMILIES: dict[str, Family] = {"reference": reference, "cpu": cpu, "library": library}

#: Operands keep the strides they were traced with: a weight may be a transposed view, which the kernels take as it is.
_TAGS = (torch.Tag.needs_exact_strides,)
_KEY = "str spec, str plan, str digest"
_ROWS = "Tensor order, Tensor inverse, Tensor offsets"


def family(plan: str) -> Family:
    """The kernels that ``plan`` names. Raises ValueError, naming the families there are."""
    name = plan.partition("/")[0]
    try:
        return FAMILIES[name]
    except KeyError:
        raise ValueError(f"plan {plan!r}: no kernel family {name!r}; there are {', '.join(FAMILIES)}") from None


def _define(name: str, schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> Any:
    def run(*args: Any) -> Any:
        with _no_autocast(args[0].device.type):
            return kernel(*args)

    op = torch.library.custom_op(f"megamoe::{name}", run, mutates_args=(), schema=schema, tags=_TAGS)
    op.register_fake(fake)
    return op


def _no_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Operands already have the dtype that each matmul has under the region's autocast."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def _same_dtype(op: str, **operands: Tensor | None) -> None:
    dtypes = {name: t.dtype for name, t in operands.items() if t is not None}
    if len(set(dtypes.values())) > 1:
        given = ", ".join(f"{name} is {dtype}" for name, dtype in dtypes.items())
        raise TypeError(f"megamoe::{op} takes operands of one dtype, but {given}")


def _or_empty(like: Tensor, *grads: Tensor | None) -> tuple[Tensor, ...]:
    """An operator's outputs are tensors: what was not asked for is an empty one."""
    return tuple(like.new_empty(0) if g is None else g for g in grads)


def _need(text: str) -> Need:
    return frozenset(Grad(name) for name in text.split(",") if name)


def _asked(ctx: Any, **positions: int) -> str:
    """The gradients that autograd wants, as ``need``: names of ``Grad`` whose input at that position requires one."""
    return ",".join(name for name, at in positions.items() if ctx.needs_input_grad[at])


def _wanted(need: str, name: str, grad: Tensor) -> Tensor | None:
    return grad if name in need.split(",") else None


def _rows(spec: ExpertsSpec, tokens: int, order: Tensor, inverse: Tensor, offsets: Tensor) -> Rows:
    return Rows(order, inverse, offsets, spec.top_k or order.shape[0] // max(tokens, 1))


# route_metadata


def _route(idx: Tensor, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return sort_by_expert(idx, specs.parse(spec).experts)


def _route_fake(idx: Tensor, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, e = idx.shape[0] * idx.shape[1], specs.parse(spec).experts
    slots = (idx.new_empty(n, dtype=torch.int64), idx.new_empty(n, dtype=torch.int64))
    return *slots, idx.new_empty(e, dtype=torch.int32), idx.new_empty(e, dtype=torch.int64)


route_metadata = _define(
    "route_metadata", f"(Tensor idx, {_KEY}) -> (Tensor, Tensor, Tensor, Tensor)", _route, _route_fake
)


# experts_up


def _up(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor, b1: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _same_dtype("experts_up", x=x, w1=w1, b1=b1)
    s = specs.parse(spec)
    return family(plan).up(x, _rows(s, x.shape[0], order, inverse, offsets), w1, b1, consts, s)


def _up_fake(
    x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor, b1: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _same_dtype("experts_up", x=x, w1=w1, b1=b1)
    s = specs.parse(spec)
    n, w = order.shape[0], width(w1, s.w1)
    return x.new_empty(n, w // 2 if s.gated else w), x.new_empty(n, w)


experts_up = _define(
    "experts_up",
    f"(Tensor x, {_ROWS}, Tensor w1, Tensor? b1, float[] consts, {_KEY}) -> (Tensor, Tensor)",
    _up,
    _up_fake,
)


def _up_backward(
    dh: Tensor, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor,
    spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s = specs.parse(spec)
    rows = _rows(s, x.shape[0], order, inverse, offsets)
    return _or_empty(dh, *family(plan).up_backward(dh, x, rows, w1, s, _need(need)))


def _up_backward_fake(
    dh: Tensor, x: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, w1: Tensor,
    spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = _need(need)
    return (
        x.new_empty(x.shape if Grad.X in n else (0,)),
        w1.new_empty(w1.shape if Grad.W1 in n else (0,)),
        w1.new_empty((w1.shape[0], dh.shape[1]) if Grad.B1 in n else (0,)),
    )


experts_up_backward = _define(
    "experts_up_backward",
    f"(Tensor dh, Tensor x, {_ROWS}, Tensor w1, {_KEY}, str need) -> (Tensor, Tensor, Tensor)",
    _up_backward,
    _up_backward_fake,
)


def _up_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, order, inverse, offsets, w1, _, _, *ctx.key = inputs
    ctx.save_for_backward(x, order, inverse, offsets, w1)
    ctx.mark_non_differentiable(output[0])
    ctx.set_materialize_grads(False)


def _up_autograd(ctx: Any, da: None, dh: Tensor | None) -> tuple[Tensor | None, ...]:
    need = _asked(ctx, x=0, w1=4, b1=5)
    if dh is None or not need:
        return (None,) * 10
    dx, dw1, db1 = experts_up_backward(dh, *ctx.saved_tensors, *ctx.key, need)
    grads = _wanted(need, "x", dx), None, None, None, _wanted(need, "w1", dw1), _wanted(need, "b1", db1)
    return *grads, None, None, None, None


experts_up.register_autograd(_up_autograd, setup_context=_up_setup)


# experts_down


def _down(
    a: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    _same_dtype("experts_down", a=a, h=h, w2=w2, b2=b2)
    s = _combined(spec, topk_weights)
    return family(plan).down(
        a, _rows(s, _tokens(order, topk_weights), order, inverse, offsets), topk_weights, w2, b2, s
    )


def _tokens(order: Tensor, topk_weights: Tensor | None) -> int:
    """T, or N where the rows are not combined."""
    return order.shape[0] if topk_weights is None else topk_weights.shape[0]


def _combined(spec: str, topk_weights: Tensor | None) -> ExpertsSpec:
    s = specs.parse(spec)
    if (topk_weights is None) != (s.combine is Combine.ROWS):
        raise ValueError(f"combine={s.combine.value} {'needs' if topk_weights is None else 'takes no'} topk_weights")
    return s


def _down_fake(
    a: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    _same_dtype("experts_down", a=a, h=h, w2=w2, b2=b2)
    s = _combined(spec, topk_weights)
    return a.new_empty(_tokens(order, topk_weights), width(w2, s.w2), dtype=s.out_dtype)


experts_down = _define(
    "experts_down",
    f"(Tensor a, Tensor h, {_ROWS}, Tensor? topk_weights, Tensor w2, Tensor? b2, float[] consts, {_KEY}) -> Tensor",
    _down,
    _down_fake,
)


def _down_backward(
    dy: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s = specs.parse(spec)
    rows = _rows(s, _tokens(order, topk_weights), order, inverse, offsets)
    return _or_empty(dy, *family(plan).down_backward(dy, h, rows, topk_weights, w2, b2, consts, s, _need(need)))


def _down_backward_fake(
    dy: Tensor, h: Tensor, order: Tensor, inverse: Tensor, offsets: Tensor, topk_weights: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    n = _need(need)
    weights = topk_weights if topk_weights is not None and Grad.WEIGHTS in n else None
    return (
        h.new_empty(h.shape if Grad.X in n else (0,)),
        dy.new_empty(0) if weights is None else weights.new_empty(weights.shape),
        w2.new_empty(w2.shape if Grad.W2 in n else (0,)),
        w2.new_empty((w2.shape[0], dy.shape[1]) if Grad.B2 in n else (0,)),
    )


experts_down_backward = _define(
    "experts_down_backward",
    f"(Tensor dy, Tensor h, {_ROWS}, Tensor? topk_weights, Tensor w2, Tensor? b2, float[] consts, {_KEY}, str need)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _down_backward,
    _down_backward_fake,
)


def _down_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, h, order, inverse, offsets, weights, w2, b2, *ctx.key = inputs
    ctx.save_for_backward(h, order, inverse, offsets, weights, w2, b2)
    ctx.set_materialize_grads(False)


def _down_autograd(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    need = _asked(ctx, x=1, weights=5, w2=6, b2=7)
    if dy is None or not need:
        return (None,) * 12
    dh, dweights, dw2, db2 = experts_down_backward(dy, *ctx.saved_tensors, *ctx.key, need)
    grads = _wanted(need, "weights", dweights), _wanted(need, "w2", dw2), _wanted(need, "b2", db2)
    return None, _wanted(need, "x", dh), None, None, None, *grads, None, None, None, None


experts_down.register_autograd(_down_autograd, setup_context=_down_setup)


# experts


def _experts(
    x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    _same_dtype("experts", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    s = _combined(spec, topk_weights)
    rows = _rows(s, idx.shape[0], *_route(idx, spec, plan, digest)[:3])
    return family(plan).experts(x, rows, topk_weights, w1, b1, w2, b2, consts, s)


def _experts_fake(
    x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor, b2: Tensor | None,
    consts: Sequence[float], spec: str, plan: str, digest: str,
) -> Tensor:  # fmt: skip
    _same_dtype("experts", x=x, w1=w1, b1=b1, w2=w2, b2=b2)
    s = _combined(spec, topk_weights)
    rows = idx.shape[0] * idx.shape[1] if s.combine is Combine.ROWS else idx.shape[0]
    return x.new_empty(rows, width(w2, s.w2), dtype=s.out_dtype)


experts = _define(
    "experts",
    "(Tensor x, Tensor idx, Tensor? topk_weights, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, float[] consts,"
    f" {_KEY}) -> Tensor",
    _experts,
    _experts_fake,
)


def _experts_backward(
    dy: Tensor, x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    s, kernels, wanted = specs.parse(spec), family(plan), _need(need)
    rows = _rows(s, idx.shape[0], *_route(idx, spec, plan, digest)[:3])
    below = wanted & {Grad.X, Grad.W1, Grad.B1}
    _, h = kernels.up(x, rows, w1, b1, consts, s)
    beside = wanted - {Grad.X} | ({Grad.X} if below else set())
    dh, dweights, dw2, db2 = kernels.down_backward(dy, h, rows, topk_weights, w2, b2, consts, s, beside)
    dx, dw1, db1 = (None, None, None) if dh is None else kernels.up_backward(dh, x, rows, w1, s, below)
    return _or_empty(dy, dx, dweights, dw1, db1, dw2, db2)


def _experts_backward_fake(
    dy: Tensor, x: Tensor, idx: Tensor, topk_weights: Tensor | None, w1: Tensor, b1: Tensor | None, w2: Tensor,
    b2: Tensor | None, consts: Sequence[float], spec: str, plan: str, digest: str, need: str,
) -> tuple[Tensor, ...]:  # fmt: skip
    wanted = {Grad.X: x, Grad.WEIGHTS: topk_weights, Grad.W1: w1, Grad.B1: b1, Grad.W2: w2, Grad.B2: b2}
    n = _need(need)
    return tuple(dy.new_empty(0) if t is None or g not in n else t.new_empty(t.shape) for g, t in wanted.items())


experts_backward = _define(
    "experts_backward",
    "(Tensor dy, Tensor x, Tensor idx, Tensor? topk_weights, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2,"
    f" float[] consts, {_KEY}, str need) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _experts_backward,
    _experts_backward_fake,
)


def _experts_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, consts, spec, plan, digest = inputs
    ctx.key = (consts, spec, plan, digest)
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _experts_autograd(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
    need = _asked(ctx, x=0, weights=2, w1=3, b1=4, w2=5, b2=6)
    if dy is None or not need:
        return (None,) * 11
    grads = experts_backward(dy, *ctx.saved_tensors, *ctx.key, need)
    dx, *rest = (_wanted(need, g.value, d) for g, d in zip(Grad, grads, strict=True))
    return dx, None, *rest, None, None, None, None


experts.register_autograd(_experts_autograd, setup_context=_experts_setup)

flops.register()
