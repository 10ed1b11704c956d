"""`/v1/explain`: in words, what runs where, how much fits, what happens now, and why requests wait."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from prefold.config import EngineConfig
from prefold.distributed.stages import split_layers
from prefold.engine.async_engine import AsyncLLM
from prefold.metrics import BLOCKS, BUDGET, MAX_NUM_SEQS, EngineSnapshot, RequestState, StepRecord, imbalance
from prefold.server.body import error_responses


class Section(msgspec.Struct):
    """A part of the explanation: numbers for programs, sentences for people."""

    name: str
    title: str
    facts: dict[str, Any]
    sentences: list[str]


class Explanation(msgspec.Struct):
    """What `/v1/explain` answers. `status`: of the engine; `failure`: why it does not run, if so."""

    status: str
    failure: str | None
    sections: list[Section]

    def as_text(self) -> str:
        """A title per section, and its sentences below."""
        lines = [f"Engine: {self.status}" + (f" ({self.failure})" if self.failure else "")]
        for section in self.sections:
            lines += ["", section.title, *(f"  {sentence}" for sentence in section.sentences)]
        return "\n".join(lines) + "\n"


def explain(
    config: EngineConfig,
    snapshot: EngineSnapshot,
    steps: Sequence[StepRecord] = (),
    status: str = "ready",
    failure: str | None = None,
) -> Explanation:
    """Explain an engine.

    Args:
        config: resolved.
        snapshot: the latest.
        steps: recent ones, the latest last.
    """
    sections = [
        _layout(config),
        _kv_cache(config, snapshot),
        _step(config, steps),
        _running(snapshot),
        _waiting(config, snapshot, steps),
    ]
    return Explanation(status, failure, sections)


def explain_router(engine: Callable[[], AsyncLLM]) -> APIRouter:
    """`GET /v1/explain`: JSON, or plain text where that is what the client accepts."""
    router = APIRouter()

    @router.get(
        "/v1/explain",
        responses=error_responses(),
        summary="What runs where, how much fits, and why requests wait",
    )
    async def explain_engine(request: Request) -> Response:
        llm = engine()
        explanation = explain(
            llm.config, llm.snapshot, list(llm.recent_steps), llm.status.name.lower(), llm.failure
        )
        if _wants_text(request.headers.get("accept", "")):
            return Response(explanation.as_text(), media_type="text/plain")
        return Response(msgspec.json.encode(explanation), media_type="application/json")

    return router


def _wants_text(accept: str) -> bool:
    """Whether text/plain is asked for before JSON."""
    kinds = [part.partition(";")[0].strip() for part in accept.lower().split(",")]
    return "text/plain" in kinds and "application/json" not in kinds[: kinds.index("text/plain")]


# ---------------------------------------------------------------- sections


def _layout(config: EngineConfig) -> Section:
    parallel, model, runtime = config.parallel, config.model, config.runtime
    sizes = {
        "DP": parallel.data_parallel_size,
        "PP": parallel.pipeline_parallel_size,
        "PCP": parallel.prefill_context_parallel_size,
        "TP": parallel.tensor_parallel_size,
    }
    product = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    sentences = [
        f"{_count(parallel.world_size, 'rank')} = {product}, on {_count(parallel.nnodes, 'machine')}, "
        f"{_count(runtime.threads_per_rank, 'thread')} each.",
        f"Weights and KV cache are {model.dtype}, computed in {runtime.compute_dtype} on {runtime.device}.",
        *_axes(config, sizes),
    ]
    unused = [axis for axis, size in sizes.items() if size < 2]
    if unused:
        sentences.append(f"{', '.join(unused)} {'is' if len(unused) < 2 else 'are'} not used (size 1).")
    facts = {
        "world_size": parallel.world_size,
        "nnodes": parallel.nnodes,
        "threads_per_rank": runtime.threads_per_rank,
        "dtype": model.dtype,
        "compute_dtype": runtime.compute_dtype,
        **{axis.lower(): size for axis, size in sizes.items()},
        "dcp": parallel.decode_context_parallel_size,
        "ep": parallel.enable_expert_parallel,
    }
    return Section("layout", "Layout", facts, sentences)


def _axes(config: EngineConfig, sizes: dict[str, int]) -> Iterator[str]:
    """A sentence per axis that splits something."""
    parallel, model = config.parallel, config.model
    if sizes["DP"] > 1:
        yield f"DP {sizes['DP']}: so many replicas split the requests, each with a KV cache of its own."
    if sizes["PP"] > 1:
        stages = split_layers(model, sizes["PP"])
        parts = ", ".join(f"{layers.start}-{layers.stop - 1}" for layers in stages)
        yield f"PP {sizes['PP']}: stages compute layers {parts}, each a step of its own at the same time."
    size = sizes["PCP"]
    if size > 1:
        yield (
            f"PCP {size}: every prompt is prefilled by {size} ranks at once. It is cut in {2 * size} chunks; "
            f"one rank takes the first and the last of them, the next one the second and the last but one, "
            f"and so on: equal work, because late tokens see more. Fewer than "
            f"{max(config.runtime.min_split_tokens, 2 * size)} new tokens stay whole on one rank."
        )
    if sizes["TP"] > 1:
        yield (
            f"TP {sizes['TP']}: each rank has {model.num_heads // sizes['TP']} of {model.num_heads} "
            f"attention heads and its share of every MLP."
        )
    dcp = parallel.decode_context_parallel_size
    if dcp > 1:
        yield (
            f"DCP {dcp}: the KV cache of a sequence is spread over {dcp} ranks of the PCP x TP plane, so it "
            f"holds {dcp} times as many tokens as one rank's memory."
        )
    elif size > 1:
        yield f"DCP 1: each of the {size} PCP ranks holds the KV of all tokens."
    if parallel.enable_expert_parallel and model.moe is not None:
        ranks = parallel.data_parallel_size * parallel.plane_size
        yield f"EP: {model.moe.num_experts} experts are spread over {_count(ranks, 'rank')} of each stage."


def _kv_cache(config: EngineConfig, snapshot: EngineSnapshot) -> Section:
    cache, replicas = config.cache, config.parallel.data_parallel_size
    dcp, block = config.parallel.decode_context_parallel_size, config.virtual_block_size
    limit = config.scheduler.max_model_len
    total, used = cache.num_blocks * replicas, snapshot.blocks_used
    longest = -(-(limit - 1) // block)
    shared = "" if dcp < 2 else f" on each of {dcp} DCP ranks: {block:,} tokens"
    of_all = "" if replicas < 2 else f" in all of {replicas} replicas"
    sentences = [
        f"A block holds {cache.block_size} tokens{shared}. Prompts that begin alike share whole blocks.",
        f"There are {total:,} blocks = {total * block:,} tokens{of_all}. {used:,} are held by requests "
        f"({used / total:.1%}), {total - used:,} are free; a later prompt could reuse the content of "
        f"{snapshot.blocks_cached:,}.",
        f"A request may have {limit:,} tokens (max_model_len), which takes {longest:,} blocks: "
        f"{_count(cache.num_blocks // longest, 'such request')} would fit at once"
        f"{' in each replica' if replicas > 1 else ''}.",
    ]
    asked, found = snapshot.totals.prefix_query_tokens, snapshot.totals.prefix_hit_tokens
    if not cache.enable_prefix_caching:
        sentences.append("The prefix cache is off.")
    elif asked:
        sentences.append(
            f"Prefix cache: {found:,} of {asked:,} prompt tokens were found ({found / asked:.1%})."
        )
    facts = {
        "block_size": cache.block_size,
        "dcp": dcp,
        "virtual_block_size": block,
        "num_blocks": total,
        "blocks_used": used,
        "blocks_cached": snapshot.blocks_cached,
        "capacity_tokens": total * block,
        "max_model_len": limit,
        "prefix_query_tokens": asked,
        "prefix_hit_tokens": found,
    }
    return Section("kv_cache", "KV cache", facts, sentences)


def _step(config: EngineConfig, steps: Sequence[StepRecord]) -> Section:
    limits, size = config.scheduler, config.parallel.prefill_context_parallel_size
    budget = limits.max_num_batched_tokens * size
    sentences = [
        f"A rank computes up to {limits.max_num_batched_tokens:,} tokens in a step "
        f"(--max-num-batched-tokens), and {_count(size, 'PCP rank')} share a step: {budget:,} tokens. "
        f"The longest prompt takes {_count(-(-(limits.max_model_len - 1) // budget), 'step')}.",
        f"Up to {limits.max_num_seqs:,} requests run at the same time (--max-num-seqs).",
    ]
    facts: dict[str, Any] = {
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "pcp": size,
        "tokens_per_step": budget,
        "max_num_seqs": limits.max_num_seqs,
    }
    if steps:
        last = steps[-1]
        facts["last_step"] = {
            "step_id": last.step_id,
            "seconds": last.duration_s,
            "prefill_tokens": last.num_prefill_tokens,
            "decode_tokens": last.num_decode_tokens,
            "rank_tokens": last.rank_tokens,
            "rank_causal_pairs": last.rank_causal_pairs,
        }
        sentences.append(
            f"The last step took {last.duration_s:.3f} s for {last.num_prefill_tokens:,} prefill and "
            f"{last.num_decode_tokens:,} decode tokens; the fullest rank had "
            f"{imbalance(last.rank_tokens):.2f} times the mean of the tokens and "
            f"{imbalance(last.rank_causal_pairs):.2f} times that of the attention."
        )
    return Section("step", "A step", facts, sentences)


def _running(snapshot: EngineSnapshot) -> Section:
    running = [state for state in snapshot.requests if state.state == "running"]
    prefills = [s for s in running if s.num_computed_tokens < s.num_prefill_tokens]
    num_decoding = len(running) - len(prefills)
    sentences = [f"{_count(snapshot.num_running, 'request')} {_runs(snapshot.num_running)}."]
    if snapshot.num_running > len(running):
        sentences.append(f"Of the first {len(running)}:")
    if num_decoding:
        context = sum(s.num_computed_tokens for s in running) - sum(s.num_computed_tokens for s in prefills)
        sentences.append(
            f"{num_decoding:,} {'generates' if num_decoding < 2 else 'generate'}, over {context:,} tokens of "
            f"context."
        )
    sentences += [
        f"{state.request_id} is in prefill: {state.num_computed_tokens:,} of {state.num_prefill_tokens:,} "
        f"tokens ({state.num_computed_tokens / state.num_prefill_tokens:.0%})."
        for state in prefills[:5]
    ]
    if len(prefills) > 5:
        sentences.append(f"{len(prefills) - 5} more are in prefill.")
    facts = {"num_running": snapshot.num_running, "num_prefill": len(prefills), "num_decode": num_decoding}
    return Section("running", "Running", facts, sentences)


def _waiting(config: EngineConfig, snapshot: EngineSnapshot, steps: Sequence[StepRecord]) -> Section:
    waiting = [state for state in snapshot.requests if state.state != "running"]
    firsts = [state for state in waiting if not state.why.startswith("behind ")]
    facts: dict[str, Any] = {
        "num_waiting": snapshot.num_waiting,
        "num_preempted": sum(state.state == "preempted" for state in waiting),
        "first": [
            {
                "request_id": state.request_id,
                "replica": state.replica,
                "why": state.why,
                "num_blocks": state.num_blocks,
                "wait_s": state.wait_s,
            }
            for state in firsts
        ],
    }
    if not snapshot.num_waiting:
        return Section("waiting", "Waiting", facts, ["Nothing waits."])
    sentences = [f"{_count(snapshot.num_waiting, 'request')} wait{'s' if snapshot.num_waiting < 2 else ''}."]
    sentences += [_why(state, config, snapshot, steps) for state in firsts]
    behind = snapshot.num_waiting - len(firsts)
    if behind:
        sentences.append(
            f"{_count(behind, 'request')} {'is' if behind < 2 else 'are'} behind: nobody overtakes, or a "
            f"long prompt would wait for ever behind short ones."
        )
    return Section("waiting", "Waiting", facts, sentences)


def _why(
    state: RequestState, config: EngineConfig, snapshot: EngineSnapshot, steps: Sequence[StepRecord]
) -> str:
    """Why the first request in line is not admitted, with the numbers."""
    limits = config.scheduler
    replica = "" if config.parallel.data_parallel_size < 2 else f" of replica {state.replica}"
    first = (
        f"The first{replica}, {state.request_id} ({state.num_prompt_tokens:,} prompt tokens, here for "
        f"{state.wait_s:.1f} s), waits"
    )
    if state.state == "preempted":
        first = f"{first} again, because blocks had run out,"
    if state.why == BLOCKS:
        free = snapshot.blocks_total - snapshot.blocks_used
        in_all = " in all replicas" if replica else ""
        return (
            f"{first} for blocks: it needs {state.num_blocks:,}, and {free:,} of {snapshot.blocks_total:,} "
            f"are free{in_all}. The others come back when running requests end; --kv-cache-memory-bytes or "
            f"--num-blocks make more."
        )
    if state.why == MAX_NUM_SEQS:
        return f"{first} for a place: {limits.max_num_seqs:,} requests run, as many as --max-num-seqs allows."
    assert state.why == BUDGET, state.why
    size = config.parallel.prefill_context_parallel_size
    taken = ""
    latest = next((step for step in reversed(steps) if step.replica == state.replica), None)
    if latest is not None:
        tokens = latest.num_prefill_tokens + latest.num_decode_tokens
        taken = f", and those that run took {tokens:,} of them in the last one"
    return (
        f"{first} for a share of a step: a step has {limits.max_num_batched_tokens * size:,} tokens "
        f"({limits.max_num_batched_tokens:,} per rank x PCP {size}){taken}. Or it begins like a prompt that "
        f"is being computed, and will find that in the prefix cache."
    )


def _runs(count: int) -> str:
    return "runs" if count == 1 else "run"


def _count(number: int, noun: str) -> str:
    """
    >>> _count(1, "rank"), _count(1200, "rank")
    ('1 rank', '1,200 ranks')
    """
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
