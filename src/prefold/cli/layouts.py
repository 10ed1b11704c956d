"""`prefold layouts`: which parallel layouts a model can have on a number of ranks, and why not others."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from prefold.checkpoint_files import TensorEntry, check_checkpoint_files
from prefold.cli.options import Flag, number
from prefold.config import ModelConfig, ParallelConfig
from prefold.distributed.layouts import (
    Layout,
    Refusal,
    explain_illegal,
    layout_options,
    legal_layouts,
)
from prefold.engine.weight_memory import with_weight_memory
from prefold.hf_config import load_model_config

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class LayoutsArgs:
    """List the parallel layouts that a model can have on N ranks, and why others are impossible.

    One layout per mesh DP x PP x PCP x TP, the most sensible DCP and EP with it, those to try first on top.
    Only config.json is needed, or a GGUF file; no weight is read. docs/choosing_a_layout.md explains the
    axes.

    Attributes:
        model: Folder of a Hugging Face checkpoint, or a GGUF file.
        world: Ranks.
        kv_cache_dtype: How the KV cache is stored. auto is the checkpoint's dtype.
        weight_memory: Whether quantised weights count as they are stored or expanded. auto: as a start on
            this machine would choose for the layout. Where there is only config.json they count as expanded.
        all: Every legal combination with DCP and EP.
        json: Print one JSON object, with every legal combination, instead of the table.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    world: Annotated[int, number()]
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8_e4m3", "bf16", "fp8"] = "auto"
    weight_memory: Literal["auto", "expanded", "quantized"] = "auto"
    all: Flag = False
    json: Flag = False


def run(args: LayoutsArgs) -> int:
    model = load_model_config(args.model)
    layouts = sorted(legal_layouts(model, args.world, args.kv_cache_dtype), key=preference)
    if entries := stored_tensors(model.path, args.weight_memory):
        layouts = with_weight_memory(layouts, args.weight_memory, model, entries, args.kv_cache_dtype)
    refusals = explain_illegal(model, args.world)
    if args.json:
        report = {
            "model": model.path,
            "world": args.world,
            "layouts": [as_json(layout) for layout in layouts],
            "illegal": [{"options": layout_options(r.parallel), "reason": r.reason} for r in refusals],
        }
        print(json.dumps(report))
        return 0
    from prefold.cli.screen import make_console

    shown = layouts if args.all else best_of_meshes(layouts)
    print_report(make_console(), model, args.world, shown, len(layouts), refusals)
    return 0


def stored_tensors(path: str, weight_memory: str) -> dict[str, TensorEntry]:
    """Of the checkpoint; empty if there is only its config, unless its weights must be known."""
    try:
        return check_checkpoint_files(path)
    except ValueError:
        if weight_memory == "quantized":
            raise
        return {}


def preference(layout: Layout) -> tuple[int, ...]:
    """Sort key, the layout to try first lowest: all ranks on one prompt, KV and experts spread.

    KV is spread over the PCP ranks, where no query has to travel for it; experts are spread wherever there
    are several ranks to spread them over, and none of these would be left without.
    """
    parallel = layout.parallel
    dcp, pcp = layout.kv_shards, parallel.prefill_context_parallel_size
    spread = parallel.data_parallel_size * parallel.plane_size
    wants_ep = spread > 1 and layout.experts_per_rank[0] > 0
    return (
        _section(parallel),
        parallel.data_parallel_size,
        parallel.pipeline_parallel_size,
        parallel.tensor_parallel_size,
        int(parallel.enable_expert_parallel != wants_ep),
        abs(dcp - pcp),
    )


def best_of_meshes(layouts: Iterable[Layout]) -> list[Layout]:
    """The first layout of each mesh, in order of appearance."""
    best: dict[tuple[int, ...], Layout] = {}
    for layout in layouts:
        parallel = layout.parallel
        mesh = (
            parallel.data_parallel_size,
            parallel.pipeline_parallel_size,
            parallel.prefill_context_parallel_size,
        )
        best.setdefault(mesh, layout)
    return list(best.values())


def _section(parallel: ParallelConfig) -> int:
    """Which kind of layout it is, those to try first lowest; see `why`."""
    if parallel.data_parallel_size > 1:
        return 4
    if parallel.pipeline_parallel_size > 1:
        return 3
    if parallel.tensor_parallel_size == 1:
        return 0
    return 1 if parallel.prefill_context_parallel_size > 1 else 2


def why(parallel: ParallelConfig) -> str:
    """What a layout of this kind is good for."""
    if parallel.world_size == 1:
        return "One rank, in the process that asks"
    return (
        "PCP: all ranks prefill one prompt together; each holds all weights, except experts under -ep",
        "PCP x TP: the same, with heads and their weights split over TP",
        "TP: all ranks compute all tokens; the least weights per rank; KV is repeated unless -dcp spreads it",
        "PP: stages of layers; less weights and KV per rank; chunks of a prompt follow each other",
        "DP: replicas for more requests at once; a prompt has 1/DP of the ranks",
    )[_section(parallel)]


