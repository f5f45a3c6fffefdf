"""The Triton backend's place in the chain. Its kernels are not in this version."""

from __future__ import annotations

from pagedattn.backends.errors import BackendUnavailable
from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Problem, Runner

_NOT_BUILT = "this version of pagedattn holds no Triton kernel yet"


class TritonBackend:
    """Says why Triton cannot serve; it can be selected by nobody."""

    name = "triton"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        reasons = [_NOT_BUILT]
        if facts.triton.version is None:
            reasons.append("Triton is not installed")
        if facts.vendor == "cpu" and not facts.triton.interpret:
            reasons.append("no GPU was found, and TRITON_INTERPRET=1 is not set")
        return reasons

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return [_NOT_BUILT]

    def load(self, problem: Problem) -> Runner:
        raise BackendUnavailable(_NOT_BUILT)

    def remedy(self, facts: Facts) -> str | None:
        return None
