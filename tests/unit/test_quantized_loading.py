"""Whole models from quantised checkpoints: every parameter on every rank, and checkpoints that do not fit."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefold.checkpoint_files import INDEX_FILE, check_checkpoint_files
from prefold.config import ParallelConfig, RuntimeConfig
from prefold.distributed.mesh import Mesh
from prefold.hf_config import load_model_config
from prefold.layers.expert_parallel import ExpertParallel
from prefold.layers.weight import Weight
from prefold.loader import SafetensorsSource, load_weights
from prefold.models.registry import build_model
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.quantized import dequantized_checkpoint, quantize_checkpoint, quantized_formats
from prefold.testing.threads import ThreadGroup, run_mesh_threads, run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

V3 = "DeepseekV3ForCausalLM"
BLOCK = (20, 24)
"""Divides no size of the tiny checkpoint: last blocks are partial, and every TP part cuts blocks."""

LIKE_GLM = ("model.layers.0*", "*.self_attn*", "*.mlp.shared_experts*")
"""What the published NVFP4 checkpoints of GLM leave plain: all but routed experts."""

EXPERT = "model.layers.1.mlp.experts.3.up_proj"


class Folders:
    """A quantised checkpoint and its dequantised twin for each format, each made when first asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.plain = make_checkpoint(V3, root / "plain", num_hidden_layers=2)

    def pair(self, format: str, ignore: tuple[str, ...] = ()) -> tuple[Path, Path]:
        name = format + ("-part" if ignore else "")
        quantised, twin = self.root / name, self.root / f"{name}-twin"
        if not twin.exists():
            quantize_checkpoint(self.plain, quantised, format, BLOCK, ignore)
            dequantized_checkpoint(quantised, twin, format, BLOCK)
        return quantised, twin


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(tmp_path_factory.mktemp("quantised"))


def load(folder: Path, group: ThreadGroup | None = None, dtype: str = "float32", layers: range | None = None):
    model = build_model(
        load_model_config(folder, dtype), group or single_rank(), Workspace(), RuntimeConfig(), 64, layers
    )
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, folder)
    return dict(model.named_parameters())


def check_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert got.keys() == want.keys()
    for name, value in got.items():
        assert torch.equal(value, want[name]), name  # also false for NaN


CASES = [
    *((name, ()) for name in quantized_formats()),
    ("modelopt-nvfp4", LIKE_GLM),
    ("compressed-nvfp4", LIKE_GLM),
]


@pytest.mark.parametrize(("format", "ignore"), CASES)
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_parameter_on_every_rank(folders: Folders, format: str, ignore: tuple, tp: int):
    """At TP 8 a rank's part of an expert is 4 wide: within a group of NVFP4, two bytes."""
    quantised, twin = folders.pair(format, ignore)
    stored = {entry.dtype for entry in check_checkpoint_files(quantised).values()}
    assert stored & {"U8", "F8_E4M3"}
    got, want = (run_threads(tp, lambda group, f=folder: load(f, group)) for folder in (quantised, twin))
    for rank in range(tp):
        check_equal(got[rank], want[rank])


@pytest.mark.parametrize("format", quantized_formats())
def test_values_are_rounded_once_to_bfloat16(folders: Folders, format: str):
    quantised, twin = folders.pair(format)
    check_equal(load(quantised, dtype="bfloat16"), load(twin, dtype="bfloat16"))


@pytest.mark.parametrize("format", ["fp8", "compressed-nvfp4"])
def test_stages(folders: Folders, format: str):
    quantised, twin = folders.pair(format)
    for layers in (range(1), range(1, 2)):
        check_equal(load(quantised, layers=layers), load(twin, layers=layers))


def test_whole_experts_on_their_ranks(folders: Folders):
    """EP over TP 2: a rank reads its own experts, whole."""

    def rank_main(folder: Path, groups: dict[str, ThreadGroup]):
        workspace = Workspace()
        experts = ExpertParallel(groups, 8, workspace)
        config = load_model_config(folder, "float32")
        model = build_model(config, groups["tp"], workspace, RuntimeConfig(), 64, experts=experts)
        load_weights(model, folder)
        return dict(model.named_parameters())

    quantised, twin = folders.pair("modelopt-nvfp4", LIKE_GLM)
    mesh = Mesh.of(ParallelConfig(tensor_parallel_size=2, enable_expert_parallel=True))
    got, want = (
        run_mesh_threads(mesh, lambda rank, groups, f=folder: rank_main(f, groups))
        for folder in (quantised, twin)
    )
    name = "layers.1.mlp.experts.gate_up"
    assert got[0][name].shape == (4, 64, 64)
    assert not torch.equal(got[0][name], got[1][name])
    for rank in range(2):
        check_equal(got[rank], want[rank])


