"""Matrices that stay quantised: values bit for bit, products, and what the loader keeps of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from prefold.config import RuntimeConfig
from prefold.hf_config import load_model_config
from prefold.kernels import library, quantized_reference
from prefold.kernels.quantized import KINDS, QuantizedMatrix
from prefold.layers.bands import Bands, weight_bytes
from prefold.layers.linear import Env, multiply
from prefold.limits import EXPAND_FROM, EXPANDED_TILE
from prefold.loader import load_weights
from prefold.models.registry import build_model
from prefold.quantization.formats import compressed_nvfp4, fp8_blocks, modelopt_nvfp4
from prefold.quantization.gguf_tensors import GGUFMatrix
from prefold.quantization.tensors import BlockScaledTensor
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.quantized import quantize_checkpoint
from prefold.testing.threads import ThreadGroup, run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

GGUF_KINDS = KINDS[2:]
DTYPES = (torch.float32, torch.bfloat16)
F16_AT = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q4_k": [0, 2], "q6_k": [208]}
"""Bytes of a block where a float16 begins."""


def same_bits(got: torch.Tensor, want: torch.Tensor) -> bool:
    as_int = {2: torch.int16, 4: torch.int32}[got.element_size()]
    return got.dtype == want.dtype and torch.equal(got.view(as_int), want.view(as_int))


def random_bytes(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def random_scales(*shape: int, seed: int = 1) -> torch.Tensor:
    """Over many orders of magnitude; some powers of two, whose products lie halfway between bfloat16."""
    scales = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul(4).exp()
    flat = scales.view(-1)
    flat[::3] = flat[::3].log2().round().exp2()
    flat[1::5] = flat[1::5].bfloat16().float() * 1.0625
    return scales


def fp8_codes(*shape: int) -> torch.Tensor:
    codes = random_bytes(*shape)
    return codes.masked_fill_((codes & 127) == 127, 0x7E)


def gguf_codes(kind: str, rows: int, blocks: int) -> torch.Tensor:
    """[rows, bytes] of blocks with any codes; scales of all sizes, subnormal ones included."""
    codes = random_bytes(rows, blocks, GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][1])
    for number, at in enumerate(F16_AT[kind]):
        scales = torch.randn(rows, blocks, 1, generator=torch.Generator().manual_seed(number)).mul(4).exp()
        codes[:, :, at : at + 2] = (scales * 1e-5).half().view(torch.uint8)
    return codes.flatten(1)


def make(kind: str, rows: int, columns: int, dtype: torch.dtype, skip: tuple[int, int] = (0, 0)):
    if kind == "fp8":
        block = (5, 24)
        scales = random_scales(-(-(rows + skip[0]) // 5), -(-(columns + skip[1]) // 24))
        return QuantizedMatrix(
            kind, (rows, columns), dtype, fp8_codes(rows, columns), scales, None, block, skip
        )
    if kind == "nvfp4":
        twos = -(-columns // 32)
        groups = random_bytes(rows, 2 * twos, seed=3)
        return QuantizedMatrix(
            kind, (rows, columns), dtype, random_bytes(rows, 16 * twos), random_scales(256), groups
        )
    block = GGML_QUANT_SIZES[GGMLQuantizationType[kind.upper()]][0]
    return QuantizedMatrix(kind, (rows, columns), dtype, gguf_codes(kind, rows, columns // block))


def widths(kind: str) -> list[int]:
    """Of matrices: less than a block, pieces of a kernel and what is left over."""
    if kind == "fp8" or kind == "nvfp4":
        return [1, 7, 16, 31, 33, 100, 1024, 1023 + 64]
    return [256, 1280] if kind.endswith("k") else [32, 96, 1056]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_native_values_equal_the_reference_bit_for_bit(kind: str, dtype: torch.dtype):
    assert library.instruction_sets(), "the native library was not built: see setup.py"
    for columns in widths(kind):
        skip = (columns % 5, columns % 24) if kind == "fp8" else (0, 0)
        matrix = make(kind, 13, columns, dtype, skip)
        want = quantized_reference.values(matrix, slice(2, 13)).to(dtype)
        for out_dtype in DTYPES:
            for instruction_set in library.instruction_sets():
                out = torch.full((11, columns), torch.nan, dtype=out_dtype)
                matrix.expand(slice(2, 13), out, instruction_set)
                assert same_bits(out, want.to(out_dtype)), (columns, out_dtype, instruction_set)


@pytest.mark.parametrize("kind", KINDS)
def test_products_of_a_few_rows(kind: str):
    """Rows of x and of the result lie apart, with NaN between them; a row's result does not depend on how
    many there are."""
    for columns in widths(kind):
        matrix = make(kind, 9, columns, torch.bfloat16)
        values = quantized_reference.values(matrix, slice(0, 9)).bfloat16().double()
        whole = torch.full((20, columns + 3), torch.nan)
        x = whole[:, :columns].copy_(torch.randn(20, columns, generator=torch.Generator().manual_seed(0)))
        want, magnitude = x.double() @ values.T, x.double().abs() @ values.abs().T
        for instruction_set in library.instruction_sets():
            for rows in (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 20):
                out = torch.full((20, 12), torch.nan)
                matrix.linear(x[:rows], out[:rows, :9], instruction_set)
                assert out[:, 9:].isnan().all()
                assert out[rows:].isnan().all()
                error = (out[:rows, :9].double() - want[:rows]).abs()
                assert bool((error <= 40 * 2**-24 * magnitude[:rows]).all()), (columns, rows, instruction_set)
                alone = matrix.linear(x[:1], torch.empty(1, 9), instruction_set)
                assert torch.equal(out[: min(rows, 1), :9], alone[: min(rows, 1)])


def test_every_code_and_scale_rounds_as_torch_does():
    """All products of an E4M3 code, and of an E2M1 code, with scales whose products may be ties."""
    scales = torch.arange(1, 4097).float().reshape(1, -1) * 2.0**-9
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 127) != 127].repeat(4096)[None]
    matrix = QuantizedMatrix("fp8", (1, codes.shape[1]), torch.bfloat16, codes, scales, None, (1, 254))
    out = torch.empty(1, codes.shape[1], dtype=torch.bfloat16)
    want = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(254, 1)
    assert same_bits(matrix.expand(slice(0, 1), out), want.bfloat16())
    assert 0 < int(matrix.groups.sum()) < matrix.groups.numel()


# Parts of stored tensors


@pytest.mark.parametrize("block", [(5, 7), (1, None), (None, None), (128, 128), (3, 16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_part_of_an_fp8_tensor(block: tuple, dtype: torch.dtype):
    shape = (13, 40)
    grid = [1 if b is None else -(-n // b) for n, b in zip(shape, block)]
    codes = fp8_codes(*shape).view(torch.float8_e4m3fn)
    check_parts(
        BlockScaledTensor(fp8_blocks(block), shape, codes, random_scales(*grid)), dtype, kept=lambda c: True
    )


@pytest.mark.parametrize("name", ["modelopt", "compressed"])
@pytest.mark.parametrize("columns", [32, 48, 72])
def test_parts_of_an_nvfp4_tensor_that_begin_with_a_group(name: str, columns: int):
    format = modelopt_nvfp4() if name == "modelopt" else compressed_nvfp4()
    groups = fp8_codes(5, -(-columns // 16)).view(torch.float8_e4m3fn)
    tensor = BlockScaledTensor(
        format, (5, columns), random_bytes(5, columns // 2), groups, torch.tensor([0.37])
    )
    for dtype in DTYPES:
        check_parts(tensor, dtype, kept=lambda c: c % 16 == 0)


@pytest.mark.parametrize("kind", GGUF_KINDS)
def test_parts_of_a_gguf_tensor_of_whole_blocks(kind: str):
    class Stored:
        kind_ = GGMLQuantizationType[kind.upper()]

    block = GGML_QUANT_SIZES[Stored.kind_][0]
    stored = Stored()
    stored.kind, stored.shape = Stored.kind_, (6, 3 * block)
    stored.data = gguf_codes(kind, 6, 3).numpy()
    for order in (None, np.array([3, 1, 2, 0, 5, 4])):
        matrix = GGUFMatrix(stored, order)
        for c0, c1 in [(0, 3 * block), (block, 2 * block), (block, 3 * block), (2, block), (0, block + 1)]:
            rows, columns = slice(1, 6), slice(c0, c1)
            part = matrix.keep(rows, columns, torch.bfloat16)
            assert (part is not None) == (c0 % block == 0 and c1 % block == 0)
            if part is not None:
                want = torch.empty(5, c1 - c0, dtype=torch.bfloat16)
                matrix.dequantize(rows, columns, want)
                assert same_bits(part.expand(slice(0, 5), torch.empty_like(want)), want)


def check_parts(tensor: BlockScaledTensor, dtype: torch.dtype, kept) -> None:
    """Every slice of columns, with rows by turns, that `kept(its first column)` says is kept."""
    num_rows, num_columns = tensor.shape
    for c0 in range(num_columns):
        for c1 in range(c0 + 1, num_columns + 1):
            r0 = (c0 + c1) % num_rows
            rows, columns = slice(r0, num_rows), slice(c0, c1)
            part = tensor.keep(rows, columns, dtype)
            assert (part is not None) == kept(c0), (c0, c1)
            if part is not None:
                want = torch.empty(num_rows - r0, c1 - c0, dtype=dtype)
                tensor.dequantize(rows, columns, want)
                got = part.expand(slice(0, num_rows - r0), torch.empty_like(want))
                assert same_bits(got, want), (r0, c0, c1)


@pytest.mark.parametrize(
    ("code", "scale"), [(127, 1.0), (255, 1.0), (1, float("inf")), (1, float("nan")), (1, 2e36)]
)
def test_what_the_kernel_could_not_follow_is_expanded(code: int, scale: float):
    codes = torch.full((4, 4), code, dtype=torch.uint8).view(torch.float8_e4m3fn)
    tensor = BlockScaledTensor(fp8_blocks((2, 2)), (4, 4), codes, torch.full((2, 2), scale))
    assert tensor.keep(slice(0, 4), slice(0, 4), torch.float32) is None


# Layers and models


def env_of(weight: torch.dtype, compute: torch.dtype) -> Env:
    return Env(single_rank(), Workspace(poison=True), weight, compute, "cpu")


@pytest.mark.parametrize("compute", DTYPES)
@pytest.mark.parametrize("weight", DTYPES)
def test_a_weight_of_floats_and_codes_in_bands(weight: torch.dtype, compute: torch.dtype):
    columns = 512
    tall = EXPANDED_TILE // columns + 3  # more than one tile
    dense = torch.randn(7, columns, generator=torch.Generator().manual_seed(5)).to(weight)
    bands = [make("q8_0", tall, columns, weight), dense, make("q4_k", 5, columns, weight)]
    values = torch.cat(
        [
            band
            if isinstance(band, torch.Tensor)
            else quantized_reference.values(band, slice(0, band.shape[0]))
            for band in bands
        ]
    ).to(weight)
    for rows in (0, 1, EXPAND_FROM - 1, EXPAND_FROM, 100):
        x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)).to(compute)
        out = torch.full((rows, len(values)), torch.nan, dtype=compute)
        multiply(x, bands, out, env_of(weight, compute))
        want = x.double() @ values.double().T
        magnitude = x.double().abs() @ values.double().abs().T
        tolerance = 1e-5 if compute == weight == torch.float32 else 2e-2
        assert bool(((out.double() - want).abs() <= tolerance * magnitude + 1e-30).all()), rows


def test_released_bands_hold_what_was_put_and_nothing_else():
    parameter = torch.nn.Parameter(torch.randn(10, 32), requires_grad=False)
    bands = Bands(parameter, [4, 6])
    assert torch.equal(bands.take()[0], parameter)
    assert torch.equal(bands.take(1, 1)[0], parameter[4:])
    bands.release()
    bands.put(0, torch.ones(4, 32))
    bands.put(1, make("q8_0", 6, 32, torch.float32))
    assert parameter.numel() == 0
    assert [type(band) for band in bands.take()] == [torch.Tensor, QuantizedMatrix]
    assert bands.num_bytes == 4 * 32 * 4 + 6 * 34


FORMATS = ("fp8", "modelopt-nvfp4", "compressed-fp8-channel")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("DeepseekV3ForCausalLM", tmp_path_factory.mktemp("plain"), num_hidden_layers=2)


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_keeps_what_was_quantised(plain: Path, tmp_path: Path, format: str):
    """On each of two TP ranks: the values of expanded weights, in fewer bytes. Parts cut blocks."""
    folder = quantize_checkpoint(plain, tmp_path, format, (20, 24), ("*.experts.2.*", "*q_a_proj"))

    def load(group: ThreadGroup, weight_memory: str) -> tuple[dict[str, torch.Tensor], int, int]:
        config = load_model_config(folder, "bfloat16")
        model = build_model(config, group, Workspace(), RuntimeConfig(), 64)
        load_weights(model, folder, weight_memory=weight_memory)
        found, kept = {}, 0
        for name, module in model.named_modules():
            for key, bands in vars(module).items():
                if isinstance(bands, Bands):
                    kept += sum(isinstance(band, QuantizedMatrix) for band in bands.take())
                    found[f"{name}.{key}"] = torch.cat([as_floats(band) for band in bands.take()])
        return found, kept, weight_bytes(model)

    expanded = run_threads(2, lambda group: load(group, "expanded"))
    quantised = run_threads(2, lambda group: load(group, "quantized"))
    for (want, none, most), (got, kept, fewer) in zip(expanded, quantised):
        assert got.keys() == want.keys()
        assert all(same_bits(got[name], want[name]) for name in want)
        assert none == 0
        assert kept > 20
        assert fewer < 0.9 * most


def as_floats(band: torch.Tensor | QuantizedMatrix) -> torch.Tensor:
    if isinstance(band, torch.Tensor):
        return band
    return band.expand(slice(0, band.shape[0]), torch.empty(band.shape, dtype=torch.bfloat16))
