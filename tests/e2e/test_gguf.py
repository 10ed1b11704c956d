"""GGUF files in the engine: config, tokenizer and weights are those of the checkpoint they were made from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from prefold import LLM, SamplingParams
from prefold.checkpoint_files import check_checkpoint_files, find_checkpoint
from prefold.hf_config import load_model_config
from prefold.loader import open_source
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.gguf_checkpoint import write_gguf
from prefold.testing.thread_executor import ThreadLLM
from prefold.tokenizer import has_tokenizer, load_tokenizer

OPTIONS: dict[str, Any] = {"block_size": 4, "num_blocks": 100, "max_model_len": 96}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=20)
PROMPTS = [[3 + (7 * i) % 317 for i in range(length)] for length in (1, 16, 61)]

FAMILIES = {
    "llama": ("LlamaForCausalLM", {"tie_word_embeddings": True}, {}),
    "llama-bias": ("LlamaForCausalLM", {"attention_bias": True}, {}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 12}, {"attention.sliding_window": 12}),
    "qwen2": ("Qwen2ForCausalLM", {"head_dim": None}, {"attention.key_length": None}),
    "qwen3": ("Qwen3ForCausalLM", {}, {}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 4, "num_hidden_layers": 4}, {}),
}
ARCH = {"llama-bias": "llama", "mistral": "llama"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("LlamaForCausalLM", tmp_path_factory.mktemp("llama"))


def outputs(model: Path, **options: Any) -> list[tuple[list[int], Any]]:
    with ThreadLLM(str(model), **(OPTIONS | {"dtype": "float32"} | options)) as llm:
        samples = [output.outputs[0] for output in llm.generate(PROMPTS, GREEDY)]
    return [(sample.token_ids, sample.logprobs) for sample in samples]


@pytest.mark.parametrize("name", FAMILIES)
def test_it_runs_as_the_checkpoint_it_was_made_from(tmp_path: Path, name: str):
    """Bit by bit: the same numbers reach the same code. transformers has confirmed that code elsewhere."""
    architecture, overrides, metadata = FAMILIES[name]
    overrides = {key: value for key, value in overrides.items() if value is not None}
    if name == "qwen2":
        overrides["hidden_size"] = 96  # 8 heads of 12: the file does not say head_dim
    folder = make_checkpoint(architecture, tmp_path / "hf", **overrides)
    file = write_gguf(folder, tmp_path / "m.gguf", ARCH.get(name, name), metadata=metadata)
    want, got = load_model_config(folder), load_model_config(file)
    assert got == replace(want, path=str(file))
    assert outputs(file) == outputs(folder)


def test_ranks_read_their_parts(llama: Path, tmp_path: Path):
    """Q8_0 is not exact, but it is the same on every layout."""
    file = write_gguf(llama, tmp_path / "m.gguf", "llama", Kind.Q8_0)
    want = outputs(file)
    for layout in ({"tensor_parallel_size": 2}, {"prefill_context_parallel_size": 2}):
        assert [tokens for tokens, _ in outputs(file, **layout)] == [tokens for tokens, _ in want]


@pytest.mark.parametrize(
    ("kind", "dtype"), [(Kind.F32, "float32"), (Kind.Q4_0, "bfloat16"), (Kind.BF16, "bfloat16")]
)
def test_dtype_of_a_file(llama: Path, tmp_path: Path, kind: Kind, dtype: str):
    assert load_model_config(write_gguf(llama, tmp_path / "m.gguf", "llama", kind)).dtype == dtype


def test_float16_needs_a_decision(llama: Path, tmp_path: Path):
    file = write_gguf(llama, tmp_path / "m.gguf", "llama", Kind.F16)
    with pytest.raises(ValueError, match="dtype float16, which is not supported as it is"):
        load_model_config(file)
    assert load_model_config(file, "float32").dtype == "float32"


def test_a_file_in_parts(llama: Path, tmp_path: Path):
    whole = write_gguf(llama, tmp_path / "whole.gguf", "llama")
    first = write_gguf(llama, tmp_path / "m.gguf", "llama", num_files=3)
    third = tmp_path / "m-00003-of-00003.gguf"
    assert third.is_file()
    assert find_checkpoint(third) == first
    for name, tensor in open_source(whole).open(open_source(whole).tensors):
        shape = open_source(whole).tensors[name].shape
        read = torch.empty(shape)
        tensor.read(tuple(slice(0, n) for n in shape), read)
        (_, part), out = next(iter(open_source(third).open([name]))), torch.empty(shape)
        part.read(tuple(slice(0, n) for n in shape), out)
        assert torch.equal(out, read)
    third.unlink()
    with pytest.raises(ValueError, match=r"one of 3 parts, of which 1 lack: m-00003-of-00003\.gguf"):
        find_checkpoint(first)


def test_a_part_under_another_name(llama: Path, tmp_path: Path):
    first = write_gguf(llama, tmp_path / "m.gguf", "llama", num_files=2)
    with pytest.raises(ValueError, match="is one of 2 parts: they must lie side by side"):
        load_model_config(first.rename(tmp_path / "first.gguf"))


def test_a_folder_with_one_file(llama: Path, tmp_path: Path):
    file = write_gguf(llama, tmp_path / "m.gguf", "llama")
    with LLM(str(tmp_path), dtype="float32", threads_per_rank=1, **OPTIONS) as llm:
        assert llm.engine.config.model.path == str(file)
        (by_text,) = llm.generate("the sun and the rain", GREEDY)
        assert by_text.outputs[0].text
        assert llm.chat([{"role": "user", "content": "rain"}], GREEDY)
    tokenizer, original = load_tokenizer(file), load_tokenizer(llama)
    for text in ("the sun and  the rain 1234\n\n\tüß 漢字", "<s>x</s>"):
        assert tokenizer.encode(text) == original.encode(text)
    message = [{"role": "user", "content": "rain"}]
    assert tokenizer.apply_chat_template(message) == original.apply_chat_template(message)
    write_gguf(llama, tmp_path / "n.gguf", "llama")
    with pytest.raises(ValueError, match=r"holds 2 GGUF files, name one of them: m\.gguf, n\.gguf"):
        find_checkpoint(tmp_path)


def test_rope_scaling(llama: Path, tmp_path: Path):
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    rope = load_model_config(write_gguf(llama, tmp_path / "m.gguf", "llama", metadata=scaled)).rope
    assert (rope.rope_type, rope.parameters) == ("linear", {"factor": 4.0})
    scaled = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 1024,
    }
    rope = load_model_config(write_gguf(llama, tmp_path / "m.gguf", "llama", metadata=scaled)).rope
    assert rope.rope_type == "yarn"
    assert rope.parameters["original_max_position_embeddings"] == 1024


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        (
            "mamba",
            {},
            "GGUF architecture 'mamba', which is not supported; supported: llama, qwen2, qwen3, smollm3",
        ),
        ("llama", {"expert_count": 8}, r"llama\.expert_count=8 is not supported"),
        ("llama", {"attention.head_count": [8, 8, 4]}, "differ by layer"),
        ("llama", {"attention.value_length": 16}, r"12 elements, but \{'attention.value_length': 16\}"),
        ("llama", {"rope.dimension_count": 8}, "rope.dimension_count"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope scaling 'longrope' is not supported"),
        ("llama", {"attention.causal": False}, "causal"),
        ("qwen3", {"attention.sliding_window": 64}, "does not say in which layers"),
        ("llama", {"block_count": None}, "GGUF metadata lacks 'llama.block_count'"),
    ],
)
def test_refusals(llama: Path, tmp_path: Path, arch: str, metadata: dict, message: str):
    file = write_gguf(llama, tmp_path / "m.gguf", arch, metadata=metadata)
    with pytest.raises(ValueError, match=message):
        LLM(str(file), skip_tokenizer_init=True)


def test_damaged_files(llama: Path, tmp_path: Path):
    file = write_gguf(llama, tmp_path / "m.gguf", "llama")
    content = file.read_bytes()
    for size in (0, 3, 20, 300, 5000, len(content) - 1):
        file.write_bytes(content[:size])
        with pytest.raises(ValueError, match=r"cannot be read as GGUF|truncated"):
            check_checkpoint_files(file)
    file.write_bytes(content[:4] + (4).to_bytes(4, "little") + content[8:])
    with pytest.raises(ValueError, match="GGUF of version 4 or of another byte order"):
        load_model_config(file)


def test_no_tokenizer(tmp_path: Path):
    import gguf

    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert not has_tokenizer(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match="holds no tokenizer"):
        load_tokenizer(tmp_path / "m.gguf")
