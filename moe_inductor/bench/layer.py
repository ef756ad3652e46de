"""One layer with the routing given, (x, idx, s, parameters) -> y: forward in its training form, forward and backward,
inference, peak memory, errors, and where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..outcomes import Fused, Reject
from ..report import GraphReport, collecting
from . import ceilings, floor
from .errors import BenchError
from .operands import Operands, make
from .peers import Arm, Choice, arms
from .phases import by_gemm, profile
from .routing import loads
from .shapes import Shape
from .timing import Clock, Job, interleave, release, replays_truly, summary
from .truth import errors

#: A replay may differ from the call it was captured from by the order of atomic additions of some peers, no more.
REPLAY_BOUND = 1e-2
FORWARD, BOTH, INFERENCE = "forward", "forward_backward", "inference"


@dataclass(frozen=True, slots=True)
class Settings:
    """How a layer is measured."""

    samples: int = 13
    profile: bool = True
    ceilings: bool = True
    seed: int = 0


@dataclass(slots=True)
class Running:
    """An arm bound to operands."""

    arm: Arm
    call: Callable[[], Tensor]
    leaves: dict[str, Tensor]
    dy: Tensor
    found: dict[str, Any]

    def forward(self) -> Tensor:
        """y, with what a backward needs."""
        return self.call()

    def both(self) -> tuple[Tensor, ...]:
        """(y, gradients of the leaves)."""
        y = self.call()
        return (y, *torch.autograd.grad(y, list(self.leaves.values()), self.dy))

    def inference(self) -> Tensor:
        """y alone."""
        with torch.no_grad():
            return self.call()

    def results(self) -> dict[str, Tensor]:
        """y, and the gradients as ``dx``, ``ds``, ``dw1``... where the arm trains."""
        if not self.arm.trains:
            return {"y": self.inference()}
        names = ("y", *(f"d{name}" for name in self.leaves))
        return {name: t.detach() for name, t in zip(names, self.both(), strict=True)}

    def forms(self) -> dict[str, Callable[[], Any]]:
        """What is timed."""
        training = {FORWARD: self.forward, BOTH: self.both} if self.arm.trains else {}
        return {**training, INFERENCE: self.inference}


def measure(
    shape: Shape,
    tokens: int,
    routing: str,
    choice: Choice,
    settings: Settings,
    clock: Clock,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The cell of one shape, token count and routing. An arm that fails is kept with its error, and so is the rest."""
    torch.compiler.reset()
    made, skipped = arms(shape, choice)
    with clock.session():
        o = make(shape, tokens, routing, clock.device, settings.seed)
        gen = torch.Generator(clock.device).manual_seed(settings.seed + 1)
        dy = torch.randn(o.x.shape, generator=gen, device=clock.device, dtype=o.x.dtype)
        cell: dict[str, Any] = {
            "shape": shape.as_dict(),
            "tokens": tokens,
            "routing": {"name": routing, **loads(o.idx, shape.experts)},
            "h_bytes": floor.saved(shape, tokens),
            "skipped": skipped,
            "arms": {},
        }
        running: list[Running] = []
        jobs: dict[tuple[str, str], Job] = {}
        for arm in made:
            say(f"{shape.name} T={tokens} {routing}: {arm.name}")
            found: dict[str, Any] = {"notes": arm.notes}
            cell["arms"][arm.name] = found
            try:
                call, leaves = arm.bind(o)
                one = Running(arm, call, leaves, dy, found)
                expected = check(one, shape, o, clock)
                jobs |= {(arm.name, form): job for form, job in prepare(one, expected, clock).items()}
                running.append(one)
            except Exception as error:
                found["error"] = line(error)
                release()
        _time(jobs, cell, settings, clock)
        if clock.device == "cuda":
            if settings.profile:
                for one in running:
                    one.found["profile"] = _profiled(one, shape, tokens)
            jobs.clear()
            if settings.ceilings:
                cell |= limits(shape, tokens, clock, settings.samples)
        del running, jobs, o, dy
    return cell


def _time(jobs: dict[tuple[str, str], Job], cell: dict[str, Any], settings: Settings, clock: Clock) -> None:
    times = interleave(clock, jobs, settings.samples, seed=settings.seed)
    for (name, form), samples in times.items():
        job = jobs[name, form]
        cell["arms"][name].setdefault("times", {})[form] = {
            **summary(samples),
            "captured": job.captured,
            **({"uncaptured": job.uncaptured} if job.uncaptured else {}),
        }


