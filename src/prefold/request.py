"""What a caller asks for and what comes back.

Names are vLLM's. Nothing here imports torch: the scheduler and the server use these types.
"""

from __future__ import annotations

import json
import math
import operator
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from numbers import Real

import msgspec

GREEDY_EPSILON = 1e-5
"""A temperature below this is greedy: dividing logits by it would only add rounding."""

MAX_LOGPROBS = 20
"""Largest `logprobs` / `prompt_logprobs` a request may ask for."""


MAX_GRAMMAR_CHARS = 1 << 17
"""Longest schema or grammar: bounds the time to compile it, and how deep its rules refer to each other."""


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the generated text must look like. Exactly one of:

    Attributes:
        json_schema: JSON that the schema, itself a text of JSON, describes.
        json_object: any JSON object.
        regex: the whole text matches this regular expression.
        choice: one of these texts.
        grammar: a text of this grammar, in Lark's notation; it begins with `start`.
    """

    json_schema: str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.choice, str):
            raise ValueError("structured_outputs: choice takes a list of texts")
        msgspec.structs.force_setattr(self, "choice", tuple(self.choice))
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False, ())]
        if len(given) != 1:
            names = ", ".join(self.__struct_fields__)
            raise ValueError(
                f"structured_outputs takes exactly one of {names}; given: {', '.join(given) or 'none'}"
            )
        size = sum(map(len, [self.json_schema or "", self.regex or "", self.grammar or "", *self.choice]))
        if size > MAX_GRAMMAR_CHARS:
            raise ValueError(f"structured_outputs of {size} characters exceed {MAX_GRAMMAR_CHARS}")
        if self.json_schema is not None:
            _check_schema(self.json_schema)


def _check_schema(text: str) -> None:
    """Only that it is a JSON object, or true or false; whoever compiles it says more."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json_schema is no JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise ValueError("structured_outputs: json_schema must be a JSON object")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the tokens of one request are chosen and when they end.

    Attributes:
        n: samples per prompt; each is a request of its own that shares the prompt's blocks.
        temperature: 0 is greedy.
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the likeliest, in [0, 1].
        seed: makes this request reproducible, whatever shares its batch; None: from the engine's seed.
        max_tokens: upper limit on generated tokens; None means "until max_model_len". With 0 the prompt is
            computed, for its log-probabilities or for the prefix cache, and nothing is generated.
        min_tokens: end-of-sequence and stop tokens are suppressed before that many tokens.
        stop: strings that end the text; not part of it.
        stop_token_ids: tokens that end the request, besides the model's end-of-sequence tokens.
        ignore_eos: go on after an end-of-sequence token.
        logprobs: return log-probabilities of the sampled token and of that many likeliest ones.
        prompt_logprobs: the same for every prompt token but the first.
        presence_penalty, frequency_penalty: subtracted from the logits of generated tokens, once or per
            occurrence.
        repetition_penalty: divides positive and multiplies negative logits of prompt and generated tokens.
        logit_bias: added to the logits of the named token ids.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs: what the text must look like. The request then ends with an end-of-sequence token,
            which is allowed where the text may end; before `min_tokens` only if nothing else is.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: Sequence[str] | str = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        # Frozen structs are normalised in place once, here, so that every reader sees one form.
        if isinstance(self.stop, str):
            msgspec.structs.force_setattr(self, "stop", (self.stop,))
        msgspec.structs.force_setattr(self, "stop", tuple(self.stop))
        _check_types(self)
        _check_sampling(self)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON


_INTEGERS = ("n", "top_k", "min_tokens", "max_tokens", "seed", "logprobs", "prompt_logprobs")
_OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs")
_NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")


def _check_types(p: SamplingParams) -> None:
    """Make Python's own numbers of all that are like them (numpy has others); ValueError for what is none.

    Ranks decode what they are sent strictly, so that another type would end the engine.
    """
    for name in _INTEGERS:
        value = getattr(p, name)
        if type(value) is not int and not (value is None and name in _OPTIONAL):
            msgspec.structs.force_setattr(p, name, _integer(name, value))
    for name in _NUMBERS:
        value = getattr(p, name)
        if type(value) is not float:
            msgspec.structs.force_setattr(p, name, _number(name, value))
    ids = tuple(_integer("stop_token_ids", token_id) for token_id in p.stop_token_ids)
    msgspec.structs.force_setattr(p, "stop_token_ids", ids)
    if not all(isinstance(text, str) for text in p.stop):
        raise ValueError(f"stop={p.stop!r}: a text, or a list of texts")
    if p.logit_bias is not None:
        biases = {_integer("logit_bias", i): _number("logit_bias", bias) for i, bias in p.logit_bias.items()}
        msgspec.structs.force_setattr(p, "logit_bias", biases)


def _integer(name: str, value: object) -> int:
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(f"{name}: {value!r} is no integer") from None


def _number(name: str, value: object) -> float:
    if isinstance(value, Real):
        return float(value)
    raise ValueError(f"{name}: {value!r} is no number")


