"""A GGUF file's metadata and table of tensors. No torch; tensors are mapped, not read.

The gguf package has a reader too, which takes seconds for a vocabulary of usual size; from there come the
types of tensors, here is the container: magic, version, counts, key-value pairs, table of tensors, data.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

VERSIONS = (2, 3)

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_MAX_DIMS = 4

TENSOR_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
"""GGUF name of a module -> Hugging Face name."""


@dataclass(frozen=True)
class GGUFTensor:
    """One tensor as stored.

    Attributes:
        shape: the logical one in row-major order, [out, in], as torch has it.
        kind: how values are stored.
        data: [out, bytes of a row] uint8, or [out, in] for F32 and F16; mapped from the file.
    """

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray

    @property
    def problem(self) -> str | None:
        """What keeps it from being read; None: nothing."""
        from gguf import GGML_QUANT_SIZES

        block, _ = GGML_QUANT_SIZES[self.kind]
        dims = len(self.shape)
        if dims > 2 or (dims < 2 and block > 1):
            return f"{self.name} has {dims} dims in type {self.kind.name}, which is not supported"
        if not _readable(self.kind):
            return (
                f"{self.name} has type {self.kind.name}, which is not supported; supported: "
                f"{', '.join(readable_types())}"
            )
        return None


class GGUFFile:
    """A GGUF file, or all parts of one that was split.

    Attributes:
        path: of the file, or of the first part.
        tensors: by their names in the file.
        architecture: what metadata keys of the model begin with.
    """

    def __init__(self, path: str | Path) -> None:
        """ValueError naming the file: no GGUF, of another version, truncated, or a part is missing."""
        paths = part_paths(Path(path))
        self.path = paths[0]
        parts = [_Part(part) for part in paths]
        self._first = parts[0]
        count = self.field("split.count", 1)
        if count != len(parts) and not (count == 0 and len(parts) == 1):
            raise ValueError(
                f"{self.path} is one of {count} parts: they must lie side by side under names that end in "
                f"-00001-of-{count:05}.gguf and so on"
            )
        self.tensors: dict[str, GGUFTensor] = {}
        for part in parts:
            for tensor in part.tensors():
                if tensor.name in self.tensors:
                    raise ValueError(f"{part.path} holds a second tensor {tensor.name!r}")
                self.tensors[tensor.name] = tensor
        total = self.field("split.tensors.count", len(self.tensors))
        if len(parts) > 1 and total != len(self.tensors):
            raise ValueError(f"the parts of {self.path} hold {len(self.tensors)} tensors, not {total}")
        self.architecture = str(self.field("general.architecture", required=True))

    def field(self, key: str, default: Any = None, required: bool = False) -> Any:
        """A value of the metadata; ValueError if a required one is missing."""
        found = self._first.field(key)
        if found is None and required:
            raise ValueError(f"{self.path.name}: GGUF metadata lacks {key!r}")
        return default if found is None else found

    def model_field(self, key: str, default: Any = None, required: bool = False) -> Any:
        """A value under the architecture's name, e.g. `block_count`."""
        return self.field(f"{self.architecture}.{key}", default, required)


