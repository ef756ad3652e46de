"""A few tokens, as in decoding: inference in a CUDA graph that walks several sets of weights, so that none is still in
the second-level cache when it comes round again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..report import collecting
from . import ceilings, floor
from .errors import BenchError
from .layer import INFERENCE, Settings, fused_region, line, require_true
from .operands import Operands, make
from .peers import Arm, Choice, for_decoding
from .routing import loads
from .shapes import Shape
from .timing import Clock, Job, host_ms, interleave, release, replays_truly, summary
from .truth import errors

#: Sets of weights, and calls in one graph. One token of Qwen3-30B-A3B reads 75 MB, eight sets ten times an H200's
#: second-level cache; the parameters of eight such layers are 9.7 GB, of eight gpt-oss layers 12.7 GB.
SETS = 8


def measure(
    shape: Shape,
    tokens: int,
    routing: str,
    choice: Choice,
    settings: Settings,
    clock: Clock,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """The cell of one shape and token count: ms a layer by arm, and the floor of reading the chosen experts once."""
    torch.compiler.reset()
    made, skipped = for_decoding(shape, choice)
    with clock.session(), torch.no_grad():
        sets = [make(shape, tokens, routing, clock.device, settings.seed + i) for i in range(SETS)]
        distinct = [shape.experts - loads(o.idx, shape.experts)["without_rows"] for o in sets]
        memory = ceilings.machine(clock, settings.samples)["memory"]
        cell: dict[str, Any] = {
            "shape": shape.as_dict(),
            "tokens": tokens,
            "routing": {"name": routing, **loads(sets[0].idx, shape.experts)},
            "sets": SETS,
            "distinct_experts": sum(distinct) / SETS,
            "ceilings": {"memory": memory},
            "floor": {INFERENCE: floor.weight_read(shape, sum(distinct) / SETS, memory)},
            "skipped": skipped,
            "arms": {},
        }
        jobs: dict[str, Job] = {}
        for arm in made:
            say(f"{shape.name} T={tokens}: {arm.name}")
            found: dict[str, Any] = {"notes": arm.notes}
            cell["arms"][arm.name] = found
            try:
                jobs[arm.name] = _prepare(arm, shape, sets, clock, found)
            except Exception as error:
                found["error"] = line(error)
                release()
        for name, samples in interleave(clock, jobs, settings.samples, flush=False, seed=settings.seed).items():
            job = jobs[name]
            cell["arms"][name]["times"] = {
                INFERENCE: {
                    **summary([ms / SETS for ms in samples]),
                    "captured": job.captured,
                    **({"uncaptured": job.uncaptured} if job.uncaptured else {}),
                }
            }
        del jobs, sets
    return cell


def _prepare(arm: Arm, shape: Shape, sets: Sequence[Operands], clock: Clock, found: dict[str, Any]) -> Job:
    """Compile, check y of the first set, time the host, capture all sets. Raises BenchError where a result is wrong."""
    calls = [arm.bind(o)[0] for o in sets]
    with collecting() as graphs:
        calls[0]()
    if arm.fuses:
        found["fused"] = {INFERENCE: fused_region(graphs)}
    clock.poison()
    y = calls[0]()
    found["errors"] = errors(shape, sets[0], None, {"y": y})
    if not bool(y.isfinite().all()):
        raise BenchError("not finite: y")
    kept = [y.cpu()]
    del y
    found["host_ms"] = host_ms(clock, calls[0])

    def every() -> list[Tensor]:
        return [call() for call in calls]

    job = clock.job(every, arm.uncaptured)
    replay = replays_truly(clock, job, kept)
    found["replays"] = {INFERENCE: replay}
    require_true(replay, arm, INFERENCE)
    return job
