"""transformers as the judge: logits and greedy tokens of a checkpoint, and prompts that can be judged.

Two correct implementations differ where rounding decides: between two experts of equal score, two keys
that an indexer scores equally, or two tokens of equal logit. A judgement therefore says how close to
that a sequence came, and `find_cases` looks for prompts that stay away from it, so that tests can demand
equality.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

ROUTER_TIE = 3e-6
"""Experts (or groups) whose scores are closer than this may be chosen either way."""

KEY_TIE = 3e-6
"""Keys whose scores are closer than this share of the largest may be selected either way."""

LOGIT_TIE = 1e-3
"""Tokens whose logits are closer than this may be chosen either way."""

BATCH_TOKENS = 4096
"""Tokens of a forward, padding included."""


@dataclass(frozen=True, eq=False)
class Judgement:
    """`logits` [n, vocab] of a sequence; `margin` of its closest choice of experts, groups or keys."""

    logits: torch.Tensor
    margin: float

    def prefers(self, num_prompt_tokens: int) -> tuple[list[int], float]:
        """The likeliest token after each position from the prompt's last one to the last but one, and
        the smallest lead that one of them has over the second."""
        best = self.logits[num_prompt_tokens - 1 : -1].topk(2, dim=-1)
        return best.indices[:, 0].tolist(), float((best.values[:, 0] - best.values[:, 1]).min())


class Reference:
    """transformers' own model of a checkpoint.

    Args:
        folder: of the checkpoint.
        dtype: that it computes in.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype = torch.float32) -> None:
        import transformers
        from transformers.utils import logging

        architectures = transformers.AutoConfig.from_pretrained(folder).architectures
        assert architectures, f"{folder}: config.json names no architecture"
        bars = logging.is_progress_bar_enabled()
        logging.disable_progress_bar()
        try:
            self.model = getattr(transformers, architectures[0]).from_pretrained(folder, dtype=dtype).eval()
        finally:
            if bars:
                logging.enable_progress_bar()
        self._margins: list[torch.Tensor] = []
        self._topk = _StableTopk(self._margins)
        for module in self.model.modules():
            if type(module).__name__.endswith("Indexer"):
                module.forward = self._topk.during(module.forward)
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._note_margins)

    @torch.inference_mode()
    def judge(self, sequences: Sequence[Sequence[int]]) -> list[Judgement]:
        """Logits and margins of each sequence, in their order."""
        result: list[Judgement | None] = [None] * len(sequences)
        for batch in _batches([len(sequence) for sequence in sequences]):
            # Padding on the right changes nothing on its left: attention is causal, experts see one token.
            width = max(len(sequences[i]) for i in batch)
            padded = torch.zeros(len(batch), width, dtype=torch.int64)
            for row, i in enumerate(batch):
                padded[row, : len(sequences[i])] = torch.tensor(sequences[i])
            self._margins.clear()
            logits = self.model(padded, use_cache=False).logits.float()
            for row, i in enumerate(batch):
                own = slice(row * width, row * width + len(sequences[i]))
                margin = min((float(m[own].min()) for m in self._margins), default=1.0)
                result[i] = Judgement(logits[row, : len(sequences[i])].clone(), margin)
        return [judgement for judgement in result if judgement is not None]

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        """The usual loop with transformers' KV cache; end-of-sequence tokens do not end it."""
        import transformers

        cache = transformers.DynamicCache(config=self.model.config)
        ids, tokens = torch.tensor([prompt]), []
        for _ in range(num_tokens):
            ids = self.model(ids, cache=cache).logits[:, -1].argmax(-1, keepdim=True)
            tokens.append(int(ids))
        return tokens

    def _note_margins(self, router, _inputs, output) -> None:
        """Per token, the smaller lead of the last expert chosen, or the last group, over the next."""
        # DeepSeek-V2 has groups and Qwen none; the others score by sigmoid and have a bias.
        softmax = not hasattr(router, "e_score_correction_bias")
        scores = output[0].softmax(-1) if softmax else output[0].sigmoid()
        scores = scores + getattr(router, "e_score_correction_bias", 0.0)
        margins = torch.full(scores.shape[:1], 1.0)
        if (getattr(router, "num_group", None) or 1) > 1:
            grouped = scores.unflatten(-1, (router.num_group, -1))
            best = grouped.topk(1 if softmax else 2, dim=-1).values.sum(-1)
            margins = torch.minimum(margins, _lead(best, router.topk_group))
            kept = torch.zeros_like(best, dtype=torch.bool)
            kept.scatter_(1, best.topk(router.topk_group).indices, True)
            scores = grouped.masked_fill(~kept[..., None], -1.0).flatten(1)
        self._margins.append(torch.minimum(margins, _lead(scores, router.top_k)))