def _check_sampling(p: SamplingParams) -> None:
    """Raise ValueError naming the first parameter that is out of range, its value and the range."""
    in_range = [
        ("n", p.n, 1, 128),
        ("temperature", p.temperature, 0.0, 100.0),
        ("top_k", p.top_k, -1, 2**31 - 1),
        ("min_p", p.min_p, 0.0, 1.0),
        ("min_tokens", p.min_tokens, 0, 2**31 - 1),
        ("presence_penalty", p.presence_penalty, -2.0, 2.0),
        ("frequency_penalty", p.frequency_penalty, -2.0, 2.0),
        ("repetition_penalty", p.repetition_penalty, 1e-3, 1e3),  # logits stay finite
    ]
    if p.max_tokens is not None:
        in_range.append(("max_tokens", p.max_tokens, 0, 2**31 - 1))
    if p.seed is not None:
        in_range.append(("seed", p.seed, -(2**63), 2**63 - 1))
    if p.logprobs is not None:
        in_range.append(("logprobs", p.logprobs, 0, MAX_LOGPROBS))
    if p.prompt_logprobs is not None:
        in_range.append(("prompt_logprobs", p.prompt_logprobs, 0, MAX_LOGPROBS))
    for name, value, low, high in in_range:
        # `not (low <= value)` also catches NaN.
        if not low <= value <= high:
            raise ValueError(f"{name}={value} is outside [{low}, {high}]")
    if not 0.0 < p.top_p <= 1.0:
        raise ValueError(f"top_p={p.top_p} is outside (0, 1]")
    if p.max_tokens is not None and p.min_tokens > p.max_tokens:
        raise ValueError(f"min_tokens={p.min_tokens} is above max_tokens={p.max_tokens}")
    if any(not s for s in p.stop):
        raise ValueError("stop holds an empty string, which would end every text at once")
    if p.structured_outputs is not None and p.ignore_eos:
        raise ValueError("ignore_eos cannot be combined with structured_outputs, whose texts have an end")
    below_zero = [token_id for token_id in p.stop_token_ids if token_id < 0]
    if below_zero:
        raise ValueError(f"stop_token_ids holds {below_zero[0]}: token ids start at 0")
    for token_id, bias in (p.logit_bias or {}).items():
        if token_id < 0 or not math.isfinite(bias):
            raise ValueError(f"logit_bias[{token_id}]={bias}: token ids start at 0 and biases are finite")


class RequestStatus(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    @property
    def is_finished(self) -> bool:
        return self.name.startswith("FINISHED")


class Request:
    """The scheduler's view of one sample of one prompt.

    `num_computed_tokens` counts tokens whose KV is in the cache; tokens are `prompt + output`.
    A request is in prefill while `num_computed_tokens < num_prefill_tokens`. That is state, not
    shape: a prefill may have one token left. `num_prefill_tokens` is the prompt's length, and
    after a preemption also covers the tokens generated before it. `seed` is the sample's resolved
    seed; the workers hold the first `num_sent_tokens` tokens.

    While steps are in flight `num_computed_tokens` counts their tokens as computed; `last_step_id` is
    the latest step that holds the request (-1: none yet). `num_cached_tokens` is what was found in the
    prefix cache: at admission, and before that what would have been found on arrival. `block_hashes`
    are those of its first full blocks, as far as somebody asked; they outlive a preemption.
    `num_slots` tokens have room in its blocks, and with `next_full_block` computed tokens one more block is
    full: most steps of a decode reach neither. KVCacheManager keeps both.
    `max_num_tokens` is the length, prompt and output, with which it ends at the latest.

    With `max_tokens` 0 nobody asks what follows the prompt, so its last token is not computed (unless it is
    the only one): it is no token of the request here, and `target_token_ids` tells the workers what the one
    before it is to predict.
    """

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        sampling_params: SamplingParams,
        max_tokens: int,
        eos_token_ids: tuple[int, ...] = (),
        arrival_time: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.request_id = request_id
        self.sampling_params = sampling_params
        self.max_tokens = max_tokens
        self.eos_token_ids = eos_token_ids
        ends = () if sampling_params.ignore_eos else eos_token_ids
        self.end_token_ids = frozenset((*sampling_params.stop_token_ids, *ends))
        self.arrival_time = arrival_time
        self.seed = seed
        self.status = RequestStatus.WAITING
        self.stop_reason: int | str | None = None
        num_targets = int(max_tokens == 0 and len(prompt_token_ids) > 1)
        self.target_token_ids = prompt_token_ids[len(prompt_token_ids) - num_targets :]
        prompt_token_ids = prompt_token_ids[: len(prompt_token_ids) - num_targets]
        self.num_prompt_tokens = len(prompt_token_ids)
        self.num_prefill_tokens = len(prompt_token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        self.num_sent_tokens = 0
        self.num_preemptions = 0
        self.last_step_id = -1
        self.num_slots = 0
        self.next_full_block = sys.maxsize
        self.block_hashes: list[bytes] = []
        self.all_token_ids = prompt_token_ids
        self.max_num_tokens = len(prompt_token_ids) + max_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.all_token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def is_prefill(self) -> bool:
        return self.num_computed_tokens < self.num_prefill_tokens

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, prompt={self.num_prompt_tokens}, "
            f"output={self.num_output_tokens}, computed={self.num_computed_tokens})"
        )


@dataclass
class Logprob:
    """Log-probability of a token, its rank (1 is the likeliest) and its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass
class RequestMetrics:
    """Times in seconds since the request arrived, and counts. None: has not happened."""

    arrival_time: float = 0.0
    first_scheduled_s: float | None = None
    ttft_s: float | None = None
    latency_s: float | None = None
    tpot_s: float | None = None
    num_cached_tokens: int = 0
    num_preemptions: int = 0


@dataclass
class CompletionOutput:
    """One sample of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class RequestOutput:
    """All samples of one prompt. `prompt_logprobs[0]` is None: nothing predicts the first token."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
