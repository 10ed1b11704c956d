"""What cannot work is refused with a ValueError that says what and why, before anything is generated."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import prefold.worker.model_runner as model_runner
from prefold import LLM, SamplingParams
from prefold.hf_config import SUPPORTED_ARCHITECTURES

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tiny) -> LLM:
    return tiny.llm(max_model_len=50)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong must be found before a tensor is loaded."""

    def load(*_: object) -> None:
        raise AssertionError("weights are being loaded")

    monkeypatch.setattr(model_runner, "load_weights", load)


@pytest.fixture
def copy(tiny, tmp_path: Path) -> Path:
    """A checkpoint to spoil."""
    return Path(shutil.copytree(tiny.folder("small"), tmp_path / "copy"))


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def refused(*parts: object, **options: Any) -> Any:
    """Expects a ValueError that mentions all of `parts`."""
    return pytest.raises(ValueError, match="(?s)" + "".join(f"(?=.*{part})" for part in parts), **options)


# ---------------------------------------------------------------- the checkpoint


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("architecture", ["GPT2LMHeadModel", "deepseek", ""])
def test_unknown_architecture(copy: Path, architecture: str):
    change_config(copy, architectures=[architecture])
    with refused(architecture, *SUPPORTED_ARCHITECTURES):
        LLM(str(copy))


@pytest.mark.usefixtures("no_weights")
def test_no_checkpoint(tmp_path: Path):
    with refused("no checkpoint", "config.json"):
        LLM(str(tmp_path))
    with refused("no checkpoint", "nowhere"):
        LLM("nowhere/at/all")
    (tmp_path / "config.json").write_text("{not json")
    with refused("config.json"):
        LLM(str(tmp_path))


def shards(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.safetensors"))
    assert len(found) > 1
    return found


def remove_shard(folder: Path) -> str:
    shards(folder)[1].unlink()
    return shards(folder)[1].name.replace("00003", "00002")


def truncate_shard(folder: Path) -> str:
    path = shards(folder)[1]
    path.write_bytes(path.read_bytes()[:-100])
    return path.name


def overwrite_header(folder: Path) -> str:
    path = shards(folder)[0]
    data = bytearray(path.read_bytes())
    data[8:40] = b"\xff" * 32
    path.write_bytes(bytes(data))
    return path.name


def empty_shard(folder: Path) -> str:
    path = shards(folder)[0]
    path.write_bytes(b"")
    return path.name


def remove_all(folder: Path) -> str:
    for path in (*shards(folder), folder / "model.safetensors.index.json"):
        path.unlink()
    return "holds no weights"


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("spoil", [remove_shard, truncate_shard, overwrite_header, empty_shard, remove_all])
def test_missing_and_corrupt_shards(copy: Path, spoil: Callable[[Path], str]):
    with refused(spoil(copy)):
        LLM(str(copy), num_blocks=100, max_model_len=100)


def test_weights_that_do_not_fit_the_config(copy: Path):
    change_config(copy, num_hidden_layers=3)
    with refused("missing tensors", "layers.2"):
        LLM(str(copy), num_blocks=100, max_model_len=100)
    change_config(copy, num_hidden_layers=2, intermediate_size=97)
    with refused("another shape", "mlp", "97"):
        LLM(str(copy), num_blocks=100, max_model_len=100)


@pytest.mark.usefixtures("no_weights")
def test_heads_that_tp_does_not_divide(tiny):
    with refused("num_attention_heads=8", "tensor_parallel_size=3"):
        tiny.llm(tensor_parallel_size=3)


# ---------------------------------------------------------------- options


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"tensor_parallel": 2}, ["tensor_parallel'", "tensor_parallel_size"]),
        ({"block_size": 0}, ["block_size=0"]),
        ({"num_blocks": -1}, ["num_blocks=-1"]),
        ({"max_num_seqs": 0}, ["max_num_seqs=0"]),
        ({"max_num_batched_tokens": 0}, ["max_num_batched_tokens=0"]),
        ({"prefill_context_parallel_size": 0}, ["prefill_context_parallel_size=0"]),
        ({"threads_per_rank": 0}, ["threads_per_rank=0"]),
        ({"context_workspace_tokens": 0}, ["context_workspace_tokens=0"]),
        ({"max_model_len": 0}, ["max_model_len=0"]),
        ({"max_model_len": 5000}, ["max_model_len=5000", "max_position_embeddings=4096"]),
        ({"dtype": "float16"}, ["float16", "bfloat16"]),
        ({"compute_dtype": "int8"}, ["compute_dtype", "int8"]),
        ({"device": "tpu"}, ["device", "tpu"]),
        ({"transport": "mpi"}, ["transport", "mpi"]),
        ({"num_blocks": 10, "kv_cache_memory_bytes": 1000}, ["num_blocks", "kv_cache_memory_bytes"]),
        # A block of 4 tokens takes 2 layers * 40 elements * 4 bytes * 4 tokens.
        ({"num_blocks": None, "kv_cache_memory_bytes": 1279}, ["kv_cache_memory_bytes=1279", "1280"]),
        ({"num_blocks": 10, "max_model_len": 42}, ["max_model_len=42", "10 blocks of 4", "allow 41"]),
        (
            {"num_blocks": None, "kv_cache_memory_bytes": 12_800, "max_model_len": 42},
            ["KV cache is too small for one request", "max_model_len=42", "kv_cache_memory_bytes"],
        ),
    ],
    ids=str,
)
def test_options(tiny, options: dict[str, Any], parts: list[str]):
    with refused(*parts):
        tiny.llm(**options)


