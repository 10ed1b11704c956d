"""`/dashboard` in a browser, over a server of two ranks: the picture is what pcp_layout says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest

from prefold.distributed.pcp_layout import partition
from prefold.metrics import EngineSnapshot, RowParts, StepRecord, Totals
from prefold.server.dashboard import SAMPLE_S, WINDOW_S, History, shown_steps
from prefold.testing.checkpoints import make_checkpoint

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
)
NAME = "<img id=evil src=x onerror=alert(1)>"
KEY = "s3cret"
PROMPT = [5 + i % 200 for i in range(200)]
STEP = 128
"""Tokens of a step: what two ranks compute."""


@dataclass
class Server:
    url: str
    process: subprocess.Popen[str]
    trace: Path

    def post(self, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {KEY}"}
        return httpx.post(f"{self.url}/v1/completions", json=body, headers=headers, timeout=120)

    def stream(self, **body: Any) -> AbstractContextManager[httpx.Response]:
        """An answer that has begun to arrive; leaving it aborts the request."""
        headers = {"authorization": f"Bearer {KEY}"}
        url = f"{self.url}/v1/completions"
        return httpx.stream("POST", url, json=body | {"stream": True}, headers=headers, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, headers={"authorization": f"Bearer {KEY}"}, timeout=60)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("dashboard")
    folder = make_checkpoint("DeepseekV3ForCausalLM", root / "model", num_hidden_layers=2)
    command = [
        *(sys.executable, "-m", "prefold", "serve", str(folder), "--port", "0", "-pcp", "2"),
        *("--served-model-name", NAME, "--api-key", KEY, "--trace", str(root / "trace.json")),
        *("--threads-per-rank", "1", "--block-size", "4", "--num-blocks", "400", "--max-model-len", "1200"),
        *("--max-num-batched-tokens", str(STEP // 2), "--drain-timeout", "1"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    output = process.stdout
    assert output is not None
    lines: list[str] = []
    try:
        for line in output:
            lines.append(line)
            if found := re.match(r"Serving .* at (\S+)", line):
                break
        else:
            raise AssertionError("".join(lines))
        reader = threading.Thread(target=lambda: lines.extend(output), daemon=True)
        reader.start()
        yield Server(found[1], process, root / "trace.json")
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()
    reader.join(5)
    output.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip(f"no browser is installed: none of {', '.join(BROWSERS)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=list(QUIET))
        yield browser
        browser.close()


@dataclass
class Watched:
    """A page, and what its console complains about; the answer that asks for the key is no complaint."""

    page: Any
    errors: list[str]


def open_page(browser: Any, url: str, **context: Any) -> Watched:
    page = browser.new_context(**context).new_page()
    watched = Watched(page, [])

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning") and "401" not in message.text:
            watched.errors.append(message.text)

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("dialog", lambda dialog: watched.errors.append("a dialog opened"))
    page.goto(f"{url}/dashboard")
    return watched


def enter_key(page: Any, key: str) -> None:
    page.locator("#key-input").fill(key)
    page.locator("#key button").click()


def split(start: int, end: int) -> list[tuple[int, int, int]]:
    """(start, end, rank) of the parts of one prompt's step over two ranks, by position."""
    parts = partition(np.array([start]), np.array([end - start]), np.array([True]), 2, min_split_tokens=32)
    rows = zip(parts.row_start.tolist(), parts.row_end.tolist(), parts.row_rank.tolist())
    return sorted(rows)


def drawn(page: Any) -> list[tuple[int, int, int]]:
    parts = page.locator("#picture rect.part").evaluate_all("nodes => nodes.map(n => ({...n.dataset}))")
    return [(int(p["start"]), int(p["end"]), int(p["rank"])) for p in parts]


def test_the_page_shows_a_request_and_who_computes_it(browser: Any, server: Server):
    watched = open_page(browser, server.url, viewport={"width": 1280, "height": 900})
    page = watched.page
    page.locator("#key").wait_for(state="visible")
    enter_key(page, "wrong")
    page.get_by_text("That key was not accepted.").wait_for()
    enter_key(page, KEY)
    page.locator("#main").wait_for(state="visible")
    assert page.locator("#model").inner_text() == NAME
    assert page.locator("#layout").inner_text() == "PCP 2"
    assert page.locator("#evil").count() == 0

    with server.stream(model=NAME, prompt=PROMPT, max_tokens=900, ignore_eos=True):
        page.locator("#tile-running .value").get_by_text("1", exact=True).wait_for()
        page.locator("#picture .names").get_by_text(f"{STEP} to 200 of 200 tokens").wait_for()
        second = split(STEP, len(PROMPT))
        assert drawn(page) == second
        assert [rank for _, _, rank in second] == [second[0][2], second[1][2], second[0][2]]
        assert (
            page.locator("#picture .names b").inner_text() == page.locator("#running .names b").inner_text()
        )
        check_ranks(page, second)
        assert page.locator("#triangle polygon").count() == len(second)
        assert page.locator("#layers rect").count() == 2
        assert page.locator("#collectives").get_by_text("pcp.all_gather").count() == 1

        choose_first_step(page)
        assert drawn(page) == split(0, STEP)
        check_ranks(page, split(0, STEP))
        page.locator("#follow").click()
    # It has been left, and thereby aborted.
    page.locator("#running").get_by_text("Nobody asks for anything.").wait_for()
    assert server.post(model=NAME, prompt=PROMPT, max_tokens=1).status_code == 200
    page.locator("#ttft circle").first.wait_for(state="attached")
    page.locator("#words summary").click()
    page.get_by_text("PCP 2: every prompt is prefilled by 2 ranks at once").wait_for()
    assert watched.errors == []
    page.context.close()


