"""D1: inputs and targets move one step, the mask does not; the last position is trained against padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher, unrolled_loss
from draftproof.draft.unroll import counted_steps, plan_unroll
from draftproof.target.head import TargetHead
from draftproof.target.target import Target

IDS = torch.arange(100, 108)
MASK = np.array([0, 0, 0, 1, 1, 1, 1, 1], dtype=bool)
RIGHT = [0, 0, 1, 1, 1, 1, 0, 0]
"""From the end of the prompt (2) to the last index whose label x[t+2] exists and was produced by the target (5)."""


def _begins(mask: np.ndarray) -> np.ndarray:
    begins = np.zeros(len(mask), dtype=bool)
    begins[int(mask.argmax())] = True
    return begins


def test_logits_get_gradient_exactly_where_a_draft_has_a_label(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    draft, kept = make_draft(), np.arange(80, 144)
    probed: list[Tensor] = []

    def probe(module: Any, args: Any, logits: Tensor) -> None:
        logits.retain_grad()
        probed.append(logits)

    draft.lm_head.register_forward_hook(probe)
    generator = torch.Generator().manual_seed(0)
    (result,) = unrolled_loss(
        draft,
        plan_unroll(MASK, _begins(MASK), np.array([8]), 1),
        token_ids=IDS,
        aux=torch.randn(8, 3, 32, generator=generator),
        final=torch.randn(8, 32, generator=generator),
        teacher_top1=IDS,
        embedding=torch.randn(320, 32, generator=generator),
        teacher=Teacher(TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu", rows=kept), kept),
    )
    result.loss_sum.backward()
    reached = torch.zeros(8)
    reached[result.starts] = probed[0].grad.abs().sum(-1)
    assert (reached > 1e-4).int().tolist() == RIGHT


def test_the_unshifted_mask_and_the_singly_shifted_one_are_other_rows() -> None:
    """What the reported trainers counted: the mask as it is, and the mask moved by one without the AND of both tokens."""
    assert (counted_steps(MASK, _begins(MASK), np.array([8]), 1) > 0).astype(int).tolist() == RIGHT
    assert MASK.astype(int).tolist() != RIGHT
    assert np.append(MASK[1:], False).astype(int).tolist() != RIGHT


def test_a_cut_answer_and_one_in_the_middle_of_a_row() -> None:
    """Second variant: the answer ends before the row does, so its last label is inside, and padding is no issue."""
    mask = np.array([0, 1, 1, 1, 0, 0, 1, 1], dtype=bool)
    begins = np.array([0, 1, 0, 0, 0, 0, 1, 0], dtype=bool)
    assert counted_steps(mask, begins, np.array([8]), 1).tolist() == [1, 1, 0, 0, 0, 1, 0, 0]
