"""Bytes of a rank's weights where quantised ones stay as they are stored. No torch, no tensor is read.

What stays is what a layer multiplies with: projections and experts. Embeddings and the head, the halves of
`kv_b_proj`, the router and the indexer are floats in any case.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from prefold.checkpoint_files import TensorEntry
from prefold.config import DTYPES, ModelConfig
from prefold.flops import LayerParameters, layer_parameters
from prefold.gguf_file import hf_name
from prefold.quantization.catalog import catalog
from prefold.quantization.formats import NVFP4_GROUP, Format
from prefold.quantization.scheme import Scheme, read_scheme

KINDS = {
    "whole": ("q_a_proj", "kv_a_proj_with_mqa"),
    "split": ("q_proj", "q_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    "kv": ("k_proj", "v_proj"),
}
"""How modules are spread over ranks, see LayerParameters."""

MATRIX_NAME = re.compile(r"layers\.(\d+)\.(.*\.)?(\w+)\.weight$")

GGUF_BLOCKS = {"Q8_0": (32, 34), "Q4_0": (32, 18), "Q4_1": (32, 20), "Q4_K": (256, 144), "Q6_K": (256, 210)}
"""Columns and bytes of the blocks that stay in memory as they are."""

CUT_COLUMNS = ("o_proj", "down_proj")
"""Modules of which TP ranks have columns; of all others they have rows."""


NVFP4_TABLE = 1024
"""What each code of a scale stands for, in float32."""

FP8_SCALE = 5
"""A float32 scale and a byte that says how values are rounded."""


@dataclass(frozen=True)
class StoredMatrix:
    """A quantised weight [rows, columns] of one layer.

    Attributes:
        kind: one of `KINDS`, or "expert".
        module: the last part of its module's name.
        format: of a safetensors checkpoint; None: `block` columns in `block_bytes`, as in GGUF files.
    """

    kind: str
    module: str
    rows: int
    columns: int
    format: Format | None
    block: int = 1
    block_bytes: int = 0

    def saved(self, cut: int, itemsize: int) -> int:
        """Bytes by which it is smaller than floats of `itemsize` bytes, on all ranks that share it, cut in so
        many parts. 0 where the cut leaves parts that cannot stay quantised."""
        rows, columns = self.rows, self.columns
        if self.module in CUT_COLUMNS:
            columns //= cut
        else:
            rows //= cut
        held = self._held(rows, columns)
        return 0 if held is None else self.rows * self.columns * itemsize - cut * held

    def _held(self, rows: int, columns: int) -> int | None:
        """Bytes of a part."""
        format = self.format
        if format is None:
            return None if columns % self.block else rows * columns // self.block * self.block_bytes
        if format.dtype == "U8":
            twos = -(-columns // (2 * NVFP4_GROUP))
            return None if columns % NVFP4_GROUP else rows * twos * (NVFP4_GROUP + 2) + NVFP4_TABLE
        height, width = (n if b is None else b for n, b in zip((rows, columns), format.block))
        return rows * columns + -(-rows // height) * -(-columns // width) * FP8_SCALE


class WeightSizes:
    """Of a checkpoint whose quantised weights stay quantised.

    Args:
        entries: its tensors.
    """

    def __init__(self, model: ModelConfig, entries: Mapping[str, TensorEntry]) -> None:
        self._model = model
        # A layer has many experts and few shapes.
        self._matrices: dict[int, Counter[StoredMatrix]] = {i: Counter() for i in range(model.num_layers)}
        path = Path(model.path)
        for layer, matrix in _matrices(entries, read_scheme(path) if path.is_dir() else None):
            if layer in self._matrices:
                self._matrices[layer][matrix] += 1

    def layer(self, layer: int, tp: int, expert_parts: int) -> LayerParameters:
        """Bytes of a layer's matrices, by how they are spread, all ranks' together; of an expert the mean.

        Args:
            expert_parts: into how many parts TP cuts each routed expert.
        """
        model, itemsize = self._model, DTYPES[self._model.dtype]
        floats, saved = layer_parameters(model, layer), dict.fromkeys((*KINDS, "expert"), 0)
        for matrix, count in self._matrices[layer].items():
            cut = {"whole": 1, "expert": expert_parts}.get(matrix.kind, tp)
            saved[matrix.kind] += count * matrix.saved(cut, itemsize)
        num_experts = model.moe.num_experts if model.moe is not None else 1
        return LayerParameters(
            whole=floats.whole * itemsize - saved["whole"],
            split=floats.split * itemsize - saved["split"],
            kv=floats.kv * itemsize - saved["kv"],
            expert=floats.expert * itemsize - saved["expert"] // num_experts,
        )


def _matrices(
    entries: Mapping[str, TensorEntry], scheme: Scheme | None
) -> Iterator[tuple[int, StoredMatrix]]:
    """With their layers."""
    for name, entry in entries.items():
        match = MATRIX_NAME.search(hf_name(name)) if entry.dtype in GGUF_BLOCKS else None
        if match and (kind := _kind(match[3])):
            rows, columns = entry.shape
            yield int(match[1]), StoredMatrix(kind, match[3], rows, columns, None, *GGUF_BLOCKS[entry.dtype])
    for name, tensor in catalog(entries, scheme).items() if scheme else ():
        match = MATRIX_NAME.search(name)
        if not match or tensor.format is None or "indexer." in name or tensor.problem:
            continue
        kind = "expert" if ".mlp.experts." in name else _kind(match[3])
        if kind:
            rows, columns = tensor.shape
            yield int(match[1]), StoredMatrix(kind, match[3], rows, columns, tensor.format)


def _kind(module: str) -> str:
    """
    >>> _kind("o_proj"), _kind("kv_b_proj")
    ('split', '')
    """
    return next((kind for kind, modules in KINDS.items() if module in modules), "")
