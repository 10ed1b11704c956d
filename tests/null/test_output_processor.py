"""From tokens to outputs, with a tokenizer whose token i is the i-th string of a list."""

import pytest

from prefold.engine.output_processor import OutputProcessor
from prefold.request import Logprob, RequestOutput, SamplingParams
from prefold.step import TokenLogprobs

VOCAB = ["</s>", "Hel", "lo", " wor", "ld", "!", "S", "TO", "P", "é1", "é2"]
EOS = 0


class FakeDetokenizer:
    """Token 9 is half a character that token 10 completes; `finish` shows a lone half as "?"."""

    def __init__(self, skip):
        self.skip, self.half = skip, False

    def push(self, token_id):
        if token_id == 9:
            self.half = True
            return ""
        if token_id == 10:
            self.half = False
            return "é"
        return "" if self.skip and token_id == EOS else VOCAB[token_id]

    def finish(self):
        half, self.half = self.half, False
        return "?" if half else ""


class FakeTokenizer:
    def detokenizer(self, skip_special_tokens=True):
        return FakeDetokenizer(skip_special_tokens)

    def token_text(self, token_id):
        return VOCAB[token_id]


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def process(processor: OutputProcessor, *args, **options) -> tuple[RequestOutput | None, set[str]]:
    """An update, and what the request looks like after it."""
    request, to_stop = processor.update(*args, **options)
    return request and request.output(), to_stop


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def processor(clock):
    return OutputProcessor(FakeTokenizer(), clock)


def entry(*pairs):
    """TokenLogprobs: the chosen (token, logprob) first; its rank is 5 to tell it from the others."""
    return TokenLogprobs([t for t, _ in pairs], [p for _, p in pairs], [5, *range(1, len(pairs))])


def test_text_grows_and_the_last_output_is_final(processor):
    assert processor.add_request("r", "prompt", [7, 7], SamplingParams()) == ["r"]
    first, stop = process(processor, "r", [1])
    assert (first.finished, first.outputs[0].text, stop) == (False, "Hel", set())
    assert first.outputs[0].finish_reason is None
    last, stop = process(processor, "r", [2], finish_reason="length")
    assert (last.request_id, last.prompt, last.prompt_token_ids) == ("r", "prompt", [7, 7])
    assert (last.finished, last.outputs[0].text, last.outputs[0].token_ids) == (True, "Hello", [1, 2])
    assert (last.outputs[0].finish_reason, last.outputs[0].stop_reason, stop) == ("length", None, set())
    assert (first.outputs[0].text, first.outputs[0].token_ids) == ("Hel", [1]), "outputs are snapshots"
    assert last.prompt_logprobs is None
    assert last.outputs[0].logprobs is None
    assert last.outputs[0].cumulative_logprob is None
    assert processor.num_unfinished == 0


def test_several_tokens_per_step(processor):
    processor.add_request("r", None, [7], SamplingParams())
    output, _ = process(processor, "r", [1, 2, 3, 4, 5])
    assert output.outputs[0].text == "Hello world!"


def test_nothing_is_returned_before_the_end_without_stream(processor):
    processor.add_request("r", None, [7], SamplingParams(), stream=False)
    assert process(processor, "r", [1]) == (None, set())
    output, _ = process(processor, "r", [2], finish_reason="length")
    assert output.outputs[0].text == "Hello"


def test_a_prefill_chunk_shows_nothing(processor):
    processor.add_request("r", None, [7, 7], SamplingParams())
    assert process(processor, "r", []) == (None, set())


# --- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("skip", [True, False])
def test_the_token_that_ends_a_text_is_no_part_of_it(processor, skip):
    processor.add_request("r", None, [7], SamplingParams(skip_special_tokens=skip, logprobs=0))
    logprobs = [entry((1, -1.0)), entry((EOS, -0.5))]
    output, stop = process(processor, "r", [1, EOS], logprobs=logprobs, finish_reason="stop")
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, sample.finish_reason, stop) == ("Hel", [1, EOS], "stop", set())
    assert len(sample.logprobs) == 2


def test_an_ignored_end_token_is_shown_if_special_tokens_are(processor):
    processor.add_request("r", None, [7], SamplingParams(skip_special_tokens=False, ignore_eos=True))
    output, _ = process(processor, "r", [EOS, 1], finish_reason="length")
    assert output.outputs[0].text == "</s>Hel"


def test_a_stop_token_is_the_reason(processor):
    processor.add_request("r", None, [7], SamplingParams(stop_token_ids=[5]))
    output, _ = process(processor, "r", [1, 5], finish_reason="stop", stop_reason=5)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == ("Hel", 5)


