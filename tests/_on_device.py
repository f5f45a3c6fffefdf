"""What the tests of the CUDA backend's own kernels on a GPU share."""

from __future__ import annotations

import pytest

from pagedattn import registry
from pagedattn.backends.cuda.launch import CudaRunner
from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.protocol import Problem
from pagedattn.probe import facts


def loaded(problem: Problem, config: pytest.Config) -> CudaRunner:
    """The kernels for `problem`, compiled where ``--cuda-cache`` allows it; else the test is
    skipped with what is missing."""
    backend = registry.get("cuda")
    if absent := backend.not_present_reasons(facts()):
        pytest.skip("; ".join(absent))
    try:
        runner = backend.load(problem)
    except BackendUnavailable as error:
        if config.option.cuda_cache is not None:
            raise
        pytest.skip(str(error))  # no cache was named, so nothing is compiled here
    assert isinstance(runner, CudaRunner)
    return runner
