import json
import math

import pytest
import torch

from moe_inductor import cli
from moe_inductor.bench import (
    ceilings,
    decode,
    layer,
    model,
    operands,
    peers,
    phases,
    record,
    shapes,
    show,
    timing,
)
from moe_inductor.bench.errors import BenchError
from moe_inductor.bench.truth import errors


@pytest.mark.parametrize("name", ["tiny", "tiny-gpt-oss"])
def test_errors_of_both_plain_forms_vanish_in_float32(name):
    """The two forms and the truth are three spellings of one function."""
    shape = shapes.named(name)
    o = operands.make(shape, 33, "empty", "cpu", dtype=torch.float32)
    dy = torch.randn_like(o.x)
    for form in (operands.grouped, operands.batched):
        y = form(shape)(*o.args())
        grads = torch.autograd.grad(y, list(o.leaves().values()), dy)
        got = {"y": y} | {f"d{n}": g for n, g in zip(o.leaves(), grads, strict=True)}
        found = errors(shape, o, dy, got)
        assert set(found) == {"y", *(f"d{n}" for n in o.leaves())}
        assert max(found.values()) < 1e-6  # eps * sqrt(H) = 1e-6
    got["dw2"] = got["dw2"] * 1.25
    assert errors(shape, o, dy, got)["dw2"] == pytest.approx(0.25, rel=1e-5)


def test_layer_on_a_cpu_writes_a_whole_record(tmp_path, capsys):
    file = tmp_path / "layer.json"
    command = ["bench", "layer", "--shape", "tiny,tiny-gpt-oss", "--no-inductor", "--samples", "3", "--tokens", "32"]
    assert cli.main([*command, "--routing", "empty", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    made = record.read(file)
    assert made["provenance"]["versions"]["torch"] == torch.__version__
    assert made["provenance"]["command"] == f"megamoe {' '.join(command)} --routing empty --json {file}"
    assert [cell["shape"]["name"] for cell in made["cells"]] == ["tiny", "tiny-gpt-oss"]
    for cell in made["cells"]:
        assert cell["routing"]["without_rows"] == 1
        assert cell["skipped"] == {"inductor": "--no-inductor"}
        for name, arm in cell["arms"].items():
            assert set(arm["times"]) == {"forward", "forward_backward", "inference"}, name
            assert all(len(times["samples"]) == 3 and times["min"] > 0 for times in arm["times"].values())
            assert not any(times["captured"] for times in arm["times"].values())
            assert max(arm["errors"].values()) < 1e-2  # five bf16 roundings of 2^-9 each
        ours = cell["arms"]["megamoe"]["fused"]
        assert ours["training"]["plan"] == ours["inference"]["plan"] == "cpu/bf16"
        assert "training grads=x,weights,w1," in ours["training"]["spec"]
        assert "inference grads=none" in ours["inference"]["spec"]
    assert show.markdown([made]) in text


def test_kernel_option_reaches_the_policy(capsys):
    command = ["bench", "layer", "--shape", "tiny", "--no-inductor", "--samples", "1", "--peers", "megamoe"]
    assert cli.main([*command, "--kernel", "cpu,reference"]) == 0
    arms = json.loads(capsys.readouterr().out)["cells"][0]["arms"]
    assert {name: arm["fused"]["training"]["plan"] for name, arm in arms.items()} == {
        "megamoe": "cpu/bf16", "megamoe:reference": "reference/bf16",
    }  # fmt: skip
    assert cli.main([*command, "--kernel", "hopper"]) == 1  # not on a CPU: the arm fails, and so does the command
    made = json.loads(capsys.readouterr().out)
    assert "runs on cuda devices" in made["cells"][0]["arms"]["megamoe"]["error"]


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["decode"], "bench decode needs a CUDA device"),
        (["model"], "bench model needs a CUDA device"),
        (["layer", "--shape", "qwen"], "no shape is called 'qwen'"),
        (["layer", "--shape", "tiny", "--kernel", "hoper"], "did you mean 'hopper'"),
        (["layer", "--shape", "tiny", "--kernel", "auto,cpu,library"], "3 kernel families are too many"),
        (["layer", "--shape", "tiny", "--routing", "flat"], "no routing is called 'flat'"),
        (["layer", "--shape", "tiny", "--experts", "1"], "tiny chooses 2 experts a token, of 1"),
        (["layer", "--shape", "tiny", "--peers", "inductor:graph"], "not 'graph'"),
        (["layer", "--config", "nowhere"], "cannot read a config from nowhere"),
        (["show", "nowhere.json"], "cannot read nowhere.json"),
    ],
)
def test_requests_that_cannot_be_right_exit_with_2(command, words, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *command]) == 2
    assert words in capsys.readouterr().err