def as_json(layout: Layout) -> dict[str, Any]:
    parallel = layout.parallel
    return {
        "options": layout_options(parallel),
        "dp": parallel.data_parallel_size,
        "pp": parallel.pipeline_parallel_size,
        "pcp": parallel.prefill_context_parallel_size,
        "tp": parallel.tensor_parallel_size,
        "dcp": parallel.decode_context_parallel_size,
        "ep": parallel.enable_expert_parallel,
        "kv_shards": layout.kv_shards,
        "kv_copies": layout.kv_copies,
        "kv_bytes_per_token_per_rank": layout.kv_bytes_per_token,
        "experts_per_rank": list(layout.experts_per_rank),
        "expert_width": layout.expert_width,
        "heads_per_rank": layout.heads_per_rank,
        "layers_per_stage": list(layout.layers_per_stage),
        "weight_bytes_per_rank": layout.weight_bytes,
        "weights_stay_quantized": layout.weights_stay_quantized,
        "why": why(parallel),
    }


HEADERS = (
    "",
    "KV\nshards",
    "KV\ncopies",
    "KV bytes\nper token",
    "\nheads",
    "\nexperts",
    "\nlayers",
    "\nweights",
)


def print_report(
    console: Console,
    model: ModelConfig,
    world: int,
    layouts: list[Layout],
    num_legal: int,
    refusals: list[Refusal],
) -> None:
    """Tables for people: what is legal (`layouts`, of `num_legal` in all), then what is not."""
    from rich.text import Text

    def say(text: str, style: str = "", indent: str = "") -> None:
        lines = textwrap.wrap(text, console.width - len(indent), break_on_hyphens=False)
        console.print(Text("\n".join(indent + line for line in lines), style=style))

    say(f"{model.path} on {world} rank{'s' if world > 1 else ''}")
    console.print()
    if not layouts:
        say("No layout is legal on that many ranks.")
    else:
        _print_tables(console, model, layouts)
        console.print()
        say(f"To try first: {layout_options(layouts[0].parallel)}")
        if num_legal > len(layouts):
            others = num_legal - len(layouts)
            say(
                f"Besides, there are {others} with other DCP sizes or with EP the other way round: see --all."
            )
        say(
            "KV shards: ranks that share the KV of a sequence. KV copies: ranks of a stage with the same "
            "part of it. The other columns are about one rank, the fullest: bytes of KV per token of a "
            "sequence, attention heads, experts of a layer, layers, bytes of weights."
            + " q: quantised weights stay as they are stored."
            * any(x.weights_stay_quantized for x in layouts)
        )
    if refusals:
        console.print()
        say("Not possible here", style="bold")
        for refusal in refusals:
            say(layout_options(refusal.parallel))
            say(refusal.reason, indent="    ")


def _print_tables(console: Console, model: ModelConfig, layouts: list[Layout]) -> None:
    """One table per kind of layout, their columns aligned."""
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(layout, model) for layout in layouts]
    widths = [
        max(len(line) for cells in [HEADERS, *rows] for line in cells[column].splitlines() or [""])
        for column in range(len(HEADERS))
    ]
    gap = 2 if sum(widths) + 2 * len(widths) <= console.width else 1
    widths[0] = min(widths[0], console.width - sum(widths[1:]) - gap * (len(widths) - 1))

    def table_of(lines: Iterable[tuple[str, ...]]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=False)
        for column, width in enumerate(widths):
            table.add_column(justify="right" if column else "left", width=width)
        for cells in lines:
            table.add_row(*map(Text, cells))
        return table

    console.print(table_of([HEADERS]))
    for reason, group in groupby(zip(layouts, rows), lambda row: why(row[0].parallel)):
        console.print()
        console.print(Text(textwrap.fill(reason, console.width), style="bold"))
        console.print(table_of(cells for _, cells in group))


def _cells(layout: Layout, model: ModelConfig) -> tuple[str, ...]:
    return (
        layout_options(layout.parallel),
        str(layout.kv_shards),
        str(layout.kv_copies),
        f"{layout.kv_bytes_per_token:,}",
        str(layout.heads_per_rank),
        _experts(layout, model),
        _span(layout.layers_per_stage),
        _size(layout.weight_bytes) + " q" * layout.weights_stay_quantized,
    )


def _experts(layout: Layout, model: ModelConfig) -> str:
    """Routed experts on a rank: "32", "0-1", or "64 x 1/8" where a rank has a part of each."""
    if model.moe is None or layout.experts_per_rank == (0, 0):
        return "-"
    part = model.moe.intermediate_size // layout.expert_width
    return _span(layout.experts_per_rank) + (f" x 1/{part}" if part > 1 else "")


def _span(numbers: tuple[int, ...]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low}-{high}"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:,.1f} MB"
