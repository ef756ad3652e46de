"""Generated Mixture-of-Experts blocks against eager: positives, mutants and other spellings.

    python -m tests.generator --count 2000 --jobs 2        all of it, with a summary as JSON on stdout
    python -m tests.generator --seed 1234                  one sample, described
    python -m tests.generator --change unsorted            many samples of one change

A sample is a choice at every seam of ``moe_forms`` and, for three of four seeds, changes from ``moe_mutations_*``
(exactly one) or ``moe_respellings`` (up to three). Eager is the oracle, on outputs, gradients and buffers: what was
rewritten may be 1.5 times as far from a float64 truth as eager is, what was refused must be equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch

from tests.moe_changes import Kind
from tests.moe_oracle import Result, check, fused_backend
from tests.moe_samples import BY_NAME, sample


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Counts by label, mutation, attacked proof and refusal code; failures in full."""
    results = list(results)
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    changes: dict[str, Counter[str]] = defaultdict(Counter)
    attacks: Counter[str] = Counter()
    codes: Counter[str] = Counter()
    pairs: dict[str, Counter[str]] = defaultdict(Counter)
    for r in results:
        outcome = "failed" if r.error else "fused" if r.fused else "refused"
        labels[r.label][outcome] += 1
        if r.changes:
            changes[r.changes[0]][outcome] += 1
        codes.update(r.codes)
        if r.label == Kind.MUTANT.value:
            attacks[r.attacks] += 1
            pairs[r.attacks].update(r.codes)
    respelled = labels.get(Kind.RESPELLED.value, Counter())
    return {
        "samples": len(results),
        "failures": [{"seed": r.seed, "changes": r.changes, "error": r.error} for r in results if r.error],
        "labels": labels,
        "respelled_fused": round(respelled["fused"] / max(1, respelled.total()), 4),
        "attacks": attacks,
        "refusal_codes": codes,
        "codes_by_attack": pairs,
        "changes": dict(sorted(changes.items())),
    }


def _work(job: tuple[int, str | None, str]) -> Result:
    seed, change, backend = job
    torch.set_num_threads(1)
    logging.getLogger("moe_inductor").setLevel(logging.ERROR)  # refusals are what is being counted
    try:
        s = sample(seed, change)
        return check(s, fused_backend() if backend == "megamoe" else backend, ours=backend == "megamoe")
    except Exception as e:
        return Result(seed, "failed", (change or "",), "", 0, (), f"{type(e).__name__}: {e}"[:400])


def main() -> int:
    """Run many samples; the exit code says whether every promise held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000, help="samples to run")
    parser.add_argument("--start", type=int, default=0, help="first seed")
    parser.add_argument("--seed", type=int, help="only this seed, with its description")
    parser.add_argument("--change", choices=sorted(BY_NAME), help="only samples of this change")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--backend", default="megamoe", help="megamoe, or another backend's name to check the samples")
    args = parser.parse_args()
    if args.seed is not None:
        print(sample(args.seed, args.change), file=sys.stderr)
        args.start, args.count = args.seed, 1
    jobs = [(seed, args.change, args.backend) for seed in range(args.start, args.start + args.count)]
    began, results = time.monotonic(), []
    with multiprocessing.get_context("spawn").Pool(min(args.jobs, len(jobs)), maxtasksperchild=250) as pool:
        for result in pool.imap_unordered(_work, jobs, chunksize=4):
            results.append(result)
            if result.error:
                print(f"seed {result.seed} {result.label} {result.changes}: {result.error}", file=sys.stderr)
            if len(results) % 100 == 0:
                rate = len(results) / (time.monotonic() - began)
                print(f"{len(results)}/{len(jobs)}, {rate:.1f} a second", file=sys.stderr)
    report = summary(results) | {"seconds": round(time.monotonic() - began, 1)}
    print(json.dumps(report, indent=2))
    return int(
        bool(report["failures"]) or report["respelled_fused"] < 0.95 * any(r.label == "respelled" for r in results)
    )


if __name__ == "__main__":
    sys.exit(main())
