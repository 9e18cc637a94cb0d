"""What the draft is asked to match: the target's distribution over the draft vocabulary."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.unroll import UnrollPlan, unroll
from draftproof.target.head import TargetHead


@dataclass(frozen=True)
class StepResult:
    """Loss and hits of one unrolled step, for the rows counted at it."""

    starts: Tensor
    """int64 [n_k]: t of each row."""
    loss_sum: Tensor
    """Scalar float32: sum over the rows of KL(teacher || draft), with its graph."""
    hits: Tensor
    """bool [n_k]: the draft's argmax is the target's top-1 over the *whole* vocabulary. A target top-1
    outside the draft vocabulary can not be hit: it is a miss."""


class Teacher:
    """The target's last step, for the rows of a batch: final norm and head, restricted to the draft vocabulary."""

    def __init__(self, head: TargetHead, kept: np.ndarray) -> None:
        self.head = head
        self.kept = torch.from_numpy(kept)
        """int64 [Vd]: target ids of the draft vocabulary."""

    def log_probabilities(self, final: Tensor) -> Tensor:
        """final [N, H], boundary L before the norm -> log-softmax over the draft vocabulary, float32 [N, Vd]"""
        with torch.no_grad():
            return F.log_softmax(self.head.logits(final), dim=-1)


def unrolled_loss(
    draft: Eagle3Draft,
    plan: UnrollPlan,
    *,
    token_ids: Tensor,
    aux: Tensor,
    final: Tensor,
    teacher_top1: Tensor,
    embedding: Tensor,
    teacher: Teacher,
) -> list[StepResult]:
    """KL(teacher || draft) of each step over its counted rows, not yet weighted or normalised.

    Shapes: token_ids, teacher_top1 int64 [N]; aux [N, A, H]; final [N, H]; embedding [V, h].
    One teacher row serves up to S draft rows, so its distribution is computed once.
    """
    needed = _teacher_indices(plan).to(final.device)
    slot = torch.full((len(token_ids),), -1, dtype=torch.int64, device=final.device)
    slot[needed] = torch.arange(len(needed), device=final.device)
    teacher_logp = teacher.log_probabilities(final[needed])
    kept = teacher.kept.to(final.device)
    results: list[StepResult] = []
    for out in unroll(draft, plan, token_ids, aux, embedding):
        judged = out.starts + 1 + out.step
        wanted = teacher_logp[slot[judged]]
        logits = draft.logits(out.state)
        divergence = F.kl_div(F.log_softmax(logits, dim=-1), wanted, log_target=True, reduction="sum")
        hits = kept[logits.detach().argmax(-1)] == teacher_top1[judged]
        results.append(StepResult(out.starts, divergence, hits))
    return results


def _teacher_indices(plan: UnrollPlan) -> Tensor:
    """int64: every index whose target distribution some counted row is compared with, ascending."""
    spans = [step.starts + 1 + k for k, step in enumerate(plan.steps)]
    return torch.unique(torch.cat(spans)) if spans else torch.zeros(0, dtype=torch.int64)
