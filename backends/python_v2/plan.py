"""How a call whose lengths are known is cut into work.

A chunk is some query tokens of one sequence; a part is a run of a chunk's key windows. How a
sequence is cut follows from that sequence alone, whatever else is in the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from pagedattn.backends.layouts import CacheShape
from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.running import State, merge_states

# query rows (tokens × group) that share a pass over the keys: enough to make the products
# worth the gather, few enough that the rows of a window stay in a core's cache
CHUNK_ROWS = 768
# keys and values of one window, so that they stay in a core's cache too
WINDOW_BYTES = 2 << 20
# more parts than cores, so that a core that is busy elsewhere does not hold up the others
PARTS_A_CORE = 2


@dataclass
class Chunk:
    """Query tokens of one sequence that share a pass over the keys."""

    sequence: int
    tokens: slice  # of the call's query
    position: int  # of the first token, in the sequence
    states: list[State | None] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def deliver(self, index: int, state: State) -> State | None:
        """Keep one part's state; the whole chunk's, once every part's is there."""
        with self.lock:
            self.states[index] = state
            states = [one for one in self.states if one is not None]
        return merge_states(states) if len(states) == len(self.states) else None


@dataclass
class Part:
    """A run of a chunk's key windows: what one core does in one go."""

    chunk: Chunk
    index: int
    windows: list[tuple[int, int]]

    @property
    def num_keys(self) -> int:
        return self.windows[-1][1] - self.windows[0][0]


def window_tokens(call: Call, shape: CacheShape, span: int) -> int:
    """How many keys a window has at most, in a sequence of which `span` keys are seen."""
    key_bytes = 2 * shape.num_kv_heads * shape.head_dim * call.query.dtype.itemsize
    size = max(1, WINDOW_BYTES // key_bytes)
    if call.num_splits is not None:
        size = max(1, min(size, span // call.num_splits))
    return size - size % shape.block_size if size >= shape.block_size else size


def cut(start: int, stop: int, size: int, block_size: int) -> Iterator[tuple[int, int]]:
    """Windows of at most `size` keys over ``[start, stop)``.

    No window of less than a block reaches into the next block: it would gather two.
    """
    while start < stop:
        end = min(stop, start - start % size + size)
        if size < block_size:
            end = min(end, start - start % block_size + block_size)
        yield start, end
        start = end


def plan_sequence(
    call: Call, shape: CacheShape, sequence: int, tokens: slice, length: int
) -> Iterator[Part]:
    """The parts of one sequence's work.

    Parameters
    ----------
    tokens : the sequence's query tokens, of which each sees a key
    length : of the sequence, these tokens included
    """
    position = length - (tokens.stop - tokens.start)
    step = max(1, CHUNK_ROWS // (call.query.shape[1] // shape.num_kv_heads))
    most_parts = PARTS_A_CORE * torch.get_num_threads()
    for at in range(tokens.start, tokens.stop, step):
        chunk_tokens = slice(at, min(tokens.stop, at + step))
        chunk = Chunk(sequence, chunk_tokens, position + at - tokens.start)
        oldest = 0 if call.window is None else max(0, chunk.position - call.window + 1)
        newest = chunk.position + chunk_tokens.stop - at
        size = window_tokens(call, shape, newest - oldest)
        windows = list(cut(oldest, newest, size, shape.block_size))
        # a long prompt's chunks keep the cores busy; a decode step has only its keys to share
        share = -(-len(windows) // (1 if tokens.stop - tokens.start > step else most_parts))
        runs = [windows[i : i + share] for i in range(0, len(windows), share)]
        chunk.states = [None] * len(runs)
        yield from (Part(chunk, index, run) for index, run in enumerate(runs))
