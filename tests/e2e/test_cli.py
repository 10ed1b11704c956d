"""The `prefold` command on tiny checkpoints: what it prints, where, and how it ends."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.cells import cell_len

from prefold import SamplingParams
from prefold.benchmark.side import Side, SideError
from prefold.cli.main import main
from prefold.tokenizer import TOKENIZER_FILES, load_tokenizer

PROMPT = "The ranks of one prompt are the parts of another, and the other way round. " * 3
PROMPT_IDS = [(7 * i * i + 3 * i) % 320 for i in range(150)]
FEW = ["--max-tokens", "9", "--ignore-eos", "--threads-per-rank", "1"]


@pytest.fixture
def ids_file(tmp_path: Path) -> str:
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(PROMPT_IDS))
    return str(file)


@pytest.fixture
def model(tiny: Any) -> str:
    return str(tiny.folder("small"))


def expected_tokens(tiny: Any, prompt: list[int], max_tokens: int = 9) -> list[int]:
    with tiny.llm() as llm:
        params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        return llm.generate(prompt, params)[0].outputs[0].token_ids


def run_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Run in this process; stdout must be one JSON object and nothing else."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 0, err
    assert out.count("\n") == 1
    return json.loads(out)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "prefold", *arguments]


# generate


@pytest.mark.parametrize("layout", [[], ["-pcp", "2"]], ids=" ".join)
def test_json(layout: list[str], model: str, ids_file: str, tiny: Any, capsys: pytest.CaptureFixture[str]):
    report = run_json(["generate", model, "--prompt-token-ids", ids_file, "--json", *FEW, *layout], capsys)
    (output,) = report["outputs"]
    assert output.keys() == {"prompt_tokens", "token_ids", "text", "finish_reason"}
    assert output["prompt_tokens"] == 150
    assert output["token_ids"] == expected_tokens(tiny, PROMPT_IDS)
    assert output["finish_reason"] == "length"
    metrics = report["metrics"]
    assert metrics.keys() == {"ttft_s", "tpot_s", "prefill_tokens_per_s", "rank_tokens", "rank_causal_pairs"}
    assert metrics["ttft_s"] > 0
    assert metrics["tpot_s"] > 0
    assert metrics["prefill_tokens_per_s"] == pytest.approx(150 / metrics["ttft_s"])
    # The last generated token is never computed.
    ranks = 2 if layout else 1
    assert len(metrics["rank_tokens"]) == len(metrics["rank_causal_pairs"]) == ranks
    assert sum(metrics["rank_tokens"]) == 158
    assert sum(metrics["rank_causal_pairs"]) == 158 * 159 // 2


def test_a_batch_of_token_ids(model: str, tmp_path: Path, tiny: Any, capsys: pytest.CaptureFixture[str]):
    prompts = [PROMPT_IDS[:1], PROMPT_IDS[:33], PROMPT_IDS[5:70]]
    file = tmp_path / "batch.json"
    file.write_text(json.dumps(prompts))
    report = run_json(["generate", model, "--prompt-token-ids", str(file), "--json", *FEW], capsys)
    assert [output["prompt_tokens"] for output in report["outputs"]] == [1, 33, 65]
    for prompt, output in zip(prompts, report["outputs"], strict=True):
        assert output["token_ids"] == expected_tokens(tiny, prompt)


def test_text_from_every_source_is_the_same(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    texts = []
    for source in (["--prompt", PROMPT], ["--prompt-file", str(file)], ["--prompt-file", "-"], ["-"]):
        stdin = io.TextIOWrapper(io.BytesIO(PROMPT.encode()))
        monkeypatch.setattr(sys, "stdin", stdin)
        assert main(["generate", model, *source, *FEW]) == 0
        texts.append(capsys.readouterr().out)
    assert len(set(texts)) == 1
    assert texts[0].strip()
    assert main(["generate", model, "--prompt", PROMPT, "--stream", *FEW]) == 0
    assert capsys.readouterr().out == texts[0]
    report = run_json(["generate", model, "--prompt", PROMPT, "--json", *FEW], capsys)
    assert report["outputs"][0]["text"] + "\n" == texts[0]


def test_chat_wraps_the_prompt(model: str, capsys: pytest.CaptureFixture[str]):
    tokenizer = load_tokenizer(model)
    wrapped = tokenizer.encode(
        tokenizer.apply_chat_template([{"role": "user", "content": PROMPT}]), add_special_tokens=False
    )
    report = run_json(["generate", model, "--prompt", PROMPT, "--chat", "--json", *FEW], capsys)
    assert report["outputs"][0]["prompt_tokens"] == len(wrapped) > len(tokenizer.encode(PROMPT))


def test_samples_and_logprobs(model: str, ids_file: str, capsys: pytest.CaptureFixture[str]):
    options = ["--n", "2", "--temperature", "1", "--sampling-seed", "3", "--logprobs", "2"]
    arguments = ["generate", model, "--prompt-token-ids", ids_file, "--json", *FEW, *options]
    first, second = run_json(arguments, capsys)["outputs"]
    assert first["token_ids"] != second["token_ids"]
    assert len(first["logprobs"]) == 9
    assert [at[0]["token_id"] for at in first["logprobs"]] == first["token_ids"]
    assert run_json(arguments, capsys)["outputs"][0]["token_ids"] == first["token_ids"]


def test_several_texts_are_told_apart(model: str, ids_file: str, capsys: pytest.CaptureFixture[str]):
    assert main(["generate", model, "--prompt-token-ids", ids_file, "--n", "2", *FEW]) == 0
    out = capsys.readouterr().out
    assert "--- prompt 0, sample 0 ---\n" in out
    assert "--- prompt 0, sample 1 ---\n" in out


def test_without_tokenizer_only_ids_work(
    model: str, tmp_path: Path, ids_file: str, tiny: Any, capsys: pytest.CaptureFixture[str]
):
    bare = tmp_path / "bare"
    shutil.copytree(model, bare)
    for name in TOKENIZER_FILES:
        (bare / name).unlink(missing_ok=True)
    report = run_json(["generate", str(bare), "--prompt-token-ids", ids_file, "--json", *FEW], capsys)
    assert report["outputs"][0]["token_ids"] == expected_tokens(tiny, PROMPT_IDS)
    assert report["outputs"][0]["text"] == ""
    assert main(["generate", str(bare), "--prompt", "x", *FEW]) == 2
    assert "holds no tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "prompt", "numbers"),
    [
        (["--max-model-len", "100"], PROMPT_IDS, ("150", "max_model_len=100")),
        ([], [5, 320], ("token id 320", "[0, 320)")),
        (["-tp", "3"], PROMPT_IDS, ("num_attention_heads=8", "tensor_parallel_size=3")),
        (["--num-blocks", "2", "--max-model-len", "100"], PROMPT_IDS, ("2 blocks of 32 tokens", "100")),
    ],
)
def test_what_cannot_be_served_is_one_line(
    options: list[str],
    prompt: list[int],
    numbers: tuple[str, str],
    model: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps(prompt))
    assert main(["generate", model, "--prompt-token-ids", str(file), *FEW, *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert all(number in err for number in numbers)


# Ends from outside


def start_long_run(model: str, *options: str) -> subprocess.Popen[str]:
    """A run that goes on for minutes; returns when it has begun to print."""
    arguments = ["generate", model, "--prompt", PROMPT, "--stream", "--ignore-eos", "--max-tokens", "3000"]
    process = subprocess.Popen(
        command(*arguments, "--threads-per-rank", "1", *options),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    return process


@pytest.mark.parametrize("layout", [[], ["-pcp", "2"]], ids=" ".join)
def test_ctrl_c_ends_it_cleanly(layout: list[str], model: str):
    process = start_long_run(model, *layout)
    children = psutil.Process(process.pid).children(recursive=True)
    ranks = [child for child in children if child.name().startswith("prefold-rank-")]
    assert len(ranks) == (2 if layout else 0)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err == "interrupted\n"
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]


def test_a_reader_that_leaves_is_no_error(model: str):
    process = start_long_run(model)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_killed_rank_is_one_line_and_exit_code_1(model: str):
    process = start_long_run(model, "-pcp", "2")
    children = psutil.Process(process.pid).children(recursive=True)
    (victim,) = (child for child in children if child.name() == "prefold-rank-1")
    victim.kill()
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    lines = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert str(victim.pid) in lines[0]
    assert "SIGKILL" in lines[0]
    assert "Traceback" not in err


# bench and demo


@pytest.mark.slow
def test_bench_compares_layouts_and_a_peer(model: str, capsys: pytest.CaptureFixture[str]):
    options = [
        "--input-len",
        "70",
        "--output-len",
        "4",
        "--warmup",
        "1",
        "--repeats",
        "2",
        "--dtype",
        "float32",
    ]
    layouts = ["-tp 1 --threads-per-rank 1", "-pcp 2"]
    compare = [word for layout in layouts for word in ("--compare", layout)]
    peer = ["--peer", "transformers", "--peer-threads", "1"]
    report = run_json(["bench", "latency", model, *options, *compare, *peer, "--json"], capsys)
    one, two, other = report["rows"]
    assert [one["layout"], two["layout"]] == layouts
    assert other["layout"].startswith("transformers, 1 threads")
    assert [row["world_size"] for row in report["rows"]] == [1, 2, 1]
    assert one["ttft_speedup"] == one["tpot_speedup"] == 1.0
    for row in report["rows"]:
        assert len(row["ttft_s"]["values"]) == 2
        assert row["ttft_s"]["min"] <= row["ttft_s"]["median"] <= row["ttft_s"]["max"]
        assert row["prefill_tokens_per_s"] == pytest.approx(70 / row["ttft_s"]["median"])
        assert row["flops_per_s"] == pytest.approx(report["prefill_flops"]["total"] / row["ttft_s"]["median"])
        assert row["matmul_share"] == pytest.approx(row["flops_per_s"] / row["matmul_flops_per_s"])
        assert row["same_tokens"]
    assert one["bytes_sent"] == {} or not any(one["bytes_sent"].values())
    assert sum(two["bytes_sent"].values()) > 0
    assert sum(two["rank_tokens"]) == one["rank_tokens"][0] == 73
    shapes = {(rate["processes"], rate["threads"], rate["dtype"]) for rate in report["matmul_rates"]}
    assert shapes == {(p, 1, dtype) for p in (1, 2) for dtype in ("float32", "bfloat16")}


@pytest.mark.slow
def test_bench_of_a_batch_after_a_cached_prefix(model: str, capsys: pytest.CaptureFixture[str]):
    lengths = ["--cached-prefix-len", "100", "--input-len", "9", "--output-len", "4", "--batch-size", "3"]
    few = ["--warmup", "0", "--repeats", "1", "--dtype", "float32", "--max-num-batched-tokens", "8"]
    options = ["--block-size", "8", "--threads-per-rank", "1", "--compare", "", "--compare", "-pcp 2"]
    peer = ["--peer", "transformers", "--peer-threads", "1"]
    arguments = ["bench", "latency", model, *lengths, *few, *options, *peer, "--json"]
    report = run_json(arguments, capsys)
    assert (report["cached_prefix_len"], report["batch_size"]) == (100, 3)
    one, two, other = report["rows"]
    assert (one["num_cached_tokens"], two["num_cached_tokens"]) == (96, 96)
    assert (len(one["rank_memory_bytes"]), len(two["rank_memory_bytes"])) == (1, 2)
    assert two["peak_memory_bytes"] == max(two["rank_memory_bytes"])
    assert min(two["rank_memory_bytes"]) > 100e6, "of processes that have torch"
    for row in report["rows"]:
        assert row["same_tokens"]
        assert row["decode_tokens_per_s"] == pytest.approx(3 / row["tpot_s"]["median"])
        assert row["ttft_s"]["median"] * 3 >= 27 / row["prefill_tokens_per_s"]
    assert sum(one["rank_tokens"]) >= 3 * (109 - 96) + 3 * 3
    assert other["num_cached_tokens"] is None


def test_bench_says_when_the_cache_is_too_small(model: str, capsys: pytest.CaptureFixture[str]):
    lengths = ["--cached-prefix-len", "64", "--input-len", "30", "--output-len", "2", "--batch-size", "3"]
    few = ["--warmup", "0", "--repeats", "1", "--threads-per-rank", "1"]
    small = ["--block-size", "8", "--num-blocks", "19", "--max-model-len", "110"]
    assert main(["bench", "latency", model, *lengths, *few, *small, "--json"]) == 2
    assert "raise kv_cache_memory_bytes" in capsys.readouterr().err.splitlines()[-1]


def test_bench_names_the_layout_that_is_wrong(model: str, capsys: pytest.CaptureFixture[str]):
    compare = ["--compare", "-tp 3"]
    assert main(["bench", "latency", model, "--input-len", "8", *compare, "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    last = err.splitlines()[-1]
    assert last.startswith("error: -tp 3: ")
    assert "num_attention_heads=8" in last


def test_a_side_that_dies_says_so():
    side = Side("matmul", "prefold.benchmark.matmul_side", {"threads": 1, "index": 0})
    try:
        assert side.receive() == {"ready": True}
        assert side.ask({"dtype": "float32", "seconds": 0.01})["flops_per_s"] > 0
        (child,) = (c for c in psutil.Process().children() if "prefold.benchmark.matmul_side" in c.cmdline())
        os.kill(child.pid, signal.SIGKILL)
        with pytest.raises(SideError, match="matmul: its process was killed by SIGKILL"):
            side.ask({"dtype": "float32", "seconds": 0.01})
    finally:
        side.close()


def test_an_error_of_a_side_reaches_the_parent():
    side = Side("matmul", "prefold.benchmark.matmul_side", {"threads": 1, "index": 0})
    try:
        side.receive()
        with pytest.raises(SideError, match="matmul: 'float8'"):
            side.ask({"dtype": "float8", "seconds": 0.01})
    finally:
        side.close()


def test_demo_shows_who_computed_what(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    document = tmp_path / "document.txt"
    document.write_text(PROMPT * 6)
    arguments = ["--document", str(document), "--question", "Which?", "--max-tokens", "8"]
    assert main(["demo", "--model", model, *arguments]) == 0
    out = capsys.readouterr().out
    lines = out.splitlines()
    assert max(map(cell_len, lines)) <= 100
    assert lines[-1] == "Tokens identical: yes, all 8"
    for expected in ("1 rank:   first token after", "2 ranks:  first token after", "Answer", "times as fast"):
        assert expected in out
    first, last = (next(line for line in lines if label in line) for label in ("first keys", "all keys"))
    cells = first.split()[-1]
    assert cells.strip("0").strip("1") == ""
    assert cells.count("0") == pytest.approx(cells.count("1"), abs=2)
    assert set(last.split()[-1]) == {"0"}
    rows = [line.split() for line in lines if line.startswith("  rank ")]
    tokens = [int(row[2].replace(",", "")) for row in rows]
    assert len(tokens) == 2
    assert abs(tokens[0] - tokens[1]) <= 1