def test_quantised_layers_for_more_tokens_are_left_aside(folders: Folders, tmp_path: Path):
    """Multi-token prediction: one layer after the last, quantised as the others, with a head of its own."""
    quantised, twin = folders.pair("fp8")
    tensors = all_tensors(quantised)
    prefix = "model.layers.1."
    mtp = {
        n.replace(prefix, "model.layers.2."): v.clone() for n, v in tensors.items() if n.startswith(prefix)
    }
    mtp["model.layers.2.shared_head.head.weight"] = torch.ones(320, 64)
    check_equal(load(write(tmp_path, quantised, {"model.safetensors": tensors | mtp})), load(twin))
    files = {"model.safetensors": tensors | mtp}
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.layers\.2\."):
        load(write(tmp_path, quantised, files, num_nextn_predict_layers=0))


def test_dequantised_is_near_the_original(folders: Folders):
    """The twin is made from the same codes: this is what says that they mean the weights."""
    plain = load(folders.plain)
    for format in quantized_formats():
        bound = 0.2 if "nvfp4" in format else 0.07
        for name, value in load(folders.pair(format)[0]).items():
            scale = plain[name].abs().amax()
            assert ((value - plain[name]).abs() / scale).max() < bound, (format, name)


class Part:
    """A model of one matrix, of which it takes some rows and columns: an expert, a rank's slice."""

    def __init__(self, name: str, shape: tuple[int, int], slices: tuple[slice, ...]) -> None:
        self.out = torch.empty([s.stop - s.start for s in slices])
        self._weight = Weight(name, shape, ((slices, self.out),))

    def weights(self, names):
        yield self._weight

    def ignorable(self, name: str) -> bool:
        return True


@pytest.mark.parametrize("format", quantized_formats())
def test_any_slice_of_a_file(folders: Folders, format: str):
    quantised, twin = folders.pair(format)
    source = SafetensorsSource(quantised)
    want = load_file(twin / "model.safetensors")[f"{EXPERT}.weight"]
    assert want.shape == (32, 64)
    for start in range(0, 32, 3):
        for width in (1, 2, 5, 31, 32):
            rows = slice(start, min(start + width, 32))
            columns = slice(2 * start, min(2 * start + width, 64))
            model = Part(f"{EXPERT}.weight", (32, 64), (rows, columns))
            load_weights(model, source)
            assert torch.equal(model.out, want[rows, columns]), (rows, columns)


@pytest.mark.parametrize("format", quantized_formats())
def test_progress_counts_weights_not_their_scales(folders: Folders, format: str):
    quantised, _ = folders.pair(format)
    model = build_model(load_model_config(quantised), single_rank(), Workspace(), RuntimeConfig(), 64)
    seen = []
    load_weights(model, quantised, lambda done, total: seen.append((done, total)))
    total = len(check_checkpoint_files(folders.plain))
    assert seen == [(i + 1, total) for i in range(total)]


def test_scales_may_lie_in_other_files(folders: Folders, tmp_path: Path):
    quantised, twin = folders.pair("fp8")
    tensors = all_tensors(quantised)
    scales = {name: value for name, value in tensors.items() if name.endswith("_scale_inv")}
    rest = {name: value for name, value in tensors.items() if name not in scales}
    write(tmp_path, quantised, {"a.safetensors": scales, "b.safetensors": rest})
    check_equal(load(tmp_path), load(twin))


def all_tensors(folder: Path) -> dict[str, torch.Tensor]:
    contents: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        contents |= load_file(file)
    return contents


