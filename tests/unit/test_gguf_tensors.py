"""GGUF tensors as a source of weights: every type, any slice, the order of rows, the loader."""

from itertools import cycle, product
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import quants

from prefold.layers.weight import Weight, shard, whole
from prefold.loader import load_weights
from prefold.quantization.gguf_tensors import GGUFTensors, row_order
from prefold.weight_sizes import GGUF_BLOCKS

torch.set_num_threads(1)

HEADS, KV_HEADS, ROWS, COLUMNS = 4, 2, 32, 512
KINDS = [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q4_K, Kind.Q6_K]
FLOATS = {Kind.F32: np.float32, Kind.F16: np.float16}
LAYER = "model.layers.0"


def raw(kind: Kind, rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Random blocks. Scales that are random bytes are, some of them, NaN or infinite."""
    rng = np.random.default_rng(seed)
    if kind in FLOATS:
        return rng.standard_normal((rows, columns)).astype(FLOATS[kind])
    block, size = gguf.GGML_QUANT_SIZES[kind]
    return rng.integers(0, 256, (rows, columns // block * size), dtype=np.uint8)


def write(path: Path, tensors: dict[str, tuple[np.ndarray, Kind]], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(path, arch)
    writer.add_uint32(f"{arch}.attention.head_count", HEADS)
    writer.add_uint32(f"{arch}.attention.head_count_kv", KV_HEADS)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=None if kind in FLOATS else kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's conversion does to q_proj and k_proj."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def test_row_order():
    rows = np.arange(48).reshape(16, 3)
    assert np.array_equal(permute(rows, 2)[row_order(16, 2)], rows)
    assert row_order(8, 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def same(got: torch.Tensor, want: np.ndarray) -> bool:
    return torch.equal(got.nan_to_num(7e30, 8e30, 9e30), torch.from_numpy(want).nan_to_num(7e30, 8e30, 9e30))


@pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("module", ["attn_q", "attn_k", "attn_v"])
def test_any_slice_of_every_type(tmp_path: Path, kind: Kind, module: str):
    """Bounds cut blocks of 32 and 256 columns; rows of queries and keys lie in another order."""
    data = raw(kind, ROWS, COLUMNS)
    file = GGUFTensors(write(tmp_path / "m.gguf", {f"blk.0.{module}.weight": (data, kind)}))
    want = quants.dequantize(data, kind)
    heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(module)
    if heads:
        order = np.argsort(permute(np.arange(ROWS), heads))
        want = want[order]
    matrix = file.matrix(f"{LAYER}.self_attn.{module[5]}_proj.weight")
    assert matrix.shape == (ROWS, COLUMNS)
    bounds = (0, 1, 16, 31, 32, 33, 255, 256, 257, 511, 512)
    rows = cycle([(0, 32), (0, 1), (5, 6), (7, 31), (9, 9), (16, 32), (31, 32)])
    for (start, stop), (top, bottom) in zip(product(bounds, bounds), rows):
        if start <= stop:
            out = torch.full((bottom - top, stop - start), 77.0)
            matrix.dequantize(slice(top, bottom), slice(start, stop), out)
            assert same(out, want[top:bottom, start:stop]), (top, bottom, start, stop)


def test_other_architectures_are_not_permuted(tmp_path: Path):
    data = raw(Kind.F32, ROWS, COLUMNS)
    file = GGUFTensors(write(tmp_path / "m.gguf", {"blk.0.attn_q.weight": (data, Kind.F32)}, arch="qwen2"))
    assert same(file.whole(f"{LAYER}.self_attn.q_proj.weight"), data)


class Rank:
    """A layer's part of rank 1 of 2, in bfloat16, as a model would ask for it."""

    def __init__(self) -> None:
        like = {"dtype": torch.bfloat16}
        self.q, self.o = torch.empty(ROWS // 2, COLUMNS, **like), torch.empty(ROWS, COLUMNS // 2, **like)
        self.bias, self.norm = torch.empty(ROWS // 2), torch.empty(COLUMNS)

    def weights(self, names) -> list[Weight]:
        return [
            shard(f"{LAYER}.self_attn.q_proj.weight", self.q, 0, 1, 2),
            shard(f"{LAYER}.self_attn.q_proj.bias", self.bias, 0, 1, 2),
            shard(f"{LAYER}.self_attn.o_proj.weight", self.o, 1, 1, 2),
            whole("model.norm.weight", self.norm),
        ]

    def ignorable(self, name: str) -> bool:
        return False


def tensors_of_rank() -> dict[str, tuple[np.ndarray, Kind]]:
    rng = np.random.default_rng(5)
    q, o = (rng.standard_normal((ROWS, COLUMNS)).astype(np.float32) for _ in range(2))
    return {
        "blk.0.attn_q.weight": (quants.quantize(q, Kind.Q4_0), Kind.Q4_0),
        "blk.0.attn_q.bias": (np.arange(ROWS, dtype=np.float32), Kind.F32),
        "blk.0.attn_output.weight": (quants.quantize(o, Kind.Q8_0), Kind.Q8_0),
        "output_norm.weight": (rng.standard_normal(COLUMNS).astype(np.float32), Kind.F32),
        "rope_freqs.weight": (np.ones(4, np.float32), Kind.F32),
    }


def test_the_loader_takes_it_as_a_source(tmp_path: Path):
    tensors = tensors_of_rank()
    file = GGUFTensors(write(tmp_path / "m.gguf", tensors))
    model, seen = Rank(), []
    load_weights(model, file, lambda *count: seen.append(count))
    assert seen == [(i, 4) for i in range(1, 5)]
    order = row_order(ROWS, HEADS)[ROWS // 2 :]
    q, o = (quants.dequantize(*tensors[f"blk.0.{name}.weight"]) for name in ("attn_q", "attn_output"))
    assert torch.equal(model.q, torch.from_numpy(q[order]).bfloat16())
    assert torch.equal(model.o, torch.from_numpy(o[:, COLUMNS // 2 :]).bfloat16())
    assert model.bias.tolist() == order.tolist()
    assert same(model.norm, tensors["output_norm.weight"][0])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (
            "blk.0.attn_q.weight",
            (raw(Kind.IQ4_NL, ROWS, COLUMNS)[:16], Kind.IQ4_NL),
            r"is \[16, 512\], needs \[32",
        ),
        (
            "blk.0.attn_q.weight",
            (np.zeros((ROWS, COLUMNS), np.int32), Kind.F32),
            "attn_q.weight has type I32",
        ),
        (
            "blk.0.ssm_in.weight",
            (np.zeros(3, np.float32), Kind.F32),
            r"unexpected tensors: blk\.0\.ssm_in\.weight",
        ),
        ("output_norm.weight", None, r"missing tensors: model\.norm\.weight"),
    ],
)
def test_what_does_not_fit(tmp_path: Path, name: str, tensor: tuple | None, message: str):
    tensors = {k: v for k, v in (tensors_of_rank() | {name: tensor}).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        load_weights(Rank(), GGUFTensors(write(tmp_path / "m.gguf", tensors)))


def test_no_gguf_file(tmp_path: Path):
    (tmp_path / "m.gguf").write_bytes(b"no" * 100)
    with pytest.raises(ValueError, match="cannot be read as GGUF"):
        GGUFTensors(tmp_path / "m.gguf")


def test_sizes_of_blocks_are_those_of_the_gguf_package():
    """weight_sizes must not import it: that takes a third of a second."""
    assert {name: gguf.GGML_QUANT_SIZES[Kind[name]] for name in GGUF_BLOCKS} == GGUF_BLOCKS
