"""The CUDA C++ kernels as ptxas sees them: registers, spills, matmuls that it would serialise."""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from moe_inductor.kernels.cuda import driver

SOURCE = driver.CUBIN.with_name("grouped.cu")
#: Bytes of spills of a kernel: what an epilogue puts aside, and what the loading warps know of a tile.
SPILLS = 64


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What ptxas says about the kernels."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("needs nvcc")
    out = tmp_path_factory.mktemp("cubin") / "grouped.cubin"
    command = [nvcc, "-std=c++17", "-O3", "-cubin", "-gencode=arch=compute_90a,code=sm_90a", "-Xptxas", "-v"]
    done = subprocess.run([*command, "-o", str(out), str(SOURCE)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def kernels(log: str) -> dict[str, str]:
    """Each kernel's part of the log."""
    parts = re.split(r"Compiling entry function '(\w+)' for 'sm_90a'", log)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_nothing_spills_and_nothing_is_serialised(log: str) -> None:
    found = kernels(log)
    declared = re.findall(r"^(ROWS|WGRAD)\((\w+),", SOURCE.read_text(), re.M)
    assert set(found) == {f"{name}_{cluster}" for _, name in declared for cluster in (1, 2)}
    for name, text in found.items():
        spilled = [int(n) for n in re.findall(r"(\d+) bytes spill", text)]
        assert len(spilled) == 2 and max(spilled) <= SPILLS, f"{name}: {spilled}"
        assert "Used 168 registers" in text, f"{name}: {text}"
    # C7510 and the codes after it: setmaxnreg ignored, wgmma serialised; not C7519, an arrival that ptxas adds
    assert not re.search(r"C75(?!19)\d\d|serialized|setmaxnreg ignored", log), log


def test_the_compiled_kernels_are_those_of_the_sources() -> None:
    """``make cubin`` writes the digest of what it compiled beside the result."""
    digest = hashlib.sha256()
    for part in sorted([SOURCE, *SOURCE.parent.glob("*.cuh")]):
        digest.update(part.read_bytes())
    digest.update(driver.CUBIN.read_bytes())
    assert driver.CUBIN.with_name("grouped.sha256").read_text().strip() == digest.hexdigest(), "run make cubin"


def test_the_makefile_compiles_with_the_same_options() -> None:
    makefile = Path(__file__).parents[1] / "Makefile"
    if not makefile.exists():
        pytest.skip("the tests run away from the checkout, without its Makefile")
    assert "-std=c++17 -O3 -cubin -gencode=arch=compute_90a,code=sm_90a" in makefile.read_text()


def test_a_damaged_file_is_no_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damaged = tmp_path / driver.CUBIN.name
    damaged.write_bytes(driver.CUBIN.read_bytes()[:1000])
    monkeypatch.setattr(driver, "CUBIN", damaged)
    with pytest.raises(RuntimeError, match="grouped.cubin.xz: "):
        driver._library.__wrapped__()
