"""Runs every CUDA kernel once or twice on small operands: the program that ``.ci/sanitize`` watches.

``python -m tests.every_kernel [core ...]``, cores being ``wgmma`` and ``tiled``.
"""

from __future__ import annotations

import sys

import torch

from moe_inductor.kernels.family import Rows
from moe_inductor.kernels.fused import Fused
from moe_inductor.spec import Combine, Grad, Halves, Layout
from tests.experts_case import SINGLE, make, spec_of


def run(family: Fused, dtype: torch.dtype, halves: Halves, layout: Layout, *, biases: bool, combine: Combine) -> None:
    """One layer, forward and backward, with an empty expert, dropped rows and partial tiles of every kind."""
    activation = next(iter(SINGLE)) if halves is Halves.SINGLE else "swiglu"
    spec = spec_of(
        dtype, experts=5, top_k=2, halves=halves, w1=layout, w2=layout, activation=activation, combine=combine
    )
    o = make(spec, dtype, tokens=200, hidden=192, inter=128, biases=biases, dropped=True, device="cuda")
    rows = Rows(*family.route(o.idx, spec.experts)[:3], spec.top_k)
    a, h = family.up(o.x, rows, o.w1, o.b1, [], spec)
    y = family.down(a, rows, o.weights, o.w2, o.b2, spec)
    family.experts(o.x, rows, o.weights, o.w1, o.b1, o.w2, o.b2, [], spec)
    need = frozenset(Grad)
    dh, *_ = family.down_backward(torch.randn_like(y), h, rows, o.weights, o.w2, o.b2, [], spec, need)
    assert dh is not None
    family.up_backward(dh, o.x, rows, o.w1, spec, need)
    torch.cuda.synchronize()


def main(cores: list[str]) -> None:
    """All forms on each core."""
    for core in cores:
        dtypes = [torch.bfloat16, torch.float16] + [torch.float32] * (core == "tiled")
        for dtype in dtypes:
            for n, halves in enumerate(Halves):
                for layout in Layout:
                    combine = list(Combine)[n % 2]
                    run(Fused(core), dtype, halves, layout, biases=layout is Layout.IN_OUT, combine=combine)
        print(f"{core}: done", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:] or ["wgmma", "tiled"])
