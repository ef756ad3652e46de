import json
import logging
import subprocess
import sys

import expecttest
import pytest
import sympy
import torch
from torch._dynamo.utils import counters

import moe_inductor
from moe_inductor.report import (
    Break,
    Fused,
    GraphReport,
    Reject,
    Report,
    collecting,
    last,
    record,
    report,
    reset,
    saved_bytes,
)
from moe_inductor.spec import Combine, ExpertsSpec, Grad, Halves, Layout, MoESpec

REFUSED = Reject("model.py:9", "order", "rows are not in expert order")


def spec(tokens=64, *, training=True, grads=frozenset(Grad), combine=Combine.WEIGHTED_SUM):
    ops = ExpertsSpec(
        experts=8,
        top_k=2,
        activation="swiglu",
        halves=Halves.GATE_UP,
        w1=Layout.OUT_IN,
        w2=Layout.OUT_IN,
        combine=combine,
        weight_dtype=torch.float32,
        combine_dtype=torch.float32,
        out_dtype=torch.bfloat16,
    )
    return MoESpec(
        ops=ops,
        tokens=sympy.sympify(tokens),
        top_k=sympy.Integer(2),
        hidden=16,
        inter=32,
        out_hidden=16,
        dtype=torch.bfloat16,
        bias1=False,
        bias2=False,
        training=training,
        grads=grads,
        device="cpu",
    )


def fused(layer=0, **of_spec):
    name = f"layers.{layer}.experts."
    return Fused("model.py:3", spec(**of_spec), "cpu/bf16", (name + "w1", name + "w2"), "verified: 1.0x eager's error")


def graphs(*outcomes):
    return Report(tuple(GraphReport(tuple(o), f"{i}/0", i, 0.5) for i, o in enumerate(outcomes)))


@pytest.fixture(autouse=True)
def fresh():
    reset()
    counters.clear()
    yield
    reset()
    counters.clear()


class TestText(expecttest.TestCase):
    def test_alike_regions_share_a_line(self):
        report = Report(
            graphs([fused(0), fused(1), REFUSED]).graphs,
            (Break("model.py:20", "a generic jump on data"),),
        )
        self.assertExpectedInline(
            str(report),
            """\
2 of 3 MoE regions fused in 1 graph, 0.50 s in the pass, about 24.0 KiB of activations not kept
  fused x2  model.py:3  cpu/bf16
    T=64 K=2 E=8 H=16 I=32 bf16 swiglu gate_up w1=out_in w2=out_in weight=f32 combine=weighted_sum:f32 out=bf16 training grads=x,weights,w1,b1,w2,b2 cpu
    verified: 1.0x eager's error
  refused  model.py:9  [order] rows are not in expert order
  ran eager  model.py:20  because a generic jump on data""",  # noqa: E501
        )

    def test_nothing_found(self):
        self.assertExpectedInline(str(graphs([])), """0 of 0 MoE regions fused in 1 graph, 0.50 s in the pass""")


def test_a_region_compiled_again_is_one_region():
    report = graphs([fused(0), fused(1), REFUSED], [fused(0, training=False), fused(1), REFUSED])
    assert (len(report.fused), len(report.refused), report.compiles, report.seconds) == (2, 1, 2, 1.0)


def test_regions_that_only_their_place_in_a_graph_tells_apart_all_count():
    nameless = Fused("model.py:3", spec(), "cpu/bf16", (), "")
    assert len(graphs([nameless, nameless], [nameless, nameless, nameless]).fused) == 3


def test_saved_bytes_are_those_of_gathered_and_of_unweighted_rows():
    rows = 64 * 2
    assert saved_bytes(spec()) == rows * 16 * 2 + rows * 16 * 4
    assert saved_bytes(spec(grads=frozenset({Grad.X}))) == 0
    assert saved_bytes(spec(combine=Combine.ROWS)) == rows * 16 * 2
    assert saved_bytes(spec(training=False)) == 0
    assert saved_bytes(spec(tokens="s0*4")) is None
    assert graphs([fused(0), fused(1)]).saved_bytes == 2 * saved_bytes(spec())
    assert graphs([fused(0), fused(1, tokens="s0")]).saved_bytes is None


