"""Which pipeline stage computes which layers. No torch."""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise

from prefold.config import ModelConfig
from prefold.flops import layer_flops

TYPICAL_TOKENS = 8192
"""Prompt length at which layers are weighed: attention grows with it, the rest of a layer does not."""


def split_layers(model: ModelConfig, pp: int) -> list[range]:
    """Contiguous layer ranges, one per stage, at least one layer each.

    The costliest stage costs as little as possible (a pipeline is as fast as its slowest stage), and
    among such splits the costs are as even as possible. A layer's cost is its FLOPs in a prompt of
    `TYPICAL_TOKENS`: active experts only; the head, which sees one row, is the last layer's.

    Layers that share an indexer's selection stay together: it does not travel.

    Raises:
        ValueError: more stages than layers (or selections), or fewer than one.
    """
    check_stages(model, pp)
    costs = [layer_flops(model, layer, TYPICAL_TOKENS).total for layer in range(model.num_layers)]
    costs[-1] += 2 * model.hidden_size * model.vocab_size
    starts = [*first_layers(model), model.num_layers]
    groups = split_costs([sum(costs[start:end]) for start, end in pairwise(starts)], pp)
    return [range(starts[group.start], starts[group.stop]) for group in groups]


def first_layers(model: ModelConfig) -> list[int]:
    """Layers with which a stage can begin: all, but for those that use an earlier layer's selection."""
    layers = range(model.num_layers)
    return [layer for layer in layers if model.dsa is None or model.dsa.full_layers[layer]]


def check_stages(model: ModelConfig, pp: int) -> None:
    """ValueError unless every one of `pp` stages can have a layer, or an indexer and the layers that
    use its selection."""
    full = len(first_layers(model))
    if model.num_layers >= pp > full:
        raise ValueError(
            f"pipeline_parallel_size={pp} must be between 1 and {full}, the number of layers with an "
            "indexer: a stage begins with one of them"
        )
    if not 1 <= pp <= model.num_layers:
        raise ValueError(
            f"pipeline_parallel_size={pp} must be between 1 and num_hidden_layers={model.num_layers}: "
            "a stage computes at least one layer"
        )


def split_costs(costs: list[int], num_stages: int) -> list[range]:
    """The split of `split_layers` for any costs, len(costs) >= num_stages >= 1.

    >>> split_costs([1, 3, 3, 3, 3], 2)
    [range(0, 3), range(3, 5)]
    """
    limits = range(max(costs), sum(costs) + 1)
    limit = limits[bisect_left(limits, True, key=lambda limit: _stages_needed(costs, limit) <= num_stages)]
    sums = list(accumulate(costs, initial=0))
    # evenest[n]: the least sum of squared stage costs of the first n layers, and where the stages end.
    evenest: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    for _ in range(num_stages):
        longer: dict[int, tuple[int, list[int]]] = {}
        for start, (squares, ends) in evenest.items():
            for end in range(start + 1, len(sums)):
                cost = sums[end] - sums[start]
                if cost > limit:
                    break
                if end not in longer or squares + cost**2 <= longer[end][0]:
                    longer[end] = (squares + cost**2, [*ends, end])
        evenest = longer
    ends = evenest[len(costs)][1]
    return [range(start, end) for start, end in zip([0, *ends], ends)]


def _stages_needed(costs: list[int], limit: int) -> int:
    """Fewest stages of at most `limit` each. More stages are always possible: cut one of them."""
    stages, filled = 1, 0
    for cost in costs:
        if filled + cost > limit:
            stages, filled = stages + 1, 0
        filled += cost
    return stages
