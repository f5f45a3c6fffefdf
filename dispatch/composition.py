"""One call by two backends: the sequences with few query tokens by one, the others by another.

No length is read for it: each part is given the whole call and leaves the other's rows alone.
"""

from __future__ import annotations

from pagedattn.backends.protocol import SHORT_QUERIES, Call, Runner


class Composed:
    """Runs a call as two parts, or by the first backend alone where no sequence can be long.

    Parameters
    ----------
    short, long : loaded for a problem with that `query_part`
    """

    def __init__(self, short: Runner, long: Runner) -> None:
        self._short = short
        self._long = long

    def __call__(self, call: Call) -> None:
        longest = call.max_query_len
        if longest <= SHORT_QUERIES:
            self._short(call)
            return
        call.query_part, call.max_query_len = "short", SHORT_QUERIES
        self._short(call)
        call.query_part, call.max_query_len = "long", longest
        self._long(call)
