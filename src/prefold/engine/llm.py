"""`LLM`: the engine for offline use, with vLLM's names."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from types import TracebackType
from typing import Any

from prefold.engine.args import EngineArgs
from prefold.engine.core import EngineMetrics
from prefold.engine.engine import LLMEngine
from prefold.request import RequestOutput, SamplingParams

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or {"prompt": text} / {"prompt_token_ids": ids}."""

Progress = Callable[[EngineMetrics, int, int], None]
"""Called after each step: (metrics so far, requests finished, requests in all)."""


class LLM:
    """Generates from a checkpoint.

    Args:
        model: folder of a Hugging Face checkpoint, or a GGUF file.
        skip_tokenizer_init: work on token ids only.
        options: fields of `EngineArgs`, e.g. `tensor_parallel_size`, `prefill_context_parallel_size`,
            `dtype`, `max_model_len`, `max_num_batched_tokens`, `kv_cache_memory_bytes`.

    With one rank everything runs in this process; with more, each rank is a process, which
    `shutdown()` ends, as do leaving the `with` block and the garbage collector.

    Raises:
        ValueError: an option or the checkpoint is not usable; says why, before weights are loaded
            wherever that can be known.
    """

    def __init__(self, model: str, *, skip_tokenizer_init: bool = False, **options: Any) -> None:
        known = EngineArgs.__dataclass_fields__
        for name in options:
            if name not in known:
                raise ValueError(f"LLM has no option {name!r}; it has {', '.join(sorted(known))}")
        args = EngineArgs(model, **options)
        config = args.resolve()
        if args.process_index > 0:
            raise ValueError(f"LLM runs on node 0; on node {args.node_rank} call prefold.run_node")
        self.tokenizer = None
        if not skip_tokenizer_init:
            from prefold.tokenizer import load_tokenizer

            self.tokenizer = load_tokenizer(model)
        self.engine = LLMEngine(config, self.tokenizer)
        self._request_ids = itertools.count()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many; outputs come in the prompts' order.

        Args:
            prompts: one prompt, or a list of them. A list of integers is one prompt.
            sampling_params: for all prompts, or one per prompt.
            progress: called after every step.

        Raises:
            ValueError: a prompt cannot be served; nothing was generated then.
            EngineDeadError: a rank has failed.
        """
        if not isinstance(prompts, Collection) or isinstance(prompts, bytes):
            raise ValueError(f"prompts={prompts!r}: a text, token ids, a dictionary, or a list of these")
        if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral)):
            prompts = [prompts]  # type: ignore[list-item]
        params = self._params_per_prompt(sampling_params, len(prompts))
        ids: list[str] = []
        try:
            for prompt, p in zip(prompts, params, strict=True):
                request_id = str(next(self._request_ids))
                text, token_ids = self._tokenize(prompt)  # type: ignore[arg-type]
                self.engine.add_request(request_id, token_ids, p, prompt=text, stream=False)
                ids.append(request_id)
            return self._run(ids, progress)
        except BaseException:
            # Nothing of this call may run on in the next one.
            for request_id in ids:
                self.engine.abort_request(request_id)
            raise

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: Progress | None = None,
    ) -> list[RequestOutput]:
        """Generate the next message of one conversation, or of each of several, by the model's template.

        Raises:
            ValueError: the checkpoint has no tokenizer or no chat template, and as `generate`.
        """
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokenizer = self._require_tokenizer("chat")
        prompts = []
        for conversation in conversations:
            text = tokenizer.apply_chat_template(conversation)
            # The template has written the special tokens already.
            ids = tokenizer.encode(text, add_special_tokens=False)
            prompts.append({"prompt": text, "prompt_token_ids": ids})
        return self.generate(prompts, sampling_params, progress=progress)

    def _run(self, ids: list[str], progress: Progress | None) -> list[RequestOutput]:
        finished: dict[str, RequestOutput] = {}
        while self.engine.has_unfinished_requests:
            for output in self.engine.step():
                if output.finished:
                    finished[output.request_id] = output
            if progress is not None:
                progress(self.engine.metrics, len(finished), len(ids))
        return [finished[request_id] for request_id in ids]

    @staticmethod
    def _params_per_prompt(
        params: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> list[SamplingParams]:
        if params is None:
            params = SamplingParams()
        if isinstance(params, SamplingParams):
            return [params] * count
        if len(params) != count:
            raise ValueError(f"{len(params)} sampling_params for {count} prompts")
        return list(params)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text, token ids); the text is None where ids were given."""
        if isinstance(prompt, Mapping):
            if "prompt_token_ids" in prompt:
                return prompt.get("prompt"), list(prompt["prompt_token_ids"])
            if "prompt" not in prompt:
                raise ValueError(f"a prompt's keys are prompt or prompt_token_ids, not {list(prompt)}")
            prompt = prompt["prompt"]
        if isinstance(prompt, str):
            return prompt, self._require_tokenizer("a text prompt").encode(prompt)
        if not isinstance(prompt, Collection):
            raise ValueError(f"prompt {prompt!r} is neither a text nor token ids")
        return None, list(prompt)  # type: ignore[arg-type]

    def _require_tokenizer(self, what: str) -> Any:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and there is none: give prompt_token_ids")
        return self.tokenizer

    def shutdown(self) -> None:
        """End the ranks. May be called again."""
        self.engine.shutdown()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
