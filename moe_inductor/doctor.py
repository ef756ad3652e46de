"""What can run here and, for everything that cannot, the reason in words."""

from __future__ import annotations

import importlib
import importlib.metadata
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from . import _torch

#: Lowest supported major.minor of transformers, and the first above the range.
TRANSFORMERS: tuple[tuple[int, int], tuple[int, int]] = ((5, 0), (6, 0))


@dataclass(frozen=True, slots=True)
class Check:
    """One fact: ``ok`` with its ``detail``, or not ok with the reason in ``detail``."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer of :func:`doctor`. ``problems`` are the checks that keep the backend from fusing on any device."""

    required: tuple[Check, ...]
    devices: tuple[Check, ...]
    packages: tuple[Check, ...]
    kernels: tuple[Check, ...]
    options: tuple[Check, ...] = field(default=())

    @property
    def problems(self) -> tuple[Check, ...]:
        """Required checks that failed."""
        return tuple(c for c in self.required + self.options if not c.ok)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return {"ok": not self.problems, **asdict(self)}

    def to_json(self) -> str:
        """:meth:`as_dict` as JSON text."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = []
        for group in fields(self):
            lines.append(group.name)
            for check in getattr(self, group.name):
                lines.append(f"  {'ok' if check.ok else '--'}  {check.name:<18} {check.detail}")
        lines.append("all required checks passed" if not self.problems else f"{len(self.problems)} problem(s)")
        return "\n".join(lines)


def doctor(environ: Mapping[str, str] | None = None) -> Diagnosis:
    """Look at versions, devices, optional packages, kernel families and the environment. Never raises.

    ``environ`` is ``os.environ`` unless given.
    """
    environ = os.environ if environ is None else environ
    return Diagnosis(
        required=(
            Check("python", True, platform.python_version()),
            _guarded("torch", _torch_version),
            _guarded("backend", _backend),
        ),
        devices=_devices(),
        packages=(
            _guarded("transformers", _transformers),
            _guarded("accelerate", lambda: _imported("accelerate", "accelerate")),
            _guarded("triton", lambda: _imported("triton", "triton", "pytorch-triton")),
            _guarded("deep_gemm", _deep_gemm),
            _guarded("quack", lambda: _imported("quack", "quack-kernels")),
        ),
        kernels=_kernels(),
        options=_options(environ),
    )


class Unavailable(Exception):
    """A reason why something is not there."""


def reason(error: BaseException) -> str:
    """``error`` on one line."""
    text = " ".join(str(error).split())
    if isinstance(error, Unavailable):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _guarded(name: str, look: Callable[[], str]) -> Check:
    """Any failure becomes a reason: a package may assert CUDA_HOME, miss a symbol, or exit, while it is imported."""
    try:
        return Check(name, True, look())
    except (Exception, SystemExit) as error:
        return Check(name, False, reason(error))


def _torch_version() -> str:
    import torch

    why = _torch.unsupported()
    if why is not None:
        raise Unavailable(why)
    return torch.__version__


def _backend() -> str:
    if "megamoe" not in _torch.list_backends():
        raise Unavailable("torch does not list it: install the package, its entry point is read from the metadata")
    return 'torch.compile(model, backend="megamoe") works by name'


def _imported(module: str, *distributions: str) -> str:
    """Version of an installed package that can also be imported."""
    found = [d for d in distributions if _version(d) is not None]
    if not found:
        raise Unavailable("not installed")
    importlib.import_module(module)
    return str(_version(found[0]))


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _transformers() -> str:
    version = _imported("transformers", "transformers")
    low, high = TRANSFORMERS
    major, minor = (int(part) for part in version.split(".")[:2])
    if not low <= (major, minor) < high:
        raise Unavailable(f"{version} is outside the supported range {low[0]}.{low[1]} to {high[0] - 1}.x")
    return version


def _deep_gemm() -> str:
    maintained, old = _version("sgl-deep-gemm"), _version("deep-gemm")
    if maintained is None and old is not None and old.split(".")[:2] == ["1", "0"]:
        raise Unavailable(f"deep-gemm {old} is an old stub of the name; the maintained wheels are sgl-deep-gemm")
    return _imported("deep_gemm", "sgl-deep-gemm", "deep-gemm")


def _devices() -> tuple[Check, ...]:
    checks = [Check("cpu", True, f"{os.cpu_count()} cores, {platform.machine()}")]
    try:
        import torch

        if not torch.cuda.is_available():
            built = torch.version.cuda or torch.version.hip
            return (*checks, Check("cuda", False, "no device answers" if built else "torch was built without CUDA"))
        from .policy import Device

        for i in range(torch.cuda.device_count()):
            device = Device.of(torch.device("cuda", i))
            capability = ".".join(map(str, device.capability or ()))
            memory = torch.cuda.get_device_properties(i).total_memory / 2**30
            rocm = ", ROCm: no kernel family runs on it" if device.is_rocm else ""
            detail = f"{device.name}, capability {capability}, {memory:.0f} GiB{rocm}"
            checks.append(Check(f"cuda:{i}", not device.is_rocm, detail))
    except Exception as error:
        checks.append(Check("cuda", False, reason(error)))
    return tuple(checks)


def _kernels() -> tuple[Check, ...]:
    from .opdef import FAMILIES
    from .options import Kernel
    from .policy import Device, refuse_family

    checks = []
    for family in Kernel:
        if family is Kernel.AUTO:
            continue

        def look(family: Kernel = family) -> str:
            device = Device.of("cpu" if family in (Kernel.REFERENCE, Kernel.CPU) else "cuda")
            why = refuse_family(family, device)
            if why is not None:
                raise Unavailable(why)
            for core in getattr(FAMILIES[family.value], "cores", ()):
                importlib.import_module(f"moe_inductor.kernels.{core}")
            return f"on {device.name or device.type}"

        checks.append(_guarded(family.value, look))
    return tuple(checks)


def _options(environ: Mapping[str, str]) -> tuple[Check, ...]:
    from .options import ENVIRONMENT, OptionError, Options, from_environment

    checks = []
    for variable, (name, _) in ENVIRONMENT.items():
        try:
            values = from_environment({variable: environ.get(variable, "")})
        except OptionError as error:
            checks.append(Check(name, False, reason(error)))
            continue
        if values.get("disabled"):
            checks.append(Check(name, False, f"{variable} is set: every graph goes to Inductor unchanged, unset it"))
            continue
        value = values.get(name, getattr(Options(), name))
        wins = "" if name == "disabled" else "; options of torch.compile win"
        source = f"from {variable}{wins}" if values else "default"
        checks.append(Check(name, True, f"{getattr(value, 'value', value)} ({source})"))
    return tuple(checks)
