"""`prefold convert-mla`: a Llama-type checkpoint rewritten as an equal MLA checkpoint."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from prefold.cli.options import Flag, number


@dataclass(frozen=True)
class ConvertMLAArgs:
    """Rewrite a Llama-type checkpoint (Llama, Mistral, Qwen2) exactly as an MLA one (DeepSeek-V3 form).

    Attributes:
        src: Hugging Face folder with safetensors, or a GGUF file.
        dst: Folder to write; must not exist or be empty.
        dtype: Dtype of the weights written. float32 is exact; bfloat16 halves the size and rounds unless the
            source is bfloat16 too.
        overwrite: Replace the checkpoint that DST holds.
        qk_nope_head_dim: Size of the (all-zero) key part without position, for readers that need one.
    """

    src: Annotated[Positional[Path], arg(metavar="SRC")]
    dst: Annotated[Positional[Path], arg(metavar="DST")]
    dtype: Literal["float32", "bfloat16"] = "float32"
    overwrite: Flag = False
    qk_nope_head_dim: Annotated[int, number()] = 0


def run(args: ConvertMLAArgs) -> int:
    """ValueError if the source cannot be converted or the target is in use. Progress goes to stderr."""
    # torch and transformers take seconds to import: not before the arguments are known to be right.
    from prefold.convert import convert

    def progress(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    convert(args.src, args.dst, args.dtype, progress, args.overwrite, args.qk_nope_head_dim)
    return 0
