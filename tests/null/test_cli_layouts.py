"""`prefold layouts`: what it lists, in which order, and how it looks."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from prefold.cli.layouts import best_of_meshes, preference, print_report
from prefold.cli.main import main, parse
from prefold.config import ParallelConfig
from prefold.distributed.layouts import explain_illegal, layout_options, legal_layouts
from prefold.hf_config import load_model_config

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
DENSE = DEEPSEEK_V3 | {"first_k_dense_replace": 61, "num_attention_heads": 12, "intermediate_size": 12}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK_V3))
    return str(tmp_path)


@pytest.fixture
def dense_checkpoint(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    return str(tmp_path)


def listed(out: str) -> list[str]:
    """The options of the rows of the tables."""
    return [m[1].rstrip() for m in re.finditer(r"^(-[-a-z0-9 ]+?)  +\d", out, re.MULTILINE)]


def test_the_layouts_of_eight_ranks(checkpoint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["layouts", checkpoint, "--world", "8"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = listed(out)
    # One per way to write 8 as a product of four sizes.
    assert len(rows) == len(set(rows)) == 20
    assert rows[:4] == [
        "-pcp 8 -dcp 8 -ep",
        "-tp 2 -pcp 4 -dcp 4 -ep",
        "-tp 4 -pcp 2 -dcp 2 -ep",
        "-tp 8 -ep",
    ]
    assert "To try first: -pcp 8 -dcp 8 -ep\n" in out
    # 61 layers of 576 elements of 2 bytes, over 8; 256 experts over 8.
    assert re.search(r"^-pcp 8 -dcp 8 -ep +8 +1 +8,784 +128 +32 +61 +[\d.]+ GB *$", out, re.MULTILINE)
    assert re.search(r"^-pp 8 +1 +1 +9,216 +128 +256 +7-8 +[\d.]+ GB *$", out, re.MULTILINE)
    assert re.search(
        r"-tp 8 -pcp 8\n.*= 64, but\s+there are 8 ranks\..*TP 1, PCP 8, EP:\s+-pcp 8\s+-ep", out, re.DOTALL
    )


def test_all_and_json_list_everything(checkpoint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["layouts", checkpoint, "--world", "4", "--all"]) == 0
    rows = listed(capsys.readouterr().out)
    legal = legal_layouts(load_model_config(checkpoint), 4)
    assert sorted(rows) == sorted(layout_options(layout.parallel) for layout in legal)
    assert main(["layouts", checkpoint, "--world", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [layout["options"] for layout in report["layouts"]] == rows
    assert {entry["options"] for entry in report["illegal"]} >= {"-tp 4 -pcp 4", "-ep", "-dcp 4"}
    first = report["layouts"][0]
    assert (first["options"], first["experts_per_rank"]) == ("-pcp 4 -dcp 4 -ep", [64, 64])
    assert (first["kv_shards"], first["kv_copies"], first["kv_bytes_per_token_per_rank"]) == (4, 1, 17568)
    assert first["layers_per_stage"] == [61]
    assert main(["layouts", checkpoint, "--world", "4", "--json", "--kv-cache-dtype", "fp8"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"][0]["kv_bytes_per_token_per_rank"] == 61 * 656 // 4
    assert first["why"].startswith("PCP: ")
    for layout in report["layouts"]:
        assert layout["dp"] * layout["pp"] * layout["pcp"] * layout["tp"] == 4
        assert layout["kv_shards"] * layout["kv_copies"] == layout["pcp"] * layout["tp"]
    words = ["generate", "m", "-", *first["options"].split()]
    parallel = ParallelConfig.of(parse(words).engine)
    assert parallel == ParallelConfig(1, 4, 4, enable_expert_parallel=True)


def test_no_experts_no_ep(dense_checkpoint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["layouts", dense_checkpoint, "--world", "8", "--all"]) == 0
    out = capsys.readouterr().out
    assert not [row for row in listed(out) if "-ep" in row or "-tp 8" in row]
    assert "n_routed_experts=0" in out
    assert "num_attention_heads=12 is not divisible by tensor_parallel_size=8" in out


@pytest.mark.parametrize("world", ["0", "-1"])
def test_a_world_that_cannot_be(world: str, checkpoint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["layouts", checkpoint, "--world", world]) == 2
    assert capsys.readouterr().err == f"error: world={world} must be at least 1\n"


def test_one_rank(checkpoint: str, capsys: pytest.CaptureFixture[str]):
    assert main(["layouts", checkpoint, "--world", "1"]) == 0
    assert listed(capsys.readouterr().out) == ["-tp 1"]


@pytest.mark.parametrize("width", [80, 100, 140])
@pytest.mark.parametrize("world", [1, 2, 8, 16])
def test_it_fits_the_screen(width: int, world: int, checkpoint: str):
    model = load_model_config(checkpoint)
    layouts = sorted(legal_layouts(model, world), key=preference)
    file = io.StringIO()
    console = Console(file=file, width=width, highlight=False)
    shown = best_of_meshes(layouts)
    print_report(console, model, world, shown, len(layouts), explain_illegal(model, world))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    # Long rows may go on in the next line, whole words at a time.
    words = text.split()
    for layout in shown:
        assert set(layout_options(layout.parallel).split()) <= set(words)


def test_it_answers_without_torch(checkpoint: str):
    script = (
        f"import sys\nfrom prefold.cli.main import main\nmain(['layouts', {checkpoint!r}, '--world', '8'])\n"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True).returncode == 0
