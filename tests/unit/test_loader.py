"""Loading is strict, reads only what a rank needs, and takes both forms of experts."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prefold.config import RuntimeConfig
from prefold.hf_config import load_model_config
from prefold.layers.weight import Weight
from prefold.loader import load_weights
from prefold.models.registry import build_model
from prefold.testing.checkpoints import make_checkpoint
from prefold.testing.threads import ThreadGroup, run_threads, single_rank
from prefold.workspace import Workspace

torch.set_num_threads(1)

V3 = "DeepseekV3ForCausalLM"
EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict[str, torch.Tensor]]:
    """config.json and all tensors of a tiny checkpoint."""
    folder = make_checkpoint(V3, tmp_path_factory.mktemp("v3"), num_hidden_layers=2)
    contents: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        contents |= load_file(file)
    return json.loads((folder / "config.json").read_text()), contents


@pytest.fixture
def write(tmp_path: Path, tensors):
    """Write a checkpoint of one file with changed tensors (None removes) and config keys."""

    def write(changes: dict | None = None, **config) -> Path:
        merged = {k: v for k, v in (tensors[1] | (changes or {})).items() if v is not None}
        save_file(merged, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text(json.dumps(tensors[0] | config))
        return tmp_path

    return write


def load(folder: Path, group: ThreadGroup | None = None, dtype: str = "auto", layers: range | None = None):
    config = load_model_config(folder, dtype)
    model = build_model(config, group or single_rank(), Workspace(), RuntimeConfig(), 64, layers)
    for parameter in model.parameters():
        parameter.fill_(float("nan"))
    load_weights(model, folder)
    return model


def state(model) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters())


def test_every_parameter_is_filled(write):
    for name, value in state(load(write())).items():
        assert not value.isnan().any(), name
        assert not value.requires_grad


def test_progress_counts_every_tensor(write, tensors):
    folder = write()
    model = build_model(load_model_config(folder), single_rank(), Workspace(), RuntimeConfig(), 64)
    seen = []
    load_weights(model, folder, lambda done, total: seen.append((done, total)))
    total = len(tensors[1])
    assert seen == [(i + 1, total) for i in range(total)]


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({EXPERT: None}, {}, rf"1 missing tensors: {EXPERT}"),
        ({"lm_head.weight": None}, {}, "missing tensors: lm_head.weight"),
        (
            {"model.layers.0.self_attn.q_a_proj.bias": torch.ones(48)},
            {},
            "1 unexpected tensors: .*q_a_proj.bias",
        ),
        ({"model.layers.3.norm.weight": torch.ones(2)}, {}, "unexpected tensors: model.layers.3.norm.weight"),
        (
            {EXPERT: torch.ones(31, 64)},
            {},
            rf"{EXPERT} is \[31, 64\], needs \[32, 64\] \(in model\.safetensors\)",
        ),
        ({EXPERT: torch.ones(32, 64, dtype=torch.float8_e4m3fn)}, {}, rf"{EXPERT} is F8_E4M3"),
        ({}, {"attention_bias": True}, r"6 missing tensors: .*q_a_proj.bias.*, \.\.\."),
        ({}, {"vocab_size": 321}, r"embed_tokens.weight is \[320, 64\], needs \[321, 64\]"),
    ],
)
def test_a_checkpoint_that_does_not_fit(write, changes: dict, config: dict, message: str):
    with pytest.raises(ValueError, match=message):
        load(write(changes, **config))


def test_errors_name_a_few_and_count_the_rest(write):
    extra = {f"extra.{i}": torch.ones(1) for i in range(9)}
    with pytest.raises(ValueError, match=r"9 unexpected tensors: extra\.0, .*extra\.4, \.\.\.$"):
        load(write(extra))


def test_truncated_and_missing_shards(write):
    folder = write()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated"):
        load(folder)
    file.unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        load(folder)


def test_header_that_only_safetensors_sees_through(write):
    """Shapes that do not fit their byte ranges: the file's size is right all the same."""
    folder = write()
    file = folder / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content.replace(b'"shape":[320,64]', b'"shape":[64,320]'))
    with pytest.raises(ValueError, match=r"is \[64, 320\], needs \[320, 64\]"):
        load(folder)
    file.write_bytes(content.replace(b'"dtype":"F32"', b'"dtype":"F16"', 1))
    with pytest.raises(ValueError, match=r"model\.safetensors is corrupt"):
        load(folder)


