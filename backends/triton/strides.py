"""One addressing for every cache layout."""

from __future__ import annotations

from pagedattn.backends.protocol import Call


def cache_strides(call: Call) -> dict[str, int]:
    """Where token t, element d of a block's head lies, in elements.

    A key at ``t · K_TOKEN + (d // X) · K_CHUNK + d % X``, a value at ``t · V_TOKEN + d · V_DIM``.
    """
    k, v = call.key_cache.stride(), call.value_cache.stride()
    if call.kv_layout == "packed":
        return {
            "K_BLOCK": k[0], "K_HEAD": k[1], "K_TOKEN": k[3], "K_CHUNK": k[2],
            "X": call.key_cache.shape[-1],
            "V_BLOCK": v[0], "V_HEAD": v[1], "V_TOKEN": v[3], "V_DIM": v[2],
        }  # fmt: skip
    token, head = (1, 2) if call.kv_layout == "NHD" else (2, 1)
    return {
        "K_BLOCK": k[0], "K_HEAD": k[head], "K_TOKEN": k[token], "K_CHUNK": 0,
        "X": 1 << (call.query.shape[2] - 1).bit_length(),
        "V_BLOCK": v[0], "V_HEAD": v[head], "V_TOKEN": v[token], "V_DIM": 1,
    }  # fmt: skip


def value_run(call: Call, tile: int) -> int:
    """Tokens whose packed values lie side by side from a multiple of as many: a wide load's."""
    if call.kv_layout != "packed":
        return 1
    cache = call.value_cache
    itemsize = cache.element_size()
    steps = (tile, cache.shape[-1], *cache.stride()[:3])
    run = 16 // itemsize
    while run > 1 and (any(s % run for s in steps) or cache.data_ptr() % (run * itemsize)):
        run //= 2
    return run


def takes_words(call: Call) -> bool:
    """Whether elements of an eight-bit cache can be read two at a time: its dimensions lie side
    by side, and each token's at an even place."""
    return call.kv_layout != "packed" and all(
        cache.stride(-1) == 1
        and not any(step % 2 for step in cache.stride()[:-1])
        and cache.data_ptr() % 2 == 0
        for cache in (call.key_cache, call.value_cache)
    )
