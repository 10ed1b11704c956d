"""`prefold generate`: text (or token ids) in, text out."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from tyro.conf import Positional, arg

from prefold.checkpoint_files import find_checkpoint
from prefold.cli.nodes import join_torchrun, run_as_node, runs_engine
from prefold.cli.options import EngineOptions, Flag, SamplingOptions, text
from prefold.cli.progress import make_progress
from prefold.cli.run import RunResult, run_requests
from prefold.request import Logprob, RequestOutput, StructuredOutputs
from prefold.tokenizer import has_tokenizer

if TYPE_CHECKING:
    from prefold.engine.llm import LLM

PROMPT_SOURCES = "--prompt TEXT, --prompt-file FILE, --prompt-token-ids FILE or - (standard input)"


@dataclass(frozen=True)
class GenerateArgs:
    """Generate text from a prompt.

    The prompt comes from exactly one of --prompt, --prompt-file, --prompt-token-ids, or from standard input
    with a dash after MODEL. The text goes to standard output, progress and messages to standard error.

    Attributes:
        model: Folder of a Hugging Face checkpoint, or a GGUF file.
        source: A dash reads the prompt from standard input.
        prompt: The prompt itself.
        prompt_file: UTF-8 text file that holds the prompt. A dash is standard input.
        prompt_token_ids: JSON file with a list of token ids, or with a list of such lists for a batch of
            prompts. The tokenizer is not used for them. A dash is standard input.
        json_schema: JSON schema that the text must follow.
        chat: Wrap the prompt in the model's chat template, as the user's message.
        json: Print one JSON object with outputs and metrics instead of the text.
        stream: Print the text as it comes.
    """

    model: Annotated[Positional[str], arg(metavar="MODEL")]
    source: Annotated[Positional[Literal["-"] | None], arg(metavar="-", help_behavior_hint="")] = None
    prompt: Annotated[str | None, text("TEXT")] = None
    prompt_file: Annotated[str | None, text("FILE")] = None
    prompt_token_ids: Annotated[str | None, text("FILE")] = None
    json_schema: Annotated[str | None, text("FILE")] = None
    chat: Flag = False
    json: Flag = False
    stream: Flag = False
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    engine: EngineOptions = field(default_factory=EngineOptions)


def run(args: GenerateArgs) -> int:
    find_checkpoint(args.model)  # first of all: a wrong path is the likeliest mistake
    params = args.sampling.to_params()
    if args.json_schema is not None:
        structured = StructuredOutputs(json_schema=_read(args.json_schema))
        params = msgspec.structs.replace(params, structured_outputs=structured)
    prompt = _read_prompt(args)
    if args.stream and args.json:
        raise ValueError("--stream prints text as it comes and --json one object at the end: choose one")
    wants_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
    if wants_logprobs and not args.json:
        raise ValueError("--logprobs and --prompt-logprobs are shown by --json only")
    if args.stream and (params.n > 1 or (not isinstance(prompt, str) and len(prompt) > 1)):
        raise ValueError("--stream shows one text: it takes one prompt and --n 1")
    engine_options = join_torchrun(args.engine)
    options = engine_options.for_llm()
    if not runs_engine(engine_options):
        return run_as_node({"model": args.model, **options})
    if not isinstance(prompt, str):
        # Without a tokenizer the ids still work; the text is empty then.
        options["skip_tokenizer_init"] = not has_tokenizer(args.model)

    from prefold.engine.llm import LLM  # with one rank this imports torch

    with make_progress() as progress, LLM(args.model, **options) as llm:
        token_ids = _encode(llm, prompt, args.chat) if isinstance(prompt, str) else prompt
        result = run_requests(llm.engine, token_ids, params, progress, _print_piece if args.stream else None)
        metrics = llm.engine.metrics
    if args.json:
        print(json.dumps(to_json(result, metrics.rank_tokens, metrics.rank_causal_pairs), ensure_ascii=False))
    elif args.stream:
        print(flush=True)
    else:
        _print_texts(result.outputs)
    return 0


def _read_prompt(args: GenerateArgs) -> str | list[list[int]]:
    """The prompt's text, or the token ids of one or more prompts. ValueError unless there is one source."""
    given = [args.source, args.prompt, args.prompt_file, args.prompt_token_ids]
    count = sum(source is not None for source in given)
    if count != 1:
        raise ValueError(f"give the prompt by exactly one of {PROMPT_SOURCES}; {count} were given")
    if args.prompt_token_ids is not None:
        if args.chat:
            raise ValueError("--chat wraps a text; --prompt-token-ids gives none")
        return _parse_token_ids(_read(args.prompt_token_ids), args.prompt_token_ids)
    prompt = args.prompt if args.prompt is not None else _read(args.prompt_file or "-")
    if not prompt:
        raise ValueError("the prompt is empty")
    return prompt


