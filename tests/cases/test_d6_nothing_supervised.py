"""D6: a batch without supervised tokens divides by zero and poisons every parameter.

Here rows from which no draft can start are never batched, so every batch of a training has something to count.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher, unrolled_loss
from draftproof.draft.unroll import plan_unroll
from draftproof.errors import DataError
from draftproof.progress import Progress
from draftproof.recipe import DraftSettings, TrainSettings
from draftproof.records.layout import StoreLayout
from draftproof.records.mapping import VocabMapping, save_mapping
from draftproof.records.rows import Row, make_row_key, read_rows, write_rows
from draftproof.records.store import StoreWriter
from draftproof.stage import StageTask
from draftproof.target.head import TargetHead
from draftproof.target.target import Target
from draftproof.train.batches import pack, trainable_rows
from draftproof.train.stage import run

KEPT = np.arange(3, 320, 5)


def _row(number: int, mask: list[bool], split: str = "train") -> Row:
    ids = np.random.default_rng(number).integers(3, 320, len(mask)).astype(np.int32)
    starts = tuple(i for i, on in enumerate(mask) if on and (i == 0 or not mask[i - 1]))
    return Row(make_row_key(ids, str(number), 0), ids, np.array(mask), starts, str(number), split, "", "stop", f"made:{number}")  # type: ignore[arg-type]  # a literal


@given(masks=st.lists(st.lists(st.booleans(), min_size=1, max_size=8), min_size=1, max_size=8), room=st.integers(1, 20))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
def test_every_batch_has_something_to_count(tmp_path_factory: pytest.TempPathFactory, masks: list[list[bool]], room: int) -> None:
    folder = tmp_path_factory.mktemp("rows")
    write_rows(folder, [_row(number, mask) for number, mask in enumerate(masks)])
    rows = read_rows(folder)
    chosen = trainable_rows(rows, "train")
    # By hand: a draft starts behind some token and needs two supervised ones after it.
    expected = [i for i, mask in enumerate(masks) if any(mask[t + 1] and mask[t + 2] for t in range(len(mask) - 2))]
    assert chosen.tolist() == expected
    for batch in pack(chosen, rows.lengths, room):
        picked = [rows.row(int(index)) for index in batch]
        begins = [np.isin(np.arange(len(row.token_ids)), row.turn_start) for row in picked]
        lengths = np.array([len(row.token_ids) for row in picked])
        plan = plan_unroll(np.concatenate([row.supervised for row in picked]), np.concatenate(begins), lengths, 3)
        assert plan.counted(0) >= len(batch)


def _gradients(draft: Eagle3Draft, target: Target, masks: list[list[bool]]) -> dict[str, torch.Tensor]:
    rows = [_row(number, mask) for number, mask in enumerate(masks)]
    generator = torch.Generator().manual_seed(0)
    n = sum(len(mask) for mask in masks)
    aux, final = torch.randn(64, 3, 32, generator=generator)[:n], torch.randn(64, 32, generator=generator)[:n]
    head = TargetHead.from_weights(target.weights(), target.config, torch.float32, "cpu", rows=KEPT)
    begins = np.concatenate([np.isin(np.arange(len(row.token_ids)), row.turn_start) for row in rows])
    plan = plan_unroll(np.concatenate([row.supervised for row in rows]), begins, np.array([len(mask) for mask in masks]), 3)
    results = unrolled_loss(
        draft,
        plan,
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for row in rows])).long(),
        aux=aux,
        final=final,
        teacher_top1=torch.zeros(n, dtype=torch.int64),
        embedding=torch.randn(320, 32, generator=torch.Generator().manual_seed(1)),
        teacher=Teacher(head, KEPT),
    )
    draft.zero_grad()
    torch.stack([result.loss_sum / len(result.starts) for result in results]).sum().backward()
    return {name: parameter.grad.clone() for name, parameter in draft.named_parameters() if parameter.grad is not None}


def test_a_row_without_drafts_beside_others_changes_no_gradient(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    draft = make_draft()
    good = [False, False, True, True, True, True]
    alone = _gradients(draft, tm_target, [good])
    beside = _gradients(draft, tm_target, [good, [False] * 5])
    assert alone.keys() == beside.keys() == {name for name, _ in draft.named_parameters()}
    for name, gradient in beside.items():
        assert gradient.isfinite().all()
        assert torch.allclose(gradient, alone[name], atol=1e-6), name


def test_when_no_row_can_draft_the_stage_says_so_before_it_trains(tm_target: Target, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("prepare", "vocab", "extract")}
    for folder in folders.values():
        folder.mkdir()
    rows = [_row(0, [False] * 6), _row(1, [False, False, False, False, False, True]), _row(2, [False] * 4 + [True] * 2, "validation")]
    write_rows(folders["prepare"], rows)
    save_mapping(folders["vocab"], VocabMapping.from_kept(KEPT, 320))
    with StoreWriter(folders["extract"], StoreLayout((2, 4, 5), 32, "bf16", 320), [[0, 1, 2]]) as writer:
        ids = torch.from_numpy(np.concatenate([row.token_ids for row in rows]))
        states = torch.ones(18, 3, 32)
        writer.write_shard(0, [row.row_key for row in rows], [6, 6, 6], ids, states, states[:, 0], ids)
    (tmp_path / "out").mkdir()
    task = StageTask(folders, tmp_path / "out", 0, "cpu", lambda point, evidence: None, Progress(quiet=True))
    with pytest.raises(DataError, match="No train row has two supervised tokens in a row"):
        run(task, TrainSettings(), tm_target, draft=DraftSettings(), draft_tokens=3)
    assert list((tmp_path / "out").iterdir()) == []
