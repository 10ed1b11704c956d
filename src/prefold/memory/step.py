"""The largest step that the scheduler can make, as one rank sees it."""

from __future__ import annotations

from dataclasses import dataclass

from prefold.config import DTYPES, EngineConfig
from prefold.distributed.layouts import describe_layout
from prefold.distributed.stages import split_layers
from prefold.kv_spec import FP8, RowPart, row_parts
from prefold.limits import ABSORBED_TOKENS, TRAVEL_TOKENS, VISIT_TOKENS, shared_rows

FLOAT = 4
"""Bytes of a float32."""


@dataclass(frozen=True)
class LargestStep:
    """Sizes that buffers follow from; of one rank, unless it says otherwise.

    Attributes:
        layers: of the rank, by number in the checkpoint.
        tokens: computed here: its share of prompts, and decode tokens, of which a unit of DCP ranks computes
            each on all of them. A partition may, by an unlucky mix of whole short prompts, exceed this by
            some of those: buffers then grow, once.
        new_tokens: of prompts, on all PCP ranks.
        decode_tokens: here.
        absorbed_tokens: in the absorbed form of attention.
        item, weight: bytes of an element of activations, and of weights that are floats.
        heads: query heads.
        row_parts, row_bytes: of a token's row in the cache of a layer.
        decodes_rows: keys are read out of other bytes than they are used in.
        pcp, dcp, tp, ep: sizes of groups.
        unit: PCP ranks of a DCP group.
        travellers, all_travellers: queries of this rank that travel at once, and all that meet here.
        native: whether there are native kernels.
    """

    config: EngineConfig
    layers: range
    native: bool
    new_tokens: int
    tokens: int
    decode_tokens: int

    @classmethod
    def of(cls, config: EngineConfig, stage: int, native: bool) -> LargestStep:
        scheduler, parallel = config.scheduler, config.parallel
        pcp, unit = parallel.prefill_context_parallel_size, _unit(config)
        longest = scheduler.max_num_seqs * scheduler.max_model_len
        scheduled = min(scheduler.max_num_batched_tokens * pcp, longest)
        decoded = min(scheduler.max_num_seqs, scheduled)
        even = -(-(scheduled + decoded * (unit - 1)) // pcp)
        # A prompt that stays whole, or a token more than others.
        whole = max(config.runtime.min_split_tokens, 2 * pcp) if pcp > 1 else 0
        return cls(
            config=config,
            layers=split_layers(config.model, parallel.pipeline_parallel_size)[stage],
            native=native,
            new_tokens=scheduled,
            tokens=min(scheduled, even + whole),
            decode_tokens=min(decoded, -(-decoded * unit // pcp) + unit),
        )

    @property
    def absorbed_tokens(self) -> int:
        if self.config.model.mla is None:
            return 0
        decode = self.decode_tokens if self.dcp == 1 else 0  # else they have buffers of their own
        return min(self.tokens, decode + ABSORBED_TOKENS)

    @property
    def item(self) -> int:
        return DTYPES[self.config.runtime.compute_dtype]

    @property
    def weight(self) -> int:
        return DTYPES[self.config.model.dtype]

    @property
    def heads(self) -> int:
        return self.config.model.num_heads // self.tp

    @property
    def row_parts(self) -> tuple[RowPart, ...]:
        return row_parts(self.config.model.attention, self.tp)

    @property
    def row_bytes(self) -> int:
        return sum(part.num_bytes(self.config.cache.cache_dtype) for part in self.row_parts)

    @property
    def decodes_rows(self) -> bool:
        return self.config.cache.cache_dtype == FP8

    @property
    def pcp(self) -> int:
        return self.config.parallel.prefill_context_parallel_size

    @property
    def dcp(self) -> int:
        return self.config.parallel.decode_context_parallel_size

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_parallel_size

    @property
    def ep(self) -> int:
        parallel = self.config.parallel
        return parallel.data_parallel_size * parallel.plane_size

    @property
    def unit(self) -> int:
        return _unit(self.config)

    @property
    def travel_group(self) -> int:
        """Ranks between which queries travel; 1 if they never do."""
        model, forced = self.config.model, self.config.runtime.context_attention
        if forced in ("local", "kv"):
            return 1
        if self.dcp == 1 and (model.dsa is not None or model.attention.has_windows):
            return 1
        return max(self.dcp, self.pcp if self.dcp == 1 else self.unit)

    @property
    def travellers(self) -> int:
        group, most = self.travel_group, TRAVEL_TOKENS if self.config.model.dsa is None else VISIT_TOKENS
        if group == 1:
            return 0
        among = group if self.config.model.dsa is None else self.unit
        return min(self.tokens, max(1, most // among))

    @property
    def all_travellers(self) -> int:
        return self.travellers * (self.travel_group if self.config.model.dsa is None else self.unit)

    @property
    def shared_rows(self) -> int:
        """New tokens that ranks up-project for each other at a time; 0 if they do not."""
        mla = self.config.model.mla
        if mla is None or mla.dsa is not None or self.pcp == 1:
            return 0
        if self.config.runtime.share_projections == "off":
            return 0
        # In tiles of equal size, of which each run of tokens may add one.
        return min(self.tokens, shared_rows(mla.projected_dim(self.heads) * self.item) + 64)

    @property
    def shares_memory(self) -> bool:
        """Whether ranks of a group read each other's memory."""
        runtime, parallel = self.config.runtime, self.config.parallel
        return runtime.transport == "shm" and runtime.device == "cpu" and parallel.nnodes == 1

    @property
    def expert_width(self) -> int:
        """Intermediate size of a rank's part of an expert; 0 without experts on these layers."""
        if not any(self.config.model.moe_layers[i] for i in self.layers):
            return 0
        return describe_layout(self.config.model, self.config.parallel).expert_width


def _unit(config: EngineConfig) -> int:
    parallel = config.parallel
    return min(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size)
