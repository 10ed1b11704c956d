"""The kernels' sources, by which a library is known to be theirs. setup.py runs this file by itself."""

from __future__ import annotations

import hashlib
from pathlib import Path


def digest(folder: Path) -> str:
    """Of all sources in the folder; empty if there are none, as where only the library is installed."""
    sources = sorted(path for kind in ("cpp", "h", "inl") for path in folder.glob(f"*.{kind}"))
    if not sources:
        return ""
    total = hashlib.sha256()
    for path in sources:
        content = path.read_bytes()
        total.update(f"{path.name} {len(content)}\n".encode() + content)
    return total.hexdigest()[:16]
