"""The torch path as a backend of the chain."""

from __future__ import annotations

from pagedattn.backends.facts import Facts
from pagedattn.backends.protocol import Call, Problem, Runner
from pagedattn.backends.python_v2.device_road import run_without_host_lengths
from pagedattn.backends.python_v2.host_road import run_with_host_lengths
from pagedattn.backends.python_v2.precision import exact_arithmetic


class TorchBackend:
    """Plain torch operations; serves every problem on every device that torch knows."""

    name = "torch"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        return []

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        return []

    def load(self, problem: Problem) -> Runner:
        return run

    def remedy(self, facts: Facts) -> str | None:
        return None


def run(call: Call) -> None:
    """Write ``call.out`` and ``call.lse``."""
    with exact_arithmetic(call.out):
        if call.host_seq_lens is not None:
            run_with_host_lengths(call, call.host_seq_lens)
        else:
            run_without_host_lengths(call)
