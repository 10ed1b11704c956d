"""Which library of native kernels is taken, and what is said where there is none."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch

from prefold import LLM, SamplingParams
from prefold.kernels import dense, library
from prefold.kernels.sources import digest
from prefold.testing.checkpoints import make_checkpoint

FOLDER = Path(library.__file__).parent


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The library and its sources."""
    assert library.is_available(), library.problem()
    for kind in ("cpp", "h", "inl", "so"):
        for path in FOLDER.glob(f"*.{kind}"):
            shutil.copy(path, tmp_path)
    return tmp_path


def test_a_library_is_taken_with_its_sources_and_without_any(copy: Path) -> None:
    assert library._load_library(copy)[1] == ""
    for path in copy.iterdir():
        if path.suffix != ".so":
            path.unlink()
    assert digest(copy) == ""
    assert library._load_library(copy)[1] == ""


def test_an_older_library_is_not_taken(copy: Path) -> None:
    with (copy / "vectors.h").open("a") as file:
        file.write("\n")
    found, problem = library._load_library(copy)
    assert found is None
    assert "older than its sources" in problem
    assert "pip install -e ." in problem
    assert "two to three times" in problem


def test_a_file_moved_into_another_is_a_change(copy: Path) -> None:
    before = digest(copy)
    (copy / "vectors.h").rename(copy / "vectors2.h")
    assert digest(copy) != before


def test_a_missing_library_and_a_broken_one(tmp_path: Path) -> None:
    found, problem = library._load_library(tmp_path)
    assert found is None
    assert "was not built" in problem
    (tmp_path / "_native.so").write_text("not ELF")
    found, problem = library._load_library(tmp_path)
    assert found is None
    assert "cannot be loaded" in problem


def test_the_engine_says_which_kernels_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And gives the same tokens with two threads, and without the library."""
    caplog.set_level(logging.INFO, logger="prefold")
    checkpoint = str(make_checkpoint("LlamaForCausalLM", tmp_path))
    tokens = []
    for threads, problem in ((1, ""), (2, ""), (1, "The library is not there.")):
        if problem:
            monkeypatch.setattr(library, "_LIBRARY", None)
            monkeypatch.setattr(library, "_PROBLEM", problem)
        caplog.clear()
        llm = LLM(checkpoint, num_blocks=20, threads_per_rank=threads, compute_dtype="float32")
        tokens.append(
            llm.generate([[1, 2, 3, 4, 5]], SamplingParams(temperature=0.0, max_tokens=8))[0]
            .outputs[0]
            .token_ids
        )
        llm.shutdown()
        warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert warnings == [problem] * bool(problem)
        kernels = "torch" if problem else f"native, {library.instruction_sets()[-1]}"
        assert f"kernels: {kernels}" in caplog.text
    assert tokens[0] == tokens[1] == tokens[2]


@pytest.mark.parametrize(
    ("has_tiles", "has_fast_pairs", "expected"),
    [
        (True, True, "native, avx2; attention by amx_bf16"),
        (False, True, "native, avx2; attention by avx512_bf16"),
        (False, False, "native, avx2"),
    ],
)
def test_kernels_are_named(
    has_tiles: bool, has_fast_pairs: bool, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "is_available", lambda: True)
    monkeypatch.setattr(library, "instruction_sets", lambda: ("portable", "avx2"))
    monkeypatch.setattr(library, "has_tiles", lambda: has_tiles)
    monkeypatch.setattr(library, "has_fast_pairs", lambda: has_fast_pairs)
    assert dense.describe(torch.bfloat16) == expected
    assert dense.describe(torch.float32) == "native, avx2"
    monkeypatch.setattr(library, "is_available", lambda: False)
    assert dense.describe(torch.bfloat16) == "torch"
