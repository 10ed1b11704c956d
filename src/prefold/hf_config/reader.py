"""Values of a config.json, with defaults behind them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ALIASES = {
    "n_routed_experts": ("num_experts", "num_local_experts"),
    "num_experts": ("num_local_experts",),
    "num_nextn_predict_layers": ("num_mtp_layers",),
}


class Reader:
    """Values of config.json by key, with the architecture's defaults behind them."""

    def __init__(self, raw: dict, defaults: dict, path: Path) -> None:
        self.raw, self._defaults, self._path = raw, defaults, path

    def __call__(self, key: str) -> Any:
        for name in (key, *_ALIASES.get(key, ())):
            if name in self.raw:
                return self.raw[name]
        if key not in self._defaults:
            raise ValueError(f"{self._path} lacks {key!r}")
        return self._defaults[key]

    def size(self, key: str, minimum: int = 1) -> int:
        value = self(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
            raise ValueError(f"{self._path}: {key}={value!r} must be a whole number of at least {minimum}")
        return value


def read_json(path: Path) -> dict:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