def choose_first_step(page: Any) -> None:
    """An arrow to the left of the prompt's second step, which is shown."""
    page.locator("#steps").focus()
    page.locator("#steps").press("ArrowLeft")
    page.locator("#step-title").get_by_text("Step 0:").wait_for()


def check_ranks(page: Any, parts: list[tuple[int, int, int]]) -> None:
    """The table beside the picture, from the ranks' own counts."""
    for rank in range(2):
        cells = page.locator(f"#ranks tr[data-rank='{rank}'] td").all_inner_texts()
        tokens = sum(end - start for start, end, of in parts if of == rank)
        pairs = sum(p + 1 for start, end, of in parts if of == rank for p in range(start, end))
        assert [cell.strip().replace(",", "") for cell in cells[:3]] == [str(rank), str(tokens), str(pairs)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_need_not_scroll_sideways(browser: Any, server: Server, scheme: str):
    watched = open_page(browser, server.url, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    page = watched.page
    enter_key(page, KEY)
    page.locator("#main").wait_for(state="visible")
    page.locator("#words summary").click()
    page.wait_for_timeout(100)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    lightness = sum(map(int, re.findall(r"\d+", background)[:3])) / 3
    assert (lightness > 200) == (scheme == "light")
    page.reload()
    page.locator("#main").wait_for(state="visible")
    assert watched.errors == []
    page.context.close()


def test_what_needs_the_key(server: Server):
    for path in ("/dashboard", "/dashboard/app.js", "/dashboard/charts.js", "/dashboard/style.css"):
        response = httpx.get(server.url + path)
        assert response.status_code == 200
        assert "default-src 'none'" in response.headers["content-security-policy"]
        assert "://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", response.text), (
            "nothing from elsewhere"
        )
    assert httpx.get(f"{server.url}/dashboard/data").status_code == 401
    assert httpx.get(f"{server.url}/v1/explain").status_code == 401
    assert server.get("/dashboard/data").json()["layout"]["pcp"] == 2


def test_the_other_views_of_a_server(server: Server):
    """Metrics and words, after a request of this test's own."""
    assert server.post(model=NAME, prompt=PROMPT[:50], max_tokens=4, ignore_eos=True).status_code == 200
    text = httpx.get(f"{server.url}/metrics").text
    values = dict(re.findall(r"^(prefold_\w+)(?:\{[^}]*\})? (\S+)$", text, re.MULTILINE))
    assert float(values["prefold_engine_up"]) == 1
    assert float(values["prefold_time_to_first_token_seconds_count"]) >= 1
    assert 'prefold_request_success_total{finished_reason="length"' in text
    counted = re.findall(
        r'^prefold_pcp_rank_tokens_total\{rank="\d",replica="0"\} (\S+)$', text, re.MULTILINE
    )
    assert len(counted) == 2
    assert all(float(count) > 20 for count in counted)
    explained = httpx.get(
        f"{server.url}/v1/explain", headers={"authorization": f"Bearer {KEY}", "accept": "text/plain"}
    )
    assert "A block holds 4 tokens." in explained.text


def test_the_trace_is_whole_when_the_server_has_ended(server: Server):
    """Last in this file: it ends the server."""
    assert server.post(model=NAME, prompt=PROMPT[:40], max_tokens=2, ignore_eos=True).status_code == 200
    server.process.terminate()
    server.process.wait(60)
    assert [path.name for path in server.trace.parent.glob("trace*")] == ["trace.json"]
    events = json.loads(server.trace.read_text())["traceEvents"]
    names: dict[int, set[str]] = {}
    for event in events:
        names.setdefault(event["pid"], set()).add(event["name"])
    assert sorted(names) == [0, 1, 2]
    for rank in (0, 1):
        assert {"step 0", "layer 0", "layer 1", "pcp.all_gather", "exchange"} <= names[rank]
    assert {"schedule", "wait for ranks", "update"} <= names[2]


def test_prefills_are_shown_however_many_decodes_follow():
    def step(number: int, replica: int = 0, rows: int = 0) -> StepRecord:
        row = RowParts("r", 0, 4, True, 4, [(0, 4, 0)])
        return StepRecord(number, replica, float(number), 0.1, 4 * rows, 1, 1, [row] * rows)

    steps = [step(i, rows=int(i % 100 == 3)) for i in range(256)]
    prefills = [step(i, replica=1, rows=1) for i in (1, 2)] + [s for s in steps if s.rows]
    shown = shown_steps(steps, prefills)
    numbers = [(shown_step.replica, shown_step.step_id) for shown_step in shown]
    assert numbers == [(1, 1), (1, 2), (0, 3), (0, 103), (0, 203), *((0, i) for i in range(208, 256))]
    assert len(numbers) == len(set(numbers))
    assert [s.step_id for s in shown_steps(steps[:5], steps[3:4])] == [0, 1, 2, 3, 4]


def test_history_is_thinned_and_ends():
    history = History()
    for i in range(3 * int(WINDOW_S)):
        history.add(EngineSnapshot(started_s=1, num_running=i, totals=Totals(num_prefill_tokens=i)), i / 2)
    times = [sample.time_s for sample in history.samples]
    assert times == sorted(times)
    assert max(times) - min(times) <= WINDOW_S
    assert min(b - a for a, b in pairwise(times)) >= 0.9 * SAMPLE_S
    history.add(EngineSnapshot(started_s=2, num_running=7), time.time())
    assert [sample.num_running for sample in history.samples] == [7]
