"""A problem in words, the same in errors, in the report and in the commands."""

from __future__ import annotations

from collections.abc import Mapping

from pagedattn.backends.protocol import SHORT_QUERIES, Problem
from pagedattn.record import Part

_FEATURES = ("varlen_query", "window", "softcap", "alibi", "sinks", "return_lse", "batch_invariant")


def describe(p: Problem) -> str:
    """Such as ``float16, packed, 24/4/256, blocks of 16, window``.

    The sizes are query heads / KV heads / head_dim.
    """
    dtype, kv_dtype = (str(d).removeprefix("torch.") for d in (p.dtype, p.kv_dtype))
    types = dtype if dtype == kv_dtype else f"{dtype} over {kv_dtype}"
    scales = [] if p.kv_scales == "none" else [f"{p.kv_scales} scales".replace("_", "-")]
    features = [name for name in _FEATURES if getattr(p, name)]
    if p.query_part != "all":
        features.append(f"the {p.query_part} sequences of a call")
    if p.few_queries:
        features.append(f"up to {p.few_queries} query tokens a sequence")
    sizes = f"{p.num_heads}/{p.num_kv_heads}/{p.head_dim}"
    return ", ".join([types, p.kv_layout, sizes, f"blocks of {p.block_size}", *scales, *features])


def describe_parts(parts: Mapping[Part, str], few_queries: int) -> str:
    """Such as ``cuda in calls of up to 4 query tokens a sequence, triton in the others``; of parts
    as a `Binding` has them, and nothing where one backend serves all."""
    told: dict[Part, str] = {
        "few": f"in calls of up to {few_queries} query tokens a sequence",
        "more": "in the others",
        "short": f"up to {SHORT_QUERIES} query tokens of a sequence",
        "long": "beyond",
    }
    return ", ".join(f"{name} {told[part]}" for part, name in parts.items() if part in told)