def test_what_is_knowingly_left_aside(write, tensors):
    mtp = {f"model.layers.2.{name}": torch.ones(3) for name in ("eh_proj.weight", "enorm.weight")}
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    empty = {"model.layers.1.mlp.extra.weight": torch.ones(0, 64)}
    load(write(mtp | old | empty))
    with pytest.raises(ValueError, match=r"2 unexpected tensors: model\.layers\.2\.eh_proj"):
        load(write(mtp, num_nextn_predict_layers=0))
    tied = load(write({}, tie_word_embeddings=True))
    assert tied.head is tied.embedding


def test_stacked_experts_equal_experts_apart(write, tensors):
    apart = {name: value.clone() for name, value in state(load(write())).items()}
    prefix = "model.layers.1.mlp.experts"
    changes: dict = {name: None for name in tensors[1] if name.startswith(prefix)}

    def stack(kind: str) -> torch.Tensor:
        return torch.stack([tensors[1][f"{prefix}.{i}.{kind}.weight"] for i in range(8)])

    changes[f"{prefix}.gate_up_proj"] = torch.cat((stack("gate_proj"), stack("up_proj")), dim=1)
    changes[f"{prefix}.down_proj"] = stack("down_proj")
    folder = write(changes)
    for name, value in state(load(folder)).items():
        assert torch.equal(value, apart[name]), name
    halves = run_threads(2, lambda group: state(load(folder, group)))
    name = "layers.1.mlp.experts.gate_up"
    gate, up = apart[name].chunk(2, dim=1)
    for rank, half in enumerate(halves):
        expected = torch.cat((gate.chunk(2, dim=1)[rank], up.chunk(2, dim=1)[rank]), dim=1)
        assert torch.equal(half[name], expected)
        down = apart["layers.1.mlp.experts.down"].chunk(2, dim=2)[rank]
        assert torch.equal(half["layers.1.mlp.experts.down"], down)


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_are_converted(write, tensors, stored: torch.dtype, dtype: str):
    changes = {name: value.to(stored) for name, value in tensors[1].items()}
    model = load(write(changes), dtype=dtype)
    got = model.layers["1"].mlp.experts.gate_up[3, 32:]
    assert got.dtype == getattr(torch, dtype)
    assert torch.equal(got, changes[EXPERT].to(got.dtype))
    router = model.layers["1"].mlp.router
    assert router.weight.dtype == router.bias.dtype == torch.float32


def test_ranks_share_out_the_vocabulary(write, tensors):
    """320 rows over 3 ranks: 107, 107, 106 and a row of zeros."""
    # 3 divides none of the heads, so only the embedding is looked at.
    from prefold.layers.embedding import VocabParallel
    from prefold.layers.linear import Env

    def rank_main(group):
        env = Env(group, Workspace(), torch.float32, torch.float32, "cpu")
        embedding = VocabParallel(320, 64, env)
        (weight,) = embedding.weights("model.embed_tokens")
        slices, destination = weight.parts[0]
        destination.copy_(tensors[1][weight.name][slices])
        ids = torch.arange(320)
        out = embedding.embed(ids, torch.empty(320, 64))
        return embedding.weight.clone(), out, embedding.logits(out).clone()

    whole = tensors[1]["model.embed_tokens.weight"]
    results = run_threads(3, rank_main)
    assert torch.equal(torch.cat([rows for rows, _, _ in results])[:320], whole)
    assert results[2][0][106:].eq(0).all()
    for _, out, logits in results:
        assert torch.equal(out, whole)
        torch.testing.assert_close(logits, whole @ whole.t(), rtol=1e-5, atol=1e-5)


