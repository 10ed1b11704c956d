"""What a checkpoint's quantisation config is taken to mean, and what is refused."""

import json
import re
from pathlib import Path

import pytest

from prefold.checkpoint_files import TensorEntry
from prefold.quantization.catalog import StoredTensor, catalog
from prefold.quantization.scheme import Scheme, read_scheme

GLM_EXCLUDED = [
    "lm_head",
    "model.embed_tokens",
    "model.layers.0*",
    "model.layers.1.*",
    "model.layers.3.self_attn*",
]
NVFP4 = {"quant_algo": "NVFP4", "group_size": 16, "exclude_modules": GLM_EXCLUDED}
EXPERT = "model.layers.3.mlp.experts.7.up_proj"


def compressed(format: str = "float-quantized", targets=("Linear",), ignore=(), **weights) -> dict:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"} | weights
    groups = {"group_0": {"targets": list(targets), "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": groups,
        "ignore": list(ignore),
    }


@pytest.fixture
def read(tmp_path: Path):
    def read(config: dict | None = None, hf_quant_config: dict | None = None, **keys) -> Scheme | None:
        content = keys | ({} if config is None else {"quantization_config": config})
        (tmp_path / "config.json").write_text(json.dumps(content))
        if hf_quant_config is not None:
            (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": hf_quant_config}))
        return read_scheme(tmp_path)

    return read


def test_a_plain_checkpoint_has_none(read):
    assert read() is None


@pytest.mark.parametrize(
    ("config", "method", "values", "scales", "block"),
    [
        (
            {"quant_method": "fp8", "weight_block_size": [128, 64]},
            "fp8",
            "weight",
            "weight_scale_inv",
            (128, 64),
        ),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8", "weight", "weight_scale_inv", (None, None)),
        ({"quant_method": "modelopt"} | NVFP4, "modelopt NVFP4", "weight", "weight_scale", (1, 16)),
        (
            {"quant_method": "modelopt", "quant_algo": "FP8"},
            "modelopt FP8",
            "weight",
            "weight_scale",
            (None, None),
        ),
        (compressed(), "compressed-tensors", "weight", "weight_scale", (1, None)),
        (compressed(strategy="tensor"), "compressed-tensors", "weight", "weight_scale", (None, None)),
        (
            compressed("naive-quantized", strategy="block", block_structure=[32, 16]),
            "compressed-tensors",
            "weight",
            "weight_scale",
            (32, 16),
        ),
        (
            compressed("nvfp4-pack-quantized", num_bits=4, strategy="tensor_group", group_size=16),
            "compressed-tensors",
            "weight_packed",
            "weight_scale",
            (1, 16),
        ),
    ],
)
def test_supported(read, config: dict, method: str, values: str, scales: str, block: tuple):
    scheme = read(config)
    assert scheme.method == method
    format = scheme.format_of(EXPERT)
    assert (format.values, format.scales, format.block) == (values, scales, block)
    assert read(compression_config=config) == scheme


def test_hf_quant_config_counts_where_config_json_is_silent(read):
    scheme = read(None, NVFP4)
    assert scheme.method == "modelopt NVFP4"
    assert scheme == read({"quant_method": "modelopt"} | NVFP4)
    assert read({"quant_method": "fp8"}, NVFP4).method == "fp8"
    by_other_key = {"quant_method": "modelopt_fp4", "quant_algo": "NVFP4", "ignore": GLM_EXCLUDED}
    assert read(by_other_key) == scheme


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"quant_method": "gptq"},
            "quant_method 'gptq' are not supported; supported: fp8.*modelopt.*compressed",
        ),
        ({"bits": 4}, "quant_method None are not supported"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'.*supported: fp8"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size \[128\] must be two positive",
        ),
        (
            {"quant_method": "fp8", "weight_block_size": [0, 1]},
            r"weight_block_size \[0, 1\] must be two positive",
        ),
        ({"quant_method": "modelopt"}, "quant_algo None of quant_method modelopt"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo 'W4A8_AWQ'"),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo 'MIXED_PRECISION'"),
        ({"quant_method": "modelopt"} | NVFP4 | {"group_size": 32}, "NVFP4 with group_size 32"),
        (compressed("pack-quantized", num_bits=4, type="int"), "'pack-quantized'.*group_0 .4-bit int"),
        (compressed("int-quantized", type="int"), "'int-quantized'.*8-bit int"),
        (compressed(symmetric=False), "symmetric False"),
        (compressed(strategy="group", group_size=128), "strategy 'group', group_size 128"),
        (compressed("nvfp4-pack-quantized", num_bits=4, group_size=32), "group_size 32"),
        (compressed() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity 'sparse-24-bitmask'"),
        (compressed() | {"transform_config": {"a": 1}}, "transform_config"),
        (compressed(ignore=["re:("]), "error: missing .*supported"),
        (compressed(targets=["re:*"]), "error: nothing to repeat.*supported"),
        ({"quant_method": "compressed-tensors"}, "KeyError: 'config_groups'.*supported"),
    ],
)
def test_refusals_name_what_is_supported(read, config: dict, message: str):
    with pytest.raises(ValueError, match=message):
        read(config)


