"""Where a checkpoint is and what it holds, read from headers of safetensors or GGUF files alone.

No torch and no tensor is read, so that the engine can refuse a damaged checkpoint before it starts
a worker. A safetensors file is eight bytes (little-endian length of the header), a JSON header
mapping names to dtype, shape and `data_offsets`, and the data.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from prefold.gguf_file import GGUFFile, part_paths

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor is: file, dtype as the file's format spells it ("BF16", "F32", "Q4_K", ...), shape."""

    file: Path
    dtype: str
    shape: tuple[int, ...]


def find_checkpoint(model: str | Path) -> Path:
    """What a user calls a model: a folder with a config.json, or a GGUF file, which may also be the only one
    in a folder. Of a GGUF file in parts it is the first. ValueError if there is none, or several."""
    path = Path(model).expanduser()
    if path.is_file():
        return part_paths(path)[0]
    if (path / "config.json").is_file():
        return path
    files = sorted({part_paths(file)[0] for file in path.glob("*.gguf")})
    if len(files) == 1:
        return files[0]
    if files:
        names = ", ".join(file.name for file in files)
        raise ValueError(f"{str(model)!r} holds {len(files)} GGUF files, name one of them: {names}")
    raise ValueError(
        f"{str(model)!r} is no checkpoint folder: {path / 'config.json'} does not exist, nor does a GGUF file"
    )


def check_checkpoint_files(checkpoint: str | Path) -> dict[str, TensorEntry]:
    """All tensors of a checkpoint by name; of a GGUF file by its own names.

    Raises ValueError naming what is wrong: no safetensors at all, a shard that the index names and
    the folder lacks, a truncated or corrupt shard, a tensor that the index places in a shard that
    does not hold it, a GGUF tensor of a type that cannot be read.
    """
    folder = Path(checkpoint)
    if folder.is_file():
        return _gguf_entries(folder)
    shards, weight_map = _shards(folder)
    absent = [shard.name for shard in shards if not shard.is_file()]
    if absent:
        raise ValueError(
            f"{folder} lacks {len(absent)} of the {len(shards)} shards that {INDEX_FILE} names: "
            f"{', '.join(absent[:5])}"
        )
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in entries:
                raise ValueError(f"tensor {name!r} is in both {entries[name].file.name} and {shard.name}")
            entries[name] = entry
    for name, shard_name in weight_map.items():
        if name not in entries or entries[name].file.name != shard_name:
            raise ValueError(f"{INDEX_FILE} places {name!r} in {shard_name}, which does not hold it")
    return entries


def _gguf_entries(path: Path) -> dict[str, TensorEntry]:
    file = GGUFFile(path)
    for tensor in file.tensors.values():
        if tensor.problem:
            raise ValueError(f"{path}: {tensor.problem}")
    return {
        tensor.name: TensorEntry(path, tensor.kind.name, tensor.shape) for tensor in file.tensors.values()
    }


def read_header(path: Path) -> dict[str, TensorEntry]:
    """Tensors of one safetensors file; ValueError naming the file if it is truncated or corrupt."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        if size < 8 or header_size > size - 8:
            raise ValueError(
                f"{path} is truncated or no safetensors file: it has {size} bytes, "
                f"its header should end at byte {8 + header_size}"
            )
        try:
            header = json.loads(file.read(header_size))
            header.pop("__metadata__", None)
            end = max((meta["data_offsets"][1] for meta in header.values()), default=0)
            entries = {
                name: TensorEntry(path, meta["dtype"], tuple(meta["shape"])) for name, meta in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ValueError(f"{path} is corrupt: its safetensors header cannot be read ({error})") from None
    if size != 8 + header_size + end:
        state = "truncated" if size < 8 + header_size + end else "corrupt"
        raise ValueError(
            f"{path} is {state}: it has {size} bytes, its header asks for {8 + header_size + end}"
        )
    return entries


def _shards(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a checkpoint in order, and the index's map from tensor to file name."""
    index = folder / INDEX_FILE
    if index.is_file():
        try:
            weight_map = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{index} is no index of safetensors shards ({error})") from None
        return [folder / name for name in sorted(set(weight_map.values()))], weight_map
    if (folder / SINGLE_FILE).is_file():
        return [folder / SINGLE_FILE], {}
    raise ValueError(f"{folder} holds no weights: neither {INDEX_FILE} nor {SINGLE_FILE} exists")