def test_record_of_another_kind_or_schema_is_refused(tmp_path):
    file = tmp_path / "other.json"
    file.write_text(json.dumps({"kind": "layer", "schema": record.SCHEMA + 1, "cells": []}))
    with pytest.raises(BenchError, match=f"has schema {record.SCHEMA + 1}"):
        record.read(file)
    file.write_text("[]")
    with pytest.raises(BenchError, match="no record of megamoe bench"):
        record.read(file)


def test_numbers_that_json_lacks_are_text(tmp_path):
    record.write({"a": [math.nan, (math.inf,)], 1: 2.5}, tmp_path / "deep" / "r.json")
    assert json.loads((tmp_path / "deep" / "r.json").read_text()) == {"a": ["nan", ["inf"]], "1": 2.5}


def test_an_arm_that_fails_leaves_the_others(monkeypatch):
    make = peers._make

    def broken(peer, shape, choice):
        if peer != "eager":
            return make(peer, shape, choice)
        return [peers.Arm("eager", lambda o: (lambda: operands.grouped(shape)(*o.args()) * math.nan, o.leaves()))]

    monkeypatch.setattr(peers, "_make", broken)
    cell = _measure("eager", "megamoe")
    assert cell["arms"]["eager"]["error"].startswith("BenchError: not finite: y")
    assert "times" not in cell["arms"]["eager"]
    assert "error" not in cell["arms"]["megamoe"] and "times" in cell["arms"]["megamoe"]


def test_a_layer_left_unfused_is_no_megamoe_arm(monkeypatch):
    monkeypatch.setenv("MEGAMOE_DISABLE", "1")
    assert _measure("megamoe")["arms"]["megamoe"]["error"] == (
        "BenchError: the layer was not fused: 0 regions fused instead of 1"
    )


def _measure(*names):
    choice = peers.Choice(names, inductor=False)
    settings = layer.Settings(samples=2)
    return layer.measure(shapes.named("tiny"), 16, "uniform", choice, settings, timing.clock("cpu"), lambda _: None)


def test_interleaving_runs_every_job_once_a_round_in_changing_order():
    seen = []
    jobs = {name: timing.Job(lambda name=name: seen.append(name)) for name in "abc"}
    times = timing.interleave(timing.Clock(), jobs, 5)
    rounds = [tuple(seen[i : i + 3]) for i in range(0, len(seen), 3)]
    assert len(rounds) == 5 + timing.DISCARDED and len(set(rounds)) > 1
    assert all(sorted(r) == ["a", "b", "c"] for r in rounds)
    assert {name: len(samples) for name, samples in times.items()} == {"a": 5, "b": 5, "c": 5}


@pytest.mark.parametrize("writes", [True, False])
def test_a_replay_that_writes_nothing_is_found_out(writes):
    true, out = torch.ones(3), torch.ones(3)
    job = timing.Job(lambda: out.copy_(true) if writes else None, captured=True, outputs=[out])
    replay = timing.replays_truly(timing.Clock(), job, [true])
    assert replay == ({"finite": True, "difference": 0.0} if writes else {"finite": False, "difference": math.inf})
    arm = peers.Arm("peer", lambda o: (lambda: true, {}))
    if writes:
        layer.require_true(replay, arm, "forward")
    else:
        with pytest.raises(BenchError, match="replaying forward gives other results"):
            layer.require_true(replay, arm, "forward")


def test_times_of_matmuls_are_taken_from_the_operators():
    shape = shapes.named("qwen3-30b")
    operators = {
        "experts_up": {"_rows_kernel": 0.5, "_count_kernel": 0.01},
        "experts_down": {"_rows_kernel": 0.4, "_combine_kernel": 0.2},
        "experts_down_backward": {"_pull_kernel": 0.1, "_rows_kernel": 0.6, "_wgrad_kernel": 0.7},
        "experts_up_backward": {"gemm_a": 1.0, "gemm_b": 2.0, "_combine_kernel": 0.2},
    }
    found = phases.by_gemm(shape, 16384, operators)
    assert {name: one["ms"] for name, one in found.items()} == {
        "up": 0.5, "down": 0.4, "dA": 0.6, "dW2": 0.7, "dX + dW1": 3.0,
    }  # fmt: skip
    assert found["up"]["flops"] == pytest.approx(4 * 131072 * 2048 * 768 / 0.5e-3)
    assert found["dX + dW1"]["flops"] == pytest.approx(8 * 131072 * 2048 * 768 / 3e-3)


