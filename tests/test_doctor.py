import importlib
import importlib.metadata
import json

import pytest
import torch

from moe_inductor import _torch
from moe_inductor import doctor as diagnose
from moe_inductor.doctor import Check, Diagnosis


def of(diagnosis, group):
    return {check.name: check for check in getattr(diagnosis, group)}


@pytest.fixture
def installed(monkeypatch):
    """Pretend distributions, and modules whose import does something."""
    versions, imports = {}, {}
    real_version, real_import = importlib.metadata.version, importlib.import_module

    def version(name):
        if name not in versions:
            return real_version(name)
        if versions[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    def import_module(name, package=None):
        if name not in imports:
            return real_import(name, package)
        if isinstance(imports[name], BaseException):
            raise imports[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib, "import_module", import_module)
    return versions, imports


def test_json_and_text_hold_every_check():
    diagnosis = diagnose({})
    value = json.loads(diagnosis.to_json())
    assert {"ok", "required", "devices", "packages", "kernels", "options"} == set(value)
    for group in ("required", "devices", "packages", "kernels", "options"):
        for check in value[group]:
            assert check["detail"] and check["name"] in str(diagnosis)
    assert of(diagnosis, "required")["torch"].detail == torch.__version__


def test_torch_outside_the_range_is_a_problem(monkeypatch):
    monkeypatch.setattr(_torch, "version", lambda: (2, 10))
    check = of(diagnose({}), "required")["torch"]
    assert not check.ok and "is outside the supported range 2.11 to 2.15" in check.detail


@pytest.mark.parametrize(("listed", "ok"), [(["inductor"], False), (["inductor", "megamoe"], True)])
def test_the_backend_must_be_listed(monkeypatch, listed, ok):
    monkeypatch.setattr(_torch, "list_backends", lambda: listed)
    diagnosis = diagnose({})
    check = of(diagnosis, "required")["backend"]
    assert check.ok is ok and (check in diagnosis.problems) is not ok


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (AssertionError("CUDA_HOME is not set"), "AssertionError: CUDA_HOME is not set"),
        (ImportError("undefined symbol: _ZN3c10"), "ImportError: undefined symbol: _ZN3c10"),
        (OSError("libcudart.so.12: cannot open"), "OSError: libcudart"),
        (SystemExit("needs a GPU"), "SystemExit: needs a GPU"),
        (ValueError(), "ValueError"),
    ],
)
def test_a_package_that_fails_to_import_gives_its_reason(installed, error, words):
    versions, imports = installed
    versions["sgl-deep-gemm"], imports["deep_gemm"] = "0.2.0", error
    versions["quack-kernels"], imports["quack"] = "0.2", error
    checks = of(diagnose({}), "packages")
    for name in ("deep_gemm", "quack"):
        assert not checks[name].ok and words in checks[name].detail


def test_the_stub_of_deep_gemm_is_refused_by_its_version(installed):
    versions, imports = installed
    versions["sgl-deep-gemm"], versions["deep-gemm"] = None, "1.0.0"
    imports["deep_gemm"] = AssertionError("must not be imported")
    check = of(diagnose({}), "packages")["deep_gemm"]
    assert not check.ok and check.detail == (
        "deep-gemm 1.0.0 is an old stub of the name; the maintained wheels are sgl-deep-gemm"
    )


def test_the_maintained_deep_gemm_is_taken(installed):
    versions, imports = installed
    versions["sgl-deep-gemm"], imports["deep_gemm"] = "0.2.1", None
    assert of(diagnose({}), "packages")["deep_gemm"] == Check("deep_gemm", True, "0.2.1")


@pytest.mark.parametrize(
    ("version", "ok"), [("4.57.1", False), ("5.0.0", True), ("5.24.0", True), ("6.0.0.dev0", False)]
)
def test_the_range_of_transformers(installed, version, ok):
    versions, imports = installed
    versions["transformers"], imports["transformers"] = version, None
    check = of(diagnose({}), "packages")["transformers"]
    assert check.ok is ok and version in check.detail


def test_the_environment_is_read_and_wrong_values_are_problems():
    diagnosis = diagnose({"MEGAMOE_PRECISION": "bf16", "MEGAMOE_REQUIRE": "al"})
    checks = of(diagnosis, "options")
    assert checks["precision"] == Check(
        "precision", True, "bf16 (from MEGAMOE_PRECISION; options of torch.compile win)"
    )
    assert checks["disabled"].detail == "False (default)"
    off = of(diagnose({"MEGAMOE_DISABLE": "0"}), "options")["disabled"]
    assert off == Check("disabled", True, "False (from MEGAMOE_DISABLE)")
    disabled = diagnose({"MEGAMOE_DISABLE": "1"})
    why = "MEGAMOE_DISABLE is set: every graph goes to Inductor unchanged, unset it"
    assert Check("disabled", False, why) in disabled.problems
    assert not checks["require"].ok and "did you mean 'all'?" in checks["require"].detail
    assert checks["require"] in diagnosis.problems


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda i: type("P", (), {"total_memory": 139 * 2**30})())
    assert of(diagnose({}), "devices")["cuda:0"].detail == "NVIDIA H200, capability 9.0, 139 GiB"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 / 0)
    assert of(diagnose({}), "devices")["cuda"] == Check("cuda", False, "ZeroDivisionError: division by zero")


def test_kernel_families_say_why_they_cannot_run(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    checks = of(diagnose({}), "kernels")
    for family in ("library", "triton", "hopper"):
        assert not checks[family].ok and "no NVIDIA driver answers" in checks[family].detail
    assert checks["cpu"].ok


def test_no_problem_reads_as_such():
    fine = Diagnosis((Check("torch", True, "2.13.0"),), (), (), ())
    assert str(fine).endswith("all required checks passed")
    assert str(Diagnosis((Check("torch", False, "old"),), (), (), ())).endswith("1 problem(s)")
