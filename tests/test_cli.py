import json
import subprocess
import sys
import types

import pytest
import torch

from moe_inductor import cli
from moe_inductor.report import Reject, record

FACTORY = """
import torch
def make():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),)
def with_kwargs():
    return (lambda x, *, scale: x * scale), [torch.ones(2)], {"scale": 3}
def single():
    return torch.nn.Linear(4, 4), torch.ones(2, 4)
def wrong():
    return torch.nn.Linear(4, 4)
def fails():
    raise RuntimeError("no such file")
def bad_input():
    return torch.nn.Linear(4, 4), (torch.ones(2, 5),)
def leaves():
    raise SystemExit(7)
def leaves_later():
    return leaves, ()
def wrong_kwargs():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),), 5
def numbered_kwargs():
    return torch.nn.Linear(4, 4), (torch.ones(2, 4),), {1: 2}
"""


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    """A pass that refuses one region of each graph and notes what it was called with."""
    seen = []

    def fuse(graph, inputs, options):
        seen.append((inputs, options, torch.is_grad_enabled()))
        record([Reject("m.py:1", "order", "rows are not in expert order")], seconds=0.0)
        return graph

    backend = types.ModuleType("moe_inductor.backend")
    backend.fuse = fuse
    monkeypatch.setitem(sys.modules, "moe_inductor.backend", backend)
    return seen


@pytest.fixture
def factory(tmp_path, monkeypatch):
    name = f"factory_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(FACTORY)
    (tmp_path / "cli_raises.py").write_text("raise RuntimeError('at import')")
    (tmp_path / "cli_leaves.py").write_text("raise SystemExit(0)")
    (tmp_path / "cli_syntax.py").write_text("def make(:")
    monkeypatch.chdir(tmp_path)
    yield name
    sys.modules.pop(name, None)


@pytest.fixture
def config_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        num_hidden_layers=3,
        hidden_size=2048,
        moe_intermediate_size=768,
        num_experts=128,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["make", "with_kwargs", "single"])
def test_explain_a_factory(factory, capsys, name):
    assert cli.main(["explain", f"{factory}:{name}"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("0 of 1 MoE region fused in 1 graph")
    assert "m.py:1  [order] rows are not in expert order" in out.out
    assert "running the model" in out.err


def test_explain_json_is_the_only_thing_on_stdout(factory, capsys):
    assert cli.main(["explain", f"{factory}:make", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["refused"] == 1


def test_a_requirement_that_is_not_met_is_exit_code_1(factory, capsys):
    assert cli.main(["explain", f"{factory}:make", "--require", "1"]) == 1
    assert "0 MoE regions fused, 1 required" in capsys.readouterr().err
    assert cli.main(["explain", f"{factory}:make", "--require", "0"]) == 0


def test_explain_takes_options(factory, stand_in, capsys):
    argv = ["explain", f"{factory}:make", "--option", "moe.precision=bf16", "--option", "moe.strict=true"]
    assert cli.main(argv) == 0
    options = stand_in[0][1]
    assert options.precision.value == "bf16" and options.strict is True


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nowhere"], "'nowhere' is neither a folder with a config.json nor module:factory"),
        (["{}:absent"], "has no attribute 'absent'"),
        (["no_such_module_here:make"], "No module named 'no_such_module_here'"),
        (["{}:wrong"], "must return (model, args) or (model, args, kwargs)"),
        (["{}:fails"], "failed: RuntimeError: no such file"),
        (["{}:bad_input"], "the model could not be run: "),
        (["{}:make", "--option", "moe.precision"], "--option takes KEY=VALUE"),
        (["{}:make", "--option", "moe.precison=bf16"], "did you mean 'moe.precision'?"),
        (["{}:make", "--option", "foo=1"], "Inductor has no option 'foo'"),
        (["{}:make", "--option", "max_autotun=true"], "did you mean 'max_autotune'?"),
        (["{}:make", "--option", "max_autotune=1"], "Unexpected type of attr max_autotune, got int should be bool"),
        (["."], "has no config.json"),
        ([":make"], "cannot load :make: ValueError: Empty module name"),
        (["..:make"], "cannot load ..:make: TypeError: "),
        (["cli_raises:make"], "cannot load cli_raises:make: RuntimeError: at import"),
        (["cli_leaves:make"], "cannot load cli_leaves:make: SystemExit: 0"),
        (["cli_syntax:make"], "cannot load cli_syntax:make: SyntaxError: "),
        (["{}:leaves"], "leaves failed: SystemExit: 7"),
        (["{}:leaves_later"], "the model could not be run: "),
        (["{}:wrong_kwargs"], "must return its kwargs as a dictionary of names, not int"),
        (["{}:numbered_kwargs"], "must return its kwargs as a dictionary of names"),
    ],
)
def test_input_that_cannot_be_right_is_exit_code_2_and_one_line(factory, capsys, argv, words):
    assert cli.main(["explain", *(a.format(factory) for a in argv)]) == 2
    out = capsys.readouterr()
    assert not out.out
    assert words in out.err and out.err.splitlines()[-1].startswith("megamoe: ")


def test_explain_a_config_folder_at_its_true_widths_without_its_memory(config_folder, stand_in, capsys):
    assert cli.main(["explain", str(config_folder), "--layers", "1", "--tokens", "8", "--eval"]) == 0
    inputs, _, gradients = stand_in[0]
    shapes = {tuple(x.shape) for x in inputs if hasattr(x, "shape")}
    assert (128, 1536, 2048) in shapes
    assert not gradients
    assert "qwen3_moe with fake weights, 1 layers" in capsys.readouterr().err


def test_a_config_that_transformers_does_not_know(tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "no_such_model"}')
    assert cli.main(["explain", str(tmp_path)]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_doctor(capsys, monkeypatch):
    monkeypatch.setattr("moe_inductor._torch.list_backends", lambda: ["megamoe"])
    assert cli.main(["doctor", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["ok"] is True
    monkeypatch.setattr("moe_inductor._torch.list_backends", lambda: [])
    assert cli.main(["doctor"]) == 1
    assert "--  backend" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("fused", "passed", "argv", "code"), [(2, True, [], 0), (2, False, [], 1), (1, True, ["--require", "2"], 1)]
)
def test_demo_has_the_exit_code_of_its_result(monkeypatch, capsys, fused, passed, argv, code):
    from moe_inductor import demo

    result = types.SimpleNamespace(layers=2, fused=fused, passed=passed, to_json=lambda: "{}")
    monkeypatch.setattr(demo, "run", lambda *, steps, device: result)
    assert cli.main(["demo", "--json", *argv]) == code
    assert capsys.readouterr().out == "{}\n"


def test_demo_on_a_device_that_is_not_there_is_exit_code_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["demo", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("megamoe: --device cuda: torch finds no CUDA device")


def test_explain_says_that_the_environment_disables_the_backend(factory, monkeypatch, capsys):
    monkeypatch.setenv("MEGAMOE_DISABLE", "1")
    assert cli.main(["explain", f"{factory}:make"]) == 0
    assert "MEGAMOE_DISABLE  [disabled] the environment turns the backend off" in capsys.readouterr().out
    assert cli.main(["explain", f"{factory}:make", "--require", "1"]) == 1
    assert "[disabled]" in capsys.readouterr().err


def test_no_command_prints_usage():
    done = subprocess.run([sys.executable, "-m", "moe_inductor"], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("usage: megamoe")