def test_damaged_files(read, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "hf_quant_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"hf_quant_config\.json is no JSON"):
        read_scheme(tmp_path)


@pytest.mark.parametrize(
    ("module", "excluded"),
    [
        ("lm_head", True),
        ("model.layers.0.mlp.gate_proj", True),
        ("model.layers.1.mlp.gate_proj", True),
        ("model.layers.10.mlp.gate_proj", False),
        ("model.layers.3.self_attn.o_proj", True),
        ("model.layers.3.self_attn.indexer.wk", True),
        (EXPERT, False),
        ("model.layers.3.mlp.gate", False),
    ],
)
def test_modelopt_patterns_are_globs(read, module: str, excluded: bool):
    assert (read(None, NVFP4).ignored_by(module) is not None) == excluded


def test_compressed_tensors_patterns(read):
    scheme = read(compressed(ignore=["lm_head", "re:.*self_attn", "re:up_proj"]))
    assert scheme.ignored_by("lm_head") == "lm_head"
    assert scheme.ignored_by("model.layers.3.self_attn.o_proj") == "re:.*self_attn"
    assert scheme.ignored_by("model.lm_head") is None
    assert scheme.ignored_by(EXPERT) is None  # regular expressions match from the start


@pytest.mark.parametrize("pattern", ["re:up|down", "re:up|down|", "re:.*proj$"])
def test_regular_expressions_with_alternatives(read, pattern: str):
    """As `re.match`, which compressed-tensors uses."""
    scheme = read(compressed(ignore=[pattern]))
    for module in ("up_proj", "down", "gate_proj", "x.up", "q_proj.a", ""):
        assert (scheme.ignored_by(module) is not None) == (re.match(pattern[3:], module) is not None), module


def test_a_name_wins_over_a_pattern_and_that_over_linear(read):
    config = compressed()
    weights = config["config_groups"]["group_0"]["weights"]
    for name, targets, strategy in (
        ("group_1", ["re:.*up_proj"], "tensor"),
        ("group_2", [EXPERT], "block"),
    ):
        changed = weights | {"strategy": strategy, "block_structure": [8, 8]}
        config["config_groups"][name] = {"targets": targets, "weights": changed}
    scheme = read(config)
    blocks = [scheme.format_of(m).block for m in (EXPERT, EXPERT.replace("7", "8"), "model.layers.0.q_proj")]
    assert blocks == [(8, 8), (None, None), (1, None)]
    only = read(compressed(targets=["re:.*up_proj"]))
    assert only.format_of("model.layers.0.q_proj") is None


def test_groups_may_have_formats_of_their_own(read):
    config = compressed("mixed-precision")
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    assert read(config).format_of("a").block == (1, None)


def test_fp8_modules_to_not_convert(read):
    scheme = read({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "model.layers.1", "gate"]})
    assert scheme.ignored_by("lm_head") == "lm_head"
    assert scheme.ignored_by("model.layers.1.mlp.up_proj") == "model.layers.1"
    assert scheme.ignored_by("model.layers.3.mlp.gate") == "gate"
    assert scheme.ignored_by("model.layers.10.mlp.up_proj") is None
    assert scheme.ignored_by("model.layers.2.mlp.gate_proj") is None


