"""``torch.compile(model, backend="megamoe")``: our pass on the Dynamo graph, then Inductor."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

from . import _torch
from .options import OptionError, Options, Require, resolve
from .passes.fuse import fuse as _fuse
from .passes.verify import Verifier
from .report import Outcome, Reject, record

log = logging.getLogger("moe_inductor")

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]


def megamoe(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Replace the Mixture-of-Experts layers of ``gm`` by fused operators and compile the result with Inductor.

    ``mode`` is Inductor's; of ``options``, the ``moe.`` keys are ours and all others Inductor's. Raises OptionError on
    an option that cannot be right, and RuntimeError where ``moe.require="all"`` is not met.
    """
    ours, inductor = resolve(options, mode, os.environ)
    apply(gm, example_inputs, ours)
    compiled: Callable[..., Any] = _torch.inductor(inductor)(gm, example_inputs)
    return compiled


def fuse(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Mapping[str, Any] | Options | None = None
) -> torch.fx.GraphModule:
    """The pass alone: edits ``gm`` in place, records the outcome in the report, and returns ``gm``."""
    ours = options if isinstance(options, Options) else resolve(options, None, os.environ)[0]
    apply(gm, example_inputs, ours)
    return gm


def with_inner(compiler: Compiler) -> Callable[..., Callable[..., Any]]:
    """A backend that runs the pass and then ``compiler`` in Inductor's place, for tests and bisection."""

    def backend(
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        *,
        mode: str | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> Callable[..., Any]:
        return compiler(fuse(gm, example_inputs, options), example_inputs)

    backend.is_megamoe = True  # type: ignore[attr-defined]
    return backend


def apply(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
    """The pass with resolved options: :func:`fuse` without reading the environment again."""
    if options.disabled or _SEEN_WHOLE.get():
        return
    why = _torch.unsupported()
    if why is not None:
        _warn_once(f"{why}: the model is left to Inductor")
        return
    start = time.perf_counter()
    placeholders = [n for n in gm.graph.nodes if n.op == "placeholder"]
    verifier = Verifier(options.verify, dict(zip(placeholders, example_inputs, strict=False)))
    try:
        outcomes: list[Outcome] = _fuse(gm, options, verifier)
    except OptionError:
        raise
    except Exception as e:  # whatever is wrong with us, the user's model compiles
        if options.strict:
            raise
        outcomes = [Reject(_SELF, "internal", f"{type(e).__name__}: {e}")]
    entry = record(outcomes, seconds=time.perf_counter() - start)
    if options.require is Require.ALL:
        entry.require_all()


#: Where a failure of the pass itself is said to be, when no region is to blame.
_SELF = "moe_inductor"
_WARNED: set[str] = set()
_SEEN_WHOLE: ContextVar[bool] = ContextVar("_SEEN_WHOLE", default=False)


@contextmanager
def _before_ddp_split(
    backend: Callable[..., Any], given: Mapping[str, Any], gm: torch.fx.GraphModule, example_inputs: Sequence[Any]
) -> Iterator[None]:
    """DDP cuts a graph where a bucket of gradients ends, in the middle of a layer as well: fuse before it does, and let
    the pieces be."""
    if not getattr(backend, "is_megamoe", False):
        yield
        return
    options, _ = resolve(given.get("options"), given.get("mode"), os.environ)
    apply(gm, example_inputs, options)
    token = _SEEN_WHOLE.set(True)
    try:
        yield
    finally:
        _SEEN_WHOLE.reset(token)


megamoe.is_megamoe = True  # type: ignore[attr-defined]
_torch.before_ddp_split(_before_ddp_split)


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        log.warning(text)
