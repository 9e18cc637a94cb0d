"""Which rows make up which batch: a pure function of the rows' lengths and the seed.

Step number in, batch out: resuming at step 600 needs no replay of 600 batches, and every run with the same
rows, seed and `batch_tokens` sees the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import StepResult, Teacher, unrolled_loss
from draftproof.draft.unroll import UnrollPlan, counted_steps, plan_unroll
from draftproof.records.rows import RowTable, Split
from draftproof.records.store import Store


@dataclass(frozen=True)
class Batch:
    """Packed rows, whole documents back to back. Shapes for N tokens."""

    row_keys: tuple[str, ...]
    turns: tuple[int, ...]
    """The last prompt index before each supervised turn, ascending: where an engine starts to draft."""
    plan: UnrollPlan
    token_ids: Tensor
    """int64 [N]"""
    aux: Tensor
    """[N, A, H]"""
    final: Tensor
    """[N, H], boundary L, before the final norm."""
    teacher_top1: Tensor
    """int64 [N]: the target's top-1 next token over the whole vocabulary."""

    def to(self, device: str) -> Batch:
        """The same batch, its tensors on a device."""
        moved = (tensor.to(device, non_blocking=True) for tensor in (self.token_ids, self.aux, self.final, self.teacher_top1))
        return Batch(self.row_keys, self.turns, self.plan, *moved)


def losses(draft: Eagle3Draft, batch: Batch, embedding: Tensor, teacher: Teacher) -> list[StepResult]:
    """`unrolled_loss` of a batch that lies on the draft's device; embedding [V, h]."""
    return unrolled_loss(
        draft,
        batch.plan,
        token_ids=batch.token_ids,
        aux=batch.aux,
        final=batch.final,
        teacher_top1=batch.teacher_top1,
        embedding=embedding,
        teacher=teacher,
    )


class BatchPlan:
    """The batches of all epochs, by step number."""

    def __init__(self, rows: np.ndarray, lengths: np.ndarray, *, batch_tokens: int, seed: int) -> None:
        self.rows, self.lengths, self.batch_tokens, self.seed = rows, lengths, batch_tokens, seed
        self._epochs: list[list[np.ndarray]] = []

    def step(self, number: int) -> np.ndarray:
        """Row indices of a step, counted from 0 over all epochs."""
        epoch = 0
        while True:
            batches = self._epoch(epoch)
            if number < len(batches):
                return batches[number]
            number -= len(batches)
            epoch += 1

    def steps(self, epochs: float) -> int:
        """Optimizer steps that `epochs` passes take."""
        whole = int(epochs)
        count = sum(len(self._epoch(epoch)) for epoch in range(whole))
        return max(1, count + round((epochs - whole) * len(self._epoch(whole))) if epochs > whole else count)

    def _epoch(self, epoch: int) -> list[np.ndarray]:
        while len(self._epochs) <= epoch:
            order = np.random.default_rng([self.seed, len(self._epochs)]).permutation(self.rows)
            self._epochs.append(pack(order, self.lengths, self.batch_tokens))
        return self._epochs[epoch]


def pack(order: np.ndarray, lengths: np.ndarray, batch_tokens: int) -> list[np.ndarray]:
    """Fill batches in order; a row longer than `batch_tokens` gets a batch of its own. None is dropped."""
    batches: list[list[int]] = []
    room = 0
    for row in order:
        length = int(lengths[row])
        if not batches or length > room:
            batches.append([])
            room = batch_tokens
        batches[-1].append(int(row))
        room -= length
    return [np.array(batch) for batch in batches]


def assemble(rows: RowTable, store: Store, chosen: Sequence[int] | np.ndarray, *, unroll: int) -> Batch:
    """Read the rows' states and join them with their masks (the mask is not in the store, so that changing
    it costs no extraction)."""
    picked = [rows.row(int(index)) for index in chosen]
    states = [store.read(row.row_key) for row in picked]
    lengths = np.array([len(row.token_ids) for row in picked], dtype=np.int64)
    turn_start = np.zeros(int(lengths.sum()), dtype=bool)
    for offset, row in zip(np.cumsum(lengths) - lengths, picked, strict=True):
        turn_start[[int(offset) + start for start in row.turn_start]] = True
    return Batch(
        row_keys=tuple(row.row_key for row in picked),
        turns=tuple(int(start) - 1 for start in np.flatnonzero(turn_start) if start),
        plan=plan_unroll(np.concatenate([row.supervised for row in picked]), turn_start, lengths, unroll),
        token_ids=torch.from_numpy(np.concatenate([row.token_ids for row in picked]).astype(np.int64)),
        aux=torch.cat([stored.aux for stored in states]),
        final=torch.cat([stored.final for stored in states]),
        teacher_top1=torch.cat([stored.teacher_top1 for stored in states]),
    )


def trainable_rows(rows: RowTable, split: Split) -> np.ndarray:
    """Indices, int64, of the rows of a split from which a draft can start at least once."""

    def drafts(index: int) -> bool:
        row = rows.row(index)
        begins = np.zeros(len(row.token_ids), dtype=bool)
        begins[list(row.turn_start)] = True
        return bool(counted_steps(row.supervised, begins, np.array([len(begins)]), 1).any())

    return np.array([index for index in rows.indices(split).tolist() if drafts(index)], dtype=np.int64)
