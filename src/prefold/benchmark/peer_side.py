"""A side that runs the same checkpoint in transformers, for comparison."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from prefold.benchmark.side import Handler, serve


def start(setup: dict[str, Any]) -> tuple[Handler, dict[str, Any]]:
    """Load the model: `setup` holds `model`, `dtype` ("auto" is the checkpoint's) and `threads`."""
    logging.disable_progress_bar()
    torch.set_num_threads(setup["threads"])
    dtype = setup["dtype"] if setup["dtype"] == "auto" else getattr(torch, setup["dtype"])
    model = AutoModelForCausalLM.from_pretrained(
        setup["model"], dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()

    def measure(request: dict[str, Any]) -> dict[str, Any]:
        return _measure(model, request["token_ids"], request["output_len"])

    name = str(model.dtype).removeprefix("torch.")
    return measure, {
        "world_size": 1,
        "threads_per_rank": setup["threads"],
        "dtype": name,
        "compute_dtype": name,
    }


@torch.inference_mode()
def _measure(model: Any, token_ids: list[int], output_len: int) -> dict[str, Any]:
    """Prefill, then greedy decode with the library's own KV cache."""
    ids = torch.tensor([token_ids])
    begin = time.monotonic()
    cache = DynamicCache(config=model.config)
    out = model(ids, cache=cache, use_cache=True, logits_to_keep=1)
    generated = [int(out.logits[0, -1].argmax())]
    first = time.monotonic()
    for _ in range(output_len - 1):
        out = model(torch.tensor([[generated[-1]]]), cache=cache, use_cache=True)
        generated.append(int(out.logits[0, -1].argmax()))
    end = time.monotonic()
    return {
        "ttft_s": first - begin,
        "tpot_s": (end - first) / (output_len - 1) if output_len > 1 else None,
        "token_ids": generated,
    }


if __name__ == "__main__":
    sys.exit(serve(start))
