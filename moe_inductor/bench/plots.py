"""Plots from layer records, as PNG and SVG: time against the floor by phase, and how it scales with T and E."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .errors import BenchError
from .layer import BOTH, FORWARD
from .phases import OPERATORS
from .show import cells

_FORMATS = ("png", "svg")


def draw(records: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Draw what the layer cells hold into ``folder`` and return the files. Raises BenchError without matplotlib."""
    try:
        import matplotlib
    except ImportError as error:
        raise BenchError(f"plots need matplotlib: pip install 'moe-inductor[bench]' ({error})") from error
    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "megamoe"  # the same file for the same record
    found = cells([r for r in records if r["kind"] == "layer"])
    folder.mkdir(parents=True, exist_ok=True)
    files: list[Path] = []
    for cell in found:
        if any("times" in arm for arm in cell["arms"].values()):
            name = f"{cell['shape']['name']}-e{cell['shape']['experts']}-t{cell['tokens']}-{cell['routing']['name']}"
            files += _save(_phases(cell), folder / f"phases-{name}")
    for axis, of in (("tokens", lambda c: c["tokens"]), ("experts", lambda c: c["shape"]["experts"])):
        files += [f for group in _series(found, axis) for f in _scaling(group, axis, of, folder)]
    return files


def _save(figure: Any, stem: Path) -> list[Path]:
    import matplotlib.pyplot as plt

    files = [stem.with_name(f"{stem.name}.{ending}") for ending in _FORMATS]
    for file in files:
        figure.savefig(file, dpi=150, bbox_inches="tight", metadata={"Date": None} if file.suffix == ".svg" else None)
    plt.close(figure)
    return files


def _title(cell: Mapping[str, Any]) -> str:
    s = cell["shape"]
    return f"{s['name']} (H={s['hidden']} I={s['inter']} E={s['experts']} K={s['top_k']}), {cell['routing']['name']}"


def _phases(cell: Mapping[str, Any]) -> Any:
    """Forward and backward of every arm with the floor's as lines; beside it megamoe's operators and their floors."""
    import matplotlib.pyplot as plt

    least = cell.get("floor", {})
    operators = cell["arms"].get("megamoe", {}).get("profile", {}).get(BOTH, {}).get("operators", {})
    figure, axes = plt.subplots(
        1, 2 if operators else 1, figsize=(11 if operators else 6, 4), squeeze=False, layout="constrained"
    )
    left = axes[0][0]
    timed = {n: a["times"] for n, a in cell["arms"].items() if BOTH in a.get("times", {})}
    forward = [t[FORWARD]["median"] for t in timed.values()]
    backward = [t[BOTH]["median"] - t[FORWARD]["median"] for t in timed.values()]
    left.bar(list(timed), forward, label="forward")
    left.bar(list(timed), backward, bottom=forward, label="backward")
    if least:
        left.axhline(least[FORWARD], color="black", linestyle=":", label="floor, forward")
        left.axhline(least[BOTH], color="black", linestyle="--", label="floor, both")
    left.set_ylabel("ms")
    left.tick_params(axis="x", rotation=20)
    left.legend()
    if operators:
        right, names = axes[0][1], [n for n in (*OPERATORS, "route_metadata") if n in operators]
        right.barh(names, [sum(operators[n].values()) for n in names], label="device time")
        if least:
            floors = [sum(least[part] for part in OPERATORS.get(n, ())) for n in names]
            right.barh(names, floors, height=0.35, color="black", alpha=0.5, label="floor")
        right.invert_yaxis()
        right.set_xlabel("ms")
        right.legend()
    figure.suptitle(f"{_title(cell)}, T={cell['tokens']}")
    return figure


def _series(found: Sequence[Mapping[str, Any]], axis: str) -> list[list[Mapping[str, Any]]]:
    """Groups of at least two cells that differ in ``axis`` alone."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for cell in found:
        fixed = cell["shape"]["experts"] if axis == "tokens" else cell["tokens"]
        groups.setdefault((cell["shape"]["name"], cell["routing"]["name"], fixed), []).append(cell)
    return [group for group in groups.values() if len(group) > 1]


def _scaling(group: Sequence[Mapping[str, Any]], axis: str, of: Any, folder: Path) -> list[Path]:
    """Forward + backward of every arm over ``axis``, and the floor."""
    import matplotlib.pyplot as plt

    group = sorted(group, key=of)
    figure, ax = plt.subplots(figsize=(6, 4), layout="constrained")
    for name in dict.fromkeys(name for cell in group for name in cell["arms"]):
        points = [(of(c), c["arms"][name]["times"][BOTH]["median"]) for c in group if _timed(c, name)]
        if points:
            ax.plot(*zip(*points, strict=True), marker="o", label=name)
    least = [(of(c), c["floor"][BOTH]) for c in group if "floor" in c]
    if least:
        ax.plot(*zip(*least, strict=True), color="black", linestyle="--", label="floor")
    ax.set(xscale="log", xlabel=axis, ylabel="ms, forward + backward")
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}")
    ax.set_xticks([of(c) for c in group], [str(of(c)) for c in group])
    ax.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
    ax.legend()
    first = group[0]
    fixed = f"e{first['shape']['experts']}" if axis == "tokens" else f"t{first['tokens']}"
    figure.suptitle(_title(first) if axis == "tokens" else f"{first['shape']['name']}, T={first['tokens']}")
    return _save(figure, folder / f"scaling-{axis}-{first['shape']['name']}-{fixed}-{first['routing']['name']}")


def _timed(cell: Mapping[str, Any], name: str) -> bool:
    return BOTH in cell["arms"].get(name, {}).get("times", {})
