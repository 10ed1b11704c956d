"""The tokenizer that a GGUF file describes. transformers is imported when one is built, not before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prefold.gguf_file import GGUFFile


@dataclass(frozen=True)
class Splitting:
    """How byte-level BPE cuts text into words before merging, which GGUF names and does not describe.

    Attributes:
        pattern: regular expression of a word; None: GPT-2's.
        digits: digits are cut off one by one before that.
        nfc: text is brought to Unicode's composed form first.
        whole_words: a word that is a token becomes that token, whatever the merges make of it.
        adds_bos: where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    whole_words: bool = False
    adds_bos: bool = False


def _words(digits: str) -> str:
    """Pattern of Llama 3 and Qwen 2, which differ only in how they cut numbers."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

SPLITTINGS = {
    "gpt-2": Splitting(),
    "smollm": Splitting(digits=True),
    "llama-bpe": Splitting(_words(r"\p{N}{1,3}"), whole_words=True, adds_bos=True),
    "smaug-bpe": Splitting(_words(r"\p{N}{1,3}"), whole_words=True),
    "qwen2": Splitting(_words(r"\p{N}"), nfc=True),
    "tekken": Splitting(_CASED_WORDS, whole_words=True, adds_bos=True),
}
"""By tokenizer.ggml.pre."""

_ALIASES = {
    "default": "gpt-2",
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "deepseek-r1-qwen": "qwen2",
}

_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def describes_tokenizer(file: GGUFFile) -> bool:
    """Whether there is one at all."""
    return file.field("tokenizer.ggml.model", "none") not in ("none", "no_vocab")


def build_tokenizer(file: GGUFFile) -> Any:
    """A transformers tokenizer, with chat template. ValueError for a kind or a splitting we do not know."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    name, kind = file.path.name, file.field("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{name}: tokenizer.ggml.model {kind!r} is unknown (known: gpt2, llama)")
    tokens = file.field("tokenizer.ggml.tokens", required=True)
    parts = {key: file.field(f"tokenizer.ggml.{key}") for key in ("merges", "scores", "token_type")}
    if parts["merges" if kind == "gpt2" else "scores"] is None:
        raise ValueError(f"{name}: a tokenizer of kind {kind!r} without merges (gpt2) or scores (llama)")
    described = {"tokenizer_type": kind, "tokens": tokens} | {k: v for k, v in parts.items() if v is not None}
    backend, _ = convert_gguf_tokenizer(file.architecture, described)
    adds_bos = _split_words(file, backend) if kind == "gpt2" else _mark_spaces(file, backend)

    ids = {theirs: file.field(f"tokenizer.ggml.{ours}_token_id") for ours, theirs in _SPECIAL.items()}
    special = {key: tokens[i] for key, i in ids.items() if i is not None}
    _add_ends(file, backend, special, adds_bos)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=file.field("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **special,
    )


def _split_words(file: GGUFFile, backend: Any) -> bool:
    """Splitting of byte-level BPE; whether it puts a BOS token first."""
    from tokenizers import Regex, normalizers, pre_tokenizers

    pre = str(file.field("tokenizer.ggml.pre", "default"))
    splitting = SPLITTINGS.get(_ALIASES.get(pre, pre))
    if splitting is None:
        known = ", ".join((*SPLITTINGS, *_ALIASES))
        raise ValueError(f"{file.path.name}: tokenizer.ggml.pre {pre!r} is unknown (known: {known})")
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if splitting.digits else []
    if splitting.pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(splitting.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=splitting.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    if splitting.nfc:
        backend.normalizer = normalizers.NFC()
    backend.model.ignore_merges = splitting.whole_words
    return splitting.adds_bos


def _mark_spaces(file: GGUFFile, backend: Any) -> bool:
    """SentencePiece puts a space before a text, unless the file says otherwise."""
    from tokenizers import decoders, pre_tokenizers

    if not file.field("tokenizer.ggml.add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence(
            [decoders.Replace("\N{LOWER ONE EIGHTH BLOCK}", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    return True


def _add_ends(file: GGUFFile, backend: Any, special: dict[str, str], adds_bos: bool) -> None:
    """What is put before and behind a text."""
    from tokenizers import processors

    begins = file.field("tokenizer.ggml.add_bos_token", adds_bos) and "bos_token" in special
    ends = file.field("tokenizer.ggml.add_eos_token", False) and "eos_token" in special
    around = [special[key] for key, wanted in (("bos_token", begins), ("eos_token", ends)) if wanted]
    first, last = around[:1] if begins else [], around[-1:] if ends else []
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", *last, *(f"{token}:1" for token in first), "$B:1", *(f"{t}:1" for t in last)],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys(around)],
    )
