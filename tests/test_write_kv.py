"""The cache write: what it puts where, what it leaves alone, and what attention then reads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from _judge import assert_right
from _places import Place, every_dtype, every_kv_dtype, every_layout, every_place
from _scene import Paged, arrange_keys, arrange_values, make_scene, run
from torch import Tensor

import pagedattn
from pagedattn.backends.protocol import KVLayout


def caches(
    layout: KVLayout, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[Tensor, Tensor]:
    """6 blocks of 16 tokens, 2 KV heads of 32, every byte 0x11."""
    dense = torch.full((6, 16, 2, 32 * dtype.itemsize), 0x11, dtype=torch.uint8).view(dtype)
    keys, values = arrange_keys(dense, layout), arrange_values(dense.clone(), layout)
    return keys.to(device), values.to(device)


def at(
    key_cache: Tensor, value_cache: Tensor, layout: KVLayout, slot: int
) -> tuple[Tensor, Tensor]:
    """One slot's key and value ``[kv_heads, head_dim]``, element by element of the layout."""
    block, offset = divmod(slot, 16)
    if key_cache.element_size() == 1:
        key_cache, value_cache = key_cache.view(torch.uint8), value_cache.view(torch.uint8)
    if layout == "NHD":
        return key_cache[block, offset], value_cache[block, offset]
    if layout == "HND":
        return key_cache[block, :, offset], value_cache[block, :, offset]
    return key_cache[block, :, :, offset].flatten(1), value_cache[block, :, :, offset]


def put(
    caches: tuple[Tensor, Tensor], layout: KVLayout, slot: int, key: Tensor, value: Tensor
) -> None:
    """Store one token of fp32 by the layout's own dimensions."""
    block, offset = divmod(slot, 16)
    where: Any = {"NHD": (block, offset), "HND": (block, slice(None), offset)}.get(layout)
    if where is None:
        caches[0][block, :, :, offset] = key.view(2, 8, 4)
        caches[1][block, :, :, offset] = value
    else:
        caches[0][where], caches[1][where] = key, value


def new_tokens(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 2, 32).to(dtype), torch.randn(count, 2, 32).to(dtype)


@every_layout
@every_dtype
@pytest.mark.parametrize("slot_dtype", [torch.int64, torch.int32], ids=["int64", "int32"])
def test_each_token_goes_to_its_slot_and_nowhere_else(
    layout: KVLayout, dtype: torch.dtype, slot_dtype: torch.dtype
) -> None:
    key_cache, value_cache = caches(layout, dtype)
    key, value = new_tokens(4, dtype)
    slots = [33, 0, 95, 16]
    pagedattn.write_kv(
        key, value, key_cache, value_cache, torch.tensor(slots, dtype=slot_dtype), kv_layout=layout
    )
    old = caches(layout, dtype)
    for slot in range(96):
        got = at(key_cache, value_cache, layout, slot)
        token = slots.index(slot) if slot in slots else None
        want = at(*old, layout, slot) if token is None else (key[token], value[token])
        assert torch.equal(got[0], want[0])
        assert torch.equal(got[1], want[1])


@every_layout
@pytest.mark.parametrize(
    "slots", [[-1, 5, -7, 60], [-1, -1, -1, -1], [3, 4, 5, -(2**31)], [-1, -1, -1, 0]]
)
def test_negative_slots_are_skipped(layout: KVLayout, slots: list[int]) -> None:
    key_cache, value_cache = caches(layout)
    key, value = new_tokens(4)
    pagedattn.write_kv(key, value, key_cache, value_cache, torch.tensor(slots), kv_layout=layout)
    wanted = caches(layout)
    for token, slot in enumerate(slots):
        if slot >= 0:
            put(wanted, layout, slot, key[token], value[token])
    assert torch.equal(key_cache, wanted[0])
    assert torch.equal(value_cache, wanted[1])


def test_no_tokens_write_nothing() -> None:
    key_cache, value_cache = caches("packed")
    key, value = new_tokens(0)
    slots = torch.empty(0, dtype=torch.int64)
    pagedattn.write_kv(key, value, key_cache, value_cache, slots)
    assert torch.equal(key_cache, caches("packed")[0])


@every_layout
def test_of_two_tokens_with_one_slot_one_wins_whole(layout: KVLayout) -> None:
    key_cache, value_cache = caches(layout)
    key, value = new_tokens(3)
    slots = torch.tensor([7, 7, 8])
    pagedattn.write_kv(key, value, key_cache, value_cache, slots, kv_layout=layout)
    got_key, got_value = at(key_cache, value_cache, layout, 7)
    assert any(torch.equal(got_key, key[t]) for t in (0, 1))
    assert any(torch.equal(got_value, value[t]) for t in (0, 1))
    assert torch.equal(at(key_cache, value_cache, layout, 8)[0], key[2])


@every_layout
def test_keys_and_values_may_be_slices_of_a_fused_projection(layout: KVLayout) -> None:
    fused = torch.randn(4, 6 + 2 + 2, 32)
    key, value = fused[:, 6:8], fused[:, 8:]
    assert not value.is_contiguous()
    slots = torch.tensor([1, 20, 40, 70])
    got, want = caches(layout), caches(layout)
    pagedattn.write_kv(key, value, *got, slots, kv_layout=layout)
    pagedattn.write_kv(key.contiguous(), value.contiguous(), *want, slots, kv_layout=layout)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dim", [1, 3])
def test_caches_may_be_views_of_one_interleaved_buffer(layout: KVLayout, dim: int) -> None:
    pool = torch.stack(caches(layout), dim=dim)
    key, value = new_tokens(4)
    slots = torch.tensor([1, 20, -1, 70])
    key_cache, value_cache = pool.unbind(dim)
    pagedattn.write_kv(key, value, key_cache, value_cache, slots, kv_layout=layout)
    want = caches(layout)
    pagedattn.write_kv(key, value, *want, slots, kv_layout=layout)
    assert torch.equal(pool, torch.stack(want, dim=dim))


