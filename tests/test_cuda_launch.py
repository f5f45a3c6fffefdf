"""What reaches a compiled library's entry: each call's own, beside what its like share."""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path

import pytest
import torch
from _emulation import COMPILER, compile_for_host
from torch import Tensor

from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.protocol import Call, Problem

PROBLEM = Problem("cpu", torch.float32, torch.float32, 4, 2, 32, 16, "NHD")
#: an entry that writes into `out` what it was given
ENTRY = """
#include "pagedattn.h"
extern "C" int pagedattn_run(const struct pagedattn_call* call) {
  int64_t* out = (int64_t*)call->pointers[6];
  for (int i = 0; i < PAGEDATTN_POINTERS; ++i) out[i] = (int64_t)call->pointers[i];
  out[13] = call->max_seq_len;
  out[14] = call->shared->num_seqs;
  out[15] = call->shared->num_splits;
  out[16] = call->shared->team;
  out[17] = (int64_t)call->stream;
  return 0;
}
extern "C" int pagedattn_tuned_warps(void) { return 4; }
extern "C" int pagedattn_clustered(const struct pagedattn_call*) { return 0; }
extern "C" const char* pagedattn_error(int) { return ""; }
"""

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ here")


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> CudaRunner:
    folder = tmp_path_factory.mktemp("entry")
    source: Path = folder / "entry.cu"
    source.write_text(ENTRY)
    return CudaRunner(ctypes.CDLL(str(compile_for_host(source, folder / "entry.so"))), PROBLEM)


def _call(num_seqs: int, max_seq_len: int, plans: dict[object, object]) -> Call:
    query = torch.zeros(num_seqs, 4, 32)
    cache = torch.zeros(1, 16, 2, 32)
    return Call(
        query=query, key_cache=cache, value_cache=cache.clone(),
        block_tables=torch.zeros(num_seqs, 64, dtype=torch.int32),
        seq_lens=torch.zeros(num_seqs, dtype=torch.int32), out=torch.zeros_like(query), lse=None,
        kv_layout="NHD", scale=1.0, max_seq_len=max_seq_len, max_query_len=1, plans=plans,
    )  # fmt: skip


def _told(out: Tensor) -> list[int]:
    numbers: list[int] = out.view(-1).view(torch.int64).tolist()
    return numbers[:18]


def test_a_plan_is_shared_and_what_is_a_calls_own_is_not(runner: CudaRunner) -> None:
    plans: dict[object, object] = {}
    for longest in (600, 601, 1024):
        call = _call(3, longest, plans)
        runner(call)
        told = _told(call.out)
        assert told[:12] == list(call.addresses())
        assert told[13:15] == [longest, 3]
        assert told[17] == 0, "the emulation has no streams"
    assert len(plans) == 1


@pytest.mark.parametrize(
    ("longest", "merges"), [(1, False), (64, False), (192, False), (193, True)]
)
def test_what_a_block_walks_sooner_than_a_merge_is_not_split(
    runner: CudaRunner, longest: int, merges: bool
) -> None:
    call = _call(1, longest, {})
    runner(call)
    told = _told(call.out)
    assert (told[15] > 1) == merges
    assert (told[12] != 0) == merges, "a workspace is for the merge alone"


def test_threads_that_share_a_plan_do_not_mix(runner: CudaRunner) -> None:
    plans: dict[object, object] = {}
    wrong: list[list[int]] = []

    def serve(longest: int) -> None:
        for _ in range(200):
            call = _call(2, longest, plans)
            runner(call)
            told = _told(call.out)
            if told[:12] != list(call.addresses()) or told[13] != longest:
                wrong.append(told)

    threads = [threading.Thread(target=serve, args=(513 + n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(plans) == 1
