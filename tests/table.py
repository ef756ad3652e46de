"""The support table: every family in every implementation, dtype and mode, fused and compared with eager.

    python -m tests.table                                   the table, to docs/support.md and docs/support.json
    python -m tests.table --seed 3 --sizes odd --out DIR    other weights and widths (see tests/sizes.py), elsewhere
    python -m tests.table --families mixtral --modes train  some of the cells, as text on stdout

A cell is right where outputs, changed inputs and all gradients are as close to a float64 truth as eager's are, see
``truth.compare``. The exit code is 1 where a cell is wrong or an error.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import multiprocessing
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from tests import families
from tests.cells import DTYPES, IMPLEMENTATIONS, Cell, Mode, Result, Status, run_cell
from tests.sizes import SIZES
from tests.table_text import Header, as_json, as_markdown, as_text, failures, header

ROOT = Path(__file__).parent.parent
BAD = (Status.WRONG, Status.ERROR)


def names() -> tuple[list[str], list[str], list[str]]:
    """The families with an implementation to choose, those without, and those this transformers does not have."""
    here = [f for f in families.F if families.available(f)]
    chosen = [f for f in here if families.decorated(f)]
    return chosen, [f for f in here if f not in chosen], [f for f in families.F if f not in here]


def grid(
    names: Sequence[str],
    *,
    implementations: Sequence[str] = IMPLEMENTATIONS,
    dtypes: Sequence[str] = ("fp32", "bf16"),
    modes: Sequence[Mode] = tuple(Mode),
    size: str = "tiny",
    seed: int = 0,
) -> list[Cell]:
    """All combinations, a family's cells together."""
    return [Cell(*c, size, seed) for c in itertools.product(names, implementations, dtypes, modes)]


def run(cells: Sequence[Cell], *, jobs: int) -> list[Result]:
    """Run the cells in ``jobs`` processes, in order, with progress on stderr."""
    began, results = time.monotonic(), list[Result]()
    # A process keeps what Dynamo and transformers load: after 250 cells it is about 2 GiB, so a fresh one starts then.
    with multiprocessing.get_context("spawn").Pool(jobs, _quiet, maxtasksperchild=16) as pool:
        for result in pool.imap(run_cell, cells, chunksize=16):
            results.append(result)
            if result.status is not Status.FUSED:
                print(f"{result.cell}: {result.status.value} {result.code} {result.why}", file=sys.stderr)
            if len(results) % 16 == 0 or len(results) == len(cells):
                seconds = time.monotonic() - began
                left = seconds / len(results) * (len(cells) - len(results))
                print(f"{len(results)}/{len(cells)} cells, {seconds:.0f} s, about {left:.0f} s left", file=sys.stderr)
    return results


def _quiet() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)  # refusals and failures are in the table


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cells that were asked for and write or print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=sorted(families.F), metavar="NAME", help="only these")
    parser.add_argument("--implementations", nargs="+", choices=IMPLEMENTATIONS, default=IMPLEMENTATIONS)
    parser.add_argument("--dtypes", nargs="+", choices=sorted(DTYPES), default=["fp32", "bf16"])
    parser.add_argument("--modes", nargs="+", choices=[m.value for m in Mode], default=[m.value for m in Mode])
    parser.add_argument("--sizes", choices=sorted(SIZES), default="tiny", help="a size set of tests/sizes.py")
    parser.add_argument("--seed", type=int, default=0, help="of weights, biases and inputs")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--out", type=Path, help="folder for support.md and support.json, docs/ for the whole table")
    args = parser.parse_args(argv)
    chosen, others, absent = names()
    wanted = args.families or chosen + others
    cells = grid(
        [f for f in chosen if f in wanted],
        implementations=args.implementations,
        dtypes=args.dtypes,
        modes=[Mode(m) for m in args.modes],
        size=args.sizes,
        seed=args.seed,
    )
    # Without an implementation to choose there is one form, in eager's own code.
    cells += [Cell(f, "grouped_mm", "fp32", Mode.TRAIN, args.sizes, args.seed) for f in others if f in wanted]
    results = run(cells, jobs=max(1, min(args.jobs, len(cells))))
    head = header(ROOT, " ".join(["python -m tests.table", *(sys.argv[1:] if argv is None else argv)]))
    table = [r for r in results if r.cell.family in chosen]
    rest = [r for r in results if r.cell.family in others]
    out = args.out or (ROOT / "docs" if not (sys.argv[1:] if argv is None else argv) else None)
    print(as_text(table))
    if out is not None:
        _write(out, head, table, rest, absent)
    else:
        print("\n".join(failures(table)))
    return int(any(r.status in BAD for r in results))


def _write(out: Path, head: Header, table: Sequence[Result], rest: Sequence[Result], absent: Sequence[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    (out / "support.json").write_text(as_json(head, table, rest, absent))
    (out / "support.md").write_text(as_markdown(head, table, rest, absent))
    print(f"written: {out / 'support.md'} and support.json", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
