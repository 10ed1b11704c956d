"""Nothing that was not written for a request is read for it: stale memory turned to NaN changes nothing."""

from __future__ import annotations

import math

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.request import RequestOutput
from prefold.testing.reference import Case
from prefold.workspace import NAN_BYTE

PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3, prompt_logprobs=1)
NO_PROMPT_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=3)


@pytest.fixture(scope="module")
def cases(tiny) -> list[Case]:
    return tiny.cases([41, 3, 16, 1, 90, 7], num_tokens=8, seed=9)


def numbers(outputs: list[RequestOutput]) -> list:
    """Tokens and all log-probabilities, to be compared bit for bit."""
    return [
        (
            output.outputs[0].token_ids,
            output.outputs[0].cumulative_logprob,
            [[p.logprob for p in entry.values()] for entry in output.outputs[0].logprobs or []],
            [[p.logprob for p in (entry or {}).values()] for entry in output.prompt_logprobs or []],
        )
        for output in outputs
    ]


def poison_unused_kv(llm: LLM) -> int:
    """NaN into every cache slot that no request and no cached prefix uses; returns their number."""
    runner = llm.engine.core.executor._worker.runner  # type: ignore[attr-defined]
    scheduler, cache = llm.engine.scheduler, runner.kv_cache
    used = torch.zeros(cache.shape[1:3], dtype=torch.bool)
    used[list(scheduler.kv.pool._block_of_hash.values())] = True
    for request in scheduler.running:
        for i, block in enumerate(scheduler.kv.block_ids(request)):
            used[block, : max(0, request.num_computed_tokens - i * cache.shape[2])] = True
    cache[:, ~used] = math.nan if cache.is_floating_point() else NAN_BYTE
    return int((~used).sum())


@torch.inference_mode()
def poison_buffers(llm: LLM) -> int:
    """NaN into every buffer of the workspace; returns their number."""
    flat = llm.engine.core.executor._worker.runner.workspace._flat  # type: ignore[attr-defined]
    for buffer in flat.values():
        if buffer.dtype.is_floating_point:
            buffer.fill_(math.nan)
        elif buffer.dtype == torch.uint8:
            buffer.fill_(NAN_BYTE)
        else:
            buffer.fill_(113)
    return len(flat)


@pytest.mark.parametrize("budget", [10, 1000])
def test_debug_poison_changes_no_bit(tiny, cases: list[Case], budget: int):
    results = []
    for poison in (True, False):
        llm = tiny.llm(debug_poison=poison, max_num_batched_tokens=budget)
        results.append(numbers(llm.generate([case.prompt for case in cases], PARAMS)))
    assert results[0] == results[1]
    assert [tokens for tokens, *_ in results[0]] == [case.tokens for case in cases]
    assert all(math.isfinite(entry[1]) for entry in results[0])


@pytest.mark.parametrize("prefix_caching", [True, False])
@pytest.mark.parametrize("block_size", [1, 4, 16])
def test_poison_after_every_step(tiny, cases: list[Case], block_size: int, prefix_caching: bool):
    options = {
        "debug_poison": False,
        "block_size": block_size,
        "max_num_batched_tokens": 30,
        "enable_prefix_caching": prefix_caching,
        "max_num_seqs": 3,
    }
    clean, dirty = tiny.llm(**options), tiny.llm(**options)

    def poison(*_: object) -> None:
        assert poison_unused_kv(dirty) > 0
        buffers.append(poison_buffers(dirty))

    buffers: list[int] = []
    prompts = [case.prompt for case in cases]
    for _ in range(2):  # with caching, the second time on what the first has left
        poison()
        expected = numbers(clean.generate(prompts, NO_PROMPT_LOGPROBS))
        assert numbers(dirty.generate(prompts, NO_PROMPT_LOGPROBS, progress=poison)) == expected
        assert [tokens for tokens, *_ in expected] == [case.tokens for case in cases]
    assert buffers[-1] > 10


def test_poison_after_every_step_with_kv_in_fp8(tiny, cases: list[Case]):
    options = {
        "debug_poison": False,
        "block_size": 4,
        "max_num_batched_tokens": 30,
        "max_num_seqs": 3,
        "kv_cache_dtype": "fp8",
    }
    clean, dirty = tiny.llm(**options), tiny.llm(**options)

    def poison(*_: object) -> None:
        assert poison_unused_kv(dirty) > 0
        assert poison_buffers(dirty) > 0

    prompts = [case.prompt for case in cases]
    expected = numbers(clean.generate(prompts, NO_PROMPT_LOGPROBS))
    assert numbers(dirty.generate(prompts, NO_PROMPT_LOGPROBS, progress=poison)) == expected
    assert all(math.isfinite(entry[1]) for entry in expected)
    # It would show.
    dirty.engine.add_request("a", cases[0].prompt, NO_PROMPT_LOGPROBS)
    dirty.engine.step()
    request = dirty.engine.scheduler.requests["a"]
    dirty.engine.core.executor._worker.runner.kv_cache[0, dirty.engine.scheduler.kv.block_ids(request)[0]] = (
        0x7F
    )
    (output,) = dirty.engine.step()
    assert output.outputs[0].finish_reason == "error"


def test_poison_would_show(tiny, cases: list[Case]):
    """The tests above can fail: NaN in a slot that is used makes the request fail."""
    llm = tiny.llm(debug_poison=False)
    llm.engine.add_request("a", cases[0].prompt, NO_PROMPT_LOGPROBS)
    llm.engine.step()
    request = llm.engine.scheduler.requests["a"]
    block = llm.engine.scheduler.kv.block_ids(request)[0]
    llm.engine.core.executor._worker.runner.kv_cache[0, block, 0] = math.nan
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "error"


def test_a_request_after_a_failed_one_gets_its_blocks(tiny, cases: list[Case], monkeypatch):
    """NaN KV of a request that failed stays in free blocks, and the next request may get them."""
    llm = tiny.llm(enable_prefix_caching=False, num_blocks=40, max_model_len=160)
    runner = llm.engine.core.executor._worker.runner
    llm.engine.add_request("a", cases[4].prompt, NO_PROMPT_LOGPROBS)
    llm.engine.step()
    runner.kv_cache.fill_(math.nan)
    (output,) = llm.engine.step()
    assert output.outputs[0].finish_reason == "error"
    for case in cases:
        (output,) = llm.generate(case.prompt, NO_PROMPT_LOGPROBS)
        assert output.outputs[0].token_ids == case.tokens
