"""Asking for backends: by argument, by `use_backend`, by the variable; none is ever ignored."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from typing import Any

import pytest
from _backends import FakeBackend, inputs
from _backends import fresh_chain as fresh_chain

from pagedattn import (
    chain,
    paged_attention,
    register_backend,
    use_backend,
)
from pagedattn.backends.errors import (
    BackendUnavailable,
    BuildError,
    UnknownBackend,
    VerificationError,
)
from pagedattn.request import Request, parse

pytestmark = pytest.mark.usefixtures("fresh_chain")


@pytest.mark.parametrize("how", ["argument", "use_backend", "environment"])
@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ({"absent": ("no card",)}, BackendUnavailable),
        ({"unsupported": ("no NHD",)}, BackendUnavailable),
        ({"load_fails": "build"}, BuildError),
        ({"load_fails": "import"}, BackendUnavailable),
        ({"run_fails": "wrong"}, VerificationError),
        ({"run_fails": "raises"}, VerificationError),
    ],
)
def test_case_28_a_forced_backend_is_never_left(
    how: str, fault: dict[str, Any], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    register_backend(FakeBackend("acme", **fault))
    if how == "environment":
        monkeypatch.setenv("PAGEDATTN_BACKEND", "acme")
    context = use_backend("acme") if how == "use_backend" else contextlib.nullcontext()
    with context, pytest.raises(kind) as caught:
        paged_attention(*inputs(), kv_layout="NHD", backend="acme" if how == "argument" else None)
    assert type(caught.value) is kind
    assert "acme: " in str(caught.value)
    # advice that would help: an argument and a `with` block go before the variable
    advice = "PAGEDATTN_BACKEND=torch" if how == "environment" else "ask for torch"
    assert f"to go on here: {advice} (or auto" in str(caught.value)
    assert chain.bindings() == ()


def test_case_28_an_unknown_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownBackend, match=r"'tritonn' \(did you mean triton\?\)"):
        paged_attention(*inputs(), kv_layout="NHD", backend="tritonn")
    with pytest.raises(UnknownBackend, match="did you mean torch"), use_backend("torhc"):
        pass
    monkeypatch.setenv("PAGEDATTN_BACKEND", "referense")
    with pytest.raises(UnknownBackend, match="did you mean reference"):
        paged_attention(*inputs(), kv_layout="NHD")


def test_parse() -> None:
    assert parse("") is None
    assert parse(" auto ") is None
    assert parse("Torch, reference,") == ("torch", "reference")
    assert parse(["torch"]) == ("torch",)
    assert parse("torch,reference,torch") == ("torch", "reference")  # twice is no second try
    with pytest.raises(UnknownBackend, match="auto stands alone"):
        parse("auto,torch")
    for wrong in (3, None, b"torch", ["torch", 3]):
        with pytest.raises(TypeError, match="a backend is a name"):
            parse(wrong)  # type: ignore[arg-type]


def test_the_variable_counts_when_it_is_set_after_import(monkeypatch: pytest.MonkeyPatch) -> None:
    register_backend(FakeBackend("acme"))
    register_backend(FakeBackend("beta"))
    for name in ("acme", "beta", "acme"):
        monkeypatch.setenv("PAGEDATTN_BACKEND", name)
        paged_attention(*inputs(), kv_layout="NHD")
    assert {b.backend: b.calls for b in chain.bindings()} == {"acme": 2, "beta": 1}


def test_an_argument_goes_before_use_backend_and_that_before_the_variable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGEDATTN_BACKEND", "cuda")
    assert Request.current(None).names == ("cuda",)
    with use_backend("torch"):
        assert Request.current(None) == Request(("torch",), "use_backend('torch')")
        assert Request.current("reference").names == ("reference",)
        with use_backend(["triton", "cuda"]):
            assert Request.current(None).names == ("triton", "cuda")
            with use_backend("auto"):
                assert Request.current(None).names is None
        assert Request.current(None).names == ("torch",)
    assert Request.current(None) == Request(("cuda",), "PAGEDATTN_BACKEND=cuda")


def test_use_backend_ends_with_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), use_backend("torch"):
        raise ZeroDivisionError
    assert Request.current(None).names is None


def test_use_backend_is_of_one_thread() -> None:
    seen: list[Any] = []
    with use_backend("torch"):
        other = threading.Thread(target=lambda: seen.append(Request.current(None).names))
        other.start()
        other.join()
    assert seen == [None]


def test_use_backend_is_of_one_task() -> None:
    async def task(name: str) -> Any:
        with use_backend(name):
            await asyncio.sleep(0.01)
            return Request.current(None).names

    async def both() -> Any:
        return await asyncio.gather(task("torch"), task("cuda"), task("reference"))

    assert asyncio.run(both()) == [("torch",), ("cuda",), ("reference",)]
