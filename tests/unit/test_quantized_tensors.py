"""Dequantised values, bit for bit: against numpy, compressed-tensors' own code and transformers'."""

from itertools import combinations, combinations_with_replacement, cycle

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from prefold.quantization.formats import Format, compressed_nvfp4, fp8_blocks, modelopt_nvfp4
from prefold.quantization.tensors import (
    TILE,
    BlockScaledTensor,
    e2m1_pairs,
    e2m1_to_float32,
    e4m3_to_float32,
)
from prefold.testing.quantized import e2m1_table, e4m3_table, quantized_formats

torch.set_num_threads(1)

E4M3 = torch.float8_e4m3fn
NAN_CODES = (127, 255)


def same_bits(got: torch.Tensor, want: torch.Tensor | np.ndarray) -> bool:
    """Equal bits; any NaN equals any other."""
    want = torch.as_tensor(want)
    assert got.dtype == want.dtype
    as_int = {2: torch.int16, 4: torch.int32}[got.element_size()]
    both_nan = got.isnan() & want.isnan()
    return bool((both_nan | (got.contiguous().view(as_int) == want.contiguous().view(as_int))).all())


def random_codes(*shape: int, seed: int = 0, nan: bool = False) -> torch.Tensor:
    """Bytes, all 256 of them if there is room; without `nan` the E4M3 codes of NaN are left out."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    flat = codes.view(-1)
    flat[: min(256, len(flat))] = torch.randperm(256, generator=generator).to(torch.uint8)[: len(flat)]
    return codes if nan else codes.masked_fill_((codes & 127) == 127, 0x7E)


def random_scales(*shape: int, seed: int = 1) -> torch.Tensor:
    """Over many orders of magnitude, a few of them extreme."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.randn(shape, generator=generator).mul(4).exp()
    flat = scales.view(-1)
    extremes = torch.tensor([0.0, 1.0, 1e-38, 3e35])
    flat[: len(extremes)] = extremes[: len(flat)]
    return scales


def test_all_e4m3_codes():
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3)
    got = e4m3_to_float32(codes)
    assert same_bits(got, e4m3_table())
    assert same_bits(got, codes.float())
    assert got.isnan().nonzero().flatten().tolist() == list(NAN_CODES)
    assert e4m3_to_float32(codes.view(16, 16)[3:9, 2:7]).equal(codes.view(16, 16)[3:9, 2:7].float())
    assert e4m3_to_float32(codes[:0]).shape == (0,)


