"""How many rows are worked on at a time: what bounds buffers. No torch.

Those who compute and `memory`, which adds up what they can need, read the same numbers here.
"""

from __future__ import annotations

TRAVEL_TOKENS = 4096
"""Queries that travel at once, all ranks' together: bounds the buffers. A piece reads all keys again."""

VISIT_TOKENS = 512
"""The same with sparse attention, where each query brings index_topk candidates of each rank."""

SHARED_BYTES, MIN_SHARED_ROWS = 40 << 20, 256
"""Of what a rank projects for others at a time. Attending to fewer keys reads and writes sums more often."""

MOST_QUERIES = 8
"""Queries of a request from which on a walk, which reads keys once for all of them, is as fast."""

ABSORBED_TOKENS = 2048
"""New tokens of prompts that take the absorbed form in a step: their queries and results are several times as
wide as others'. Beyond are requests of a step with hundreds of short ones; they take the plain form."""

QUERY_BLOCK = 128
"""Queries that share the reading of a tile of index keys, and whose candidates are kept at a time."""

MLP_TILE = 1024
"""Rows that an MLP computes at a time: its intermediate values are many times wider than its input."""

EXPANDED_TILE = 1 << 20
"""Elements of a tile of a quantised weight: 4 MiB of float32. Smaller ones are nearer in the caches, and
multiply slower."""

EXPAND_FROM = 16
"""Rows from which tiles of a quantised weight are expanded for a matrix multiplication.

With fewer, each row of the weight is decoded as it meets them.
"""

WIDENED_ROWS = 8
"""Up to so many bfloat16 rows are multiplied as float32: native code reads the weight 1.6 times as fast as
torch's product, which pays back only when arithmetic counts."""

LOGITS_ROWS = 256
"""Rows of logits computed at a time: bounds prompt_logprobs' memory to rows x vocabulary."""


def shared_rows(row_bytes: int) -> int:
    """New tokens that a rank up-projects for others at a time, where one takes so many bytes."""
    return max(MIN_SHARED_ROWS, SHARED_BYTES // max(1, row_bytes))
