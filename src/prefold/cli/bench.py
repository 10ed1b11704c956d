"""`prefold bench`: arguments and printing; the measuring is `prefold.benchmark`'s."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from contextlib import contextmanager
from ctypes.util import find_library
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from tyro.conf import Positional, UseAppendAction, arg, subcommand

from prefold.cli.bench_serve import ServeBenchArgs, run_serve_bench
from prefold.cli.nodes import join_torchrun, run_as_node, runs_engine
from prefold.cli.options import TYRO_CONFIG, EngineOptions, Flag, number
from prefold.config import ParallelConfig
from prefold.distributed.layouts import layout_options
from prefold.hf_config import load_model_config

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prefold.benchmark.latency import RowSpec


@dataclass(frozen=True)
class LatencyArgs:
    """Measure time to first token (TTFT) and time per output token (TPOT) of one prompt, or of a batch.

    Prompts are random token ids; the prefix cache is off unless --cached-prefix-len is given. After the
    warm-up each repeat runs every layout once, in rotating order, so that they meet the same machine. Shown
    are medians and extremes, FLOP/s of the prefill (counted from the model's dimensions) against matrix
    multiplication measured in the same run with as many processes and threads, and what a rank sends.

    Attributes:
        model: Folder of a Hugging Face checkpoint, or a GGUF file.
        input_len: Tokens in a prompt (after the cached prefix).
        output_len: Tokens to generate, the first included.
        cached_prefix_len: Tokens that a prompt begins with and that are in the prefix cache when it arrives:
            the time to first token is that of the tokens after them.
        batch_size: Prompts at once. The first ones to be prefilled decode on until the last has its tokens,
            and time per output token and tokens/s are taken while all of them decode.
        warmup: Runs before the measured ones.
        repeats: Measured runs.
        compare: One layout, such as "-pcp 2" or "-tp 1 --threads-per-rank 1": any engine options, which go on
            top of those given outside. Give it once per row; ratios are to the first.
        peer: Compare with this engine as well, on the same checkpoint and prompts.
        peer_threads: Its threads.
        json: Print one JSON object instead of the table.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    input_len: Annotated[int, number()]
    output_len: Annotated[int, number()] = 32
    cached_prefix_len: Annotated[int, number()] = 0
    batch_size: Annotated[int, number()] = 1
    warmup: Annotated[int, number()] = 1
    repeats: Annotated[int, number()] = 5
    compare: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="OPTIONS")] = ()
    peer: Annotated[Literal["transformers"] | None, arg(help_behavior_hint="")] = None
    peer_threads: Annotated[int | None, number(default="all cores")] = None
    json: Flag = False
    engine: EngineOptions = field(default_factory=EngineOptions)


@dataclass(frozen=True)
class BenchArgs:
    """Measure speed on this machine."""

    what: Annotated[LatencyArgs, subcommand("latency")] | Annotated[ServeBenchArgs, subcommand("serve")]


def run(args: BenchArgs) -> int:
    return run_serve_bench(args.what) if isinstance(args.what, ServeBenchArgs) else run_latency(args.what)


def run_latency(args: LatencyArgs) -> int:
    args = replace(args, engine=join_torchrun(args.engine))
    if args.engine.nnodes * args.engine.nproc_per_node > 1 and (args.compare or args.peer):
        raise ValueError("--compare and --peer run several engines by turns, which takes a single node")
    if not runs_engine(args.engine):
        return run_as_node(_engine_row(args, describe(args.engine)).setup)
    model = load_model_config(args.model, dtype=args.engine.dtype)
    layouts = args.compare or (describe(args.engine),)
    rows = [_engine_row(args, layout) for layout in layouts]
    if args.peer is not None:
        rows.append(_peer_row(args))

    from prefold.benchmark.latency import LatencyPlan, measure_latency
    from prefold.benchmark.side import SideError

    plan = LatencyPlan(
        model,
        rows,
        args.input_len,
        args.output_len,
        args.warmup,
        args.repeats,
        args.engine.seed,
        args.cached_prefix_len,
        args.batch_size,
    )
    try:
        with _notes() as note:
            report = measure_latency(plan, note)
    except SideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report))
    else:
        from prefold.cli.bench_table import print_report

        print_report(report)
    return 0


def parse_layout(layout: str, base: EngineOptions) -> EngineOptions:
    """Engine options of one --compare, on top of `base`. Leaves with SystemExit(2) if they are wrong."""
    try:
        arguments = shlex.split(layout)
    except ValueError as error:
        raise ValueError(f"--compare {layout!r}: {error}") from None
    return tyro.cli(
        EngineOptions, args=arguments, default=base, prog=f'--compare "{layout}"', config=TYRO_CONFIG
    )


def describe(options: EngineOptions) -> str:
    """The layout as its user would type it."""
    text = layout_options(ParallelConfig.of(options))
    threads = options.threads_per_rank
    return text if threads is None else f"{text} --threads-per-rank {threads}"


def _engine_row(args: LatencyArgs, layout: str) -> RowSpec:
    from prefold.benchmark.latency import RowSpec

    options = parse_layout(layout, args.engine) if args.compare else args.engine
    setup = options.for_llm(
        model=args.model,
        max_model_len=options.max_model_len or _longest(args, options.max_num_batched_tokens),
        max_num_seqs=max(1, args.batch_size),  # no memory for more
        enable_prefix_caching=args.cached_prefix_len > 0,
    )
    return RowSpec(layout.strip() or describe(options), "prefold.benchmark.engine_side", setup)


def _longest(args: LatencyArgs, max_num_batched_tokens: int | None) -> int:
    """Prompt and output, and what the first prompts of a batch generate while the last are prefilled."""
    tokens = args.cached_prefix_len + args.input_len + args.output_len
    if args.batch_size <= 1:
        return tokens
    budget = max(1, (max_num_batched_tokens or 2048) - args.batch_size)
    steps = args.batch_size * -(-args.input_len // budget)
    return tokens + 2 * steps + args.batch_size


def _peer_row(args: LatencyArgs) -> RowSpec:
    from prefold.benchmark.latency import RowSpec
    from prefold.hardware import available_cores

    threads = args.peer_threads or available_cores()
    # Its large allocations go through malloc: with glibc's it would spend much of its time in page faults.
    tcmalloc = find_library("tcmalloc_minimal")
    name = f"{args.peer}, {threads} threads" + (", tcmalloc" if tcmalloc else "")
    setup = {"model": args.model, "dtype": args.engine.dtype, "threads": threads}
    environment = {"OMP_NUM_THREADS": str(threads)} | ({"LD_PRELOAD": tcmalloc} if tcmalloc else {})
    return RowSpec(name, "prefold.benchmark.peer_side", setup, environment)


@contextmanager
def _notes() -> Iterator[Callable[[str], None]]:
    """What is going on, on stderr: one changing line on a terminal, lines elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("") as status:
        yield lambda text: status.update(text)
