"""Prints the report of `prefold doctor` for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from prefold.cli.screen import make_console


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """The report of `benchmark.doctor.examine`, on stdout unless `console` is given."""
    console = make_console() if console is None else console
    for table in (
        _machine(report),
        _software(report),
        _rates(report["rates"]),
        _collectives(report["collectives"]),
    ):
        console.print(table)
        console.print()
    if not report["advice"]:
        console.print("Nothing to change.")
        return
    advice = _table("What to change", "", "")
    for each in report["advice"]:
        advice.add_row(Text(each["name"], style="bold yellow"), Text(each["text"]))
    console.print(advice)


def _table(title: str, *columns: str, right: int = 100) -> Table:
    """Without a frame; columns from number `right` on are figures."""
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1),
        show_header=any(columns),
    )
    for i, column in enumerate(columns):
        table.add_column(column, justify="right" if i >= right else "left", no_wrap=i == 0 or i >= right)
    return table


def _machine(report: dict[str, Any]) -> Table:
    facts = report["machine"]
    table = _table("Machine", "", "")
    quota = facts["cpu_quota"]
    table.add_row(
        "processor", f"{facts['cpu']} ({' '.join(facts['flags']) or 'no vector instructions known'})"
    )
    table.add_row("cores", f"{len(facts['cores'])}: {_short(facts['cores'])}")
    table.add_row(
        "hyper-threads",
        "; ".join(map(_short, facts["siblings"])) or "no two cores are one, as far as the system tells",
    )
    table.add_row("memory nodes", "; ".join(map(_short, facts["numa_nodes"])) or "unknown")
    table.add_row("CPU quota", "none" if quota is None else f"{quota:g} processors")
    for count, cores in facts["cores_of_ranks"].items():
        table.add_row(
            f"{count} rank{'s' if count != '1' else ''}", "on cores " + "; ".join(map(_short, cores))
        )
    limit = "" if facts["memory_limit"] is None else f", limit {_gib(facts['memory_limit'])}"
    table.add_row("memory", f"{_gib(facts['memory_available'])} of {_gib(facts['memory'])} are free{limit}")
    table.add_row("huge pages", facts["huge_pages"] or "unknown")
    table.add_row("governor", facts["governor"] or "unknown")
    return table


def _software(report: dict[str, Any]) -> Table:
    software, facts = report["software"], report["machine"]
    sets = software["instruction_sets"]
    table = _table("Software", "", "")
    gpu = "a GPU" if facts["sees_gpu"] else "no GPU"
    table.add_row("torch", f"{software['torch']}, sees {gpu}")
    if sets:
        kernels = f"{software['kernels']} (this processor has {', '.join(sets)})"
        table.add_row("kernels", f"{kernels}; {facts['kernel_threads']} threads")
    else:
        table.add_row("kernels", "none, torch does the work")
    table.add_row("computes in", f"{facts['compute_dtype']}: {report['software']['compute_dtype_reason']}")
    return table


def _rates(rates: list[dict[str, Any]]) -> Table:
    threads = sorted({rate["threads"] for rate in rates})
    names = [f"{n} thread{'s' if n > 1 else ''}" for n in threads]
    table = _table("Rates, best of several runs", "", "", *names, "", right=2)
    rows: dict[tuple[str, str], list[str]] = {}
    for rate in rates:
        rows.setdefault((rate["what"], rate["of"]), []).append(f"{rate['rate'] / 1e9:,.1f}")
    units = {rate["what"]: "G" + rate["unit"] for rate in rates}
    for (what, of), values in rows.items():
        table.add_row(what, of, *values, units[what])
    return table


def _collectives(found: dict[str, dict[str, Any]]) -> Table:
    table = _table("Two ranks", "", "all-gather GB/s", "all-reduce GB/s", "barrier us", right=1)
    for asked, result in found.items():
        name = {"shm": "shared memory", "gloo": "gloo"}[asked]
        table.add_row(
            name if result["is"] == asked else f"{name}: not here",
            f"{result['all_gather'] / 1e9:.2f}",
            f"{result['all_reduce'] / 1e9:.2f}",
            f"{result['barrier_s'] * 1e6:,.1f}",
        )
    return table


def _short(cores: list[int]) -> str:
    """
    >>> _short([0, 1, 2, 5])
    '0-2,5'
    """
    ranges: list[list[int]] = []
    for core in cores:
        if ranges and core == ranges[-1][1] + 1:
            ranges[-1][1] = core
        else:
            ranges.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.1f} GiB"
