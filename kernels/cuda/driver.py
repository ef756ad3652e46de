"""Kernels compiled ahead of time, launched through the CUDA driver that PyTorch has loaded: no compiler, no header and
no package beside it is needed. ``grouped.cubin.xz`` is ``grouped.cu`` compiled for sm_90a by ``make cubin``."""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

import torch
from torch import Tensor

CUBIN = Path(__file__).with_name("grouped.cubin.xz")
#: Shared memory of every kernel, all that a program may have, and its threads.
SHARED, THREADS = 232448, 384

_BF16, _SWIZZLE_128B, _PROMOTE_256B = 9, 3, 3  # enumerators of CUtensorMap's dtype, swizzle and promotion to L2
_PARAMETERS = 512  # bytes that the driver may read of the parameters, padding included
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)


class Tiles(ctypes.Structure):
    """``Tiles`` of pipeline.cuh."""

    _fields_ = (
        ("list", ctypes.c_void_p),
        ("counters", ctypes.c_void_p),
        ("ends", ctypes.c_void_p),
        ("experts", ctypes.c_int),
    )


class Divide(ctypes.Structure):
    """``Divide`` of pipeline.cuh: n // by is ``n * factor >> shift`` for n below 2**31."""

    _fields_ = (("factor", ctypes.c_uint), ("shift", ctypes.c_uint))

    @classmethod
    def by(cls, divisor: int) -> Divide:
        """Division by ``divisor`` from 1 to 2**31 - 1."""
        shift = 31 + (divisor - 1).bit_length()
        return cls((1 << shift) // divisor + 1, shift)


class RowsArgs(ctypes.Structure):
    """``RowsArgs`` of rows_args.cuh, less the bytes after the last field."""

    _fields_ = (
        ("a", TensorMap),
        ("b", TensorMap),
        ("tiles", Tiles),
        ("x", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("stride", ctypes.c_uint),
        ("divide", Divide),
        ("out", ctypes.c_void_p),
        ("h", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("depth", ctypes.c_int),
        ("columns", ctypes.c_int),
        ("gate", ctypes.c_int),
        ("up", ctypes.c_int),
        ("alpha", ctypes.c_float),
        ("limit", ctypes.c_float),
        ("saved", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("dots", ctypes.c_void_p),
    )


class WgradArgs(ctypes.Structure):
    """``WgradArgs`` of wgrad.cuh, less the bytes after the last field."""

    _fields_ = (
        ("b", TensorMap),
        ("tiles", Tiles),
        ("x", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("stride", ctypes.c_uint),
        ("divide", Divide),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int),
        ("columns", ctypes.c_int),
    )


def tensor_map(t: Tensor, rows: int, columns: int) -> TensorMap:
    """Boxes of ``rows`` x ``columns`` of the bf16 matrix ``t``, whose rows start at multiples of 16 bytes; columns lie
    side by side. Outside ``t`` a box is zero. Raises RuntimeError where the driver refuses."""
    room = ctypes.create_string_buffer(ctypes.sizeof(TensorMap) + 64)
    at = -(-ctypes.addressof(room) // 64) * 64  # the driver wants 64 bytes of alignment
    sizes = (ctypes.c_uint64 * 2)(t.shape[1], t.shape[0])
    strides = (ctypes.c_uint64 * 1)(t.stride(0) * t.element_size())
    box, steps = (ctypes.c_uint32 * 2)(columns, rows), (ctypes.c_uint32 * 2)(1, 1)
    _check(
        _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(at), _BF16, 2, ctypes.c_void_p(t.data_ptr()), sizes, strides, box, steps, 0, _SWIZZLE_128B,
            _PROMOTE_256B, 0,
        ),
        "cuTensorMapEncodeTiled",
    )  # fmt: skip
    return TensorMap.from_buffer_copy(ctypes.string_at(at, ctypes.sizeof(TensorMap)))


def launch(name: str, args: RowsArgs | WgradArgs, programs: int, device: torch.device) -> None:
    """Run kernel ``name`` with ``programs`` programs on the current stream of ``device``. Raises RuntimeError where the
    driver refuses."""
    room = ctypes.create_string_buffer(_PARAMETERS + 64)
    at = -(-ctypes.addressof(room) // 64) * 64
    ctypes.memmove(at, ctypes.byref(args), ctypes.sizeof(args))
    parameters = (ctypes.c_void_p * 1)(at)
    stream = torch.cuda.current_stream(device).cuda_stream
    with torch.cuda.device(device):
        _check(
            _driver().cuLaunchKernel(
                _kernel(name, device.index), programs, 1, 1, THREADS, 1, 1, SHARED, ctypes.c_void_p(stream), parameters,
                None,
            ),
            name,
        )  # fmt: skip


@functools.cache
def ready(device: torch.device) -> bool:
    """Whether the kernels are here and run on ``device``."""
    if device.type != "cuda" or not CUBIN.exists() or torch.cuda.get_device_capability(device) != (9, 0):
        return False
    try:
        _library()
    except (ImportError, OSError, RuntimeError):  # no lzma, no driver of that name, or one too old for the kernels
        return False
    return True


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


@functools.cache
def _library() -> ctypes.c_void_p:
    import lzma  # optional in a Python that one builds oneself

    library = ctypes.c_void_p()
    try:
        image = lzma.decompress(CUBIN.read_bytes())
    except lzma.LZMAError as error:
        raise RuntimeError(f"{CUBIN.name}: {error}") from error
    _check(
        _driver().cuLibraryLoadData(ctypes.byref(library), image, None, None, 0, None, None, 0), f"loading {CUBIN.name}"
    )
    return library


@functools.cache
def _kernel(name: str, device: int) -> ctypes.c_void_p:
    kernel = ctypes.c_void_p()
    _check(_driver().cuLibraryGetKernel(ctypes.byref(kernel), _library(), name.encode()), name)
    _check(_driver().cuKernelSetAttribute(_MAX_DYNAMIC_SHARED, SHARED, kernel, device), name)
    return kernel


def _check(status: int, what: str) -> None:
    if status != 0:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(status, ctypes.byref(text))
        raise RuntimeError(f"{what}: {(text.value or b'unknown error').decode()} (CUDA driver error {status})")
