"""What `prefold demo` prints: head, answer, times, and a picture of who computed what."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from prefold.cli.run import RunResult
from prefold.config import EngineConfig
from prefold.distributed.pcp_layout import partition

RANK_STYLES = (
    "white on blue",
    "black on yellow",
    "black on green",
    "white on magenta",
    "black on cyan",
    "white on red",
    "black on white",
    "white on bright_black",
)
"""Colours of the ranks; each cell shows the rank's number as well."""

PICTURE_ROWS = 10


@dataclass
class DemoRun:
    """One run: how it was laid out and what came of it."""

    name: str
    config: EngineConfig
    result: RunResult

    @property
    def ttft_s(self) -> float:
        ttft_s = self.result.outputs[0].metrics.ttft_s
        assert ttft_s is not None
        return ttft_s

    @property
    def token_ids(self) -> list[int]:
        return self.result.outputs[0].outputs[0].token_ids


def print_head(
    console: Console, model: str, document: str, num_tokens: int, question: str, ranks: int
) -> None:
    head = Table.grid(padding=(0, 2))
    head.add_row("model", Text(model))
    head.add_row("document", Text(f"{document}, with the question {num_tokens:,} tokens"))
    head.add_row("question", Text(question.removeprefix("Question: ")))
    head.add_row("threads", f"one per rank in both runs: 1 rank has one core, {ranks} ranks have {ranks}")
    console.print(Text(f"One long prompt, prefilled by 1 rank and by {ranks}", style="bold"))
    console.print()
    console.print(head)
    console.print()


def print_outcome(console: Console, runs: list[DemoRun]) -> None:
    """Answer, times, picture, work per rank and whether the two runs agree."""
    one, many = runs
    _section(console, "Answer")
    console.print(Padding(Text(many.result.outputs[0].outputs[0].text.strip()), (0, 0, 0, 2), expand=False))
    _section(console, "Time to first token")
    for run in runs:
        bar = "━" * max(1, round(50 * run.ttft_s / max(r.ttft_s for r in runs)))
        gain = f"  {one.ttft_s / many.ttft_s:.2f} times as fast" if run is many else ""
        console.print(Text(f"  {run.name:9}{run.ttft_s:7.1f} s  ") + Text(bar, "cyan") + Text(gain, "bold"))
    _print_picture(console, many)
    _print_work(console, many)
    console.print()
    same = one.token_ids == many.token_ids
    verdict = Text("yes", "bold green") if same else Text("NO", "bold red")
    count = f", all {len(one.token_ids)}" if same else ""
    console.print(Text("Tokens identical: ") + verdict + Text(count))


def _section(console: Console, title: str) -> None:
    console.print()
    console.print(Text(title, style="bold"))


def rank_of_tokens(ends: list[int], ranks: int, min_split_tokens: int) -> np.ndarray:
    """[ends[-1]] the PCP rank of each prompt token, for a prompt prefilled alone in steps up to `ends`."""
    rank_of = np.full(ends[-1] if ends else 0, -1)
    for start, end in zip([0, *ends], ends):
        step = partition(
            np.array([start]), np.array([end - start]), np.array([True]), ranks, min_split_tokens
        )
        for rank, first, last in zip(step.row_rank, step.row_start, step.row_end):
            rank_of[first:last] = rank
    return rank_of


def picture(rank_of: np.ndarray, columns: int, rows: int) -> list[Text]:
    """The causal triangle: a column is a part of the prompt, its height the keys that it attends to.

    Every cell shows the rank that computes it, as a digit and in its colour.
    """
    num_tokens = len(rank_of)
    # The token in the middle of each column stands for it.
    middle = ((np.arange(columns) + 0.5) * num_tokens / columns).astype(int)
    height = np.ceil((middle + 1) * rows / num_tokens).astype(int)
    lines = []
    for level in range(rows, 0, -1):
        line = Text()
        for rank, top in zip(rank_of[middle], height):
            line.append(*((str(rank), RANK_STYLES[rank % len(RANK_STYLES)]) if top >= level else (" ",)))
        lines.append(line)
    return lines


def _print_picture(console: Console, run: DemoRun) -> None:
    result, config = run.result, run.config
    ranks = config.parallel.prefill_context_parallel_size
    rank_of = rank_of_tokens(result.prefill_ends, ranks, config.runtime.min_split_tokens)
    drawn = np.bincount(rank_of, minlength=ranks).tolist()
    assert drawn == result.prefill_rank_tokens, (drawn, result.prefill_rank_tokens)
    steps = len(result.prefill_ends)
    _section(console, f"Who computed what ({steps} step{'s' if steps > 1 else ''}; the digit is the rank)")
    columns = console.width - 16
    for i, line in enumerate(picture(rank_of, columns, PICTURE_ROWS)):
        label = {0: "all keys", PICTURE_ROWS - 1: "first keys"}.get(i, "")
        console.print(Text(f"  {label:>10}  ") + line, no_wrap=True, crop=True)
    left, right = "token 0", f"token {len(rank_of) - 1:,}"
    console.print(" " * 14 + left + right.rjust(columns - len(left)))


def _print_work(console: Console, run: DemoRun) -> None:
    """Tokens and (query, key) pairs per rank, as the engine counted them."""
    tokens, pairs = run.result.prefill_rank_tokens, run.result.prefill_rank_pairs
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("", "tokens", "causal work (query-key pairs)", "share of the work"):
        table.add_column(column, justify="right" if column else "left")
    for rank, (count, work) in enumerate(zip(tokens, pairs)):
        table.add_row(f"rank {rank}", f"{count:,}", f"{work:,}", f"{work / sum(pairs):.1%}")
    console.print()
    console.print(Padding(table, (0, 0, 0, 2), expand=False))
