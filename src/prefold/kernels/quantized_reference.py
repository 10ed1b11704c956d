"""Values of quantised matrices by torch and numpy: what the native code must equal bit for bit."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Matrix(Protocol):
    """What is needed of a `quantized.QuantizedMatrix`."""

    kind: str
    shape: tuple[int, int]
    codes: torch.Tensor
    scales: torch.Tensor | None
    groups: torch.Tensor | None
    block: tuple[int, int]
    skip: tuple[int, int]


def values(matrix: Matrix, rows: slice) -> torch.Tensor:
    """Values of `rows` [rows, columns] in float32."""
    by_kind = {"fp8": _fp8, "nvfp4": _nvfp4}
    return by_kind.get(matrix.kind, _gguf)(matrix, rows)


def _fp8(matrix: Matrix, rows: slice) -> torch.Tensor:
    assert matrix.scales is not None
    codes = matrix.codes[rows].view(torch.float8_e4m3fn).float()
    (height, width), (above, left) = matrix.block, matrix.skip
    row_blocks = (torch.arange(rows.start, rows.stop) + above) // height
    column_blocks = (torch.arange(matrix.shape[1]) + left) // width
    return codes.mul_(matrix.scales[row_blocks[:, None], column_blocks])


def _nvfp4(matrix: Matrix, rows: slice) -> torch.Tensor:
    assert matrix.scales is not None
    assert matrix.groups is not None
    codes = matrix.codes[rows].unflatten(1, (-1, 1, 16))
    codes = torch.cat((codes & 15, codes >> 4), dim=2)  # [rows, 32s, 2, 16]
    scales = matrix.scales[matrix.groups[rows].long()].view(*codes.shape[:3], 1)
    return (torch.tensor(E2M1)[codes.long()] * scales).flatten(1)[:, : matrix.shape[1]].contiguous()


def _gguf(matrix: Matrix, rows: slice) -> torch.Tensor:
    from gguf import GGMLQuantizationType, quants

    found = quants.dequantize(matrix.codes[rows].numpy(), GGMLQuantizationType[matrix.kind.upper()])
    return torch.from_numpy(np.array(found, dtype=np.float32))
