"""With the same memory per rank, D = 2 and D = 4 hold 2 and 4 times the tokens: shown by filling it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from prefold import SamplingParams
from prefold.request import RequestOutput
from prefold.testing.exactness import Oracle, generate_over_time, layout_options
from prefold.testing.thread_executor import ThreadLLM

LAYOUTS = ["PCP4", "PCP4 DCP2", "PCP4 DCP4", "TP2", "TP2 DCP2", "TP2 PCP2 DCP2", "TP2 PCP2 DCP4"]
BLOCK_SIZE = 4
TOKENS = 256
"""What the memory of these tests holds on one rank without DCP."""
PROMPT_LEN, MAX_TOKENS = 56, 8
"""Of a request. Its last token is never fed back, so that it takes 63 slots: 64 in whole blocks."""
SLOTS = 64


@pytest.fixture(params=LAYOUTS)
def llm(request: pytest.FixtureRequest, checkpoint_of: Callable[[int], Path]) -> Iterator[ThreadLLM]:
    layers, token_dim, element_bytes = 2, 32 + 8, 4
    with ThreadLLM(
        str(checkpoint_of(layers)),
        kv_cache_memory_bytes=TOKENS * layers * token_dim * element_bytes,
        block_size=BLOCK_SIZE,
        max_model_len=TOKENS,
        min_split_tokens=1,
        debug_poison=True,
        enable_prefix_caching=False,
        **layout_options(request.param),
    ) as engine:
        yield engine


def fill(llm: ThreadLLM, oracle: Oracle, count: int) -> tuple[list[RequestOutput], float, int]:
    """Run `count` requests at once: (outputs, largest share of blocks in use, most requests together)."""
    scheduler = llm.engine.scheduler
    usage, together = [0.0], [0]

    def note(step: int) -> None:
        usage.append(scheduler.kv.usage)
        together.append(len(scheduler.running))

    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    prompts = [oracle.prompt(PROMPT_LEN, seed=i) for i in range(count)]
    outputs = generate_over_time(llm, prompts, params, [0] * count, note)
    assert [output.outputs[0].token_ids for output in outputs] == [oracle(prompt) for prompt in prompts]
    return outputs, max(usage), max(together)


def test_the_same_memory_holds_d_times_the_tokens(llm: ThreadLLM, oracle: Oracle) -> None:
    config = llm.engine.config
    dcp, virtual_block = config.parallel.decode_context_parallel_size, config.virtual_block_size
    held = config.cache.num_blocks * virtual_block
    assert dcp * TOKENS - virtual_block < held <= dcp * TOKENS
    fitting = held // SLOTS

    outputs, usage, together = fill(llm, oracle, fitting)
    assert (usage, together) == (1.0, fitting), "all of them at once, to the last block"
    assert all(output.metrics.num_preemptions == 0 for output in outputs)

    outputs, _, together = fill(llm, oracle, fitting + 1)
    preemptions = sum(output.metrics.num_preemptions for output in outputs)
    assert preemptions > 0 or together <= fitting, "one more does not fit"
