"""Few queries over long contexts: decode tokens and the last tokens of chunks.

A walk (attention.walk) copies keys out of the cache, tile by tile, which pays off where many queries meet a
tile. A few queries are faster attended to the rows of the cache as they are stored (kernels.rows), in one
call per layer for all requests. The cache must have all keys that they see, so it comes last.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from prefold.attention.forms import KVForm, KVForms
from prefold.attention.plan import DecodeTokens, RequestWork, Visit
from prefold.attention.row_format import RowFormat
from prefold.kernels import library, rows
from prefold.kernels.rows import BlockRows
from prefold.limits import MOST_QUERIES
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class PagedQueries:
    """Queries of a step, and which keys they see: query i the first lengths[i] ones of blocks[tables[i]].

    Attributes:
        tokens: of the queries; a slice if they are neighbours.
        blocks: [num_requests, most blocks] int64.
        tables, lengths: [n] int64.
    """

    tokens: slice | torch.Tensor
    blocks: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of_step(cls, works: Sequence[RequestWork], decode: DecodeTokens | None) -> PagedQueries | None:
        """All tokens of `works`, whose keys are where the cache numbers them by position, then decode tokens.
        None if there are none."""
        tokens = [np.arange(work.tokens.start, work.tokens.stop) for work in works]
        lengths = [np.arange(run.start, run.end) + 1 for work in works for run in work.runs]
        queries = cls._of([work.block_ids for work in works], tokens, lengths)
        if decode is None:
            return queries
        blocks, tables, ends, places = decode.blocks, decode.requests, decode.lengths, decode.tokens
        if queries is not None:
            requests, tables = np.unique(tables, return_inverse=True)
            blocks = torch.cat([queries.blocks, blocks[torch.from_numpy(requests)]])
            tables = np.concatenate([queries.tables.numpy(), tables + len(works)])
            ends = np.concatenate([queries.lengths.numpy(), ends])
            places = np.concatenate([*tokens, places])
        return cls(_neighbours(places), blocks, torch.from_numpy(tables), torch.from_numpy(ends))

    @classmethod
    def of_visits(cls, visits: Sequence[Visit], block_size: int) -> PagedQueries | None:
        """Queries that have travelled here. None if those of a request are many."""
        counts = [visit.queries.stop - visit.queries.start for visit in visits]
        if max(counts, default=0) > MOST_QUERIES:
            return None
        assert all(visit.start % block_size == 0 for visit in visits)
        return cls._of(
            # What stands behind a request's last block is not read.
            [torch.roll(visit.block_ids, -(visit.start // block_size)) for visit in visits],
            [np.arange(visit.queries.start, visit.queries.stop) for visit in visits],
            [np.full(count, visit.end - visit.start) for visit, count in zip(visits, counts, strict=True)],
        )

    @property
    def kind(self) -> Hashable:
        """Facts other than the contents of tensors."""
        tokens = self.tokens if isinstance(self.tokens, slice) else None
        return tokens and (tokens.start, tokens.stop), self.blocks.shape[1], len(self.lengths)

    def kept(self, workspace: Workspace) -> PagedQueries:
        """The same in buffers, with tables of a length that seldom changes: a power of two."""
        num_requests, num_blocks = self.blocks.shape
        length = 1 << max(num_blocks - 1, 0).bit_length()
        blocks = workspace.get("paged.blocks", (num_requests, length), torch.int64)
        blocks[:, :num_blocks].copy_(self.blocks)
        tables = workspace.keep("paged.tables", self.tables)
        return PagedQueries(self.tokens, blocks, tables, workspace.keep("paged.lengths", self.lengths))

    @classmethod
    def _of(
        cls, block_ids: Sequence[torch.Tensor], tokens: Sequence[np.ndarray], lengths: Sequence[np.ndarray]
    ) -> PagedQueries | None:
        if not block_ids:
            return None
        return cls(
            tokens=_neighbours(np.concatenate(tokens)),
            blocks=torch.stack(list(block_ids)),
            tables=torch.from_numpy(np.repeat(np.arange(len(tokens)), [len(one) for one in tokens])),
            lengths=torch.from_numpy(np.concatenate(lengths)),
        )


def _neighbours(tokens: np.ndarray) -> slice | torch.Tensor:
    """Ascending numbers; a slice if they are neighbours."""
    first, end = int(tokens[0]), int(tokens[-1]) + 1
    return slice(first, end) if end - first == len(tokens) else torch.from_numpy(tokens)


@dataclass(frozen=True, eq=False)
class PagedCache:
    """One layer's rows of the cache.

    Attributes:
        rows: [num_blocks, block_size, width of the format], stored; may be a part of longer rows.
    """

    rows: torch.Tensor
    format: RowFormat

    def attend(
        self,
        queries: PagedQueries,
        q: torch.Tensor,
        form: KVForm,
        window: int | None,
        scale: float,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        """q [n, num_heads, q_dim] float32, in the form -> out [n, num_heads, out_dim] and lse [n, num_heads],
        float32, of which a query without keys gets 0 and -inf."""
        num_blocks, block_size, width = self.rows.shape
        flat = self.rows.as_strided((num_blocks * block_size, width), self.rows.stride()[1:])
        keys = BlockRows(queries.blocks, queries.tables, queries.lengths, block_size, window)
        rows.attend(q, keys, flat, scale, out, lse, form.row_heads, self.format.fp8_rows)


def is_paged(work: RequestWork, has_one_form: bool) -> bool:
    """Whether a request's queries are few, and all that they see will be in the cache of this rank. Of a rank
    that holds whole requests."""
    return (
        not work.travels
        and (work.absorbed or has_one_form)
        and sum(run.end - run.start for run in work.runs) <= MOST_QUERIES
    )


def can_attend_paged(cache: torch.Tensor) -> bool:
    """Whether the native kernel serves such a cache."""
    dtypes = (torch.float32, torch.bfloat16, torch.uint8)
    return cache.device.type == "cpu" and cache.dtype in dtypes and library.is_available()


def attend_own(
    queries: PagedQueries,
    cache: PagedCache,
    q: torch.Tensor,
    forms: KVForms,
    scale: float,
    out: torch.Tensor,
    workspace: Workspace,
) -> None:
    """Attend queries as the model has them, q [num_tokens, num_heads, qk_head_dim], and write the rows of out
    [num_tokens, num_heads, v_head_dim] that are theirs."""
    tokens, shape = queries.tokens, (len(queries.lengths), q.shape[1])
    lse = workspace.get("paged.lse", shape, torch.float32)
    if isinstance(tokens, slice):
        attend_rows(queries, cache, q[tokens], forms, scale, out[tokens], lse, workspace)
        return
    results = workspace.get("paged.results", (*shape, out.shape[2]), out.dtype)
    attend_rows(queries, cache, q[tokens], forms, scale, results, lse, workspace)
    out.index_copy_(0, tokens, results)


def attend_rows(
    queries: PagedQueries,
    cache: PagedCache,
    q: torch.Tensor,
    forms: KVForms,
    scale: float,
    out: torch.Tensor,
    lse: torch.Tensor,
    workspace: Workspace,
) -> None:
    """q [n, num_heads, qk_head_dim] as the model has them -> out [n, num_heads, v_head_dim], of any float
    dtype, and lse [n, num_heads] float32. All may be strided."""
    form, shape = forms.absorbed, q.shape[:2]
    if form is forms.plain and q.dtype == out.dtype == torch.float32:
        cache.attend(queries, q, form, forms.window, scale, out, lse)
        return
    changed_q = workspace.get("paged.q", (*shape, form.q_dim), torch.float32)
    form.queries(q, changed_q)
    attended = workspace.get("paged.out", (*shape, form.out_dim), torch.float32)
    cache.attend(queries, changed_q, form, forms.window, scale, attended, lse)
    form.results(attended, out)
