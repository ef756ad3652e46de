"""Time inside our code for deep models, in fresh processes, cold and warm. Figures are printed, structure is asserted.

python tests/test_pass_time.py LAYERS [dynamic]
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DEPTH = 48
#: What the whole pass may take, in seconds: 48 layers of static and of dynamic shape, and a graph without experts.
TARGETS = {"static": 2.0, "dynamic": 4.0, "without experts": 0.02}


def measure(layers: int, *, dynamic: bool, profile: str | None = None) -> dict:
    """One compile of ``layers`` blocks (0: linear layers instead), up to the edited graph."""
    import cProfile

    import torch

    from moe_inductor import backend, report
    from moe_inductor.passes import recogniser, verify
    from tests import models

    distinct, checks = [], []
    init, call = recogniser.Recogniser.__init__, verify.Verifier.__call__

    def kept(self):
        init(self)
        distinct.append(self)

    def timed(self, proposal):
        import time

        start = time.perf_counter()
        verdict = call(self, proposal)
        checks.append(time.perf_counter() - start)
        return verdict

    recogniser.Recogniser.__init__, verify.Verifier.__call__ = kept, timed
    profiler = cProfile.Profile()

    def compiler(graph, inputs):
        if profile:
            profiler.enable()
        backend.fuse(graph, inputs)
        profiler.disable()
        return graph.forward

    model = models.Residual(layers) if layers else torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(200)))
    x = models.rows(2, 9, models.HIDDEN)
    torch.compile(model, backend=compiler, dynamic=dynamic or None)(x)
    if profile:
        profiler.dump_stats(profile)
    found = report()
    return {
        "seconds": found.seconds,
        "compiles": found.compiles,
        "fused": sum(len(g.fused) for g in found.graphs),
        "refused": len(found.refused),
        "distinct": sum(r.distinct for r in distinct),
        "verify_seconds": sum(checks),
        "verify_ms_a_layer": 1e3 * sum(checks) / max(len(checks), 1),
        "verify_ms_after_the_first": 1e3 * sum(checks[1:]) / max(len(checks) - 1, 1),
    }


def fresh(cache: Path, layers: int, shape: str) -> dict:
    """:func:`measure` in a process of its own."""
    env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, __file__, str(layers), shape], capture_output=True, text=True, env=env, cwd=ROOT, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["static", "dynamic"])
def test_layers_that_are_alike_are_proved_once(tmp_path, capsys, shape):
    for start in ("cold", "warm"):
        found = fresh(tmp_path, DEPTH, shape)
        with capsys.disabled():
            print(
                f"\n{DEPTH} layers, {shape}, {start}: {found['seconds']:.2f} s in the pass "
                f"(target {TARGETS[shape]} s), verification {found['verify_ms_a_layer']:.2f} ms a layer"
            )
        assert (found["fused"], found["refused"]) == (DEPTH, 0)
        # with symbolic lengths the first layer reads them from the input, all others from the sum before them
        assert found["distinct"] == (1 if shape == "static" else 2)


@pytest.mark.slow
def test_a_graph_without_experts_is_left_quickly(tmp_path, capsys):
    found = fresh(tmp_path, 0, "static")
    with capsys.disabled():
        milliseconds, target = (1e3 * t for t in (found["seconds"], TARGETS["without experts"]))
        print(f"\nno experts: {milliseconds:.1f} ms in the pass (target {target:.0f} ms)")
    assert (found["fused"], found["distinct"]) == (0, 0)


def test_each_kind_of_layer_is_proved_once():
    """Three layers of one kind and one of another."""
    import torch

    from moe_inductor.passes import recogniser
    from moe_inductor.report import last
    from tests import models

    model = models.Residual(3)
    model.blocks.append(models.Residual(experts=8).blocks[0])
    counts = []
    call = recogniser.Recogniser.__call__

    def counted(self, *args):
        out = call(self, *args)
        counts.append(self.distinct)
        return out

    recogniser.Recogniser.__call__ = counted
    try:
        torch.compile(model, backend=models.aot_eager())(models.rows(1, 5, models.HIDDEN))
    finally:
        recogniser.Recogniser.__call__ = call
    assert counts == [1, 1, 1, 2] and len(last().fused) == 4


if __name__ == "__main__":
    arguments = sys.argv[1:]
    print(
        json.dumps(
            measure(
                int(arguments[0]), dynamic="dynamic" in arguments, profile=arguments[2] if len(arguments) > 2 else None
            )
        )
    )