def _read(file: str) -> str:
    """A file's text, or standard input's."""
    content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        name = "standard input" if file == "-" else file
        raise ValueError(f"{name} is no UTF-8 text: byte {error.start} cannot be decoded") from None


def _parse_token_ids(text: str, file: str) -> list[list[int]]:
    expected = f"{file} must hold a JSON list of token ids, or a list of such lists"
    try:
        ids: Any = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{expected}: {error}") from None
    if isinstance(ids, list) and ids and not any(isinstance(entry, list) for entry in ids):
        ids = [ids]
    if not isinstance(ids, list) or not ids:
        raise ValueError(expected)
    for prompt in ids:
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise ValueError(expected)
    return ids


def _encode(llm: LLM, text: str, chat: bool) -> list[list[int]]:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    if not chat:
        return [tokenizer.encode(text)]
    rendered = tokenizer.apply_chat_template([{"role": "user", "content": text}])
    return [tokenizer.encode(rendered, add_special_tokens=False)]


def to_json(result: RunResult, rank_tokens: list[int], rank_causal_pairs: list[int]) -> dict[str, Any]:
    """The object that --json prints. A sample of a prompt is an entry of its own, in the prompts' order.

    `ttft_s` is the time to the first token of the last prompt to have one; `tpot_s` the mean over
    the prompts of the time per token after the first (null if there is none).
    """
    entries = []
    for output in result.outputs:
        for sample in output.outputs:
            entry: dict[str, Any] = {
                "prompt_tokens": len(output.prompt_token_ids),
                "token_ids": sample.token_ids,
                "text": sample.text,
                "finish_reason": sample.finish_reason,
            }
            if sample.logprobs is not None:
                entry["logprobs"] = [_logprobs_json(at) for at in sample.logprobs]
            if output.prompt_logprobs is not None:
                entry["prompt_logprobs"] = [at and _logprobs_json(at) for at in output.prompt_logprobs]
            entries.append(entry)
    metrics = [output.metrics for output in result.outputs]
    ttft_s = max((m.ttft_s for m in metrics if m.ttft_s is not None), default=None)
    tpot_s = [m.tpot_s for m in metrics if m.tpot_s is not None]
    computed = sum(len(o.prompt_token_ids) - o.metrics.num_cached_tokens for o in result.outputs)
    return {
        "outputs": entries,
        "metrics": {
            "ttft_s": ttft_s,
            "tpot_s": sum(tpot_s) / len(tpot_s) if tpot_s else None,
            "prefill_tokens_per_s": computed / ttft_s if ttft_s else None,
            "rank_tokens": rank_tokens,
            "rank_causal_pairs": rank_causal_pairs,
        },
    }


def _logprobs_json(at: dict[int, Logprob]) -> list[dict[str, Any]]:
    """One position: the chosen token first, then the likeliest."""
    return [
        {"token_id": token_id, "logprob": entry.logprob, "rank": entry.rank, "text": entry.decoded_token}
        for token_id, entry in at.items()
    ]


def _print_piece(text: str) -> None:
    print(text, end="", flush=True)


def _print_texts(outputs: list[RequestOutput]) -> None:
    """The text alone if there is one; else each under a line that says which it is."""
    samples = [(output, sample) for output in outputs for sample in output.outputs]
    if len(samples) == 1:
        print(samples[0][1].text)
        return
    for output, sample in samples:
        name = f"prompt {output.request_id}" + (f", sample {sample.index}" if len(output.outputs) > 1 else "")
        print(f"--- {name} ---\n{sample.text}")
