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
    """Load the model: `setup` holds `model`, `dtype` ("auto" is the checkpoint's) and `threads`.

    The handler takes what engine_side's takes.
    """
    logging.disable_progress_bar()
    torch.set_num_threads(setup["threads"])
    dtype = setup["dtype"] if setup["dtype"] == "auto" else getattr(torch, setup["dtype"])
    model = AutoModelForCausalLM.from_pretrained(
        setup["model"], dtype=dtype, attn_implementation="sdpa", local_files_only=True
    ).eval()

    prefixes: list[DynamicCache] = []

    def handle(request: dict[str, Any]) -> dict[str, Any]:
        if "prefix" in request:
            prefixes.append(_prefill(model, [request["prefix"]] * request["batch_size"]))
            return {}
        prefix_len = request["prefix_len"]
        cache = prefixes[0] if prefix_len else DynamicCache(config=model.config)
        tails = [prompt[prefix_len:] for prompt in request["prompts"]]
        result = _measure(model, cache, tails, request["output_len"])
        if prefix_len:
            cache.crop(prefix_len - cache.get_seq_length())  # a negative number: so many off the end
        return result

    name = str(model.dtype).removeprefix("torch.")
    return handle, {
        "world_size": 1,
        "threads_per_rank": setup["threads"],
        "dtype": name,
        "compute_dtype": name,
    }


@torch.inference_mode()
def _prefill(model: Any, prompts: list[list[int]]) -> DynamicCache:
    """The library's own KV cache with the prompts."""
    cache = DynamicCache(config=model.config)
    model(torch.tensor(prompts), cache=cache, use_cache=True, logits_to_keep=1)
    return cache


@torch.inference_mode()
def _measure(model: Any, cache: DynamicCache, tails: list[list[int]], output_len: int) -> dict[str, Any]:
    """Prefill all tails at once, then greedy decode."""
    begin = time.monotonic()
    out = model(torch.tensor(tails), cache=cache, use_cache=True, logits_to_keep=1)
    tokens = [out.logits[:, -1].argmax(-1)]
    first = time.monotonic()
    for _ in range(output_len - 1):
        out = model(tokens[-1][:, None], cache=cache, use_cache=True)
        tokens.append(out.logits[:, -1].argmax(-1))
    end = time.monotonic()
    return {
        "ttft_s": first - begin,
        "prefill_s": first - begin,
        "tpot_s": (end - first) / (output_len - 1) if output_len > 1 else None,
        "token_ids": torch.stack(tokens, dim=1).tolist(),
    }


if __name__ == "__main__":
    sys.exit(serve(start))
