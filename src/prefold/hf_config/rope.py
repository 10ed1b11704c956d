"""Rotary embedding as config.json describes it."""

from __future__ import annotations

from prefold.config import RopeConfig
from prefold.hf_config.reader import Reader

ROPE_TYPES = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "proportional": (),
}
"""Supported rope types and the keys they cannot do without."""


def read_rope(get: Reader, dim: int, dim_name: str, interleaved: bool, theta: float = 10_000.0) -> RopeConfig:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`, in one form.

    Args:
        dim: elements that are rotated, `dim_name` in messages.
        theta: where config.json has none.
    """
    raw = get.raw
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    theta = parameters.pop("rope_theta", None) or raw.get("rope_theta") or theta
    legacy_type = parameters.pop("type", "default")
    rope_type = parameters.pop("rope_type", legacy_type)
    if rope_type not in ROPE_TYPES:
        raise ValueError(f"rope type {rope_type!r} is not supported; supported: {', '.join(ROPE_TYPES)}")
    absent = [key for key in ROPE_TYPES[rope_type] if parameters.get(key) is None]
    if absent:
        raise ValueError(f"rope type {rope_type!r} needs {', '.join(absent)} in rope_parameters")
    max_positions = get.size("max_position_embeddings")
    if rope_type in ("yarn", "longrope", "llama3"):
        # A top-level value wins, as in transformers; without any, nothing was extended.
        inner = parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = (
            raw.get("original_max_position_embeddings") or inner or max_positions
        )
    partial = parameters.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None:
        if partial != 1.0 and rope_type != "proportional":
            raise ValueError(f"partial_rotary_factor={partial}: all of {dim_name}={dim} is rotated")
        parameters["partial_rotary_factor"] = partial
    for key in ("short_factor", "long_factor"):
        if rope_type == "longrope" and len(parameters[key]) != dim // 2:
            raise ValueError(f"{key} has {len(parameters[key])} entries, {dim_name}={dim} needs {dim // 2}")
    if dim % 2:
        raise ValueError(f"{dim_name}={dim} must be even")
    return RopeConfig(
        rope_type=rope_type,
        theta=float(theta),
        dim=dim,
        max_position_embeddings=max_positions,
        interleaved=interleaved,
        parameters=parameters,
    )
