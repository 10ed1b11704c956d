"""How far a response has come, and small facts that all responses hold."""

from __future__ import annotations

from collections.abc import Callable

from prefold.engine.async_engine import AsyncLLM
from prefold.request import CompletionOutput, RequestOutput
from prefold.server.protocol import StreamOptions
from prefold.server.responses import Usage


class Shown:
    """How much of a sample has been sent."""

    def __init__(self) -> None:
        self.num_chars = 0
        self.num_tokens = 0
        self.offset = 0
        self.started = False
        self.finished = False

    def is_news(self, sample: CompletionOutput) -> bool:
        return len(sample.token_ids) > self.num_tokens or sample.finish_reason is not None

    def move_to(self, sample: CompletionOutput) -> None:
        self.num_chars, self.num_tokens = len(sample.text), len(sample.token_ids)
        self.started, self.finished = True, sample.finish_reason is not None


class UsageCounter:
    """Tokens of all prompts and samples of a request, and whether a stream tells them: at the end if
    `wanted`, perhaps in every chunk, too."""

    def __init__(self, num_prompts: int, options: StreamOptions | None = None) -> None:
        self._of = [(0, 0, 0)] * num_prompts
        self.wanted = options is not None and bool(options.include_usage)
        self._in_every = self.wanted and options is not None and bool(options.continuous_usage_stats)

    def see(self, index: int, output: RequestOutput) -> None:
        """The latest output of a prompt."""
        generated = sum(len(sample.token_ids) for sample in output.outputs)
        self._of[index] = (len(output.prompt_token_ids), generated, output.metrics.num_cached_tokens)

    def so_far(self) -> Usage | None:
        """For a chunk that is not the last, if usage is wanted."""
        return self.total() if self._in_every else None

    def total(self) -> Usage:
        prompt, generated, cached = (sum(column) for column in zip(*self._of, strict=True))
        return Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            prompt_tokens_details={"cached_tokens": cached},
        )


def fingerprint(engine: AsyncLLM) -> str:
    """Equal for engines with equal models and settings."""
    return f"fp_{engine.config.digest()[:10]}"


def token_text(engine: AsyncLLM) -> Callable[[int], str]:
    """Text of one token by itself; `token_id:N` without a tokenizer."""
    tokenizer = engine.tokenizer
    return (lambda token_id: f"token_id:{token_id}") if tokenizer is None else tokenizer.token_text


def token_bytes(engine: AsyncLLM) -> Callable[[int], bytes]:
    """Bytes of one token by itself, which may be a part of a character."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None, "chats have a tokenizer"
    return tokenizer.bytes_of
