"""States merged as they come, so that a walk of any length keeps only a few."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.states import merge

State = tuple[Tensor, Tensor]  # output [..., head_dim], float32 log-sum-exp [...]

# states kept before they are merged: a merge has a fixed cost, a state a size
KEEP_STATES = 32
KEEP_BYTES = 2 << 20


def merge_states(states: list[State]) -> State:
    """One state of several; float32 unless it is the only one."""
    if len(states) == 1:
        return states[0]
    return merge(
        torch.stack([out.float() for out, _ in states]), torch.stack([lse for _, lse in states])
    )


class RunningState:
    """The state over the windows walked so far."""

    def __init__(self, keep_states: int = KEEP_STATES, keep_bytes: int = KEEP_BYTES) -> None:
        self._states: list[State] = []
        self._keep_states = keep_states
        self._keep_bytes = keep_bytes

    def add(self, state: State) -> None:
        """Add the state over one more window."""
        self._states.append(state)
        size = 4 * state[0].numel() * len(self._states)
        full = len(self._states) >= self._keep_states or size > self._keep_bytes
        if full and len(self._states) > 1:
            self._states = [merge_states(self._states)]

    def total(self) -> State:
        """The state over all windows; at least one was added."""
        return merge_states(self._states)
