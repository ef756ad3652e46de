"""A digest of the code that the operators run. It is an argument of every operator, because PyTorch's compile caches
know an operator by its name only: without it a changed backward would be served from a warm cache."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parent


@functools.lru_cache(maxsize=1)
def digest() -> str:
    """12 hexadecimal digits of a SHA-256 over the kernels, the operators, their vocabulary and the package version."""
    try:
        version = metadata.version("moe-inductor")
    except metadata.PackageNotFoundError:  # run from a checkout
        version = ""
    sha = hashlib.sha256(version.encode())
    files = [_PACKAGE / name for name in ("ops.py", "activation.py", "spec.py")]
    for file in files + sorted((_PACKAGE / "kernels").glob("*.py")):
        sha.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:12]
