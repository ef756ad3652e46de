"""Generated Mixture-of-Experts blocks against eager: positives, mutants and other spellings.

    python -m tests.generator --count 2000 --jobs 2        all of it, with a summary as JSON on stdout
    python -m tests.generator --seed 1234                  one sample, described
    python -m tests.generator --change unsorted            many samples of one change

A sample is a choice at every seam of ``moe_forms`` and, for four of five seeds, changes from ``moe_mutations_*``
(exactly one) or ``moe_respellings`` (up to three). Eager is the oracle, on outputs, gradients and buffers: what was
rewritten may be 1.5 times as far from a float64 truth as eager is, what was refused must be equal to the bit.
"""

from __future__ import annotations

import argparse
import ast
import json
import logging
import multiprocessing
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import moe_inductor
from tests.moe_changes import CHANGES, Kind
from tests.moe_oracle import Result, check, fused_backend
from tests.moe_samples import BY_NAME, sample

#: Of 2,000 samples so many mutants attack each proof, and so many are refused with each code.
EACH, OF = 50, 2000
#: Codes that no block can get: tracing has made its guards, and the other two mean that a proof or the pass is wrong.
UNREACHED = frozenset({"guard", "verify", "internal"})
#: Where a call that refuses has its code.
_CODE = {"require": 1, "Refused": 0, "Failure": 0, "Reject": 1}


def refusal_codes() -> set[str]:
    """The codes that ``passes/`` refuses with, read from its source."""
    found: set[str] = set()
    for path in (Path(moe_inductor.__file__).parent / "passes").glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _CODE:
                code = node.args[_CODE[node.func.id]]
                if isinstance(code, ast.Constant) and isinstance(code.value, str):
                    found.add(code.value)
    return found


def summary(results: Iterable[Result]) -> dict[str, Any]:
    """Counts by label, mutation, attacked proof and refusal code; failures in full.

    ``wrong_rewrites`` are failures where something was fused. Each of the ``refusals`` has a code, a reason and a
    source line, else it is a failure. ``too_few`` names proofs and codes that fewer mutants reach than promised.
    """
    results = list(results)
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    changes: dict[str, Counter[str]] = defaultdict(Counter)
    attacks = Counter({c.attacks: 0 for c in CHANGES if c.kind is Kind.MUTANT})
    codes = Counter(dict.fromkeys(sorted(refusal_codes() - UNREACHED), 0))
    pairs: dict[str, Counter[str]] = defaultdict(Counter)
    for r in results:
        outcome = "failed" if r.error else "fused" if r.fused else "refused"
        labels[r.label][outcome] += 1
        if r.changes:
            changes[r.changes[0]][outcome] += 1
        if r.label == Kind.MUTANT.value:
            attacks[r.attacks] += 1
            codes.update(r.codes)
            pairs[r.attacks].update(r.codes or ["fused"])
    respelled = labels.get(Kind.RESPELLED.value, Counter())
    least = len(results) // OF * EACH
    return {
        "samples": len(results),
        "torch": torch.__version__,
        "failures": [{"seed": r.seed, "changes": r.changes, "error": r.error} for r in results if r.error],
        "wrong_rewrites": sum(bool(r.error and r.fused) for r in results),
        "refusals": sum(r.refused for r in results),
        "labels": labels,
        "respelled_fused": round(respelled["fused"] / max(1, respelled.total()), 4),
        "mutants_by_attacked_proof": attacks,
        "mutants_by_refusal_code": codes,
        "too_few": {name: n for counts in (attacks, codes) for name, n in counts.items() if n < least},
        "codes_by_attacked_proof": pairs,
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
        return Result(seed, "failed", (change or "",), "", 0, 0, (), f"{type(e).__name__}: {e}"[:400])


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
    few = report["too_few"] if args.change is None and args.backend == "megamoe" else {}
    spelled = report["respelled_fused"] >= 0.95 or "respelled" not in report["labels"]
    return int(bool(report["failures"] or few) or not spelled)


if __name__ == "__main__":
    sys.exit(main())
