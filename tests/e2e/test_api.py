"""LLM and LLMEngine as a user meets them: prompts, sampling parameters, outputs, streaming."""

from __future__ import annotations

import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.request import RequestOutput
from prefold.testing.reference import Case

EOS = 1
TEXT = "the king and the thing in there"


def greedy(max_tokens: int = 12, **options) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def sampled(max_tokens: int = 12, **options) -> SamplingParams:
    return SamplingParams(temperature=1.0, max_tokens=max_tokens, **{"ignore_eos": True, **options})


def tokens_of(output: RequestOutput) -> list[int]:
    assert len(output.outputs) == 1
    return output.outputs[0].token_ids


@pytest.fixture(scope="module")
def cases(tiny) -> list[Case]:
    return tiny.cases([6, 25, 11, 2], num_tokens=12, seed=11)


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return tiny.llm(skip_tokenizer_init=False)


# ---------------------------------------------------------------- prompts


def test_forms_of_a_prompt(llm: LLM):
    ids = llm.tokenizer.encode(TEXT)
    forms = [TEXT, [TEXT], ids, [ids], {"prompt": TEXT}, {"prompt_token_ids": ids}, [{"prompt": TEXT}]]
    forms += [(TEXT,), tuple(ids), np.array(ids), [np.array(ids, dtype=np.int32)]]
    outputs = [llm.generate(form, greedy()) for form in forms]
    assert all(len(output) == 1 for output in outputs)
    assert {tuple(tokens_of(output)) for (output,) in outputs} == {tuple(tokens_of(outputs[0][0]))}
    assert {tuple(output.prompt_token_ids) for (output,) in outputs} == {tuple(ids)}
    assert [output.prompt for (output,) in outputs] == [
        TEXT if i in (0, 1, 4, 6, 7) else None for i in range(len(forms))
    ]
    assert all(type(token) is int for (output,) in outputs for token in output.prompt_token_ids)
    (both,) = llm.generate({"prompt": "shown", "prompt_token_ids": ids}, greedy())
    assert (both.prompt, tokens_of(both)) == ("shown", tokens_of(outputs[0][0]))


def test_a_folder_below_home(tiny, cases: list[Case], monkeypatch: pytest.MonkeyPatch):
    folder = tiny.folder("small")
    monkeypatch.setenv("HOME", str(folder.parent))
    llm = LLM("~/small", threads_per_rank=1, num_blocks=100, max_model_len=100)
    assert tokens_of(llm.generate(cases[0].prompt, greedy())[0]) == cases[0].tokens


def test_no_prompts_give_no_outputs(llm: LLM):
    assert llm.generate([]) == []
    assert llm.engine.step() == []


def test_outputs_come_in_the_prompts_order(llm: LLM, cases: list[Case]):
    lengths = [12, 1, 6, 3]
    outputs = llm.generate([case.prompt for case in cases], [greedy(n) for n in lengths])
    assert [tokens_of(output) for output in outputs] == [c.tokens[:n] for c, n in zip(cases, lengths)]
    assert [output.prompt_token_ids for output in outputs] == [case.prompt for case in cases]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)
    ids = [int(output.request_id) for output in outputs]
    assert ids == sorted(set(ids))


def test_progress_is_reported_after_every_step(llm: LLM, cases: list[Case]):
    calls: list[tuple[int, int, int]] = []
    before = llm.engine.metrics.num_steps
    llm.generate(
        [case.prompt for case in cases[:2]],
        [greedy(3), greedy(5)],
        progress=lambda metrics, done, total: calls.append((metrics.num_steps - before, done, total)),
    )
    assert calls == [(1, 0, 2), (2, 0, 2), (3, 1, 2), (4, 1, 2), (5, 2, 2)]


def test_chat_applies_the_template_once(llm: LLM, tiny, tmp_path: Path):
    messages = [{"role": "user", "content": "who is there"}, {"role": "assistant", "content": "an ant"}]
    text = llm.tokenizer.apply_chat_template(messages)
    (output,) = llm.chat(messages, greedy())
    assert output.prompt == text == "<s>user: who is there\nassistant: an ant\nassistant: "
    assert output.prompt_token_ids == llm.tokenizer.encode(text, add_special_tokens=False)
    two = llm.chat([messages, messages[:1]], greedy())
    assert tokens_of(two[0]) == tokens_of(output)
    assert two[1].prompt == "<s>user: who is there\nassistant: "

    # A tokenizer that begins every text with <s>: the template's own is not to be doubled.
    folder = shutil.copytree(tiny.folder("small"), tmp_path / "bos")
    tokenizer = llm.tokenizer.hf.backend_tokenizer.from_file(str(folder / "tokenizer.json"))
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    other = LLM(str(folder), threads_per_rank=1, num_blocks=100, max_model_len=500)
    assert other.generate(TEXT, greedy(1))[0].prompt_token_ids[0] == 0
    assert other.chat(messages, greedy(1))[0].prompt_token_ids == output.prompt_token_ids