# The catalog


def entries(**tensors: tuple[str, tuple[int, ...]]) -> dict[str, TensorEntry]:
    return {f"m.{name}": TensorEntry(Path("f"), dtype, shape) for name, (dtype, shape) in tensors.items()}


def nvfp4(read) -> Scheme:
    return read({"quant_method": "modelopt", "quant_algo": "NVFP4"})


def test_codes_and_scales_are_one_tensor(read):
    found = catalog(
        entries(
            weight=("U8", (6, 24)),
            weight_scale=("F8_E4M3", (6, 3)),
            weight_scale_2=("F32", ()),
            input_scale=("F32", ()),
            k_scale=("F32", ()),
            bias=("BF16", (6,)),
        ),
        nvfp4(read),
    )
    assert found.keys() == {"m.weight", "m.bias"}
    weight = found["m.weight"]
    assert (weight.shape, weight.problem) == ((6, 48), None)
    assert weight.parts == ("m.weight", "m.weight_scale", "m.weight_scale_2")
    assert found["m.bias"] == StoredTensor("m.bias", (6,), ("m.bias",))


def test_packed_names_become_logical_ones(read):
    scheme = read(compressed("nvfp4-pack-quantized", num_bits=4, group_size=16))
    stored = {"weight_packed": ("U8", (6, 8)), "weight_scale": ("F8_E4M3", (6, 1))}
    found = catalog(entries(**stored, weight_global_scale=("F32", (1,))), scheme)
    assert found.keys() == {"m.weight"}
    assert found["m.weight"].shape == (6, 16)


GOOD = {"weight": ("U8", (6, 24)), "weight_scale": ("F8_E4M3", (6, 3)), "weight_scale_2": ("F32", ())}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_scale": None}, r"m\.weight lacks m\.weight_scale$"),
        ({"weight_scale_2": None}, r"m\.weight lacks m\.weight_scale_2$"),
        ({"weight_scale": ("F8_E4M3", (6, 4))}, r"m\.weight_scale is \[6, 4\], needs \[6, 3\]"),
        ({"weight_scale": ("U8", (6, 3))}, r"m\.weight_scale is U8, not F32"),
        ({"weight_scale_2": ("F32", (2,))}, r"m\.weight_scale_2 is \[2\], needs \[\] or \[1\]"),
        ({"weight": ("F8_E4M3", (6, 24))}, r"m\.weight is F8_E4M3 \[6, 24\], NVFP4 .* needs weight as U8"),
        ({"weight": ("U8", (2, 6, 24))}, r"m\.weight is U8 \[2, 6, 24\], .* of two dims"),
    ],
)
def test_problems_name_the_tensors(read, changes: dict, message: str):
    tensors = {k: v for k, v in (GOOD | changes).items() if v is not None}
    problem = catalog(entries(**tensors), nvfp4(read))["m.weight"].problem
    assert problem is not None
    assert re.search(message, problem), problem


def test_what_is_stored_quantised_must_follow_the_scheme(read):
    scheme = read({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["m*"]})
    assert "'m*' is not quantised" in str(catalog(entries(**GOOD), scheme)["m.weight"].problem)
    scheme = read(compressed(targets=["re:other"]))
    problem = catalog(entries(weight=("F8_E4M3", (6, 24)), weight_scale=("F32", (6, 1))), scheme)[
        "m.weight"
    ].problem
    assert "targets do not include m" in str(problem)


def test_what_is_stored_plain_is_plain(read):
    found = catalog(entries(weight=("BF16", (6, 24))), nvfp4(read))
    assert found["m.weight"] == StoredTensor("m.weight", (6, 24), ("m.weight",))


def test_foreign_dtypes_and_stacked_experts(read):
    for scheme in (None, nvfp4(read)):
        found = catalog(entries(gate_up_proj=("F8_E4M3", (4, 6, 24))), scheme)
        assert "m.gate_up_proj is F8_E4M3, not F32, BF16, F16" in str(found["m.gate_up_proj"].problem)
    assert "m.weight is F8_E4M3" in str(
        catalog(entries(weight=("F8_E4M3", (6, 24))), None)["m.weight"].problem
    )
