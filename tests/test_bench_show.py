import json
import sys
from pathlib import Path

import pytest
from expecttest import assert_expected_inline

from moe_inductor import cli
from moe_inductor.bench import floor, layer, phases, record, shapes


def _arm(forward, both, *, errors, **more):
    times = {"forward": forward, "forward_backward": both, "inference": 0.9 * forward}
    return {
        "times": {form: {"median": ms, "min": ms, "samples": [ms], "captured": True} for form, ms in times.items()},
        "errors": {"y": errors, "dx": 2 * errors},
        "peak_bytes": 3 << 30,
    } | more


def _layer_cell(tokens=16384, experts=128):
    scale = tokens / 16384
    shape = layer.with_experts(shapes.named("qwen3-30b"), experts)
    operators = {"experts_up": {"up_kernel": 0.95}, "experts_down": {"down_kernel": 0.5, "combine_kernel": 0.14}}
    profile = {"operators": operators, "gemms": phases.by_gemm(shape, 16384, operators)}
    liger = _arm(4 * scale, 13 * scale, errors=5e-3)
    for times in liger["times"].values():
        times |= {"captured": False, "uncaptured": "reads its number of tiles on the host"}
    dense = {
        k.name: {"gemm": k.gemm, "ms": 0.9, "flops": k.flops / 0.9e-3} for k in floor.kernels(shape, 16384) if k.gemm
    }
    return {
        "shape": shape.as_dict(),
        "tokens": tokens,
        "routing": {"name": "uniform", "mean": 1024.0, "largest": 1130, "without_rows": 0},
        "skipped": {"sonic": "not installed"},
        "ceilings": {"memory": 4.3e12, "matmul": 790e12, "dense": dense},
        "floor": floor.floor(shape, tokens, 790e12, 4.3e12),
        "arms": {
            "inductor:function": _arm(3.5 * scale, 9.6 * scale, errors=5e-3),
            "inductor:module": _arm(3.3 * scale, 9.3 * scale, errors=5e-3),
            "megamoe": _arm(
                2.2 * scale, 6.2 * scale, errors=4.9e-3,
                fused={"training": {"plan": "hopper/bf16"}, "inference": {"plan": "hopper/bf16"}},
                profile={"forward_backward": profile},
            ),
            "liger": liger,
            "deep_gemm": {"error": "RuntimeError: no nvcc"},
        },
    }  # fmt: skip


def _record(kind, *cells):
    provenance = {
        "date": "2030-01-02T03:04:05+00:00", "command": f"megamoe bench {kind}", "device": "NVIDIA H200",
        "versions": {"torch": "2.11.0"}, "commit": "0123456789abcdef", "changed": False,
    }  # fmt: skip
    return {"schema": record.SCHEMA, "kind": kind, "provenance": provenance, "settings": {}, "cells": list(cells)}


def _show(tmp_path, capsys, *records, plots=None):
    files = []
    for i, made in enumerate(records):
        files.append(tmp_path / f"{i}.json")
        record.write(made, files[-1])
    assert cli.main(["bench", "show", *map(str, files), *(["--plots", str(plots)] if plots else [])]) == 0
    return capsys.readouterr().out


def test_table_of_a_layer(tmp_path, capsys):
    text = _show(tmp_path, capsys, _record("layer", _layer_cell()))
    assert_expected_inline(
        text,
        """\
NVIDIA H200; torch 2.11.0; 2030-01-02, commit 0123456789ab; `megamoe bench layer`

### qwen3-30b, T=16384, uniform routing

H=2048 I=768 E=128 K=8; rows an expert: mean 1024, largest 1130, 0 without

| ms | forward | forward + backward | inference | peak MiB | plan |
|---|---:|---:|---:|---:|---:|
| inductor:function | 3.500 | 9.600 | 3.150 | 3072 |  |
| inductor:module | 3.300 | 9.300 | 2.970 | 3072 |  |
| megamoe | 2.200 | 6.200 | 1.980 | 3072 | hopper/bf16 |
| liger | 4.000* | 13.00* | 3.600* | 3072 |  |
| deep_gemm | failed | failed | failed |  |  |
| floor | 1.706 | 4.978 | 1.706 |  |  |

* forward, speed of megamoe: 1.50 x inductor:module's, 1.82 x liger's, 78% of the floor's
* forward + backward, speed of megamoe: 1.50 x inductor:module's, 2.10 x liger's, 80% of the floor's
* inference, speed of megamoe: 1.50 x inductor:module's, 1.82 x liger's
* TF/s of the matmuls (share of dense cuBLAS at the same M, N, K): up 868 (95%), down 825 (180%)
* errors against float32 (over those of inductor:function): y 4.90e-03 (0.980), dx 9.80e-03 (0.980)
* deep_gemm failed: RuntimeError: no nvcc
* without a CUDA graph: liger (reads its number of tiles on the host)
* sonic left out: not installed
""",
    )


