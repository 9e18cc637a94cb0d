"""The training stage on a tiny target: it learns, resumes bit for bit, and forecasts what the decoder measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from draftproof.draft.files import load_draft
from draftproof.evaluate.decode import EagleDrafter, acceptance, decode
from draftproof.recipe import DraftSettings, TrainSettings
from draftproof.records.rows import read_rows
from draftproof.records.store import Store
from draftproof.train import loop
from draftproof.train.batches import assemble
from draftproof.train.loop import NonFinite
from draftproof.train.stage import run
from tests.train.conftest import TinyRun

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

    from draftproof.target.target import Target

SETTINGS = TrainSettings(steps=20, unroll=3, batch_tokens=128, learning_rate=3e-3, evaluations=4, checkpoints=4)


class _Killed(BaseException):
    """Stands for a SIGKILL: nothing gets to clean up."""


def _train(tiny: TinyRun, target: Target, folder: Path, settings: TrainSettings = SETTINGS, **draft: Any) -> Any:
    folder.mkdir(exist_ok=True)
    return run(tiny.task(folder), settings, target, draft=DraftSettings(**draft), draft_tokens=3)


def _losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def test_it_learns_and_says_what_it_did(tiny_run: TinyRun, tm_target: Target, tmp_path: Path) -> None:
    outcome = _train(tiny_run, tm_target, tmp_path / "train", SETTINGS.model_copy(update={"steps": 150, "learning_rate": 1e-2}))
    lines = [json.loads(line) for line in (tmp_path / "train" / "metrics.jsonl").read_text().splitlines()]
    losses = list(_losses(tmp_path / "train").values())
    assert len(losses) == 150
    assert sum(losses[-10:]) < 0.5 * sum(losses[:10])
    forecasts = {line["step"]: line["by_walk"]["acceptance_length"] for line in lines if line["kind"] == "forecast"}
    assert list(forecasts) == [38, 75, 112, 150]
    best = max(forecasts, key=lambda step: (forecasts[step], -step))
    assert (outcome.counts["best_step"], outcome.counts["acceptance_length"]) == (best, forecasts[best])


def test_twenty_steps_are_ten_and_ten_bit_for_bit(
    tiny_run: TinyRun, tm_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = _train(tiny_run, tm_target, tmp_path / "whole")

    taken = 0
    learning_rate = loop.learning_rate

    def killed_at_step_14(*args: Any) -> float:
        nonlocal taken
        taken += 1
        if taken == 14:
            raise _Killed
        return learning_rate(*args)

    monkeypatch.setattr(loop, "learning_rate", killed_at_step_14)
    with pytest.raises(_Killed):
        _train(tiny_run, tm_target, tmp_path / "parts")
    taken = -1000
    resumed = _train(tiny_run, tm_target, tmp_path / "parts")
    assert taken == -1000 + 10  # from the checkpoint after step 10, not from the start

    assert resumed.contents == whole.contents
    for name, tensor in load_file(tmp_path / "whole" / "draft.safetensors").items():
        assert torch.equal(tensor, load_file(tmp_path / "parts" / "draft.safetensors")[name]), name
    assert _losses(tmp_path / "parts") == _losses(tmp_path / "whole")
    assert list(_losses(tmp_path / "parts")) == list(range(1, 21))


def test_the_forecast_by_walk_is_what_the_decoder_measures(
    tiny_run: TinyRun, tm_target: Target, tm: LlamaForCausalLM, tmp_path: Path
) -> None:
    """On the target's own greedy answers the two count the same cycles, but for those that the answer's end cuts short."""
    _train(tiny_run, tm_target, tmp_path / "train", SETTINGS.model_copy(update={"steps": 150, "learning_rate": 1e-2, "evaluations": 1}))
    forecast = json.loads((tmp_path / "train" / "metrics.jsonl").read_text().splitlines()[-1])["by_walk"]
    draft, _ = load_draft(tmp_path / "train")
    eagle = EagleDrafter(draft, embedding=tm.model.embed_tokens.weight, kept=torch.from_numpy(tiny_run.kept))
    decoded = decode(tm, eagle, tiny_run.prompts, draft_tokens=3, max_tokens=24, stop_ids=())
    assert decoded.outputs == tiny_run.answers

    whole_cycles = []
    for accepted in decoded.accepted:
        known, inside = 1, []  # tokens of the answer known when the cycle starts
        for count in accepted:
            if known + 3 <= 24:
                inside.append(count)
            known += count + 1
        whole_cycles.append(inside)
    length, by_position, cycles = acceptance(whole_cycles, 3)
    assert forecast["cycles"] == cycles
    assert forecast["by_position"] == pytest.approx(by_position, abs=0.02)  # the store keeps bf16 states
    assert forecast["acceptance_length"] == pytest.approx(length, abs=0.05)
    assert length > 1.3  # it learned something, so the comparison is not one of zeros


def test_a_frozen_head_stays_the_targets(tiny_run: TinyRun, tm_target: Target, tm: LlamaForCausalLM, tmp_path: Path) -> None:
    _train(tiny_run, tm_target, tmp_path / "train", SETTINGS.model_copy(update={"head": "frozen"}))
    trained = load_file(tmp_path / "train" / "draft.safetensors")
    assert torch.equal(trained["lm_head.weight"], tm.lm_head.weight[torch.from_numpy(tiny_run.kept)])
    assert not torch.equal(trained["norm.weight"], torch.ones(32))


def test_a_number_that_is_none_ends_the_run_before_the_step(
    tiny_run: TinyRun, tm_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poisoned: list[set[str]] = []

    def poison(*args: Any, **kwargs: Any) -> Any:
        batch = assemble(*args, **kwargs)
        batch.aux[3] = float("nan")
        poisoned.append({key[:12] for key in batch.row_keys})
        return batch

    monkeypatch.setattr("draftproof.train.stage.assemble", poison)
    with pytest.raises(NonFinite) as error:
        _train(tiny_run, tm_target, tmp_path / "train")
    assert "step 0" in error.value.what
    assert error.value.where is not None
    assert set(error.value.where.removeprefix("rows ").split(", ")) == poisoned[0]
    assert not (tmp_path / "train" / "draft.safetensors").exists()


def test_the_mask_is_joined_from_the_rows(tiny_run: TinyRun) -> None:
    rows, store = read_rows(tiny_run.folders["prepare"]), Store(tiny_run.folders["extract"])
    batch = assemble(rows, store, [2, 5], unroll=3)
    first, second = rows.row(2), rows.row(5)
    assert batch.turns == (first.turn_start[0] - 1, len(first.token_ids) + second.turn_start[0] - 1)
    expected = list(range(first.turn_start[0] - 1, len(first.token_ids) - 2))
    assert sorted(start for start in batch.plan.steps[0].starts.tolist() if start < len(first.token_ids)) == expected
    assert torch.equal(batch.token_ids[: len(first.token_ids)], torch.from_numpy(first.token_ids).long())
