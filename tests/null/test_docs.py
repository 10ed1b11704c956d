"""The examples of the documentation are true."""

from __future__ import annotations

import doctest
import json
import re
from pathlib import Path

import pytest

from prefold.cli.main import main

ROOT = Path(__file__).parents[2]
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("page", ["context_parallel.md", "choosing_a_layout.md"])
def test_examples_of_a_page(page: str):
    result = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


def test_every_page_that_has_examples_is_run():
    pages = {path.name for path in (ROOT / "docs").glob("*.md") if ">>> " in path.read_text(encoding="utf-8")}
    assert pages == {"context_parallel.md", "choosing_a_layout.md"}


def test_layouts_that_the_page_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    assert main(["layouts", str(tmp_path), "--world", "8", "--all"]) == 0
    rows = {" ".join(line.split()) for line in capsys.readouterr().out.splitlines()}
    page = (ROOT / "docs" / "choosing_a_layout.md").read_text(encoding="utf-8")
    shown = re.findall(r"^    (-.* GB)$", page, re.MULTILINE)
    assert len(shown) > 5
    for line in shown:
        assert " ".join(line.split()) in rows


def test_links_lead_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
