"""csrc/pagedattn.h as ctypes sees it: the structs of a call, mirrored member by member.

A library says which version and size of the struct it was compiled with; one that does not say
`ABI` must not be called.
"""

from __future__ import annotations

import ctypes
import struct

from torch import Tensor

from pagedattn.backends.protocol import Call, Write

_VERSION = 4  # PAGEDATTN_ABI_VERSION
#: pagedattn_run: the tuned kernel does not serve the call as it lies in memory
REFUSED = -16
_DENSE = 30  # key_pack_shift where a key's elements lie side by side
_INT_MAX = 2**31 - 1
#: tokens of a sequence: the kernels count positions in an int, past the end of the last partition
_LONGEST = 2**31 - 2**20

_POINTERS = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "query_start_loc", "out",
    "lse", "alibi_slopes", "sinks", "k_scale", "v_scale", "workspace",
)  # fmt: skip
_STRIDES = (
    "query_token_stride", "query_head_stride", "out_token_stride", "out_head_stride",
    "table_stride", "key_block_stride", "key_head_stride", "key_token_stride",
    "key_chunk_stride", "value_block_stride", "value_head_stride", "value_token_stride",
    "value_dim_stride", "num_blocks",
)  # fmt: skip
_COUNTS = (
    "num_seqs", "num_tokens", "num_heads", "num_kv_heads", "max_blocks", "max_seq_len",
    "max_query_len", "window", "num_splits", "tokens_per_split", "team", "key_pack_shift",
    "k_scale_count", "v_scale_count", "skip_longer", "clustered",
)  # fmt: skip
_NUMBERS = ("scale", "softcap", "k_scale_value", "v_scale_value")


class Params(ctypes.Structure):
    """``struct pagedattn_params``."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _STRIDES),
        *((name, ctypes.c_int32) for name in _COUNTS),
        *((name, ctypes.c_float) for name in _NUMBERS),
    ]


#: ``struct pagedattn_call``: packed at once, as an attribute of a ctypes structure takes longer
_PACK_CALL = struct.Struct(f"PPq{len(_POINTERS)}P").pack

#: what pagedattn_abi() of a fitting library says
ABI = _VERSION * 65536 + ctypes.sizeof(Params)


def declare(library: ctypes.CDLL) -> None:
    """Tell ctypes the types of a library's functions."""
    # no argtypes: ctypes hands bytes over as they are in half the time
    library.pagedattn_run.restype = ctypes.c_int
    library.pagedattn_clustered.restype = ctypes.c_int
    library.pagedattn_tuned_warps.argtypes = []
    library.pagedattn_tuned_warps.restype = ctypes.c_int
    library.pagedattn_error.argtypes = [ctypes.c_int]
    library.pagedattn_error.restype = ctypes.c_char_p


def require_success(library: ctypes.CDLL, code: int) -> None:
    """Raise what a launch's code means, unless it is 0."""
    if code:
        words = (library.pagedattn_error(code) or b"").decode(errors="replace")
        raise RuntimeError(f"CUDA error: {words} (code {code})")


def params_of(call: Call, num_splits: int, tokens_per_split: int, team: int) -> Params:
    """What calls like this one share; `pack` adds what is a call's own.

    Parameters
    ----------
    num_splits : partitions of the keys that the grid holds
    tokens_per_split : size of a partition, a multiple of 128; 0 lets the kernel choose
    team : warps that share a partition in the tuned kernel; 0 takes the portable one
    """
    num_tokens, num_heads, _ = call.query.shape
    k_scale, v_scale = call.k_scale, call.v_scale
    return Params(
        *(None,) * len(_POINTERS),
        *call.query.stride()[:2], *call.out.stride()[:2], call.block_tables.stride(0),
        *cache_strides(call), call.key_cache.shape[0],
        call.seq_lens.shape[0], num_tokens, num_heads,
        call.key_cache.shape[2 if call.kv_layout == "NHD" else 1], call.block_tables.shape[1],
        0, call.max_query_len, min(call.window or 0, _INT_MAX),
        num_splits, tokens_per_split, team, pack_shift(call), count(k_scale), count(v_scale),
        call.query_part == "short", 0,
        call.scale, call.softcap or 0.0, _number(k_scale), _number(v_scale),
    )  # fmt: skip


def pack(shared: int, call: Call, workspace: int, stream: int) -> bytes:
    """What ``pagedattn_run`` takes: the tensors must outlive the launch.

    Parameters
    ----------
    shared : where the `Params` are, which must outlive it too
    workspace : where float32 ``[num_splits * num_tokens * num_heads * (head_dim + 2)]`` is
        With ``query_part="short"`` num_seqs * max_query_len instead of num_tokens. 0 where
        the tuned kernel has one partition, or a cluster of blocks merges them.
    """
    longest = call.max_seq_len
    return _PACK_CALL(
        shared,
        stream,
        longest if longest < _LONGEST else _LONGEST,
        *call.addresses(),
        workspace,
    )


def cache_strides(call: Call | Write) -> tuple[int, ...]:
    """Block, head, token and chunk of the keys, then block, head, token and dim of the values."""
    k, v = call.key_cache.stride(), call.value_cache.stride()
    if call.kv_layout == "packed":
        return (k[0], k[1], k[3], k[2], v[0], v[1], v[3], v[2])
    token, head = (1, 2) if call.kv_layout == "NHD" else (2, 1)
    return (k[0], k[head], k[token], 0, v[0], v[head], v[token], v[3])


def pack_shift(call: Call | Write) -> int:
    """The logarithm of how many elements of a key lie side by side."""
    if call.kv_layout != "packed":
        return _DENSE
    return int(call.key_cache.shape[-1]).bit_length() - 1


def address(value: float | Tensor | None) -> int | None:
    """Where a tensor's first element is; None for anything else."""
    return value.data_ptr() if isinstance(value, Tensor) else None


def count(scale: float | Tensor | None) -> int:
    """Elements of a scale that is a tensor, else 0."""
    return scale.numel() if isinstance(scale, Tensor) else 0


def _number(scale: float | Tensor | None) -> float:
    return scale if isinstance(scale, float | int) else 1.0
