"""The JSON of a run: ``schema``, ``kind``, ``provenance``, ``settings`` and ``cells``. Times in ms, sizes in bytes,
rates a second; samples are kept raw."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import BenchError

SCHEMA = 1
KINDS = ("layer", "decode", "model")
_PACKAGES = (
    "moe-inductor", "torch", "triton", "transformers", "quack-kernels", "nvidia-cutlass-dsl", "sonic-moe",
    "liger-kernel", "sgl-deep-gemm",
)  # fmt: skip


def start(kind: str, settings: Mapping[str, Any], argv: Iterable[str]) -> dict[str, Any]:
    """A record without cells."""
    return {
        "schema": SCHEMA,
        "kind": kind,
        "provenance": provenance(argv),
        "settings": dict(settings),
        "cells": [],
    }


def provenance(argv: Iterable[str]) -> dict[str, Any]:
    """Versions, device, date, commit and command."""
    versions = {}
    for package in _PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["torch"] = torch.__version__
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": "megamoe " + shlex.join(argv),
        "python": platform.python_version(),
        "versions": versions,
        "device": platform.machine(),
        "digest": _digest(),
    }
    commit = _output("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD")
    if commit:
        changed = _output("git", "-C", str(Path(__file__).parent), "status", "--porcelain", "--untracked-files=no")
        found |= {"commit": commit, "changed": bool(changed)}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "device_memory": properties.total_memory,
            "cuda": torch.version.cuda,
            "driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
            "clocks": _output("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv", "--id=0"),
        }
    return found


def _digest() -> str:
    """Of the code that the operators run: says which kernels were measured where there is no commit."""
    from ..digest import digest

    return digest()


def _output(*command: str) -> str:
    """What a program prints, empty where it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def write(record: Mapping[str, Any], path: Path | None) -> None:
    """Write the record to ``path``, or to stdout."""
    text = json.dumps(finite(record), indent=1, allow_nan=False) + "\n"
    if path is None:
        sys.stdout.write(text)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def finite(value: Any) -> Any:
    """``value`` with NaN and infinities as text, which JSON has no numbers for."""
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def read(path: Path) -> dict[str, Any]:
    """A record from a file. Raises BenchError where it is none, or of another schema."""
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BenchError(f"cannot read {path}: {error}") from error
    if not isinstance(record, dict) or record.get("kind") not in KINDS or not isinstance(record.get("cells"), list):
        raise BenchError(f"{path} is no record of megamoe bench")
    if record.get("schema") != SCHEMA:
        raise BenchError(f"{path} has schema {record.get('schema')}, this version reads {SCHEMA}")
    return record
