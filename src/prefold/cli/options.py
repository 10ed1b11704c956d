"""Options that several commands share, and how they become arguments of the engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import UseAppendAction, arg

from prefold.request import SamplingParams

TYRO_CONFIG = (
    tyro.conf.FlagCreatePairsOff,  # --stream, without a --no-stream beside it
    tyro.conf.OmitArgPrefixes,  # --temperature, not --sampling.temperature
    tyro.conf.OmitSubcommandPrefixes,
    tyro.conf.DisallowNone,  # "--prompt None" is a text
)


Flag = Annotated[bool, arg(help_behavior_hint="")]
"""An option without a value; its help says what giving it does."""


def number(default: str | None = None) -> Any:
    """A whole number; `default` says what happens without the option."""
    return arg(metavar="N", help_behavior_hint=None if default is None else f"(default: {default})")


def text(metavar: str, default: str | None = None) -> Any:
    """A text that need not be given; `default` says what happens without it."""
    return arg(metavar=metavar, help_behavior_hint="" if default is None else f"(default: {default})")


# Fields and defaults are those of prefold.engine.args.EngineArgs (a test compares them).
@dataclass(frozen=True)
class EngineOptions:
    """Layout, memory and precision of the engine.

    Attributes:
        tensor_parallel_size: Ranks that split attention heads and hidden dimensions (TP).
        prefill_context_parallel_size: Ranks that split the tokens of a prompt (PCP), so that all of them
            prefill it at once.
        decode_context_parallel_size: Ranks over which the KV cache of a sequence is spread (DCP), so that it
            holds N times as many tokens. Adds no ranks: a divisor of PCP, or PCP times a divisor of TP.
        cp_kv_cache_interleave_size: Consecutive tokens of a sequence on one DCP rank; divides the block size.
        enable_expert_parallel: Spread whole experts over the DP x PCP x TP ranks of a stage (EP), rather than
            a share of every expert over TP. Adds no ranks.
        pipeline_parallel_size: Stages that split the layers (PP).
        data_parallel_size: Replicas that split the requests (DP). The engine runs DP x PP x PCP x TP ranks;
            two or more are processes of their own.
        nnodes: Machines that share the ranks. Run the same command on each, with its own --node-rank.
        node_rank: Which machine this is. Machine 0 prints the output.
        master_addr: Address of machine 0.
        master_port: A free port there.
        nproc_per_node: Not for users: torchrun's processes on a machine.
        local_rank: Not for users: which of them this is.
        threads_per_rank: CPU threads of a rank.
        dtype: Of weights. auto is the checkpoint's own.
        kv_cache_dtype: How the KV cache is stored. auto is the dtype above. fp8_e4m3 takes a byte per
            element, and two for the rotated part of latents.
        weight_memory: Quantised weights: expanded to dtype when loaded, quantized (as they are stored,
            decoded at each use: less memory), or auto: expanded where that takes at most half of the free
            memory.
        compute_dtype: Of activations and matrix multiplications. auto is the dtype above, or float32 where
            the machine is slow at bfloat16.
        max_model_len: Longest prompt and output together.
        max_num_batched_tokens: Tokens that one rank computes in a step; a step holds up to PCP times as many.
            Longer prompts are prefilled in chunks.
        max_num_seqs: Requests that run at the same time.
        kv_cache_memory_bytes: Memory of the KV cache on each rank.
        num_blocks: Blocks of the KV cache on each rank, instead of the memory.
        block_size: Tokens in a block of the KV cache on a rank. Prefix-cache hits come in multiples of it
            times DCP.
        enable_prefix_caching: Compute every prompt anew, even where it begins like an earlier one.
        seed: Seed of requests that bring none.
        context_workspace_tokens: Context tokens that attention up-projects at a time.
        min_split_tokens: A prompt (or chunk) shorter than that stays whole on one PCP rank.
        pin_threads: Let the system move ranks between cores.
        transport: How ranks exchange data. shm is shared memory.
        collective_timeout_s: Seconds until an exchange between ranks fails and names the ranks that
            are missing.
        device: Where ranks compute.
        enforce_eager: Compute every step from Python. By default the layers of decode steps are recorded,
            and replayed without it.
        debug_poison: Fill unused memory with NaN, so that reads of it show. Slow.
        context_attention: For debugging: how prompts attend to their cached context. auto decides by cost;
            the others are used wherever they are possible.
        share_projections: PCP ranks share the up-projected keys and values of new tokens. auto decides by
            cost, where ranks share memory.
        check_step_plans: Ranks compare the plan of every step, and fail if it differs. auto does where ranks
            share memory, which makes it cheap.
        trace: Write a trace of all steps on all ranks to this file when the engine ends, to be opened in
            Perfetto (ui.perfetto.dev) or chrome://tracing.
    """

    tensor_parallel_size: Annotated[int, arg(aliases=["-tp"], metavar="N")] = 1
    prefill_context_parallel_size: Annotated[int, arg(aliases=["-pcp"], metavar="N")] = 1
    decode_context_parallel_size: Annotated[int, arg(aliases=["-dcp"], metavar="N")] = 1
    cp_kv_cache_interleave_size: Annotated[int, number()] = 1
    enable_expert_parallel: Annotated[bool, arg(aliases=["-ep"], help_behavior_hint="")] = False
    pipeline_parallel_size: Annotated[int, arg(aliases=["-pp"], metavar="N")] = 1
    data_parallel_size: Annotated[int, arg(aliases=["-dp"], metavar="N")] = 1
    nnodes: Annotated[int, number()] = 1
    node_rank: Annotated[int, number()] = 0
    master_addr: Annotated[str | None, text("HOST")] = None
    master_port: Annotated[int, number()] = 29501
    nproc_per_node: Annotated[int, tyro.conf.Suppress] = 1
    local_rank: Annotated[int, tyro.conf.Suppress] = 0
    threads_per_rank: Annotated[int | None, number(default="cores / ranks")] = None
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    kv_cache_dtype: Literal["auto", "float32", "bfloat16", "fp8_e4m3", "bf16", "fp8"] = "auto"
    weight_memory: Literal["auto", "expanded", "quantized"] = "auto"
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: Annotated[int | None, number(default="the model's limit, or what the KV cache holds")] = (
        None
    )
    max_num_batched_tokens: Annotated[int | None, number(default="8192; 2048 with -pp")] = None
    max_num_seqs: Annotated[int, number()] = 256
    kv_cache_memory_bytes: Annotated[int | None, number(default="4 GiB; less if memory is short")] = None
    num_blocks: Annotated[int | None, number(default="as the memory allows")] = None
    block_size: Annotated[int, number()] = 32
    enable_prefix_caching: Flag = True
    seed: Annotated[int, number()] = 0
    context_workspace_tokens: Annotated[int, number()] = 1024
    min_split_tokens: Annotated[int, number()] = 32
    pin_threads: Flag = True
    transport: Literal["shm", "gloo"] = "shm"
    collective_timeout_s: Annotated[float, arg(metavar="S")] = 300.0
    device: Literal["cpu", "cuda"] = "cpu"
    enforce_eager: Flag = False
    debug_poison: Flag = False
    context_attention: Literal["auto", "local", "sliced", "query", "kv"] = "auto"
    share_projections: Literal["auto", "on", "off"] = "auto"
    check_step_plans: Literal["auto", "on", "off"] = "auto"
    trace: Annotated[str | None, text("FILE")] = None

    def for_llm(self, **changes: Any) -> dict[str, Any]:
        """Keyword arguments of `LLM`, some of them changed."""
        return {field.name: getattr(self, field.name) for field in fields(self)} | changes


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are chosen and when the text ends.

    Attributes:
        max_tokens: Generate at most that many tokens.
        temperature: 0 always takes the likeliest token (greedy). Above 0 tokens are drawn at random,
            and unlikely ones more often the higher it is.
        top_k: Draw among the N likeliest tokens only; 0 is all of them.
        top_p: Draw among the fewest tokens whose probabilities reach this sum.
        min_p: Leave out tokens less likely than this fraction of the likeliest one.
        sampling_seed: Seed of each prompt by itself, whatever shares its batch.
        n: Samples per prompt.
        min_tokens: Do not end before that many tokens.
        stop: End before this text.
        stop_token_ids: End at this token, besides the model's end-of-sequence tokens.
        ignore_eos: Go on after an end-of-sequence token.
        logprobs: With --json, show log-probabilities of each generated token and of the N likeliest.
        prompt_logprobs: With --json, show the same for the prompt's tokens.
        presence_penalty: Subtracted from the logits of tokens that were generated before.
        frequency_penalty: The same, once per occurrence.
        repetition_penalty: Above 1, tokens of prompt and output become less likely.
        logit_bias: Add BIAS to the logit of token ID.
    """

    max_tokens: Annotated[int, number()] = 128
    temperature: Annotated[float, arg(metavar="T")] = 0.0
    top_k: Annotated[int, number()] = 0
    top_p: Annotated[float, arg(metavar="P")] = 1.0
    min_p: Annotated[float, arg(metavar="P")] = 0.0
    sampling_seed: Annotated[int | None, number(default="drawn from --seed")] = None
    n: Annotated[int, number()] = 1
    min_tokens: Annotated[int, number()] = 0
    stop: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="TEXT")] = ()
    stop_token_ids: Annotated[UseAppendAction[tuple[int, ...]], arg(name="stop-token-id", metavar="ID")] = ()
    ignore_eos: Flag = False
    logprobs: Annotated[int | None, number(default="none")] = None
    prompt_logprobs: Annotated[int | None, number(default="none")] = None
    presence_penalty: Annotated[float, arg(metavar="X")] = 0.0
    frequency_penalty: Annotated[float, arg(metavar="X")] = 0.0
    repetition_penalty: Annotated[float, arg(metavar="X")] = 1.0
    logit_bias: Annotated[UseAppendAction[tuple[str, ...]], arg(metavar="ID=BIAS")] = ()

    def to_params(self) -> SamplingParams:
        """ValueError for a value out of its range."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        options["seed"] = options.pop("sampling_seed")
        options["logit_bias"] = dict(_parse_bias(entry) for entry in self.logit_bias) or None
        return SamplingParams(**options)


def _parse_bias(entry: str) -> tuple[int, float]:
    token_id, _, bias = entry.partition("=")
    try:
        return int(token_id), float(bias)
    except ValueError:
        raise ValueError(f"--logit-bias {entry!r} must be ID=BIAS, such as 42=-1.5") from None
