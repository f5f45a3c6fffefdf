"""From a `Call` to a launch of the portable kernels: how many partitions, which workspace."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from pagedattn.backends.cuda.abi import declare, params_of
from pagedattn.backends.protocol import Call, Problem

TILE = 64  # tokens: a partition is a whole number of tiles
#: tokens of a partition in the batch-invariant mode: fixed, so that a row's are its own
INVARIANT_TOKENS = 2048
MAX_SPLITS = 256  # more would make the merge outweigh what they gain
BLOCKS_PER_SM = 6  # that the partitions aim for
MIN_TOKENS = 128  # of a partition: shorter ones cost more in the merge than they save
_MAX_ROWS = 8  # of a block, as in csrc/portable_decode.cuh
_EMULATED_SMS = 8  # on a CPU: enough to make partitions happen


class Splits(NamedTuple):
    number: int  # that the grid and the workspace hold
    tokens: int  # of each; 0: the kernel shares the keys out evenly


class CudaRunner:
    """Runs calls of one class of problems with a library that was compiled for it.

    It serves any number of query tokens, but takes them a few at a time: it is made for decode
    rows and up to 16 speculative tokens. On a CUDA device it launches on torch's current stream;
    on a CPU the library must be one compiled with the host emulation.
    """

    def __init__(self, library: ctypes.CDLL, problem: Problem) -> None:
        declare(library)
        self._library = library
        self._problem = problem
        self._device: int | None = None
        self._multiprocessors = _EMULATED_SMS
        if problem.device_type == "cuda":
            index = torch.device(problem.device).index
            self._device = torch.cuda.current_device() if index is None else index
            properties = torch.cuda.get_device_properties(self._device)
            self._multiprocessors = properties.multi_processor_count

    def __call__(self, call: Call) -> None:
        if self._device is None or self._device == torch.cuda.current_device():
            self._run(call)
            return
        with torch.cuda.device(self._device):
            self._run(call)

    def _run(self, call: Call) -> None:
        splits = self._splits(call)
        # of this call alone: the allocator keeps streams apart
        workspace = _workspace(call, splits.number)
        params = params_of(call, workspace, splits.number, splits.tokens)
        code = self._library.pagedattn_run(params, current_stream(self._device))
        if code:
            words = (self._library.pagedattn_error(code) or b"").decode(errors="replace")
            raise RuntimeError(f"CUDA error: {words} (code {code})")

    def _splits(self, call: Call) -> Splits:
        """From bounds that the host knows: no length is read."""
        tokens = max(1, call.max_seq_len)
        if call.batch_invariant:
            return Splits(-(-tokens // INVARIANT_TOKENS), INVARIANT_TOKENS)
        if call.window is not None:
            tokens = min(tokens, call.window + call.max_query_len + TILE)
        if call.num_splits is not None:
            return Splits(max(1, min(call.num_splits, -(-tokens // TILE))), 0)
        rows = self._problem.group * call.max_query_len
        tiles = -(-rows // min(_MAX_ROWS, rows)) if rows else 1
        groups = max(1, call.seq_lens.shape[0] * self._problem.num_kv_heads * tiles)
        wanted = self._multiprocessors * BLOCKS_PER_SM // groups
        return Splits(max(1, min(wanted, -(-tokens // MIN_TOKENS), MAX_SPLITS)), 0)


def _workspace(call: Call, splits: int) -> Tensor:
    num_tokens, num_heads, head_dim = call.query.shape
    if call.query_part == "short":  # the rows of the others need none
        num_tokens = call.seq_lens.shape[0] * call.max_query_len
    size = splits * num_tokens * num_heads * (head_dim + 2)
    return torch.empty(size, dtype=torch.float32, device=call.query.device)


def current_stream(device: int | None) -> int | None:
    """torch's stream on a CUDA device; None for the CPU, where the emulation needs none."""
    if device is None:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
