"""A paged cache by hand: write a prompt's keys and values, then one decode step over them."""

from __future__ import annotations

import torch

import pagedattn

num_heads, num_kv_heads, head_dim, block_size = 8, 2, 64, 16

# Room for 32 blocks of 16 tokens; both caches are [num_blocks, block_size, kv_heads, head_dim].
key_cache = torch.zeros(32, block_size, num_kv_heads, head_dim)
value_cache = torch.zeros_like(key_cache)

# A sequence of 40 tokens lies in any three blocks; its table says which, in order.
block_tables = torch.tensor([[21, 4, 30]], dtype=torch.int32)
seq_lens = torch.tensor([40], dtype=torch.int32)
positions = torch.arange(40)
slot_mapping = block_tables[0, positions // block_size].long() * block_size + positions % block_size

key, value = torch.randn(2, 40, num_kv_heads, head_dim)
pagedattn.write_kv(key, value, key_cache, value_cache, slot_mapping, kv_layout="NHD")

# Decode: the query of the newest token, the 40th, over all 40.
query = torch.randn(1, num_heads, head_dim)
out = pagedattn.paged_attention(
    query, key_cache, value_cache, block_tables, seq_lens, kv_layout="NHD"
)
print("output", tuple(out.shape))

# Which backend did it, and where to look for the reasons (`pagedattn report` prints them all).
chain = pagedattn.capability_report()["chain"]
print(f"chain: {chain['requested']} resolved to {chain['resolved']}")
