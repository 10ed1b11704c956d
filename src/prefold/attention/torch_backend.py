"""Attention in plain torch: batched matrix multiplications around one exponential.

A softmax that keeps a running maximum passes over the scores five times. Here a row has a
*reference* r instead, and what is summed is exp(score - r). Any r within a few tens of the row's
maximum does, since float32 holds e^88: so r hardly ever has to move, and what was summed before is
not rescaled. Subtracting r is free: q carries -r, and every key carries 1, as one more element
of their dot product. What is left are two matrix multiplications, a maximum that tells whether r
holds, the exponential, and a sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from prefold.attention.backend import Queries
from prefold.kernels.dense import WORD_KEYS
from prefold.workspace import Workspace

SLACK = 40.0
"""How far a score may lie above its row's reference, and a row's first maximum below it."""

ROW_BLOCK, KEY_BLOCK = 512, 1024
"""Rows and keys of a block of scores: 2 MiB, about a core's second-level cache."""

CAUSAL_ROW_BLOCK = 128
"""Rows of a block on the diagonal: half of its last square is computed in vain."""

ALIGNMENT = 8
"""Elements that the rows of q and k are padded to a multiple of."""


@dataclass(frozen=True, eq=False)
class SoftmaxState:
    """A request's running softmax. A row is a (token, query head) of a KV head, tokens outermost.

    Attributes:
        q: [num_kv_heads, rows, qk_dim + 1] float32, scaled; the last element is minus the reference.
        out: [num_kv_heads, rows, v_dim] float32, sum of exp(score - reference) * value.
        denominator: [num_kv_heads, rows] float32, sum of exp(score - reference); 0: no key seen yet.
        rows_per_token: query heads per KV head.
    """

    q: torch.Tensor
    out: torch.Tensor
    denominator: torch.Tensor
    rows_per_token: int

    @property
    def num_tokens(self) -> int:
        return self.q.shape[1] // self.rows_per_token


