"""Streaming decoding equals decoding at once, on a byte-level and a byte-fallback tokenizer."""

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from prefold.tokenizer import REPLACEMENT, Tokenizer, load_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog did not mind at all.",
    "naïve café, Übergröße, ångström; 北京 上海 東京 서울; Привет, мир! 👩‍👩‍👧 🎉🎉",
    "  leading and   several spaces\n\tand tabs ",
]
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def hugging_face(backend, folder, **kwargs):
    """Save as a checkpoint would hold it, and load it the way a user does."""
    from transformers import PreTrainedTokenizerFast

    PreTrainedTokenizerFast(tokenizer_object=backend, **kwargs).save_pretrained(folder)
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory) -> Tokenizer:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens(["added word", AddedToken("日本", special=False)])
    return hugging_face(backend, tmp_path_factory.mktemp("byte"), eos_token="<|end|>", chat_template=TEMPLATE)


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "▁The", "▁dog", "▁▁", "é", "北", REPLACEMENT, *"abcdefghijklmnopqrstuvwxyzT.,!"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    vocab.update({"th": len(vocab), "the": len(vocab) + 1, "▁t": len(vocab) + 2})
    merges = [("t", "h"), ("th", "e"), ("▁", "t")]
    backend = Backend(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    folder = tmp_path_factory.mktemp("fallback")
    return hugging_face(backend, folder, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def metaspace(tmp_path_factory) -> Tokenizer:
    pieces = ["<unk>", "</s>", "▁", "▁The", "▁dog", *"abcdefghijklmnopqrstuvwxyzT.,!é北"]
    backend = Backend(models.Unigram([(piece, -float(i)) for i, piece in enumerate(pieces)], unk_id=0))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    return hugging_face(backend, tmp_path_factory.mktemp("meta"), eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory) -> Tokenizer:
    pieces = ["[UNK]", "[SEP]", "the", "dog", "##s", "##gy", "n", "'", "t", ",", ".", "do", "##n"]
    backend = Backend(models.WordPiece({piece: i for i, piece in enumerate(pieces)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return hugging_face(backend, tmp_path_factory.mktemp("wp"), unk_token="[UNK]", sep_token="[SEP]")


@pytest.fixture(params=["byte_level", "byte_fallback", "metaspace", "wordpiece"])
def any_tokenizer(request) -> Tokenizer:
    return request.getfixturevalue(request.param)


def stream(tokenizer, token_ids, skip=True):
    """Pieces of each push, then what finish gave."""
    detokenizer = tokenizer.detokenizer(skip_special_tokens=skip)
    pieces = [detokenizer.push(i) for i in token_ids]
    return pieces, detokenizer.finish()


def hf_decode(tokenizer, token_ids, skip=True):
    return tokenizer.hf.decode(token_ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


def assert_streams_to(tokenizer, token_ids, expected, skip=True):
    pieces, rest = stream(tokenizer, token_ids, skip)
    assert "".join(pieces) + rest == expected


@settings(max_examples=200)
@given(data=st.data(), skip=st.booleans())
def test_random_ids_stream_to_what_decode_gives(byte_level, byte_fallback, metaspace, wordpiece, data, skip):
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback, metaspace, wordpiece]))
    size = len(tokenizer.hf)
    # Added tokens come last, then two ids beyond the vocabulary: models pad theirs and may sample those.
    any_id = st.one_of(st.integers(0, size + 1), st.integers(size - 3, size + 1))
    token_ids = data.draw(st.lists(any_id, max_size=30))
    known = [i for i in token_ids if i < size]
    assert tokenizer.decode(token_ids, skip) == hf_decode(tokenizer, known, skip)
    assert_streams_to(tokenizer, token_ids, hf_decode(tokenizer, known, skip), skip)


@settings(max_examples=150)
@given(data=st.data())
def test_random_bytes_stream_to_what_decode_gives(byte_level, byte_fallback, data):
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
    lead = [0xC3, 0xE2, 0xF0, 0x82, 0xAC, 0x9F, 0x98, 0x80, 0xED, 0xA0, 0xFF, 0x41]
    values = data.draw(st.lists(st.sampled_from(lead), max_size=24))
    spelled = {byte: character for character, byte in (byte_level._byte_of or {}).items()}
    name = (lambda b: spelled[b]) if tokenizer is byte_level else (lambda b: f"<0x{b:02X}>")
    token_ids = [tokenizer.hf.convert_tokens_to_ids(name(b)) for b in values]
    expected = hf_decode(tokenizer, token_ids)
    assert_streams_to(tokenizer, token_ids, expected)
    if tokenizer is byte_level:
        assert expected == bytes(values).decode("utf-8", errors="replace")


@settings(max_examples=150)
@given(data=st.data(), text=st.text(max_size=40))
def test_unicode_text_streams_without_replacement_characters(byte_level, byte_fallback, data, text):
    tokenizer = data.draw(st.sampled_from([byte_level, byte_fallback]))
    text = text.replace(REPLACEMENT, "")
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    pieces, rest = stream(tokenizer, token_ids)
    assert not any(REPLACEMENT in piece for piece in [*pieces, rest])
    assert "".join(pieces) + rest == tokenizer.decode(token_ids)
    if tokenizer is byte_level:
        assert tokenizer.decode(token_ids) == text


def test_byte_level_decoders_are_recognised(byte_level, byte_fallback, metaspace, wordpiece):
    kinds = [t.detokenizer().__class__.__name__ for t in (byte_level, byte_fallback, metaspace, wordpiece)]
    assert kinds == ["_ByteLevelDetokenizer", *["_WindowDetokenizer"] * 3]


def test_the_window_works_for_byte_level_text_too(byte_level):
    """For decoders that cannot be recognised, text that ends in U+FFFD is held back."""
    byte_of, byte_level._byte_of = byte_level._byte_of, None
    try:
        for text in CORPUS:
            pieces, rest = stream(byte_level, byte_level.encode(text))
            assert "".join(pieces) + rest == text
            assert not any(REPLACEMENT in piece for piece in pieces)
    finally:
        byte_level._byte_of = byte_of


def test_corpus_streams_on_every_tokenizer(any_tokenizer):
    for text in CORPUS:
        token_ids = any_tokenizer.encode(text)
        for length in range(len(token_ids) + 1):
            assert_streams_to(any_tokenizer, token_ids[:length], any_tokenizer.decode(token_ids[:length]))


def test_a_character_comes_with_its_last_byte(byte_level):
    spelled = {byte: character for character, byte in (byte_level._byte_of or {}).items()}
    token_ids = [byte_level.hf.convert_tokens_to_ids(spelled[b]) for b in "€a".encode()]
    assert stream(byte_level, token_ids) == (["", "", "€", "a"], "")
    assert stream(byte_level, token_ids[:2]) == (["", ""], REPLACEMENT)


def test_text_comes_token_by_token_where_nothing_can_change_it(byte_fallback):
    token_ids = byte_fallback.hf.convert_tokens_to_ids(["▁The", "▁dog", "s", ".", "</s>", "▁The"])
    assert stream(byte_fallback, token_ids) == (["The", " dog", "s", ".", "", " The"], "")


def test_a_run_of_byte_tokens_waits_for_its_end(byte_fallback):
    def ids(*tokens):
        return byte_fallback.hf.convert_tokens_to_ids(list(tokens))

    good = ids("▁The", "<0xC3>", "<0xA9>", "a")
    assert stream(byte_fallback, good) == (["The", "", "", "éa"], "")
    bad = ids("▁The", "<0xC3>", "<0xA9>", "<0xFF>", "a")
    assert stream(byte_fallback, bad) == (["The", "", "", "", REPLACEMENT * 3 + "a"], "")
    assert stream(byte_fallback, good[:3]) == (["The", "", ""], "é")


def test_a_literal_replacement_character_does_not_block_the_stream(byte_fallback):
    literal = byte_fallback.hf.convert_tokens_to_ids(REPLACEMENT)
    pieces, rest = stream(byte_fallback, [literal] * 100)
    assert "".join(pieces) + rest == REPLACEMENT * 100
    assert len(rest) <= 3


@pytest.mark.parametrize("first", [["▁"], ["▁", "▁"], ["</s>"], ["▁▁"], ["</s>", "▁", "</s>"], []])
def test_only_the_first_leading_space_is_dropped(byte_fallback, first):
    token_ids = byte_fallback.hf.convert_tokens_to_ids([*first, "▁The", "▁", "</s>", "▁dog"])
    assert_streams_to(byte_fallback, token_ids, hf_decode(byte_fallback, token_ids))


def test_work_per_token_does_not_grow(any_tokenizer):
    """Tokens handed to decode stay within a window, whatever the text's length."""
    decoded = 0
    decode = any_tokenizer.decode

    def counting(token_ids, skip_special_tokens=True):
        nonlocal decoded
        decoded += len(token_ids)
        return decode(token_ids, skip_special_tokens)

    any_tokenizer.decode = counting
    try:
        token_ids = any_tokenizer.encode(CORPUS[1] * 5 + CORPUS[0] * 20)
        stream(any_tokenizer, token_ids)
        if any_tokenizer.hf.vocab_size > 300 and any_tokenizer._byte_of is None:  # one long run of bytes
            stream(any_tokenizer, [any_tokenizer.hf.convert_tokens_to_ids("<0xFF>")] * len(token_ids))
    finally:
        del any_tokenizer.decode
    assert decoded <= 8 * len(token_ids)


def test_special_tokens_are_shown_on_request(byte_level):
    end = byte_level.hf.convert_tokens_to_ids("<|end|>")
    token_ids = [*byte_level.encode("a"), end, *byte_level.encode("b")]
    assert "".join(stream(byte_level, token_ids, skip=True)[0]) == "ab"
    assert "".join(stream(byte_level, token_ids, skip=False)[0]) == "a<|end|>b"
    assert byte_level.token_text(end) == "<|end|>"
    assert byte_level.token_text(end + 10_000) == ""


def test_spaces_before_punctuation_are_kept(byte_level):
    text = "one , two . it 's"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_encode_adds_special_tokens_unless_told_not_to(byte_fallback):
    assert byte_fallback.encode("The")[0] == 1
    assert 1 not in byte_fallback.encode("The", add_special_tokens=False)


def test_chat_template(byte_level, byte_fallback):
    messages = [{"role": "user", "content": "hi"}]
    assert byte_level.apply_chat_template(messages) == "<|user|>hi<|assistant|>"
    assert byte_level.apply_chat_template(messages, add_generation_prompt=False) == "<|user|>hi"
    with pytest.raises(ValueError, match="no chat template"):
        byte_fallback.apply_chat_template(messages)


def test_chat_template_that_refuses(byte_level):
    template = byte_level.hf.chat_template
    byte_level.hf.chat_template = "{{ raise_exception('roles must alternate') }}"
    try:
        with pytest.raises(ValueError, match="roles must alternate"):
            byte_level.apply_chat_template([{"role": "user", "content": "hi"}])
    finally:
        byte_level.hf.chat_template = template


def test_missing_and_broken_tokenizer_files(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "deepseek_v3"}))
    with pytest.raises(ValueError, match=r"holds no tokenizer .*token ids"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer("some-org/some-model")
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="cannot be read"):
        load_tokenizer(tmp_path)


def test_importing_the_module_does_not_import_transformers():
    code = "import sys, prefold.tokenizer; print('transformers' in sys.modules, 'torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["False", "False"]
