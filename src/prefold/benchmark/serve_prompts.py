"""Requests for `prefold bench serve`: random ones, or conversations from a file, and when they are sent."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

WORDS = [
    *("time", "year", "people", "way", "day", "man", "thing", "life", "child", "world", "school", "state"),
    *(
        "group",
        "country",
        "problem",
        "hand",
        "part",
        "place",
        "case",
        "week",
        "company",
        "system",
        "question",
    ),
    *(
        "work",
        "number",
        "night",
        "point",
        "home",
        "water",
        "room",
        "mother",
        "area",
        "money",
        "story",
        "fact",
    ),
]
"""Common words, mostly of one token each: what random chats are made of."""


@dataclass(frozen=True)
class Prompt:
    """What one request asks.

    Attributes:
        prompt: text, or token ids.
        output_len: tokens to generate.
    """

    prompt: str | list[int]
    output_len: int


def random_prompts(
    num: int, input_len: int, output_len: int, range_ratio: float, vocab_size: int, words: bool, seed: int
) -> list[Prompt]:
    """Prompts of random token ids in [0, vocab_size), or of as many `words`.

    Lengths are uniform in [len * (1 - range_ratio), len * (1 + range_ratio)], at least 1.

    Raises:
        ValueError: a length is below 1, or the ratio outside [0, 1).
    """
    for name, value in (("input", input_len), ("output", output_len), ("vocab", vocab_size)):
        if value < 1:
            raise ValueError(f"--random-{name}-{'size' if name == 'vocab' else 'len'} {value} is below 1")
    if not 0 <= range_ratio < 1:
        raise ValueError(f"--random-range-ratio {range_ratio} is outside [0, 1)")
    rng = random.Random(seed)

    def length(mean: int) -> int:
        return max(1, rng.randint(int(mean * (1 - range_ratio)), int(mean * (1 + range_ratio))))

    prompts: list[Prompt] = []
    for _ in range(num):
        tokens, generated = length(input_len), length(output_len)
        prompt = " ".join(rng.choices(WORDS, k=tokens)) if words else rng.choices(range(vocab_size), k=tokens)
        prompts.append(Prompt(prompt, generated))
    return prompts


def first_turns(file: str | Path, num: int, seed: int) -> list[tuple[str, str]]:
    """Question and answer of at most `num` conversations of a file, in random order.

    Raises:
        ValueError: the file has another form, or no conversation of two turns.
    """
    pairs = _read_turns(Path(file).expanduser())
    if not pairs:
        raise ValueError(f"{file} holds no conversation of at least two turns")
    random.Random(seed).shuffle(pairs)
    return pairs[:num]


def _read_turns(file: Path) -> list[tuple[str, str]]:
    try:
        conversations = json.loads(file.read_bytes())
        turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in conversations]
        return [
            (talk[0]["value"], talk[1]["value"])
            for talk in turns
            if len(talk) >= 2 and talk[0]["value"].strip() and talk[1]["value"].strip()
        ]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f'{file} is not of ShareGPT\'s form, [{{"conversations": [{{"value": TEXT}}, ...]}}, ...]: '
            f"{type(error).__name__}: {error}"
        ) from None


def send_times(num: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds after the start at which each request is sent, ascending.

    Gaps are gamma distributed with mean 1 / rate: burstiness 1 is a Poisson process, less comes in bursts,
    more is more regular. An infinite rate sends everything at once.

    Raises:
        ValueError: a rate or burstiness that is not above 0.
    """
    if not rate > 0:
        raise ValueError(f"--request-rate {rate} must be above 0")
    if not 0 < burstiness < float("inf"):
        raise ValueError(f"--burstiness {burstiness} must be a finite number above 0")
    if rate == float("inf"):
        return [0.0] * num
    rng = random.Random(seed)
    times: list[float] = []
    now = 0.0
    for _ in range(num):
        times.append(now)
        now += rng.gammavariate(burstiness, 1.0 / (rate * burstiness))
    return times
