"""The pass for people who stay on ``backend="inductor"``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass

from .backend import apply
from .digest import package_digest
from .options import OptionError, resolve


class MegaMoEPass(CustomGraphPass):
    """``torch.compile(model, options={"pre_grad_custom_pass": MegaMoEPass()})``.

    ``options`` takes the ``moe.`` keys; raises OptionError on any other, which would be Inductor's own. The pass has no
    state, so a copy of it is the same pass. It sees graphs without their inputs: rewrites are proved, but not checked
    on numbers.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self._options, others = resolve(options, None, os.environ)
        if others:
            raise OptionError(f"{', '.join(others)}: MegaMoEPass takes moe. keys only, give Inductor its own beside it")

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Rewrite the Mixture-of-Experts regions of ``graph`` in place."""
        module = graph.owning_module
        if isinstance(module, torch.fx.GraphModule):
            apply(module, (), self._options)

    def uuid(self) -> str:
        """What Inductor's caches know the pass by: its code, the operators' and its options."""
        return f"moe_inductor {package_digest()} {self._options}"
