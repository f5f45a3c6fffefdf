"""What a backend is, and what it receives.

A `Problem` is a class of calls that one binding serves: it holds no length, batch size or
number of blocks, so that those never cause a new resolution. A `Call` is one call's arguments,
already validated. A `Backend` says whether it is there, whether it can do a problem, and
loads the function that does it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, get_args, runtime_checkable

import torch
from torch import Tensor

from pagedattn.backends.facts import Facts

KVLayout = Literal["packed", "NHD", "HND"]
KVScales = Literal["none", "float", "tensor", "per_head"]
KV_SCALES: tuple[KVScales, ...] = get_args(KVScales)
#: which sequences of a call a backend serves: two of them may share one between them
QueryPart = Literal["all", "short", "long"]
#: a sequence is short that has at most so many query tokens in the call
SHORT_QUERIES = 16
QUANTISED_KV_DTYPES = frozenset(
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "int8")
    if hasattr(torch, name)
)


@dataclass(frozen=True)
class Problem:
    """A class of calls: everything that decides which backend can serve them."""

    device: str  # "cpu", "cuda:0"
    dtype: torch.dtype  # of the query and of the output
    kv_dtype: torch.dtype
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    kv_layout: KVLayout = "packed"
    varlen_query: bool = False  # query_start_loc is given
    window: bool = False
    softcap: bool = False
    alibi: bool = False
    sinks: bool = False
    kv_scales: KVScales = "none"
    return_lse: bool = False
    batch_invariant: bool = False
    query_part: QueryPart = "all"  # other than "all" only with varlen_query
    # no sequence of a call has more query tokens; 0: some may. Other than 0 only with varlen_query
    few_queries: int = 0

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


@dataclass
class Call:
    """One call's arguments, validated: a backend needs no check of shapes or types of its own.

    What is left to a backend is the contents of `seq_lens`, `block_tables` and
    `query_start_loc` where those are device data (see `paged_attention` for the contract).
    Both results are overwritten whole; their former contents mean nothing.
    """

    query: Tensor  # [num_tokens, num_heads, head_dim]
    key_cache: Tensor  # by kv_layout
    value_cache: Tensor  # by kv_layout
    block_tables: Tensor  # int32 [num_seqs, max_blocks], innermost dense
    seq_lens: Tensor  # int32 [num_seqs], dense
    out: Tensor  # [num_tokens, num_heads, head_dim], innermost dense
    lse: Tensor | None  # float32 [num_tokens, num_heads], dense
    kv_layout: KVLayout
    scale: float
    max_seq_len: int  # no sequence is longer: the hint or the table's width, whichever is less
    max_query_len: int  # no sequence has more query tokens in this call; see query_part
    query_start_loc: Tensor | None = None  # int32 [num_seqs + 1], dense
    window: int | None = None
    softcap: float | None = None
    alibi_slopes: Tensor | None = None  # float32 [num_heads], on the query's device
    sinks: Tensor | None = None  # float32 [num_heads], on the query's device
    k_scale: float | Tensor | None = None  # float32 [1] or [num_kv_heads], on the device
    v_scale: float | Tensor | None = None
    num_splits: int | None = None
    batch_invariant: bool = False
    # On a CPU the lengths are host data, already checked; None where reading them would
    # synchronise with a device.
    host_seq_lens: list[int] | None = None
    host_query_start: list[int] | None = None
    # "short": serve the sequences of at most SHORT_QUERIES query tokens, which then is
    # max_query_len, and the tokens of no sequence. "long": serve the other sequences. The rows of
    # both results that are not to be served keep what they hold.
    query_part: QueryPart = "all"
    # What runners keep for later calls with this binding, which differ from this one only in
    # contents and addresses, `max_seq_len`, `max_query_len` and `query_part`; a key names its
    # runner, and those. It lives on: nothing large, and added to by `keep_plan`.
    plans: dict[Any, Any] | None = None
    # What `addresses` gives, where it was asked for before: `replace` drops it, and whoever puts
    # another tensor into a call that has it must too.
    known_addresses: tuple[int, ...] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie, as a kernel is given them: query, key_cache, value_cache,
        block_tables, seq_lens, query_start_loc, out, lse, alibi_slopes, sinks, k_scale, v_scale;
        0 for each that is absent or a number."""
        if self.known_addresses is not None:
            return self.known_addresses
        starts, lse, slopes, sinks = self.query_start_loc, self.lse, self.alibi_slopes, self.sinks
        k_scale, v_scale = self.k_scale, self.v_scale
        return (
            self.query.data_ptr(),
            self.key_cache.data_ptr(),
            self.value_cache.data_ptr(),
            self.block_tables.data_ptr(),
            self.seq_lens.data_ptr(),
            0 if starts is None else starts.data_ptr(),
            self.out.data_ptr(),
            0 if lse is None else lse.data_ptr(),
            0 if slopes is None else slopes.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            k_scale.data_ptr() if isinstance(k_scale, Tensor) else 0,
            v_scale.data_ptr() if isinstance(v_scale, Tensor) else 0,
        )

    def serves(self, query_len: int) -> bool:
        """Whether a sequence of so many query tokens is served."""
        part = self.query_part
        return part == "all" or (query_len <= SHORT_QUERIES) == (part == "short")


