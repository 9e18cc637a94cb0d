"""The plan against counts made by hand, by the store's own arithmetic, and by the real draft."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.artifact import open_build
from draftproof.draft.eagle3 import Eagle3Draft, draft_config
from draftproof.plan import RunPlan, make_plan, measure_flops
from draftproof.recipe import Recipe
from draftproof.records.layout import StoreLayout, plan_shards, token_bytes
from draftproof.stage import Outcome
from draftproof.target.target import Target

TOKENS, SUPERVISED, ROWS = 100_000, 60_000, 250


def _recipe(run: Path, **sections: Any) -> Recipe:
    data = {} if "regenerate" in sections else {"data": {"train": [str(run / "data.jsonl")]}}
    return Recipe.model_validate({"target": {"model": "tiny"}, "run": {"dir": str(run)}, "vocab": {"size": 64}, **data, **sections})


def _plan(run: Path, target: Target, flops: float | None = None, **sections: Any) -> RunPlan:
    return make_plan(_recipe(run, **sections), target, run, flops=flops)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose `prepare` has counted its tokens."""
    build = open_build(tmp_path / "prepare", stage="prepare", ingredients={})
    build.finish(
        Outcome({"tokens": TOKENS, "supervised_tokens": SUPERVISED, "rows_out": ROWS, "splits": {"train": 245, "validation": 5}}, {})
    )
    return tmp_path


@pytest.mark.parametrize(
    ("extract", "layout", "by_hand"),
    [
        ({}, StoreLayout((2, 4, 5), 32, "bf16", 320), 3 * 64 + 64 + 8),
        ({"codec": "fp8"}, StoreLayout((2, 4, 5), 32, "fp8", 320), 3 * (32 + 4) + 64 + 8),
        ({"boundaries": [1, 2, 3, 7]}, StoreLayout((1, 2, 3, 7), 32, "bf16", 320), 4 * 64 + 64 + 8),
    ],
)
def test_the_bytes_of_the_store(run: Path, tm_target: Target, extract: dict[str, Any], layout: StoreLayout, by_hand: int) -> None:
    planned = _plan(run, tm_target, extract=extract).stages["extract"]
    assert planned.bytes == by_hand * TOKENS == token_bytes(layout) * TOKENS


