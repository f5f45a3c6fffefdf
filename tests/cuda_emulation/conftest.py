"""What the tests on the emulation share."""

from __future__ import annotations

import pytest
from _emulation import COMPILER, Libraries


@pytest.fixture(scope="session")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Libraries:
    if COMPILER is None:
        pytest.skip("g++ is not installed")
    return Libraries(tmp_path_factory.mktemp("emulated"))
