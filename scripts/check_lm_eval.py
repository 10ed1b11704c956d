"""Runs lm-evaluation-harness (`local-completions`) on a server of the demo model.

Every log-likelihood must be transformers' within 1e-3.

    scripts/check_lm_eval.py [FOLDER]    # of the harness' virtual environment, made if it is not there

The harness and what it needs take about 800 MB, which is why it is no part of the test suite;
tests/e2e/test_lm_eval_requests.py sends its requests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefold.convert.demo import demo_model
from prefold.testing.live_server import serving

ROOT = Path(__file__).parents[1]
HARNESS = "lm_eval[api]==0.4.13"
TOLERANCE = 1e-3
DOCUMENTS = [
    {"question": "The capital of France is", "choices": ["Paris", "London", "blue"], "answer": 0},
    {"question": "Water is made of hydrogen and", "choices": ["oxygen", "iron", "music"], "answer": 0},
    {"question": "The sun rises in the", "choices": ["west", "east", "evening of a long day"], "answer": 1},
    {"question": "A week has seven", "choices": ["months", "days", "colours"], "answer": 1},
]
TASK = """task: local_choices
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {file}
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
"""


def make_environment(folder: Path) -> Path:
    """Python of an environment with the harness, which finds our packages behind its own."""
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    link = next((folder / "lib").glob("python*")) / "site-packages" / "prefold_environment.pth"
    link.write_text(sysconfig.get_path("purelib") + "\n")
    found = subprocess.run([python, "-c", "import lm_eval"], capture_output=True)
    if found.returncode != 0:
        subprocess.run([python, "-m", "pip", "install", "-q", HARNESS], check=True)
    return python


def run_harness(python: Path, folder: Path, url: str, tokenizer: Path) -> list[dict[str, Any]]:
    """The samples that it logs: `arguments` and `resps` of each choice."""
    data = folder / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    (folder / "task.yaml").write_text(TASK.format(file=data))
    model = f"model=demo-model,base_url={url}/v1/completions,tokenizer={tokenizer},num_concurrent=1"
    command = [str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", model]
    command += ["--tasks", "local_choices", "--include_path", str(folder), "--batch_size", "4"]
    command += ["--output_path", str(folder / "out"), "--log_samples"]
    environment = {**os.environ, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    subprocess.run(command, check=True, env=environment)
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text().splitlines()]


@torch.inference_mode()
def expected(model: Any, tokenizer: Any, context: str, continuation: str) -> float:
    """The continuation's log-likelihood."""
    start = len(tokenizer(context)["input_ids"])
    ids = torch.tensor([tokenizer(context + continuation)["input_ids"]])
    logprobs = torch.log_softmax(model(ids).logits[0].double(), dim=-1)
    return sum(logprobs[i - 1, ids[0, i]].item() for i in range(start, ids.shape[1]))


def main() -> int:
    environment = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / ".cache/lm_eval").absolute()
    folder = demo_model(ROOT / ".cache/demo-model").absolute()
    python = make_environment(environment)
    options = ["--dtype", "float32", "--max-model-len", "2048", "--num-blocks", "140"]
    with tempfile.TemporaryDirectory() as scratch, serving(folder, *options) as server:
        samples = run_harness(python, Path(scratch), server.url, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    worst, count = 0.0, 0
    for sample in samples:
        for argument, answer in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
            context, continuation = argument["arg_0"], argument["arg_1"]
            want, got = expected(model, tokenizer, context, continuation), float(answer[0])
            print(f"{context!r} {continuation!r}: {got:.5f}, transformers {want:.5f}")
            worst, count = max(worst, abs(got - want)), count + 1
    print(f"{count} log-likelihoods, largest difference {worst:.2g} (allowed {TOLERANCE:g})")
    return 0 if count == sum(len(d["choices"]) for d in DOCUMENTS) and worst <= TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