# ---------------------------------------------------------------- where a request ends


def test_end_of_sequence(llm: LLM, cases: list[Case]):
    prompt = cases[0].prompt
    (output,) = llm.generate(prompt, greedy(ignore_eos=False, logit_bias={EOS: 1000.0}))
    sample = output.outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == ([EOS], "stop", None)
    assert sample.text == ""
    (output,) = llm.generate(prompt, greedy(logit_bias={EOS: 1000.0}))
    assert (tokens_of(output), output.outputs[0].finish_reason) == ([EOS] * 12, "length")


@pytest.mark.parametrize("min_tokens", [1, 4, 12])
def test_min_tokens_hold_the_end_back(llm: LLM, cases: list[Case], min_tokens: int):
    options = {"ignore_eos": False, "logit_bias": {EOS: 1000.0}, "min_tokens": min_tokens}
    (output,) = llm.generate(cases[0].prompt, greedy(**options))
    expected = cases[0].tokens[:min_tokens]
    assert tokens_of(output) == (expected + [EOS])[:12]
    stop = cases[0].tokens[0]
    (output,) = llm.generate(cases[0].prompt, greedy(stop_token_ids=[stop, 10**6], min_tokens=min_tokens))
    assert stop not in tokens_of(output)[:min_tokens]


def test_stop_token_ids(llm: LLM, cases: list[Case]):
    for case in cases:
        stop = case.tokens[5]
        (output,) = llm.generate(case.prompt, greedy(stop_token_ids=[stop]))
        sample = output.outputs[0]
        assert sample.token_ids == case.tokens[: case.tokens.index(stop) + 1]
        assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
        assert sample.text == llm.tokenizer.decode(sample.token_ids[:-1])


def test_stop_strings(llm: LLM, cases: list[Case]):
    for case in cases:
        text = llm.tokenizer.decode(case.tokens)
        for length in (1, 2, 3):
            stop = text[4 : 4 + length]
            (output,) = llm.generate(case.prompt, greedy(stop=["never ever", stop]))
            sample = output.outputs[0]
            assert sample.text == text[: text.index(stop)]
            assert (sample.finish_reason, sample.stop_reason) == ("stop", stop)
            assert sample.token_ids == case.tokens[: len(sample.token_ids)]
            assert stop in llm.tokenizer.decode(sample.token_ids)
    scheduler = llm.engine.scheduler
    scheduler.check_integrity()
    assert scheduler.kv.pool.num_free_blocks == scheduler.kv.pool.num_blocks


def test_max_tokens_none_goes_on_to_max_model_len(tiny, cases: list[Case]):
    llm = tiny.llm(max_model_len=40)
    (output,) = llm.generate(cases[1].prompt, greedy(max_tokens=None))
    assert len(tokens_of(output)) == 15
    assert output.outputs[0].finish_reason == "length"
    assert tokens_of(output)[:12] == cases[1].tokens


# ---------------------------------------------------------------- sampling


def test_samples_of_one_prompt(llm: LLM, cases: list[Case]):
    (output,) = llm.generate(cases[1].prompt, sampled(n=4, seed=5))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    samples = [sample.token_ids for sample in output.outputs]
    assert len({tuple(sample) for sample in samples}) == 4
    for i, sample in enumerate(samples):
        assert tokens_of(llm.generate(cases[1].prompt, sampled(seed=5 + i))[0]) == sample
    (output,) = llm.generate(cases[1].prompt, greedy(n=2))
    assert [sample.token_ids for sample in output.outputs] == [cases[1].tokens] * 2


def test_prompt_logprobs_of_several_samples(llm: LLM, cases: list[Case]):
    (output,) = llm.generate(cases[1].prompt, greedy(n=3, prompt_logprobs=1))
    (alone,) = llm.generate(cases[1].prompt, greedy(prompt_logprobs=1))
    assert [sample.token_ids for sample in output.outputs] == [cases[1].tokens] * 3
    assert len(output.prompt_logprobs) == len(cases[1].prompt)
    assert [list(e or {}) for e in output.prompt_logprobs] == [list(e or {}) for e in alone.prompt_logprobs]