def test_a_gpu_where_there_is_none(tiny, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device='cuda': torch .* sees no GPU here"):
        tiny.llm(device="cuda")


def test_the_smallest_kv_cache_that_holds_a_request(tiny):
    """The last token's KV is never needed: 10 blocks of 4 tokens serve 41 tokens."""
    for options in ({"num_blocks": 10}, {"num_blocks": None, "kv_cache_memory_bytes": 12_800}):
        llm = tiny.llm(**options, max_model_len=41)
        assert llm.engine.config.cache.num_blocks == 10
        (output,) = llm.generate(list(range(37)), GREEDY)
        assert len(output.outputs[0].token_ids) == 4
    assert tiny.llm(num_blocks=10, max_model_len=None).engine.config.scheduler.max_model_len == 41


def test_a_checkpoint_without_tokenizer(copy: Path):
    for path in copy.glob("token*"):
        path.unlink()
    with refused("no tokenizer"):
        LLM(str(copy), num_blocks=100, max_model_len=100)
    llm = LLM(str(copy), num_blocks=100, max_model_len=100, skip_tokenizer_init=True, threads_per_rank=1)
    (output,) = llm.generate([5, 6], GREEDY)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].text == ""
    with refused("text prompt", "tokenizer"):
        llm.generate("a text", GREEDY)
    with refused("chat", "tokenizer"):
        llm.chat([{"role": "user", "content": "hi"}])
    with refused("stop", "tokenizer"):
        llm.generate([5, 6], SamplingParams(stop="x"))
    assert not llm.engine.has_unfinished_requests


# ---------------------------------------------------------------- requests


