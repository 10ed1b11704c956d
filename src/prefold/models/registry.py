"""Which class runs which architecture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prefold.config import ModelConfig, RuntimeConfig
from prefold.hf_config import SUPPORTED_ARCHITECTURES
from prefold.models.decoder import Decoder

if TYPE_CHECKING:
    from prefold.distributed.group import Group
    from prefold.layers.expert_parallel import ExpertParallel
    from prefold.workspace import Workspace

__all__ = ["SUPPORTED_ARCHITECTURES", "build_model"]


def build_model(
    model: ModelConfig,
    tp_group: Group,
    workspace: Workspace,
    runtime: RuntimeConfig,
    max_model_len: int | None = None,
    layers: range | None = None,
    experts: ExpertParallel | None = None,
) -> Decoder:
    """This rank's part of a model, weights uninitialised (see `loader.load_weights`).

    `layers` are those of this rank's pipeline stage, by their numbers in the checkpoint (default: all).
    `experts` moves tokens to whole experts on the ranks of an EP group (default: TP splits each expert).
    `max_model_len` bounds the positions (default: the model's) and settles rope types whose
    frequencies depend on the length: equal on all ranks.
    """
    if model.architecture not in SUPPORTED_ARCHITECTURES:
        raise ValueError(
            f"architecture {model.architecture!r} is not supported; supported: "
            f"{', '.join(SUPPORTED_ARCHITECTURES)}"
        )
    if layers is None:
        layers = range(model.num_layers)
    max_model_len = max_model_len or model.max_position_embeddings
    return Decoder(model, tp_group, workspace, runtime, max_model_len, layers, experts)
