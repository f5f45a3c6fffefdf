"""A warm launch, with a stand-in for what Triton compiled: what reaches its launcher."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter has no launcher", allow_module_level=True)

import triton
import triton.language as tl

from pagedattn.backends.triton import fast_launch

NUMBERS = (3, 0.5)


@triton.jit
def _kernel(a_ptr, b_ptr, c_ptr, number, fraction, SIZE: tl.constexpr, FLAG: tl.constexpr):
    pass


class Compiled:
    """As Triton's: `run` is its launcher, which is here told apart by what compiled it."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, log: list[tuple[Any, ...]]) -> None:
        self.run = lambda *arguments: log.append(("warm", self, *arguments))


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    seen: list[tuple[Any, ...]] = []

    def jitted(self: Any, *arguments: Any, **keywords: Any) -> Compiled:
        seen.append(("cold", arguments, keywords))
        return Compiled(seen)

    if not hasattr(triton.runtime.JITFunction, "run"):
        pytest.skip(
            "this Triton makes a kernel's launcher when it is declared: none to stand in for"
        )
    monkeypatch.setattr(triton.runtime.JITFunction, "run", jitted)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: "stream", raising=False)
    return seen


def _launch(kernel: fast_launch.FastKernel) -> fast_launch.Launch:
    return fast_launch.Launch(kernel, (1, 2, 3), NUMBERS)


@pytest.mark.skipif(not fast_launch._KNOWN, reason="this Triton's launcher is not known")
def test_a_warm_launch_hands_over_addresses_and_every_constant(log: list[Any]) -> None:
    kernel = fast_launch.FastKernel(_kernel, {"FLAG": True, "SIZE": 16}, {"num_warps": 2})
    a, b = torch.zeros(8), torch.zeros(8)
    launch = _launch(kernel)
    launch((a, b, None))
    # what is absent is stood in for, as Triton must know a pointer's type
    assert log[0][0] == "cold"
    assert log[0][1] == (a, b, a, *NUMBERS)
    assert log[0][2]["num_warps"] == 2
    other = torch.zeros(8)
    launch((other, b, None))
    assert log[1][0] == "warm"
    assert log[1][2:] == (
        1, 2, 3, "stream", "function", "metadata", None, None, None,
        other.data_ptr(), b.data_ptr(), 0, *NUMBERS, 16, True,
    )  # fmt: skip


@pytest.mark.skipif(not fast_launch._KNOWN, reason="this Triton's launcher is not known")
def test_addresses_alone_will_do_once_the_launcher_is_there(log: list[Any]) -> None:
    kernel = fast_launch.FastKernel(_kernel, {"SIZE": 16, "FLAG": True}, {})
    launch, a = _launch(kernel), torch.zeros(8)
    for _ in range(2):
        assert not launch.again(5, (48, 64, 0)), "nothing is compiled, or nobody looked for it"
        launch((a, a, None))
    assert launch.again(5, (48, 64, 0))
    assert [entry[0] for entry in log] == ["cold", "warm", "warm"]
    assert log[2][2:] == (
        1, 2, 3, 5, "function", "metadata", None, None, None, 48, 64, 0, *NUMBERS, 16, True,
    )  # fmt: skip


@pytest.mark.skipif(not fast_launch._KNOWN, reason="this Triton's launcher is not known")
def test_pointers_aligned_otherwise_have_their_own_kernel(log: list[Any]) -> None:
    kernel = fast_launch.FastKernel(_kernel, {"SIZE": 16, "FLAG": True}, {})
    a, odd = torch.zeros(8), torch.zeros(8)[1:]
    for pointers in ((a, a, None), (a, odd, None), (a, a, None), (a, odd, None)):
        _launch(kernel)(pointers)
    assert [entry[0] for entry in log] == ["cold", "cold", "warm", "warm"]
    assert log[2][1] is not log[3][1]


def test_an_unknown_release_goes_by_tritons_own_road(
    log: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fast_launch, "_KNOWN", False)
    kernel = fast_launch.FastKernel(_kernel, {"SIZE": 16, "FLAG": True}, {})
    launch, a = _launch(kernel), torch.zeros(8)
    launch((a, a, a))
    launch((a, a, a))
    assert [entry[0] for entry in log] == ["cold", "cold"]
