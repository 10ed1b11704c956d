"""Frequencies against transformers, rotation against complex multiplication in float64."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from prefold.config import RopeConfig
from prefold.hf_config import ROPE_TYPES
from prefold.layers.rotary import RotaryEmbedding, rope_frequencies
from prefold.workspace import Workspace

torch.set_num_threads(1)

DIM, MAX_POSITIONS = 16, 2048

CASES = [
    ("default", {}),
    ("linear", {"factor": 2.5}),
    ("dynamic", {"factor": 4.0}),
    ("proportional", {}),
    ("proportional", {"factor": 2.0, "partial_rotary_factor": 0.25}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 256}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 256, "attention_factor": 0.5}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 256, "mscale": 1.2, "mscale_all_dim": 0.6}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 256, "mscale": 1.2}),
    ("yarn", {"factor": 8.0, "original_max_position_embeddings": 256, "truncate": False, "beta_fast": 20}),
    ("yarn", {"factor": 1.0, "original_max_position_embeddings": 2048, "beta_slow": 2}),
    ("yarn", {"factor": 40.0, "original_max_position_embeddings": 8, "beta_fast": 1.0, "beta_slow": 1.0}),
    ("longrope", {"factor": 4.0, "original_max_position_embeddings": 512}),
    ("longrope", {"original_max_position_embeddings": 512}),
    ("longrope", {"original_max_position_embeddings": 2048}),
    ("longrope", {"attention_factor": 1.25, "original_max_position_embeddings": 512}),
    (
        "llama3",
        {
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
]


@pytest.mark.parametrize("theta", [10000.0, 5e6])
@pytest.mark.parametrize(("rope_type", "parameters"), CASES)
def test_frequencies_equal_transformers(rope_type: str, parameters: dict, theta: float):
    parameters = dict(parameters)
    if rope_type == "longrope":
        parameters["short_factor"] = [1 + 0.1 * i for i in range(DIM // 2)]
        parameters["long_factor"] = [1 + 0.7 * i for i in range(DIM // 2)]
    rope = RopeConfig(rope_type, theta, DIM, MAX_POSITIONS, True, parameters)
    reference = DeepseekV3Config(
        qk_rope_head_dim=DIM,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_type": rope_type, "rope_theta": theta, **parameters},
    )
    for length in (1, 512, 513, MAX_POSITIONS, 5000):
        inv_freq, factor = rope_frequencies(rope, length)
        if rope_type == "default":
            expected, expected_factor = DeepseekV3RotaryEmbedding.compute_default_rope_parameters(reference)
        else:
            expected, expected_factor = ROPE_INIT_FUNCTIONS[rope_type](reference, seq_len=length)
        torch.testing.assert_close(inv_freq, expected, rtol=1e-6, atol=0)
        assert factor == pytest.approx(expected_factor)


def test_every_supported_type_is_covered():
    assert {rope_type for rope_type, _ in CASES} == set(ROPE_TYPES)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("nope", [24, 7])
@pytest.mark.parametrize("num_tokens", [0, 1, 5, 300])
def test_rotation_in_place_of_a_strided_view(
    interleaved: bool, dtype: torch.dtype, nope: int, num_tokens: int
):
    heads = 3
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(num_tokens, heads, nope + DIM, generator=generator).to(dtype)
    positions = torch.randint(0, MAX_POSITIONS, (num_tokens,), generator=generator)
    rope = RopeConfig("yarn", 1e4, DIM, MAX_POSITIONS, interleaved, dict(CASES[5][1]))
    rotary = RotaryEmbedding(rope, MAX_POSITIONS, Workspace(poison=True))

    before = q.clone()
    rotary.rotate_(q[..., nope:], rotary.rows(positions))

    assert torch.equal(q[..., :nope], before[..., :nope])
    x = before[..., nope:].double()
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    inv_freq, factor = rope_frequencies(rope, MAX_POSITIONS)
    angles = (positions[:, None].float() * inv_freq).double()
    turns = torch.polar(torch.full_like(angles, factor), angles)[:, None]
    turned = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turns)
    expected = turned.flatten(-2) if interleaved else turned.transpose(-1, -2).flatten(-2)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(q[..., nope:].double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("interleaved", [True, False])
def test_a_position_rotates_alike_in_any_batch(interleaved: bool):
    """Bit for bit: ranks and chunks cut the same tokens differently."""
    rope = RopeConfig("default", 1e4, DIM, 512, interleaved, {})
    rotary = RotaryEmbedding(rope, 512, Workspace())
    q = torch.randn(300, 2, DIM, generator=torch.Generator().manual_seed(0))
    whole = q.clone()
    rotary.rotate_(whole, rotary.rows(torch.arange(300)))
    for start, end in ((0, 1), (1, 4), (13, 144), (299, 300)):
        part = q[start:end].clone()
        rotary.rotate_(part, rotary.rows(torch.arange(start, end)))
        assert torch.equal(part, whole[start:end])


def test_one_choice_of_factors_per_engine():
    """Long factors from max_model_len on, whatever the length of a sequence: cached keys stay valid."""
    parameters = {
        "short_factor": [1.0] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 64,
        "attention_factor": 1.0,
    }
    rope = RopeConfig("longrope", 1e4, DIM, 256, False, parameters)
    short, _ = rope_frequencies(rope, 64)
    long, _ = rope_frequencies(rope, 65)
    assert torch.equal(short, long * 4)
