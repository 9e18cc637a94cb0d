"""D11: training loss goes on falling while acceptance falls: the last checkpoint is not the best one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher
from draftproof.progress import Meter
from draftproof.recipe import TrainSettings
from draftproof.records.rows import read_rows
from draftproof.records.store import Store
from draftproof.target.head import TargetHead
from draftproof.train.batches import BatchPlan, assemble, trainable_rows
from draftproof.train.forecast import Acceptance, Forecast
from draftproof.train.loop import Trained, train

if TYPE_CHECKING:
    from tests.train.conftest import TinyRun

    from draftproof.target.target import Target

LENGTHS = [3.28, 3.34, 3.34, 3.24, 3.18]


class _Killed(BaseException):
    """Stands for a SIGKILL: nothing gets to clean up."""


def _train(draft: Eagle3Draft, tiny: TinyRun, target: Target, out: Path, seen: list[dict[str, torch.Tensor]], kill_at: int = 99) -> Trained:
    """Ten real steps; the held-out acceptance after every second one is that of the report, the loss falls all the way."""
    out.mkdir(exist_ok=True)
    rows, store = read_rows(tiny.folders["prepare"]), Store(tiny.folders["extract"])
    plan = BatchPlan(trainable_rows(rows, "train"), rows.lengths, batch_tokens=128, seed=0)
    head = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu", rows=tiny.kept)

    def measure() -> Forecast:
        number = len(seen)
        if number == kill_at:
            raise _Killed
        seen.append({name: value.clone() for name, value in draft.state_dict().items()})
        length = LENGTHS[number] - 1
        walk, rosy = Acceptance((length / 2, length / 2), 10), Acceptance((number / 10, 0.0), 10)  # by start it only rises
        return Forecast(rosy, walk, (1.0 - number / 10,))

    return train(
        draft,
        batch=lambda step: assemble(rows, store, plan.step(step), unroll=2),
        total=10,
        settings=TrainSettings(steps=10, unroll=2, batch_tokens=128, evaluations=5, checkpoints=10),
        embedding=torch.randn(320, 32, generator=torch.Generator().manual_seed(0)),
        teacher=Teacher(head, tiny.kept),
        measure=measure,
        out=out,
        device="cpu",
        meter=Meter("train", 10, "steps", None),
    )


def _same(weights: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


def test_the_best_weights_are_those_of_the_best_held_out_acceptance(
    make_draft: Callable[..., Eagle3Draft], tiny_run: TinyRun, tm_target: Target, tmp_path: Path
) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    trained = _train(make_draft(draft_vocab_size=96), tiny_run, tm_target, tmp_path, seen)
    assert (trained.position.best_step, trained.position.best_length) == (4, pytest.approx(3.34))
    assert _same(trained.best, seen[1]), "the first of two equals, as they were then"
    assert not _same(trained.best, seen[4])
    shown = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    forecasts = [line["by_walk"]["acceptance_length"] for line in shown if line["kind"] == "forecast"]
    assert forecasts == pytest.approx(LENGTHS)


def test_a_resumed_training_remembers_the_best(
    make_draft: Callable[..., Eagle3Draft], tiny_run: TinyRun, tm_target: Target, tmp_path: Path
) -> None:
    """Killed while it measures after step 8: the best of step 4 survives in the checkpoint, and later drops do not replace it."""
    seen: list[dict[str, torch.Tensor]] = []
    with pytest.raises(_Killed):
        _train(make_draft(draft_vocab_size=96), tiny_run, tm_target, tmp_path, seen, kill_at=3)
    best = seen[1]
    trained = _train(make_draft(draft_vocab_size=96), tiny_run, tm_target, tmp_path, seen)
    assert len(seen) == 5
    assert trained.position.best_step == 4
    assert _same(trained.best, best)
