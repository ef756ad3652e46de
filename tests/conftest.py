"""What every test needs: quiet libraries, a fresh compiler, and a backend that skips Inductor."""

from __future__ import annotations

import os

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch

AOT_BACKEND = "megamoe_aot"


@pytest.fixture(scope="session")
def aot_backend() -> str:
    """Name of a registered backend: our pass, then AOTAutograd with eager kernels.

    Inductor's C++ code for a tiny two-layer model takes about 40 s to build from cold, AOTAutograd 5 s.
    """
    from torch._dynamo.backends.debugging import aot_eager
    from torch._dynamo.backends.registry import register_backend

    from moe_inductor.backend import with_inner

    if AOT_BACKEND not in torch._dynamo.list_backends():
        register_backend(with_inner(aot_eager), name=AOT_BACKEND)
    return AOT_BACKEND


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    count = sum(len(terminalreporter.stats.get(kind, ())) for kind in ("passed", "failed", "xfailed", "xpassed"))
    terminalreporter.write_line(f"tests run: {count}")
