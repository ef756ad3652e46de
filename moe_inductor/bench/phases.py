"""Where the time of a layer goes: device ms by kernel, and by fused operator, from the profiler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from .floor import kernels
from .shapes import Shape

_OURS = "megamoe::"
#: Ranges that the profiler also draws on the device's row.
_RANGES = ("##", "Torch-Compiled Region", "ProfilerStep", "Optimizer.", "autograd::")
#: Fused operator -> the kernels of :mod:`floor` that it does, and those of them that are matmuls.
OPERATORS: dict[str, tuple[str, ...]] = {
    "experts_up": ("up",),
    "experts_down": ("down", "combine"),
    "experts_down_backward": ("dA", "dW2"),
    "experts_up_backward": ("dX", "dW1", "reduce"),
}


def profile(fn: Callable[[], object], repeats: int = 3) -> dict[str, Any]:
    """ms a call by kernel (with the launches a call), and by fused operator and kernel. Calls run back to back, neither
    captured nor with a flushed cache, so that sums differ a little from the times of replays."""
    fn()
    torch.cuda.synchronize()
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        for _ in range(repeats):
            fn()
        torch.cuda.synchronize()
    events = list(prof.events() or ())
    totals: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    operators: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for event in events:
        if event.device_type.name == "CUDA" and not event.name.startswith(_RANGES):
            totals[event.name][0] += event.time_range.elapsed_us() / 1e3 / repeats
            totals[event.name][1] += 1 / repeats
        elif event.device_type.name == "CPU" and event.kernels:
            owner = _owner(event)
            for kernel in event.kernels:
                if owner and not kernel.name.startswith(_RANGES):
                    operators[owner][kernel.name] += kernel.duration / 1e3 / repeats
    order = sorted(totals, key=lambda name: -totals[name][0])
    return {
        "kernels": [{"name": n[:160], "ms": totals[n][0], "launches": totals[n][1]} for n in order],
        "operators": {op: {n[:160]: ms for n, ms in by.items()} for op, by in operators.items()},
    }


def _owner(event: Any) -> str:
    """The fused operator that launched, without its namespace; empty where none did."""
    while event is not None:
        if event.name.startswith(_OURS):
            return str(event.name).removeprefix(_OURS)
        event = event.cpu_parent
    return ""


def by_gemm(shape: Shape, tokens: int, operators: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """``ms`` and achieved ``flops`` (a second) of the matmul kernels, by the names of :mod:`floor`.

    In a forward operator the longest kernel is the matmul. In a backward one the two longest are, and the weight
    gradient is the one that says ``wgrad``; where neither or both do, the two are given together, as ``"dA + dW2"``.
    """
    work = {k.name: k.flops for k in kernels(shape, tokens)}
    found: dict[str, float] = {}
    for operator, parts in OPERATORS.items():
        gemms = [p for p in parts if work[p]]
        longest = sorted(operators.get(operator, {}).items(), key=lambda item: -item[1])[: len(gemms)]
        if len(gemms) == 1 and longest:
            found[gemms[0]] = longest[0][1]
        elif len(gemms) == 2 and longest:
            named = {gemms["wgrad" in name.lower()]: ms for name, ms in longest}
            found |= named if len(named) == 2 else {" + ".join(gemms): sum(ms for _, ms in longest)}
    return {
        name: {"ms": ms, "flops": sum(work[part] for part in name.split(" + ")) / ms * 1e3}
        for name, ms in found.items()
    }
