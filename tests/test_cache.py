"""PyTorch's compile caches across processes: an unchanged model is a hit, changed kernels are never served stale."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent

#: One training step under true Inductor. ``sys.argv``: the kernel's change, "none" or "backward".
SCRIPT = """
import json, sys, time
import torch
from torch._dynamo.utils import counters
from moe_inductor import digest, report
from moe_inductor.kernels import cpu
from tests import models

if sys.argv[1] == "backward":
    original = cpu.up_backward

    def doubled(*args):
        return tuple(None if g is None else 2 * g for g in original(*args))

    cpu.up_backward = doubled
    # the digest is read from the sources: an edited file has another one
    fresh = lambda: "0123456789ab"
    for module in list(sys.modules.values()):
        if getattr(module, "digest", None) is digest.digest:
            module.digest = fresh

model, x = models.Residual(), models.rows(1, 7, models.HIDDEN)
backend = sys.argv[2]
options = {"moe.verify": "off"} if sys.argv[1] == "backward" else None
start = time.perf_counter()
got = models.pull(torch.compile(model, backend=backend, options=options), model, x)
wanted = models.pull(model, model, x)
print(json.dumps({
    "aot": dict(counters["aot_autograd"]),
    "fx": {k: v for k, v in counters["inductor"].items() if "cache" in k},
    "matched": counters["megamoe"]["matched"],
    "up": float((got["blocks.0.experts.gate_up_proj"] / wanted["blocks.0.experts.gate_up_proj"]).nanmedian()),
    "down": float((got["blocks.0.experts.down_proj"] / wanted["blocks.0.experts.down_proj"]).nanmedian()),
    "verified": [f.verified for f in report().fused],
    "seconds": time.perf_counter() - start,
}))
"""


def step(cache: Path, change: str = "none") -> dict:
    """What a fresh process that shares ``cache`` reports."""
    env = os.environ | {
        "TORCHINDUCTOR_CACHE_DIR": str(cache),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, change, "megamoe"],
        capture_output=True,
        text=True,
        env=env,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_a_second_process_hits_and_changed_kernels_miss(tmp_path):
    cold, warm, changed, back = step(tmp_path), step(tmp_path), step(tmp_path, "backward"), step(tmp_path)
    assert [s["matched"] for s in (cold, warm, changed, back)] == [1, 1, 1, 1]
    assert cold["aot"].get("autograd_cache_hit", 0) == 0 and cold["aot"]["autograd_cache_miss"] == 1
    for again in (warm, back):
        assert again["aot"]["autograd_cache_hit"] == 1 and again["aot"].get("autograd_cache_miss", 0) == 0
        assert (again["up"], again["down"]) == (pytest.approx(1, abs=1e-4), pytest.approx(1, abs=1e-4))
    assert changed["aot"].get("autograd_cache_hit", 0) == 0
    assert (changed["up"], changed["down"]) == (pytest.approx(2, abs=1e-4), pytest.approx(1, abs=1e-4))
    assert cold["verified"][0].startswith("verified: ") and warm["verified"] == cold["verified"]


def test_the_digest_is_an_argument_of_every_operator():
    from moe_inductor import ops

    for op in (
        ops.route_metadata,
        ops.experts_up,
        ops.experts_up_backward,
        ops.experts_down,
        ops.experts_down_backward,
        ops.experts,
        ops.experts_backward,
    ):
        assert "digest" in [a.name for a in op._opoverload._schema.arguments]
    assert torch.ops.megamoe.experts.default._schema.arguments[-1].name == "digest"