class _StableTopk(TorchFunctionMode):
    """Where an indexer selects keys, of equal scores the lowest position wins, which torch leaves open.

    Notes each query's margin: by how much of the largest score the last key chosen leads the next. Scores
    of exactly 0, where relu cut every head, are no matter of rounding.
    """

    def __init__(self, margins: list[torch.Tensor]) -> None:
        super().__init__()
        self._margins = margins

    def during(self, function: Callable) -> Callable:
        def wrapped(*args, **kwargs):
            with self:
                return function(*args, **kwargs)

        return wrapped

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is not torch.Tensor.topk:
            return func(*args, **kwargs)
        scores, k = args
        ordered = scores.sort(dim=-1, descending=True, stable=True)
        if k < scores.shape[-1]:
            last, following = ordered.values[..., k - 1], ordered.values[..., k]
            scale = scores.masked_fill(scores.isinf(), 0.0).abs().amax(-1).clamp(min=1e-9)
            lead = ((last - following) / scale).nan_to_num(1.0, posinf=1.0)
            self._margins.append(torch.where((last == 0) & (following == 0), 1.0, lead).flatten())
        return torch.return_types.topk((ordered.values[..., :k], ordered.indices[..., :k]))


def _lead(scores: torch.Tensor, k: int) -> torch.Tensor:
    """[n, m] -> [n]: how far the k-th best is ahead of the next."""
    if k >= scores.shape[-1]:
        return torch.full(scores.shape[:1], 1.0)
    best = scores.topk(k + 1).values
    return best[:, k - 1] - best[:, k]


def _batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of sequences, similar lengths together."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and (len(batch) + 1) * lengths[i] > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


@dataclass(frozen=True)
class Case:
    """A prompt and what greedy decoding makes of it, the same in any correct implementation."""

    prompt: list[int]
    tokens: list[int]


Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts -> greedy tokens."""


def find_cases(
    reference: Reference,
    generate: Generate,
    prompts: Sequence[Callable[[random.Random], list[int]]],
    seed: int = 0,
    attempts: int = 12,
) -> list[Case]:
    """One case for each of `prompts`, which draw a prompt; they are asked again where rounding decides.

    AssertionError where `generate` and `reference` disagree although rounding does not decide.
    """
    cases: list[Case | None] = [None] * len(prompts)
    rng = random.Random(seed)
    for _ in range(attempts):
        missing = [i for i, case in enumerate(cases) if case is None]
        drawn = [prompts[i](rng) for i in missing]
        tokens = generate(drawn)
        judgements = reference.judge([p + t for p, t in zip(drawn, tokens, strict=True)])
        for i, prompt, generated, judgement in zip(missing, drawn, tokens, judgements, strict=True):
            preferred, lead = judgement.prefers(len(prompt))
            if judgement.margin < ROUTER_TIE or lead < LOGIT_TIE:
                continue
            assert generated == preferred, f"{len(prompt)} prompt tokens: {generated} is not {preferred}"
            cases[i] = Case(prompt, generated)
        if None not in cases:
            break
    found = [case for case in cases if case is not None]
    assert len(found) == len(cases), f"{len(cases) - len(found)} prompts stay near a tie"
    return found
