"""Prefold: an inference engine for long prompts.

>>> from prefold import LLM, SamplingParams                      # doctest: +SKIP
>>> with LLM("path/to/checkpoint", prefill_context_parallel_size=2) as llm:   # doctest: +SKIP
...     llm.generate("A very long prompt ...", SamplingParams(max_tokens=64))
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from prefold.engine.llm import LLM
    from prefold.engine.node import run_node
    from prefold.request import CompletionOutput, RequestOutput, SamplingParams

__all__ = ["LLM", "CompletionOutput", "RequestOutput", "SamplingParams", "run_node"]
__version__ = "0.1.0"

_HOME = {
    "LLM": "prefold.engine.llm",
    "CompletionOutput": "prefold.request",
    "RequestOutput": "prefold.request",
    "SamplingParams": "prefold.request",
    "run_node": "prefold.engine.node",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `import prefold` alone pulls in neither torch nor transformers."""
    if name not in _HOME:
        raise AttributeError(f"module 'prefold' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
