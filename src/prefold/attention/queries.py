"""A layer's queries, each request in the form of attention that is cheaper for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.forms import KVForms
from prefold.attention.walk import Walk
from prefold.workspace import Workspace


class LayerQueries:
    """Queries of several requests. In the plain form they are attended as they are; absorbed ones have rows
    of their own in other buffers.

    Args:
        q: [num_tokens, num_heads, qk_head_dim].
        requests: (tokens of q, absorbed?) of each request; ascending.
        name: of the buffers: objects that live at the same time have different names.
    """

    def __init__(
        self,
        q: torch.Tensor,
        requests: Sequence[tuple[slice, bool]],
        forms: KVForms,
        scale: float,
        backend: AttentionBackend,
        workspace: Workspace,
        name: str,
    ) -> None:
        self._form = form = forms.absorbed
        self._backend = backend
        self._absorbed: list[slice] = []
        self._rows: list[slice | None] = []
        self.walks: list[Walk] = []
        if not requests:
            return
        chosen = [forms.choose(absorbed) for _, absorbed in requests]
        is_changed = [one is not forms.plain for one in chosen]
        # Absorbed neighbours (decode tokens) share one projection.
        self._absorbed = _neighbours_joined([tokens for (tokens, _), c in zip(requests, is_changed) if c])
        num_rows = sum(tokens.stop - tokens.start for tokens in self._absorbed)
        shape = (num_rows, q.shape[1])
        absorbed_q = workspace.get(f"{name}.absorbed_q", (*shape, form.q_dim), torch.float32)
        self._absorbed_out = workspace.get(f"{name}.absorbed_out", (*shape, form.out_dim), torch.float32)
        for tokens, rows in self._absorbed_rows():
            form.queries(q[tokens], absorbed_q[rows])

        queries: list[Queries] = []
        start = 0
        for (tokens, _), one, changed in zip(requests, chosen, is_changed):
            rows = None
            if changed:
                rows = slice(start, start + tokens.stop - tokens.start)
                start = rows.stop
            own = q[tokens] if rows is None else absorbed_q[rows]
            queries.append(Queries(own, one.num_kv_heads, one.out_dim))
            self._rows.append(rows)
        states = backend.start(queries, scale, name)
        self.walks = [
            Walk(tokens, state, one.keys_values) for (tokens, _), state, one in zip(requests, states, chosen)
        ]

    def lse(self, lse: torch.Tensor, requests: Sequence[int]) -> None:
        """Write the log-sum-exp of some requests to lse [num_tokens, num_heads] float32, before `finish`."""
        for i in requests:
            lse[self.walks[i].tokens].copy_(self._backend.lse(self.walks[i].state))

    def finish(self, out: torch.Tensor) -> None:
        """Write all results to out [num_tokens, num_heads, v_head_dim]."""
        for walk, rows in zip(self.walks, self._rows):
            self._backend.finish(walk.state, out[walk.tokens] if rows is None else self._absorbed_out[rows])
        for tokens, rows in self._absorbed_rows():
            self._form.results(self._absorbed_out[rows], out[tokens])

    def _absorbed_rows(self) -> list[tuple[slice, slice]]:
        """(tokens, rows of the other buffers) of the absorbed requests, neighbours together."""
        pairs = []
        start = 0
        for tokens in self._absorbed:
            rows = slice(start, start + tokens.stop - tokens.start)
            start = rows.stop
            pairs.append((tokens, rows))
        return pairs


def _neighbours_joined(slices: Sequence[slice]) -> list[slice]:
    """
    >>> _neighbours_joined([slice(0, 2), slice(2, 3), slice(5, 6)])
    [slice(0, 3, None), slice(5, 6, None)]
    """
    joined: list[slice] = []
    for piece in slices:
        if joined and joined[-1].stop == piece.start:
            piece = slice(joined.pop().start, piece.stop)
        joined.append(piece)
    return joined
