"""``megamoe::route_topk``, a proved router in one operator: from logits [T, E] to weights [T, K] and experts [T, K].

``spec`` is the text of a :class:`~moe_inductor.router_spec.RouterSpec`, ``plan`` is ``<kernels>/<dtype>`` with
``triton`` or ``reference``, ``digest`` as in :mod:`moe_inductor.ops`. Saves the logits and the choice. ValueError on an
unknown spec or plan and on shapes that are not the spec's.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from . import router_spec
from .kernels import router_reference
from .opdef import KEY, define
from .router_spec import RouterSpec


def _kernels(plan: str) -> ModuleType:
    """The module with ``forward`` and ``backward`` that ``plan`` names; Triton is imported where it is asked for."""
    name = plan.partition("/")[0]
    if name == "reference":
        return router_reference
    if name != "triton":
        raise ValueError(f"plan {plan!r}: no router kernels {name!r}; there are triton, reference")
    return importlib.import_module("moe_inductor.kernels.router")


def _checked(logits: Tensor, bias: Tensor | None, spec: str) -> RouterSpec:
    s = router_spec.parse(spec)
    if logits.dim() != 2 or logits.shape[1] != s.experts:
        raise ValueError(f"megamoe::route_topk takes logits [T, {s.experts}], but they are {list(logits.shape)}")
    if (bias is None) != (s.bias_dtype is None) or (bias is not None and bias.numel() != s.experts):
        given = "no bias" if bias is None else f"a bias {list(bias.shape)}"
        raise ValueError(f"megamoe::route_topk with spec {spec!r} got {given}")
    return s


def _route(logits: Tensor, bias: Tensor | None, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor]:
    s = _checked(logits, bias, spec)
    weights, idx = _kernels(plan).forward(logits, bias, s)
    return weights, idx


def _route_fake(logits: Tensor, bias: Tensor | None, spec: str, plan: str, digest: str) -> tuple[Tensor, Tensor]:
    s = _checked(logits, bias, spec)
    shape = logits.shape[0], s.top_k
    return logits.new_empty(shape, dtype=s.out_dtype), logits.new_empty(shape, dtype=torch.int64)


route_topk = define("route_topk", f"(Tensor logits, Tensor? bias, {KEY}) -> (Tensor, Tensor)", _route, _route_fake)


def _backward(dweights: Tensor, logits: Tensor, idx: Tensor, spec: str, plan: str, digest: str) -> Tensor:
    dlogits: Tensor = _kernels(plan).backward(dweights, logits, idx, router_spec.parse(spec))
    return dlogits


def _backward_fake(dweights: Tensor, logits: Tensor, idx: Tensor, spec: str, plan: str, digest: str) -> Tensor:
    return logits.new_empty(logits.shape)


route_topk_backward = define(
    "route_topk_backward", f"(Tensor dweights, Tensor logits, Tensor idx, {KEY}) -> Tensor", _backward, _backward_fake
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, _, *ctx.key = inputs
    ctx.save_for_backward(logits, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _autograd(ctx: Any, dweights: Tensor | None, didx: None) -> tuple[Tensor | None, ...]:
    if dweights is None or not ctx.needs_input_grad[0]:
        return (None,) * 5
    return route_topk_backward(dweights, *ctx.saved_tensors, *ctx.key), None, None, None, None


route_topk.register_autograd(_autograd, setup_context=_setup)

__all__ = ["route_topk", "route_topk_backward"]
