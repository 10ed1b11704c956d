"""Which parallel layouts a model can have. No torch."""

from __future__ import annotations

from prefold.config import DTYPES, ModelConfig, ParallelConfig
from prefold.distributed.stages import split_layers
from prefold.kv_spec import KVSpec


def fullest_kv_spec(model: ModelConfig, parallel: ParallelConfig, block_size: int) -> KVSpec:
    """KV cache of a rank of the stage with the most layers: all ranks have as many blocks as that one."""
    num_layers = max(map(len, split_layers(model, parallel.pipeline_parallel_size)))
    return KVSpec(num_layers, model.mla.token_dim, DTYPES[model.dtype], block_size)