@every_layout
@every_kv_dtype
@pytest.mark.parametrize("form", ["none", "float", "tensor", "per_head"])
def test_quantised_writes_round_to_nearest_after_the_scale(
    layout: KVLayout, kv_dtype: torch.dtype, form: str
) -> None:
    key_cache, value_cache = caches(layout, kv_dtype)
    key, value = (3 * t for t in new_tokens(4))
    k_scale: Any = {
        "none": None, "float": 0.25, "tensor": torch.tensor([0.25]),
        "per_head": torch.tensor([0.25, 0.5]),
    }[form]  # fmt: skip
    slots = torch.tensor([1, 20, 40, 70])
    pagedattn.write_kv(
        key, value, key_cache, value_cache, slots, kv_layout=layout, k_scale=k_scale, v_scale=0.5
    )
    divisor = torch.as_tensor(1.0 if k_scale is None else k_scale).reshape(-1, 1)
    for token, slot in enumerate(slots.tolist()):
        got_key, got_value = at(key_cache, value_cache, layout, slot)
        for got, exact in ((got_key, key[token] / divisor), (got_value, value[token] / 0.5)):
            nearest = exact.round() if kv_dtype == torch.int8 else exact
            assert torch.equal(
                got.contiguous().view(kv_dtype).float(), nearest.to(kv_dtype).float()
            )


@every_layout
@every_kv_dtype
def test_quantised_writes_saturate(layout: KVLayout, kv_dtype: torch.dtype) -> None:
    """Never a wrapped number, an infinity or a NaN for a finite value."""
    key_cache, value_cache = caches(layout, kv_dtype)
    top = 127.0 if kv_dtype == torch.int8 else torch.finfo(kv_dtype).max
    key = torch.tensor([1e30, -1e30]).view(1, 2, 1).expand(1, 2, 32)
    value = torch.tensor([top * 1.2, -top * 1.2]).view(1, 2, 1).expand(1, 2, 32)
    slots = torch.tensor([20])
    pagedattn.write_kv(key, value, key_cache, value_cache, slots, kv_layout=layout)
    for got in at(key_cache, value_cache, layout, 20):
        stored = got.contiguous().view(kv_dtype).float()
        assert torch.equal(stored, torch.tensor([[top], [-top]]).expand(2, 32))


@every_place
@every_layout
@every_dtype
def test_what_is_written_is_what_attention_reads(
    place: Place, layout: KVLayout, dtype: torch.dtype
) -> None:
    """Token by token and in one go, into a cache that held NaN."""
    scene = make_scene([17, 40], dtype=dtype)
    blank = make_scene([17, 40], dtype=dtype)
    for tensors in (blank.keys, blank.values):
        for t in tensors:
            t.fill_(math.nan)
    paged = blank.page(layout, device=place.device)
    _write_scene(scene, paged, place, at_once=True, dtype=dtype)
    assert_right(run(scene, place, paged=paged), scene)
    for t in (paged.key_cache, paged.value_cache):
        t.fill_(math.nan)
    _write_scene(scene, paged, place, at_once=False, dtype=dtype)
    assert_right(run(scene, place, paged=paged), scene)


def _write_scene(
    scene: Any, paged: Paged, place: Place, *, at_once: bool, dtype: torch.dtype, **scales: Any
) -> None:
    for row, (keys, values) in enumerate(zip(scene.keys, scene.values, strict=True)):
        positions = torch.arange(keys.shape[0])
        table = paged.block_tables[row].cpu().long()
        slots = table[positions // 16] * 16 + positions % 16
        for part in [slice(None)] if at_once else [slice(p, p + 1) for p in positions.tolist()]:
            pagedattn.write_kv(
                keys[part].to(place.device, dtype),
                values[part].to(place.device, dtype),
                paged.key_cache,
                paged.value_cache,
                slots[part].to(place.device),
                kv_layout=paged.kv_layout,
                **scales,
            )


@every_place
@every_layout
@every_kv_dtype
def test_quantised_round_trip(place: Place, layout: KVLayout, kv_dtype: torch.dtype) -> None:
    """Written with scales and read with them: attention over the rounded keys and values."""
    scales: dict[str, Any] = {
        "k_scale": torch.tensor([0.03, 0.05]),
        "v_scale": torch.tensor([0.04]),
    }
    stored = make_scene([17, 40], dtype=torch.float16, kv_dtype=kv_dtype, **scales)
    paged = make_scene([17, 40], kv_dtype=kv_dtype).page(layout, device=place.device)
    fine = make_scene([17, 40])
    fine.keys = [t * scales["k_scale"].view(1, 2, 1) for t in stored.keys]
    fine.values = [t * scales["v_scale"] for t in stored.values]
    on_device = {name: t.to(place.device) for name, t in scales.items()}
    # fp32 in: what lies on the grid, times the scale, must come back to the same grid point
    _write_scene(fine, paged, place, at_once=True, dtype=torch.float32, **on_device)
    assert_right(run(stored, place, paged=paged), stored)


def test_caches_of_inference_mode_can_be_written_after_it() -> None:
    """As they can be read: an engine makes them in one place and serves in another."""
    with torch.inference_mode():
        key_cache, value_cache = caches("NHD")
    key, value = new_tokens(1)
    pagedattn.write_kv(key, value, key_cache, value_cache, torch.tensor([17]), kv_layout="NHD")
    found = at(key_cache, value_cache, "NHD", 17)
    assert torch.equal(found[0], key[0])
    assert torch.equal(found[1], value[0])
