"""What a model needs of attention, and what attention needs of a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from prefold.config import MLAConfig


@dataclass(frozen=True, eq=False)
class IndexQueries:
    """What a layer's indexer asks, under sparse attention: which keys a query attends to.

    The score of a key, which is the last part of its token's row, is the sum over index heads of
    weight * relu(query . key).

    Attributes:
        q: [num_tokens, num_index_heads, index_head_dim], rotary embedding applied.
        weights: [num_tokens, num_index_heads] float32, all scale factors included.
    """

    q: torch.Tensor
    weights: torch.Tensor

    def of_tokens(self, tokens: slice) -> IndexQueries:
        """Those of some tokens, as views."""
        return IndexQueries(self.q[tokens], self.weights[tokens])


@dataclass(frozen=True, eq=False)
class LatentRows:
    """What the rows of a layer's cache are, with latent attention: `kv_c | k_pe`, normalised and rotated.

    Attributes:
        w_uk: [num_heads, qk_nope, kv_lora_rank], up-projection of keys, in the weights' dtype.
        w_uv: [num_heads, v_head_dim, kv_lora_rank], up-projection of values.
        index: of a layer with an indexer; its rows end with the indexer's key. Under sparse attention a layer
            without one attends to what the last layer with one has selected.
    """

    mla: MLAConfig
    w_uk: torch.Tensor
    w_uv: torch.Tensor
    index: IndexQueries | None = None


@dataclass(frozen=True)
class HeadRows:
    """What the rows are with grouped-query attention: `keys | values` of this rank's KV heads, keys rotated.

    Attributes:
        window: a token sees so many tokens, itself included; None: all before it.
    """

    num_kv_heads: int
    head_dim: int
    window: int | None


class AttentionContext(Protocol):
    """Handed to a model's forward; knows the batch, the cache and the ranks. The model does not."""

    def attend(
        self, layer_idx: int, q: torch.Tensor, kv: torch.Tensor, rows: LatentRows | HeadRows
    ) -> torch.Tensor:
        """Causal attention of the step's tokens over their requests' histories.

        Args:
            layer_idx: layer on this rank, from 0.
            q: [num_tokens, num_heads, qk_head_dim], rotary embedding applied; heads may be strided.
            kv: [num_tokens, width of a row], the tokens' rows of the cache.
            rows: what they are.

        Returns:
            [num_tokens, num_heads * v_head_dim]; valid until the next call.
        """
        ...


@dataclass(frozen=True)
class Queries:
    """Queries of one request: q [num_tokens, num_heads, qk_dim] over keys of `num_kv_heads` heads."""

    q: torch.Tensor
    num_kv_heads: int
    v_dim: int


class AttentionBackend(Protocol):
    """A kernel: rectangles (every query sees every key) and squares on the causal diagonal, summed
    up in a state per request. `Any` is the kernel's own state."""

    def start(self, queries: Sequence[Queries], scale: float, name: str = "attention") -> list[Any]:
        """Empty states for queries; those of the last call of the same name are lost."""
        ...

    def keys(self, num_kv_heads: int, num_keys: int, qk_dim: int) -> torch.Tensor:
        """A buffer for a tile's keys, [num_kv_heads, num_keys, >= qk_dim] in a dtype of the kernel's: the
        first qk_dim elements are to be filled. Valid until the next call."""
        ...

    def values(self, num_kv_heads: int, num_keys: int, v_dim: int) -> torch.Tensor:
        """A buffer for a tile's values, [num_kv_heads, num_keys, v_dim]; as `keys`."""
        ...

    def attend_(
        self,
        state: Any,
        tokens: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        unseen: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> None:
        """Add keys and values to the softmax of some of a state's tokens.

        Args:
            tokens: of the state.
            k: what `keys` returned, filled.
            v: what `values` returned, filled, or a view of k.
            causal: token tokens.start + i sees keys 0..i; there must be as many of both.
            unseen: [tokens] int64, token tokens.start + i does not see the first unseen[i] keys.
            selected: [tokens, at least num_keys / 64] int64, words of a row side by side: of the keys, token
                tokens.start + i sees only those j whose bit is set, bit j % 64 of word j // 64 of row i.

        No tokens or no keys change nothing.
        """
        ...

    def finish(self, state: Any, out: torch.Tensor) -> None:
        """Write the result to out [num_tokens, num_heads, v_dim] (heads and elements may be strided), 0
        for tokens that saw no key. The state is used up."""
        ...

    def lse(self, state: Any) -> torch.Tensor:
        """[num_tokens, num_heads] float32, natural log, -inf for tokens that saw no key."""
        ...
