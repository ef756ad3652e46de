"""The graphs of one compile: the outer one and the bodies that its higher-order operators name."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

_PART = re.compile(r"_(?:modules|parameters|buffers)\['([^']+)'\]")


@dataclass(frozen=True, slots=True)
class Body:
    """A graph with, for each of its inputs that is one, the parameter's or buffer's name from the compiled root, and
    the outer input that it is."""

    module: torch.fx.GraphModule
    names: dict[torch.fx.Node, str]
    inputs: dict[torch.fx.Node, torch.fx.Node]


def bodies(module: torch.fx.GraphModule) -> Iterator[Body]:
    """``module`` and its bodies, each once, innermost last. A body that several nodes share has the first's names."""
    outer = [n for n in module.graph.nodes if n.op == "placeholder"]
    names = {n: name for n in outer if (name := parameter_name(n)) is not None}
    yield from _walk(Body(module, names, {n: n for n in outer}), set())


def _walk(body: Body, seen: set[int]) -> Iterator[Body]:
    yield body
    for node in body.module.graph.nodes:
        if node.op != "call_function":
            continue
        for arg in node.args:
            inner = child(body.module, arg)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                yield from _walk(_enter(body, node, inner), seen)


def child(module: torch.fx.GraphModule, arg: object) -> torch.fx.GraphModule | None:
    """The body that ``arg``, an argument of a node of ``module``, names; None where it is something else."""
    if isinstance(arg, torch.fx.Node) and arg.op == "get_attr":
        held = module
        for part in str(arg.target).split("."):
            held = getattr(held, part)
        return held if isinstance(held, torch.fx.GraphModule) else None
    return None


def _enter(body: Body, call: torch.fx.Node, module: torch.fx.GraphModule) -> Body:
    """The body ``module`` that ``call`` runs: its inputs are the call's operands, in order."""
    operands = [a for a in call.args if not isinstance(a, str) and child(body.module, a) is None]
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    pairs = [
        (inner, outer) for inner, outer in zip(placeholders, operands, strict=False) if isinstance(outer, torch.fx.Node)
    ]
    return Body(
        module,
        {inner: body.names[outer] for inner, outer in pairs if outer in body.names},
        {inner: body.inputs[outer] for inner, outer in pairs if outer in body.inputs},
    )


def parameter_name(placeholder: torch.fx.Node) -> str | None:
    """``"model.layers.0.mlp.experts.gate_up_proj"`` from where Dynamo says it read the input."""
    source = getattr(placeholder.meta.get("grapharg"), "source", None)
    if source is None:
        return None
    name = source.name() if callable(source.name) else source.name
    return ".".join(_PART.findall(name)) or None
