"""Deletes the recogniser's proofs one by one: ``python -m tests.proofs``.

Every near miss is traced once and recognised; then again with the proof that refused it taken as given. The proof is
needed where the near miss is now fused, breaks the pass, or is refused for another reason than the one it asks for.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from moe_inductor.options import Options, Verify
from moe_inductor.outcomes import Fused, Reject
from moe_inductor.passes import combine, dispatch, experts, fuse, operands, recognise, refusal
from tests import near_misses_edges  # noqa: F401  adds to the list
from tests.near_misses import NEAR_MISSES, NearMiss

MODULES = (combine, dispatch, experts, operands, recognise)
OPTIONS = Options(verify=Verify.OFF)
Site = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Traced:
    """A graph that must be refused, with ``words`` in the reason."""

    name: str
    graph: torch.fx.GraphModule
    words: tuple[str, ...] = ()

    def refused(self, outcomes: list[Fused | Reject]) -> bool:
        """Whether ``outcomes`` are what the near miss asks for."""
        return bool(outcomes) and all(
            isinstance(o, Reject) and o.code != "internal" and all(word in o.why for word in self.words)
            for o in outcomes
        )


def trace(miss: NearMiss) -> Traced:
    """The graph that Dynamo gives the backend for ``miss``."""
    found: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        found.append(graph)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(miss.make(), backend=keep, dynamic=miss.dynamic, fullgraph=True)(*miss.args())
    (graph,) = found
    return Traced(miss.name, graph, miss.words)


@contextmanager
def given(site: Site | None, reached: Counter[Site] | None = None) -> Iterator[None]:
    """Take the proof at ``site`` as given; count in ``reached`` the proofs that are asked for."""
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


def outcomes(traced: Traced) -> list[Fused | Reject]:
    """What the pass does to a copy of the graph, with nothing but the proofs in the way."""
    return fuse.fuse(copy.deepcopy(traced.graph), OPTIONS, lambda proposal: "not verified")


def sites() -> dict[Site, str]:
    """Where the recogniser calls ``require``, and the words it would refuse with."""
    found: dict[Site, str] = {}
    for module in MODULES:
        name = module.__name__.rpartition(".")[2]
        for node in ast.walk(ast.parse(inspect.getsource(module))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "require":
                found[name, node.lineno] = ast.unparse(node.args[2])
    return found


def needed() -> dict[Site, list[str]]:
    """For each proof, the near misses that are no longer refused as they should be once it is deleted."""
    broken: dict[Site, list[str]] = {site: [] for site in sites()}
    for traced in map(trace, NEAR_MISSES):
        reached: Counter[Site] = Counter()
        with given(None, reached):
            assert traced.refused(outcomes(traced)), traced.name
        for site in reached:
            with given(site):
                if not traced.refused(outcomes(traced)):
                    broken[site].append(traced.name)
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
