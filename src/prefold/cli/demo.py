"""`prefold demo`: the same long prompt by one rank and by several, and who computed what."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from prefold.checkpoint_files import find_checkpoint
from prefold.cli.options import number, text
from prefold.cli.progress import make_progress
from prefold.cli.run import run_requests
from prefold.request import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

    from prefold.cli.demo_picture import DemoRun

EXAMPLES = Path(__file__).parents[3] / "examples"
"""Of the repository: the demo's document and question are shipped there, not in the package."""

DEMO_MODEL = "SmolLM2-135M-Instruct, its attention rewritten exactly as MLA"

STEP_TOKENS = 1024
"""Tokens per rank and step: small enough for the progress to move."""


@dataclass(frozen=True)
class DemoArgs:
    """Answer a question about a long document, by one rank and then by several, and compare.

    Both runs use one thread per rank. Exit code 1 if the runs do not generate the same tokens.

    Attributes:
        prefill_context_parallel_size: Ranks of the second run.
        model: Folder of a checkpoint with a chat template.
        document: UTF-8 text file.
        question: What to ask about it.
        max_tokens: Longest answer; it ends with its first line anyway.
    """

    prefill_context_parallel_size: Annotated[int, arg(aliases=["-pcp"], metavar="N")] = 2
    model: Annotated[str | None, arg(metavar="MODEL", help_behavior_hint="(default: the demo model)")] = None
    document: Annotated[
        str | None, arg(metavar="FILE", help_behavior_hint="(default: the demo document)")
    ] = None
    question: Annotated[str | None, text("TEXT")] = None
    max_tokens: Annotated[int, number()] = 48


def run(args: DemoArgs) -> int:
    if args.prefill_context_parallel_size < 2:
        size = args.prefill_context_parallel_size
        raise ValueError(f"prefill_context_parallel_size={size}: the second run needs at least 2 ranks")
    document_file = Path(args.document) if args.document else _example("document.txt")
    question = args.question or _example("question.txt").read_text(encoding="utf-8").strip()
    document = document_file.read_text(encoding="utf-8").strip()
    # One paragraph is the answer; a small model likes to go on.
    params = SamplingParams(temperature=0.0, max_tokens=args.max_tokens, stop="\n")

    from prefold.cli.demo_picture import print_head, print_outcome
    from prefold.cli.screen import make_console

    console = make_console()
    model = find_checkpoint(args.model) if args.model else _demo_model()
    prompt = _prompt(model, document, question)
    size = args.prefill_context_parallel_size
    name = str(model) if args.model else f"{DEMO_MODEL} ({model})"
    print_head(console, name, document_file.name, len(prompt), question, size)
    runs = [_run(console, model, prompt, params, ranks) for ranks in (1, size)]
    print_outcome(console, runs)
    return 0 if runs[0].token_ids == runs[1].token_ids else 1


def _example(name: str) -> Path:
    path = EXAMPLES / name
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist: run the demo from the repository, or give --document and --question"
        )
    return path


def _demo_model() -> Path:
    from prefold.convert.demo import DEFAULT_FOLDER, demo_model

    return demo_model(DEFAULT_FOLDER, progress=lambda line: print(line, file=sys.stderr, flush=True))


def _prompt(model: Path, document: str, question: str) -> list[int]:
    from prefold.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    message = {"role": "user", "content": f"{document}\n\n{question}"}
    return tokenizer.encode(tokenizer.apply_chat_template([message]), add_special_tokens=False)


def _run(console: Console, model: Path, prompt: list[int], params: SamplingParams, ranks: int) -> DemoRun:
    """Load the model on that many ranks, generate, and say how long the first token took."""
    from prefold.cli.demo_picture import DemoRun
    from prefold.engine.llm import LLM

    name = "1 rank" if ranks == 1 else f"{ranks} ranks"
    with (
        make_progress(name) as progress,
        LLM(
            str(model),
            prefill_context_parallel_size=ranks,
            threads_per_rank=1,
            max_model_len=len(prompt) + (params.max_tokens or 0),
            max_num_batched_tokens=STEP_TOKENS,
            max_num_seqs=1,
        ) as llm,
    ):
        result = run_requests(llm.engine, [prompt], params, progress)
        run = DemoRun(name, llm.engine.config, result)
    rate = len(prompt) / run.ttft_s
    console.print(f"{name + ':':9} first token after {run.ttft_s:.1f} s ({rate:,.0f} prompt tokens/s)")
    return run
