"""Token embedding and output head, split over the vocabulary.

Every rank holds ceil(vocab / TP) rows; the last ranks' surplus rows are zero and belong to no token.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from prefold.kernels import fused
from prefold.layers.layer import Layer
from prefold.layers.linear import Env, multiply
from prefold.layers.weight import Weight, parameter


class VocabParallel(Layer):
    """This rank's rows [ceil(vocab / TP), hidden] of an embedding or head."""

    def __init__(self, vocab_size: int, hidden_size: int, env: Env) -> None:
        super().__init__()
        self.vocab_size, self.env = vocab_size, env
        rows = -(-vocab_size // env.tp.size)
        self.start = min(env.tp.rank * rows, vocab_size)
        self.end = min(self.start + rows, vocab_size)
        self.weight = parameter(rows, hidden_size, dtype=env.weight_dtype, device=env.device)
        self.weight[self.end - self.start :].zero_()

    def weights(self, prefix: str) -> Iterator[Weight]:
        shape = (self.vocab_size, self.weight.shape[1])
        slices = (slice(self.start, self.end), slice(0, shape[1]))
        yield Weight(f"{prefix}.weight", shape, ((slices, self.weight[: self.end - self.start]),))

    def embed(self, input_ids: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Rows of `input_ids` [n] into out [n, hidden]. Ids must lie in [0, vocab_size)."""
        if self.end - self.start == self.vocab_size:
            fused.put_rows(self.weight, out, input_ids)
            return out
        local = input_ids - self.start
        foreign = (local < 0) | (local >= self.end - self.start)
        fused.put_rows(self.weight, out, local.masked_fill_(foreign, 0))
        out.masked_fill_(foreign[:, None], 0)
        return self.env.tp.all_reduce(out)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [n, hidden] -> [n, vocab_size] float32, on every rank; valid until the next call."""
        local = self.env.workspace.get("logits.local", (hidden.shape[0], self.weight.shape[0]), hidden.dtype)
        # So few at a time that the weight, which is the largest of all, is not converted as a whole.
        most = self.env.convert_from - 1 if self.weight.dtype != hidden.dtype else len(hidden)
        pieces = max(1, -(-len(hidden) // max(1, most)))
        for rows, part in zip(hidden.chunk(pieces), local.chunk(pieces), strict=True):
            multiply(rows, [self.weight], part, self.env)
        parts = self.env.tp.all_gather(local)  # [TP, n, rows]
        logits = parts.transpose(0, 1).flatten(1)[:, : self.vocab_size]
        if logits.dtype == torch.float32:
            return logits
        return self.env.workspace.get("logits.float32", logits.shape, torch.float32).copy_(logits)
