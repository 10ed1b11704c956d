"""One step on one rank: states, split, forward, exchange, sample."""

from __future__ import annotations

import time

import numpy as np
import torch

from prefold.attention.context_parallel import ContextParallelAttention
from prefold.attention.torch_backend import TorchBackend
from prefold.config import EngineConfig
from prefold.distributed.group import Group
from prefold.distributed.pcp_layout import Partition
from prefold.loader import load_weights
from prefold.models.registry import build_model
from prefold.sampling.logprobs import compute_logprobs
from prefold.sampling.sampler import InvalidLogitsError, Sampler, SamplerOutput, SamplingMetadata
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats, TokenLogprobs
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.kv_cache import allocate_kv_cache
from prefold.worker.pcp_manager import PCPManager
from prefold.worker.request_states import RequestInfo, RequestStates
from prefold.workspace import Workspace

LOGITS_ROWS = 256
"""Rows of logits computed at a time: bounds prompt_logprobs' memory to rows x vocabulary."""


class ModelRunner:
    """Owns a rank's model, cache and request states.

    Args:
        config: resolved configuration, equal on all ranks.
        groups: {"tp": ..., "pcp": ...} of this rank.
    """

    def __init__(self, config: EngineConfig, groups: dict[str, Group]) -> None:
        runtime, model, cache = config.runtime, config.model, config.cache
        device = torch.device(runtime.device)
        self._config = config
        self._groups = groups
        self.workspace = Workspace(device, poison=runtime.debug_poison)
        self._states = RequestStates(
            config.scheduler.max_num_seqs, config.scheduler.max_model_len, cache.block_size
        )
        self._model = build_model(
            model, groups["tp"], self.workspace, runtime, config.scheduler.max_model_len
        )
        load_weights(self._model, model.path)
        self.kv_cache = allocate_kv_cache(
            model.num_layers,
            cache.num_blocks,
            cache.block_size,
            model.mla.token_dim,
            getattr(torch, model.dtype),
            device,
            runtime.debug_poison,
        )
        self._attention = ContextParallelAttention(
            model.mla,
            model.softmax_scale,
            self.kv_cache,
            groups["pcp"],
            TorchBackend(self.workspace, device),
            self.workspace,
            runtime.context_workspace_tokens,
            getattr(torch, runtime.compute_dtype),
        )
        self._pcp = PCPManager(groups["pcp"], runtime.min_split_tokens, self.kv_cache, self.workspace)
        self._sampler = Sampler(model.vocab_size)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step. The result is None on ranks that do not sample (all but PCP rank 0, TP rank 0)."""
        started = time.perf_counter()
        traffic_before = self._traffic()
        self._states.apply(step)
        batch = GlobalBatch.build(self._states, step, self._config.cache.block_size)
        parts = self._pcp.partition(batch)
        local = self._pcp.input_batch(batch, parts, self._states)
        self._attention.begin_step(local.plan)
        hidden = self._model(local.input_ids, local.positions, self._attention)

        prompt_tokens = self._prompt_logprob_tokens(batch)
        last_tokens = batch.query_start_loc[batch.sampled + 1] - 1
        wanted = np.concatenate([*prompt_tokens.values(), last_tokens]).astype(np.int64)
        rows = self._pcp.exchange(batch, parts, local.plan, hidden, wanted)
        if self._groups["pcp"].rank != 0:
            return None
        prompt_logprobs = self._prompt_logprobs(batch, prompt_tokens, rows)
        requests, sampled, errors = self._sample(batch, rows[len(rows) - len(last_tokens) :])
        if self._groups["tp"].rank != 0:
            return None
        ids = [batch.request_ids[request] for request in requests]
        return ModelRunnerOutput(
            step_id=batch.step_id,
            sampled_token_ids={i: [token] for i, token in zip(ids, sampled.token_ids.tolist())},
            logprobs={i: [entry] for i, entry in zip(ids, sampled.logprobs) if entry is not None},
            prompt_logprobs=prompt_logprobs,
            stats=self._stats(parts, started, traffic_before),
            errors=errors,
        )

    def _prompt_logprob_tokens(self, batch: GlobalBatch) -> dict[int, np.ndarray]:
        """Global token indices whose logits predict a prompt token somebody asked for, by request index."""
        tokens = {}
        for i, row in enumerate(batch.rows):
            if self._info(row).sampling_params.prompt_logprobs is None:
                continue
            last = self._states.num_prompt_tokens[row] - 1  # its logits predict the first output token
            count = min(batch.num_scheduled[i], last - batch.num_computed[i])
            if count > 0:
                tokens[i] = batch.query_start_loc[i] + np.arange(count)
        return tokens

    def _prompt_logprobs(
        self, batch: GlobalBatch, tokens: dict[int, np.ndarray], hidden: torch.Tensor
    ) -> dict[str, list[TokenLogprobs]]:
        """Joins TP collectives: runs on all TP ranks."""
        result: dict[str, list[TokenLogprobs]] = {}
        start = 0
        for i, indices in tokens.items():
            row = batch.rows[i]
            num_logprobs = self._info(row).sampling_params.prompt_logprobs
            assert num_logprobs is not None
            entries: list[TokenLogprobs] = []
            for first in range(0, len(indices), LOGITS_ROWS):
                chunk = indices[first : first + LOGITS_ROWS]
                logits = self._model.compute_logits(hidden[start : start + len(chunk)])
                start += len(chunk)
                next_ids = self._states.token_ids[row, batch.positions[chunk] + 1].astype(np.int64)
                entries += compute_logprobs(logits, torch.from_numpy(next_ids), num_logprobs)
            result[batch.request_ids[i]] = entries
        return result

    def _sample(
        self, batch: GlobalBatch, hidden: torch.Tensor
    ) -> tuple[list[int], SamplerOutput, dict[str, str]]:
        """Next tokens of `batch.sampled`: (indices into the batch, their tokens, errors by request id).

        TP ranks join the logits' collective; only TP rank 0's draw counts. A request whose logits
        are no numbers fails alone: the others are sampled without it.
        """
        logits = self._model.compute_logits(hidden)
        sampled = batch.sampled.tolist()
        errors: dict[str, str] = {}
        while True:
            try:
                return sampled, self._sampler(logits, self._sampling_metadata(batch, sampled)), errors
            except InvalidLogitsError as error:
                errors.update(dict.fromkeys(error.request_ids, str(error)))
            keep = [i for i, request in enumerate(sampled) if batch.request_ids[request] not in errors]
            assert len(keep) < len(sampled), errors
            logits, sampled = logits[keep], [sampled[i] for i in keep]

    def _sampling_metadata(self, batch: GlobalBatch, requests: list[int]) -> SamplingMetadata:
        states = self._states
        rows = [int(batch.rows[request]) for request in requests]
        infos = [self._info(row) for row in rows]
        prompts = [int(states.num_prompt_tokens[row]) for row in rows]
        ends = [int(states.num_tokens[row]) for row in rows]
        return SamplingMetadata(
            request_ids=[info.request_id for info in infos],
            params=[info.sampling_params for info in infos],
            seeds=[info.seed for info in infos],
            num_generated=[end - prompt for end, prompt in zip(ends, prompts)],
            prompt_token_ids=[states.token_ids[row, :prompt] for row, prompt in zip(rows, prompts)],
            output_token_ids=[states.token_ids[row, p:e] for row, p, e in zip(rows, prompts, ends)],
            eos_token_ids=[info.eos_token_ids for info in infos],
        )

    def _stats(self, parts: Partition, started: float, before: dict[str, tuple[int, int]]) -> StepStats:
        counted = {}
        for key, (calls, sent) in self._traffic().items():
            calls_before, sent_before = before.get(key, (0, 0))
            if calls > calls_before:
                counted[key] = (calls - calls_before, sent - sent_before)
        return StepStats(
            rank_tokens=parts.num_tokens.tolist(),
            rank_causal_pairs=parts.causal_pairs.tolist(),
            forward_s=time.perf_counter() - started,
            bytes_sent={key: sent for key, (_, sent) in counted.items()},
            calls={key: calls for key, (calls, _) in counted.items()},
        )

    def _info(self, row: int) -> RequestInfo:
        info = self._states.info[row]
        assert info is not None, row
        return info

    def _traffic(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) so far, by collective."""
        groups = self._groups.values()
        return {key: (calls, sent) for group in groups for key, (calls, sent) in group.traffic.items()}