def test_there_is_room_for_the_files_of_the_store(run: Path, tm_target: Target) -> None:
    planned = _plan(run, tm_target, extract={"shard_gb": 0.001}).stages["extract"]
    shards = plan_shards([TOKENS // ROWS] * ROWS, StoreLayout((2, 4, 5), 32, "bf16", 320), 0.001)
    assert len(shards) + 3 <= planned.files <= len(shards) + 8  # journal, store.json, manifest.json


def test_tokens_are_those_that_prepare_counted(run: Path, tm_target: Target) -> None:
    plan = _plan(run, tm_target)
    assert (plan.tokens, plan.supervised_tokens, plan.tokens_known) == (TOKENS, SUPERVISED, True)


def test_before_prepare_tokens_are_guessed_from_the_data(tmp_path: Path, tm_target: Target) -> None:
    (tmp_path / "data.jsonl").write_bytes((b"x" * 399 + b"\n") * 50)
    plan = _plan(tmp_path, tm_target, evaluate={"max_tokens": 10})  # 2 % of the lines are held out: one
    assert (plan.tokens, plan.supervised_tokens, plan.tokens_known) == (5_000, 3_500, False)
    assert "answers of 10 tokens" in plan.stages["evaluate"].protects
    assert "regenerate" not in plan.stages


def test_answers_to_come_count_as_long_as_they_may_get(tmp_path: Path, tm_target: Target) -> None:
    (tmp_path / "prompts.jsonl").write_bytes((b"x" * 39 + b"\n") * 50)
    plan = _plan(tmp_path, tm_target, regenerate={"prompts": str(tmp_path / "prompts.jsonl"), "max_tokens": 30})
    assert (plan.tokens, plan.supervised_tokens) == (500 + 1_500, 1_500)
    assert next(iter(plan.stages)) == "regenerate"


@pytest.mark.parametrize(
    ("vocab", "draft"),
    [
        ({"size": 64}, {}),
        ({"size": None}, {}),
        ({"size": 64}, {"intermediate_size": 48}),
        ({"size": 64}, {"qk_norm": True, "fc_norm": True}),
    ],
)
def test_the_drafts_size_is_that_of_the_real_one(run: Path, tm_target: Target, vocab: dict[str, Any], draft: dict[str, Any]) -> None:
    """All matrices; the norms, some hundred numbers, are left out. On disk 36 bytes each: the draft, and while one checkpoint
    replaces another two of masters, both moments and best weights."""
    recipe = _recipe(run, vocab=vocab, draft=draft, export={"formats": ["vllm"]})
    shape = draft_config(tm_target.config, recipe.draft, boundaries=(2, 4, 5), draft_vocab_size=vocab["size"] or 320)
    real = sum(parameter.numel() for parameter in Eagle3Draft(shape).parameters() if parameter.dim() == 2)
    width = draft.get("intermediate_size", 64)
    by_hand = 3 * 32 * 32 + 64 * (32 + 16 + 16) + 32 * 32 + 3 * 32 * width + (vocab["size"] or 320) * 32
    assert real == by_hand
    assert make_plan(recipe, tm_target, run, flops=None).stages["train"].bytes == (4 + 2 * 16) * real


def test_the_targets_weights_are_those_of_its_files(run: Path, tm_target: Target) -> None:
    plan = _plan(run, tm_target)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32
    by_hand = 4 * (8 * layer + 2 * 320 * 32 + 32)
    assert by_hand <= plan.weight_bytes < by_hand + 20_000  # the header
    assert plan.target_loads == 2
    assert _plan(run, tm_target, evaluate={"serve": "vllm"}).target_loads == 3


def test_seconds_follow_the_rate_of_the_device(run: Path, tm_target: Target) -> None:
    """A prefill takes two operations a weight and token, the embedding being no product; 60 % of the rate is reached."""
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64 + 2 * 32
    operations = 2 * (8 * layer + 320 * 32 + 32) * TOKENS
    slow, fast = (_plan(run, tm_target, flops=flops).stages for flops in (1e9, 2e9))
    assert slow["extract"].seconds == pytest.approx(operations / 0.6e9, rel=0.05)
    for name in ("extract", "train", "evaluate"):
        assert slow[name].seconds == pytest.approx(2 * (fast[name].seconds or 0))
    seconds = round(slow["extract"].seconds or 0)
    assert slow["extract"].protects == f"a pass of the target over 100,000 tokens, about {seconds} s"
    unknown = _plan(run, tm_target).stages
    assert [unknown[name].seconds for name in ("extract", "train", "evaluate")] == [None] * 3


def test_training_takes_as_long_as_its_steps(run: Path, tm_target: Target) -> None:
    once, twice = (_plan(run, tm_target, flops=1e9, train={"epochs": epochs}).stages["train"].seconds for epochs in (1, 2))
    assert twice == pytest.approx(2 * (once or 0))
    steps = _plan(run, tm_target, flops=1e9, train={"steps": 10, "batch_tokens": 10_000}).stages["train"].seconds
    assert steps == pytest.approx(once)  # 10 steps of 10,000 tokens are one pass


def test_a_rate_is_measured_here() -> None:
    assert 1e8 < measure_flops("cpu") < 1e15


def test_a_plan_is_plain_json(run: Path, tm_target: Target) -> None:
    from draftproof.summary import plan_document

    document = json.loads(json.dumps(plan_document(_plan(run, tm_target, flops=1e9))))
    assert list(document["stages"]) == ["prepare", "vocab", "extract", "train", "export", "evaluate"]