def test_a_stop_string_across_tokens_asks_for_an_abort(processor):
    processor.add_request("r", None, [7], SamplingParams(stop="STOP", logprobs=0))
    shown = []
    for token in (1, 6, 7):
        output, stop = process(processor, "r", [token], logprobs=[entry((token, -1.0))])
        shown.append(output.outputs[0].text)
        assert stop == set()
    assert shown == ["Hel", "Hel", "Hel"], "the beginning of a stop string is held back"
    last = [entry((8, -1.0)), entry((5, -1.0))]
    output, stop = process(processor, "r", [8, 5], logprobs=last)
    sample = output.outputs[0]
    assert stop == {"r"}
    assert output.finished
    assert (sample.text, sample.finish_reason, sample.stop_reason) == ("Hel", "stop", "STOP")
    assert sample.token_ids == [1, 6, 7, 8], "tokens after the stop string are dropped"
    assert len(sample.logprobs) == 4
    assert sample.cumulative_logprob == -4.0
    assert process(processor, "r", [5]) == (None, set()), "a late token changes nothing"


def test_a_beginning_that_leads_nowhere_is_shown(processor):
    processor.add_request("r", None, [7], SamplingParams(stop=["STOP", "lo!"]))
    texts = [process(processor, "r", [t])[0].outputs[0].text for t in (1, 2, 3, 6, 7)]
    assert texts == ["He", "Hel", "Hello wor", "Hello wor", "Hello wor"]
    output, _ = process(processor, "r", [4], finish_reason="length")
    assert output.outputs[0].text == "Hello worSTOld"


def test_held_text_is_shown_at_the_end(processor):
    processor.add_request("r", None, [7], SamplingParams(stop=["STOP"]))
    output, _ = process(processor, "r", [1, 6, 7], finish_reason="length")
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("HelSTO", "length")


@pytest.mark.parametrize("reason", ["length", "stop"])
def test_a_stop_string_in_the_last_step_wins_and_needs_no_abort(processor, reason):
    processor.add_request("r", None, [7], SamplingParams(stop=["STOP"]))
    output, stop = process(processor, "r", [1, 6, 7, 8, EOS], finish_reason=reason)
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason, stop) == ("Hel", "stop", "STOP", set())
    assert sample.token_ids == [1, 6, 7, 8]


@pytest.mark.parametrize(("min_tokens", "stopped"), [(0, True), (3, True), (4, False), (5, False)])
def test_stop_strings_do_not_count_within_min_tokens(processor, min_tokens, stopped):
    processor.add_request("r", None, [7], SamplingParams(stop=["STOP"], min_tokens=min_tokens))
    for token in (1, 6, 7):
        process(processor, "r", [token])
    output, stop = process(processor, "r", [8])
    assert bool(stop) == output.finished == stopped
    if not stopped:
        output, _ = process(processor, "r", [5], finish_reason="length")
        assert output.outputs[0].text == "HelSTOP!"


def test_an_incomplete_character_appears_when_complete_or_at_the_end(processor):
    processor.add_request("r", None, [7], SamplingParams())
    texts = [process(processor, "r", [t])[0].outputs[0].text for t in (1, 9, 10, 9)]
    assert texts == ["Hel", "Hel", "Helé", "Helé"]
    output, _ = process(processor, "r", [], finish_reason="length")
    assert output.outputs[0].text == "Helé?"


def test_text_that_appears_at_the_end_is_searched_too(processor):
    processor.add_request("r", None, [7], SamplingParams(stop=["l?"]))
    output, stop = process(processor, "r", [1, 9], finish_reason="length")
    sample = output.outputs[0]
    assert (sample.text, sample.finish_reason, sample.stop_reason, stop) == ("He", "stop", "l?", set())


def test_abort(processor):
    processor.add_request("r", None, [7], SamplingParams(stop=["STOP"]))
    process(processor, "r", [1, 6, 9])
    output, ids = processor.abort("r")
    assert (output.finished, ids) == (True, {"r"})
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("HelS?", "abort")
    assert processor.abort("r") == (None, set())
    assert process(processor, "r", [2], finish_reason="length") == (None, set()), "a step was under way"
    assert processor.abort("unknown") == (None, set())
    assert processor.num_unfinished == 0


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_other_finish_reasons_pass_through(processor, reason):
    processor.add_request("r", None, [7], SamplingParams())
    output, stop = process(processor, "r", [], finish_reason=reason, stop_reason="why")
    assert (output.finished, output.outputs[0].finish_reason, stop) == (True, reason, set())
    assert output.outputs[0].stop_reason == "why"


# --- several samples ------------------------------------------------------------------------------


