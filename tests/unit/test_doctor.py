"""`prefold doctor`: what it advises for which machine, and one run on this one."""

from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
import torch

from prefold.benchmark.doctor_facts import Facts, advise, gather, measured_advice
from prefold.cli.doctor_table import print_report
from prefold.cli.main import main
from prefold.cli.screen import make_console
from prefold.kernels import dense

GOOD = Facts(
    cpu="A processor", flags=("avx2",), cores=(0, 1, 2, 3), numa_nodes=((0, 1, 2, 3),), kernel_threads=4
)


def test_a_good_machine_needs_no_advice() -> None:
    assert advise(GOOD) == []
    assert measured_advice(stolen=0.0, noise=0.1) == measured_advice(stolen=None, noise=0.0) == []
    assert advise(replace(GOOD, cpu_quota=4.0, huge_pages="never", governor="performance")) == []


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"siblings": ((0, 2), (1, 3))}, "hyper-threads", "taskset -c 0,1"),
        ({"siblings": ((0, 1),)}, "hyper-threads", "taskset -c 0,2,3"),
        ({"cores": (5,)}, "one core", "share one core"),
        ({"cpu_quota": 1.5}, "CPU quota", "time of 1.5 processors, but 4 cores"),
        ({"numa_nodes": ((0, 1), (2, 3))}, "NUMA", "2 memory nodes"),
        ({"kernel_problem": "They were not built."}, "no kernels", "They were not built."),
        ({"kernel_problem": "Not built.", "has_compiler": False}, "no kernels", "install g++"),
        ({"kernel_threads": 1}, "no OpenMP", "1 of 4 threads"),
        ({"governor": "powersave"}, "powersave", "cpupower"),
        ({"memory_available": 1 << 30, "memory_limit": 3 << 30}, "low memory", "1.0 GiB are free of 3.0 GiB"),
        ({"torch_has_cuda": True}, "CUDA", "sees no GPU"),
    ],
)
def test_advice(changes: dict, name: str, words: str) -> None:
    (advice,) = advise(replace(GOOD, **changes))
    assert advice.name == name
    assert words in advice.text


def test_advice_from_the_measurement() -> None:
    names = [advice.name for advice in measured_advice(stolen=0.1, noise=0.5)]
    assert names == ["stolen time", "noise"]
    assert "10%" in measured_advice(0.1, 0.0)[0].text
    assert "50%" in measured_advice(None, 0.5)[0].text


def test_a_run_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--quick", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert "doctor: exchange between two ranks" in printed.err
    assert report["machine"]["cores"] == list(gather().cores)
    assert report["software"]["kernels"] == dense.describe(getattr(torch, report["machine"]["compute_dtype"]))
    assert report["machine"]["cores_of_ranks"]["1"] == [report["machine"]["cores"]]
    measured = {(rate["what"], rate["of"]) for rate in report["rates"]}
    assert {what for what, _ in measured} == {"matmul", "attention", "decode row", "memory"}
    assert ("attention", "kernel") in measured or report["machine"]["kernel_problem"]
    assert all(rate["rate"] > 0 and rate["noise"] >= 0 for rate in report["rates"])
    assert set(report["collectives"]) == {"shm", "gloo"}
    for result in report["collectives"].values():
        assert min(result[name] for name in ("all_gather", "all_reduce", "barrier_s")) > 0

    out = io.StringIO()
    report["advice"] = [{"name": "noise", "text": "Others are [busy]."}]
    report["software"] |= {"kernels": "native, avx512; attention by amx_bf16", "instruction_sets": ["avx512"]}
    print_report(report, make_console(out))
    text = out.getvalue()
    words = (
        "Machine",
        "Software",
        "computes in",
        "1 thread",
        "shared memory",
        "native, avx512; attention by amx_bf16",
        "Others are [busy].",
    )
    for word in words:
        assert word in text
    assert max(map(len, text.splitlines())) <= 100
    report["advice"] = []
    out = io.StringIO()
    print_report(report, make_console(out))
    assert "Nothing to change." in out.getvalue()
