"""What a node does besides giving its value. A node may be erased only where that is nothing."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Effects:
    """Of the nodes of a window, found by running it: the storages that each holds and writes, and the nodes that have
    another effect (a random draw, a hook, an operator that is not known to be pure)."""

    storages: dict[torch.fx.Node, frozenset[int]]
    writes: dict[torch.fx.Node, frozenset[int]]
    other: frozenset[torch.fx.Node]

    def pure(self, node: torch.fx.Node) -> bool:
        """Whether ``node`` gives a value and does nothing else."""
        return computes(node) and node not in self.other and not self.writes.get(node)

    def among(self, nodes: Iterable[torch.fx.Node]) -> Effects:
        """Those of ``nodes`` alone."""
        own = set(nodes)
        held, written = ({n: s for n, s in d.items() if n in own} for d in (self.storages, self.writes))
        return Effects(held, written, self.other & own)

    def touching(self, storage: int, nodes: Iterable[torch.fx.Node]) -> list[torch.fx.Node]:
        """Those of ``nodes`` that hold or write ``storage``."""
        none: frozenset[int] = frozenset()
        return [n for n in nodes if storage in self.storages.get(n, none) | self.writes.get(n, none)]


def computes(node: torch.fx.Node) -> bool:
    """Whether ``node`` gives tensors."""
    return isinstance(node.meta.get("example_value"), (torch.Tensor, tuple, list))


def is_dead(node: torch.fx.Node) -> bool:
    """Whether nothing comes of ``node``: it gives a value that nobody reads, and does nothing else."""
    return computes(node) and not may_act(node) and all(map(is_dead, node.users))


def may_act(node: torch.fx.Node) -> bool:
    """Whether ``node`` may do more than give a value, told without running it."""
    return writes(node) or acts_unseen(node)


def acts_unseen(node: torch.fx.Node) -> bool:
    """Whether ``node`` may have an effect that running it on fake tensors does not show."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return True
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return str(target).split(".")[0] not in _PURE_NAMESPACES or any(
            torch.Tag.nondeterministic_seeded in op.tags for op in _overloads(target)
        )
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    if name.removesuffix("_") in _RANDOM:
        return True
    module = None if isinstance(target, str) else getattr(target, "__module__", None)
    return module is not None and module.split(".")[0] not in _PURE_MODULES


#: Where operators and functions of known kind come from. Another's may have any effect.
_PURE_NAMESPACES = ("aten", "prims", "transformers", "megamoe")
_PURE_MODULES = ("torch", "_operator", "operator", "builtins", "math", "transformers")
_RANDOM = frozenset(
    "rand rand_like randn randn_like randint randint_like randperm bernoulli multinomial normal poisson binomial"
    " dropout dropout1d dropout2d dropout3d alpha_dropout feature_dropout feature_alpha_dropout native_dropout rrelu"
    " gumbel_softmax uniform exponential geometric cauchy log_normal random scaled_dot_product_attention".split()
)


def writes(node: torch.fx.Node) -> bool:
    """Whether ``node`` is an in-place operation, told by its name and arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    target: Any = node.target
    if isinstance(target, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return any(op._schema.is_mutable for op in _overloads(target, node.kwargs))
    if node.kwargs.get("out") is not None or _bound(node, "inplace"):
        return True
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    return name == "setitem" or name in _INPLACE or (name.endswith("_") and not name.endswith("__"))


def _overloads(target: Any, kwargs: dict[str, Any] | None = None) -> list[torch._ops.OpOverload]:
    """The overloads that may be called; of a packet, those with an ``out`` only where one is given."""
    if isinstance(target, torch._ops.OpOverload):
        return [target]
    every = [getattr(target, name) for name in target.overloads()]
    if kwargs is not None and kwargs.get("out") is None:
        every = [op for op in every if not any(a.is_out for a in op._schema.arguments)]
    return every


def _bound(node: torch.fx.Node, name: str) -> bool:
    """Whether the argument ``name`` of a Python function is given and true."""
    if name in node.kwargs:
        return bool(node.kwargs[name])
    if not inspect.isfunction(node.target):
        return False
    try:
        found = inspect.signature(node.target).bind(*node.args, **node.kwargs)
    except (TypeError, ValueError):
        return False
    return bool(found.arguments.get(name))


#: ``operator``'s in-place functions.
_INPLACE = frozenset("iadd isub imul itruediv ifloordiv imod ipow iand ior ixor ilshift irshift imatmul".split())
