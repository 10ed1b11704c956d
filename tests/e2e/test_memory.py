"""The steady state of a step: buffers are there already, and nothing large is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prefold import LLM, SamplingParams
from prefold.testing.checkpoints import make_checkpoint

NUM_TOKENS = 700
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


class LargestAllocation(TorchDispatchMode):
    """Notes the largest storage that an operator returns and did not get."""

    num_bytes, op = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given and storage.nbytes() > self.num_bytes:
                self.num_bytes, self.op = storage.nbytes(), str(func)
        return result


def tensors_in(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_a_step_allocates_nothing_large(tmp_path: Path, compute_dtype: str) -> None:
    torch.set_num_threads(1)
    folder = make_checkpoint("DeepseekV3ForCausalLM", tmp_path, dtype="bfloat16", hidden_size=256)
    llm = LLM(
        str(folder),
        compute_dtype=compute_dtype,
        threads_per_rank=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=1000,
        num_blocks=100,
        max_num_batched_tokens=500,
    )
    runner = llm.engine.core.executor._worker.runner  # type: ignore[attr-defined]
    prompt = [i * i % 200 for i in range(NUM_TOKENS)]
    llm.generate(prompt, GREEDY)
    workspace_bytes = runner.workspace.num_bytes
    with LargestAllocation() as largest:
        llm.generate(prompt, GREEDY)
    assert runner.workspace.num_bytes == workspace_bytes
    one_activation = 500 * 256 * 2
    assert largest.num_bytes < one_activation / 2, largest.op
