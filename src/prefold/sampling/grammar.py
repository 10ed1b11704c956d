"""Which tokens may come next in the texts of requests with structured outputs.

Only the rank that decides tokens knows grammars. A request's place in its grammar follows from its output
tokens, which the engine sends: nothing is fed back, and a request that was preempted is where it was.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from prefold.grammar import grammar_limits, grammar_text, run_deep
from prefold.request import StructuredOutputs
from prefold.tokenizer import load_tokenizer

MAX_COMPILED = 64
"""Compiled grammars that are kept for requests to come."""


class GrammarError(RuntimeError):
    """A request cannot go on: its grammar cannot be compiled, or its tokens have left it."""


@dataclass(eq=False)
class _Place:
    """How far a request has come. `matcher` has taken in the first `num_consumed` output tokens."""

    compiled: Future[LLMatcher]
    matcher: LLMatcher | None = None
    num_consumed: int = 0


class Grammars:
    """The grammars of running requests.

    Grammars are compiled in a thread of their own from `add` on, so that this happens while the prompt is
    computed; the tokenizer is prepared before the first of them.

    Args:
        model: checkpoint, whose tokenizer says what the tokens spell.
        vocab_size: of the logits. Tokens that the tokenizer does not have are never allowed.
        eos_token_ids: allowed wherever the text may end.
    """

    def __init__(self, model: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        self._model = model
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: LLTokenizer | None = None
        self._preparing = threading.Lock()
        self._compiled: OrderedDict[StructuredOutputs, Future[LLMatcher]] = OrderedDict()
        self._places: dict[str, _Place] = {}

    def add(self, request_id: str, structured: StructuredOutputs) -> None:
        """A request begins, or goes on after a preemption."""
        self._places[request_id] = _Place(self._compiled_grammar(structured))

    def remove(self, request_id: str) -> None:
        """A request has ended or was preempted; unknown ones are ignored."""
        self._places.pop(request_id, None)

    @property
    def num_requests(self) -> int:
        return len(self._places)

    def allowed(self, request_id: str, output_token_ids: np.ndarray) -> np.ndarray:
        """[vocab_size] bool: the tokens that may follow `output_token_ids`, all of the request's so far.

        Raises:
            GrammarError: the request must be given up.
        """
        place = self._places[request_id]
        if place.matcher is None:
            place.matcher = place.compiled.result().deep_copy()
        matcher = place.matcher
        matcher.consume_tokens(output_token_ids[place.num_consumed :].tolist())
        place.num_consumed = len(output_token_ids)
        assert self._tokenizer is not None, "the matcher was made with it"
        words = np.zeros(-(-self._tokenizer.vocab_size // 32), np.int32)
        if not matcher.is_error():
            matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if matcher.is_error():
            raise GrammarError(f"structured_outputs: {matcher.get_error().strip()}")
        bits = np.unpackbits(words.view(np.uint8), count=self._vocab_size, bitorder="little")
        return bits.view(np.bool_)

    def _compiled_grammar(self, structured: StructuredOutputs) -> Future[LLMatcher]:
        """The grammar before its first token, now or soon."""
        future = self._compiled.get(structured)
        if future is None:
            future = self._compiled[structured] = run_deep(lambda: self._compile(structured))
        self._compiled.move_to_end(structured)
        while len(self._compiled) > MAX_COMPILED:
            self._compiled.popitem(last=False)
        return future

    def _compile(self, structured: StructuredOutputs) -> LLMatcher:
        try:
            with self._preparing:
                if self._tokenizer is None:
                    self._tokenizer = make_tokenizer(self._model, self._vocab_size, self._eos_token_ids)
            text, limits = grammar_text(structured), grammar_limits()
        except Exception as error:  # whatever a tokenizer's reader raises is the request's failure only
            raise GrammarError(f"structured_outputs: {error}") from error
        matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if matcher.is_error():
            raise GrammarError(f"structured_outputs: {matcher.get_error().strip()}")
        return matcher


def make_tokenizer(model: str, vocab_size: int, eos_token_ids: list[int]) -> LLTokenizer:
    """llguidance's view of a checkpoint's tokenizer: takes seconds for large vocabularies.

    Raises:
        ValueError: there is none, or it is none of the `tokenizers` library.
    """
    hf = load_tokenizer(model).hf
    backend = getattr(hf, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(f"the tokenizer of {model!r} is of a kind that grammars cannot be used with")
    return LLTokenizer(backend.to_str(), n_vocab=max(vocab_size, len(hf)), eos_token=eos_token_ids)