def test_a_seed_gives_the_same_tokens_in_any_company(tiny, llm: LLM, cases: list[Case]):
    params = [sampled(seed=i, top_k=50 - i, top_p=0.9, min_p=0.001) for i in range(len(cases))]
    prompts = [case.prompt for case in cases]
    expected = [tokens_of(output) for output in llm.generate(prompts, params)]
    assert len({tuple(tokens) for tokens in expected}) == len(cases)
    for budget, seed in ((5, 0), (1000, 9)):
        other = tiny.llm(max_num_batched_tokens=budget, seed=seed)
        crowd = [*zip(prompts, params), *((prompt, sampled()) for prompt in prompts)]
        outputs = other.generate([p for p, _ in crowd[::-1]], [p for _, p in crowd[::-1]])[::-1]
        assert [tokens_of(output) for output in outputs[: len(cases)]] == expected
        alone = [tokens_of(other.generate(prompt, p)[0]) for prompt, p in zip(prompts, params)]
        assert alone == expected


def test_a_seed_survives_preemption(tiny, cases: list[Case]):
    llm = tiny.llm()
    params = sampled(seed=3, presence_penalty=1.0, frequency_penalty=0.5, repetition_penalty=1.2)
    expected = tokens_of(llm.generate(cases[0].prompt, params)[0])
    for at in (1, 4, 11):
        llm.engine.add_request("a", cases[0].prompt, params)
        for _ in range(at):
            llm.engine.step()
        assert llm.engine.scheduler.preempt("a")
        outputs = []
        while llm.engine.has_unfinished_requests:
            outputs = llm.engine.step()
        assert tokens_of(outputs[0]) == expected


def test_the_engines_seed(tiny, cases: list[Case]):
    def run(seed: int) -> list[list[int]]:
        outputs = tiny.llm(seed=seed).generate([cases[0].prompt] * 2, sampled())
        return [tokens_of(output) for output in outputs]

    first, again, other = run(1), run(1), run(2)
    assert first == again
    assert first[0] != first[1], "requests without a seed draw independently"
    assert first != other


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 2.0},
        {"frequency_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"repetition_penalty": 0.6},
        {"logit_bias": {7: 6.0, 8: 5.5, 300: -100.0}},
        {
            "presence_penalty": -1.0,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.1,
            "logit_bias": {9: 4.0},
        },
    ],
    ids=str,
)
def test_penalties_and_bias(tiny, llm: LLM, cases: list[Case], options: dict):
    """Against penalties written out over transformers' logits, token by token."""
    prompt = cases[3].prompt  # its greedy tokens repeat
    assert len(set(cases[3].tokens)) < len(cases[3].tokens)
    (output,) = llm.generate(prompt, greedy(max_tokens=20, **options))
    tokens = tokens_of(output)
    (judgement,) = tiny.reference("small").judge([prompt + tokens])
    params = SamplingParams(**options)
    for i, token in enumerate(tokens):
        logits = judgement.logits[len(prompt) + i - 1].numpy().astype(np.float64)
        for biased, value in (params.logit_bias or {}).items():
            logits[biased] += value
        counts = np.bincount(tokens[:i], minlength=len(logits))
        seen = (np.bincount(prompt, minlength=len(logits)) + counts) > 0
        penalty = params.repetition_penalty
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        logits -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
        assert logits[token] > logits.max() - 1e-3, i
    assert tokens[:12] != cases[3].tokens, "these options should change something"


# ---------------------------------------------------------------- log-probabilities


def test_logprobs(llm: LLM, cases: list[Case]):
    (output,) = llm.generate(cases[1].prompt, sampled(seed=1, logprobs=3, prompt_logprobs=2))
    sample = output.outputs[0]
    assert len(sample.logprobs) == len(sample.token_ids)
    total = 0.0
    for token, entry in zip(sample.token_ids, sample.logprobs):
        assert token in entry
        assert 3 <= len(entry) <= 4
        ranks = sorted(p.rank for p in entry.values())
        assert ranks[:3] == [1, 2, 3]
        by_rank = sorted(entry.values(), key=lambda p: p.rank)
        assert all(a.logprob >= b.logprob for a, b in pairwise(by_rank))
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
        total += entry[token].logprob
    assert sample.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(cases[1].prompt)
    for token, entry in zip(cases[1].prompt[1:], output.prompt_logprobs[1:]):
        assert next(iter(entry)) == token
        assert 2 <= len(entry) <= 3
    (output,) = llm.generate(cases[1].prompt, greedy(logprobs=0))
    assert [list(entry) for entry in output.outputs[0].logprobs] == [[t] for t in cases[1].tokens]
    (output,) = llm.generate(cases[1].prompt, greedy())
    assert output.outputs[0].logprobs is None
    assert output.outputs[0].cumulative_logprob is None
    assert output.prompt_logprobs is None