class TorchBackend:
    """See AttentionBackend. Any device that torch has."""

    def __init__(self, workspace: Workspace, device: torch.device) -> None:
        self._workspace = workspace
        ones = torch.ones(CAUSAL_ROW_BLOCK, CAUSAL_ROW_BLOCK, device=device)
        self._future = torch.zeros_like(ones).masked_fill_(ones.triu(1) > 0, -math.inf)

    def start(self, queries: Sequence[Queries], scale: float, name: str = "attention") -> list[SoftmaxState]:
        """See AttentionBackend.start."""
        shapes = [(x.num_kv_heads, x.q.shape[0] * x.q.shape[1] // x.num_kv_heads) for x in queries]
        widths = [_aligned(x.q.shape[2] + 1) for x in queries]
        all_q = self._workspace.carve(f"{name}.state.q", [(*s, w) for s, w in zip(shapes, widths)])
        all_out = self._workspace.carve(
            f"{name}.state.sums", [(*s, x.v_dim) for s, x in zip(shapes, queries)]
        )
        all_denominators = self._workspace.carve(f"{name}.state.denominators", shapes)
        states = []
        for x, q, out, denominator in zip(queries, all_q, all_out, all_denominators):
            num_tokens, num_heads, qk_dim = x.q.shape
            group = num_heads // x.num_kv_heads
            by_head = x.q.view(num_tokens, x.num_kv_heads, group, qk_dim).transpose(0, 1)
            own = q[..., : qk_dim + 1]
            own[..., :qk_dim].view(x.num_kv_heads, num_tokens, group, qk_dim).copy_(by_head)
            own.mul_(scale)
            own[..., qk_dim].zero_()
            states.append(SoftmaxState(own, out.zero_(), denominator.zero_(), group))
        return states

    def keys(self, num_kv_heads: int, num_keys: int, qk_dim: int) -> torch.Tensor:
        """A buffer for keys, [num_kv_heads, num_keys, qk_dim + 1] float32: fill all but the last element."""
        shape = (num_kv_heads, num_keys, _aligned(qk_dim + 1))
        k = self._workspace.get("attention.keys", shape, torch.float32)[..., : qk_dim + 1]
        k[..., qk_dim].fill_(1.0)
        return k

    def values(self, num_kv_heads: int, num_keys: int, v_dim: int) -> torch.Tensor:
        """A buffer for values, contiguous: rows that lie a batch's width apart cost a third of the rate."""
        return self._workspace.get("attention.values", (num_kv_heads, num_keys, v_dim), torch.float32)

    def attend_(
        self,
        state: SoftmaxState,
        tokens: slice,
        k: torch.Tensor,
        v: torch.Tensor,
        causal: bool,
        unseen: torch.Tensor | None = None,
        selected: torch.Tensor | None = None,
    ) -> None:
        """See AttentionBackend.attend_."""
        num_keys = k.shape[1]
        assert not causal or tokens.stop - tokens.start == num_keys, (tokens, num_keys)
        for heads, rows, keys in self._blocks(state, tokens, num_keys, causal):
            scores = self._workspace.get(
                "attention.scores",
                (heads.stop - heads.start, rows.stop - rows.start, keys.stop - keys.start),
                torch.float32,
            )
            torch.bmm(state.q[heads, rows], k[heads, keys].transpose(1, 2), out=scores)
            group = state.rows_per_token
            if causal:
                self._mask_future(scores, rows.start // group - tokens.start, group, keys)
            own = slice(rows.start // group - tokens.start, rows.stop // group - tokens.start)
            if unseen is not None:
                _mask_past(scores, unseen[own], group, keys)
            if selected is not None:
                _mask_unselected(scores, selected[own], group, keys)
            self._keep_reference(state, heads, rows, scores)
            scores.exp_()
            state.denominator[heads, rows].add_(scores.sum(-1))
            state.out[heads, rows].baddbmm_(scores, v[heads, keys])

    def finish(self, state: SoftmaxState, out: torch.Tensor) -> None:
        """See AttentionBackend.finish."""
        seen = state.denominator > 0
        factor = torch.where(seen, state.denominator, 1.0).reciprocal_()
        result = state.out.mul_(factor.unsqueeze(-1))
        heads, _, v_dim = result.shape
        by_head = result.view(heads, state.num_tokens, state.rows_per_token, v_dim)
        out.view(state.num_tokens, heads, state.rows_per_token, v_dim).copy_(by_head.transpose(0, 1))

    def lse(self, state: SoftmaxState) -> torch.Tensor:
        """See AttentionBackend.lse."""
        lse = torch.log(state.denominator) - state.q[..., -1]
        by_head = lse.view(lse.shape[0], state.num_tokens, state.rows_per_token)
        return by_head.transpose(0, 1).flatten(1)

    @staticmethod
    def _blocks(
        state: SoftmaxState, tokens: slice, num_keys: int, causal: bool
    ) -> Iterator[tuple[slice, slice, slice]]:
        """(heads, rows, keys) whose scores are computed together; none where there is nothing to see.

        Many rows go head by head, few rows go with several heads at a time.
        """
        num_heads, group = state.q.shape[0], state.rows_per_token
        block = max(1, (CAUSAL_ROW_BLOCK if causal else ROW_BLOCK) // group)
        num_tokens = tokens.stop - tokens.start
        together = 1
        if 0 < num_tokens == state.num_tokens <= block and num_keys > 0:
            per_head = num_tokens * group * min(num_keys, KEY_BLOCK)
            together = min(num_heads, max(1, ROW_BLOCK * KEY_BLOCK // per_head))
        for head in range(0, num_heads, together):
            heads = slice(head, min(head + together, num_heads))
            for start in range(tokens.start, tokens.stop, block):
                end = min(start + block, tokens.stop)
                visible = end - tokens.start if causal else num_keys
                for key in range(0, visible, KEY_BLOCK):
                    keys = slice(key, min(key + KEY_BLOCK, visible))
                    yield heads, slice(start * group, end * group), keys

    def _mask_future(self, scores: torch.Tensor, first_token: int, group: int, keys: slice) -> None:
        """Rows are those of tokens first_token, first_token + 1, ..., and token i sees keys 0..i."""
        start = max(keys.start, first_token)
        if start >= keys.stop:
            return
        heads, num_rows, _ = scores.shape
        mask = self._future[: num_rows // group, start - first_token : keys.stop - first_token]
        by_token = scores.view(heads, num_rows // group, group, -1)
        by_token[..., start - keys.start :].add_(mask.unsqueeze(1))

    @staticmethod
    def _keep_reference(state: SoftmaxState, heads: slice, rows: slice, scores: torch.Tensor) -> None:
        """Move the reference of rows whose scores would leave the range where sums are exact."""
        top = scores.amax(-1)
        lowest, highest = torch.aminmax(top)
        if not (float(highest) > SLACK or float(lowest) < -SLACK):
            return
        denominator = state.denominator[heads, rows]
        empty = denominator == 0
        move = (top > SLACK) | (empty & (top < -SLACK) & (top > -math.inf))
        shift = torch.where(move, top, 0.0)
        # Only a row that has summed something is scaled; the factor of an empty one may overflow.
        factor = torch.where(empty, 1.0, torch.exp(-shift))
        scores.sub_(shift.unsqueeze(-1))
        state.q[heads, rows, -1].sub_(shift)
        denominator.mul_(factor)
        state.out[heads, rows].mul_(factor.unsqueeze(-1))


def _mask_past(scores: torch.Tensor, unseen: torch.Tensor, group: int, keys: slice) -> None:
    """Rows are those of as many tokens as `unseen` has, of which each does not see its first keys."""
    numbers = torch.arange(keys.start, keys.stop, device=scores.device)
    mask = numbers < unseen.to(scores.device)[:, None]
    scores.view(len(scores), len(unseen), group, -1).masked_fill_(mask.unsqueeze(1), -math.inf)


def _mask_unselected(scores: torch.Tensor, selected: torch.Tensor, group: int, keys: slice) -> None:
    """Rows are those of as many tokens as `selected` has, whose words have a bit for each key they see."""
    numbers = torch.arange(keys.start, keys.stop, device=scores.device)
    words = selected.to(scores.device)[:, numbers // WORD_KEYS]
    mask = (words >> numbers % WORD_KEYS) & 1 == 0
    scores.view(len(scores), len(selected), group, -1).masked_fill_(mask.unsqueeze(1), -math.inf)


def _aligned(elements: int) -> int:
    return -(-elements // ALIGNMENT) * ALIGNMENT
