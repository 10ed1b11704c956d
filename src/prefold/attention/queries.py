"""A layer's queries, each request in the form of attention that is cheaper for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from prefold.attention.backend import AttentionBackend, Queries
from prefold.attention.mla import KVProjection
from prefold.attention.walk import Walk
from prefold.workspace import Workspace


class LayerQueries:
    """Queries of several requests. Up-projected ones are attended as they are; absorbed ones have rows of
    their own in latent buffers.

    Args:
        q: [num_tokens, num_heads, qk_head_dim].
        requests: (tokens of q, absorbed?) of each request; ascending, and covering all tokens.
        name: of the buffers: objects that live at the same time have different names.
    """

    def __init__(
        self,
        q: torch.Tensor,
        requests: Sequence[tuple[slice, bool]],
        projection: KVProjection,
        scale: float,
        backend: AttentionBackend,
        workspace: Workspace,
        name: str,
    ) -> None:
        mla = projection.mla
        self._projection = projection
        self._backend = backend
        # Absorbed neighbours (decode tokens) share one projection.
        self._absorbed = _neighbours_joined([tokens for tokens, absorbed in requests if absorbed])
        num_rows = sum(tokens.stop - tokens.start for tokens in self._absorbed)
        shape = (num_rows, q.shape[1])
        latent_q = workspace.get(f"{name}.latent_q", (*shape, mla.token_dim), torch.float32)
        self._latent_out = workspace.get(f"{name}.latent_out", (*shape, mla.kv_lora_rank), torch.float32)
        for tokens, rows in self._absorbed_rows():
            projection.absorb(q[tokens], latent_q[rows])

        queries: list[Queries] = []
        self._rows: list[slice | None] = []
        start = 0
        for tokens, absorbed in requests:
            if absorbed:
                rows = slice(start, start + tokens.stop - tokens.start)
                start = rows.stop
                queries.append(Queries(latent_q[rows], 1, mla.kv_lora_rank))
                self._rows.append(rows)
            else:
                queries.append(Queries(q[tokens], q.shape[1], mla.v_head_dim))
                self._rows.append(None)
        states = backend.start(queries, scale, name)
        self.walks = [
            Walk(tokens, state, projection.latent_keys_values if absorbed else projection.head_keys_values)
            for (tokens, absorbed), state in zip(requests, states)
        ]

    def lse(self, lse: torch.Tensor, requests: Sequence[int]) -> None:
        """Write the log-sum-exp of some requests to lse [num_tokens, num_heads] float32, before `finish`."""
        for i in requests:
            lse[self.walks[i].tokens].copy_(self._backend.lse(self.walks[i].state))

    def finish(self, out: torch.Tensor) -> None:
        """Write all results to out [num_tokens, num_heads, v_head_dim]."""
        for walk, rows in zip(self.walks, self._rows):
            self._backend.finish(walk.state, out[walk.tokens] if rows is None else self._latent_out[rows])
        for tokens, rows in self._absorbed_rows():
            self._projection.unabsorb(self._latent_out[rows], out[tokens])

    def _absorbed_rows(self) -> list[tuple[slice, slice]]:
        """(tokens, rows of the latent buffers) of the absorbed requests, neighbours together."""
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
