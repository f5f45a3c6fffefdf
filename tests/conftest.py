"""What every test gets: a clean environment, fresh seeds, NaN in uninitialised memory."""

from __future__ import annotations

import os
import random
import secrets
import zlib
from collections.abc import Callable, Generator
from typing import Any

# OpenMP's threads spin while they wait; where others use the cores too, the many small products
# here would take five times as long
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch

# before anything imports pagedattn, which reads some of them at import
for _name in [name for name in os.environ if name.startswith("PAGEDATTN_")]:
    del os.environ[_name]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", type=int, default=None, help="repeat the random inputs of an earlier run"
    )
    parser.addoption(
        "--cuda-cache",
        default=None,
        metavar="FOLDER",
        help="judge the CUDA backend on a GPU too: compile what the tests need, keep it in FOLDER "
        "(write --cuda-cache=FOLDER: a folder that exists would be taken for one of tests)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = secrets.randbelow(2**31)
    if config.option.cuda_cache is not None:
        os.environ["PAGEDATTN_BUILD"] = "always"


def pytest_report_header(config: pytest.Config) -> str:
    return f"random inputs: --seed={config.option.seed}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, Any, None]:
    """Beside a failure, say how to get the same inputs again."""
    report = (yield).get_result()
    if report.failed:
        report.sections.append(("random inputs", f"repeat with --seed={item.config.option.seed}"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    # asking torch would initialise the driver here, and some tests fork
    from pagedattn.probe import facts

    if facts().vendor == "cpu" or not facts().devices:
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and none was found"))


@pytest.fixture(autouse=True)
def _seeded(request: pytest.FixtureRequest) -> None:
    """Inputs that differ from run to run and from test to test, and can be had again."""
    seed = zlib.crc32(f"{request.config.option.seed} {request.node.nodeid}".encode())
    random.seed(seed)
    torch.manual_seed(seed)


@pytest.fixture(autouse=True, scope="session")
def _own_cache_dir(
    pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory
) -> Generator[None, None, None]:
    """No verdict or binary of this machine is read, and none is left behind."""
    folder = pytestconfig.option.cuda_cache or tmp_path_factory.mktemp("pagedattn-cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGEDATTN_CACHE_DIR", str(folder))
        yield


def _filled(function: Callable[..., Any]) -> Callable[..., Any]:
    def fill(*args: Any, **kwargs: Any) -> Any:
        made = function(*args, **kwargs)
        if type(made) is not torch.Tensor or made.device.type == "meta":
            return made  # a tracer's or a subclass's: its memory is not ours
        if made.dtype.is_floating_point and made.element_size() > 1:
            return made.fill_(float("nan"))
        if made.element_size() == 1:  # fp8 cannot be filled everywhere; all ones is its NaN
            made.view(torch.uint8).fill_(255)
            return made
        return made.fill_(torch.iinfo(made.dtype).max) if not made.is_complex() else made

    return fill


@pytest.fixture(autouse=True)
def nan_in_new_memory() -> Generator[pytest.MonkeyPatch, None, None]:
    """Uninitialised memory is NaN (integers: the largest), so that reading it shows.

    torch can do so itself, but only from 2.2 on and only in its deterministic mode, which
    changes the operators under test. `.undo()` for a test that traces through these functions.
    """
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "empty_like", "empty_strided"):
            patch.setattr(torch, name, _filled(getattr(torch, name)))
        for name in ("new_empty", "new_empty_strided"):
            patch.setattr(torch.Tensor, name, _filled(getattr(torch.Tensor, name)))
        yield patch