STAGES = [range(1), range(1, 2)]
"""The two layers of the tiny checkpoint, one per stage."""


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_has_its_own_parameters_and_no_others(write, tied: bool):
    """Together all of the whole model's, under the same names and with the same values."""
    folder = write(tie_word_embeddings=tied)
    whole = load(folder)
    first, last = (load(folder, layers=layers) for layers in STAGES)
    assert state(first).keys() & state(last).keys() == set()
    extra = {"head.weight": whole.embedding.weight} if tied else {}  # tied: the last stage has a copy
    assert state(first).keys() | state(last).keys() == state(whole).keys() | extra.keys()
    for stage in (first, last):
        for name, value in state(stage).items():
            assert torch.equal(value, (state(whole) | extra)[name]), name
    assert {name.split(".")[0] for name in state(first)} == {"embedding", "layers"}
    assert {name.split(".")[0] for name in state(last)} == {"layers", "norm", "head"}


def num_bytes(model) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_a_stage_takes_its_share_of_memory(write):
    folder = write()
    whole = num_bytes(load(folder))
    head = num_bytes(load(folder).head)
    assert sum(num_bytes(load(folder, layers=layers)) for layers in STAGES) == whole
    folder = write(tie_word_embeddings=True)
    assert num_bytes(load(folder)) == whole - head
    assert sum(num_bytes(load(folder, layers=layers)) for layers in STAGES) == whole


def test_a_stage_reads_its_tensors_only(write, tensors):
    folder = write()
    seen: list[set[str]] = []
    for layers in STAGES:
        model = build_model(
            load_model_config(folder), single_rank(), Workspace(), RuntimeConfig(), 64, layers
        )
        seen.append({weight.name for weight in model.weights(tensors[1].keys()) if weight.parts})
        counts = []
        load_weights(model, folder, lambda done, total, counts=counts: counts.append(total))
        assert counts == [len(seen[-1])] * len(seen[-1])
    assert seen[0] & seen[1] == set()
    assert seen[0] | seen[1] == set(tensors[1])


@pytest.mark.parametrize("tied", [False, True])
def test_some_stage_misses_any_tensor(write, tensors, tied: bool):
    """Exactly the stage that needs it; a tied head needs the embedding on two."""
    for name in tensors[1]:
        if tied and name == "lm_head.weight":
            continue
        folder = write({name: None}, tie_word_embeddings=tied)
        failed = [stage for stage, layers in enumerate(STAGES) if refuses(folder, layers, "missing", name)]
        if name == "model.embed_tokens.weight":
            assert failed == ([0, 1] if tied else [0])
        elif name.startswith("model.layers."):
            assert failed == [int(name.split(".")[2])]
        else:
            assert failed == [1]


@pytest.mark.parametrize(
    ("name", "stages"),
    [
        ("model.layers.0.extra", [0]),
        ("model.layers.1.mlp.experts.8.up_proj.weight", [1]),
        ("model.layers.00.extra", [0, 1]),
        ("model.layers.4.extra", [0, 1]),
        ("model.layers.extra", [0, 1]),
        ("model.layer.0.extra", [0, 1]),
        ("model.embed_tokens.bias", [0, 1]),
        ("lm_head.bias", [0, 1]),
        ("extra", [0, 1]),
    ],
)
def test_some_stage_refuses_any_unexpected_tensor(write, name: str, stages: list[int]):
    folder = write({name: torch.ones(3)})
    assert [i for i, layers in enumerate(STAGES) if refuses(folder, layers, "unexpected", name)] == stages


def refuses(folder: Path, layers: range, kind: str, name: str) -> bool:
    try:
        load(folder, layers=layers)
    except ValueError as error:
        assert f"1 {kind} tensors: {name}" in str(error)  # noqa: PT017
        return True
    return False


def test_a_tensor_without_a_part_is_checked_and_not_read(write, tensors):
    class Needs:
        def weights(self, names):
            yield Weight("extra.weight", (2, 3), ())

        def ignorable(self, name):
            return name in tensors[1]

    counts = []
    load_weights(Needs(), write({"extra.weight": torch.ones(2, 3)}), lambda *count: counts.append(count))
    assert counts == []
    with pytest.raises(ValueError, match=r"extra.weight is \[3, 2\], needs \[2, 3\]"):
        load_weights(Needs(), write({"extra.weight": torch.ones(3, 2)}))
    with pytest.raises(ValueError, match=r"missing tensors: extra.weight"):
        load_weights(Needs(), write())
