"""What sparse attention has of one layer: queries, and the rows that hold their keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prefold.attention.backend import IndexQueries
from prefold.attention.forms import KVForms
from prefold.attention.row_format import RowFormat
from prefold.attention.selection import HeldTokens, PagedTokens
from prefold.attention.walk import CacheReader, Latents
from prefold.workspace import Workspace


@dataclass(frozen=True, eq=False)
class SparseLayer:
    """What the queries of one layer need.

    Attributes:
        q: [num_tokens, num_heads, qk_head_dim].
        index: of a layer with an indexer; without one the last selection is used.
        cache: [num_blocks, block_size, width of the layer's rows], stored rows.
        new_rows: of the step's new prefill tokens, [num_new_tokens, width], stored.
        out: [num_tokens, num_heads, v_head_dim], to be written.
    """

    q: torch.Tensor
    index: IndexQueries | None
    forms: KVForms
    cache: torch.Tensor
    new_rows: torch.Tensor
    out: torch.Tensor


@dataclass(frozen=True, eq=False)
class RequestKeys:
    """The keys of one request within reach, in one layer.

    Attributes:
        rows: [num_slots, width of the first part of a row], as stored.
        latents: decoded first parts of the rows of tokens that are held.
        index_keys: of the tokens that are held.
    """

    rows: torch.Tensor
    latents: Latents
    index_keys: Latents
    held: HeldTokens
    block_ids: torch.Tensor


@dataclass(frozen=True, eq=False)
class PagedKeys:
    """Finds the keys of a request that a rank has in its cache.

    Attributes:
        formats: of the two parts of a row: what is attended to, and the index key.
        held: which tokens they are.
    """

    formats: tuple[RowFormat, RowFormat]
    held: PagedTokens
    workspace: Workspace

    def of(self, layer: SparseLayer, block_ids: torch.Tensor) -> RequestKeys:
        """Of the request with these blocks."""
        attended, index = self.formats
        width = attended.width

        def read(part: slice, row_format: RowFormat) -> Latents:
            def tokens(start: int, end: int) -> torch.Tensor:  # of index keys only where a row has one
                reader = CacheReader(layer.cache[..., part], row_format, self.workspace)
                return reader.request(block_ids)(start, end)

            return tokens

        rows = layer.cache.view(-1, layer.cache.shape[2])[:, :width]
        latents, index_keys = read(slice(width), attended), read(slice(width, None), index)
        return RequestKeys(rows, latents, index_keys, self.held, block_ids)