def write(folder: Path, like: Path, files: dict[str, dict[str, torch.Tensor]], **config) -> Path:
    for name, tensors in files.items():
        save_file(tensors, folder / name, metadata={"format": "pt"})
    weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))
    content = json.loads((like / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(content))
    if (like / "hf_quant_config.json").exists():
        (folder / "hf_quant_config.json").write_text((like / "hf_quant_config.json").read_text())
    return folder


# Checkpoints that do not fit

SCALE, SCALE_2, CODES = f"{EXPERT}.weight_scale", f"{EXPERT}.weight_scale_2", f"{EXPERT}.weight"
INV = f"{EXPERT}.weight_scale_inv"


@pytest.mark.parametrize(
    ("format", "changes", "message"),
    [
        ("fp8", {INV: None}, f"1 tensors that cannot be read: {CODES} lacks {INV}"),
        ("fp8", {INV: torch.ones(2, 4)}, rf"{INV} is \[2, 4\], needs \[2, 3\] \(in model\.safetensors\)"),
        ("fp8", {INV: torch.ones(2, 3, dtype=torch.uint8)}, f"{INV} is U8, not F32"),
        ("fp8", {CODES: None}, f"1 missing tensors: {CODES}; 1 unexpected tensors: {INV}"),
        ("fp8", {CODES: torch.ones(32, 64)}, f"1 unexpected tensors: {INV}"),
        (
            "fp8",
            {CODES: torch.ones(40, 64).to(torch.float8_e4m3fn)},
            rf"{CODES} is \[40, 64\], needs \[32, 64\]",
        ),
        (
            "fp8",
            {CODES: torch.ones(32, 64).to(torch.float8_e5m2)},
            f"{CODES} is F8_E5M2 .* needs weight as F8_E4M3",
        ),
        (
            "fp8",
            {"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)},
            "model.norm.weight is F8_E4M3",
        ),
        ("modelopt-nvfp4", {SCALE: None}, f"{CODES} lacks {SCALE}"),
        ("modelopt-nvfp4", {SCALE_2: None}, f"{CODES} lacks {SCALE_2}"),
        ("modelopt-nvfp4", {SCALE: None, SCALE_2: None}, f"{CODES} lacks {SCALE}; {CODES} lacks {SCALE_2}"),
        ("modelopt-nvfp4", {CODES: torch.ones(32, 30, dtype=torch.uint8)}, rf"{CODES} is \[32, 60\], needs"),
        (
            "modelopt-nvfp4",
            {"model.extra.weight_scale": torch.ones(1)},
            "unexpected tensors: model.extra.weight_sc",
        ),
        (
            "compressed-fp8-channel",
            {SCALE: torch.ones(64, 1)},
            rf"{SCALE} is \[64, 1\], needs \[32, 1\] or \[32\]",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit(
    folders: Folders, tmp_path: Path, format: str, changes: dict, message: str
):
    quantised, _ = folders.pair(format)
    tensors = {k: v for k, v in (all_tensors(quantised) | changes).items() if v is not None}
    with pytest.raises(ValueError, match=message):
        load(write(tmp_path, quantised, {"model.safetensors": tensors}))


def test_unquantised_config_with_quantised_tensors(folders: Folders, tmp_path: Path):
    quantised, _ = folders.pair("fp8")
    files = {"model.safetensors": all_tensors(quantised)}
    with pytest.raises(ValueError, match=r"is F8_E4M3, not F32.*, \.\.\."):
        load(write(tmp_path, quantised, files, quantization_config=None))


def test_stored_quantised_though_the_list_says_plain(folders: Folders, tmp_path: Path):
    quantised, _ = folders.pair("modelopt-fp8")
    config = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["*.experts.3.*"]}
    files = {"model.safetensors": all_tensors(quantised)}
    with pytest.raises(ValueError, match=r"experts\.3\.\w+\.weight is F8_E4M3, though modelopt FP8 says"):
        load(write(tmp_path, quantised, files, quantization_config=config))


def test_dtype_of_a_config_that_names_none(folders: Folders, tmp_path: Path):
    quantised, _ = folders.pair("modelopt-nvfp4")
    tensors = {k: v.bfloat16() if v.dtype == torch.float32 else v for k, v in all_tensors(quantised).items()}
    folder = write(tmp_path, quantised, {"model.safetensors": tensors}, dtype=None, torch_dtype=None)
    assert load_model_config(folder).dtype == "bfloat16"