def test_samples_of_one_prompt_end_one_by_one(processor):
    ids = processor.add_request("r", None, [7], SamplingParams(n=3, stop=["STOP"]))
    assert ids == ["r:0", "r:1", "r:2"]
    output, _ = process(processor, "r:1", [1], finish_reason="length")
    assert not output.finished
    assert [s.text for s in output.outputs] == ["", "Hel", ""]
    assert [s.finish_reason for s in output.outputs] == [None, "length", None]
    output, stop = process(processor, "r:2", [4, 6, 7, 8])
    assert (output.finished, stop) == (False, {"r:2"})
    output, _ = process(processor, "r:0", [5], finish_reason="length")
    assert output.finished
    assert output.request_id == "r"
    assert [(s.index, s.text, s.finish_reason) for s in output.outputs] == [
        (0, "!", "length"),
        (1, "Hel", "length"),
        (2, "ld", "stop"),
    ]
    assert processor.num_unfinished == 0


def test_abort_ends_only_the_unfinished_samples(processor):
    processor.add_request("r", None, [7], SamplingParams(n=3))
    process(processor, "r:1", [1], finish_reason="length")
    process(processor, "r:0", [2])
    output, ids = processor.abort("r")
    assert ids == {"r:0", "r:2"}
    assert [(s.text, s.finish_reason) for s in output.outputs] == [
        ("lo", "abort"),
        ("Hel", "length"),
        ("", "abort"),
    ]


def test_without_stream_all_samples_come_together(processor):
    processor.add_request("r", None, [7], SamplingParams(n=2), stream=False)
    assert process(processor, "r:0", [1], finish_reason="length") == (None, set())
    output, _ = process(processor, "r:1", [2], finish_reason="length")
    assert [s.text for s in output.outputs] == ["Hel", "lo"]


def test_ids_in_use_are_refused(processor):
    processor.add_request("r", None, [7], SamplingParams(n=2))
    for taken in ("r", "r:1"):
        with pytest.raises(ValueError, match="in use"):
            processor.add_request(taken, None, [7], SamplingParams())
    processor.abort("r")
    assert processor.add_request("r", None, [7], SamplingParams()) == ["r"]


# --- without a tokenizer --------------------------------------------------------------------------


def test_token_ids_only(clock):
    processor = OutputProcessor(None, clock)
    processor.add_request("r", None, [7], SamplingParams(logprobs=1, stop_token_ids=[5]))
    logprobs = [entry((1, -1.0), (2, -0.5)), entry((5, -2.0), (2, -0.5))]
    output, stop = process(processor, "r", [1, 5], logprobs=logprobs, finish_reason="stop", stop_reason=5)
    sample = output.outputs[0]
    assert (sample.text, sample.token_ids, stop) == ("", [1, 5], set())
    assert sample.logprobs[0] == {1: Logprob(-1.0, 5, None), 2: Logprob(-0.5, 1, None)}
    with pytest.raises(ValueError, match="needs a tokenizer"):
        processor.add_request("s", None, [7], SamplingParams(stop=["x"]))
    assert processor.abort("s") == (None, set())


# --- log-probabilities ----------------------------------------------------------------------------


def test_logprobs_per_token(processor):
    processor.add_request("r", None, [7], SamplingParams(logprobs=2))
    process(processor, "r", [1], logprobs=[entry((1, -2.0), (3, -0.1), (4, -0.2))])
    output, _ = process(processor, "r", [2], logprobs=[entry((2, -3.0), (3, -0.1), (4, -0.2))])
    sample = output.outputs[0]
    assert sample.logprobs[0] == {
        1: Logprob(-2.0, 5, "Hel"),
        3: Logprob(-0.1, 1, " wor"),
        4: Logprob(-0.2, 2, "ld"),
    }
    assert list(sample.logprobs[1]) == [2, 3, 4], "the chosen token comes first"
    assert sample.cumulative_logprob == -5.0


def test_missing_logprobs_are_our_mistake(processor):
    processor.add_request("r", None, [7], SamplingParams(logprobs=2))
    with pytest.raises(AssertionError):
        process(processor, "r", [1])


PROMPT = [1, 2, 3, 4, 5, 6, 7, 8]


def prompt_chunk(start, stop):
    """What a step that computes positions [start, stop) of PROMPT returns: no entry for the last one."""
    return [entry((PROMPT[p + 1], -float(p + 1))) for p in range(start, min(stop, len(PROMPT) - 1))]


def feed(processor, *chunks, sample_id="r"):
    for start, stop in chunks:
        process(processor, sample_id, [], prompt_logprobs=prompt_chunk(start, stop), prompt_start=start)


EXPECTED = [None, *({token: -float(p + 1)} for p, token in enumerate(PROMPT[1:]))]


