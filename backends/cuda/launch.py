"""From a `Call` to a launch of the compiled kernels."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import replace
from typing import NamedTuple

import torch

from pagedattn.backends.cuda import partition
from pagedattn.backends.cuda.abi import (
    REFUSED,
    Params,
    declare,
    pack,
    params_of,
    require_success,
)
from pagedattn.backends.cuda.partition import Partition
from pagedattn.backends.protocol import Call, Problem, keep_plan

log = logging.getLogger("pagedattn")

_EMULATED_SMS = 8  # on a CPU: enough to make partitions happen
# tokens: a plan's bound is a multiple of the first; up to that, of the second
_BOUNDS, _SHORT_BOUNDS = 512, 64


class _Plan(NamedTuple):
    """What calls of the same shapes share."""

    params: Params
    address: int  # of the params
    workspace: int  # float32 elements


class CudaRunner:
    """Runs calls of one class of problems with a library that was compiled for it.

    It serves any number of query tokens, but takes them a few at a time: it is made for decode
    rows and up to 16 speculative tokens. On a CUDA device it launches on torch's current stream;
    on a CPU the library must be one compiled with the host emulation.
    """

    def __init__(self, library: ctypes.CDLL, problem: Problem) -> None:
        declare(library)
        self._library = library
        self._launch_packed = library.pagedattn_run
        self._problem = problem
        self._told = False
        self._warps: int = library.pagedattn_tuned_warps()
        self._device: int | None = None
        self._multiprocessors = _EMULATED_SMS
        if problem.device_type == "cuda":
            index = torch.device(problem.device).index
            self._device = torch.cuda.current_device() if index is None else index
            properties = torch.cuda.get_device_properties(self._device)
            self._multiprocessors = properties.multi_processor_count

    def __call__(self, call: Call) -> None:
        # of torch.cuda.current_device() the part that asks: with tensors there it is initialised
        if self._device is None or self._device == torch._C._cuda_getDevice():
            self._run(call)
            return
        with torch.cuda.device(self._device):
            self._run(call)

    def _run(self, call: Call) -> None:
        code = self.tuned(call) if self._warps else REFUSED
        if code == REFUSED:
            if self._warps and not self._told:
                self._told = True
                log.warning(
                    "the tuned kernel cannot copy these tensors as they lie in memory (strides and "
                    "addresses of 16 bytes): the portable one, slower, serves such calls"
                )
            code = self.portable(call)
        require_success(self._library, code)

    def tuned(self, call: Call) -> int:
        """Launch the tuned kernels; `REFUSED` where they do not serve the call."""
        return self._launch(call, "tuned")

    def portable(self, call: Call) -> int:
        """Launch the portable kernels, which serve every call of their class."""
        return self._launch(call, "portable")

    def _launch(self, call: Call, kernels: str) -> int:
        # a bound that grows with each step is one plan's for many of them; but of short contexts it
        # decides whether there is anything to merge
        longest = call.max_seq_len
        step = _BOUNDS if longest > _BOUNDS else _SHORT_BOUNDS
        bound = -(-longest // step) * step
        key = (self, kernels, bound, call.max_query_len, call.query_part)
        plan: _Plan | None = None if call.plans is None else call.plans.get(key)
        if plan is None:
            plan = self._plan(replace(call, max_seq_len=bound), kernels)
            keep_plan(call, key, plan)
        workspace = None
        if plan.workspace:  # of this call alone: the allocator keeps streams apart
            workspace = torch.empty(plan.workspace, dtype=torch.float32, device=call.query.device)
        code: int = self._launch_packed(
            pack(
                plan.address,
                call,
                0 if workspace is None else workspace.data_ptr(),
                current_stream(self._device) or 0,
            )
        )
        return code

    def _plan(self, call: Call, kernels: str) -> _Plan:
        if kernels == "tuned":
            part = partition.tuned(call, self._problem, self._multiprocessors, self._warps)
            few = partition.for_a_cluster(part, call, self._problem, self._multiprocessors)
            if clustered := self._clustered(call, few):
                return clustered
        else:
            part = partition.portable(call, self._problem, self._multiprocessors)
        params = params_of(call, *part)
        return _Plan(params, ctypes.addressof(params), _workspace_size(call, part))

    def _clustered(self, call: Call, part: Partition) -> _Plan | None:
        """A plan whose partitions are merged by their own blocks, where the device has room."""
        if part.splits == 1:
            return None
        params = params_of(call, *part)
        address = ctypes.addressof(params)
        answer = self._library.pagedattn_clustered(pack(address, call, 0, 0))
        if answer > 1:
            why = self._library.pagedattn_error(answer - 1).decode(errors="replace")
            log.debug("no clusters: the device does not say how many it has room for (%s)", why)
        params.clustered = answer == 1
        return _Plan(params, address, 0) if params.clustered else None


def _workspace_size(call: Call, part: Partition) -> int:
    """Elements that the partitions leave for the merge; 0 where there is no merge."""
    if part.team and part.splits == 1:
        return 0  # the tuned kernel writes the result itself
    num_tokens, num_heads, head_dim = call.query.shape
    if call.query_part == "short":  # the rows of the others need none
        num_tokens = call.seq_lens.shape[0] * call.max_query_len
    return part.splits * num_tokens * num_heads * (head_dim + 2)


def current_stream(device: int | None) -> int | None:
    """torch's stream on a CUDA device; None for the CPU, where the emulation needs none."""
    if device is None:
        return None
    stream: int = torch._C._cuda_getCurrentRawStream(device)
    return stream
