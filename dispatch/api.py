"""The stable function and its companions: what a user calls, documented."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, overload

from torch import Tensor

from pagedattn import admission, arguments, cache, ops
from pagedattn.backends import states
from pagedattn.backends.protocol import KVLayout, Write
from pagedattn.given import Arguments

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Options(TypedDict, total=False):
        scale: float | None
        out: Tensor | None
        kv_layout: KVLayout
        query_start_loc: Tensor | None
        window: int | None
        softcap: float | None
        alibi_slopes: Tensor | None
        sinks: Tensor | None
        k_scale: float | Tensor | None
        v_scale: float | Tensor | None
        max_seq_len: int | None
        max_query_len: int | None
        num_splits: int | None
        batch_invariant: bool
        backend: str | Sequence[str] | None


@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: Literal[False] = ...,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> tuple[Tensor, Tensor]: ...
@overload
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    return_lse: bool,
    **options: Unpack[Options],
) -> Tensor | tuple[Tensor, Tensor]: ...
def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_tables: Tensor,
    seq_lens: Tensor,
    *,
    scale: float | None = None,
    out: Tensor | None = None,
    return_lse: bool = False,
    kv_layout: KVLayout = "packed",
    query_start_loc: Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
    max_seq_len: int | None = None,
    max_query_len: int | None = None,
    num_splits: int | None = None,
    batch_invariant: bool = False,
    backend: str | Sequence[str] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of each query token over its sequence's keys and values in a paged cache.

    Row t, head h of the result is ``softmax(scores) · V`` over the keys j that the token sees.
    A score is ``scale · q·k``, then soft-capped, then ALiBi is added, then masked: a token at
    absolute position i sees the keys j ≤ i, and with a window only j > i − window. The KV head
    of query head h is ``h // (num_heads / num_kv_heads)``.

    Parameters
    ----------
    query : Tensor, ``[num_tokens, num_heads, head_dim]``
        fp16, bf16 or fp32. Only the innermost dimension need be dense, here and in the caches.
    key_cache, value_cache : Tensor
        Of the query's dtype, or float8_e4m3fn, float8_e5m2 or int8. By `kv_layout`:

        - packed: ``[num_blocks, kv_heads, head_dim/x, block_size, x]`` with x = 16/itemsize, and
          ``[num_blocks, kv_heads, head_dim, block_size]``
        - NHD: both ``[num_blocks, block_size, kv_heads, head_dim]``
        - HND: both ``[num_blocks, kv_heads, block_size, head_dim]``
    block_tables : Tensor, int32 ``[num_seqs, max_blocks]``
        Physical block of each logical block; int64 is converted. Only the first
        ``ceil(length / block_size)`` entries of a row are followed, and with a window none that
        lie wholly behind it.
    seq_lens : Tensor, int32 ``[num_seqs]``
        Tokens in the cache, this call's included; int64 is converted.
    scale : float, optional
        Default ``head_dim ** -0.5``.
    out : Tensor, optional
        Written and returned: like the query, sharing no memory with an input.
    return_lse : bool
        Also return the log-sum-exp.
    query_start_loc : Tensor, int32 ``[num_seqs + 1]``, optional
        Sequence b owns the query tokens from entry b up to entry b + 1: the last ones of its
        length. Without it, one token per sequence.
    window : int, optional
        How many keys a token sees, its own included.
    softcap : float, optional
        Scores become ``softcap · tanh(score / softcap)``.
    alibi_slopes : Tensor, ``[num_heads]``, optional
        ``slope · (j − i)`` is added to the score of key j at query position i.
    sinks : Tensor, ``[num_heads]``, optional
        One more logit in each row's denominator, with no value.
    k_scale, v_scale : float or Tensor of 1 or num_kv_heads elements, optional
        A key is what is stored times `k_scale`, and likewise a value.
    max_seq_len, max_query_len : int, optional
        Bounds that the host knows; a backend sizes its work by them instead of by the table's
        width and the number of tokens, and where two backends share a class of calls
        `max_query_len` may decide which serves this one. Without it, on a device, every sequence
        may have all of the call's tokens: speculative tokens then count as a prefill.
    num_splits : int, optional
        Partitions of each context, merged at the end. Default: the backend's choice.
    batch_invariant : bool
        A sequence's result has the same bits whatever else is in the batch.
    backend : str or sequence of str, optional
        A name, or a chain of names; goes before `use_backend` and ``PAGEDATTN_BACKEND``.

    Returns
    -------
    Tensor, like the query; with `return_lse` also float32 ``[num_tokens, num_heads]``
        Natural log-sum-exp of the scores, a sink included. A token that sees no key gets zeros
        and −inf. A sequence whose table names a block that is not in the cache, whose length is
        beyond `max_seq_len` or its table, or that has more query tokens than `max_query_len`,
        gets NaN, and no other sequence does.

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is written. The lengths are among them on
        a CPU, where they are host data; on a device only with ``PAGEDATTN_CHECK=1``.
    BackendUnavailable, BuildError, VerificationError
        If no backend, or not the one asked for, can serve; with every reason.
    DeviceError
        If the device was lost.

    Notes
    -----
    The first call of a class of problems on a device chooses, loads and verifies a backend; see
    `bind` to do so beforehand. A warm call on a GPU does not synchronise and can be captured.

    Examples
    --------
    >>> import torch, pagedattn
    >>> cache = torch.randn(8, 16, 4, 64)  # 8 blocks of 16 tokens, 4 KV heads, NHD
    >>> query = torch.randn(1, 8, 64)
    >>> table = torch.tensor([[5, 2, 7]], dtype=torch.int32)
    >>> length = torch.tensor([40], dtype=torch.int32)
    >>> pagedattn.paged_attention(query, cache, cache, table, length, kv_layout="NHD").shape
    torch.Size([1, 8, 64])
    """
    given = (
        query, key_cache, value_cache, block_tables, seq_lens, scale, out, return_lse, kv_layout,
        query_start_loc, window, softcap, alibi_slopes, sinks, k_scale, v_scale, max_seq_len,
        max_query_len, num_splits, batch_invariant, backend,
    )  # fmt: skip
    if ops.is_compiling():
        return ops.traced_attention(Arguments(*given))
    return admission.attend(given)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    kv_layout: KVLayout = "packed",
    k_scale: float | Tensor | None = None,
    v_scale: float | Tensor | None = None,
) -> None:
    """Write new tokens' keys and values into a paged cache (engines' ``reshape_and_cache``).

    Parameters
    ----------
    key, value : Tensor, ``[num_tokens, kv_heads, head_dim]``
        fp16, bf16 or fp32, any strides.
    key_cache, value_cache : Tensor
        As in `paged_attention`; of the keys' dtype, or float8_e4m3fn, float8_e5m2 or int8, into
        which ``key / k_scale`` is rounded and saturated.
    slot_mapping : Tensor, int64 (or int32) ``[num_tokens]``
        Token t goes to offset ``slot % block_size`` of block ``slot // block_size``; a negative
        slot skips the token. Of two tokens with one slot either may win.
    kv_layout : {"packed", "NHD", "HND"}
    k_scale, v_scale : float or Tensor of 1 or kv_heads elements, optional

    Raises
    ------
    ValueError, TypeError
        For arguments that do not fit, before anything is written. A slot beyond the cache is
        one on a CPU, and on a device with ``PAGEDATTN_CHECK=1``; else it is skipped there.
    UnknownBackend, DeviceError
        If ``PAGEDATTN_BACKEND`` or `use_backend` names a backend that nobody registered, or the
        device was lost.

    Notes
    -----
    A backend of the chain that has a compiled write and is ready does it, else plain torch. They
    write the same, but that torch on a GPU multiplies by the reciprocal of a scale that is a
    number, which may be one rounding off. A warm call on a GPU does not synchronise and can be
    captured.
    """
    given = Write(key, value, key_cache, value_cache, slot_mapping, kv_layout, k_scale, v_scale)
    if ops.is_compiling():
        ops.traced_write(given)
    else:
        cache.write(given)


def merge_states(
    outputs: Tensor | Sequence[Tensor], lses: Tensor | Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Merge the results of attention over disjoint sets of keys into that over all of them.

    Parameters
    ----------
    outputs : Tensor ``[num_states, ..., head_dim]``, or a sequence of ``[..., head_dim]``
    lses : Tensor ``[num_states, ...]``, or a sequence of ``[...]``
        Natural log-sum-exps, −inf for a state over no keys.

    Returns
    -------
    (Tensor ``[..., head_dim]`` of the outputs' dtype, float32 Tensor ``[...]``)
        Merging empty states gives zeros and −inf.

    Raises
    ------
    ValueError, TypeError
        If the shapes do not go together.
    """
    states_out = arguments.stack_states("outputs", outputs)
    states_lse = arguments.stack_states("lses", lses)
    arguments.check_states(states_out, states_lse)
    merged, lse = states.merge(states_out, states_lse.float())
    return merged.to(states_out.dtype), lse
