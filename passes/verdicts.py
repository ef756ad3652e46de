"""What earlier checks found, in Inductor's cache folder: one small file for each proof, plan and code."""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import torch

from .. import _torch
from ..digest import package_digest
from .fuse import Proposal
from .window import example


def key_of(proposal: Proposal) -> str:
    """What a verdict depends on: the window, what it was proved to be, what runs instead, and where."""
    held = example(proposal.match.x.node)
    device = _torch.device_name(held.device) if held is not None else ""
    facts = (str(proposal.match.spec), proposal.plan, str(proposal.recompute_all), proposal.fingerprint)
    text = "\0".join((*facts, package_digest(), device, torch.__version__))
    return hashlib.sha256(text.encode()).hexdigest()[:24]


def _path(key: str) -> Path:
    return Path(_torch.cache_dir()) / "megamoe" / "verified" / key


def read(key: str) -> str | None:
    """The verdict kept under ``key``, None where there is none."""
    with contextlib.suppress(OSError):
        return _path(key).read_text()
    return None


def write(key: str, text: str) -> None:
    """Best effort: a cache that cannot be written is a check made again. The file appears whole or not at all."""
    path = _path(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{time.monotonic_ns()}")
        part.write_text(text)
        part.replace(path)
