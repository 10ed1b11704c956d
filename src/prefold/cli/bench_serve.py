"""`prefold bench serve`: arguments, progress and printing; the measuring is `prefold.benchmark`'s."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from prefold.cli.options import Flag, number, text

if TYPE_CHECKING:
    from collections.abc import Callable

    from prefold.benchmark.serve_client import RequestResult, Target
    from prefold.benchmark.serve_prompts import Prompt

LINE_EVERY_S = 10.0


@dataclass(frozen=True)
class ServeBenchArgs:
    """Measure a running server under load: throughput, and the time to first token and per token.

    Works with any server of OpenAI's API. Options and figures are those of `vllm bench serve`. One request
    goes ahead of the measured ones. Exit code 1 if no request succeeded.

    Attributes:
        url: Address of the server, such as http://localhost:8000.
        model: Name of the model.
        endpoint: Which form requests have.
        api_key: Key of the server, if it has one.
        num_prompts: Requests to send.
        request_rate: Requests per second, at random times (a Poisson process); inf sends all at once.
        burstiness: Below 1 requests come in bursts, above 1 more regularly.
        max_concurrency: Requests under way at the same time, at most.
        random_input_len: Tokens of a random prompt. A chat's are words, of about a token each.
        random_output_len: Tokens to generate for a random prompt.
        random_range_ratio: Lengths are uniform within this share around those, such as 0.5.
        random_vocab_size: Random token ids are below this number.
        dataset_path: Send the first turns of these conversations, a JSON file in ShareGPT's form, instead of
            random prompts.
        sharegpt_output_len: Tokens to generate for a conversation.
        ignore_eos: Go on after the model's end of sequence, so that outputs have their full length.
        temperature: Of sampling.
        seed: Of prompts, their order and the times of sending.
        goodput: Count requests that keep these limits, METRIC:MILLISECONDS with ttft, tpot or e2el, such as
            ttft:500 tpot:50.
        metric_percentiles: Which ones to show.
        timeout: Seconds that the server may be silent before a request counts as failed.
        save_result: Write the figures to this file, as JSON.
        save_detailed: Write those of every request as well.
    """

    url: Annotated[Positional[str], arg(metavar="URL")]
    model: Annotated[str | None, text("NAME", "the first of /v1/models")] = None
    endpoint: Literal["completions", "chat"] = "completions"
    api_key: Annotated[str | None, text("KEY")] = None
    num_prompts: Annotated[int, number()] = 1000
    request_rate: Annotated[float, arg(metavar="X")] = float("inf")
    burstiness: Annotated[float, arg(metavar="X")] = 1.0
    max_concurrency: Annotated[int | None, number(default="no limit")] = None
    random_input_len: Annotated[int, number()] = 1024
    random_output_len: Annotated[int, number()] = 128
    random_range_ratio: Annotated[float, arg(metavar="X")] = 0.0
    random_vocab_size: Annotated[int, number()] = 256
    dataset_path: Annotated[str | None, text("FILE")] = None
    sharegpt_output_len: Annotated[int | None, number(default="those of the answer in the file")] = None
    ignore_eos: Flag = False
    temperature: Annotated[float, arg(metavar="X")] = 0.0
    seed: Annotated[int, number()] = 0
    goodput: Annotated[tuple[str, ...], arg(metavar="METRIC:MS [METRIC:MS ...]", help_behavior_hint="")] = ()
    metric_percentiles: Annotated[str, arg(metavar="P,P")] = "99"
    timeout: Annotated[float | None, arg(metavar="S", help_behavior_hint="(default: none)")] = None
    save_result: Annotated[str | None, text("FILE")] = None
    save_detailed: Flag = False


def run_serve_bench(args: ServeBenchArgs) -> int:
    from prefold.benchmark.serve_report import parse_goodput, parse_percentiles, report_lines

    if args.num_prompts < 1:
        raise ValueError(f"--num-prompts {args.num_prompts} is below 1")
    if args.save_detailed and args.save_result is None:
        raise ValueError("--save-detailed takes --save-result")
    percentiles, limits = parse_percentiles(args.metric_percentiles), parse_goodput(args.goodput)
    report = asyncio.run(_measure(args, percentiles, limits))
    for line in report_lines(report, percentiles):
        print(line)
    for error in report["errors"]:
        print(f"{error['count']} x {error['kind']}: {error['example']}", file=sys.stderr)
    if args.save_result is not None:
        Path(args.save_result).expanduser().write_text(json.dumps(report), encoding="utf-8")
    return 0 if report["completed"] else 1


async def _measure(
    args: ServeBenchArgs, percentiles: list[float], limits: dict[str, float]
) -> dict[str, Any]:
    from prefold.benchmark.serve_client import Target
    from prefold.benchmark.serve_load import first_model, make_client, run_load
    from prefold.benchmark.serve_prompts import send_times
    from prefold.benchmark.serve_report import details, summarize

    times = send_times(args.num_prompts, args.request_rate, args.burstiness, args.seed)
    async with make_client(args.url, args.api_key, args.timeout) as client:
        model = args.model or await first_model(client)
        fields: dict[str, Any] = {"temperature": args.temperature}
        if args.ignore_eos:
            fields["ignore_eos"] = True
        target = Target(client, model, args.endpoint, fields)
        prompts = await _prompts(args, target)
        first = await target.send(prompts[0])
        if first.error is not None:
            print(f"warning: the request ahead of the others failed: {first.error}", file=sys.stderr)
        with _progress(len(prompts)) as on_done:
            load = await run_load(target, prompts, times, args.max_concurrency, on_done)
    report: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "endpoint": args.endpoint,
        "model_id": model,
        "num_prompts": args.num_prompts,
        "request_rate": "inf" if args.request_rate == float("inf") else args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **summarize(load, percentiles, limits),
    }
    return report | details(load.results) if args.save_detailed else report


async def _prompts(args: ServeBenchArgs, target: Target) -> list[Prompt]:
    from prefold.benchmark.serve_load import count_tokens
    from prefold.benchmark.serve_prompts import Prompt, first_turns, random_prompts

    if args.dataset_path is None:
        return random_prompts(
            args.num_prompts,
            args.random_input_len,
            args.random_output_len,
            args.random_range_ratio,
            args.random_vocab_size,
            args.endpoint == "chat",
            args.seed,
        )
    if args.sharegpt_output_len is not None and args.sharegpt_output_len < 1:
        raise ValueError(f"--sharegpt-output-len {args.sharegpt_output_len} is below 1")
    turns = first_turns(args.dataset_path, args.num_prompts, args.seed)
    output_len = args.sharegpt_output_len
    prompts = [
        Prompt(asked, output_len or max(1, await count_tokens(target.client, target.model, answer)))
        for asked, answer in turns
    ]
    return [prompts[i % len(prompts)] for i in range(args.num_prompts)]


@contextmanager
def _progress(total: int) -> Iterator[Callable[[RequestResult], None]]:
    """Counts finished requests on stderr: a bar on a terminal, a line now and then elsewhere."""
    done = failed = 0
    next_line = time.monotonic() + LINE_EVERY_S

    def line(result: RequestResult) -> None:
        nonlocal done, failed, next_line
        done, failed = done + 1, failed + (result.error is not None)
        if time.monotonic() >= next_line:
            next_line = time.monotonic() + LINE_EVERY_S
            print(f"{done} of {total} requests, {failed} failed", file=sys.stderr, flush=True)

    if not sys.stderr.isatty():
        yield line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress("requests", *columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda result: bar.advance(task)
