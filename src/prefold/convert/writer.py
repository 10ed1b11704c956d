"""Writing a sharded safetensors checkpoint without holding it in memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

SHARD_BYTES = 1 << 30


class ShardWriter:
    """Collects tensors into shards of about SHARD_BYTES and writes the index on exit."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[list[str]] = []

    def __enter__(self) -> ShardWriter:
        return self

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor; it is written when its shard is full."""
        if self._pending and self._pending_bytes + tensor.nbytes > SHARD_BYTES:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self.folder / f"shard-{len(self._shards)}"
        save_file(self._pending, path, metadata={"format": "pt"})
        path.chmod(0o644)  # safetensors leaves it readable by its owner only
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0

    def __exit__(self, exc_type, exc, traceback) -> None:
        if exc_type is not None:
            return
        if self._pending:
            self._flush()
        # The number of shards is part of their names, so they get them now.
        weight_map = {}
        for i, names in enumerate(self._shards):
            final = f"model-{i + 1:05d}-of-{len(self._shards):05d}.safetensors"
            (self.folder / f"shard-{i}").rename(self.folder / final)
            weight_map.update(dict.fromkeys(names, final))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self.folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
