"""One checkpoint and its oracle for all tests of layouts, computed once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from prefold import LLM
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.exactness import Oracle
from prefold.testing.sparse_oracle import ENGINE, SparseOracle

torch.set_num_threads(1)

ORACLE = {
    "block_size": 2,
    "num_blocks": 2200,
    "max_model_len": 4200,
    "threads_per_rank": 1,
    "skip_tokenizer_init": True,
    "debug_poison": True,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="session")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The folder of a checkpoint with that many layers: one dense, the others with 8 experts."""
    made: dict[int, Path] = {}

    def folder(num_layers: int) -> Path:
        if num_layers not in made:
            root = tmp_path_factory.mktemp(f"v3-{num_layers}")
            made[num_layers] = make_checkpoint(
                "DeepseekV3ForCausalLM",
                root,
                vocab_size=300,
                num_hidden_layers=num_layers,
                max_position_embeddings=4300,
            )
        return made[num_layers]

    return folder


@pytest.fixture(scope="session")
def oracle_of(checkpoint_of: Callable[[int], Path]) -> Callable[[int], Oracle]:
    """The oracle of the checkpoint with that many layers."""
    made: dict[int, Oracle] = {}

    def oracle(num_layers: int) -> Oracle:
        if num_layers not in made:
            made[num_layers] = Oracle(LLM(str(checkpoint_of(num_layers)), **ORACLE))
        return made[num_layers]

    return oracle


@pytest.fixture(scope="session")
def oracle(oracle_of: Callable[[int], Oracle]) -> Oracle:
    """Of the checkpoint that most tests use: two layers."""
    return oracle_of(2)


@pytest.fixture(scope="session")
def sparse_oracle_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], tuple[Path, SparseOracle]]:
    """A checkpoint with sparse attention and that many layers, and its oracle. The second layer uses the
    selection of the first; a third would have an indexer again."""
    made: dict[int, tuple[Path, SparseOracle]] = {}

    def find(num_layers: int) -> tuple[Path, SparseOracle]:
        if num_layers not in made:
            root = tmp_path_factory.mktemp(f"glm-dsa-{num_layers}")
            folder = make_checkpoint(
                "GlmMoeDsaForCausalLM", root, vocab_size=300, num_hidden_layers=num_layers
            )
            made[num_layers] = folder, SparseOracle(folder, **ENGINE)
        return made[num_layers]

    return find
