"""Which kernel family and precision run a proved region: a pure function of the spec, the device and the options."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .options import Kernel, Options, Precision, WeightCache
from .report import Reject
from .spec import DTYPES, MoESpec

#: bf16 tensor cores and asynchronous copies, which the grouped matmuls of CUDA libraries need.
MIN_CAPABILITY = (8, 0)
#: wgmma, which later devices do not have.
HOPPER = (9, 0)

_QUANTISED = {
    Precision.FP8: "e4m3 matmuls",
    Precision.MXFP8: "e4m3 matmuls with 1x32 scales",
    Precision.FP8_BWD: "an e4m3 backward",
}


@dataclass(frozen=True, slots=True)
class Device:
    """The facts of a device that a choice may depend on.

    ``type`` is torch.device.type, ``capability`` (major, minor) for CUDA and None elsewhere.
    """

    type: str
    capability: tuple[int, int] | None = None
    name: str = ""
    is_rocm: bool = False
    triton: bool = False  #: Triton 3.6 or newer is installed

    @classmethod
    def of(cls, device: torch.device | str) -> Device:
        """Read the facts of ``device``. Touches the driver for CUDA devices only."""
        device = torch.device(device)
        if device.type != "cuda" or not torch.cuda.is_available():
            return cls(device.type)
        return cls(
            type="cuda",
            capability=torch.cuda.get_device_capability(device),
            name=torch.cuda.get_device_name(device),
            is_rocm=torch.version.hip is not None,
            triton=_has_triton(),
        )


def choose(
    spec: MoESpec, device: Device, options: Options, *, names: Sequence[str] = (), where: str = ""
) -> str | Reject:
    """The plan ``"<family>/<dtype>"`` for a region on ``device``, for example ``"cpu/bf16"``, or why there is none.

    ``names`` are the region's parameters as seen from the compiled root, for ``moe.precision_rules``; ``where`` is
    copied into a refusal. Refusal codes: ``device``, ``dtype``, ``precision``, ``option``, ``kernel``. Raises
    OptionError where rules would give the region two precisions.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        return Reject(where, "dtype", f"experts compute in {spec.dtype}; this version has {', '.join(DTYPES.values())}")
    refusal = (
        _refuse_precision(options.precision_for(names), dtype) or _refuse_option(options) or _refuse_device(device)
    )
    if refusal is not None:
        return Reject(where, *refusal)
    family = options.kernel if options.kernel is not Kernel.AUTO else _best(spec, device)
    why = refuse_family(family, device)
    if why is not None:
        return Reject(where, "device" if options.kernel is Kernel.AUTO else "kernel", why)
    return f"{family.value}/{dtype}"


_NATIVE = {"cpu": Kernel.CPU, "cuda": Kernel.LIBRARY}


def _best(spec: MoESpec, device: Device) -> Kernel:
    """The fastest family measured on such a device (``kernels/NOTES.md``)."""
    if spec.dtype in (torch.bfloat16, torch.float16) and refuse_family(Kernel.HOPPER, device) is None:
        return Kernel.HOPPER
    if spec.dtype is not torch.float64 and refuse_family(Kernel.TRITON, device) is None:
        return Kernel.TRITON
    return _NATIVE[device.type]


@functools.cache
def _has_triton() -> bool:
    """Whether the installed Triton is 3.6 or newer: the oldest that a supported torch brings, and the first whose Gluon
    has what the kernels use."""
    try:
        import triton
    except ImportError:
        return False
    major, minor = triton.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (3, 6)


def _refuse_precision(wanted: Precision, dtype: str) -> tuple[str, str] | None:
    if wanted in _QUANTISED:
        return "precision", f"precision {wanted.value} needs {_QUANTISED[wanted]}, and this version has no such kernel"
    if wanted is Precision.BF16 and dtype != "bf16":
        return "precision", f"bf16 is not the model's dtype ({dtype}), and weights are not cast in this version"
    return None


def _refuse_option(options: Options) -> tuple[str, str] | None:
    if options.weight_cache is not WeightCache.OFF:
        return "option", "moe.weight_cache keeps quantised weights, and this version has no kernel that quantises"
    for name in ("ep_max_tokens", "ep_capacity"):
        if getattr(options, name) is not None:
            return "option", f"moe.{name} bounds expert-parallel workspaces, and no kernel of this version has one"
    return None


def _refuse_device(device: Device) -> tuple[str, str] | None:
    if device.type not in _NATIVE:
        return "device", f"no kernel family runs on {device.type} devices; there are families for cpu and cuda"
    if device.is_rocm:
        return "device", f"{device.name or 'the device'} runs under ROCm; the kernel families for cuda need NVIDIA's"
    return None


def refuse_family(family: Kernel, device: Device) -> str | None:
    """Why ``family`` cannot run on a cpu or NVIDIA ``device``."""
    if family is Kernel.REFERENCE:
        return None
    runs_on = "cpu" if family is Kernel.CPU else "cuda"
    if device.type != runs_on:
        return f"kernel family {family.value} runs on {runs_on} devices, and the experts are on {device.type}"
    if family is Kernel.CPU:
        return None
    if device.capability is None:
        return "no NVIDIA driver answers, so the compute capability is unknown"
    name, have = device.name or "the device", _dotted(device.capability)
    if family is Kernel.HOPPER and device.capability != HOPPER:
        return f"kernel family hopper needs compute capability {_dotted(HOPPER)}, {name} has {have}"
    if family in (Kernel.HOPPER, Kernel.TRITON) and not device.triton:
        return f"kernel family {family.value} needs Triton 3.6 or newer"
    if device.capability < MIN_CAPABILITY:
        return f"{name} has compute capability {have}, the grouped matmuls need {_dotted(MIN_CAPABILITY)}"
    return None


def _dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
