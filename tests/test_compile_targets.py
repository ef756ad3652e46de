"""The kernels in every configuration of the table, compiled for GPUs that are not there: none may spill beyond a bound,
exceed the device's shared memory, or have its Hopper matmuls serialised. The launches are the product's own, on tensors
without memory, so signatures and specialisations are those that a user gets. The whole matrix is marked ``slow``."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is not installed")

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from moe_inductor.kernels import rowwise, tiled, tuning
from moe_inductor.kernels.family import Gather, Rows
from moe_inductor.spec import Combine, ExpertsSpec, Halves, Layout

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
#: Bytes a thread may spill: two address registers kept over a loop. Accumulators that spill take hundreds.
SPILLS = 64
#: The same in the Gluon kernels, whose three parts add up: what lives across a tile, none of it read in a loop over the
#: depth (checked in the disassembly of the worst one, interleaved with weights [E, in, out], Triton 3.9).
HOPPER_SPILLS = 128
#: Device class -> compute capability that stands for it, and shared memory of a program in KiB.
TARGETS = {"sm_80": ((8, 0), 163), "small": ((8, 9), 99), "sm_90": ((9, 0), 227), "sm_100": ((10, 0), 227)}
#: Rows per expert in the middle of each bucket.
MEANS = (0.125, 4, 12, 24, 1024)
EXPERTS = 128


@dataclass
class Compiled:
    """One compilation: the kernel and what ptxas said."""

    name: str
    kernel: Any
    log: str

    @property
    def spills(self) -> int:
        return sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", self.log)))


class NoDevice:
    """A driver without a device: compiles for ``capability``, launches nothing."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.arch = capability[0] * 10 + capability[1]

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.arch, 32)

    def get_current_device(self) -> int:
        return self.arch  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture
def compile_for(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable]:
    """``compile_for(device, launch)``: what ``launch()`` compiles for that device class, past all caches."""
    launched = JITFunction.run
    found: list[Compiled] = []

    def run(self: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kept = self.device_caches.pop(driver.active.get_current_device(), None)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            kernel = launched(self, *args, grid=grid, warmup=True, **kwargs)
        self.device_caches.pop(driver.active.get_current_device())
        assert kept is None and "Used" in out.getvalue(), "ptxas was not asked"
        found.append(Compiled(self.__name__, kernel, out.getvalue()))
        return kernel

    def compiled(device: str, launch: Callable[[], object]) -> list[Compiled]:
        capability, _ = TARGETS[device]
        monkeypatch.setattr(driver, "_active", NoDevice(capability))
        monkeypatch.setattr(tiled, "_capability", lambda device: capability)
        found.clear()
        launch()
        return list(found)

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(tiled, "_multiprocessors", lambda device: 132)
    before = torch.backends.cuda.matmul.allow_tf32
    with knobs.cache.scope(), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.cache.dir = str(tmp_path_factory.getbasetemp() / "kernels")
        knobs.nvidia.dump_ptxas_log = True
        knobs.compilation.always_compile = True
        yield compiled
    torch.backends.cuda.matmul.allow_tf32 = before


def sound(device: str, compiled: list[Compiled], spills: int = SPILLS) -> None:
    """No spills to speak of, shared memory that the device has, no serialised matmuls."""
    assert compiled
    for c in compiled:
        assert c.spills <= spills, f"{c.name}: {c.spills} bytes of spills"
        assert c.kernel.metadata.shared <= TARGETS[device][1] << 10, (
            f"{c.name}: {c.kernel.metadata.shared} bytes shared"
        )
        assert "serialized" not in c.log, c.log


def meta(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(layout: Layout, depth: int, columns: int, dtype: torch.dtype) -> Tensor:
    """[E, in, out] as a view of the parameter."""
    if layout is Layout.IN_OUT:
        return meta(EXPERTS, depth, columns, dtype=dtype)
    return meta(EXPERTS, columns, depth, dtype=dtype).transpose(1, 2)


def tiles(n: int, height: int) -> tuple[Tensor, Tensor]:
    return meta(n // height + min(n, EXPERTS), 3, dtype=torch.int32), meta(1, dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    """One launch of a core's function. ``tf32`` says what torch allows, ``even`` whether the widths fill the tiles."""

    kind: Literal["rows", "up", "wgrad"]
    bucket: int
    dtype: torch.dtype = BF16
    layout: Layout = Layout.OUT_IN
    halves: Halves = Halves.GATE_UP
    gathered: bool = True
    biased: bool = False
    save: bool = True
    transposed: bool = False
    tf32: bool = False
    even: bool = True

    def __str__(self) -> str:
        words = [self.kind, f"b{self.bucket}", "tf32" if self.tf32 else str(self.dtype).split(".")[1]]
        words += ["dense"] * (not self.gathered)
        if self.kind == "wgrad":
            words += ["transposed"] * self.transposed
        else:
            words += [self.layout.value, *["bias"] * self.biased]
        if self.kind == "up":
            words += [self.halves.value, *["unsaved"] * (not self.save)]
        return "-".join([*words, *["odd"] * (not self.even)])

    def launch(self, core: Any) -> None:
        """On ``core``, a module with the functions of :mod:`tiled`."""
        torch.backends.cuda.matmul.allow_tf32 = self.tf32
        n, depth, columns = int(MEANS[self.bucket] * EXPERTS), *((2048, 1536) if self.even else (2056, 1100))
        gather = Gather(meta(n, dtype=torch.int64), 8) if self.gathered else None
        a = meta(n // 8 if gather else n, depth, dtype=self.dtype)
        if self.kind == "wgrad":
            offsets = meta(EXPERTS, dtype=torch.int32)
            core.wgrad(a, gather, meta(n, columns, dtype=self.dtype), offsets, transposed=self.transposed)
            return
        w = weight(self.layout, depth, columns, self.dtype)
        bias = meta(EXPERTS, columns, dtype=self.dtype) if self.biased else None
        cut = tiles(n, core.tile_rows(n, EXPERTS, self.dtype))
        if self.kind == "rows":
            core.rows_mm(a, gather, w, bias, cut)
        else:
            activation = "relu2" if self.halves is Halves.SINGLE else "swiglu"
            core.up(a, gather, w, bias, activation, self.halves, cut, save=self.save)


def matrix() -> Iterator[Case]:
    """Every bucket of the table with everything that makes another kernel of it. float16 only replaces a type."""
    for bucket, (dtype, tf32) in itertools.product(
        range(len(tuning.BUCKETS)), ((BF16, False), (F16, False), (F32, False), (F32, True))
    ):
        same: dict[str, Any] = {"bucket": bucket, "dtype": dtype, "tf32": tf32}
        if dtype is F16:
            yield Case("up", **same)
            continue
        for layout in Layout:
            yield Case("rows", layout=layout, **same)
            yield Case("rows", layout=layout, gathered=False, biased=True, **same)
            for halves in Halves:
                yield Case("up", layout=layout, halves=halves, **same)
            yield Case("up", layout=layout, biased=True, save=False, **same)
            yield Case("wgrad", transposed=layout is Layout.OUT_IN, **same)
            yield Case("wgrad", transposed=layout is Layout.OUT_IN, even=False, **same)
            yield Case("wgrad", transposed=layout is Layout.OUT_IN, gathered=False, **same)
            yield Case("rows", layout=layout, even=False, **same)
        for halves in (Halves.GATE_UP, Halves.INTERLEAVED):
            yield Case("up", halves=halves, even=False, biased=True, **same)


LAST = len(tuning.BUCKETS) - 1
SAMPLE = [
    Case("rows", 0),
    Case("rows", LAST, layout=Layout.IN_OUT, gathered=False),
    Case("up", 1, biased=True, save=False),
    Case("up", LAST),
    Case("up", LAST, halves=Halves.INTERLEAVED, even=False),
    Case("wgrad", LAST, transposed=True),
    Case("rows", LAST, F32),
]


@pytest.mark.parametrize("case", SAMPLE, ids=str)
@pytest.mark.parametrize("device", ["sm_80", "sm_90", "sm_100"])
def test_sample(device: str, case: Case, compile_for: Callable) -> None:
    sound(device, compile_for(device, lambda: case.launch(tiled)))


@pytest.mark.slow
@pytest.mark.parametrize("case", list(matrix()), ids=str)
@pytest.mark.parametrize("device", TARGETS)
def test_every_configuration(device: str, case: Case, compile_for: Callable) -> None:
    sound(device, compile_for(device, lambda: case.launch(tiled)))


@pytest.mark.parametrize(
    ("device", "instruction"),
    [("sm_80", "mma.sync"), ("small", "mma.sync"), ("sm_90", "wgmma.mma_async"), ("sm_100", "tcgen05.mma")],
)
def test_big_tiles_use_the_tensor_cores_and_copy_sixteen_bytes(
    device: str, instruction: str, compile_for: Callable
) -> None:
    (only,) = compile_for(device, lambda: Case("rows", LAST).launch(tiled))
    ptx = only.kernel.asm["ptx"]
    assert instruction in ptx and "cp.async.cg.shared.global" in ptx
    assert not re.search(r"ld\.global\.b16|cp\.async\.ca\.shared\.global .*, 0x[48],", ptx)


def test_float32_products_are_tf32_only_where_torch_allows_it(compile_for: Callable) -> None:
    for tf32 in (False, True):
        (only,) = compile_for("sm_80", lambda tf32=tf32: Case("rows", LAST, F32, tf32=tf32).launch(tiled))
        assert (".tf32" in only.kernel.asm["ptx"]) == tf32


def test_spills_are_seen(compile_for: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles too large for the registers of four warps."""
    wide = tuning.Config(128, 256, 32, 4, 3)
    monkeypatch.setattr(tuning, "config", lambda *args: wide)
    (only,) = compile_for("sm_80", lambda: Case("rows", LAST).launch(tiled))
    assert only.spills > SPILLS
    with pytest.raises(AssertionError, match="spills"):
        sound("sm_80", [only])


@pytest.mark.parametrize(
    ("device", "experts"), [("sm_80", 128), ("sm_90", 512), ("sm_100", 8)], ids=lambda value: str(value)
)
def test_row_wise_kernels(device: str, experts: int, compile_for: Callable) -> None:
    spec = ExpertsSpec(
        experts, 8, "swiglu", Halves.GATE_UP, Layout.OUT_IN, Layout.OUT_IN, Combine.WEIGHTED_SUM, F32, BF16, BF16
    )

    def launch() -> None:
        order, inverse, offsets, _ = rowwise.sort_by_expert(meta(1024, 8, dtype=torch.int64), experts)
        rows = Rows(order, inverse, offsets, 8)
        rowwise.row_tiles(rows, 16)
        rowwise.largest_first(offsets)
        weights, h, da = meta(1024, 8, dtype=F32), meta(8192, 1536, dtype=BF16), meta(8192, 768, dtype=BF16)
        rowwise.combine(meta(8192, 2048, dtype=BF16), rows, weights, F32, BF16)
        rowwise.pull(h, da, rows, weights, None, spec, need_a=True, need_h=True, need_w=True)
        rowwise.sum_rows(da, Gather(order, 8), offsets, weights, F32)
        rowwise.slot_sums(meta(8192, 4, dtype=F32), rows, weights)

    sound(device, compile_for(device, launch))


GLUON = [
    Case("rows", LAST, layout=Layout.IN_OUT, gathered=False, biased=True),
    Case("up", LAST),
    Case("up", LAST, F16, Layout.IN_OUT, Halves.INTERLEAVED, biased=True),
    Case("wgrad", LAST, transposed=True),
]


def gluon_matrix() -> Iterator[Case]:
    for dtype, layout in itertools.product((BF16, F16), Layout):
        for gathered, biased in itertools.product((True, False), repeat=2):
            yield Case("rows", LAST, dtype, layout, gathered=gathered, biased=biased)
        for halves, save in itertools.product(Halves, (True, False)):
            yield Case("up", LAST, dtype, layout, halves, biased=not save, save=save)
        for gathered in (True, False):
            yield Case("wgrad", LAST, dtype, gathered=gathered, transposed=layout is Layout.OUT_IN)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Any:
    from moe_inductor.kernels import wgmma

    monkeypatch.setattr(wgmma, "_programs", lambda device: 132)
    return wgmma


@pytest.mark.parametrize("case", GLUON, ids=str)
def test_hopper_sample(case: Case, compile_for: Callable, hopper: Any) -> None:
    sound("sm_90", compile_for("sm_90", lambda: case.launch(hopper)), HOPPER_SPILLS)


@pytest.mark.slow
@pytest.mark.parametrize("case", list(gluon_matrix()), ids=str)
def test_hopper(case: Case, compile_for: Callable, hopper: Any) -> None:
    sound("sm_90", compile_for("sm_90", lambda: case.launch(hopper)), HOPPER_SPILLS)
