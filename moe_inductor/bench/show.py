"""Markdown tables from records, each figure beside the ones it is to be read against."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .layer import BOTH, FORWARD, INFERENCE
from .model import summarise
from .peers import fastest

#: What the errors of megamoe are divided by: the first that ran.
BASELINES = ("inductor:function", "inductor:module", "eager")


def markdown(records: Sequence[Mapping[str, Any]]) -> str:
    """All records as Markdown, those of one kind together."""
    parts = []
    for kind, table in (("layer", layers), ("decode", decoding), ("model", models)):
        own = [r for r in records if r["kind"] == kind]
        if own:
            parts += [*dict.fromkeys(source(r) for r in own), "", *table(cells(own)), ""]
    return "\n".join(parts).rstrip() + "\n"


def summary(records: Sequence[Mapping[str, Any]]) -> str:
    """One Markdown table of the layers under uniform routing: forward / forward + backward in ms, each peer's faster
    form."""
    found = [c for c in cells(r for r in records if r["kind"] == "layer") if c["routing"]["name"] == "uniform"]
    peers = list(dict.fromkeys(name.split(":")[0] for cell in found for name in _medians(cell, BOTH)))
    rows = []
    for cell in found:
        row = [f"{cell['shape']['name']}, T={cell['tokens']}"]
        for peer in peers:
            best = [(times, fastest(times, [peer])) for times in (_medians(cell, form) for form in (FORWARD, BOTH))]
            row.append(" / ".join("" if name is None else _ms(times[name]) for times, name in best).strip(" /"))
        floor = cell.get("floor")
        rows.append([*row, "" if floor is None else f"{_ms(floor[FORWARD])} / {_ms(floor[BOTH])}"])
    return "\n".join(table(["ms", *peers, "floor"], rows)) + "\n"


def cells(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The cells of records of one kind, those that measured the same thing merged: arms of a later one win."""
    merged: dict[Any, dict[str, Any]] = {}
    for record in records:
        for cell in record["cells"]:
            key = _key(cell)
            was = merged.get(key, {})
            merged[key] = {**was, **cell, "arms": {**was.get("arms", {}), **cell["arms"]}}
            if "layer" in was:
                merged[key]["layer"] = {
                    "times": {
                        form: {**was["layer"]["times"][form], **times} for form, times in cell["layer"]["times"].items()
                    }
                }
    for cell in merged.values():
        if "layer" in cell:
            cell.update(summarise(cell))
    return list(merged.values())


def _key(cell: Mapping[str, Any]) -> Any:
    if "shape" in cell:
        return cell["shape"]["name"], cell["shape"]["experts"], cell["tokens"], cell["routing"]["name"]
    return cell["layers"], cell["batch"], cell["sequence"]


def source(record: Mapping[str, Any]) -> str:
    """One line: where, with what, when."""
    p = record["provenance"]
    versions = ", ".join(f"{name} {version}" for name, version in p["versions"].items())
    commit = f", commit {p['commit'][:12]}{' (changed)' if p.get('changed') else ''}" if "commit" in p else ""
    return f"{p['device']}; {versions}; {p['date'][:10]}{commit}; `{p['command']}`"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """A Markdown table, the first column to the left and the others to the right."""
    line = "| " + " | ".join(head) + " |"
    rule = "|" + "|".join("---" if i == 0 else "---:" for i in range(len(head))) + "|"
    return [line, rule, *("| " + " | ".join(row) + " |" for row in rows)]


