"""The router's Triton kernels: on the GPU where there is one, in Triton's interpreter elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
    from tests.router_cases import *  # noqa: F403
else:

    def test_in_the_interpreter() -> None:
        """Triton decides when it is imported whether kernels are interpreted: a process of its own."""
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", __file__],
            env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
        assert " passed" in done.stdout
