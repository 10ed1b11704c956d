"""The models against transformers on random float32 checkpoints, attention by the dense oracle."""

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import transformers

from prefold.config import ModelConfig, RuntimeConfig
from prefold.hf_config import MLA_ARCHITECTURES, load_model_config
from prefold.loader import load_weights
from prefold.models.registry import build_model
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.dense import DenseContext
from prefold.testing.threads import run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

V2, V3, GLM, MINICPM3 = MLA_ARCHITECTURES
PROMPT, DECODED = 584, 16
MAX_MODEL_LEN = PROMPT + DECODED

ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 2.0},
    "yarn": {
        "factor": 4.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.3,
        "beta_fast": 16,
        "original_max_position_embeddings": 64,
    },
    "longrope": {
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [1.0, 2.0, 3.5, 5.0],
        "original_max_position_embeddings": 64,
        "factor": 4.0,
    },
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "proportional": {"factor": 2.0, "partial_rotary_factor": 0.5},
}


@dataclass(frozen=True)
class Variant:
    architecture: str
    overrides: dict

    def __str__(self) -> str:
        return f"{self.architecture.removesuffix('ForCausalLM')}-{self.overrides}"


def variants() -> list[Variant]:
    """Every rope type of every architecture, interleaved or not; the other switches take turns."""
    out = []
    for architecture in MLA_ARCHITECTURES:
        for rope_type, parameters in ROPES.items():
            for interleave in (True,) if architecture in (V2, MINICPM3) else (True, False):
                i = len(out)
                overrides = {
                    "rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters},
                    "max_position_embeddings": 256,
                    "q_lora_rank": (48, None)[i % 2],
                    "attention_bias": i // 2 % 2 == 1,
                    "tie_word_embeddings": i // 4 % 2 == 1,
                }
                if architecture not in (V2, MINICPM3):
                    overrides["rope_interleave"] = interleave
                if rope_type == "dynamic":
                    # transformers scales by the longest sequence so far, we by max_model_len.
                    overrides["max_position_embeddings"] = 500
                out.append(Variant(architecture, overrides))
    out += [
        Variant(V2, {"mlp_bias": True}),
        Variant(V2, {"topk_method": "greedy", "n_group": None, "topk_group": None, "norm_topk_prob": True}),
        Variant(V2, {"first_k_dense_replace": 0, "vocab_size": 331}),
        Variant(V3, {"norm_topk_prob": False, "n_shared_experts": 3}),
        Variant(V3, {"first_k_dense_replace": 3, "attention_bias": True, "q_lora_rank": None}),
        Variant(
            V3,
            {
                "qk_nope_head_dim": 7,
                "v_head_dim": 13,
                "num_attention_heads": 5,
                "num_key_value_heads": 5,
                "rms_norm_eps": 1e-3,
            },
        ),
        Variant(GLM, {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
        Variant(GLM, {"n_group": 2, "topk_group": 1, "num_hidden_layers": 1, "mlp_layer_types": ["sparse"]}),
    ]
    return out


def load(folder: Path, group=None, poison: bool = False, dtype: str = "auto", compute: str = "float32"):
    config = load_model_config(folder, dtype)
    workspace = Workspace(poison=poison)
    group = group or single_rank()
    model = build_model(config, group, workspace, RuntimeConfig(compute_dtype=compute), MAX_MODEL_LEN)
    load_weights(model, folder)
    return config, model


def prompt_of(config: ModelConfig, length: int = PROMPT, seed: int = 7) -> torch.Tensor:
    return torch.randint(0, config.vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


def run(model, ctx, tokens: torch.Tensor, start: int) -> torch.Tensor:
    """Logits of `tokens` at positions from `start` on, cloned out of the workspace."""
    hidden = model(tokens, torch.arange(start, start + len(tokens)), ctx)
    return model.compute_logits(hidden).clone()


def greedy(model, config: ModelConfig, prompt: torch.Tensor, num_tokens: int, chunks=(500,)):
    """Tokens and logits [prompt + num_tokens, vocab] of a run in chunks, then token by token."""
    ctx, logits = DenseContext(config), []
    bounds = [0, *chunks, len(prompt)]
    for start, end in pairwise(bounds):
        logits.append(run(model, ctx, prompt[start:end], start))
    tokens = prompt
    for _ in range(num_tokens):
        tokens = torch.cat((tokens, logits[-1][-1:].argmax(-1)))
        logits.append(run(model, ctx, tokens[-1:], len(tokens) - 1))
    return tokens, torch.cat(logits)


class Reference:
    """transformers on a checkpoint, with a note of how close its routers came to a tie."""

    def __init__(self, folder: Path, architecture: str, dtype: torch.dtype = torch.float32) -> None:
        model_class = getattr(transformers, architecture)
        self.model = model_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        self.margin = 1.0
        for module in self.model.modules():
            if type(module).__name__.endswith("TopkRouter"):
                module.register_forward_hook(self._note_margin)

    def logits(self, tokens: torch.Tensor) -> torch.Tensor:
        """[n, vocab]; sets `margin` to the smallest score by which any token chose an expert or group."""
        self.margin = 1.0
        with torch.no_grad():
            return self.model(tokens[None]).logits[0].float()

    def _note_margin(self, router, _inputs, output) -> None:
        scores = output[0].softmax(-1) if hasattr(router, "topk_method") else output[0].sigmoid()
        scores = scores + getattr(router, "e_score_correction_bias", 0.0)
        if (router.num_group or 1) > 1:
            grouped = scores.unflatten(-1, (router.num_group, -1))
            best = grouped.topk(1 if hasattr(router, "topk_method") else 2, dim=-1).values.sum(-1)
            self._note(best, router.topk_group)
            kept = best.topk(router.topk_group).indices
            mask = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
            scores = grouped.masked_fill(~mask[..., None], -1.0).flatten(1)
        self._note(scores, router.top_k)

    def _note(self, scores: torch.Tensor, k: int) -> None:
        if k < scores.shape[-1]:
            best = scores.topk(k + 1).values
            self.margin = min(self.margin, float((best[:, k - 1] - best[:, k]).min()))


def run_beside(folder: Path, architecture: str, num_tokens: int = DECODED, **load_options):
    """Tokens, our logits and transformers' for a prompt on which no router is near a tie.

    Where two experts score the same but for rounding, either choice is right and the logits differ.
    """
    config, model = load(folder, **load_options)
    theirs = Reference(folder, architecture)
    for seed in range(8):
        tokens, logits = greedy(model, config, prompt_of(config, seed=seed), num_tokens)
        expected = theirs.logits(tokens)
        if theirs.margin > 3e-6:
            return tokens, logits, expected
    raise AssertionError("every prompt brings a router near a tie")


@pytest.mark.parametrize("variant", variants(), ids=str)
def test_logits_and_greedy_tokens_equal_transformers(variant: Variant, tmp_path: Path):
    folder = make_checkpoint(variant.architecture, tmp_path, **variant.overrides)
    tokens, logits, expected = run_beside(folder, variant.architecture, poison=True)
    assert (logits - expected).abs().max() < 1e-4
    assert expected[PROMPT - 1 : -1].argmax(-1).tolist() == tokens[PROMPT:].tolist()
    assert len(set(tokens[PROMPT:].tolist())) > 4, "a checkpoint whose greedy tokens do not vary tests little"


def test_any_chunks_give_the_same_logits(checkpoints: dict[str, Path]):
    config, model = load(checkpoints[V3], poison=True)
    prompt = prompt_of(config, 75, seed=8)  # with seed 7 a rounding decides between two groups of experts
    _, whole = greedy(model, config, prompt, 0, chunks=())
    for budget in (1, 2, 7, 16, 33, 72):
        _, logits = greedy(model, config, prompt, 0, chunks=range(budget, 75, budget))
        assert (logits - whole).abs().max() < 1e-4, budget


@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES)
@pytest.mark.parametrize("poison", [True, False])
def test_no_tokens_are_a_batch_too(architecture: str, poison: bool, checkpoints: dict[str, Path]):
    config, model = load(checkpoints[architecture], poison=poison)
    none = torch.empty(0, dtype=torch.int64)
    hidden = model(none, none, DenseContext(config))
    assert hidden.shape == (0, config.hidden_size)
    assert model.compute_logits(hidden).shape == (0, config.vocab_size)


def test_poisoned_buffers_change_no_bit(checkpoints: dict[str, Path]):
    runs = []
    for poison in (False, True):
        config, model = load(checkpoints[V2], poison=poison)
        runs.append(greedy(model, config, prompt_of(config, 90), 4, chunks=(50,))[1])
    assert torch.equal(*runs)


@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES)
def test_a_step_allocates_nothing_that_grows_with_its_buffers(
    architecture: str, checkpoints: dict[str, Path]
):
    config, model = load(checkpoints[architecture])
    ctx = FixedContext(config)
    prompt = prompt_of(config, 300)
    run(model, ctx, prompt, 0)
    size = model.workspace.num_bytes
    # The smallest activation that counts as large: one row of hidden per token.
    with LargestAllocation() as largest:
        model(prompt, torch.arange(300), ctx)
    assert model.workspace.num_bytes == size
    assert largest.num_bytes < 300 * config.hidden_size * 4, largest.op


class FixedContext:
    """Attention that returns a buffer of its own: what is measured is the model."""

    def __init__(self, config: ModelConfig) -> None:
        self._out = torch.ones(300, config.num_heads * config.mla.v_head_dim)

    def attend(self, layer_idx, q, kv, rows):
        return self._out[: q.shape[0]]


class LargestAllocation(torch.utils._python_dispatch.TorchDispatchMode):
    """Notes the largest result of an operator that is neither a view nor one of its arguments."""

    num_bytes, op = 0, ""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = {t.untyped_storage().data_ptr() for t in tensors_in((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in inputs and storage.nbytes() > self.num_bytes:
                self.num_bytes, self.op = storage.nbytes(), str(func)
        return result


def tensors_in(tree) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES)
def test_tensor_parallel_ranks_equal_one_rank(architecture: str, size: int, checkpoints: dict[str, Path]):
    folder = checkpoints[architecture]
    config, model = load(folder)
    # With seed 7 two groups of experts of one token are equal but for a rounding.
    prompt = prompt_of(config, 70, seed=8)
    tokens, expected = greedy(model, config, prompt, 4, chunks=(30,))

    def rank_main(group):
        torch.set_num_threads(1)
        rank_config, rank_model = load(folder, group, poison=True)
        return greedy(rank_model, rank_config, prompt, 4, chunks=(30,))

    for rank_tokens, logits in run_threads(size, rank_main):
        assert torch.equal(rank_tokens, tokens)
        assert (logits - expected).abs().max() < 1e-4


def test_vocabulary_that_tp_does_not_divide(tmp_path: Path):
    """ceil(9 / 8) rows per rank: the last ranks hold none."""
    folder = make_checkpoint(V3, tmp_path, vocab_size=9, attention_bias=True)
    config, model = load(folder)
    prompt = torch.arange(9).repeat(3)
    _, expected = greedy(model, config, prompt, 3, chunks=())
    results = run_threads(8, lambda group: greedy(load(folder, group)[1], config, prompt, 3, chunks=()))
    assert all((logits - expected).abs().max() < 1e-4 for _, logits in results)


class Chain:
    """Pipeline stages one after the other, each with a cache of its own: what a whole model is to `run`."""

    def __init__(self, folder: Path, bounds: list[int], group=None, compute: str = "float32") -> None:
        config = load_model_config(folder)
        self.stages = []
        for start, end in pairwise(bounds):
            runtime, workspace = RuntimeConfig(compute_dtype=compute), Workspace(poison=True)
            group = group or single_rank()
            model = build_model(config, group, workspace, runtime, MAX_MODEL_LEN, range(start, end))
            load_weights(model, folder)
            self.stages.append((model, DenseContext(config)))
        self.compute_logits = model.compute_logits

    def __call__(self, tokens: torch.Tensor, positions: torch.Tensor, ctx: object) -> torch.Tensor:
        hidden = None
        for model, stage_ctx in self.stages:
            # As if it came from another process.
            hidden = model(tokens, positions, stage_ctx, None if hidden is None else hidden.clone())
            assert hidden.dtype == model.compute_dtype
        return hidden


def splits(num_layers: int) -> list[list[int]]:
    """Bounds of 2, 3 and `num_layers` stages, uneven ones too."""
    return [
        [0, 1, num_layers],
        [0, num_layers - 1, num_layers],
        [0, 1, 3, num_layers],
        [*range(num_layers + 1)],
    ]


@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES)
@pytest.mark.parametrize("tied", [False, True])
def test_stages_equal_the_whole_model_bit_for_bit(architecture: str, tied: bool, tmp_path: Path):
    layers = {"num_hidden_layers": 5}
    if architecture == GLM:
        layers["mlp_layer_types"] = ["dense", "sparse", "dense", "sparse", "sparse"]
    folder = make_checkpoint(architecture, tmp_path, tie_word_embeddings=tied, **layers)
    config = load_model_config(folder)
    prompt = prompt_of(config, 90)
    for compute in ("float32", "bfloat16"):
        whole = load(folder, compute=compute)[1]
        tokens, expected = greedy(whole, config, prompt, 6, chunks=(1, 50, 50))
        for bounds in splits(5):
            chain = Chain(folder, bounds, compute=compute)
            chained_tokens, logits = greedy(chain, config, prompt, 6, chunks=(1, 50, 50))
            assert torch.equal(chained_tokens, tokens)
            assert torch.equal(logits, expected), bounds


def test_stages_of_tensor_parallel_ranks(checkpoints: dict[str, Path]):
    folder = checkpoints[V3]
    config = load_model_config(folder)
    prompt = prompt_of(config, 40)

    def whole(group):
        return greedy(load(folder, group, poison=True)[1], config, prompt, 3, chunks=(30,))[1]

    def chained(group):
        bounds = [*range(config.num_layers + 1)]
        return greedy(Chain(folder, bounds, group), config, prompt, 3, chunks=(30,))[1]

    for one, other in zip(run_threads(2, whole), run_threads(2, chained)):
        assert torch.equal(one, other)


def test_a_stage_tells_attention_its_layers_from_0_on(checkpoints: dict[str, Path]):
    config = load_model_config(checkpoints[V3])
    chain = Chain(checkpoints[V3], [0, 1, config.num_layers])
    run(chain, None, prompt_of(config, 3), 0)
    assert [list(ctx.kv) for _, ctx in chain.stages] == [[0], list(range(config.num_layers - 1))]


@pytest.mark.parametrize("architecture", MLA_ARCHITECTURES)
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_bfloat16_weights(architecture: str, compute: str, tmp_path: Path):
    """Errors against the same weights in float32, next to what transformers makes in bfloat16."""
    folder = make_checkpoint(architecture, tmp_path, dtype="bfloat16", num_hidden_layers=2)
    config, model = load(folder, compute=compute)
    assert config.dtype == "bfloat16"
    tokens, logits = greedy(model, config, prompt_of(config, 100), 4, chunks=(60,))
    exact = Reference(folder, architecture).logits(tokens)
    theirs = Reference(folder, architecture, torch.bfloat16).logits(tokens)

    def typical_error(approximate: torch.Tensor) -> float:
        # The median: a token whose routing flips is far off in any low precision.
        return float((approximate - exact).abs().amax(dim=-1).median())

    assert logits.dtype == torch.float32
    limit = typical_error(theirs) * (1.5 if compute == "bfloat16" else 1.0)
    assert typical_error(logits) < limit


def test_float32_of_a_bfloat16_checkpoint_is_exact(tmp_path: Path):
    folder = make_checkpoint(V3, tmp_path, dtype="bfloat16")
    _, logits, expected = run_beside(folder, V3, 2, dtype="float32")
    assert (logits - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One tiny float32 checkpoint per architecture."""
    return {name: make_checkpoint(name, tmp_path_factory.mktemp(name)) for name in MLA_ARCHITECTURES}
