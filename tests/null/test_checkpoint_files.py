"""Safetensors headers, without torch."""

import json
from pathlib import Path

import pytest

from prefold.checkpoint_files import INDEX_FILE, check_checkpoint_files
from prefold.hf_config import load_model_config


def write_safetensors(path: Path, tensors: dict[str, list[int]], dtype: str = "F32") -> None:
    """Zeros of the given shapes."""
    header, end = {}, 0
    for name, shape in tensors.items():
        size = 4
        for n in shape:
            size *= n
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    encoded = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(end))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_safetensors(tmp_path / "a.safetensors", {"x": [2, 3], "y": [4]})
    write_safetensors(tmp_path / "b.safetensors", {"z": [5]})
    write_index(tmp_path, {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"})
    return tmp_path


def write_index(folder: Path, weight_map: dict) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_shards_and_single_file(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    entries = check_checkpoint_files(folder)
    assert {name: (entry.file.name, entry.shape) for name, entry in entries.items()} == {
        "x": ("a.safetensors", (2, 3)),
        "y": ("a.safetensors", (4,)),
        "z": ("b.safetensors", (5,)),
    }
    single = tmp_path_factory.mktemp("single")
    write_safetensors(single / "model.safetensors", {"x": [1]})
    assert list(check_checkpoint_files(single)) == ["x"]


def test_missing_shard_is_named(folder: Path):
    (folder / "b.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks 1 of the 2 shards .*b\.safetensors"):
        check_checkpoint_files(folder)


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_shard_is_named(folder: Path, keep: int):
    path = folder / "a.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ValueError, match=r"a\.safetensors is truncated"):
        check_checkpoint_files(folder)


def test_corrupt_shards_are_named(folder: Path):
    path = folder / "a.safetensors"
    good = path.read_bytes()
    for bad in (good + b"x", good[:9] + b"\xff" + good[10:], (2).to_bytes(8, "little") + b"[]"):
        path.write_bytes(bad)
        with pytest.raises(ValueError, match=r"a\.safetensors is (corrupt|truncated)"):
            check_checkpoint_files(folder)


def test_index_that_lies(folder: Path):
    write_index(folder, {"x": "a.safetensors", "z": "a.safetensors"})
    with pytest.raises(ValueError, match=r"places 'z' in a\.safetensors"):
        check_checkpoint_files(folder)
    (folder / INDEX_FILE).write_text("{}")
    with pytest.raises(ValueError, match="no index"):
        check_checkpoint_files(folder)
    (folder / INDEX_FILE).unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        check_checkpoint_files(folder)


@pytest.mark.parametrize(("stored", "expected"), [("F32", "float32"), ("BF16", "bfloat16")])
def test_a_config_without_dtype_takes_that_of_the_weights(tmp_path: Path, stored: str, expected: str):
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "vocab_size": 8,
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", {"x": [2, 3]}, stored)
    assert load_model_config(tmp_path).dtype == expected
