"""How the weight of one linear layer may be stored, in a form that needs no torch.

A value is code * scale. Codes are floats of 8 bits (E4M3: sign, 4 bits of exponent, 3 of mantissa; two of
the 256 codes are NaN and stay so) or of 4 bits (E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), and
codes of one block share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

SCALE_DTYPES = ("F32", "BF16", "F16", "F8_E4M3", "F8_E8M0")


@dataclass(frozen=True)
class Format:
    """How a weight [out, in] is stored, in tensors named after its module.

    Attributes:
        name: for messages.
        dtype: of the codes, as safetensors spells it: "F8_E4M3", or "U8" for two E2M1 codes per byte, of
            which the one with the lower column is in the lower four bits.
        values: name of the tensor of codes, after the module's.
        scales: likewise for the scales of the blocks.
        block: rows and columns that share a scale; None: all of them. Blocks at the end may be partial.
        global_scale: likewise for a float32 scale of the whole tensor, if there is one.
        divides: block scales are divided by the global scale; else they are multiplied by it.
    """

    name: str
    dtype: str
    values: str
    scales: str
    block: tuple[int | None, int | None]
    global_scale: str | None = None
    divides: bool = False

    def logical_shape(self, stored: tuple[int, ...]) -> tuple[int, ...]:
        """The weight's shape, from that of its codes."""
        return (*stored[:-1], stored[-1] * 2) if self.dtype == "U8" else stored

    def scale_shapes(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
        """What shapes the scales of a weight [out, in] may have; the first is the usual one.

        >>> fp8_blocks((128, 128)).scale_shapes((300, 128))
        ((3, 1),)
        """
        rows, columns = (1 if b is None else -(-n // b) for n, b in zip(shape, self.block, strict=True))
        if self.block == (None, None):
            return (), (1,), (1, 1)
        if self.block == (1, None):
            return (rows, 1), (rows,)
        return ((rows, columns),)


def fp8_blocks(block: tuple[int | None, int | None], scales: str = "weight_scale_inv") -> Format:
    """FP8 with a float scale per block; (1, None) is per channel, (None, None) per tensor."""
    kind = {(1, None): "per channel", (None, None): "per tensor"}.get(block, f"in blocks of {list(block)}")
    return Format(f"FP8 {kind}", "F8_E4M3", "weight", scales, block)


NVFP4_GROUP = 16
"""Columns that share a scale in NVFP4."""


def modelopt_nvfp4() -> Format:
    """As ModelOpt writes it: a value is code * (block scale * global scale)."""
    block = (1, NVFP4_GROUP)
    return Format("NVFP4 (ModelOpt)", "U8", "weight", "weight_scale", block, "weight_scale_2")


def compressed_nvfp4() -> Format:
    """As compressed-tensors writes it: a value is code * (block scale / global scale)."""
    block = (1, NVFP4_GROUP)
    return Format(
        "NVFP4 (compressed-tensors)",
        "U8",
        "weight_packed",
        "weight_scale",
        block,
        "weight_global_scale",
        True,
    )
