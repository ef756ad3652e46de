"""What an installation promises: the backend by name, the console script, and no other package hidden."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import moe_inductor

pytestmark = pytest.mark.sample

#: Set by the wheel check: the package must come from the wheel and Hugging Face's `kernels` is installed beside it.
INSTALLED = os.environ.get("MEGAMOE_TEST_INSTALLED") == "1"


def test_backend_is_known_to_torch_by_name_without_an_import() -> None:
    code = (
        "import sys, torch; assert 'megamoe' in torch._dynamo.list_backends(); "
        "assert 'moe_inductor' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")


def test_entry_points_load() -> None:
    (backend,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="megamoe")
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="megamoe")
    assert callable(backend.load())
    assert callable(script.load())


def test_version_is_that_of_the_distribution() -> None:
    assert importlib.metadata.version("moe-inductor") == moe_inductor.__version__


def test_top_level_folders_are_no_modules_of_ours() -> None:
    """An installed package called kernels must win over the folder, and without one there is nothing to import."""
    code = (
        "import importlib.util as u; s = u.find_spec('kernels'); "
        "print(s.origin if s else None, u.find_spec('passes') is None)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, cwd="/", capture_output=True, text=True)
    origin, passes_is_absent = done.stdout.split()
    assert passes_is_absent == "True"
    if INSTALLED:
        assert origin.endswith("site-packages/kernels/__init__.py")
        assert importlib.metadata.version("kernels")
    assert importlib.util.find_spec("moe_inductor.kernels.reference") is not None
    assert importlib.util.find_spec("moe_inductor.passes.shadow") is not None


def test_no_file_is_loaded_under_two_names() -> None:
    import moe_inductor.backend  # noqa: F401

    strays = [name for name in sys.modules if name.split(".")[0] == "passes" or name.startswith("kernels.reference")]
    assert strays == []


@pytest.mark.skipif(not INSTALLED, reason="only the wheel check installs the wheel")
def test_package_is_the_installed_one() -> None:
    assert "site-packages" in Path(moe_inductor.__file__).parts
    assert (Path(moe_inductor.__file__).parent / "py.typed").exists()


def test_backend_compiles_a_model_without_experts() -> None:
    compiled = torch.compile(torch.nn.Linear(3, 2), backend="megamoe", options={"moe.require": "all"})
    assert compiled(torch.ones(1, 3)).shape == (1, 2)