Runner = Callable[[Call], None]
_MAX_PLANS = 64


def keep_plan(call: Call, key: Any, plan: Any) -> None:
    """Put a plan under `key` into ``call.plans``, where the call has it."""
    plans = call.plans
    if plans is None:
        return
    if len(plans) >= _MAX_PLANS:  # lengths that wander must not make it grow for ever
        plans.clear()
    plans[key] = plan


class Write(NamedTuple):
    """One cache write's arguments, validated. Slots out of range are skipped."""

    key: Tensor  # [num_tokens, kv_heads, head_dim], any strides; at least one token
    value: Tensor
    key_cache: Tensor  # by kv_layout
    value_cache: Tensor
    slot_mapping: Tensor  # int32 or int64 [num_tokens], any stride
    kv_layout: KVLayout
    k_scale: float | Tensor | None  # a tensor: 1 or kv_heads elements, on the device
    v_scale: float | Tensor | None


Writer = Callable[[Write], None]


@runtime_checkable
class Backend(Protocol):
    """One implementation of paged attention.

    `name` is what people write in ``PAGEDATTN_BACKEND``.
    """

    name: str

    def not_present_reasons(self, facts: Facts) -> list[str]:
        """Why it is not there on this machine; empty if it is. Touches no device."""
        ...

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        """Every reason why it cannot do `problem`; empty if it can. Touches no device."""
        ...

    def load(self, problem: Problem) -> Runner:
        """Import, compile or find the binary, and return the function that runs a call.

        Raises
        ------
        BackendUnavailable, BuildError
            The chain notes the message as a reason and moves on.
        """
        ...

    def remedy(self, facts: Facts) -> str | None:
        """A line to paste that would make it present, or None if nothing would."""
        ...


@runtime_checkable
class StepsBack(Protocol):
    """What a backend offers, beside the members of `Backend`, that serves some problems less well
    than those behind it in the automatic chain do; optional."""

    def step_back_reason(self, problem: Problem, facts: Facts) -> str | None:
        """Why the others are to be tried first, all but the last of the chain; None: they are
        not."""
        ...


@runtime_checkable
class ServesFew(Protocol):
    """What a backend offers, beside `StepsBack`, that serves some calls of a problem better than
    those that it steps back for; optional."""

    def few_queries(self, problem: Problem, facts: Facts) -> int:
        """How many query tokens every sequence of a call may have for it to serve that call better;
        0: it serves none better.

        The automatic chain proves it for ``replace(problem, few_queries=…)`` and gives it such
        calls whole. Of a batch-invariant problem it takes 0 whatever is said here, and does not
        ask: by which backend a sequence is served would depend on the longest of its call.
        """
        ...


@runtime_checkable
class WritesCache(Protocol):
    """What a backend that can write the cache too offers beside the members of `Backend`;
    optional. What it writes is, bit by bit, what `pagedattn.backends.kv_write` does on a CPU."""

    def load_writer(self, problem: Problem) -> Writer:
        """The function that writes caches of `problem`'s types, sizes and layout.

        It takes what is there already and compiles nothing: a write comes before the attention
        that would have its backend compiled.

        Raises
        ------
        BackendUnavailable
            If nothing is ready.
        """
        ...


@dataclass(frozen=True)
class BuildOptions:
    """What ``pagedattn build`` was asked to compile; types as its options spell them.

    Attributes
    ----------
    archs : tuple of str
        Empty: those of the devices in sight.
    kv_dtypes : tuple of str
        Empty: each query type's own.
    """

    archs: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("fp16",)
    kv_dtypes: tuple[str, ...] = ()
    head_dims: tuple[int, ...] = (256,)
    groups: tuple[int, ...] = (6,)
    block_sizes: tuple[int, ...] = (16,)


@dataclass(frozen=True)
class Built:
    """A binary that a backend compiled, or was found to have compiled before."""

    name: str  # what it is for, in a word
    path: str
    compiler: str
    when: str  # UTC, ISO 8601
    seconds: float  # that compiling took
    current: bool = True  # False: of other sources than those installed, so never loaded


# It ends early, with a BuildError, once its argument is set.
BuildJob = Callable[[threading.Event], Built]


@runtime_checkable
class Buildable(Protocol):
    """What a backend that is compiled offers beside the members of `Backend`; optional.

    Jobs of several threads may run at once.
    """

    def build_jobs(self, facts: Facts, options: BuildOptions) -> dict[str, BuildJob]:
        """Name and job of each binary that `options` ask for; nothing is compiled yet.

        Raises
        ------
        BuildError
            If there is no compiler for it, or no architecture is named and none in sight.
        """
        ...

    def built(self) -> list[Built]:
        """Every binary that is kept."""
        ...