def layers(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table a cell, and the notes that its figures need."""
    lines: list[str] = []
    for cell in found:
        shape, routing, limits = cell["shape"], cell["routing"], cell.get("floor", {})
        lines += [
            f"### {shape['name']}, T={cell['tokens']}, {routing['name']} routing",
            "",
            f"H={shape['hidden']} I={shape['inter']} E={shape['experts']} K={shape['top_k']};"
            f" rows an expert: mean {routing['mean']:.0f}, largest {routing['largest']},"
            f" {routing['without_rows']} without",
            "",
        ]
        rows = [
            [name, *(_time(arm, form) for form in (FORWARD, BOTH, INFERENCE)), _mib(arm.get("peak_bytes")), _plan(arm)]
            for name, arm in cell["arms"].items()
        ]
        if limits:
            rows.append(["floor", _ms(limits[FORWARD]), _ms(limits[BOTH]), _ms(limits[FORWARD]), "", ""])
        lines += table(["ms", "forward", "forward + backward", "inference", "peak MiB", "plan"], rows)
        lines += ["", *_compared(cell), *_gemms(cell), *_errors(cell), *_left_out(cell), ""]
    return lines[:-1]


def _compared(cell: Mapping[str, Any]) -> list[str]:
    """How many times as fast as its fastest peers megamoe is."""
    lines = []
    for form in (FORWARD, BOTH, INFERENCE):
        times = _medians(cell, form)
        ours = times.pop("megamoe", None)
        if ours is None:
            continue
        parts = []
        for peer in dict.fromkeys(name.split(":")[0] for name in times):
            best = fastest(times, [peer])
            if best is not None:
                parts.append(f"{times[best] / ours:.2f} x {best}'s")
        if form in cell.get("floor", {}):
            parts.append(f"{cell['floor'][form] / ours:.0%} of the floor's")
        if parts:
            lines.append(f"* {form.replace('_', ' + ')}, speed of megamoe: " + ", ".join(parts))
    return lines


def _gemms(cell: Mapping[str, Any]) -> list[str]:
    gemms = cell["arms"].get("megamoe", {}).get("profile", {}).get(BOTH, {}).get("gemms", {})
    dense = cell.get("ceilings", {}).get("dense", {})
    parts = []
    for name, one in gemms.items():
        text = f"{name} {one['flops'] / 1e12:.0f}"
        if all(part in dense for part in name.split(" + ")):
            expected = sum(dense[part]["ms"] for part in name.split(" + "))
            text += f" ({expected / one['ms']:.0%})"
        parts.append(text)
    return [f"* TF/s of the matmuls (share of dense cuBLAS at the same M, N, K): {', '.join(parts)}"] if parts else []


def ratios(cell: Mapping[str, Any]) -> tuple[str, dict[str, float]] | None:
    """(baseline, error of megamoe over the baseline's by name); None where one of the two did not run."""
    ours = cell["arms"].get("megamoe", {}).get("errors")
    for name in BASELINES:
        theirs = cell["arms"].get(name, {}).get("errors")
        if ours and theirs:
            return name, {k: ours[k] / theirs[k] for k in ours if _number(ours[k]) and _number(theirs.get(k))}
    return None


def _number(value: object) -> bool:
    """Not text, which stands for NaN and infinities."""
    return isinstance(value, float) and value != 0.0


def _errors(cell: Mapping[str, Any]) -> list[str]:
    found = ratios(cell)
    if found is None:
        return []
    ours = cell["arms"]["megamoe"]["errors"]
    parts = ", ".join(f"{name} {ours[name]:.2e} ({ratio:.3f})" for name, ratio in found[1].items())
    return [f"* errors against float32 (over those of {found[0]}): {parts}"]


def _left_out(cell: Mapping[str, Any]) -> list[str]:
    lines = [f"* {name} failed: {arm['error']}" for name, arm in cell["arms"].items() if "error" in arm]
    lines += [f"* {n}: not finite: {', '.join(a['not_finite'])}" for n, a in cell["arms"].items() if "not_finite" in a]
    bare: dict[str, list[str]] = {}
    for name, arm in cell["arms"].items():
        for why in sorted({t["uncaptured"] for t in arm.get("times", {}).values() if t.get("uncaptured")}):
            bare.setdefault(why, []).append(name)
    lines += [f"* without a CUDA graph: {', '.join(names)} ({why})" for why, names in bare.items()]
    return lines + [f"* {name} left out: {why}" for name, why in cell.get("skipped", {}).items()]


def decoding(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table a shape: µs by token count."""
    lines: list[str] = []
    for name in dict.fromkeys(cell["shape"]["name"] for cell in found):
        own = [cell for cell in found if cell["shape"]["name"] == name]
        arms = list(dict.fromkeys(arm for cell in own for arm in cell["arms"]))
        rows = []
        for cell in own:
            times = _medians(cell, INFERENCE)
            ours, best = times.get("megamoe"), fastest(times, ["inductor"])
            host = cell["arms"].get("megamoe", {}).get("host_ms")
            least = cell["floor"][INFERENCE]
            rows.append(
                [str(cell["tokens"]), f"{cell['distinct_experts']:.0f}"]
                + [f"{1e3 * times[arm]:.1f}" if arm in times else "failed" for arm in arms]
                + [f"{1e3 * least:.1f}"]
                + [f"{times[best] / ours:.2f}" if ours and best else "", f"{least / ours:.0%}" if ours else ""]
                + [f"{1e3 * host:.0f}" if host else ""]
            )
        head = ["T", "experts read", *arms, "floor", "x Inductor", "of the floor's", "host"]
        lines += [f"### {name}, decoding, µs a layer", "", *table(head, rows), ""]
        failed = [line for cell in own for line in _left_out(cell)]
        lines += [*dict.fromkeys(failed), ""] if failed else []
    return lines[:-1]


def models(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """One table for each batch."""
    lines: list[str] = []
    for cell in found:
        rows = []
        for name, arm in cell["arms"].items():
            if "error" in arm:
                rows.append([name, "failed", "", "", "", ""])
                continue
            attention = arm.get("profile", {}).get("attention", {}).get("ms")
            share = cell["moe_share"].get(name)
            rows.append(
                [
                    name,
                    f"{arm['step']['mean']:.1f}",
                    _mib(arm["peak_bytes"]),
                    f"{attention:.1f}" if attention is not None else "",
                    f"{share:.0%}" if share else "",
                    ", ".join(arm.get("fused", {}).get("plans", [])),
                ]
            )
        first, last = cell["steps"]
        lines += [
            f"### {cell['layers']} layers of Qwen3-30B-A3B, {cell['batch']} x {cell['sequence']} tokens",
            "",
            f"Mean of steps {first} to {last}, full activation checkpointing, {cell['optimizer']},"
            f" attention {cell['attention']}",
            "",
            *table(["ms", "step", "peak MiB", "attention", "MoE share", "plan"], rows),
            "",
        ]
        for name, saving in cell["saving"].items():
            part = f" = {saving['ratio']:.0%}" if saving["ratio"] is not None else ""
            lines.append(
                f"* against {name} a step saves {saving['step_ms']:.1f} ms of {cell['layers']} layers' "
                f"{saving['layers_ms']:.1f}{part}"
            )
        lines += [f"* {name} failed: {arm['error']}" for name, arm in cell["arms"].items() if "error" in arm]
        lines.append("")
    return lines[:-1]


def _medians(cell: Mapping[str, Any], form: str) -> dict[str, float]:
    return {n: a["times"][form]["median"] for n, a in cell["arms"].items() if form in a.get("times", {})}


def _time(arm: Mapping[str, Any], form: str) -> str:
    if "error" in arm:
        return "failed"
    times = arm.get("times", {}).get(form)
    return "" if times is None else _ms(times["median"]) + ("" if times["captured"] else "*")


def _ms(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.2f}"


def _mib(value: int | None) -> str:
    return "" if value is None else f"{value / 2**20:.0f}"


def _plan(arm: Mapping[str, Any]) -> str:
    return ", ".join(sorted({fused["plan"] for fused in arm.get("fused", {}).values()}))
