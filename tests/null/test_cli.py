"""The command line without an engine: parsing, errors, exit codes, printing, generated help."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import prefold.__main__
from prefold.cli import progress as progress_module
from prefold.cli.bench import LatencyArgs, describe, parse_layout
from prefold.cli.bench_table import print_report
from prefold.cli.demo_picture import picture, rank_of_tokens
from prefold.cli.generate import GenerateArgs, to_json
from prefold.cli.main import main, parse
from prefold.cli.options import EngineOptions, SamplingOptions
from prefold.cli.progress import ProgressLines, make_progress
from prefold.cli.run import RunResult
from prefold.cli.screen import make_console
from prefold.config import ParallelConfig
from prefold.engine.args import EngineArgs
from prefold.request import CompletionOutput, Logprob, RequestMetrics, RequestOutput, SamplingParams

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    """A folder that looks like a checkpoint until somebody reads its config."""
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


# Parsing


def test_short_and_long_layout_options():
    short = parse(["generate", "model", "-tp", "2", "-pcp", "3", "--prompt", "x"])
    long_names = ["--tensor-parallel-size", "2", "--prefill-context-parallel-size", "3"]
    assert short == parse(["generate", "model", *long_names, "--prompt", "x"])
    assert isinstance(short, GenerateArgs)
    assert (short.engine.tensor_parallel_size, short.engine.prefill_context_parallel_size) == (2, 3)


def test_options_of_every_axis():
    words = "generate m - -tp 2 -pcp 2 -dcp 4 -pp 3 -dp 5 -ep --cp-kv-cache-interleave-size 8"
    long_words = (
        "generate m - --tensor-parallel-size 2 --prefill-context-parallel-size 2 "
        "--decode-context-parallel-size 4 --pipeline-parallel-size 3 --data-parallel-size 5 "
        "--enable-expert-parallel --cp-kv-cache-interleave-size 8"
    )
    args = parse(words.split())
    assert args == parse(long_words.split())
    parallel = ParallelConfig.of(args.engine)
    assert parallel == ParallelConfig(2, 2, 4, 3, 5, True, 8)
    bench = parse(["bench", "latency", "m", "--input-len", "9", *words.split()[3:]]).what
    assert bench.engine == args.engine
    assert describe(args.engine) == "-tp 2 -pcp 2 -dcp 4 -pp 3 -dp 5 -ep"


def test_debug_options():
    assert parse(["generate", "m", "-", "--context-attention", "sliced"]).engine.context_attention == "sliced"
    assert parse(["generate", "m", "-", "--check-step-plans", "off"]).engine.check_step_plans == "off"


@pytest.mark.parametrize(
    "arguments", [["m", "-", "-tp", "2"], ["-tp", "2", "m", "-"], ["m", "-tp", "2", "-"]]
)
def test_a_dash_is_standard_input(arguments: list[str]):
    args = parse(["generate", *arguments])
    assert (args.model, args.source, args.engine.tensor_parallel_size) == ("m", "-", 2)


@pytest.mark.parametrize("text", ["None", "-tp 2", "-1", "--json", "", "two words", "a=b"])
def test_a_prompt_may_be_any_text(text: str):
    assert parse(["generate", "m", "--prompt", text]).prompt == text
    assert parse(["generate", "m", f"--prompt={text}"]).prompt == text


def test_repeated_options_add_up():
    args = parse(
        ["generate", "m", "-", "--stop", "a", "--stop", "-b", "--stop-token-id", "4", "--stop-token-id", "5"]
    )
    params = args.sampling.to_params()
    assert params.stop == ("a", "-b")
    assert params.stop_token_ids == (4, 5)


def test_logit_bias_is_parsed_and_checked():
    sampling = parse(["generate", "m", "-", "--logit-bias", "4=-1.5", "--logit-bias", "7=2"]).sampling
    assert sampling.to_params().logit_bias == {4: -1.5, 7: 2.0}
    with pytest.raises(ValueError, match="'4:1' must be ID=BIAS"):
        SamplingOptions(logit_bias=("4:1",)).to_params()


def test_negative_numbers_are_values():
    assert parse(["generate", "m", "-", "--presence-penalty", "-0.5"]).sampling.presence_penalty == -0.5


def test_compare_takes_options_as_a_text():
    args = parse(
        ["bench", "latency", "m", "--input-len", "9", "--compare", "-tp 2", "--compare", "-pcp 2"]
    ).what
    assert isinstance(args, LatencyArgs)
    assert args.compare == ("-tp 2", "-pcp 2")


def test_compare_goes_on_top_of_the_options_outside():
    base = EngineOptions(dtype="float32", block_size=8)
    options = parse_layout("-pcp 2 --threads-per-rank 1 --block-size 4", base)
    expected = dataclasses.replace(base, prefill_context_parallel_size=2, threads_per_rank=1, block_size=4)
    assert options == expected
    assert describe(options) == "-pcp 2 --threads-per-rank 1"


@pytest.mark.parametrize("layout", ["-tq 2", "-tp x", "-tp"])
def test_a_wrong_compare_says_so(layout: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        parse_layout(layout, EngineOptions())
    assert leaving.value.code == 2
    assert capsys.readouterr().err


def test_engine_options_are_those_of_the_engine():
    def defaults(of: type) -> dict[str, object]:
        return {field.name: field.default for field in dataclasses.fields(of) if field.name != "model"}

    assert defaults(EngineOptions) == defaults(EngineArgs)


def test_every_sampling_parameter_can_be_reached():
    ours = {field.name for field in dataclasses.fields(SamplingOptions)}
    # The last one is --json-schema, which names a file.
    elsewhere = {"seed", "skip_special_tokens", "structured_outputs"}
    assert ours - {"sampling_seed"} | elsewhere == set(SamplingParams.__struct_fields__)
    assert SamplingOptions(sampling_seed=5).to_params().seed == 5


# Errors and exit codes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of --prompt TEXT, .*; 0 were given"),
        (["-", "--prompt", "x"], "; 2 were given"),
        (["--prompt", ""], "the prompt is empty"),
        (["--prompt", "x", "--temperature", "-1"], r"temperature=-1.0 is outside \[0.0, 100.0\]"),
        (["--prompt", "x", "--json", "--stream"], "--stream .* --json .*: choose one"),
        (["--prompt", "x", "--logprobs", "3"], "shown by --json only"),
        (["--prompt", "x", "--stream", "--n", "2"], "--stream shows one text"),
        (["--prompt-file", "no/such/file"], "no/such/file: No such file or directory"),
        (["--prompt", "x"], "which is not supported; supported: Deepseek"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, checkpoint: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["generate", checkpoint, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(f"error: .*{message}.*\n", err)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", "3", '["a"]', "[1, [2]]", "[[1], 2]", "[1.5]", "[true]", "[[]"]
)
def test_token_ids_must_be_lists_of_integers(
    content: str, checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "ids.json"
    file.write_text(content)
    assert main(["generate", checkpoint, "--prompt-token-ids", str(file)]) == 2
    assert "must hold a JSON list of token ids, or a list of such lists" in capsys.readouterr().err


def test_a_file_that_is_no_text(checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    file = tmp_path / "prompt"
    file.write_bytes(b"abc\xff")
    assert main(["generate", checkpoint, "--prompt-file", str(file)]) == 2
    assert capsys.readouterr().err == f"error: {file} is no UTF-8 text: byte 3 cannot be decoded\n"


@pytest.mark.parametrize("command", ["generate", "bench latency --input-len 4"])
def test_a_folder_that_is_no_checkpoint(command: str, capsys: pytest.CaptureFixture[str]):
    words = command.split()
    assert main([*words, "no/such/model"]) == 2
    assert capsys.readouterr().err.startswith("error: 'no/such/model' is no checkpoint folder")


def test_debug_shows_where_an_error_comes_from(capsys: pytest.CaptureFixture[str]):
    assert main(["generate", "no/such/model", "-", "--debug"]) == 2
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert "error: 'no/such/model'" in err


@pytest.mark.parametrize(
    "arguments", [[], ["generate"], ["generate", "m", "--nonsense"], ["bench"], ["serve"]]
)
def test_wrong_usage_is_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert capsys.readouterr().out == ""


def _raise(error: BaseException) -> int:
    raise error


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted\n"), (ValueError("x=1"), 2, "error: x=1\n")],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr("prefold.cli.demo.run", lambda args: _raise(error))
    assert main(["demo"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("where", ["prefold.cli.main.parse", "prefold.cli.main.main"])
def test_ctrl_c_while_arguments_are_read_and_before(
    where: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(where, lambda *_: _raise(KeyboardInterrupt()))
    assert prefold.__main__.run() == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_engine_that_dies_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from prefold.engine.executor import EngineDeadError

    monkeypatch.setattr("prefold.cli.demo.run", lambda args: _raise(EngineDeadError("rank 1 was killed")))
    assert main(["demo"]) == 1
    assert capsys.readouterr().err == "error: rank 1 was killed\n"
    monkeypatch.setattr("prefold.cli.demo.run", lambda args: _raise(RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        main(["demo"])


# Help


def test_help_is_light():
    """Neither torch nor transformers is imported to answer a wrong command or a call for help."""
    script = (
        "import sys\nfrom prefold.cli.main import main\n"
        "try: main(['generate', '--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'tokenizers', 'numpy.random', 'rich.console'} & set(sys.modules)\n"
        "print(heavy, file=sys.stderr)\nsys.exit(bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_docs_are_up_to_date():
    spec = importlib.util.spec_from_file_location("make_cli_docs", ROOT / "scripts" / "make_cli_docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.page() == module.PAGE.read_text(encoding="utf-8"), "run: python scripts/make_cli_docs.py"


# Output


def _output(
    request_id: str, prompt_len: int, ttft_s: float, tpot_s: float | None, **sample: object
) -> RequestOutput:
    completion = CompletionOutput(0, "ab", [7, 8], finish_reason="length", **sample)  # type: ignore[arg-type]
    metrics = RequestMetrics(ttft_s=ttft_s, tpot_s=tpot_s)
    return RequestOutput(request_id, None, list(range(prompt_len)), [completion], True, None, metrics)


def test_json_object():
    result = RunResult([_output("0", 30, 2.0, 0.1), _output("1", 10, 4.0, 0.3)])
    report = to_json(result, [21, 21], [100, 101])
    entry = {"token_ids": [7, 8], "text": "ab", "finish_reason": "length"}
    assert report == {
        "outputs": [{"prompt_tokens": 30, **entry}, {"prompt_tokens": 10, **entry}],
        "metrics": {
            "ttft_s": 4.0,
            "tpot_s": pytest.approx(0.2),
            "prefill_tokens_per_s": 10.0,
            "rank_tokens": [21, 21],
            "rank_causal_pairs": [100, 101],
        },
    }


def test_json_without_a_second_token_and_with_logprobs():
    output = _output("0", 3, 2.0, None, logprobs=[{7: Logprob(-0.1, 1, "a")}, {8: Logprob(-0.2, 2, "b")}])
    output.prompt_logprobs = [None, {1: Logprob(-3.0, 9, "c")}]
    report = to_json(RunResult([output]), [], [])
    assert report["metrics"]["tpot_s"] is None
    assert report["outputs"][0]["logprobs"][1] == [{"token_id": 8, "logprob": -0.2, "rank": 2, "text": "b"}]
    assert report["outputs"][0]["prompt_logprobs"][0] is None
    json.dumps(report)


def test_progress_lines_are_few(monkeypatch: pytest.MonkeyPatch):
    now = 0.0
    monkeypatch.setattr(progress_module.time, "monotonic", lambda: now)
    file = io.StringIO()
    with make_progress("2 ranks", file) as progress:
        assert isinstance(progress, ProgressLines)
        for now in np.arange(0.0, 30.0, 0.5).tolist():
            progress.update(min(int(now * 100), 1500), 1500, max(0, int(now) - 15))
        progress.stop()
        now = 100.0
        progress.update(1500, 1500, 99)
    assert file.getvalue().splitlines() == [
        "2 ranks: prefill 200 of 1,500 tokens, 100 tokens/s",
        "2 ranks: prefill 1,200 of 1,500 tokens, 100 tokens/s",
        "2 ranks: tokens generated: 7",
    ]


@given(
    ends=st.lists(st.integers(1, 400), min_size=1, max_size=4).map(lambda steps: np.cumsum(steps).tolist()),
    ranks=st.integers(1, 8),
)
def test_picture_shows_every_token_once(ends: list[int], ranks: int):
    rank_of = rank_of_tokens(ends, ranks, min_split_tokens=0)
    assert len(rank_of) == ends[-1]
    assert set(rank_of.tolist()) <= set(range(ranks))
    lines = [line.plain for line in picture(rank_of, columns=60, rows=5)]
    assert all(len(line) == 60 for line in lines)
    heights = [sum(line[column] != " " for line in lines) for column in range(60)]
    assert heights == sorted(heights)
    assert heights[-1] == 5


def test_picture_of_two_ranks():
    lines = [line.plain for line in picture(rank_of_tokens([800], 2, 0), columns=8, rows=4)]
    assert lines == ["      00", "    1100", "  111100", "00111100"]


def _row(layout: str, ranks: int, **changes: object) -> dict[str, object]:
    times = {"median": 13.25, "min": 12.9, "max": 114.1, "values": [1.0]}
    row: dict[str, object] = {
        "layout": layout,
        "world_size": ranks,
        "threads_per_rank": 1,
        "dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "ttft_s": times,
        "tpot_s": times,
        "prefill_tokens_per_s": 12345.6,
        "decode_tokens_per_s": 81.3,
        "flops_per_s": 3.3e11,
        "matmul_flops_per_s": 4e11,
        "matmul_share": 0.54,
        "ttft_speedup": 1.93,
        "tpot_speedup": 0.99,
        "same_tokens": True,
        "bytes_sent": {"pcp.all_gather": 123_456_789},
        "rank_tokens": [8192] * ranks,
        "rank_causal_pairs": [1] * ranks,
        "peak_memory_bytes": 1_200_000_000,
    }
    return row | changes


@pytest.mark.parametrize(("batch", "cached"), [(1, 0), (16, 32768)])
def test_bench_table_fits_100_columns(batch: int, cached: int):
    peer = dict.fromkeys(("bytes_sent", "rank_tokens", "rank_causal_pairs", "peak_memory_bytes"))
    report = {
        "model": "/models/some-model",
        "cached_prefix_len": cached,
        "input_len": 16384,
        "output_len": 32,
        "batch_size": batch,
        "repeats": 5,
        "prefill_flops": {"matmul": 10**12, "attention": 10**13, "total": 11 * 10**12},
        "matmul_rates": [
            {
                "processes": 1,
                "threads": 1,
                "dtype": "float32",
                "flops_per_s": 9e10,
                "gain_over_one_process": 1.0,
            },
            {
                "processes": 2,
                "threads": 1,
                "dtype": "float32",
                "flops_per_s": 17e10,
                "gain_over_one_process": 1.9,
            },
        ],
        "rows": [
            _row("-tp 1 --threads-per-rank 1", 1),
            _row("-pcp 2", 2, same_tokens=False),
            _row(
                "-tp 2 -pcp 4 -dcp 8 -pp 2 -dp 2 -ep --threads-per-rank 1", 32, rank_tokens=[8191, 8192] * 4
            ),
            _row("transformers, 2 threads, tcmalloc", 1, **peer),
        ],
    }
    file = io.StringIO()
    print_report(report, make_console(file))
    text = file.getvalue()
    assert max(map(len, text.splitlines())) <= 100
    figures = ("13.250", "12,346", "1.93", "54%", "123.5 MB", "8192 8192", "2 x 1", "1.90", "8 x 8191-8192")
    for expected in ("-pcp 2", *figures):
        assert expected in text
    assert ("16 prompts at once of 32,768 cached + 16,384 tokens in" in text) == (batch > 1)
    assert ("while all 16 prompts decode" in text) == (batch > 1)
    assert "Greedy tokens differ from the first row's: -pcp 2\n" in text
