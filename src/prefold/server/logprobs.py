"""Log-probabilities in the three forms of the API."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prefold.request import Logprob
from prefold.server.responses import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
    TopLogprob,
)

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""

Entry = dict[int, Logprob] | None
"""Token id -> log-probability, the chosen token first. None: nothing predicts a first token."""


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def completion_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    num_top: int,
    token_text: Callable[[int], str],
    offset: int,
) -> CompletionLogprobs:
    """`logprobs` of /v1/completions.

    `top_logprobs` holds the `num_top` likeliest tokens and the chosen one. Tokens with equal text (parts of
    a character) share an entry, of the likeliest of them. `offset` is where the first token's text begins.
    """
    result = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
    for token_id, entry in zip(token_ids, entries, strict=True):
        text = token_text(token_id)
        result["tokens"].append(text)
        result["text_offset"].append(offset)
        offset += len(text)
        if entry is None:
            result["token_logprobs"].append(None)
            result["top_logprobs"].append(None)
            continue
        result["token_logprobs"].append(_finite(entry[token_id].logprob))
        top: dict[str, float] = {}
        for other, logprob in _top(entry, num_top, token_id):
            name = token_text(other)
            top[name] = max(top.get(name, LOWEST), _finite(logprob.logprob))
        result["top_logprobs"].append(top)
    return result


def chat_logprobs(
    token_ids: Sequence[int],
    entries: Sequence[Entry],
    num_top: int,
    token_text: Callable[[int], str],
    token_bytes: Callable[[int], bytes],
) -> ChatLogprobs:
    """`logprobs` of /v1/chat/completions: `top_logprobs` holds exactly the `num_top` likeliest tokens."""

    def one(token_id: int, logprob: Logprob) -> TopLogprob:
        return TopLogprob(
            token=token_text(token_id), logprob=_finite(logprob.logprob), bytes=list(token_bytes(token_id))
        )

    content: list[TokenLogprob] = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        assert entry is not None
        top = [one(other, logprob) for other, logprob in _top(entry, num_top, None)]
        content.append(TokenLogprob(**one(token_id, entry[token_id]), top_logprobs=top))
    return ChatLogprobs(content=content)


def prompt_logprobs(entries: Sequence[Entry]) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: per token of the prompt, by token id; the first is null."""
    return [None if entry is None else _by_token_id(entry) for entry in entries]


def _by_token_id(entry: dict[int, Logprob]) -> dict[str, PromptLogprob]:
    return {
        str(token_id): PromptLogprob(
            logprob=_finite(at.logprob), rank=at.rank, decoded_token=at.decoded_token
        )
        for token_id, at in entry.items()
    }


def _top(entry: dict[int, Logprob], num_top: int, chosen: int | None) -> list[tuple[int, Logprob]]:
    """The likeliest tokens in order, and `chosen` if it is not among them."""
    ranked = sorted(entry.items(), key=lambda item: item[1].rank or 0)
    return [(i, at) for n, (i, at) in enumerate(ranked) if n < num_top or i == chosen]
