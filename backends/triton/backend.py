"""The Triton backend's side of the chain: whether it may run here, and what it can do."""

from __future__ import annotations

import os

from pagedattn.backends.facts import Facts
from pagedattn.backends.platform_rules import triton_refusal
from pagedattn.backends.protocol import Problem, Runner

MAX_HEAD_DIM = 512
MAX_GROUP = 128


class TritonBackend:
    """Split-KV kernels in Triton, compiled by it on first use."""

    name = "triton"

    def not_present_reasons(self, facts: Facts) -> list[str]:
        reasons = []
        if facts.triton.version is None:
            reasons.append("Triton is not installed")
        # with a device that it may hang among several, it is refused on all of them
        refusals = [triton_refusal(facts, device) for device in facts.devices or (None,)]
        reasons += dict.fromkeys(r for r in refusals if r and facts.triton.version)
        if not facts.has_gpu and not facts.triton.interpret:
            reasons.append("no GPU was found (TRITON_INTERPRET=1 runs it on a CPU, for tests)")
        return reasons

    def not_supported_reasons(self, problem: Problem) -> list[str]:
        reasons = []
        if problem.device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
            reasons.append("the tensors are on a CPU, and TRITON_INTERPRET=1 is not set")
        if problem.query_part == "short":
            reasons.append("it serves sequences of any number of query tokens, or the long ones")
        if problem.head_dim > MAX_HEAD_DIM:
            reasons.append(f"head_dim is {problem.head_dim}, more than {MAX_HEAD_DIM}")
        if problem.group > MAX_GROUP:
            reasons.append(f"{problem.group} query heads share a KV head, more than {MAX_GROUP}")
        return reasons

    def load(self, problem: Problem) -> Runner:
        # imported here: importing Triton takes long, and on some machines fails without a driver
        from pagedattn.backends.triton.launch import TritonRunner

        return TritonRunner(problem)

    def remedy(self, facts: Facts) -> str | None:
        # never on a vendor's image: there the stock Triton may hang the card
        if facts.triton.version is None and facts.vendor == "nvidia":
            return "pip install 'triton>=2.1'"
        return None
