"""`prefold doctor`: what this machine is and can do, and what about it costs speed."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass

from prefold.cli.options import Flag


@dataclass(frozen=True)
class DoctorArgs:
    """Look at this machine: which kernels run and why, what they reach, and what to change.

    Measures matrix multiplication, attention, products of one row (decoding), memory, and what two
    ranks exchange; takes about 20 s, and no model. docs/performance.md says what the figures mean, and what
    to do about each piece of advice.

    Attributes:
        quick: Take a few seconds, and figures that are less certain.
        json: Print one JSON object instead of tables, with all numbers.
    """

    quick: Flag = False
    json: Flag = False


def run(args: DoctorArgs) -> int:
    from prefold.benchmark.doctor import examine
    from prefold.benchmark.side import SideError
    from prefold.cli.doctor_table import print_report

    try:
        report = examine(args.quick, lambda what: print(f"doctor: {what}", file=sys.stderr, flush=True))
    except SideError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if args.json:
        print(json.dumps(report, indent=2))
    else:
        print_report(report)
    return 0
