"""Runs every CUDA kernel once or twice on small operands: the program that ``.ci/sanitize`` watches.

``python -m tests.every_kernel [core ...]``, cores being ``wgmma``, ``tiled`` and ``pingpong``.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
import sys

import torch

from moe_inductor.kernels import pingpong
from moe_inductor.kernels.cuda import driver
from moe_inductor.kernels.family import Rows
from moe_inductor.kernels.fused import Fused
from moe_inductor.spec import Combine, Grad, Halves, Layout
from tests.experts_case import CLAMPED, SINGLE, make, spec_of


def run(
    family: Fused, dtype: torch.dtype, halves: Halves, layout: Layout, *, biases: bool, combine: Combine,
    activation: str | None = None,
) -> None:  # fmt: skip
    """One layer, forward and backward, with an empty expert, dropped rows and partial tiles of every kind. Its operands
    are made on the CPU: each launch that the tools watch costs milliseconds."""
    need = frozenset(Grad)
    if activation is None:
        activation = next(iter(SINGLE)) if halves is Halves.SINGLE else "swiglu"
    spec = spec_of(
        dtype, experts=5, top_k=2, halves=halves, w1=layout, w2=layout, activation=activation, combine=combine
    )
    o = make(spec, dtype, tokens=200, hidden=192, inter=128, biases=biases, dropped=True)
    o = dataclasses.replace(o, idx=o.idx.cuda(), **{name: t.cuda() for name, t in o.floats().items()})
    rows = Rows(*family.route(o.idx, spec.experts)[:3], spec.top_k)
    a, h = family.up(o.x, rows, o.w1, o.b1, [], spec)
    y = family.down(a, rows, o.weights, o.w2, o.b2, spec)
    family.experts(o.x, rows, o.weights, o.w1, o.b1, o.w2, o.b2, [], spec)
    dy = torch.randn(y.shape, dtype=y.dtype).cuda()
    dh, *_ = family.down_backward(dy, h, rows, o.weights, o.w2, o.b2, [], spec, need)
    assert dh is not None
    family.up_backward(dh, o.x, rows, o.w1, spec, need)
    torch.cuda.synchronize()


def compiled() -> None:
    """The kernels in CUDA C++, by single programs and by pairs. Raises where one of them was not asked for."""
    names, plain = set(), driver.launch

    def launch(name: str, args: driver.RowsArgs | driver.WgradArgs, programs: int, device: torch.device) -> None:
        names.add(name)
        plain(name, args, programs, device)

    pingpong.launch = launch
    family = Fused("pingpong", "tiled")
    for cluster, shared in itertools.product((1, 2), (0, 1 << 31)):
        pingpong.CLUSTER_GATHERED = pingpong.CLUSTER_DENSE = cluster
        pingpong.SHARED_ROWS = shared
        for layout, biases, (halves, activation) in itertools.product(
            Layout, (False, True), ((Halves.UP_GATE, "swiglu"), (Halves.INTERLEAVED, CLAMPED))
        ):
            run(family, torch.bfloat16, halves, layout, biases=biases, combine=Combine.WEIGHTED_SUM,
                activation=activation)  # fmt: skip
    source = driver.CUBIN.with_name("grouped.cu").read_text()
    declared = {f"{name}_{n}" for name in re.findall(r"^(?:ROWS|WGRAD)\((\w+),", source, re.M) for n in (1, 2)}
    if names != declared:
        raise RuntimeError(f"not run: {sorted(declared - names)}")


def main(cores: list[str]) -> None:
    """All forms on each core."""
    for core in cores:
        if core == "pingpong":
            compiled()
        else:
            generated(core)
        print(f"{core}: done", flush=True)


def generated(core: str) -> None:
    """The kernels that Triton compiles for ``core``."""
    for dtype in [torch.bfloat16, torch.float16] + [torch.float32] * (core == "tiled"):
        for n, halves in enumerate(Halves):
            for layout in Layout:
                combine = list(Combine)[n % 2]
                run(Fused(core), dtype, halves, layout, biases=layout is Layout.IN_OUT, combine=combine)


if __name__ == "__main__":
    main(sys.argv[1:] or ["wgmma", "tiled", "pingpong"])
