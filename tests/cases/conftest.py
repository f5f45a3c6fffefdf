"""The cases judge a backend's numbers themselves."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong backend must fail the test that names the fault, not every test at its binding."""
    monkeypatch.setenv("PAGEDATTN_VERIFY", "off")
