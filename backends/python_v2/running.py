"""States merged as they come, so that a walk of any length keeps only a few."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.states import merge

State = tuple[Tensor, Tensor]  # output [..., head_dim], float32 log-sum-exp [...]


def merge_states(states: list[State]) -> State:
    """One state of several; float32 unless it is the only one."""
    if len(states) == 1:
        return states[0]
    return merge(
        torch.stack([out.float() for out, _ in states]), torch.stack([lse for _, lse in states])
    )


# a decode step's states are small: so many of them are kept, then merged in one go
PENDING_STATES = 16
PENDING_BYTES = 4 << 20


class RunningState:
    """The state over the windows walked so far: the maths of `states.merge`, with less memory.

    Operations are few on purpose. Each of them lets another thread take the interpreter, and
    waiting to have it back costs more than the operation.
    """

    def __init__(self) -> None:
        self._states: list[State] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the state over one more window; where `lse` is −inf, `out` must be finite."""
        self._states.append((out, lse))
        most = max(2, min(PENDING_STATES, PENDING_BYTES // max(1, 4 * out.numel())))
        if len(self._states) >= most:
            self._states = [self._merged()]

    def total(self) -> State:
        """The state over all windows, float32; at least one was added."""
        return self._merged()

    def _merged(self) -> State:
        if len(self._states) == 1:
            out, lse = self._states[0]
            return out.float(), lse
        if len(self._states) == 2:
            return _merge_into(*self._states)
        lses = torch.stack([lse for _, lse in self._states])
        total = torch.logsumexp(lses, dim=0)
        # −inf − −inf, where all states are empty
        weights = lses.sub_(total).exp_().nan_to_num_(0.0).unsqueeze(-1)
        outs = torch.stack([out for out, _ in self._states]).float()
        return outs.mul_(weights).sum(dim=0), total


def _merge_into(first: State, second: State) -> State:
    """The state of two, in the memory of the first: the weights are a sigmoid."""
    out, lse = first[0].float(), first[1]
    weight = torch.sigmoid(second[1] - lse).nan_to_num_(0.0)  # of two empty states: NaN
    out.lerp_(second[0].float(), weight.unsqueeze(-1))
    return out, torch.logaddexp(lse, second[1])


class StateStack:
    """States kept side by side and merged together: few launches, for a device.

    Parameters
    ----------
    most_states, most_bytes : kept at a time; at least two states are
    """

    def __init__(self, most_states: int, most_bytes: int) -> None:
        self._most_states = most_states
        self._most_bytes = most_bytes
        self._states: list[State] = []

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the state over one more window; where `lse` is −inf, `out` means nothing."""
        self._states.append((out, lse))
        size = 4 * out.numel() * len(self._states)
        full = len(self._states) >= self._most_states or size > self._most_bytes
        if full and len(self._states) > 1:
            self._states = [merge_states(self._states)]

    def total(self) -> State:
        """The state over all windows; at least one was added."""
        return merge_states(self._states)
