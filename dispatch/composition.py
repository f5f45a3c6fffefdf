"""Two backends behind one binding: they share each call, or each has calls of its own.

No length is read for it: what the host knows of a call decides.
"""

from __future__ import annotations

from pagedattn.backends.protocol import SHORT_QUERIES, Call, Runner


class Composed:
    """Runs a call as two parts, or by the first backend alone where no sequence can be long.

    Each part is given the whole call and leaves the other's rows alone.

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


class FewApart:
    """Runs a call whole, by the one backend or the other.

    Parameters
    ----------
    few : serves the calls in which no sequence has more than `limit` query tokens
    more : serves the others
    """

    def __init__(self, few: Runner, more: Runner, limit: int) -> None:
        self._few = few
        self._more = more
        self._limit = limit

    def __call__(self, call: Call) -> None:
        if call.max_query_len <= self._limit:
            self._few(call)
        else:
            self._more(call)
