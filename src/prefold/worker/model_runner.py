"""One step on one rank: states, split, forward, exchange, sample."""

from __future__ import annotations

import time

import torch

from prefold.attention.context_parallel import AttentionSetup, ContextParallelAttention
from prefold.attention.context_ways import ContextWays
from prefold.attention.sparse import SparseAttention
from prefold.attention.torch_backend import TorchBackend
from prefold.config import EngineConfig
from prefold.distributed.group import Group, begin_step
from prefold.distributed.pcp_layout import Partition
from prefold.distributed.stages import split_layers
from prefold.kv_ownership import KVOwnership
from prefold.layers.expert_parallel import ExpertParallel, ExpertPlan, dispatch_capacity
from prefold.loader import load_weights
from prefold.models.registry import build_model
from prefold.step import ModelRunnerOutput, SchedulerOutput, StepStats
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.kv_cache import allocate_kv_cache
from prefold.worker.pcp_manager import PCPManager
from prefold.worker.pipeline import PipelineStage
from prefold.worker.plan_check import check_plan, plan_checksum
from prefold.worker.request_states import RequestStates
from prefold.worker.step_sampler import StepSampler, WantedTokens
from prefold.workspace import Workspace


class ModelRunner:
    """Owns a rank's model, cache and request states.

    Args:
        config: resolved configuration, equal on all ranks.
        groups: this rank's, by the names of `make_groups`.
    """

    def __init__(self, config: EngineConfig, groups: dict[str, Group]) -> None:
        runtime, model, cache = config.runtime, config.model, config.cache
        device, compute_dtype = torch.device(runtime.device), getattr(torch, runtime.compute_dtype)
        self._config = config
        self._groups = groups
        self.workspace = Workspace(device, poison=runtime.debug_poison)
        self.states = RequestStates(
            config.scheduler.max_num_seqs, config.scheduler.max_model_len, config.virtual_block_size
        )
        layers = split_layers(model, groups["pp"].size)[groups["pp"].rank]
        self._experts = self._expert_parallel()
        max_model_len = config.scheduler.max_model_len
        self._model = build_model(
            model, groups["tp"], self.workspace, runtime, max_model_len, layers, self._experts
        )
        load_weights(self._model, model.path)
        self.kv_cache = allocate_kv_cache(
            len(layers),
            cache.num_blocks,
            cache.block_size,
            model.attention.cache_dim(groups["tp"].size),
            getattr(torch, model.dtype),
            device,
            runtime.debug_poison,
        )
        parallel = config.parallel
        self._ownership = KVOwnership(
            cache.block_size,
            parallel.decode_context_parallel_size,
            parallel.cp_kv_cache_interleave_size,
        )
        self._attention = self._attention_context(compute_dtype)
        self._pcp = PCPManager(
            groups,
            self._ownership,
            ContextWays.of(config),
            runtime.min_split_tokens,
            self.kv_cache,
            self.workspace,
        )
        self._stage = PipelineStage(groups["pp"], model.hidden_size, compute_dtype, self.workspace)
        self._sampler = StepSampler(self._model, self.states, groups["tp"])

    def _attention_context(self, compute_dtype: torch.dtype) -> ContextParallelAttention:
        model, workspace = self._config.model, self.workspace
        form = SparseAttention if model.dsa is not None else ContextParallelAttention
        return form(
            AttentionSetup(
                attention=model.attention,
                scale=model.softmax_scale,
                kv_cache=self.kv_cache,
                groups=self._groups,
                ownership=self._ownership,
                backend=TorchBackend(workspace, self.kv_cache.device),
                workspace=workspace,
                tile_tokens=self._config.runtime.context_workspace_tokens,
                compute_dtype=compute_dtype,
            )
        )

    def _expert_parallel(self) -> ExpertParallel | None:
        """Who holds which experts; None if every TP rank has a part of each."""
        if not self._config.parallel.enable_expert_parallel:
            return None
        assert self._config.model.moe is not None, "refused at start-up"
        return ExpertParallel(self._groups, self._config.model.moe.num_experts, self.workspace)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step. It may be empty: the rank then joins what its EP group does.

        Returns:
            None on all ranks of a replica but one: last stage, PCP rank 0, TP rank 0.
        """
        started = time.perf_counter()
        begin_step(self._groups, step.step_id)
        self.states.apply(step)
        batch = GlobalBatch.build(self.states, step, self._ownership, self._groups["dcp"].rank)
        parts = self._pcp.partition(batch)
        wanted = WantedTokens.of(batch, self.states)
        if self._config.runtime.check_step_plans:
            checksum = plan_checksum(batch, self.states, parts, wanted.indices)
            device = self.kv_cache.device
            check_plan(self._groups["tp"], self._groups["pcp"], step.step_id, checksum, device)
        traffic_before = self._traffic()  # counted is what computing the step takes, not the check
        rows = self._forward(batch, parts, wanted)
        if not self._stage.is_last or self._groups["pcp"].rank != 0:
            return None
        sampled = self._sampler(batch, wanted, rows)
        if sampled is None:
            return None
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=sampled.sampled_token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            stats=self._stats(parts, started, traffic_before),
            errors=sampled.errors,
        )

    def _forward(self, batch: GlobalBatch, parts: Partition, wanted: WantedTokens) -> torch.Tensor:
        """This stage's layers. Last stage: hidden states of the wanted tokens [n, hidden], on PCP place 0."""
        if self._experts is not None:
            self._experts.begin_step(self._expert_plan(parts))
        local = self._pcp.input_batch(batch, parts, self.states)
        self._attention.begin_step(local.plan)
        hidden = self._stage.receive(len(local.input_ids))
        hidden = self._model(local.input_ids, local.positions, self._attention, hidden)
        # At once: the next stage waits for it.
        self._stage.send(hidden)
        indices = wanted.indices if self._stage.is_last else wanted.indices[:0]
        return self._pcp.exchange(batch, parts, local.plan, hidden, indices)

    def _expert_plan(self, parts: Partition) -> ExpertPlan:
        """What experts must know of the step. Replicas, which know nothing of each other's batches,
        agree on the largest one here."""
        rank, prefill, decode = self._groups["pcp"].rank, parts.num_prefill_tokens, parts.num_decode_tokens
        capacity = dispatch_capacity(
            prefill, decode, tp=self._groups["tp"].size, u=self._groups["dcp_pcp"].size
        )
        capacities = self._groups["dp"].all_gather(torch.tensor([capacity], device=self.kv_cache.device))
        return ExpertPlan(int(prefill[rank]), int(decode[rank]), int(capacities.max()))

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

    def _traffic(self) -> dict[str, tuple[int, int]]:
        """(calls, bytes) so far, by collective."""
        groups = self._groups.values()
        return {key: (calls, sent) for group in groups for key, (calls, sent) in group.traffic.items()}
