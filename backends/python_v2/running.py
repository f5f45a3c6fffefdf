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


class RunningState:
    """The state over the windows walked so far, merged in place.

    The maths of `states.merge` for two states: the weights of both are a sigmoid of the
    difference of their log-sum-exps. In place, since a decode step's state is small and its
    windows are many: a stack of states would be passed over several times.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Add the state over one more window; where `lse` is −inf, `out` must be finite."""
        if self._out is None or self._lse is None:
            self._out, self._lse = out.float(), lse
            return
        # two empty states: −inf − −inf
        weight = torch.sigmoid(lse - self._lse).nan_to_num_(0.0)
        self._out.lerp_(out.float(), weight.unsqueeze(-1))
        torch.logaddexp(self._lse, lse, out=self._lse)

    def total(self) -> State:
        """The state over all windows, float32; at least one was added."""
        if self._out is None or self._lse is None:
            raise RuntimeError("no window was walked")
        return self._out, self._lse


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
