"""The order of the chain: one table per vendor, the reason beside each entry."""

from __future__ import annotations

from typing import NamedTuple

from pagedattn.backends.facts import Vendor


class Entry(NamedTuple):
    name: str
    reason: str


FLOOR = Entry("torch", "plain torch: slower, but runs anywhere and needs nothing built")

ORDER: dict[Vendor, tuple[Entry, ...]] = {
    "nvidia": (
        Entry("cuda", "measured: at the memory's speed in every layout; waits to be built"),
        Entry("triton", "measured: near the memory's speed in NHD and HND; compiles itself"),
        FLOOR,
    ),
    "corex": (
        Entry("cuda", "the portable kernel, compiled by the vendor's own compiler"),
        Entry("triton", "only where the vendor's Triton is known not to hang the card"),
        FLOOR,
    ),
    "other": (FLOOR,),
    "cpu": (
        FLOOR,
        Entry("triton", "needs a GPU; its interpreter is for tests and must be forced"),
        Entry("cuda", "needs a GPU; listed so that the report can say so"),
    ),
}


#: made for few query tokens of a sequence: the other sequences of a call go to the next backend of
#: the chain that takes them
SHORT_FIRST = {"cuda": "its kernels take a few rows at a time, which a long prefill pays for"}


def order(vendor: Vendor, device_type: str) -> tuple[str, ...]:
    """Backend names in the order in which the automatic chain tries them."""
    return tuple(entry.name for entry in ORDER["cpu" if device_type == "cpu" else vendor])


def reason(name: str, vendor: Vendor, device_type: str) -> str | None:
    """Why the automatic chain has `name` where it has it; None if it is not in it."""
    entries = ORDER["cpu" if device_type == "cpu" else vendor]
    return next((entry.reason for entry in entries if entry.name == name), None)