def test_require_gives_the_reasons():
    graphs([fused(0), fused(1)]).require(2)
    with pytest.raises(RuntimeError, match=r"1 MoE region fused, 2 required\n.*model.py:9 .*\[order\] rows are not"):
        graphs([fused(0), REFUSED]).require(2)
    with pytest.raises(RuntimeError, match="no graph was compiled"):
        graphs().require(1)
    with pytest.raises(RuntimeError, match="nothing else"):
        graphs([]).require(1)


def test_require_all_raises_where_one_was_refused():
    graphs([fused()]).graphs[0].require_all()
    with pytest.raises(RuntimeError, match=r"1 MoE region stayed unfused\n.*\[order\]"):
        graphs([fused(), REFUSED]).graphs[0].require_all()


def test_json_holds_every_outcome():
    value = json.loads(graphs([fused(0), REFUSED], [fused(0)]).to_json())
    assert (value["matched"], value["refused"], value["compiles"]) == (1, 1, 2)
    first, second = value["graphs"][0]["outcomes"]
    assert first["plan"] == "cpu/bf16" and first["parameters"] == ["layers.0.experts.w1", "layers.0.experts.w2"]
    assert second == {
        "fused": False,
        "where": "model.py:9",
        "code": "order",
        "why": "rows are not in expert order",
    }
    assert value["graphs"][0]["plans"] == {"cpu/bf16": 1}


def test_record_counts_for_dynamo_and_for_the_process():
    record([fused(0), fused(1), REFUSED], seconds=0.1)
    entry = record([fused(0)], seconds=0.2)
    assert dict(counters["megamoe"]) == {"matched": 3, "refused": 1, "refused:order": 1}
    assert last() is entry and entry.graph_id == 1
    assert moe_inductor.report() == report() and len(report().fused) == 2
    reset()
    assert last() is None and report().compiles == 0


def test_one_info_line_a_compile_and_one_warning_where_something_was_refused(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "moe_inductor")
    record([fused(0), fused(1)], seconds=0.25)
    record([REFUSED, REFUSED, fused(0)], seconds=0.25)
    levels = [r.levelname for r in caplog.records]
    assert levels == ["INFO", "INFO", "WARNING"]
    assert caplog.messages[0] == ("graph 0 (compile -): 2 of 2 MoE regions fused, plans: cpu/bf16 x2, 0.250 s")
    assert caplog.messages[2] == (
        "graph 1 (compile -): 2 MoE regions stayed unfused\n"
        "  refused x2  model.py:9  [order] rows are not in expert order"
    )
    caplog.clear()
    monkeypatch.setenv("RANK", "3")
    record([fused(0)], seconds=0.25)
    assert not caplog.records


def test_collecting_keeps_the_process_as_it_was(caplog):
    caplog.set_level(logging.INFO, "moe_inductor")
    with collecting() as entries:
        record([REFUSED], seconds=0.1)
    assert [e.refused for e in entries] == [(REFUSED,)]
    assert not caplog.records and not report().graphs and not counters["megamoe"]


def test_a_compile_has_dynamos_id():
    def backend(graph, inputs):
        record([], seconds=0.0)
        return graph.forward

    torch._dynamo.reset()
    torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
    entry = last()
    assert entry is not None and entry.compile_id is not None and entry.compile_id.endswith("/0")


PROGRAM = """
import torch
from moe_inductor.report import Reject, record
def backend(graph, inputs):
    record([Reject("m.py:1", "order", "no")], seconds=0.0)
    return graph.forward
torch.compile(lambda x: x + 1, backend=backend)(torch.ones(2))
"""


def test_torch_logs_shows_our_logger_and_the_trace_has_the_json(tmp_path):
    import os

    environ = {**os.environ, "TORCH_LOGS": "+moe_inductor", "TORCH_TRACE": str(tmp_path), "PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("0 of 1 MoE region fused, plans: none") == 1
    assert done.stderr.count("1 MoE region stayed unfused") == 1
    trace = "".join(f.read_text() for f in tmp_path.iterdir())
    assert '"name": "moe_inductor_report"' in trace and '"code": "order"' in trace


def test_import_is_light():
    program = (
        "import moe_inductor, sys; print([m for m in ('transformers', 'triton', 'accelerate') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
