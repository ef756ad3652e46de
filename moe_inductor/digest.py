"""A digest of the code that the operators run. It is an argument of every operator, because PyTorch's compile caches
know an operator by its name only: without it a changed backward would be served from a warm cache."""

from __future__ import annotations

import functools
import hashlib
from importlib import metadata
from pathlib import Path

_PACKAGE = Path(__file__).parent
_FILES = ("ops.py", "opdef.py", "whole.py", "activation.py", "spec.py")


@functools.lru_cache(maxsize=1)
def digest() -> str:
    """12 hexadecimal digits for the code that the operators run: the kernels, the operators and their vocabulary."""
    files = [_PACKAGE / name for name in _FILES]
    return _digest(files + sorted((_PACKAGE / "kernels").glob("*.py")))


@functools.lru_cache(maxsize=1)
def package_digest() -> str:
    """12 hexadecimal digits for the whole package: what the pass may decide as well as what the operators run."""
    folders = (_PACKAGE, _PACKAGE / "kernels", _PACKAGE / "passes")
    return _digest([file for folder in folders for file in sorted(folder.glob("*.py"))])


def _digest(files: list[Path]) -> str:
    try:
        version = metadata.version("moe-inductor")
    except metadata.PackageNotFoundError:  # run from a checkout
        version = ""
    sha = hashlib.sha256(version.encode())
    for file in files:
        sha.update(b"\0" + file.name.encode() + b"\0" + file.read_bytes())
    return sha.hexdigest()[:12]
