"""Contexts longer than the workspace, both forms of MLA, values narrower and wider than keys, no nope."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from prefold import SamplingParams
from prefold.attention import travel
from prefold.attention.mla import UpProjectedForm
from prefold.testing.reference import Case
from prefold.worker import step_plan

MODELS = ["small", "wide-values", "no-nope"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
FORMS: dict[str, Callable[..., bool] | None] = {
    "by cost": None,
    "absorbed": lambda mla, num_queries, num_keys: True,
    "up-projected": lambda mla, num_queries, num_keys: False,
    # Both in one step, and a request changes its form from chunk to chunk.
    "alternating": lambda mla, num_queries, num_keys: (num_queries + num_keys) % 2 == 0,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tiny) -> tuple[str, list[Case]]:
    return request.param, tiny.cases([250, 33, 1, 64, 97], request.param, num_tokens=4, seed=8)


@pytest.fixture(params=FORMS, ids=str)
def form(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    replacement = FORMS[request.param]
    if replacement is not None:
        for module in (step_plan, travel):
            monkeypatch.setattr(module, "prefer_absorbed", replacement)
    if request.param == "absorbed":
        monkeypatch.setattr(UpProjectedForm, "keys_values", None)  # nothing may need it
    return request.param


@pytest.mark.parametrize("workspace", [32, 5])
@pytest.mark.parametrize("budget", [1000, 75])
def test_tokens(tiny, model: tuple[str, list[Case]], form: str, workspace: int, budget: int):
    name, cases = model
    llm = tiny.llm(name, context_workspace_tokens=workspace, max_num_batched_tokens=budget)
    for _ in range(2):  # the second time with a context of whole blocks from the cache
        outputs = llm.generate([case.prompt for case in cases], GREEDY)
        assert [output.outputs[0].token_ids for output in outputs] == [case.tokens for case in cases]
    assert outputs[0].metrics.num_cached_tokens == 248


def test_the_models_differ_in_the_sizes_that_matter(tiny):
    sizes = {}
    for name in MODELS:
        mla = tiny.llm(name).engine.config.model.mla
        sizes[name] = (mla.qk_head_dim, mla.v_head_dim)
    assert sizes == {"small": (24, 12), "wide-values": (24, 40), "no-nope": (8, 12)}
