"""Text to token ids and back. transformers is imported when a tokenizer is loaded, not before."""

from __future__ import annotations

import codecs
import inspect
import json
import re
from pathlib import Path
from typing import Any

from prefold.checkpoint_files import find_checkpoint
from prefold.gguf_file import GGUFFile
from prefold.gguf_tokenizer import build_tokenizer, describes_tokenizer

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "tiktoken.model",
)
"""A folder without any of these has no tokenizer, whatever its tokenizer_config.json says."""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""What decoders put where bytes are no UTF-8 (or not yet)."""

MAX_INCOMPLETE_TOKENS = 3
"""A UTF-8 character has 4 bytes at most, so at most 3 tokens can be waiting for its end."""

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def has_tokenizer(model: str | Path) -> bool:
    """Whether a checkpoint comes with a tokenizer. ValueError for a GGUF file that cannot be read."""
    path = Path(model).expanduser()
    file = _gguf_file(path)
    return _has_files(path) if file is None else describes_tokenizer(file)


def load_tokenizer(model: str | Path) -> Tokenizer:
    """The tokenizer of a checkpoint folder or GGUF file; reads local files only and runs no code from them.

    Raises:
        ValueError: there is no tokenizer, or it cannot be read.
    """
    path = Path(model).expanduser()
    file = _gguf_file(path)
    if not (_has_files(path) if file is None else describes_tokenizer(file)):
        lacks = f"none of {', '.join(TOKENIZER_FILES)}" if file is None else "no tokenizer.ggml.model"
        raise ValueError(
            f"{str(path)!r} holds no tokenizer ({lacks}): give prompts as token ids, the output then has no "
            "text"
        )
    try:
        if file is not None:
            return Tokenizer(build_tokenizer(file))
        from transformers import AutoTokenizer

        return Tokenizer(
            AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        )
    except Exception as error:  # transformers raises whatever its readers raise
        what = "tokenizer files" if file is None else "tokenizer"
        raise ValueError(f"the {what} in {str(path)!r} cannot be read: {error}") from error


def _has_files(path: Path) -> bool:
    return any((path / name).is_file() for name in TOKENIZER_FILES)


def _gguf_file(path: Path) -> GGUFFile | None:
    """The GGUF file that holds the tokenizer; None: tokenizer files do, or nothing."""
    if _has_files(path) or not (path.is_file() or any(path.glob("*.gguf"))):
        return None
    return GGUFFile(find_checkpoint(path))


class Tokenizer:
    """A transformers tokenizer with the few methods that we use.

    Decoding never "cleans up" spaces before punctuation: that would change text which was streamed.
    """

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf = hf_tokenizer
        self._special_ids = _special_ids(hf_tokenizer)
        self._byte_of = _byte_alphabet() if _is_byte_level(hf_tokenizer) else None
        self._texts: dict[int, str] = {}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. A rendered chat template has its special tokens already: pass False."""
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids that the tokenizer does not know give no text."""
        known = [i for i in token_ids if self._token(i) is not None]
        return self.hf.decode(
            known, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_text(self, token_id: int) -> str:
        """Text of one token by itself, special ones included; remembered, as logprobs ask for it often."""
        text = self._texts.get(token_id)
        if text is None:
            text = self._texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    def bytes_of(self, token_id: int) -> bytes:
        """Bytes that a token stands for, which may be a part of a character; none beyond the vocabulary."""
        token = self._token(token_id)
        if token is None:
            return b""
        if _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        if self._byte_of is not None and token_id not in self._special_ids:
            return self.token_bytes(token)
        return self.token_text(token_id).encode("utf-8")

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's; of several named ones all, one after the other."""
        template = self.hf.chat_template
        return "\n".join(template.values()) if isinstance(template, dict) else template

    def apply_chat_template(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool = True,
        *,
        tools: list[dict[str, Any]] | None = None,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        template_kwargs: dict[str, Any] | None = None,
    ) -> str:
        """The prompt text of a conversation; encode it with `add_special_tokens=False`.

        Args:
            tools: functions that the model may call, as OpenAI's API has them.
            continue_final_message: leave the last message open, so that the model goes on with it.
            chat_template: used instead of the checkpoint's.
            template_kwargs: more variables for the template.

        Raises:
            ValueError: the checkpoint has no chat template, or the template refuses the messages.
        """
        if not (chat_template or self.hf.chat_template):
            raise ValueError(
                "this checkpoint's tokenizer has no chat template (chat_template in tokenizer_config.json, "
                "or chat_template.jinja): pass a plain prompt instead of messages"
            )
        # A template among the variables would be run, so only what the method does not know itself passes.
        taken = (template_kwargs or {}).keys() & inspect.signature(self.hf.apply_chat_template).parameters
        if taken:
            raise ValueError(f"{min(taken)!r} is no variable of a chat template")
        try:
            return self.hf.apply_chat_template(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                tokenize=False,
                **(template_kwargs or {}),
            )
        except Exception as error:  # Jinja raises its own errors and whatever the template calls
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def detokenizer(self, skip_special_tokens: bool = True) -> IncrementalDetokenizer:
        """A fresh streaming decoder for one sequence of generated tokens."""
        if self._byte_of is not None:
            return _ByteLevelDetokenizer(self, skip_special_tokens)
        return _WindowDetokenizer(self, skip_special_tokens)

    def _token(self, token_id: int) -> str | None:
        """The vocabulary's spelling of a token; None beyond the vocabulary (models often pad theirs)."""
        try:
            return self.hf.convert_ids_to_tokens(token_id)
        except (IndexError, OverflowError):
            return None

    def shown_token(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The vocabulary's spelling of a token, or None if it does not take part in decoding."""
        if skip_special_tokens and token_id in self._special_ids:
            return None
        return self._token(token_id)

    def token_bytes(self, token: str) -> bytes:
        """Bytes that a byte-level decoder makes of a vocabulary entry."""
        assert self._byte_of is not None, "only byte-level tokenizers spell bytes as characters"
        try:
            return bytes(self._byte_of[character] for character in token)
        except KeyError:  # an added token, spelled as it is
            return token.encode("utf-8")


class IncrementalDetokenizer:
    """Text of a growing token list, piece by piece.

    The pieces of `push` and the last one of `finish` concatenate to `Tokenizer.decode` of all tokens.
    What later tokens may still change is held back: the bytes of an incomplete character and, with
    byte-fallback tokenizers, a run of byte tokens up to its end (if one of its bytes turns out
    invalid, such a decoder replaces the whole run).
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens

    def push(self, token_id: int) -> str:
        """Text that became certain with this token; often "" in the middle of a character."""
        # Tokens that are not shown are dropped here, so that they neither end a run of bytes nor count
        # as the token after which a leading space is kept.
        token = self._tokenizer.shown_token(token_id, self._skip)
        return "" if token is None else self._push(token_id, token)

    def finish(self) -> str:
        """The text held back so far, incomplete characters as U+FFFD."""
        raise NotImplementedError

    def _push(self, token_id: int, token: str) -> str:
        raise NotImplementedError


class _ByteLevelDetokenizer(IncrementalDetokenizer):
    """Every token stands for bytes: an incremental UTF-8 decoder is all it takes."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def _push(self, token_id: int, token: str) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        text = self._decoder.decode(b"", final=True)
        self._decoder.reset()
        return text


class _WindowDetokenizer(IncrementalDetokenizer):
    """For any other decoder: decode the last few tokens again together with the new one.

    `_context` are tokens whose text is out; they are decoded along because a first token is treated
    differently (its leading space is dropped). `_pending` are tokens whose text is not out.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        super().__init__(tokenizer, skip_special_tokens)
        self._context: list[int] = []
        self._pending: list[int] = []
        self._started = False

    def _push(self, token_id: int, token: str) -> str:
        self._pending.append(token_id)
        if _BYTE_TOKEN.fullmatch(token):
            return ""
        text = self._pending_text()
        if text.endswith(REPLACEMENT) and len(self._pending) <= MAX_INCOMPLETE_TOKENS:
            return ""
        return self._release(text)

    def finish(self) -> str:
        return self._release(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        before = self._tokenizer.decode(self._context, skip_special_tokens=False)
        text = self._tokenizer.decode(self._context + self._pending, skip_special_tokens=False)
        return text[len(before) :]

    def _release(self, text: str) -> str:
        if text:
            self._context, self._started = self._pending, True
        elif not self._started:
            # Tokens without text are no context by themselves: what follows would count as the first.
            self._context = self._context + self._pending
        self._pending = []
        return text


def _special_ids(hf_tokenizer: Any) -> frozenset[int]:
    """Ids that decoding with skip_special_tokens leaves out."""
    added = {i for i, token in hf_tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(hf_tokenizer.all_special_ids))


def _is_byte_level(hf_tokenizer: Any) -> bool:
    backend = getattr(hf_tokenizer, "backend_tokenizer", None)
    decoder = json.loads(backend.to_str())["decoder"] if backend is not None else None
    return decoder is not None and decoder["type"] == "ByteLevel"


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level vocabularies.

    A byte that is a printable, non-space Latin-1 character stands for itself; the others are numbered
    from U+0100 in increasing order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return alphabet