def summary(output):
    return [e and {t: lp.logprob for t, lp in e.items()} for e in output.prompt_logprobs]


@pytest.mark.parametrize(
    "chunks",
    [
        [(0, 8)],
        [(0, 3), (3, 5), (5, 8)],
        [(i, i + 1) for i in range(8)],
        [(0, 3), (3, 6), (0, 8)],  # preempted after 6, recomputed at once
        [(0, 3), (3, 6), (0, 2), (2, 7), (7, 8)],  # or in other chunks
        [(0, 5), (4, 8)],  # or partly found in the prefix cache
        [(0, 8), (0, 8)],  # preempted after the prompt was complete
    ],
)
def test_prompt_logprobs_of_chunks_and_recomputation(processor, chunks):
    processor.add_request("r", None, PROMPT, SamplingParams(prompt_logprobs=0))
    feed(processor, *chunks)
    output, _ = process(processor, "r", [1])
    assert summary(output) == EXPECTED


def test_a_gap_in_prompt_logprobs_is_our_mistake(processor):
    processor.add_request("r", None, PROMPT, SamplingParams(prompt_logprobs=0))
    feed(processor, (0, 3))
    with pytest.raises(AssertionError, match="missing"):
        feed(processor, (4, 8))


def test_prompt_logprobs_come_from_the_first_sample(processor):
    processor.add_request("r", None, PROMPT, SamplingParams(n=2, prompt_logprobs=0))
    feed(processor, (5, 8), sample_id="r:1")  # found the others' blocks in the prefix cache
    feed(processor, (0, 8), sample_id="r:0")
    assert summary(process(processor, "r:1", [1])[0]) == EXPECTED


def test_prompt_logprobs_of_a_one_token_prompt(processor):
    processor.add_request("r", None, [7], SamplingParams(prompt_logprobs=3))
    assert process(processor, "r", [1])[0].prompt_logprobs == [None]


# --- metrics --------------------------------------------------------------------------------------


def test_metrics_with_the_clock(processor, clock):
    processor.add_request("r", None, [7], SamplingParams(), arrival_time=90.0)
    clock.now = 101.0
    processor.mark_scheduled("r", num_cached_tokens=32)
    clock.now = 103.0
    first = process(processor, "r", [1])[0].metrics
    assert (first.first_scheduled_s, first.ttft_s, first.latency_s, first.tpot_s) == (11.0, 13.0, None, None)
    processor.mark_preempted("r")
    processor.mark_scheduled("r", num_cached_tokens=64)  # again after the preemption
    clock.now = 105.0
    process(processor, "r", [2, 3])
    clock.now = 109.0
    metrics = process(processor, "r", [4], finish_reason="length")[0].metrics
    assert (metrics.arrival_time, metrics.first_scheduled_s, metrics.ttft_s) == (90.0, 11.0, 13.0)
    assert (metrics.latency_s, metrics.tpot_s) == (19.0, 2.0)
    assert (metrics.num_cached_tokens, metrics.num_preemptions) == (32, 1)
    assert first.latency_s is None, "outputs are snapshots"


def test_metrics_with_explicit_times(processor):
    processor.add_request("r", None, [7], SamplingParams(), arrival_time=1.0)
    processor.mark_scheduled("r", now=2.0)
    metrics = process(processor, "r", [1], finish_reason="length", now=4.0)[0].metrics
    assert (metrics.first_scheduled_s, metrics.ttft_s, metrics.latency_s) == (1.0, 3.0, 3.0)
    assert metrics.tpot_s is None, "one token has no time between tokens"


def test_metrics_of_several_samples(processor):
    processor.add_request("r", None, [7], SamplingParams(n=2), arrival_time=0.0)
    for sample_id, now in (("r:0", 1.0), ("r:1", 2.0)):
        processor.mark_scheduled(sample_id, now=now)
    process(processor, "r:1", [1], now=3.0)
    process(processor, "r:0", [1], finish_reason="length", now=4.0)
    metrics = process(processor, "r:1", [2, 3], finish_reason="length", now=7.0)[0].metrics
    assert (metrics.first_scheduled_s, metrics.ttft_s, metrics.latency_s) == (1.0, 3.0, 7.0)
    assert metrics.tpot_s == 2.0, "(7 - 3) / (3 tokens - 1)"


def test_an_abort_before_the_first_token(processor):
    processor.add_request("r", None, [7], SamplingParams(), arrival_time=1.0)
    metrics = processor.abort("r", now=5.0)[0].metrics
    assert (metrics.latency_s, metrics.ttft_s, metrics.tpot_s) == (4.0, None, None)
    processor.mark_scheduled("r")
    processor.mark_preempted("r")
