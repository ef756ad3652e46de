"""Selective checkpointing: a policy that saves matmuls of a replaced region saves the pre-activation h in their place.

A ``context_fn`` of ``torch.utils.checkpoint`` asks its policy about every operator that runs. The policy was written
for the operators of the unfused model and knows nothing of ours, so on ``experts_up`` it is asked what it would have
said of the two expert matmuls, each once and in their order, for policies that count.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from .. import _torch
from .. import spec as specs
from ..digest import digest
from ..spec import Layout
from .window import Window, name_of

_CONTEXT_FN = "_checkpoint_context_fn"  # where Dynamo puts it: in the body's meta
_MATMULS = "megamoe_matmuls"

Policy = Callable[..., Any]
Matmuls = tuple[torch._ops.OpOverload, torch._ops.OpOverload]  #: up and down

#: Strongest first. A policy may answer with a bool: save, or prefer to recompute.
_STRENGTH = (
    CheckpointPolicy.MUST_SAVE,
    CheckpointPolicy.MUST_CPU_OFFLOAD,
    CheckpointPolicy.PREFER_SAVE,
    CheckpointPolicy.PREFER_CPU_OFFLOAD,
    CheckpointPolicy.PREFER_RECOMPUTE,
    CheckpointPolicy.MUST_RECOMPUTE,
)


def note(added: Sequence[torch.fx.Node], window: Window) -> None:
    """Write onto the new ``experts_up`` which matmuls of ``window`` it stands for."""
    for node in added:
        if node.target is torch.ops.megamoe.experts_up.default:
            node.meta[_MATMULS] = _overload(window.up), _overload(window.down)


def _overload(node: torch.fx.Node) -> torch._ops.OpOverload:
    """What a policy sees of a matmul of the Dynamo graph."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload):
        return target
    if isinstance(target, torch._ops.OpOverloadPacket):
        return target.default
    name = name_of(node)
    return {
        "_grouped_mm": torch.ops.aten._grouped_mm.default,
        "grouped_mm": torch.ops.aten._grouped_mm.default,
        "baddbmm": torch.ops.aten.baddbmm.default,
    }.get(name, torch.ops.aten.bmm.default)


def carry(module: torch.fx.GraphModule) -> None:
    """Give every checkpointed body below ``module`` that holds an ``experts_up`` a ``context_fn`` that knows it."""
    for body in module.modules():
        if isinstance(body, torch.fx.GraphModule) and _CONTEXT_FN in body.meta:
            replaced = {str(n.args[-3]): n.meta[_MATMULS] for n in _nodes(body) if _MATMULS in n.meta}
            if replaced:
                body.meta[_CONTEXT_FN] = ContextFn.of(body.meta[_CONTEXT_FN], replaced)
    for node in _nodes(module):
        node.meta.pop(_MATMULS, None)


def _nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    for body in module.modules():
        if isinstance(body, torch.fx.GraphModule):
            yield from body.graph.nodes


@dataclass(slots=True)
class ContextFn:
    """The user's ``context_fn`` with :func:`translated` policies. ``replaced``: spec text -> matmuls it replaced."""

    original: Callable[[], tuple[Any, Any]]
    replaced: dict[str, Matmuls]

    @classmethod
    def of(cls, original: Callable[[], tuple[Any, Any]], replaced: dict[str, Matmuls]) -> ContextFn:
        """The kind that AOTAutograd's cache can name, where the user's is one too."""
        return (_Cacheable if hasattr(original, "cache_hash") else cls)(original, replaced)

    def __call__(self) -> tuple[Any, Any]:
        """The contexts of the forward and of the recomputation."""
        contexts = self.original()
        for context in contexts:
            policy = getattr(context, "policy_fn", None)  # another context than PyTorch's own has none: nothing to ask
            if policy is not None:
                context.policy_fn = translated(policy, self.replaced)
        return contexts


class _Cacheable(ContextFn):
    __slots__ = ()

    @property
    def cache_hash(self) -> tuple[Any, ...]:
        """The user's hash, the matmuls and our code: what the recompute tags of the body follow from."""
        matmuls = tuple((spec, *map(str, ops)) for spec, ops in sorted(self.replaced.items()))
        return self.original.cache_hash, matmuls, digest()  # type: ignore[attr-defined]


def translated(policy: Policy, replaced: dict[str, Matmuls]) -> Policy:
    """``policy`` with an answer for ``experts_up``: the strongest that it gives on the matmuls in ``replaced``; where
    that is no more than a preference to recompute, what it says of the operator itself."""

    def answer(ctx: SelectiveCheckpointContext, op: Any, *args: Any, **kwargs: Any) -> Any:
        matmuls = replaced.get(str(args[-3])) if op is torch.ops.megamoe.experts_up.default else None
        if matmuls is None:
            return policy(ctx, op, *args, **kwargs)
        answers = [_asked(policy, ctx, *call) for call in _calls(ctx, matmuls, args)]
        best = min(answers, key=_STRENGTH.index)
        return _policy(policy(ctx, op, *args, **kwargs)) if best is CheckpointPolicy.PREFER_RECOMPUTE else best

    return answer


def _calls(
    ctx: SelectiveCheckpointContext, matmuls: Matmuls, args: Sequence[Any]
) -> list[tuple[torch._ops.OpOverload, tuple[Any, ...], Any]]:
    """(operator, operands, result) of the two matmuls with the shapes of the grouped form, E matrices and N rows. The
    down projection's weight is no operand of ``experts_up``: its output is taken to be as wide as x."""
    x, order, _, offsets, w1 = args[:5]
    spec = specs.parse(args[-3])
    n, hidden = order.shape[0], x.shape[1]
    outer = w1.shape[1] if spec.w1 is Layout.OUT_IN else w1.shape[2]
    inter = outer // 2 if spec.gated else outer
    with _torch.untraced():
        h, y = x.new_empty(n, outer), x.new_empty(n, hidden)
        up = x.new_empty(n, hidden), w1.new_empty(spec.experts, hidden, outer), offsets
        down = x.new_empty(n, inter), w1.new_empty(spec.experts, inter, hidden), offsets
    return [(matmuls[0], up, h), (matmuls[1], down, y)]


def _asked(
    policy: Policy, ctx: SelectiveCheckpointContext, op: torch._ops.OpOverload, args: tuple[Any, ...], result: Any
) -> CheckpointPolicy:
    own = copy.copy(ctx)
    if hasattr(own, "op_output"):  # not before torch 2.12
        own.op_output = result
    return _policy(policy(own, op, *args))


def _policy(answer: Any) -> CheckpointPolicy:
    if isinstance(answer, bool):
        return CheckpointPolicy.MUST_SAVE if answer else CheckpointPolicy.PREFER_RECOMPUTE
    return answer  # type: ignore[no-any-return]