def test_all_pairs_of_e2m1_codes():
    packed = torch.arange(256, dtype=torch.uint8).view(16, 16)
    got = e2m1_to_float32(packed, e2m1_pairs())
    table = e2m1_table()
    want = np.stack((table[packed & 15], table[packed >> 4]), axis=-1).reshape(16, 32)
    assert same_bits(got, want)
    assert table.tolist()[:8] == [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def oracle_fp8(codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    name = "weight_scale_inv"
    arrays = {"weight": e4m3_table()[codes.numpy()], name: scales.numpy()}
    unpack = quantized_formats()["fp8"].unpack
    with np.errstate(all="ignore"):
        return unpack(arrays, block)


BLOCKS = [(1, None), (None, None), (8, 8), (5, 7), (1, 4), (3, 1), (13, 11), (128, 128), (2, 21), (4, None)]


def shape_of_scales(format: Format, shape: tuple[int, int]) -> tuple[int, int]:
    rows, columns = (1 if b is None else -(-n // b) for n, b in zip(shape, format.block))
    return rows, columns


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(13, 21), (16, 16), (1, 1), (300, 2)])
def test_fp8_every_slice(block: tuple, shape: tuple[int, int]):
    """Slices that begin and end everywhere in blocks, of which the last are partial."""
    format = fp8_blocks(block)
    codes = random_codes(*shape, nan=True)
    scales = random_scales(*shape_of_scales(format, shape))
    want = torch.from_numpy(oracle_fp8(codes, scales, tuple(b or 0 for b in block)))
    check_slices(BlockScaledTensor(format, shape, codes.view(E4M3), scales), want)


def check_slices(tensor: BlockScaledTensor, want: torch.Tensor) -> None:
    """All slices of rows and all slices of columns, out in float32 and bfloat16 by turns."""
    num_rows, num_columns = want.shape
    assert tensor.shape == want.shape
    rows = list(combinations(range(0, num_rows + 1, 1 if num_rows < 50 else 37), 2))
    columns = list(combinations_with_replacement(range(num_columns + 1), 2))
    slices = [
        *zip(rows, cycle([(0, num_columns), (num_columns // 2, num_columns)])),
        *zip(cycle(rows), columns),
    ]
    for number, ((r0, r1), (c0, c1)) in enumerate(slices):
        dtype = (torch.float32, torch.bfloat16)[number % 3 == 0]
        out = torch.full((r1 - r0, c1 - c0), 77.0, dtype=dtype)
        tensor.dequantize(slice(r0, r1), slice(c0, c1), out)
        assert same_bits(out, want[r0:r1, c0:c1].to(dtype)), (r0, r1, c0, c1)


def nvfp4_parts(shape: tuple[int, int], seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    codes = random_codes(shape[0], shape[1] // 2, seed=seed, nan=True)
    scales = random_codes(shape[0], -(-shape[1] // 16), seed=seed + 1)
    return codes, scales.view(E4M3)


@pytest.mark.parametrize(
    ("shape", "global_scale"), [((5, 48), 0.0123), ((16, 32), 3.7e4), ((3, 40), -2.5), ((1, 2), 1.0)]
)
@pytest.mark.parametrize("name", ["modelopt-nvfp4", "compressed-nvfp4"])
def test_nvfp4_every_slice(name: str, shape: tuple[int, int], global_scale: float):
    """Odd bounds cut bytes; others cut groups of 16, of which the last may be partial."""
    format = modelopt_nvfp4() if name == "modelopt-nvfp4" else compressed_nvfp4()
    codes, scales = nvfp4_parts(shape)
    scale_2 = torch.tensor([global_scale])
    assert format.global_scale is not None
    arrays = {
        format.values: codes.numpy(),
        "weight_scale": e4m3_table()[scales.view(torch.uint8).numpy()],
        format.global_scale: scale_2.numpy(),
    }
    want = torch.from_numpy(quantized_formats()[name].unpack(arrays, (0, 0)))
    check_slices(BlockScaledTensor(format, shape, codes, scales, scale_2), want)


def test_tiles_do_not_show():
    """More rows than a tile has, also from the middle of a block, into a strided destination."""
    shape = (700, 1111)
    codes, scales = random_codes(*shape), random_scales(-(-700 // 128), -(-1111 // 100))
    tensor = BlockScaledTensor(fp8_blocks((128, 100)), shape, codes.view(E4M3), scales)
    want = torch.from_numpy(oracle_fp8(codes, scales, (128, 100)))
    out = torch.zeros(690, 2222)[:, ::2]
    tensor.dequantize(slice(10, 700), slice(0, 1111), out)
    assert same_bits(out, want[10:])


class Recorded:
    """A tensor that notes how much of it was asked for at a time."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.sizes = tensor, []

    def __getitem__(self, index) -> torch.Tensor:
        part = self.tensor[index]
        self.sizes.append(part.numel())
        return part


@pytest.mark.parametrize("format", [fp8_blocks((128, 128)), fp8_blocks((None, None)), modelopt_nvfp4()])
def test_no_more_than_a_tile_is_read_at_a_time(format: Format):
    shape = (3 * TILE // 1024, 1024)
    codes = Recorded(torch.zeros(shape[0], shape[1] if format.dtype != "U8" else 512, dtype=torch.uint8))
    if format.dtype != "U8":
        codes.tensor = codes.tensor.view(E4M3)
    scales = Recorded(torch.ones(shape_of_scales(format, shape)))
    global_scale = torch.ones(1) if format.global_scale else None
    tensor = BlockScaledTensor(format, shape, codes, scales, global_scale)
    tensor.dequantize(slice(0, shape[0]), slice(0, 1024), torch.empty(shape))
    assert len(codes.sizes) == 3
    assert sum(codes.sizes) == codes.tensor.numel()
    assert max(codes.sizes) <= TILE
    tensor.dequantize(slice(5, 6), slice(100, 102), torch.empty(1, 2))
    assert codes.sizes[-1] <= 2
    assert scales.sizes[-1] == 1


def test_scales_of_powers_of_two_in_e8m0():
    scales = torch.tensor([[0.25, 2.0**-20], [1.0, 8.0]])
    codes = random_codes(32, 32).view(E4M3)
    tensors = [
        BlockScaledTensor(fp8_blocks((16, 16)), (32, 32), codes, s)
        for s in (scales, scales.to(torch.float8_e8m0fnu), scales.bfloat16())
    ]
    outs = [torch.empty(32, 32) for _ in tensors]
    for tensor, out in zip(tensors, outs):
        tensor.dequantize(slice(0, 32), slice(0, 32), out)
    assert same_bits(outs[0], outs[1])
    assert same_bits(outs[0], outs[2])


# Other people's code


def whole(tensor: BlockScaledTensor, dtype: torch.dtype) -> torch.Tensor:
    out = torch.empty(tensor.shape, dtype=dtype)
    tensor.dequantize(slice(0, out.shape[0]), slice(0, out.shape[1]), out)
    return out


def scheme(**weights) -> QuantizationScheme:
    args = QuantizationArgs(type="float", symmetric=True, **weights)
    activations = QuantizationArgs(type="float", num_bits=8, strategy="token", dynamic=True)
    return QuantizationScheme(targets=["Linear"], weights=args, input_activations=activations)


@pytest.mark.parametrize("global_scale", [1.0, 77.7, 2688.0, 1e-3])
def test_nvfp4_equals_compressed_tensors(global_scale: float):
    """Which multiplies in float32 and rounds to bfloat16."""
    codes, scales = nvfp4_parts((64, 96))
    scale_2 = torch.tensor([global_scale])
    state = {"weight_packed": codes, "weight_scale": scales, "weight_global_scale": scale_2}
    rules = scheme(num_bits=4, strategy="tensor_group", group_size=16)
    want = NVFP4PackedCompressor.decompress(state, rules)["weight"]
    got = whole(BlockScaledTensor(compressed_nvfp4(), (64, 96), codes, scales, scale_2), torch.bfloat16)
    assert same_bits(got, want)


@pytest.mark.parametrize(
    ("block", "shape", "rules"),
    [
        ((1, None), (48, 1), {"strategy": "channel"}),
        ((None, None), (1,), {"strategy": "tensor"}),
        ((16, 24), (3, 3), {"strategy": "block", "block_structure": [16, 24]}),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_equals_compressed_tensors(block: tuple, shape: tuple, rules: dict, dtype: torch.dtype):
    """Which computes in the scales' dtype; a last block is partial here (64 columns in blocks of 24)."""
    codes, scales = random_codes(48, 64).view(E4M3), random_scales(*shape).to(dtype)
    state = {"weight": codes, "weight_scale": scales}
    want = FloatQuantizationCompressor.decompress(state, scheme(num_bits=8, **rules))["weight"]
    scales = scales.reshape(-1, 1) if scales.dim() == 1 else scales
    got = whole(BlockScaledTensor(fp8_blocks(block), (48, 64), codes, scales), dtype)
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_equal_transformers(dtype: torch.dtype):
    codes, scales = random_codes(256, 384).view(E4M3), random_scales(2, 3)
    want = Fp8Dequantize(None)._dequantize_one(codes, scales, output_dtype=dtype)
    got = whole(BlockScaledTensor(fp8_blocks((128, 128)), (256, 384), codes, scales), dtype)
    assert same_bits(got, want)


@pytest.mark.parametrize("name", ["compressed-nvfp4", "compressed-fp8-channel", "compressed-fp8-block"])
def test_compressed_tensors_reads_what_we_write(name: str):
    """The tool that makes test checkpoints writes the format, not merely what our own reader takes."""
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(3))
    weight[0, :16] = 0
    block = (16, 32)
    packed = quantized_formats()[name].pack(weight, block)
    if name == "compressed-nvfp4":
        rules = scheme(num_bits=4, strategy="tensor_group", group_size=16)
        back = NVFP4PackedCompressor.decompress(packed, rules)["weight"]
    else:
        kind = name.rpartition("-")[2]
        rules = scheme(
            num_bits=8, strategy=kind, **({"block_structure": list(block)} if kind == "block" else {})
        )
        back = FloatQuantizationCompressor.decompress(packed, rules)["weight"]
    error = (back.float() - weight).abs() / weight.abs().amax()
    assert error.max() < (0.2 if name == "compressed-nvfp4" else 0.04)
    assert back[0, :16].eq(0).all()