def test_table_of_decoding(tmp_path, capsys):
    def cell(tokens, experts, grouped, batched, ours):
        arms = {
            "inductor:grouped": _arm(grouped, 0.0, errors=5e-3),
            "inductor:batched": _arm(batched, 0.0, errors=5e-3),
        }
        shape = shapes.named("qwen3-30b")
        return {
            "shape": shape.as_dict(),
            "tokens": tokens,
            "routing": {"name": "uniform"},
            "sets": 8,
            "distinct_experts": experts,
            "floor": {"inference": floor.weight_read(shape, experts, 4.3e12)},
            "skipped": {},
            "arms": arms | {"megamoe": _arm(ours, 0.0, errors=5e-3, host_ms=0.05)},
        }

    cells = [cell(1, 8.0, 0.09, 0.05, 0.04), cell(64, 126.0, 0.5, 3.0, 0.4)]
    cells[1]["arms"]["inductor:batched"] = {"error": "OutOfMemoryError: no"}
    text = _show(tmp_path, capsys, _record("decode", *cells)).replace("µ", "u")
    assert_expected_inline(
        text,
        """\
NVIDIA H200; torch 2.11.0; 2030-01-02, commit 0123456789ab; `megamoe bench decode`

### qwen3-30b, decoding, us a layer

| T | experts read | inductor:grouped | inductor:batched | megamoe | floor | x Inductor | of the floor's | host |
|---|---:|---:|---:|---:|---:|---:|---:|---:|
| 1 | 8 | 81.0 | 45.0 | 36.0 | 17.6 | 1.25 | 49% | 50 |
| 64 | 126 | 450.0 | failed | 360.0 | 276.5 | 1.25 | 77% | 50 |

* inductor:batched failed: OutOfMemoryError: no
""",
    )


def _model_record(**arms):
    times = {"eager": (4.0, 12.3), "inductor": (3.3, 9.3), "megamoe": (2.2, 6.2)}
    layer_times = {
        form: {name: times[name][i] for name in arms} for i, form in enumerate(("forward", "forward_backward"))
    }
    return _record(
        "model",
        {
            "layers": 12, "batch": 1, "sequence": 16384, "optimizer": "AdamW(fused=True)", "steps": [6, 20],
            "attention": "sdpa", "layer": {"times": layer_times},
            "arms": {
                name: {
                    "step": {"mean": ms}, "peak_bytes": 100 << 30, "profile": {"attention": {"ms": 200.0}},
                    "fused": {"plans": ["hopper/bf16"]} if name == "megamoe" else {},
                }
                for name, ms in arms.items()
            },
        },
    )  # fmt: skip


def test_table_of_a_model_step_merges_runs_of_single_arms(tmp_path, capsys):
    runs = [_model_record(eager=700.0), _model_record(inductor=610.0), _model_record(megamoe=560.0)]
    text = _show(tmp_path, capsys, *runs)
    assert_expected_inline(
        text,
        """\
NVIDIA H200; torch 2.11.0; 2030-01-02, commit 0123456789ab; `megamoe bench model`

### 12 layers of Qwen3-30B-A3B, 1 x 16384 tokens

Mean of steps 6 to 20, full activation checkpointing, AdamW(fused=True), attention sdpa

| ms | step | peak MiB | attention | MoE share | plan |
|---|---:|---:|---:|---:|---:|
| eager | 700.0 | 102400 | 200.0 | 28% |  |
| inductor | 610.0 | 102400 | 200.0 | 25% |  |
| megamoe | 560.0 | 102400 | 200.0 | 18% | hopper/bf16 |

* against eager a step saves 140.0 ms of 12 layers' 94.8 = 148%
* against inductor a step saves 50.0 ms of 12 layers' 50.4 = 99%
""",
    )
    assert (
        text.splitlines()[2:]
        == _show(tmp_path, capsys, _model_record(eager=700.0, inductor=610.0, megamoe=560.0)).splitlines()[2:]
    )


def test_plots_show_phases_and_scaling(tmp_path, capsys):
    cells = [_layer_cell(), _layer_cell(tokens=4096), _layer_cell(experts=64)]
    folder = tmp_path / "plots"
    _show(tmp_path, capsys, _record("layer", *cells), plots=folder)
    names = {
        "phases-qwen3-30b-e128-t16384-uniform",
        "phases-qwen3-30b-e128-t4096-uniform",
        "phases-qwen3-30b-e64-t16384-uniform",
        "scaling-tokens-qwen3-30b-e128-uniform",
        "scaling-experts-qwen3-30b-t16384-uniform",
    }
    assert {file.name for file in folder.iterdir()} == {f"{n}.{kind}" for n in names for kind in ("png", "svg")}
    for name in names:
        assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert (folder / f"{name}.png").stat().st_size > 10_000
    drawn = (folder / "phases-qwen3-30b-e128-t16384-uniform.svg").read_text()
    assert drawn.count("<path") > 40
    first = drawn
    _show(tmp_path, capsys, _record("layer", *cells), plots=folder)
    assert (folder / "phases-qwen3-30b-e128-t16384-uniform.svg").read_text() == first  # same record, same file


def test_plots_without_matplotlib_name_the_extra(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    file = tmp_path / "r.json"
    record.write(_record("layer", _layer_cell()), file)
    assert cli.main(["bench", "show", str(file), "--plots", str(tmp_path)]) == 2
    assert "pip install 'moe-inductor[bench]'" in capsys.readouterr().err


@pytest.mark.sample
def test_committed_results_can_be_shown():
    """Those in the package, wherever it is installed."""
    from importlib.resources import files

    folder = files("moe_inductor.bench") / "results"
    for file in folder.iterdir() if folder.is_dir() else ():
        made = json.loads(file.read_text())
        assert made["schema"] == record.SCHEMA and made["kind"] in record.KINDS, file.name
        assert made["provenance"]["device"] and made["provenance"]["date"] and made["provenance"]["command"]


def test_readme_has_the_table_of_the_committed_results(capsys):
    """Of what lies in the tree: records in the order of their names."""
    root = Path(__file__).parents[1]
    files = sorted((root / "moe_inductor/bench/results").glob("*layer*.json"))
    assert cli.main(["bench", "show", "--summary", *map(str, files)]) == 0
    table = capsys.readouterr().out
    assert table.count("\n") > 2 and table in (root / "README.md").read_text()