def test_model_step_counts_fused_layers_and_the_saving():
    widths = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
    }  # fmt: skip
    times = {"forward": {"eager": 2.0, "megamoe": 1.0}, "forward_backward": {"eager": 6.0, "megamoe": 3.0}}
    alone = {"arms": {n: {"times": {f: {"median": times[f][n]} for f in times}} for n in ("eager", "megamoe")}}
    choice = peers.Choice(("eager", "megamoe"), inductor=False)
    part = model.Slice(layers=2, batch=2, sequence=8, widths=widths)
    cell = model.measure(part, ("eager", "megamoe"), choice, alone, timing.clock("cpu"), lambda _: None)
    assert cell["arms"]["megamoe"]["fused"] == {"layers": 2, "plans": ["cpu/bf16"]}
    for arm in cell["arms"].values():
        assert len(arm["step"]["samples"]) == 19
        assert arm["step"]["mean"] == pytest.approx(sum(arm["step"]["samples"][4:]) / 15)  # steps 6 to 20
        assert arm["loss"][0] == pytest.approx(math.log(64), rel=0.05)
    steps = {name: arm["step"]["mean"] for name, arm in cell["arms"].items()}
    assert cell["saving"]["eager"]["layers_ms"] == pytest.approx(2 * (8.0 - 4.0))
    assert cell["saving"]["eager"]["step_ms"] == pytest.approx(steps["eager"] - steps["megamoe"])
    assert cell["moe_share"]["megamoe"] == pytest.approx(2 * 4.0 / steps["megamoe"])


def test_model_config_is_a_slice_of_the_30b_model():
    config = model.config(model.Slice())
    with torch.device("meta"):
        import transformers

        made = transformers.AutoModelForCausalLM.from_config(config)
    layers = sum(p.numel() for p in made.model.layers.parameters())
    whole = 48 * layers // 12 + made.num_parameters() - layers
    assert whole == pytest.approx(30.5e9, rel=0.01)


def test_decoding_divides_by_the_sets_of_weights(monkeypatch):
    monkeypatch.setattr(ceilings, "machine", lambda clock, samples: {"memory": 1e9, "matmul": 1e12})
    shape, choice = shapes.named("tiny"), peers.Choice(("megamoe", "eager"), inductor=False)
    settings = layer.Settings(samples=3)
    monkeypatch.setattr(timing.Clock, "once", lambda self, job, *, flush: float(len(job.run())))
    cell = decode.measure(shape, 1, "uniform", choice, settings, timing.clock("cpu"), lambda _: None)
    assert cell["distinct_experts"] == 2.0  # one token's choices, no two alike
    assert cell["floor"]["inference"] == pytest.approx(1e3 * 2 * 3 * 64 * 32 * 2 / 1e9)
    ours = cell["arms"]["megamoe"]
    assert ours["times"]["inference"]["samples"] == [1.0] * 3  # a run calls every set once
    assert ours["fused"]["inference"]["plan"] == "cpu/bf16"
    assert ours["errors"]["y"] < 1e-2 and ours["host_ms"] > 0
    assert cell["skipped"] == {"eager": "not measured in decoding"}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_layer_and_decoding_on_a_gpu_are_captured():
    choice, clock = peers.Choice(("eager", "megamoe"), inductor=False), timing.clock("cuda")
    shape = shapes.Shape("small", 512, 256, 16, 4)
    cell = layer.measure(shape, 1000, "zipf", choice, layer.Settings(3), clock, lambda _: None)
    for arm in cell["arms"].values():
        assert "error" not in arm, arm
        assert arm["peak_bytes"] > cell["h_bytes"]
        for form, times in arm["times"].items():
            assert times["captured"], times
            assert arm["replays"][form] == {"finite": True, "difference": pytest.approx(0, abs=1e-2)}
        assert sum(kernel["ms"] for kernel in arm["profile"]["forward_backward"]["kernels"]) > 0
    assert {"up", "down"} <= set(cell["arms"]["megamoe"]["profile"]["forward_backward"]["gemms"])
    for times in cell["arms"]["megamoe"]["times"].values():
        assert times["min"] > 0
    assert cell["floor"]["forward"] > 0 and cell["ceilings"]["memory"] > 1e11
    cell = decode.measure(shape, 4, "uniform", choice, layer.Settings(3), clock, lambda _: None)
    assert cell["arms"]["megamoe"]["times"]["inference"]["captured"]