def check(one: Running, shape: Shape, o: Operands, clock: Clock) -> list[Tensor]:
    """Compile, then run on memory full of NaN: errors and peak memory. Returns y and dx on the host.

    ``not_finite`` names what came out so: a peer may leave gradients of experts without rows unwritten, and is timed
    all the same. Raises BenchError where it is y, or ours, and where our backend left the layer unfused.
    """
    found, start = one.found, time.perf_counter()
    with collecting() as graphs:
        if one.arm.trains:
            one.both()
        trained = len(graphs)
        one.inference()
    clock.synchronize()
    found["compile_seconds"] = time.perf_counter() - start
    if one.arm.fuses:
        found["fused"] = {INFERENCE: fused_region(graphs[trained:])}
        if one.arm.trains:
            found["fused"]["training"] = fused_region(graphs[:trained])
    clock.poison()
    got = one.results()
    found["errors"] = errors(shape, o, one.dy if one.arm.trains else None, got)
    kept = [got[name].cpu() for name in ("y", "dx") if name in got]
    wrong = [name for name, t in got.items() if not bool(t.isfinite().all())]
    del got
    if wrong:
        found["not_finite"] = wrong
    if "y" in wrong or (wrong and one.arm.fuses):
        raise BenchError(f"not finite: {', '.join(wrong)}")
    release()
    found["peak_bytes"] = clock.peak(one.both if one.arm.trains else one.inference)
    return kept


def fused_region(graphs: Sequence[GraphReport]) -> dict[str, Any]:
    """Plan and spec of the one region; BenchError with the reasons where it is not fused."""
    outcomes = [outcome for graph in graphs for outcome in graph.outcomes]
    refused = [o for o in outcomes if isinstance(o, Reject)]
    done = [o for o in outcomes if isinstance(o, Fused)]
    if refused or len(done) != 1:
        reasons = "; ".join(f"[{r.code}] {r.why}" for r in refused) or f"{len(done)} regions fused instead of 1"
        raise BenchError(f"the layer was not fused: {reasons}")
    return {"plan": done[0].plan, "spec": str(done[0].spec), "verified": done[0].verified}


def prepare(one: Running, expected: Sequence[Tensor], clock: Clock) -> dict[str, Job]:
    """Jobs by form, each checked on poisoned outputs. Raises BenchError where a replay is wrong."""
    jobs, replays = {}, {}
    for form, fn in one.forms().items():
        jobs[form] = clock.job(fn, one.arm.uncaptured)
        replays[form] = replay = replays_truly(clock, jobs[form], expected)
        require_true(replay, one.arm, form)
    one.found["replays"] = replays
    return jobs


def require_true(replay: Mapping[str, Any], arm: Arm, form: str) -> None:
    """Raise BenchError where a replay differs, or where one of ours has outputs that are not finite."""
    if replay and not (replay["difference"] <= REPLAY_BOUND and (replay["finite"] or not arm.fuses)):
        raise BenchError(f"replaying {form} gives other results: {dict(replay)}")


def _profiled(one: Running, shape: Shape, tokens: int) -> dict[str, Any]:
    """By form; a profile that fails is said and costs nothing else."""
    profiles: dict[str, Any] = {}
    for form, fn in one.forms().items():
        if form == FORWARD:
            continue
        try:
            profiles[form] = profile(fn)
            if one.arm.fuses:
                profiles[form]["gemms"] = by_gemm(shape, tokens, profiles[form]["operators"])
        except Exception as error:
            profiles[form] = {"error": line(error)}
    return profiles


def limits(shape: Shape, tokens: int, clock: Clock, samples: int) -> dict[str, Any]:
    """``ceilings`` and the ``floor`` that follows from them."""
    release()
    machine = ceilings.machine(clock, samples)
    dense = ceilings.dense(clock, shape, tokens, samples)
    release()
    return {
        "ceilings": {**machine, "dense": dense},
        "floor": floor.floor(shape, tokens, machine["matmul"], machine["memory"]),
    }


def medians(cell: Mapping[str, Any], form: str) -> dict[str, float]:
    """Arm -> median ms of ``form``."""
    return {name: arm["times"][form]["median"] for name, arm in cell["arms"].items() if form in arm.get("times", {})}


def with_experts(shape: Shape, experts: int) -> Shape:
    """``shape`` with another number of experts. Raises BenchError where a token chooses more."""
    if experts < shape.top_k:
        raise BenchError(f"{shape.name} chooses {shape.top_k} experts a token, of {experts}")
    return replace(shape, experts=experts)


def line(error: BaseException) -> str:
    """The type and the text of ``error``, at most 400 characters on one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}"[:400] if text else type(error).__name__


__all__ = [
    "BOTH",
    "FORWARD",
    "INFERENCE",
    "Settings",
    "check",
    "fused_region",
    "limits",
    "line",
    "measure",
    "medians",
    "prepare",
]
