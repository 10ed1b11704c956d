"""Which requests can be served. Pure functions of the configuration: the HTTP process refuses a request
before it is sent anywhere, and the engine with the same words."""

from __future__ import annotations

from prefold.config import EngineConfig
from prefold.request import SamplingParams


def check_request(
    config: EngineConfig, request_id: str, prompt_token_ids: list[int], params: SamplingParams
) -> int:
    """ValueError, with the numbers, unless the request can be served; returns its limit of new tokens."""
    limit, vocab_size = config.scheduler.max_model_len, config.model.vocab_size
    num_tokens = len(prompt_token_ids)
    if not prompt_token_ids:
        raise ValueError(f"request {request_id}: the prompt is empty")
    for token_id in (min(prompt_token_ids), max(prompt_token_ids)):
        if not 0 <= token_id < vocab_size:
            raise ValueError(
                f"request {request_id}: token id {token_id} is outside the vocabulary [0, {vocab_size})"
            )
    max_tokens = max(1, limit - num_tokens) if params.max_tokens is None else params.max_tokens
    if num_tokens + max_tokens > limit:
        raise ValueError(
            f"request {request_id}: {num_tokens} prompt tokens + max_tokens={max_tokens} "
            f"exceed max_model_len={limit}"
        )
    biased = max(params.logit_bias or {0: 0.0})
    if biased >= vocab_size:
        raise ValueError(
            f"request {request_id}: logit_bias names token {biased}, outside the vocabulary [0, {vocab_size})"
        )
    if params.structured_outputs is not None and not config.model.eos_token_ids:
        raise ValueError(
            f"request {request_id}: structured_outputs is not possible, as this model has no end-of-sequence "
            "token"
        )
    check_servable(config, request_id, num_tokens, max_tokens)
    return max_tokens


def check_servable(config: EngineConfig, request_id: str, num_prompt_tokens: int, max_tokens: int) -> None:
    """Raise ValueError unless the request fits the model and, alone, the KV cache of a replica."""
    limit, cache, parallel = config.scheduler.max_model_len, config.cache, config.parallel
    if num_prompt_tokens < 1:
        raise ValueError(f"request {request_id!r} has an empty prompt")
    if max_tokens < 0:
        raise ValueError(f"request {request_id!r}: max_tokens={max_tokens} must be at least 0")
    if num_prompt_tokens + min(max_tokens, 1) > limit:
        exceeds = "and with at least one generated token that exceeds" if max_tokens else "which exceeds"
        raise ValueError(
            f"request {request_id!r}: the prompt has {num_prompt_tokens} tokens, {exceeds} "
            f"max_model_len={limit}"
        )
    # The last token, generated or a target, is never computed, so its KV needs no slot.
    num_slots = max(1, min(num_prompt_tokens + max_tokens, limit) - 1)
    needed = -(-num_slots // config.virtual_block_size)
    if needed > cache.num_blocks:
        blocks = f"blocks of {config.virtual_block_size} tokens"
        if parallel.decode_context_parallel_size > 1:
            blocks = (
                f"virtual {blocks} (block_size={cache.block_size} x "
                f"decode_context_parallel_size={parallel.decode_context_parallel_size})"
            )
        raise ValueError(
            f"request {request_id!r} may need {num_slots} tokens of KV cache ({num_prompt_tokens} "
            f"prompt tokens, max_tokens={max_tokens}): {needed} {blocks}, "
            f"but the cache has {cache.num_blocks}. Raise num_blocks (or kv_cache_memory_bytes), or "
            f"lower max_tokens"
        )
