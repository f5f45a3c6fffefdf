"""Writing tiles of results to the call's own, without knowing on the host which rows exist."""

from __future__ import annotations

import torch
from torch import Tensor

from pagedattn.backends.protocol import Call
from pagedattn.backends.python_v2.sinks import add_sinks
from pagedattn.backends.python_v2.tiles import Tiles, served


class Results:
    """The results of a call.

    Where tiles can hold rows that do not exist, these are written to one row more than the
    call has tokens, and a token that no tile holds keeps what it was given at the start: NaN if
    it is some sequence's (which then has more than the call says), else zeros and −inf. If it is
    not this backend's to serve, that is what the call's results held.
    """

    def __init__(self, call: Call) -> None:
        self._call = call
        self._out: Tensor | None = None
        self._lse: Tensor | None = None
        if call.query_start_loc is not None:
            rows, heads, dim = call.query.shape
            token = torch.arange(rows + 1, device=call.out.device)
            starts = call.query_start_loc
            owned = (token >= starts[0]) & (token < starts[-1])
            self._out = call.out.new_zeros((rows + 1, heads, dim))
            self._out.masked_fill_(owned[:, None, None], torch.nan)
            if call.lse is not None:
                self._lse = call.lse.new_full((rows + 1, heads), -torch.inf)
                self._lse.masked_fill_(owned[:, None], torch.nan)
            if call.query_part != "all":
                self._keep_others(call, starts, token[:-1])

    def _keep_others(self, call: Call, starts: Tensor, token: Tensor) -> None:
        num_seqs = starts.shape[0] - 1
        # of no sequence: one more, which is the short part's
        mine = torch.nn.functional.pad(
            served(call, starts), (0, 1), value=call.query_part == "short"
        )
        sequence = torch.searchsorted(starts[1:], token.to(starts.dtype), right=True)
        others = ~mine[sequence.clamp(max=num_seqs)]
        for results, held in ((self._out, call.out), (self._lse, call.lse)):
            if results is not None and held is not None:
                mask = others.view(-1, *[1] * (held.dim() - 1))
                results[:-1] = torch.where(mask, held, results[:-1])

    def write(self, tiles: Tiles, out: Tensor, lse: Tensor, bad: Tensor) -> None:
        """Add the sinks and write the rows of some tiles.

        Parameters
        ----------
        out : float32 ``[kv_heads, tiles, rows × group, head_dim]``
        lse : float32 ``[kv_heads, tiles, rows × group]``
        bad : bool ``[tiles]``: these tiles' rows become NaN
        """
        out = _by_token(out, tiles.rows)  # [tiles × rows, H, D]
        lse = _by_token(lse.unsqueeze(-1), tiles.rows).squeeze(-1)  # [tiles × rows, H]
        if self._call.sinks is not None:
            out, lse = add_sinks(out, lse, self._call.sinks)
        bad_rows = bad.repeat_interleave(tiles.rows, output_size=out.shape[0])
        out = out.masked_fill(bad_rows[:, None, None], torch.nan).to(self._call.out.dtype)
        lse = lse.masked_fill(bad_rows[:, None], torch.nan)
        if self._out is None:
            self._write_in_place(tiles, out, lse)
            return
        tokens = tiles.token.flatten()
        self._out.index_copy_(0, tokens, out)
        if self._lse is not None:
            self._lse.index_copy_(0, tokens, lse)

    def _write_in_place(self, tiles: Tiles, out: Tensor, lse: Tensor) -> None:
        """A token a sequence: the tiles are the tokens, in order."""
        rows = slice(tiles.start, tiles.start + len(tiles))
        self._call.out[rows] = out
        if self._call.lse is not None:
            self._call.lse[rows] = lse

    def finish(self) -> None:
        """Leave everything in ``call.out`` and ``call.lse``."""
        if self._out is not None:
            self._call.out.copy_(self._out[:-1])
        if self._lse is not None and self._call.lse is not None:
            self._call.lse.copy_(self._lse[:-1])


def _by_token(rows: Tensor, per_tile: int) -> Tensor:
    """``[kv_heads, tiles, per_tile × group, n]`` as ``[tiles × per_tile, heads, n]``."""
    rows = torch.unflatten(rows, 2, (per_tile, -1))  # [KV, tiles, rows, G, n]
    return rows.permute(1, 2, 0, 3, 4).flatten(2, 3).flatten(0, 1)
