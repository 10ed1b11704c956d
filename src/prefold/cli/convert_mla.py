"""`prefold convert-mla`: a Llama-type checkpoint rewritten as an equal MLA checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class ConvertMLAArgs:
    """Rewrite a Llama-type checkpoint (Llama, Mistral, Qwen2) exactly as an MLA one (DeepSeek-V3 form)."""

    src: tyro.conf.Positional[Path]
    """Hugging Face folder with safetensors, or a GGUF file."""
    dst: tyro.conf.Positional[Path]
    """Folder to write; must not exist or be empty."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of the weights written. float32 is exact; bfloat16 halves the size and rounds unless the source
    is bfloat16 too."""
    overwrite: bool = False
    """Replace the checkpoint that DST holds."""
    qk_nope_head_dim: int = 0
    """Size of the (all-zero) key part without position, for readers that need one to exist."""


def run(args: ConvertMLAArgs) -> int:
    """Exit status: 0, or 1 after a message on stderr. Progress goes to stderr, too."""
    # torch and transformers take seconds to import: not before the arguments are known to be right.
    from prefold.convert import convert

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        convert(args.src, args.dst, args.dtype, progress, args.overwrite, args.qk_nope_head_dim)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