def test_prompt_logprobs_of_a_prompt_of_one_token(llm: LLM):
    (output,) = llm.generate([5], greedy(prompt_logprobs=2))
    assert output.prompt_logprobs == [None]


# ---------------------------------------------------------------- the engine's steps


def test_streaming(llm: LLM, cases: list[Case]):
    engine = llm.engine
    for i, case in enumerate(cases[:2]):
        engine.add_request(f"s{i}", case.prompt, greedy(5 + i))
    seen: dict[str, list[RequestOutput]] = {"s0": [], "s1": []}
    while engine.has_unfinished_requests:
        for output in engine.step():
            seen[output.request_id].append(replace(output))
    for i, outputs in enumerate(seen.values()):
        case = cases[i]
        assert [tokens_of(output) for output in outputs] == [case.tokens[: k + 1] for k in range(5 + i)]
        assert [output.finished for output in outputs] == [False] * (4 + i) + [True]
        texts = [output.outputs[0].text for output in outputs]
        assert all(b.startswith(a) for a, b in pairwise(texts))
        assert texts[-1] == llm.tokenizer.decode(case.tokens[: 5 + i])
        assert outputs[-1].metrics.ttft_s <= outputs[-1].metrics.latency_s
        assert outputs[0].metrics.latency_s is None


def test_abort(llm: LLM, cases: list[Case]):
    engine = llm.engine
    for name in ("a", "b"):
        engine.add_request(name, cases[0].prompt, greedy())
    engine.step()
    engine.step()
    output = engine.abort_request("a")
    assert output.finished
    assert output.outputs[0].finish_reason == "abort"
    assert tokens_of(output) == cases[0].tokens[:2]
    assert engine.abort_request("a") is None
    assert engine.abort_request("unknown") is None
    engine.add_request("a", cases[1].prompt, greedy())  # the id is free at once
    finished = {}
    while engine.has_unfinished_requests:
        finished |= {output.request_id: tokens_of(output) for output in engine.step() if output.finished}
    assert finished == {"a": cases[1].tokens, "b": cases[0].tokens}


def test_an_error_in_generate_leaves_nothing_behind(llm: LLM, cases: list[Case]):
    class Stop(Exception):
        pass

    def stop(*_: object) -> None:
        raise Stop

    with pytest.raises(Stop):
        llm.generate([case.prompt for case in cases], greedy(), progress=stop)
    with pytest.raises(ValueError, match="empty"):
        llm.generate([cases[0].prompt, []], greedy())
    assert not llm.engine.has_unfinished_requests
    pool = llm.engine.scheduler.kv.pool
    assert pool.num_free_blocks == pool.num_blocks
    assert tokens_of(llm.generate(cases[0].prompt, greedy())[0]) == cases[0].tokens


def test_metrics(tiny, cases: list[Case]):
    llm = tiny.llm(enable_prefix_caching=False)
    outputs = llm.generate([case.prompt for case in cases], greedy())
    metrics, lengths = llm.engine.metrics, [len(case.prompt) for case in cases]
    assert metrics.num_prompt_tokens == metrics.num_prefill_tokens == sum(lengths)
    assert metrics.num_steps == 12
    assert metrics.rank_tokens == [sum(lengths) + 11 * len(cases)]
    pairs = [(n + 11) * (n + 12) // 2 for n in lengths]
    assert metrics.rank_causal_pairs == [sum(pairs)]
    assert metrics.bytes_sent == {}
    for output in outputs:
        m = output.metrics
        assert 0 <= m.first_scheduled_s <= m.ttft_s <= m.latency_s
        assert m.tpot_s == pytest.approx((m.latency_s - m.ttft_s) / 11)


def test_shutdown_may_be_called_again(tiny, cases: list[Case]):
    with tiny.llm() as llm:
        assert tokens_of(llm.generate(cases[0].prompt, greedy())[0]) == cases[0].tokens
        llm.shutdown()
    llm.shutdown()
    torch.set_num_threads(1)
