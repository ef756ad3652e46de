"""What ``backend="megamoe"`` would do to a model, without building any code."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from . import _torch
from .options import OptionError, Require, resolve
from .report import Break, Reject, Report, collecting, record

DISABLED = Reject("MEGAMOE_DISABLE", "disabled", "the environment turns the backend off: Inductor gets every graph")


def explain(
    model: torch.nn.Module | Callable[..., Any],
    *args: Any,
    options: Mapping[str, object] | None = None,
    **kwargs: Any,
) -> Report:
    """Run ``model(*args, **kwargs)`` once through Dynamo and our pass, and report every region that looks like MoE.

    Graphs run eager after the pass, Inductor is not called. The caller's mode holds: training or evaluation, gradients
    or ``no_grad``. Parameters, gradients, buffers and the random state are afterwards what they were; the arguments are
    used as they are, so a model that writes into them does so here too. A model that was compiled before is explained
    as a whole, its compiled code is kept. Graph breaks are in ``Report.breaks``. ``options`` as for
    ``torch.compile``, but ``moe.require`` does not raise here: ask ``Report.require``. Under ``MEGAMOE_DISABLE=1`` the
    answer is a refusal with the code ``disabled``. Raises OptionError on a wrong option, Inductor's included, and
    whatever the model itself raises.
    """
    from .backend import fuse

    ours, inductor = resolve(options, None, os.environ)
    _check(inductor)
    ours = replace(ours, require=Require.NONE)
    breaks: list[Break] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        reason = _torch.break_reason(graph)
        if reason is not None:
            breaks.append(Break(*reason))
        if ours.disabled:
            record([DISABLED], seconds=0.0)
            return graph.forward
        fused: Callable[..., Any] = fuse(graph, inputs, ours).forward
        return fused

    if isinstance(model, torch.nn.Module):
        model = _torch.original_module(model)
    with collecting() as graphs, _unchanged(model):
        _torch.compile_isolated(model, compiler)(*args, **kwargs)
    return Report(tuple(graphs), tuple(breaks))


def _check(inductor: Mapping[str, object]) -> None:
    """Raise OptionError where Inductor does not take these options."""
    known = _torch.inductor_config_keys()
    for key in inductor:
        name = key.replace("-", "_")
        if name not in known:
            close = difflib.get_close_matches(name, sorted(known), n=1)
            raise OptionError(f"Inductor has no option {key!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    try:
        _torch.inductor(inductor)
    except RuntimeError as error:
        raise OptionError(str(error)) from error


@contextmanager
def _unchanged(model: torch.nn.Module | Callable[..., Any]) -> Iterator[None]:
    """Put the random state, the buffers and the compiled calls of ``model`` back."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    calls = [(m, call) for m in modules if (call := _torch.compiled_call(m)) is not None]
    buffers = [(m, name, b, b.detach().clone()) for m in modules for name, b in m._buffers.items() if b is not None]
    devices = {b.device for _, _, b, _ in buffers} | {p.device for m in modules for p in m.parameters(recurse=False)}
    cuda = [d for d in devices if d.type == "cuda"] if torch.cuda.is_available() else []
    for module, _ in calls:
        _torch.set_compiled_call(module, None)
    try:
        with torch.random.fork_rng(devices=cuda):
            yield
    finally:
        for module, call in calls:
            _torch.set_compiled_call(module, call)
        with torch.no_grad():
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if not _same(buffer, before):
                    buffer.copy_(before)


def _same(buffer: torch.Tensor, before: torch.Tensor) -> bool:
    """Whether nothing wrote into ``buffer``; False, so that it is written back, where values cannot be compared."""
    try:
        return torch.equal(buffer, before)
    except (RuntimeError, NotImplementedError):
        return False
