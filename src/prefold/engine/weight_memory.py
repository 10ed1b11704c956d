"""Whether quantised weights are expanded when they are loaded, or stay as they are until they are used."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping

from prefold.checkpoint_files import TensorEntry
from prefold.config import ModelConfig, ParallelConfig
from prefold.distributed.layouts import Layout, describe_layout
from prefold.hardware import available_memory
from prefold.weight_sizes import WeightSizes

logger = logging.getLogger("prefold")

WEIGHT_MEMORY = ("auto", "expanded", "quantized")
"""Choices of `EngineArgs.weight_memory`."""

PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32")
"""Types of stored tensors that are not quantised."""

EXPANDED_SHARE = 0.5
"""Most of the free memory that expanded weights of this machine's ranks may take under auto."""


def resolve_weight_memory(
    asked: str, model: ModelConfig, parallel: ParallelConfig, entries: Mapping[str, TensorEntry]
) -> str:
    """ "expanded" or "quantized". auto expands, which prefills a little faster (quantised weights decode
    faster: fewer bytes are read), unless the weights of all ranks of a machine would then take more than
    half of its free memory.

    Args:
        entries: the checkpoint's tensors.

    Raises:
        ValueError: "quantized" was asked for, and the checkpoint holds nothing quantised.
    """
    counts = Counter(entry.dtype for entry in entries.values())
    if asked == "expanded":
        return asked
    if not counts.keys() - set(PLAIN):
        if asked == "quantized":
            raise ValueError(
                f"weight_memory='quantized': {model.path} holds no quantised tensors, only "
                f"{', '.join(f'{count} in {dtype}' for dtype, count in counts.most_common())}; leave it at "
                "'auto'"
            )
        return "expanded"
    if asked == "quantized":
        return asked
    local_ranks = parallel.world_size // parallel.nnodes
    expanded, free = describe_layout(model, parallel).weight_bytes * local_ranks, available_memory()
    chosen = "expanded" if expanded <= EXPANDED_SHARE * free else "quantized"
    logger.info(
        "weight_memory is %s: expanded weights of %d rank(s) take %.0f of %.0f MiB that are free",
        chosen,
        local_ranks,
        expanded / 2**20,
        free / 2**20,
    )
    return chosen


def held_weight_bytes(
    model: ModelConfig, parallel: ParallelConfig, entries: Mapping[str, TensorEntry], weight_memory: str
) -> int:
    """Of the fullest rank, with what `resolve_weight_memory` has said."""
    layer_bytes = WeightSizes(model, entries).layer if weight_memory == "quantized" else None
    return describe_layout(model, parallel, layer_bytes=layer_bytes).weight_bytes


def with_weight_memory(
    layouts: Iterable[Layout],
    asked: str,
    model: ModelConfig,
    entries: Mapping[str, TensorEntry],
    cache_dtype: str = "auto",
) -> list[Layout]:
    """The layouts of a checkpoint with the weights that their ranks would hold. Arguments and errors as of
    `resolve_weight_memory`."""
    sizes, found = None, []
    for layout in layouts:
        if resolve_weight_memory(asked, model, layout.parallel, entries) == "quantized":
            sizes = sizes or WeightSizes(model, entries)
            layout = describe_layout(model, layout.parallel, cache_dtype, sizes.layer)
        found.append(layout)
    return found
