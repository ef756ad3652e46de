"""Which kernel family and precision run a proved region: a pure function of the spec, the device and the options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .options import Kernel, Options, Precision
from .report import Reject
from .spec import DTYPES, MoESpec

#: bf16 tensor cores and asynchronous copies, which the grouped matmuls of CUDA libraries need.
MIN_CAPABILITY = (8, 0)

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
        )


def choose(
    spec: MoESpec, device: Device, options: Options, *, names: Sequence[str] = (), where: str = ""
) -> str | Reject:
    """The plan ``"<family>/<dtype>"`` for a region on ``device``, for example ``"cpu/bf16"``, or why there is none.

    ``names`` are the region's parameters as seen from the compiled root, for ``moe.precision_rules``; ``where`` is
    copied into a refusal. Refusal codes: ``device``, ``dtype``, ``precision``, ``kernel``. Raises OptionError where
    rules would give the region two precisions.
    """
    dtype = DTYPES.get(spec.dtype)
    if dtype is None:
        return Reject(where, "dtype", f"experts compute in {spec.dtype}; this version has {', '.join(DTYPES.values())}")
    refusal = _refuse_precision(options.precision_for(names), dtype) or _refuse_device(device)
    if refusal is not None:
        return Reject(where, *refusal)
    family = options.kernel if options.kernel is not Kernel.AUTO else _NATIVE[device.type]
    why = refuse_family(family, device)
    if why is not None:
        return Reject(where, "device" if options.kernel is Kernel.AUTO else "kernel", why)
    return f"{family.value}/{dtype}"


_NATIVE = {"cpu": Kernel.CPU, "cuda": Kernel.LIBRARY}


def _refuse_precision(wanted: Precision, dtype: str) -> tuple[str, str] | None:
    if wanted in _QUANTISED:
        return "precision", f"precision {wanted.value} needs {_QUANTISED[wanted]}, and this version has no such kernel"
    if wanted is Precision.BF16 and dtype != "bf16":
        return "precision", f"bf16 is not the model's dtype ({dtype}), and weights are not cast in this version"
    return None


def _refuse_device(device: Device) -> tuple[str, str] | None:
    if device.type not in _NATIVE:
        return "device", f"no kernel family runs on {device.type} devices; there are families for cpu and cuda"
    if device.is_rocm:
        return "device", f"{device.name or 'the device'} runs under ROCm; the kernel families for cuda need NVIDIA's"
    return None


def refuse_family(family: Kernel, device: Device) -> str | None:
    """Why ``family`` cannot run on a cpu or NVIDIA ``device``."""
    if family is Kernel.CPU and device.type != "cpu":
        return f"kernel family cpu runs on cpu devices, and the experts are on {device.type}"
    if family is Kernel.LIBRARY:
        if device.type != "cuda":
            return f"kernel family library runs on cuda devices, and the experts are on {device.type}"
        if device.capability is None:
            return "no NVIDIA driver answers, so the compute capability is unknown"
        if device.capability < MIN_CAPABILITY:
            have, need = (".".join(map(str, c)) for c in (device.capability, MIN_CAPABILITY))
            return f"{device.name or 'the device'} has compute capability {have}, the grouped matmuls need {need}"
    return None
