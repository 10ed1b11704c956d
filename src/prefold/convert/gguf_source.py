"""Reading a GGUF file of Llama type (architectures `llama` and `qwen2`) and its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prefold.convert.hf_source import default_wavelengths
from prefold.convert.source import LlamaSpec
from prefold.gguf_tokenizer import build_tokenizer
from prefold.quantization.gguf_tensors import GGUFTensors


class GGUFSource:
    """One GGUF file. Quantised tensors are dequantised to float32 one at a time."""

    def __init__(self, path: Path):
        self.name = path.name
        self.path = path
        self._weights = GGUFTensors(path)
        self._file, self._tensors = self._weights.file, self._weights.tensors
        self._field = self._file.field
        self.architecture = self._file.architecture
        self.spec = self._read_spec()

    def tensor_names(self) -> set[str]:
        return set(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights.whole(name)

    def _read_spec(self) -> LlamaSpec:
        arch = self.architecture
        if arch not in ("llama", "qwen2"):
            raise ValueError(f"GGUF architecture {arch!r} cannot be converted (convertible: llama, qwen2)")
        if self._field(f"{arch}.expert_count", 0):
            raise ValueError(
                f"{self.name} is a mixture of experts ({self._field(f'{arch}.expert_count')} experts)"
            )

        def number(key: str, default: int | None = None) -> Any:
            return self._field(f"{arch}.{key}", default, required=default is None)

        hidden, heads = number("embedding_length"), number("attention.head_count")
        head_dim = number("attention.key_length", hidden // heads)
        max_position = number("context_length")
        window = number("attention.sliding_window", 0)
        if 0 < window < max_position:
            raise ValueError(
                f"sliding-window attention (window {window}) cannot be expressed in an MLA checkpoint"
            )
        return LlamaSpec(
            num_layers=number("block_count"),
            hidden_size=hidden,
            intermediate_size=number("feed_forward_length"),
            vocab_size=int(self._tensors["model.embed_tokens.weight"].shape[0]),
            num_heads=heads,
            num_kv_heads=number("attention.head_count_kv", heads),
            head_dim=head_dim,
            # GGUF keeps float32: print it in float32's shortest form to get back 1e-05, not 9.99999974e-06.
            rms_norm_eps=float(str(np.float32(number("attention.layer_norm_rms_epsilon")))),
            max_position_embeddings=max_position,
            wavelengths=self._wavelengths(head_dim),
            attention_factor=1.0,
            hidden_act="silu",
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qkv_bias="model.layers.0.self_attn.q_proj.bias" in self._tensors,
            o_bias="model.layers.0.self_attn.o_proj.bias" in self._tensors,
            token_ids=self._token_ids(),
        )

    def _wavelengths(self, head_dim: int) -> tuple[float, ...]:
        """[head_dim / 2]; Llama 3's scaling comes as the tensor rope_freqs, which multiplies wavelengths."""
        arch = self.architecture
        if self._field(f"{arch}.rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"{self.name}: rope covers only a part of head_dim {head_dim}")
        waves = torch.tensor(default_wavelengths(self._field(f"{arch}.rope.freq_base", 10000.0), head_dim))
        scaling = self._field(f"{arch}.rope.scaling.type", "none")
        if scaling == "linear":
            waves = waves * self._field(f"{arch}.rope.scaling.factor", required=True)
        elif scaling != "none":
            raise ValueError(
                f"{self.name}: rope scaling {scaling!r} cannot be read from GGUF (none, linear can)"
            )
        factors = self._weights.auxiliary("rope_freqs.weight")
        if factors is not None:
            waves = waves * factors
        return tuple(waves.tolist())

    def _token_ids(self) -> dict:
        keys = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
        return {key: self._field(f"tokenizer.ggml.{name}_token_id") for key, name in keys.items()}

    def save_extras(self, folder: Path) -> None:
        ids = {key: value for key, value in self.spec.token_ids.items() if value is not None}
        (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
        build_tokenizer(self._file).save_pretrained(folder)
