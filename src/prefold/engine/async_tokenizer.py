"""The tokenizer for an event loop: long texts are worked on in threads (tokenizers release the GIL)."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from prefold.tokenizer import Tokenizer, load_tokenizer

NUM_THREADS = 2

logger = logging.getLogger("prefold")
T = TypeVar("T")


class AsyncTokenizer:
    """Methods of a `Tokenizer`, awaited.

    Args:
        tokenizer: None if there is none; every method is a ValueError then.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self.tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(NUM_THREADS, "tokenizer")

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return await self._run(self._required.encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        return await self._run(self._required.decode, token_ids, skip_special_tokens)

    async def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return await self._run(self._required.apply_chat_template, messages, **options)

    def shutdown(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    @property
    def _required(self) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError("this checkpoint has no tokenizer: give token ids instead of text")
        return self.tokenizer

    async def _run(self, function: Callable[..., T], *args: Any, **options: Any) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, functools.partial(function, *args, **options))


def load_if_any(model: str) -> Tokenizer | None:
    """The tokenizer of a checkpoint folder, warmed up; None, with a warning, if it has none."""
    try:
        tokenizer = load_tokenizer(model)
    except ValueError as error:
        logger.warning("%s", error)
        return None
    # The first call settles truncation and padding; from then on threads only read.
    tokenizer.encode("a")
    return tokenizer
