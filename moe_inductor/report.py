"""Outcomes of the pass: what was fused, what was refused and why, for one graph and for the whole process."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from . import _torch
from .outcomes import Break, Fused, Outcome, Reject, as_dict, broken, fusions, refusals, regions, saved_bytes

__all__ = [
    "Break",
    "Fused",
    "GraphReport",
    "Outcome",
    "Reject",
    "Report",
    "collecting",
    "last",
    "record",
    "report",
    "reset",
    "saved_bytes",
]

log = logging.getLogger("moe_inductor")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GraphReport:
    """What one call of the backend did. ``compile_id`` is Dynamo's ``frame/recompile``, ``graph_id`` counts the calls
    of this process from 0, ``seconds`` is the time inside our code."""

    outcomes: tuple[Outcome, ...]
    compile_id: str | None
    graph_id: int
    seconds: float

    @property
    def fused(self) -> tuple[Fused, ...]:
        """The regions that were replaced, in graph order."""
        return tuple(o for o in self.outcomes if isinstance(o, Fused))

    @property
    def refused(self) -> tuple[Reject, ...]:
        """The regions that were left, in graph order."""
        return tuple(o for o in self.outcomes if isinstance(o, Reject))

    @property
    def plans(self) -> dict[str, int]:
        """Plan -> regions that run it."""
        return dict(Counter(f.plan for f in self.fused))

    @property
    def routers(self) -> int:
        """How many of the fused regions had their router fused too."""
        return sum(isinstance(f.router, str) for f in self.fused)

    @property
    def saved_bytes(self) -> int | None:
        """:func:`saved_bytes` of all fused regions; None where one of them has a symbolic token count."""
        return _total(saved_bytes(f.spec) for f in self.fused)

    def require_all(self) -> None:
        """Raise RuntimeError with the reasons where a region of this graph was refused (``moe.require="all"``)."""
        if self.refused:
            raise RuntimeError(
                f'moe.require="all": {regions(len(self.refused))} stayed unfused\n' + "\n".join(refusals(self.refused))
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "compile_id": self.compile_id,
            "graph_id": self.graph_id,
            "seconds": round(self.seconds, 6),
            "matched": len(self.fused),
            "refused": len(self.refused),
            "plans": self.plans,
            "routers": self.routers,
            "saved_bytes": self.saved_bytes,
            "outcomes": [as_dict(o) for o in self.outcomes],
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        return str(Report((self,)))


@dataclass(frozen=True, slots=True)
class Report:
    """What several calls of the backend did: all graphs of a process, or of one :func:`moe_inductor.explain`.

    A region that is compiled again (another shape, training and evaluation) is one distinct region: the same source
    line on the same parameters. Within one graph every region counts.
    """

    graphs: tuple[GraphReport, ...]
    breaks: tuple[Break, ...] = ()

    @property
    def compiles(self) -> int:
        """Calls of the backend."""
        return len(self.graphs)

    @property
    def fused(self) -> tuple[Fused, ...]:
        """Distinct regions that were replaced, as they were when first compiled."""
        return _distinct((g.fused for g in self.graphs), key=lambda f: (f.where, f.parameters))

    @property
    def refused(self) -> tuple[Reject, ...]:
        """Distinct regions that were left."""
        return _distinct((g.refused for g in self.graphs), key=lambda r: r)

    @property
    def saved_bytes(self) -> int | None:
        """:func:`saved_bytes` of the distinct fused regions; None where one of them has a symbolic token count."""
        return _total(saved_bytes(f.spec) for f in self.fused)

    @property
    def seconds(self) -> float:
        """Time inside our code."""
        return sum(g.seconds for g in self.graphs)

    def require(self, count: int) -> None:
        """Raise RuntimeError with the reasons where fewer than ``count`` distinct regions were fused."""
        fused = len(self.fused)
        if fused >= count:
            return
        reasons = refusals(self.refused) + broken(self.breaks)
        if not self.graphs:
            reasons = [
                '  no graph was compiled with backend="megamoe" yet: run one step first (and see MEGAMOE_DISABLE)'
            ]
        elif not reasons:
            reasons = ["  nothing else in the compiled graphs looks like a Mixture-of-Experts layer"]
        raise RuntimeError(f"{regions(fused)} fused, {count} required\n" + "\n".join(reasons))

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {
            "version": 1,
            "matched": len(self.fused),
            "refused": len(self.refused),
            "compiles": self.compiles,
            "seconds": round(self.seconds, 6),
            "saved_bytes": self.saved_bytes,
            "breaks": [{"where": b.where, "why": b.why} for b in self.breaks],
            "graphs": [g.as_dict() for g in self.graphs],
        }

    def to_json(self) -> str:
        """:meth:`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        fused, refused = self.fused, self.refused
        graphs = f"{self.compiles} graph" + "s" * (self.compiles != 1)
        total = regions(len(fused) + len(refused))
        head = f"{len(fused)} of {total} fused in {graphs}, {self.seconds:.2f} s in the pass"
        saved = self.saved_bytes
        if saved:
            head += f", about {_size(saved)} of activations not kept"
        return "\n".join((head, *fusions(fused), *refusals(refused), *broken(self.breaks)))


_GRAPHS: list[GraphReport] = []
_COLLECTED: ContextVar[list[GraphReport] | None] = ContextVar("_COLLECTED", default=None)


def record(outcomes: Iterable[Outcome], *, seconds: float) -> GraphReport:
    """Enter the outcomes of one call of the backend, ``seconds`` of which were spent in our code.

    Counts them in ``torch._dynamo.utils.counters["megamoe"]``, logs one INFO line on rank 0 and one warning where a
    region was refused, and writes a JSON artifact to the structured trace. Under :func:`collecting` none of this is
    done and the result goes to the collector alone.
    """
    collected = _COLLECTED.get()
    graphs = _GRAPHS if collected is None else collected
    entry = GraphReport(tuple(outcomes), _torch.compile_id(), len(graphs), seconds)
    graphs.append(entry)
    if collected is None:
        _count(entry)
        _log(entry)
        _torch.trace_artifact("moe_inductor_report", entry.as_dict())
    return entry


@contextmanager
def collecting() -> Iterator[list[GraphReport]]:
    """Keep the entries of this context out of the process-wide report, the counters and the log."""
    entries: list[GraphReport] = []
    token = _COLLECTED.set(entries)
    try:
        yield entries
    finally:
        _COLLECTED.reset(token)


def report() -> Report:
    """Everything that ``backend="megamoe"`` compiled in this process since :func:`reset`."""
    return Report(tuple(_GRAPHS))


def last() -> GraphReport | None:
    """The latest compile, None before the first."""
    return _GRAPHS[-1] if _GRAPHS else None


def reset() -> None:
    """Forget all compiles. Dynamo's counters stay, they are Dynamo's to clear."""
    _GRAPHS.clear()


def _count(entry: GraphReport) -> None:
    counters = _torch.counters("megamoe")
    counters["matched"] += len(entry.fused)
    counters["refused"] += len(entry.refused)
    for refusal in entry.refused:
        counters[f"refused:{refusal.code}"] += 1


def _log(entry: GraphReport) -> None:
    name = f"graph {entry.graph_id} (compile {entry.compile_id or '-'})"
    if _rank() == 0:
        plans = ", ".join(f"{plan} x{n}" for plan, n in entry.plans.items()) or "none"
        total = len(entry.fused) + len(entry.refused)
        log.info("%s: %d of %s fused, plans: %s, %.3f s", name, len(entry.fused), regions(total), plans, entry.seconds)
    if entry.refused:
        total = len(entry.refused)
        log.warning("%s: %s stayed unfused\n%s", name, regions(total), "\n".join(refusals(entry.refused)))


def _rank() -> int:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdigit() else 0


def _distinct(groups: Iterable[tuple[T, ...]], key: Callable[[T], Hashable]) -> tuple[T, ...]:
    """One item for each key, or as many as the group that repeats it most has."""
    kept: list[T] = []
    counts: Counter[Hashable] = Counter()
    for group in groups:
        here: Counter[Hashable] = Counter()
        for item in group:
            k = key(item)
            here[k] += 1
            if here[k] > counts[k]:
                counts[k] = here[k]
                kept.append(item)
    return tuple(kept)


def _size(count: int) -> str:
    unit, name = (2**30, "GiB") if count >= 2**30 else (2**20, "MiB") if count >= 2**20 else (2**10, "KiB")
    return f"{count / unit:.1f} {name}"


def _total(values: Iterable[int | None]) -> int | None:
    total = 0
    for value in values:
        if value is None:
            return None
        total += value
    return total
