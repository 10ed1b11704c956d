"""Structured outputs: what tokens grammars allow, and whole generations under them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prefold import SamplingParams
from prefold.grammar import check_grammar
from prefold.request import RequestOutput, StructuredOutputs
from prefold.sampling.grammar import GrammarError, Grammars
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.thread_executor import ThreadLLM
from prefold.tokenizer import Tokenizer, load_tokenizer

torch.set_num_threads(1)

EOS = 1
PROMPT = [7, 8, 9, 10, 11]
CHOICES = ["yes", "yes and no", "", 'a "quoted" \\ one', "line\nline", "é 𝄞", "{1..2}", "/x/i"]
SCHEMA = {
    "type": "object",
    "properties": {
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "of": {"type": "array", "items": {"enum": ["a", "bc", None]}, "minItems": 2, "maxItems": 4},
    },
    "required": ["n", "of"],
    "additionalProperties": False,
}
JSON = StructuredOutputs(json_schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("grammar") / "m", num_hidden_layers=2)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


def start(folder: Path, **options: Any) -> ThreadLLM:
    return ThreadLLM(str(folder), **({"block_size": 4, "num_blocks": 400, "max_model_len": 700} | options))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[ThreadLLM]:
    llm = start(folder)
    yield llm
    llm.shutdown()


@pytest.fixture(scope="module")
def grammars(folder: Path) -> Grammars:
    """Over more logits than the tokenizer has tokens."""
    return Grammars(str(folder), 333, (EOS,))


def allowed(grammars: Grammars, structured: StructuredOutputs, output: list[int]) -> set[int]:
    grammars.add("r", structured)
    return set(grammars.allowed("r", np.array(output, np.int32)).nonzero()[0].tolist())


def params(structured: StructuredOutputs | None = JSON, **options: Any) -> SamplingParams:
    given = {"temperature": 1.0, "max_tokens": 300, "structured_outputs": structured} | options
    return SamplingParams(**given)


def texts(tokenizer: Tokenizer, outputs: list[RequestOutput]) -> list[str]:
    """Of requests that have all come to their own end."""
    samples = [sample for output in outputs for sample in output.outputs]
    assert {sample.finish_reason for sample in samples} == {"stop"}
    assert all(sample.token_ids[-1] == EOS for sample in samples)
    return [tokenizer.decode(sample.token_ids[:-1], skip_special_tokens=False) for sample in samples]


# Schemas with the values that they describe


Described = tuple[dict[str, Any], Callable[[Any], bool]]


def _integers(bounds: tuple[int, int]) -> Described:
    low, high = sorted(bounds)
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return schema, lambda value: type(value) is int and low <= value <= high


def _enums(values: list[Any]) -> Described:
    texts = [json.dumps(value) for value in values]
    return {"enum": values}, lambda value: json.dumps(value) in texts


def _strings(length: int) -> Described:
    schema = {"type": "string", "maxLength": length}
    return schema, lambda value: isinstance(value, str) and len(value) <= length


def _arrays(entry: Described, lengths: tuple[int, int]) -> Described:
    low, high = sorted(lengths)
    schema = {"type": "array", "items": entry[0], "minItems": low, "maxItems": high}
    return (
        schema,
        lambda value: isinstance(value, list) and low <= len(value) <= high and all(map(entry[1], value)),
    )


def _objects(fields: dict[str, tuple[Described, bool]]) -> Described:
    required = {name for name, (_, needed) in fields.items() if needed}
    schema = {
        "type": "object",
        "properties": {name: described[0] for name, (described, _) in fields.items()},
        "required": sorted(required),
        "additionalProperties": False,
    }

    def holds(value: Any) -> bool:
        return (
            isinstance(value, dict)
            and required <= value.keys() <= fields.keys()
            and all(fields[name][0][1](entry) for name, entry in value.items())
        )

    return schema, holds


LEAVES = st.one_of(
    st.builds(_integers, st.tuples(st.integers(-50, 50), st.integers(-50, 5000))),
    st.builds(_enums, st.lists(st.sampled_from([None, True, 1, "é", 'q"', ""]), min_size=1, unique_by=repr)),
    st.builds(_strings, st.integers(0, 4)),
    st.just(({"type": "boolean"}, lambda value: isinstance(value, bool))),
)
NAMES = st.text('abé"\\ ', max_size=3)
SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds(_arrays, inner, st.tuples(st.integers(0, 2), st.integers(0, 2))),
        st.builds(_objects, st.dictionaries(NAMES, st.tuples(inner, st.booleans()), max_size=2)),
    ),
    max_leaves=3,
)


@settings(max_examples=12)
@given(described=SCHEMAS, seed=st.integers(0, 1000))
def test_every_text_follows_its_schema(llm: ThreadLLM, tokenizer: Tokenizer, described: Described, seed: int):
    schema, holds = described
    structured = StructuredOutputs(json_schema=json.dumps(schema))
    outputs = llm.generate([PROMPT], params(structured, seed=seed, n=2, max_tokens=600))
    for text in texts(tokenizer, outputs):
        assert holds(json.loads(text)), text


# What is allowed


@pytest.mark.parametrize("choice", CHOICES)
def test_a_choice_can_be_written_and_nothing_else(grammars: Grammars, tokenizer: Tokenizer, choice: str):
    structured = StructuredOutputs(choice=CHOICES)
    tokens = tokenizer.encode(choice, add_special_tokens=False)
    for i, token in enumerate(tokens):
        here = allowed(grammars, structured, tokens[:i])
        assert token in here
        assert (EOS in here) == (tokenizer.decode(tokens[:i]) in CHOICES)
        before = b"".join(map(tokenizer.bytes_of, tokens[:i]))
        possible = [other.encode() for other in CHOICES]
        for other in here - {EOS}:
            beginning = before + tokenizer.bytes_of(other)
            assert any(text.startswith(beginning) for text in possible), (before, other)
    at_end = allowed(grammars, structured, tokens)
    assert EOS in at_end
    assert (at_end == {EOS}) == (not any(c != choice and c.startswith(choice) for c in CHOICES))


def test_logits_without_a_token_are_never_allowed(grammars: Grammars, tokenizer: Tokenizer):
    everything = allowed(grammars, StructuredOutputs(regex="(?s:.*)"), [])
    assert max(everything) == len(tokenizer.hf) - 1 == 319
    assert EOS in everything
    assert not everything & (set(tokenizer.hf.all_special_ids) - {EOS})


def test_a_place_in_a_grammar_follows_from_the_tokens(grammars: Grammars, tokenizer: Tokenizer):
    """Step by step, several at once, and anew after a preemption."""
    rng, output, seen = random.Random(3), [], []
    grammars.add("stepwise", JSON)
    while EOS not in output:
        mask = grammars.allowed("stepwise", np.array(output, np.int32))
        seen.append(mask)
        output.append(rng.choice(mask.nonzero()[0].tolist()))
    assert len(output) > 8
    for stride in (1, 3, len(output)):
        grammars.add("again", JSON)
        for i in range(0, len(output), stride):
            mask = grammars.allowed("again", np.array(output[:i], np.int32))
            assert np.array_equal(mask, seen[i])
    json.loads(tokenizer.decode(output[:-1]))


def test_tokens_outside_the_grammar_are_an_error(grammars: Grammars):
    with pytest.raises(GrammarError, match="structured_outputs"):
        allowed(grammars, JSON, [5, 5])


def long_chains() -> Iterator[StructuredOutputs]:
    """Rules that refer to each other, as many as there is room for."""
    rules = "\n".join(f"r{i:x}: r{i + 1:x}" for i in range(9000))
    yield StructuredOutputs(grammar=f'start: r0\n{rules}\nr{9000:x}: "a"')
    defs: dict[str, Any] = {f"{i:x}": {"$ref": f"#/$defs/{i + 1:x}"} for i in range(3700)}
    schema = {"$ref": "#/$defs/0", "$defs": defs | {f"{3700:x}": {"type": "integer"}}}
    yield StructuredOutputs(json_schema=json.dumps(schema))


def test_no_grammar_exhausts_the_stack(grammars: Grammars):
    for structured in long_chains():
        check_grammar(structured)
        assert allowed(grammars, structured, [])


def test_compiled_grammars_are_kept_within_bounds(grammars: Grammars):
    for i in range(200):
        grammars.add(f"r{i}", StructuredOutputs(regex=f"a{{{i}}}"))
        grammars.remove(f"r{i}")
    assert len(grammars._compiled) <= 64
    assert not [name for name in grammars._places if name.startswith("r1")]


# Generation


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"seed": 5}])
def test_two_ranks_write_what_one_writes(
    folder: Path, llm: ThreadLLM, tokenizer: Tokenizer, options: dict[str, Any]
):
    two = start(folder, prefill_context_parallel_size=2, min_split_tokens=4)
    prompts = [[3 + (i * k) % 300 for i in range(20 + k)] for k in (1, 2, 3)]
    ours, theirs = (engine.generate(prompts, params(**options)) for engine in (llm, two))
    assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]
    for text in texts(tokenizer, ours):
        assert json.loads(text).keys() == {"n", "of"}
    two.shutdown()


def test_preempted_requests_go_on_where_they_were(folder: Path, llm: ThreadLLM, tokenizer: Tokenizer):
    prompts = [[20 + i] * 9 for i in range(6)]
    several = [params(seed=i, max_tokens=120) for i in range(6)]
    small = start(folder, num_blocks=34, max_model_len=130)
    outputs = small.generate(prompts, several)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0
    expected = llm.generate(prompts, several)
    assert [o.outputs[0].token_ids for o in outputs] == [o.outputs[0].token_ids for o in expected]
    assert all(json.loads(text) for text in texts(tokenizer, outputs))
    small.shutdown()


def test_requests_without_a_grammar_do_not_notice(llm: ThreadLLM):
    free = [
        params(None, max_tokens=12, seed=3, ignore_eos=True),
        params(None, temperature=0.0, max_tokens=12),
    ]
    alone = llm.generate([PROMPT, PROMPT], free)
    mixed = llm.generate([PROMPT] * 4, [params(seed=1), free[0], params(seed=2), free[1]])
    assert [mixed[1].outputs[0].token_ids, mixed[3].outputs[0].token_ids] == [
        o.outputs[0].token_ids for o in alone
    ]


def test_a_complete_text_ends_before_min_tokens(llm: ThreadLLM, tokenizer: Tokenizer):
    """And one that could go on does so."""
    fixed = params(StructuredOutputs(choice=["only this"]), min_tokens=50)
    open_end = params(StructuredOutputs(regex="[ab]{1,100}"), min_tokens=20, seed=4)
    outputs = llm.generate([PROMPT, PROMPT], [fixed, open_end])
    first, second = texts(tokenizer, outputs)
    assert first == "only this"
    assert len(outputs[1].outputs[0].token_ids) >= 20
    assert set(second) <= {"a", "b"}


def test_log_probabilities_are_those_without_the_grammar(llm: ThreadLLM):
    (constrained,) = llm.generate([PROMPT], params(temperature=0.0, logprobs=3))
    (free,) = llm.generate([PROMPT], params(None, temperature=0.0, logprobs=3, max_tokens=1))
    entry, plain = constrained.outputs[0].logprobs[0], free.outputs[0].logprobs[0]  # type: ignore[index]
    best = list(plain)[1:]
    assert [entry[token].logprob for token in best] == [plain[token].logprob for token in best]


def test_a_grammar_that_cannot_be_compiled_fails_its_request_only(
    llm: ThreadLLM, monkeypatch: pytest.MonkeyPatch
):
    bad = params(StructuredOutputs(regex="("))
    with pytest.raises(ValueError, match="unclosed group"):
        llm.generate([PROMPT], bad)
    monkeypatch.setattr("prefold.grammar.check_grammar", lambda structured: None)
    good, failed = llm.generate([PROMPT, PROMPT], [params(seed=2), bad])
    assert good.outputs[0].finish_reason == "stop"
    assert failed.outputs[0].finish_reason == "error"
    assert "unclosed group" in str(failed.outputs[0].stop_reason)
    llm.engine.scheduler.check_integrity()


@pytest.mark.parametrize("fields", [{"grammar": "start: start"}, {"json_schema": '{"$ref": "#"}'}])
def test_a_grammar_without_any_text_is_refused(fields: dict[str, Any]):
    """It can be compiled, and fails at its first step."""
    with pytest.raises(ValueError, match="cannot be used"):
        check_grammar(StructuredOutputs(**fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "exactly one"),
        ({"regex": "a", "choice": ["b"]}, "exactly one of .*; given: regex, choice"),
        ({"choice": "text"}, "list of texts"),
        ({"json_schema": "{"}, "no JSON"),
        ({"json_schema": "[" * 100_000}, "no JSON"),
        ({"json_schema": "5"}, "object"),
        ({"choice": ["a" * 70_000] * 2}, "140000 characters exceed 131072"),
    ],
)
def test_what_is_refused_at_once(fields: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        StructuredOutputs(**fields)


def test_params_travel(llm: ThreadLLM):
    sent = params(StructuredOutputs(choice=("a", "b")))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=SamplingParams) == sent
    with pytest.raises(ValueError, match="ignore_eos"):
        params(ignore_eos=True)
