"""Deletes the proofs of the router rewrite one by one: ``python -m tests.router_proofs``. See ``tests/proofs.py``.

A proof is needed where, with it taken as given, a near miss is fused, breaks the pass, or is left for another reason
than the one it asks for.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from moe_inductor.backend import fuse
from moe_inductor.outcomes import Reject
from moe_inductor.passes import refusal, router_fusion, router_groups, router_proof, router_steps
from moe_inductor.report import collecting
from tests.near_misses import H, T
from tests.router_forms import Routed
from tests.router_near_misses import NEAR_MISSES

MODULES = (router_fusion, router_groups, router_proof, router_steps)
OPTIONS = {"moe.kernel": "reference", "moe.verify": "off"}
Site = tuple[str, int]


def trace(route: Any, dtype: torch.dtype = torch.float32) -> torch.fx.GraphModule:
    """The graph that Dynamo gives the backend for ``route``."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(Routed(route, dtype), backend=keep, fullgraph=True)(torch.randn(T, H, dtype=dtype))
    (graph,) = found
    return graph


@contextmanager
def given(site: Site | None, reached: Counter[Site] | None = None) -> Iterator[None]:
    """Take the proof at ``site`` as given; count in ``reached`` the proofs that fail."""
    real = refusal.require

    def require(fact: object, code: str, why: str, at: Any = None) -> None:
        frame = sys._getframe(1)
        here = (frame.f_globals["__name__"].rpartition(".")[2], frame.f_lineno)
        if reached is not None and not fact:
            reached[here] += 1
        if here != site:
            real(fact, code, why, at)

    for module in MODULES:
        module.require = require  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for module in MODULES:
            module.require = real  # type: ignore[attr-defined]


def left(graph: torch.fx.GraphModule, words: str) -> bool:
    """Whether the pass leaves the router of a copy of ``graph``, with ``words`` in the reason."""
    with collecting() as entries:
        fuse(copy.deepcopy(graph), [], OPTIONS)
    (fused,) = entries[0].fused
    return isinstance(fused.router, Reject) and fused.router.code != "internal" and words in fused.router.why


def sites() -> dict[Site, str]:
    """Where ``require`` is called, and the words it would refuse with."""
    found: dict[Site, str] = {}
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                found[name, node.lineno] = ast.unparse(node.args[2])
    return found


def needed() -> dict[Site, list[str]]:
    """For each proof, the near misses that are no longer left as they should be once it is deleted."""
    broken: dict[Site, list[str]] = {site: [] for site in sites()}
    for route, words in NEAR_MISSES.items():
        graph, reached = trace(route), Counter[Site]()
        with given(None, reached):
            assert left(graph, words), route.__name__
        for site in reached:
            with given(site):
                if not left(graph, words):
                    broken[site].append(route.__name__)
    return broken


def main() -> int:
    """Print what each proof holds up; 1 where one holds up nothing."""
    words, broken = sites(), needed()
    for (module, line), names in sorted(broken.items()):
        print(f"{module}.py:{line}: {', '.join(names) or 'NOTHING'}  ({words[module, line]})")
    print(json.dumps({"proofs": len(broken), "needed": sum(map(bool, broken.values()))}))
    return 0 if all(broken.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
