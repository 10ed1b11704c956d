"""What holds for all tests: the order of the files, hypothesis's settings, and less work for Python's
garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from prefold.testing.warm_python import warm_commands

# A busy machine says nothing about an example. `scripts/test` as a whole takes hypothesis's own "ci" instead:
# the same, with the same examples in every run.
settings.register_profile("prefold", deadline=None)
settings.load_profile("prefold")


@pytest.fixture(scope="session", autouse=True)
def _warm_commands() -> Iterator[None]:
    """`python -m prefold` and ranks start in 0.1 s instead of seconds. Servers, scripts (`python -c`) and
    torchrun start as users start them."""
    with warm_commands():
        yield


LONG_FILES = [
    "e2e/test_demo_model.py",
    "distributed/test_layouts.py",
    "distributed/test_layouts_dsa.py",
    "e2e/test_transformers.py",
    "distributed/test_layouts_gqa.py",
    "distributed/test_layouts_dcp.py",
    "server/test_live.py",
    "e2e/test_scheduling.py",
    "e2e/test_nodes.py",
    "e2e/test_failures.py",
    "distributed/test_context_parallel_dcp.py",
    "distributed/test_layouts_processes.py",
    "distributed/test_pipeline.py",
    "distributed/test_context_parallel.py",
    "e2e/test_cli.py",
    "e2e/test_lm_eval_requests.py",
    "distributed/test_layouts_dsa_shards.py",
    "distributed/test_group.py",
]
"""By measured time, the longest first. A file runs on one worker: a long one that comes last runs alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    place = {here / name: i for i, name in enumerate(LONG_FILES)}
    missing = [str(path) for path in place if not path.exists()]
    assert not missing, f"LONG_FILES names {missing}"
    items.sort(key=lambda item: place.get(item.path, len(place)))


def pytest_collection_finish() -> None:
    """torch and all tests are imported: a million objects that the collector need not walk again."""
    gc.collect()
    gc.freeze()
