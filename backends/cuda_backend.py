"""The CUDA backend's place in the chain. Its kernels are not in this version."""

from __future__ import annotations

from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem, Runner

_NOT_BUILT = "this version of pagedattn holds no CUDA kernel yet"


class CudaBackend:
    """Says why the compiled kernel cannot serve; it can be selected by nobody."""

    name = "cuda"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        reasons = [_NOT_BUILT]
        if facts.vendor == "cpu":
            reasons.append("no GPU was found")
        if facts.compiler.path is None:
            reasons.append("no CUDA compiler was found")
            reasons += facts.compiler.rejected
        return reasons

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return [_NOT_BUILT]

    def load(self, problem: Problem) -> Runner:
        raise BackendUnavailable(_NOT_BUILT)

    def remedy(self, facts: Facts) -> str | None:
        return None
