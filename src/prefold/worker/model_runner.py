"""One step on one rank: states, split, forward, exchange, sample."""

from __future__ import annotations

import torch

from prefold.attention.context_parallel import AttentionSetup, ContextParallelAttention
from prefold.attention.context_ways import ContextWays
from prefold.attention.native_backend import attention_backend
from prefold.attention.row_format import row_formats
from prefold.attention.sparse import SparseAttention
from prefold.config import EngineConfig
from prefold.distributed.group import Group, begin_step
from prefold.distributed.mesh import Mesh
from prefold.distributed.pcp_layout import Partition
from prefold.distributed.stages import split_layers
from prefold.kernels import library
from prefold.kv_ownership import KVOwnership
from prefold.layers.bands import weight_bytes
from prefold.layers.expert_parallel import ExpertParallel, ExpertPlan, dispatch_capacity
from prefold.loader import load_weights
from prefold.memory import plan_workspace
from prefold.models.registry import build_model
from prefold.sampling.grammar import Grammars
from prefold.step import ModelRunnerOutput, SchedulerOutput
from prefold.tracing import TraceWriter
from prefold.worker.global_batch import GlobalBatch
from prefold.worker.kv_cache import allocate_kv_cache
from prefold.worker.pcp_manager import PCPManager
from prefold.worker.pipeline import PipelineStage
from prefold.worker.plan_check import check_plan, plan_checksum
from prefold.worker.request_states import RequestStates
from prefold.worker.step_clock import StepClock
from prefold.worker.step_replay import StepReplay
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
        planned = plan_workspace(config, groups["pp"].rank) if device.type == "cpu" else {}
        self.workspace = Workspace(device, runtime.debug_poison, planned)
        self.states = RequestStates(
            config.scheduler.max_num_seqs, config.scheduler.max_model_len, config.virtual_block_size
        )
        layers = split_layers(model, groups["pp"].size)[groups["pp"].rank]
        self._experts = self._expert_parallel()
        max_model_len = config.scheduler.max_model_len
        self._model = build_model(
            model, groups["tp"], self.workspace, runtime, max_model_len, layers, self._experts
        )
        load_weights(self._model, model.path, weight_memory=runtime.weight_memory)
        self.weight_bytes = weight_bytes(self._model)
        self._formats = row_formats(model.attention, groups["tp"].size, cache.cache_dtype, self.workspace)
        self.kv_cache = allocate_kv_cache(
            len(layers), cache.num_blocks, cache.block_size, self._formats, device, runtime.debug_poison
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
            ContextWays.of(config, groups["pcp"].shares_memory),
            runtime.min_split_tokens,
            self.kv_cache,
            self.workspace,
        )
        self._stage = PipelineStage(groups["pp"], model.hidden_size, compute_dtype, self.workspace)
        grammars = Grammars(model.path, model.vocab_size, model.eos_token_ids)
        self._sampler = StepSampler(self._model, self.states, groups["tp"], grammars)
        self._samples = self._stage.is_last and groups["pcp"].rank == 0
        self._clock = StepClock(groups, layers, self._trace_writer())
        self._model.layer_begins = self._clock.layer_begins
        self._watched_attention = self._clock.watched(self._attention)
        self._replay = StepReplay(self.workspace)
        # What looks at single layers, or writes to buffers as they are handed out, must not be left out.
        must_compute = runtime.enforce_eager or runtime.debug_poison or runtime.trace
        if library.is_available() and runtime.device == "cpu" and not must_compute:
            self._model.run_layers = self._replay.run_layers

    def _trace_writer(self) -> TraceWriter | None:
        """This rank's part of the trace, if one is asked for."""
        trace = self._config.runtime.trace
        if not trace:
            return None
        group = self._groups["tp"]
        rank = group.ranks[group.rank]
        place = Mesh.of(self._config.parallel).coords(rank)
        title = f"rank {rank}: " + ", ".join(f"{axis.upper()} {i}" for axis, i in place._asdict().items())
        return TraceWriter(trace, rank, f"rank{rank}", title)

    def _attention_context(self, compute_dtype: torch.dtype) -> ContextParallelAttention:
        model, workspace = self._config.model, self.workspace
        form = SparseAttention if model.dsa is not None else ContextParallelAttention
        return form(
            AttentionSetup(
                attention=model.attention,
                num_heads=model.num_heads // self._groups["tp"].size,
                scale=model.softmax_scale,
                kv_cache=self.kv_cache,
                formats=self._formats,
                groups=self._groups,
                ownership=self._ownership,
                backend=attention_backend(workspace, self.kv_cache.device, compute_dtype),
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
        self._clock.begin_step(step.step_id)
        begin_step(self._groups, step.step_id)
        output = self._execute(step)
        self._clock.end_step()
        return output

    def _execute(self, step: SchedulerOutput) -> ModelRunnerOutput | None:
        self.states.apply(step)
        if self._samples:
            self._sampler.begin_step(step)
        batch = GlobalBatch.build(self.states, step, self._ownership, self._groups["dcp"].rank)
        parts = self._pcp.partition(batch)
        wanted = WantedTokens.of(batch, self.states)
        self._clock.mark("batch")
        if self._config.runtime.check_step_plans:
            checksum = plan_checksum(batch, self.states, parts, wanted.indices)
            device = self.kv_cache.device
            check_plan(self._groups["tp"], self._groups["pcp"], step.step_id, checksum, device)
            self._clock.mark("check plan")
        self._clock.begin_counting()
        rows = self._forward(batch, parts, wanted)
        if not self._samples:
            return None
        sampled = self._sampler(batch, wanted, rows)
        self._clock.mark("sample")
        if sampled is None:
            return None
        return ModelRunnerOutput(
            step_id=step.step_id,
            sampled_token_ids=sampled.sampled_token_ids,
            logprobs=sampled.logprobs,
            prompt_logprobs=sampled.prompt_logprobs,
            stats=self._clock.stats(parts, self.workspace.num_bytes),
            errors=sampled.errors,
        )

    def _forward(self, batch: GlobalBatch, parts: Partition, wanted: WantedTokens) -> torch.Tensor:
        """This stage's layers. Last stage: hidden states of the wanted tokens [n, hidden], on PCP place 0."""
        if self._experts is not None:
            self._experts.begin_step(self._expert_plan(parts))
        local = self._pcp.input_batch(batch, parts, self.states)
        self._attention.begin_step(local.plan)
        self._replay.begin_step(self._attention.step_kind)
        self._clock.plan_is(local.plan)
        self._clock.mark("plan")
        hidden = self._stage.receive(len(local.input_ids))
        self._clock.mark("receive")
        hidden = self._model(local.input_ids, local.positions, self._watched_attention, hidden)
        self._clock.layers_end()
        # At once: the next stage waits for it.
        self._stage.send(hidden)
        self._clock.mark("send")
        indices = wanted.indices if self._stage.is_last else wanted.indices[:0]
        rows = self._pcp.exchange(local, hidden, indices)
        self._clock.mark("exchange")
        return rows

    def _expert_plan(self, parts: Partition) -> ExpertPlan:
        """What experts must know of the step. Replicas, which know nothing of each other's batches,
        agree on the largest one here."""
        rank, prefill, decode = self._groups["pcp"].rank, parts.num_prefill_tokens, parts.num_decode_tokens
        capacity = dispatch_capacity(
            prefill, decode, tp=self._groups["tp"].size, u=self._groups["dcp_pcp"].size
        )
        capacities = self._groups["dp"].all_gather(torch.tensor([capacity], device=self.kv_cache.device))
        return ExpertPlan(int(prefill[rank]), int(decode[rank]), int(capacities.max()))
