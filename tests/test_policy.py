import dataclasses

import pytest
import sympy
import torch

from moe_inductor import policy
from moe_inductor.options import Kernel, OptionError, Options, Precision, WeightCache
from moe_inductor.policy import Device, choose
from moe_inductor.report import Reject
from moe_inductor.spec import Combine, ExpertsSpec, Grad, Halves, Layout, MoESpec

CPU = Device("cpu")
A100 = Device("cuda", (8, 0), "NVIDIA A100")
H200 = Device("cuda", (9, 0), "NVIDIA H200")
H200_TRITON, A100_TRITON = (dataclasses.replace(device, triton=True) for device in (H200, A100))
T4 = Device("cuda", (7, 5), "Tesla T4")


def spec(dtype=torch.bfloat16):
    ops = ExpertsSpec(
        experts=8,
        top_k=2,
        activation="swiglu",
        halves=Halves.GATE_UP,
        w1=Layout.OUT_IN,
        w2=Layout.OUT_IN,
        combine=Combine.WEIGHTED_SUM,
        weight_dtype=torch.float32,
        combine_dtype=torch.float32,
        out_dtype=dtype,
    )
    return MoESpec(
        ops=ops,
        tokens=sympy.Symbol("s0", integer=True, positive=True),
        top_k=sympy.Integer(2),
        hidden=64,
        inter=32,
        out_hidden=64,
        dtype=dtype,
        bias1=False,
        bias2=False,
        training=True,
        grads=frozenset(Grad),
        device="cpu",
    )


@pytest.mark.parametrize(
    ("device", "dtype", "plan"),
    [
        (CPU, torch.bfloat16, "cpu/bf16"),
        (CPU, torch.float16, "cpu/f16"),
        (CPU, torch.float32, "cpu/f32"),
        (CPU, torch.float64, "cpu/f64"),
        (A100, torch.bfloat16, "library/bf16"),
        (H200, torch.float32, "library/f32"),
        (H200_TRITON, torch.bfloat16, "hopper/bf16"),
        (H200_TRITON, torch.float16, "hopper/f16"),
        (H200_TRITON, torch.float32, "triton/f32"),
        (H200_TRITON, torch.float64, "library/f64"),
        (A100_TRITON, torch.bfloat16, "triton/bf16"),
    ],
)
def test_each_device_has_its_family_in_the_models_dtype(device, dtype, plan):
    assert choose(spec(dtype), device, Options()) == plan


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (Device("mps"), "no kernel family runs on mps devices"),
        (Device("xpu"), "no kernel family runs on xpu devices"),
        (Device("meta"), "no kernel family runs on meta devices"),
        (dataclasses.replace(H200, name="MI300X", is_rocm=True), "MI300X runs under ROCm"),
        (T4, "Tesla T4 has compute capability 7.5, the grouped matmuls need 8.0"),
        (Device("cuda"), "compute capability is unknown"),
    ],
)
def test_other_devices_are_refused_with_the_missing_fact(device, words):
    refusal = choose(spec(), device, Options(), where="m.py:7")
    assert isinstance(refusal, Reject)
    assert (refusal.where, refusal.code) == ("m.py:7", "device")
    assert words in refusal.why


@pytest.mark.parametrize(
    ("kernel", "device", "plan"),
    [
        (Kernel.REFERENCE, CPU, "reference/bf16"),
        (Kernel.REFERENCE, T4, "reference/bf16"),
        (Kernel.CPU, CPU, "cpu/bf16"),
        (Kernel.LIBRARY, H200, "library/bf16"),
        (Kernel.HOPPER, H200_TRITON, "hopper/bf16"),
        (Kernel.TRITON, H200_TRITON, "triton/bf16"),
    ],
)
def test_a_family_can_be_forced(kernel, device, plan):
    assert choose(spec(), device, Options(kernel=kernel)) == plan


@pytest.mark.parametrize(
    ("kernel", "device", "words"),
    [
        (Kernel.CPU, H200, "family cpu runs on cpu devices, and the experts are on cuda"),
        (Kernel.LIBRARY, CPU, "family library runs on cuda devices, and the experts are on cpu"),
        (Kernel.LIBRARY, T4, "capability 7.5"),
        (Kernel.HOPPER, H200, "hopper needs Triton 3.6"),
        (Kernel.TRITON, A100, "triton needs Triton 3.6"),
        (Kernel.HOPPER, A100, "hopper needs compute capability 9.0, NVIDIA A100 has 8.0"),
        (Kernel.HOPPER, CPU, "family hopper runs on cuda devices, and the experts are on cpu"),
        (Kernel.HOPPER, Device("cuda"), "compute capability is unknown"),
    ],
)
def test_a_forced_family_that_cannot_run_is_refused(kernel, device, words):
    refusal = choose(spec(), device, Options(kernel=kernel))
    assert isinstance(refusal, Reject) and refusal.code == "kernel" and words in refusal.why


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int32, torch.complex64])
def test_other_dtypes_are_refused(dtype):
    refusal = choose(spec(dtype), CPU, Options())
    assert isinstance(refusal, Reject) and refusal.code == "dtype" and str(dtype) in refusal.why


def test_bf16_asks_for_a_bf16_model():
    assert choose(spec(), CPU, Options(precision=Precision.BF16)) == "cpu/bf16"
    refusal = choose(spec(torch.float32), CPU, Options(precision=Precision.BF16))
    assert isinstance(refusal, Reject) and refusal.code == "precision"
    assert "bf16 is not the model's dtype (f32)" in refusal.why


@pytest.mark.parametrize("precision", [Precision.FP8, Precision.MXFP8, Precision.FP8_BWD])
def test_quantised_precisions_are_refused(precision):
    refusal = choose(spec(), H200, Options(precision=precision))
    assert isinstance(refusal, Reject) and refusal.code == "precision"
    assert f"precision {precision.value} needs" in refusal.why


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (Options(weight_cache=WeightCache.STEP), "moe.weight_cache keeps quantised weights"),
        (Options(ep_max_tokens=8), "moe.ep_max_tokens bounds expert-parallel workspaces"),
        (Options(ep_capacity=2.0), "moe.ep_capacity bounds expert-parallel workspaces"),
    ],
)
def test_options_without_a_kernel_are_refused(options, words):
    refusal = choose(spec(), CPU, options, where="m.py:7")
    assert isinstance(refusal, Reject)
    assert (refusal.where, refusal.code) == ("m.py:7", "option")
    assert words in refusal.why


def test_rules_decide_by_the_regions_names():
    options = Options(precision_rules=(("*.0.*", Precision.FP8),))
    assert choose(spec(), CPU, options, names=["layers.1.w1"]) == "cpu/bf16"
    assert isinstance(choose(spec(), CPU, options, names=["layers.0.w1"]), Reject)
    with pytest.raises(OptionError, match="several precisions"):
        choose(spec(), CPU, options, names=["layers.0.w1", "layers.1.w1"])


def test_facts_of_a_device_without_a_driver(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert Device.of("cpu") == CPU
    assert Device.of("cuda:0") == Device("cuda")
    assert Device.of(torch.device("meta")) == Device("meta")


def test_facts_of_a_cuda_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(policy, "_has_triton", lambda: False)
    assert Device.of("cuda") == H200
    monkeypatch.setattr(policy, "_has_triton", lambda: True)
    assert Device.of("cuda") == H200_TRITON
