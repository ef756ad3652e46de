"""The support table as Markdown, JSON and a summary."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.cells import Result, Status
from tests.sizes import SIZES


@dataclass(frozen=True, slots=True)
class Header:
    """Where and when a table was made. ``changed`` is whether the package differed from ``commit``."""

    date: str
    commit: str
    changed: bool
    torch: str
    transformers: str
    command: str


def header(root: Path, command: str) -> Header:
    """The header of a table made now, from the repository at ``root``."""

    def git(*args: str) -> str:
        done = subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return Header(
        date=datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        commit=git("rev-parse", "--short=12", "HEAD") or "unknown",
        changed=bool(git("status", "--porcelain", "--", "moe_inductor", "passes", "kernels")),
        torch=torch.__version__,
        transformers=transformers.__version__,
        command=command,
    )


def as_text(results: Sequence[Result]) -> str:
    """How many cells there are of each status, and the cell that came closest to its bound."""
    counts = Counter(r.status.value for r in results)
    lines = [", ".join(f"{n} {status}" for status, n in counts.most_common()) + f", {len(results)} cells"]
    if measured := [r for r in results if r.worst]:
        worst = max(measured, key=lambda r: r.used)
        lines.append(f"closest to its bound, {worst.used:.2f} of it: {worst.cell}, {worst.worst}")
    return "\n".join(lines)


def failures(results: Iterable[Result]) -> list[str]:
    """One line for each reason that a cell is not fused, with the columns it was met in."""
    found: dict[tuple[str, str], list[str]] = {}
    for r in results:
        if r.status is not Status.FUSED:
            found.setdefault((r.cell.family, _reason(r)), []).append(r.cell.column)
    return [f"* {family}: {reason}. Met in {', '.join(columns)}." for (family, reason), columns in found.items()]


def _reason(r: Result) -> str:
    return f"{r.status.value}{f' [{r.code}]' if r.code else ''}, {r.why.rstrip('.')}"


def _cell(r: Result | None) -> str:
    if r is None:
        return ""
    if r.status is Status.FUSED:
        return str(r.fused)
    return f"{r.status.value} ({r.code})" if r.code else r.status.value


def as_markdown(head: Header, table: Sequence[Result], rest: Sequence[Result], absent: Sequence[str]) -> str:
    """The page: header, counts, one row a family, then every cell that is not fused and why."""
    columns = list(dict.fromkeys(r.cell.column for r in table))
    by_place = {(r.cell.family, r.cell.column): r for r in table}
    any_cell = (table or rest)[0].cell
    size = SIZES[any_cell.size]
    changed = " with local changes" if head.changed else ""
    lines = [
        "# Which families are fused",
        "",
        f"Made on {head.date} at commit {head.commit}{changed} with torch {head.torch} and transformers"
        f" {head.transformers}, by `{head.command}`.",
        f"Blocks of {size.experts} experts, top-{size.top_k}, hidden {size.hidden}, inner {size.inter}, input"
        f" [{size.batch}, {size.tokens}, {size.hidden}], seed {any_cell.seed}.",
        "",
        "A number is how many regions were fused; outputs, inputs changed in place and every gradient are then as",
        "close to a float64 truth as eager's are (`tests/truth.py` derives the bound). `eval` records gradients,",
        "`no_grad` does not, `dynamic` is training with `dynamic=True` and a second number of tokens. `eager fails`",
        "and `compile fails` are cells that do not run without this package either.",
        "",
        as_text(table) + ".",
        "",
        "| family | " + " | ".join(columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for family in dict.fromkeys(r.cell.family for r in table):
        lines.append(f"| {family} | " + " | ".join(_cell(by_place.get((family, c))) for c in columns) + " |")
    lines += ["", "## Cells that are not fused", "", *(failures(table) or ["None."])]
    lines += ["", "## Families without an experts implementation to choose", ""]
    lines += [f"* {r.cell.family}: {_outside(r)}." for r in rest] or ["None."]
    if absent:
        lines += ["", "## Families that this transformers does not have", "", ", ".join(absent) + "."]
    return "\n".join(lines) + "\n"


def _outside(r: Result) -> str:
    if r.status is Status.FUSED:
        return f"fused, {r.fused}"
    return f"not in this form, {_reason(r)}"


def as_json(head: Header, table: Sequence[Result], rest: Sequence[Result], absent: Sequence[str]) -> str:
    """The header, every cell and what the page lists; one line a cell, so that two tables compare line by line."""
    first = (table or rest)[0].cell
    values: dict[str, Any] = {
        "version": 1,
        **asdict(head),
        "size": {"name": first.size, **asdict(SIZES[first.size])},
        "seed": first.seed,
        "counts": dict(Counter(r.status.value for r in table)),
        "absent": list(absent),
    }
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    for key, results in (("other_forms", rest), ("cells", table)):
        rows = ",\n".join(json.dumps(r.as_dict()) for r in results)
        lines.append(f'"{key}": [\n{rows}\n]')
    return "{\n" + ",\n".join(lines) + "\n}\n"