def part_paths(path: Path) -> list[Path]:
    """The files of which `path` is one, in order; itself if it was not split. ValueError if one is absent."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    parts = [path.with_name(f"{match[1]}-{i:05}-of-{match[3]}.gguf") for i in range(1, count + 1)]
    absent = [part.name for part in parts if not part.is_file()]
    if absent or not parts:
        raise ValueError(f"{path} is one of {count} parts, of which {len(absent)} lack: {', '.join(absent)}")
    return parts


def readable_types() -> list[str]:
    """Names of the types that tensors may have."""
    from gguf import GGMLQuantizationType

    return [kind.name for kind in GGMLQuantizationType if _readable(kind)]


def _readable(kind: GGMLQuantizationType) -> bool:
    """Found by dequantising a block of zeros."""
    from gguf import GGML_QUANT_SIZES, quants

    try:
        quants.dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


class _Part:
    """One file. Metadata is found at once and decoded when asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ValueError(f"{path} cannot be read as GGUF: {error}") from None
        if self._bytes[:4] != b"GGUF":
            raise ValueError(f"{path} cannot be read as GGUF: it does not begin with those letters")
        try:
            self._read_head()
        except (struct.error, UnicodeDecodeError, KeyError, IndexError, OverflowError) as error:
            raise ValueError(f"{path} is truncated or corrupt: {error}") from None

    def _read_head(self) -> None:
        version, num_tensors, num_fields = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in VERSIONS:
            raise ValueError(
                f"{self.path} is GGUF of version {version} or of another byte order; supported: versions "
                f"{', '.join(map(str, VERSIONS))}, little-endian"
            )
        position, self._fields = 24, {}
        for _ in range(num_fields):
            key, position = self._string(position)
            (kind,) = struct.unpack_from("<I", self._bytes, position)
            self._fields[key] = kind, position + 4
            position = self._after(kind, position + 4)
        self._table: list[tuple[str, tuple[int, ...], int, int]] = []
        for _ in range(num_tensors):
            name, position = self._string(position)
            (dims,) = struct.unpack_from("<I", self._bytes, position)
            if dims > _MAX_DIMS:
                raise IndexError(f"tensor {name!r} has {dims} dims")
            shape = struct.unpack_from(f"<{dims}Q", self._bytes, position + 4)
            kind, offset = struct.unpack_from("<IQ", self._bytes, position + 4 + 8 * dims)
            position += 16 + 8 * dims
            self._table.append((name, shape[::-1], kind, offset))
        alignment = self.field("general.alignment") or 32
        self._data_start = -(-position // alignment) * alignment

    def field(self, key: str) -> Any:
        """A value of the metadata; None if there is none."""
        if key not in self._fields:
            return None
        return self._value(*self._fields[key])

    def tensors(self) -> Iterator[GGUFTensor]:
        """All tensors; ValueError if the file ends before the data of one, or its type is unknown."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

        plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}
        for name, shape, number, offset in self._table:
            try:
                kind = GGMLQuantizationType(number)
            except ValueError:
                raise ValueError(
                    f"{self.path}: {name} has type {number}, which is unknown; supported: "
                    f"{', '.join(readable_types())}"
                ) from None
            block, block_bytes = GGML_QUANT_SIZES[kind]
            columns = shape[-1] if shape else 1
            if columns % block:
                raise ValueError(f"{self.path}: {name} {list(shape)} is no multiple of {kind.name}'s {block}")
            row_bytes, start = columns // block * block_bytes, self._data_start + offset
            size = math.prod(shape[:-1]) * row_bytes
            if start + size > len(self._bytes):
                raise ValueError(
                    f"{self.path} is truncated: it has {len(self._bytes)} bytes, {name} ends at byte "
                    f"{start + size}"
                )
            data = self._mapped[start : start + size]
            stored = data.view(plain[kind]) if kind in plain else data
            yield GGUFTensor(name, shape, kind, stored.reshape(*shape[:-1], -1))

    @cached_property
    def _mapped(self) -> np.ndarray:
        return np.frombuffer(self._bytes, np.uint8)

    def _string(self, position: int) -> tuple[str, int]:
        """The string at `position`, and where it ends."""
        end = self._after(_STRING, position)
        return self._bytes[position + 8 : end].decode("utf-8"), end

    def _after(self, kind: int, position: int) -> int:
        """Where the value at `position` ends."""
        if kind == _STRING:
            (length,) = struct.unpack_from("<Q", self._bytes, position)
            end = position + 8 + length
        elif kind != _ARRAY:
            end = position + struct.calcsize("<" + _SCALARS[kind])
        else:
            element, count = struct.unpack_from("<IQ", self._bytes, position)
            end = position + 12
            if element in _SCALARS:
                end += count * struct.calcsize("<" + _SCALARS[element])
            else:
                for _ in range(count):
                    end = self._after(element, end)
        if end > len(self._bytes):
            raise IndexError(f"a value ends at byte {end} of {len(self._bytes)}")
        return end

    def _value(self, kind: int, position: int) -> Any:
        if kind == _STRING:
            return self._string(position)[0]
        if kind != _ARRAY:
            return struct.unpack_from("<" + _SCALARS[kind], self._bytes, position)[0]
        element, count = struct.unpack_from("<IQ", self._bytes, position)
        position += 12
        if element in _SCALARS:
            return list(struct.unpack_from(f"<{count}{_SCALARS[element]}", self._bytes, position))
        values = []
        for _ in range(count):
            if element == _STRING:
                value, position = self._string(position)
            else:
                value, position = self._value(element, position), self._after(element, position)
            values.append(value)
        return values


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor; an unknown one keeps its name.

    >>> hf_name("blk.3.attn_q.weight")
    'model.layers.3.self_attn.q_proj.weight'
    """
    match = re.fullmatch(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)", name)
    if match is None or match[2] not in TENSOR_NAMES:
        return name
    prefix = f"model.layers.{match[1]}." if match[1] else ""
    return f"{prefix}{TENSOR_NAMES[match[2]]}.{match[3]}"
