"""GGUF files written here with llama.cpp's conventions, read and converted."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from prefold.convert import convert
from prefold.convert.gguf_source import GGUFSource

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, LAYERS = 64, 4, 2, 16, 96, 2
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}


def byte_alphabet():
    """The 256 characters that byte-level BPE writes bytes as."""
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def make_model(vocab_size):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=128,
        initializer_range=0.25,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def permute(weight, heads):
    """What llama.cpp does to q_proj and k_proj: the halves of each head interleaved."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path, model, kind=Kind.F32, pre="smollm", arch="llama", metadata=(), tensors=()):
    """`kind` is the type of the two-dimensional weights; norms stay float32, as in real files."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(5000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(config.vocab_size)
    add_tokenizer(writer, pre)
    for key, value in metadata:
        (writer.add_string if isinstance(value, str) else writer.add_uint32)(key, value)
    state = {name: tensor.float().numpy() for name, tensor in model.state_dict().items()}
    weights = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(LAYERS):
        for short, long in MODULES.items():
            weights[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    for short, long in weights.items():
        value = state[long]
        if arch == "llama" and ("attn_q" in short or "attn_k." in short):
            value = permute(value, HEADS if "attn_q" in short else KV_HEADS)
        add_tensor(writer, short, value, kind if value.ndim == 2 else Kind.F32)
    for short, value in tensors:
        add_tensor(writer, short, value, Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_tensor(writer, name, value, kind):
    value = np.ascontiguousarray(value)
    if kind == Kind.F32:
        writer.add_tensor(name, value)
    else:
        writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)


def vocabulary():
    """Special tokens, bytes, and a few merges; digits and runs of blanks tell the splitting rules apart."""
    merges = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "Ġ 1", "1 2"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *byte_alphabet()]
    return tokens + [merge.replace(" ", "") for merge in merges], merges


def add_tokenizer(writer, pre):
    tokens, merges = vocabulary()
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}")


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return make_model(len(vocabulary()[0]))


@torch.inference_mode()
def test_float32_file_is_the_model(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model)
    source = GGUFSource(tmp_path / "m.gguf")
    for name in source.tensor_names():
        assert torch.equal(source.tensor(name), model.state_dict()[name]), name
    assert source.spec.rms_norm_eps == 1e-5
    convert(tmp_path / "m.gguf", tmp_path / "dst")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "dst", dtype="auto").eval()
    prompt = torch.arange(3, 83)[None]
    want, got = model(prompt).logits, converted(prompt).logits
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
    tokens = [
        m.generate(prompt, max_new_tokens=16, min_new_tokens=16, do_sample=False) for m in (model, converted)
    ]
    assert tokens[0].tolist() == tokens[1].tolist()


@pytest.mark.parametrize(
    ("kind", "step"),
    [(Kind.F16, 2**-10), (Kind.BF16, 2**-8), (Kind.Q8_0, 1 / 127), (Kind.Q4_1, 1 / 7), (Kind.Q4_0, 1 / 7)],
)
def test_quantised_weights_come_back_within_a_step(tmp_path, model, kind, step):
    write_gguf(tmp_path / "m.gguf", model, kind)
    source = GGUFSource(tmp_path / "m.gguf")
    for name in source.tensor_names():
        want, got = model.state_dict()[name], source.tensor(name)
        assert got.dtype == torch.float32
        assert (got - want).abs().max() <= step * want.abs().max(), name


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q6_K])
def test_k_quants_are_read(tmp_path, model, kind):
    """No Python code writes them, so the file gets blocks of bytes 1, which are small numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows = model.config.vocab_size
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    raw = np.full((rows, 256 // block * size), 1, dtype=np.uint8)
    writer.add_tensor("token_embd.weight", raw, raw_dtype=kind)
    for key, value in {
        "context_length": 8,
        "embedding_length": 256,
        "block_count": 0,
        "feed_forward_length": 8,
        "attention.head_count": 4,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    embedding = GGUFSource(tmp_path / "m.gguf").tensor("model.embed_tokens.weight")
    assert embedding.shape == (rows, 256)
    assert embedding.isfinite().all()
    assert embedding.any()


def test_qwen2_files_are_not_permuted_and_have_biases(tmp_path, model):
    biases = [
        (f"blk.{layer}.{name}.bias", np.arange(rows, dtype=np.float32))
        for layer in range(LAYERS)
        for name, rows in (
            ("attn_q", HEADS * HEAD_DIM),
            ("attn_k", KV_HEADS * HEAD_DIM),
            ("attn_v", KV_HEADS * HEAD_DIM),
        )
    ]
    write_gguf(tmp_path / "m.gguf", model, arch="qwen2", pre="qwen2", tensors=biases)
    # The writer puts keys under its architecture's name, so the file is a whole qwen2 file.
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.spec.qkv_bias
    assert not source.spec.o_bias
    name = "model.layers.1.self_attn.k_proj"
    assert torch.equal(source.tensor(f"{name}.weight"), model.state_dict()[f"{name}.weight"])
    assert source.tensor(f"{name}.bias").tolist() == list(range(KV_HEADS * HEAD_DIM))


def test_rope_scaling(tmp_path, model):
    factors = np.linspace(1, 8, HEAD_DIM // 2, dtype=np.float32)
    write_gguf(tmp_path / "plain.gguf", model)
    plain = torch.tensor(GGUFSource(tmp_path / "plain.gguf").spec.wavelengths)
    assert torch.allclose(plain, 5000.0 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    write_gguf(tmp_path / "llama3.gguf", model, tensors=[("rope_freqs.weight", factors)])
    source = GGUFSource(tmp_path / "llama3.gguf")
    assert torch.equal(torch.tensor(source.spec.wavelengths), plain * torch.from_numpy(factors))
    assert "rope_freqs.weight" not in source.tensor_names()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"arch": "gemma"}, "'gemma' cannot be converted"),
        ({"metadata": [("llama.expert_count", 8)]}, "mixture of experts"),
        ({"metadata": [("llama.attention.sliding_window", 32)]}, "window 32"),
        ({"metadata": [("llama.rope.scaling.type", "yarn")]}, "'yarn'"),
        ({"pre": "chatglm-bpe"}, "'chatglm-bpe' is unknown"),
        ({"tensors": [("blk.0.attn_q_norm.weight", np.ones(HEAD_DIM, np.float32))]}, "q_norm"),
    ],
)
def test_refusals(tmp_path, model, arguments, message):
    write_gguf(tmp_path / "m.gguf", model, **arguments)
    with pytest.raises(ValueError, match=message):
        convert(tmp_path / "m.gguf", tmp_path / "dst")
    assert not (tmp_path / "dst").exists()


def test_tokenizer(tmp_path, model):
    write_gguf(tmp_path / "m.gguf", model)
    convert(tmp_path / "m.gguf", tmp_path / "dst")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "dst")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    for text in ("hello   12 12", " 漢字 😀\n\n\tx", "<|im_start|>hello<|im_end|>"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # SmolLM splits digits off one by one before anything else: no merge "1 2", and both blanks stay together.
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("hello  12")["input_ids"])
    assert tokens == ["hello", "ĠĠ", "1", "2"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert chat == "<|im_start|>hello<|im_end|>"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["hello", "Ġ", "Ġ1", "2"]),
        ("llama-bpe", ["hello", "Ġ", "Ġ", "12"]),
        ("qwen2", ["hello", "Ġ", "Ġ", "1", "2"]),
    ],
)
def test_splitting_rules(tmp_path, model, pre, expected):
    write_gguf(tmp_path / "m.gguf", model, pre=pre)
    GGUFSource(tmp_path / "m.gguf").save_extras(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.convert_ids_to_tokens(tokenizer("hello  12")["input_ids"]) == expected
