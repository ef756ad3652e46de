"""One region's outcome: fused, or refused and why. The values, and how they read as text and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .spec import Combine, Grad, MoESpec


@dataclass(frozen=True, slots=True)
class Reject:
    """A region that looked like a Mixture-of-Experts layer and was left as it was.

    ``where`` is ``file:line`` of the user's source, ``code`` a stable word for tools, ``why`` a sentence with the
    missing fact.
    """

    where: str
    code: str
    why: str


@dataclass(frozen=True, slots=True)
class Fused:
    """A region that was replaced. ``verified`` says what the numeric check found, or why it was not made; ``router``
    what its router became, or why it stayed as it was, None where the plan has no router kernels."""

    where: str
    spec: MoESpec
    plan: str
    parameters: tuple[str, ...]
    verified: str
    router: str | Reject | None = None


Outcome = Fused | Reject


@dataclass(frozen=True, slots=True)
class Break:
    """A graph break: ``where`` (``file:line``) ran eager because ``why``, and a new graph began after it."""

    where: str
    why: str


def saved_bytes(spec: MoESpec) -> int | None:
    """Activation bytes that an unfused region keeps for its backward and a fused one does not; None for symbolic T.

    The gathered input rows [N, H] (for the up projection's gradient) and the rows before their routing weight
    [N, out_hidden] (for the weight's): what is kept beside them is the same on both sides.
    """
    if not spec.training:
        return 0
    rows = spec.rows
    if not getattr(rows, "is_number", True):
        return None
    elements = 0
    if Grad.W1 in spec.grads:
        elements += spec.hidden * spec.dtype.itemsize
    if Grad.WEIGHTS in spec.grads and spec.ops.combine is Combine.WEIGHTED_SUM:
        elements += spec.out_hidden * spec.ops.combine_dtype.itemsize
    return int(rows) * elements


def as_dict(outcome: Outcome) -> dict[str, Any]:
    """Plain values, ready for JSON."""
    if isinstance(outcome, Reject):
        return {"fused": False, "where": outcome.where, "code": outcome.code, "why": outcome.why}
    return {
        "fused": True,
        "where": outcome.where,
        "plan": outcome.plan,
        "spec": str(outcome.spec),
        "parameters": list(outcome.parameters),
        "verified": outcome.verified,
        "router": _router(outcome),
    }


def regions(n: int) -> str:
    """``n`` with its noun."""
    return f"{n} MoE region" + "s" * (n != 1)


def _router(outcome: Fused) -> str | None:
    """What became of the router, one line."""
    router = outcome.router
    if isinstance(router, Reject):
        return f"router not fused: {router.where}  {router.why}"
    return None if router is None else f"router fused: {router}"


def _times(n: int) -> str:
    return f" x{n}" if n > 1 else ""


def fusions(fused: Iterable[Fused]) -> list[str]:
    """For each kind of fused region a line each: where and plan, spec, verification, and router where it has one."""
    alike = Counter((f.where, f.plan, str(f.spec), f.verified, _router(f)) for f in fused)
    lines = []
    for (where, plan, *notes), n in alike.items():
        lines += [f"  fused{_times(n)}  {where}  {plan}", *(f"    {note}" for note in notes if note is not None)]
    return lines


def refusals(refused: Iterable[Reject]) -> list[str]:
    """One line for each reason."""
    return [f"  refused{_times(n)}  {r.where}  [{r.code}] {r.why}" for r, n in Counter(refused).items()]


def broken(breaks: Iterable[Break]) -> list[str]:
    """One line for each break."""
    return [f"  ran eager{_times(n)}  {b.where}  because {b.why}" for b, n in Counter(breaks).items()]
