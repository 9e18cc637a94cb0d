"""D2: loader and trainer each shift by one, so that embedding and state are two positions apart; it trains, only worse."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher, unrolled_loss
from draftproof.progress import Meter
from draftproof.recipe import TrainSettings
from draftproof.records.layout import StoreLayout
from draftproof.records.rows import Row, RowTable, make_row_key, read_rows, write_rows
from draftproof.records.store import Store, StoreWriter
from draftproof.target.head import TargetHead
from draftproof.target.target import Target
from draftproof.train.batches import BatchPlan, assemble, losses
from draftproof.train.forecast import Acceptance, Forecast
from draftproof.train.loop import train

PROMPT, LENGTH = 4, 12


def _stored(folder: Path, firsts: Sequence[int], aux: Tensor, final: Tensor) -> tuple[RowTable, Store]:
    """Rows that count up from `firsts`, with states looked up by token: aux [V, A, 32], final [V, 32]; top-1 is id + 1."""
    rows = []
    for number, first in enumerate(firsts):
        ids = np.arange(first, first + LENGTH, dtype=np.int32)
        supervised = np.arange(LENGTH) >= PROMPT
        rows.append(Row(make_row_key(ids, str(number), 0), ids, supervised, (PROMPT,), str(number), "train", "", "stop", f"made:{number}"))
    write_rows(folder, rows)
    tokens = torch.from_numpy(np.concatenate([row.token_ids for row in rows]))
    with StoreWriter(folder, StoreLayout((2, 4, 5), 32, "bf16", 320), [list(range(len(rows)))]) as writer:
        at = tokens.long()
        writer.write_shard(0, [row.row_key for row in rows], [LENGTH] * len(rows), tokens, aux[at], final[at], tokens + 1)
    return read_rows(folder), Store(folder)


def test_embedding_state_and_label_of_each_row(make_draft: Callable[..., Eagle3Draft], tm_target: Target, tmp_path: Path) -> None:
    """From the files to the first matrix product: every token's id rides on its embedding and on its states."""
    number = torch.arange(320.0)
    tagged = number[:, None].expand(320, 32)
    rows, store = _stored(tmp_path, [100, 200], tagged[:, None].expand(320, 3, 32).contiguous(), tagged.contiguous())
    batch = assemble(rows, store, [0, 1], unroll=2)
    assert [batch.token_ids[i].item() for i in (0, 11, 12, 23)] == [100, 111, 200, 211]

    draft, kept = make_draft(), np.arange(100, 164)
    embedded: list[Tensor] = []
    fused: list[Tensor] = []
    judged: list[Tensor] = []
    draft.layer.input_layernorm.register_forward_pre_hook(lambda module, args: embedded.append(args[0]))
    draft.fc.register_forward_pre_hook(lambda module, args: fused.append(args[0]))

    class Listening(Teacher):
        def log_probabilities(self, final: Tensor) -> Tensor:
            judged.append(final)
            return super().log_probabilities(final)

    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu", rows=kept)
    results = losses(draft, batch, tagged, Listening(head, kept))
    starts = [set(result.starts.tolist()) for result in results]
    # The last prompt token (index 3) is the first start; tokens 4..11 are supervised, and step k needs x[t+2+k].
    assert starts == [{*range(3, 10), *range(15, 22)}, {*range(3, 9), *range(15, 21)}]
    assert fused[0][:, 0].tolist() == [*range(100, 112), *range(200, 212)], "state fed at index t: that of token t"
    assert embedded[0][3:10, 0].tolist() == list(range(104, 111)), "token fed at index t: token t+1"
    assert embedded[1][:, 0].tolist() == [batch.token_ids[t + 2].item() for t in results[1].starts], "one step on: token t+2"
    assert sorted(judged[0][:, 0].tolist()) == [*range(104, 112)][:7] + [*range(204, 212)][:7], "teacher: the state of token t+1+k"


@pytest.mark.parametrize("seed", [0])
def test_a_copy_task_is_learnt(make_draft: Callable[..., Eagle3Draft], tm_target: Target, tmp_path: Path, seed: int) -> None:
    """Next id = id + 1 over 64 ids, each state a random vector of its token: > 0.95 at every step after 120 steps (the case allows 300)."""
    generator = torch.Generator().manual_seed(seed)
    low, count = 100, 64
    embedding, aux = torch.randn(320, 32, generator=generator), torch.randn(320, 3, 32, generator=generator)
    kept = np.arange(low, low + count)
    rows_of_head = torch.nn.functional.normalize(torch.randn(320, 32, generator=generator), dim=-1) * 4
    final = torch.roll(rows_of_head, -1, 0)  # the state of token i points to row i + 1
    head = TargetHead(torch.ones(32), rows_of_head[torch.from_numpy(kept)], tm_target.config)
    rows, store = _stored(tmp_path, list(range(low, low + count - LENGTH)), aux, final)
    teacher = Teacher(head, kept)
    sure = teacher.log_probabilities(final[low : low + count - 1]).exp().max(-1)
    assert (sure.indices == torch.arange(1, count)).all()

    draft = make_draft(draft_vocab_size=count)
    settings = TrainSettings(steps=120, unroll=3, batch_tokens=240, learning_rate=1e-2, evaluations=1, checkpoints=1)
    plan = BatchPlan(np.arange(len(rows)), rows.lengths, batch_tokens=240, seed=seed)
    none = Acceptance((0.0,), 1)
    train(
        draft,
        batch=lambda step: assemble(rows, store, plan.step(step), unroll=3),
        total=120,
        settings=settings,
        embedding=embedding,
        teacher=teacher,
        measure=lambda: Forecast(none, none, (0.0,)),
        out=tmp_path,
        device="cpu",
        meter=Meter("train", 120, "steps", None),
    )
    whole = assemble(rows, store, np.arange(len(rows)), unroll=3)
    inputs: dict[str, Any] = {name: getattr(whole, name) for name in ("token_ids", "aux", "final", "teacher_top1")}
    with torch.no_grad():
        results = unrolled_loss(draft, whole.plan, embedding=embedding, teacher=teacher, **inputs)
    assert [len(result.starts) for result in results] == [52 * 7, 52 * 6, 52 * 5]
    for result in results:
        assert result.hits.float().mean() > 0.95
