"""Prints the report of `prefold bench latency` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefold.cli.screen import make_console


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The report of `benchmark.latency.measure_latency`, on stdout unless `console` is given."""
    console = make_console() if console is None else console
    rows = report["rows"]
    repeats = report["repeats"]
    cached, batch = report["cached_prefix_len"], report["batch_size"]
    console.print(
        f"{report['model']}: "
        + (f"{batch:,} prompts at once of " if batch > 1 else "")
        + (f"{cached:,} cached + " if cached else "")
        + f"{report['input_len']:,} tokens in, {report['output_len']:,} out, "
        f"medians of {repeats} repeat{'s' if repeats > 1 else ''}"
    )
    console.print()
    console.print(_prefill_table(rows, report["prefill_flops"], batch))
    console.print()
    if report["output_len"] > 1:
        console.print(_decode_table(rows, batch))
        console.print()
    console.print(_ranks_table(rows))
    console.print()
    console.print(_matmul_table(report["matmul_rates"]))
    _print_notes(console, rows)


def _table(title: str, *columns: str) -> Table:
    """Names to the left, figures to the right, no frame."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 1)
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i else "left", no_wrap=column != "layout")
    return table


def _prefill_table(rows: list[dict[str, Any]], flops: dict[str, int], batch: int) -> Table:
    what = "Mean time to first token" if batch > 1 else "Time to first token"
    title = (
        f"{what} ({_giga(flops['total'])} GFLOP: {_giga(flops['attention'])} in "
        f"attention, {_giga(flops['matmul'])} in everything else)"
    )
    table = _table(title, "layout", "TTFT s", "min-max", "tokens/s", "speed-up", "GFLOP/s", "of matmul")
    for row in rows:
        table.add_row(
            Text(row["layout"]),
            f"{row['ttft_s']['median']:.3f}",
            _extremes(row["ttft_s"], 1.0, 3),
            f"{row['prefill_tokens_per_s']:,.0f}",
            f"{row['ttft_speedup']:.2f}",
            _giga(row["flops_per_s"]),
            f"{row['matmul_share']:.0%}",
        )
    return table


def _decode_table(rows: list[dict[str, Any]], batch: int) -> Table:
    title = "Time per output token" + (f" while all {batch} prompts decode" if batch > 1 else "")
    table = _table(title, "layout", "TPOT ms", "min-max", "tokens/s", "speed-up")
    for row in rows:
        table.add_row(
            Text(row["layout"]),
            f"{row['tpot_s']['median'] * 1000:.1f}",
            _extremes(row["tpot_s"], 1000.0, 1),
            f"{row['decode_tokens_per_s']:,.1f}",
            f"{row['tpot_speedup']:.2f}",
        )
    return table


def _ranks_table(rows: list[dict[str, Any]]) -> Table:
    columns = ("ranks x threads", "compute", "sent per rank", "peak memory", "tokens per rank")
    table = _table("Ranks", "layout", *columns)
    for row in rows:
        sent, memory, tokens = row["bytes_sent"], row["peak_memory_bytes"], row["rank_tokens"]
        table.add_row(
            Text(row["layout"]),
            f"{row['world_size']} x {row['threads_per_rank']}",
            row["compute_dtype"],
            "-" if sent is None else f"{sum(sent.values()) / 1e6:,.1f} MB",
            "-" if memory is None else f"{memory / 1e6:,.0f} MB",
            "-" if tokens is None else _counts(tokens),
        )
    return table


def _matmul_table(rates: list[dict[str, Any]]) -> Table:
    title = "Matrix multiplication in the same run; gain: side by side over alone"
    table = _table(title, "processes x threads", "dtype", "GFLOP/s", "gain")
    for rate in rates:
        gain = f"{rate['gain_over_one_process']:.2f}" if rate["processes"] > 1 else "-"
        shape = f"{rate['processes']} x {rate['threads']}"
        table.add_row(shape, rate["dtype"], _giga(rate["flops_per_s"]), gain)
    return table


def _print_notes(console: Console, rows: list[dict[str, Any]]) -> None:
    if len(rows) < 2:
        return
    others = [row["layout"] for row in rows if not row["same_tokens"]]
    console.print()
    if others:
        # Random prompts end in near-ties, which rounding decides: no error by itself.
        console.print(Text(f"Greedy tokens differ from the first row's: {', '.join(others)}"))
    else:
        console.print("All rows generated the same tokens.")


def _counts(values: list[int]) -> str:
    """Few values as they are, many by their extremes.

    >>> _counts([7, 8]), _counts([3] * 8), _counts([3, 4, 4, 5])
    ('7 8', '8 x 3', '4 x 3-5')
    """
    if len(values) <= 2:
        return " ".join(map(str, values))
    least, most = min(values), max(values)
    return f"{len(values)} x {least}" + (f"-{most}" if most > least else "")


def _extremes(values: dict[str, Any], scale: float, digits: int) -> str:
    return f"{values['min'] * scale:.{digits}f}-{values['max'] * scale:.{digits}f}"


def _giga(value: float) -> str:
    """In billions, to a sensible number of digits."""
    return f"{value / 1e9:,.0f}" if value >= 1e11 else f"{value / 1e9:.3g}"
