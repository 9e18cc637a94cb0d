"""Held-out acceptance, forecast from stored states: what `train` selects its best weights by.

Two definitions, never mixed. *By start*: every counted start has the same weight; cheap and rosy. *By walk*: as
an engine goes, from the last prompt token, accept a, jump a+1; a row ends where its next token is not the
target's top-1. K drafted tokens, greedy, chain. P(i) is the share of starts (or cycles) whose first i drafts are
all accepted; the length is 1 + sum of P(i).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher
from draftproof.train.batches import Batch, losses


@dataclass(frozen=True)
class Acceptance:
    """P(first i accepted) for i = 1..K, over `cycles` starts."""

    by_position: tuple[float, ...]
    cycles: int

    @property
    def length(self) -> float:
        """Tokens a target pass yields: 1 + sum of the joint prefix probabilities."""
        return 1.0 + sum(self.by_position)


@dataclass(frozen=True)
class Forecast:
    """Both definitions, and the held-out loss."""

    by_start: Acceptance
    by_walk: Acceptance
    loss_by_step: tuple[float, ...]


def forecast(draft: Eagle3Draft, batches: Iterable[Batch], embedding: Tensor, teacher: Teacher, steps: int) -> Forecast:
    """Run the draft over held-out batches without gradient. `steps` is both S and K."""
    start_hits, start_counts = np.zeros(steps), np.zeros(steps)
    walk_hits, cycles = np.zeros(steps), 0
    loss, rows = np.zeros(steps), np.zeros(steps)
    for batch in batches:
        with torch.no_grad():
            results = losses(draft, batch, embedding, teacher)
        depth = batch.plan.depth.numpy()
        hit = np.zeros((len(batch.token_ids), steps), dtype=bool)
        for k, result in enumerate(results):
            hit[result.starts.cpu().numpy(), k] = result.hits.cpu().numpy()
            loss[k] += float(result.loss_sum)
            rows[k] += len(result.starts)
        prefix = np.logical_and.accumulate(hit, axis=1)
        for k in range(steps):
            reached = depth > k
            start_hits[k] += prefix[reached, k].sum()
            start_counts[k] += reached.sum()
        follows = np.append((batch.token_ids[1:] == batch.teacher_top1[:-1]).cpu().numpy(), False)
        for accepted in walk(prefix, depth, follows, batch.turns, steps):
            walk_hits[:accepted] += 1
            cycles += 1
    return Forecast(
        Acceptance(tuple((start_hits / np.maximum(start_counts, 1)).tolist()), int(start_counts[0])),
        Acceptance(tuple((walk_hits / max(cycles, 1)).tolist()), cycles),
        tuple((loss / np.maximum(rows, 1)).tolist()),
    )


def walk(prefix: np.ndarray, depth: np.ndarray, follows: np.ndarray, turns: tuple[int, ...], steps: int) -> Iterator[int]:
    """Accepted drafts of each cycle, as an engine goes through each turn; cycles that the turn's end cuts short
    are left out.

    prefix bool [N, K]: the first i drafts from t are all the target's top-1; depth int [N]: counted steps; follows
    bool [N]: token t+1 is the target's top-1 at t; turns: the last prompt index of each turn, ascending.
    """
    for t, border in zip(turns, (*turns[1:], len(depth)), strict=True):
        while t < border and depth[t] >= steps:
            accepted = int(prefix[t].sum())
            on_path = follows[t + 1 : t + 2 + accepted]
            if not on_path[:accepted].all():
                break  # the row left the target's greedy path inside the drafts: later hits prove nothing
            yield accepted
            if not on_path[accepted]:
                break
            t += accepted + 1