def test_lengths(llm: LLM):
    for length in (46, 1, 30):
        (output,) = llm.generate([3] * length, SamplingParams(max_tokens=50 - length, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 50 - length, "prompt + max_tokens == max_model_len"
        with refused(f"{length} prompt tokens", f"max_tokens={51 - length}", "max_model_len=50"):
            llm.generate([3] * length, SamplingParams(max_tokens=51 - length))
    for length in (50, 51, 500):
        for max_tokens in (1, None):
            with refused(f"{length} prompt tokens", "max_model_len=50"):
                llm.generate([3] * length, SamplingParams(max_tokens=max_tokens))


@pytest.mark.parametrize(
    ("prompt", "parts"),
    [
        ([[]], ["prompt is empty"]),
        ({"prompt_token_ids": []}, ["prompt is empty"]),
        ([5, 320], ["token id 320", r"\[0, 320\)"]),
        ([5, -1], ["token id -1", r"\[0, 320\)"]),
        ([[5], [6, 7, 10**12]], ["token id 1000000000000"]),
        ([[5.0]], ["integers", "float"]),
        ([[5, "a"]], ["integers", "str"]),
        ({"text": "a"}, ["prompt_token_ids", "text"]),
        (None, ["prompts=None: a text, token ids"]),
        (b"text", ["prompts=b'text'"]),
        ([1.5, 2], ["prompt 1.5 is neither"]),
    ],
    ids=str,
)
def test_prompts(llm: LLM, prompt: Any, parts: list[str]):
    with refused(*parts):
        llm.generate(prompt, GREEDY)
    assert not llm.engine.has_unfinished_requests


def test_an_empty_text(tiny):
    llm = tiny.llm(skip_tokenizer_init=False)
    with refused("prompt is empty"):
        llm.generate("", GREEDY)


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        ({"n": 0}, ["n=0", r"\[1, 128\]"]),
        ({"temperature": -0.1}, ["temperature=-0.1"]),
        ({"temperature": float("nan")}, ["temperature=nan"]),
        ({"top_p": 0.0}, ["top_p=0.0"]),
        ({"top_p": 1.1}, ["top_p=1.1"]),
        ({"top_k": -2}, ["top_k=-2"]),
        ({"min_p": 1.5}, ["min_p=1.5"]),
        ({"max_tokens": -1}, ["max_tokens=-1"]),
        ({"min_tokens": 5, "max_tokens": 4}, ["min_tokens=5", "max_tokens=4"]),
        ({"logprobs": 21}, ["logprobs=21", "20"]),
        ({"prompt_logprobs": -1}, ["prompt_logprobs=-1"]),
        ({"presence_penalty": 2.1}, ["presence_penalty=2.1"]),
        ({"frequency_penalty": -2.1}, ["frequency_penalty=-2.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty=0.0"]),
        ({"seed": 2**63}, ["seed=9223372036854775808"]),
        ({"top_k": 1.5}, ["top_k: 1.5 is no integer"]),
        ({"n": None}, ["n: None is no integer"]),
        ({"seed": "7"}, ["seed: '7' is no integer"]),
        ({"temperature": "hot"}, ["temperature: 'hot' is no number"]),
        ({"temperature": None}, ["temperature: None is no number"]),
        ({"stop": ["a", 3]}, ["stop="]),
        ({"stop_token_ids": [5.0]}, ["stop_token_ids: 5.0 is no integer"]),
        ({"logit_bias": {"a": 1.0}}, ["logit_bias: 'a' is no integer"]),
        ({"logit_bias": {3: "a"}}, ["logit_bias: 'a' is no number"]),
        ({"stop_token_ids": [5, -1]}, ["stop_token_ids", "-1"]),
        ({"stop": [""]}, ["empty string"]),
        ({"logit_bias": {-1: 1.0}}, [r"logit_bias\[-1\]"]),
        ({"logit_bias": {1: float("inf")}}, ["logit_bias", "inf"]),
    ],
    ids=str,
)
def test_sampling_parameters(params: dict[str, Any], parts: list[str]):
    with refused(*parts):
        SamplingParams(**params)


def test_numbers_of_numpy_reach_the_ranks_as_pythons():
    given = SamplingParams(
        top_k=np.int64(3),
        seed=np.int32(4),
        temperature=np.float32(0.5),
        top_p=1,
        stop_token_ids=np.array([1, 2]),
        logit_bias={np.int64(3): 1},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(given), type=SamplingParams) == given
    plain = SamplingParams(
        top_k=3, seed=4, temperature=0.5, top_p=1.0, stop_token_ids=(1, 2), logit_bias={3: 1.0}
    )
    assert given == plain


def test_parameters_that_do_not_fit_the_model(llm: LLM):
    with refused("logit_bias", "320"):
        llm.generate([5], SamplingParams(logit_bias={320: 1.0}))
    with refused("2 sampling_params for 3 prompts"):
        llm.generate([[5], [6], [7]], [GREEDY, GREEDY])
    with pytest.raises(TypeError, match="temprature"):
        SamplingParams(temprature=1.0)


def test_an_id_in_use(llm: LLM):
    llm.engine.add_request("a", [5], GREEDY)
    with refused("'a' is in use"):
        llm.engine.add_request("a", [6], GREEDY)
    llm.engine.add_request("many", [5], SamplingParams(n=2))
    with refused("in use"):
        llm.engine.add_request("many:1", [6], GREEDY)
    for request_id in ("a", "many"):
        llm.engine.abort_request(request_id)
    assert not llm.engine.has_unfinished_requests
