"""Builds kernels/cuda/grouped.cu for the host, where every thread is a fiber, and runs its kernels."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

import torch

from moe_inductor.kernels.cuda.driver import RowsArgs, TensorMap, WgradArgs

HERE = Path(__file__).parent
SOURCE = HERE.parents[1] / "kernels" / "cuda" / "grouped.cu"
MAP_MAGIC = 0x6D61702D656D756C
PART, BOX, TALL = 96, 64, 128


class Lanes(IntEnum):
    """How the lanes of a warp run: together and lane 0 last, together in random order, or each on its own."""

    TOGETHER = 0
    SHUFFLED = 1
    DIVERGED = 2


class Map(ctypes.Structure):
    """What cuda.h beside this file makes of a CUtensorMap."""

    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("base", ctypes.c_uint64),
        ("columns", ctypes.c_int64),
        ("rows", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("box_columns", ctypes.c_int64),
        ("box_rows", ctypes.c_int64),
        ("unused", ctypes.c_uint64 * 9),
    ]


def tensor_map(t: torch.Tensor, rows: int, columns: int = BOX) -> TensorMap:
    """Stands for the function of that name in driver.py."""
    assert t.dim() == 2 and t.stride(1) == 1 and t.dtype == torch.bfloat16
    made = Map(MAP_MAGIC, t.data_ptr(), t.shape[1], t.shape[0], t.stride(0) * 2, columns, rows)
    return TensorMap.from_buffer_copy(made)


@dataclass
class Guarded:
    """A bf16 tensor of NaNs of one pattern, between more of them, to see what a kernel wrote."""

    shape: tuple[int, ...]
    flat: torch.Tensor = field(init=False)
    value: torch.Tensor = field(init=False)

    POISON = -0x5B  # 0xFFA5
    AROUND = 4096

    def __post_init__(self) -> None:
        size = torch.Size(self.shape).numel()
        self.flat = torch.full((size + 2 * self.AROUND,), self.POISON, dtype=torch.int16).view(torch.bfloat16)
        self.value = self.flat[self.AROUND : self.AROUND + size].view(self.shape)

    def untouched_beyond(self, rows: int) -> bool:
        """Whether nothing but the first ``rows`` of the first axis was written."""
        bits = self.flat.view(torch.int16)
        end = self.AROUND + self.value[:rows].numel()
        return bool((bits[: self.AROUND] == self.POISON).all() and (bits[end:] == self.POISON).all())


@dataclass(frozen=True)
class Machine:
    """The compiled kernels."""

    library: ctypes.CDLL

    def run(self, name: str, args: RowsArgs | WgradArgs, *, grid: int, seed: int, lanes: Lanes = Lanes.TOGETHER) -> str:
        """Runs the kernel ``name``; the first error of the protocol or of memory, or nothing."""
        launch = self.library.emulate_rows if isinstance(args, RowsArgs) else self.library.emulate_wgrad
        error = ctypes.create_string_buffer(1 << 16)
        launch(
            ctypes.cast(getattr(self.library, name), ctypes.c_void_p),
            ctypes.byref(args),
            ctypes.c_size_t(ctypes.sizeof(args)),
            grid,
            cluster_of(name),
            ctypes.c_uint64(seed),
            int(lanes),
            error,
            ctypes.c_size_t(len(error)),
        )
        return error.value.decode()


def cluster_of(name: str) -> int:
    """Programs of a cluster of the kernel ``name``."""
    return int(name.rsplit("_", 1)[1])


def kernel_names() -> list[str]:
    """The kernels that the source defines, without the size of the cluster."""
    return re.findall(r"^(?:ROWS|WGRAD)\((\w+),", SOURCE.read_text(), flags=re.MULTILINE)


def build(folder: Path, *changes: tuple[str, str]) -> Machine:
    """Compiles a copy of the kernels in ``folder``, with each text of ``changes`` replaced where it first stands."""
    compiler = shutil.which("g++")
    assert compiler is not None
    sources = [p for p in SOURCE.parent.iterdir() if p.suffix in (".cu", ".cuh") and p.name != "ptx.cuh"]
    texts = {source.name: source.read_text() for source in sources}
    for old, new in changes:
        name = next(name for name, text in texts.items() if old in text)
        texts[name] = texts[name].replace(old, new, 1)
    for name, text in texts.items():
        (folder / name).write_text(text)
    objects = []
    for name, level in (("machine", "-O2"), ("instructions", "-O3"), ("grouped", "-O1")):
        objects.append(str(folder / f"{name}.o"))
        flags = ["-std=c++17", level, "-fPIC", "-w", f"-I{folder}", f"-I{HERE}"]
        subprocess.run([compiler, *flags, "-c", str(HERE / f"{name}.cpp"), "-o", objects[-1]], check=True)
    target = folder / "grouped.so"
    subprocess.run([compiler, "-shared", "-Wl,-Bsymbolic", *objects, "-o", str(target)], check=True)
    return Machine(ctypes.CDLL(str(target)))
