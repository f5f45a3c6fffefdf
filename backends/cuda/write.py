"""The compiled cache write: csrc/pagedattn_write.h as ctypes sees it, and its launch."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from pagedattn.backends.cuda.abi import (
    address,
    cache_strides,
    count,
    pack_shift,
    require_success,
)
from pagedattn.backends.cuda.launch import current_stream
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.layouts import read_shape
from pagedattn.backends.protocol import Write

_VERSION = 1  # PAGEDATTN_WRITE_ABI_VERSION

_POINTERS = ("key", "value", "key_cache", "value_cache", "slots", "k_scale", "v_scale")
_STRIDES = (
    "key_token_stride", "key_head_stride", "key_dim_stride", "value_token_stride",
    "value_head_stride", "value_dim_stride", "slot_stride", "key_cache_block_stride",
    "key_cache_head_stride", "key_cache_token_stride", "key_cache_chunk_stride",
    "value_cache_block_stride", "value_cache_head_stride", "value_cache_token_stride",
    "value_cache_dim_stride", "num_blocks", "num_tokens",
)  # fmt: skip
_COUNTS = (
    "num_kv_heads", "head_dim", "block_size", "key_pack_shift", "slot_bytes", "k_scale_count",
    "v_scale_count",
)  # fmt: skip
_NUMBERS = ("k_scale_value", "v_scale_value")


class WriteParams(ctypes.Structure):
    """``struct pagedattn_write_params``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in _NUMBERS),
    ]


#: what pagedattn_write_abi() of a fitting library says
WRITE_ABI = _VERSION * 65536 + ctypes.sizeof(WriteParams)


class CudaWriter:
    """Writes of one pair of types, by a library that was compiled for it.

    On a CUDA device it launches on torch's current stream; on a CPU the library must be one
    compiled with the host emulation.

    Raises
    ------
    BackendUnavailable
        If the library has no such entry, or another interface.
    """

    def __init__(self, library: ctypes.CDLL, device: str) -> None:
        found = library.pagedattn_write_abi() if hasattr(library, "pagedattn_write_abi") else 0
        if found != WRITE_ABI:
            raise BackendUnavailable(f"its cache write has the interface {found}, not {WRITE_ABI}")
        library.pagedattn_write.argtypes = [ctypes.POINTER(WriteParams), ctypes.c_void_p]
        library.pagedattn_error.argtypes = [ctypes.c_int]
        library.pagedattn_error.restype = ctypes.c_char_p
        self._library = library
        where = torch.device(device)
        self._device = where.index if where.type == "cuda" else None

    def __call__(self, w: Write) -> None:
        if self._device is None or self._device == torch.cuda.current_device():
            self._run(w)
            return
        with torch.cuda.device(self._device):
            self._run(w)

    def _run(self, w: Write) -> None:
        # the names hold converted scales until the launch has been made; the allocator keeps
        # their memory to this stream after that
        k_scale, v_scale = _scale(w.k_scale), _scale(w.v_scale)
        params = _params_of(w, k_scale, v_scale)
        code = self._library.pagedattn_write(params, current_stream(self._device))
        require_success(self._library, code)


def _params_of(w: Write, k_scale: float | Tensor, v_scale: float | Tensor) -> WriteParams:
    """The struct of a write, which holds addresses: the tensors must outlive the launch."""
    shape = read_shape(w.value_cache, w.kv_layout)
    return WriteParams(
        address(w.key), address(w.value), address(w.key_cache), address(w.value_cache),
        address(w.slot_mapping), address(k_scale), address(v_scale), *w.key.stride(),
        *w.value.stride(), *w.slot_mapping.stride(), *cache_strides(w), shape.num_blocks,
        w.key.shape[0], shape.num_kv_heads, shape.head_dim, shape.block_size, pack_shift(w),
        w.slot_mapping.element_size(), count(k_scale), count(v_scale),
        1.0 if isinstance(k_scale, Tensor) else k_scale,
        1.0 if isinstance(v_scale, Tensor) else v_scale,
    )  # fmt: skip


def _scale(scale: float | Tensor | None) -> float | Tensor:
    if isinstance(scale, Tensor):
        return scale.to(torch.float32).reshape(-1).contiguous()
    return 1.0 if scale is None else float(scale)
