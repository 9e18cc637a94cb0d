"""D8: averages over the wrong set make loss, accuracy and acceptance look better than they are."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import Teacher, unrolled_loss
from draftproof.draft.unroll import plan_unroll, unroll
from draftproof.evaluate.decode import acceptance
from draftproof.target.head import TargetHead
from draftproof.target.target import Target
from draftproof.train.forecast import Acceptance

KEPT = np.arange(5)
TARGETS = [1, 7, 8, 2]


def test_targets_outside_the_draft_vocabulary_are_misses(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    """Targets 1, 7, 8, 2 with ids below 5 kept; the draft is right wherever it can be: 0.5, not 1.0."""
    draft = make_draft(draft_vocab_size=5)
    generator = torch.Generator().manual_seed(2)
    ids, aux = torch.randint(0, 320, (7,), generator=generator), torch.randn(7, 3, 32, generator=generator)
    embedding = torch.randn(320, 32, generator=generator)
    plan = plan_unroll(np.arange(7) >= 2, np.arange(7) == 2, np.array([7]), 1)
    (out,) = unroll(draft, plan, ids, aux, embedding)
    assert out.starts.tolist() == [1, 2, 3, 4]
    said = torch.tensor([1, 3, 4, 2])
    with torch.no_grad():  # a head that says so: normed states times weight = one-hot rows
        draft.lm_head.weight.copy_((torch.linalg.pinv(draft.norm(out.state)) @ torch.eye(5)[said]).T)
        assert draft.logits(out.state).argmax(-1).tolist() == said.tolist()
    top1 = torch.full((7,), 300)
    top1[out.starts + 1] = torch.tensor(TARGETS)
    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu", rows=KEPT)
    final = torch.randn(7, 32, generator=generator)
    (result,) = unrolled_loss(
        draft, plan, token_ids=ids, aux=aux, final=final, teacher_top1=top1, embedding=embedding, teacher=Teacher(head, KEPT)
    )
    assert result.hits.tolist() == [True, False, False, True]
    assert result.hits.float().mean().item() == 0.5


def test_the_loss_is_a_mean_over_what_counts(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    """100 tokens with 6 supervised have 5 starts. Teacher and draft fixed so that each loses the same: the mean is that."""
    draft = make_draft(draft_vocab_size=5)
    with torch.no_grad():
        draft.lm_head.weight.zero_()  # uniform
    final = torch.randn(1, 32, generator=torch.Generator().manual_seed(0)).expand(100, 32) * 4
    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu", rows=KEPT)
    p = head.logits(final[:1]).double().softmax(-1)[0]
    each = float((p * (p * 5).log()).sum())  # KL to the uniform distribution over 5
    (result,) = unrolled_loss(
        draft,
        plan_unroll(np.arange(100) >= 94, np.arange(100) == 94, np.array([100]), 1),
        token_ids=torch.zeros(100, dtype=torch.int64),
        aux=torch.zeros(100, 3, 32),
        final=final,
        teacher_top1=torch.zeros(100, dtype=torch.int64),
        embedding=torch.ones(320, 32),
        teacher=Teacher(head, KEPT),
    )
    assert len(result.starts) == 5
    assert each > 0.005
    assert result.loss_sum.item() / len(result.starts) == pytest.approx(each, rel=1e-4)


def test_the_length_is_one_plus_the_joint_prefix() -> None:
    """Conditional accuracies 0.8, 0.7, 0.6 over 1000 cycles: 2.696, not 1 + 0.8 + 0.7 + 0.6."""
    cycles = [0] * 200 + [1] * 240 + [2] * 224 + [3] * 336
    length, by_position, count = acceptance([cycles[:300], cycles[300:]], 3)
    assert (length, count) == (pytest.approx(2.696), 1000)
    assert by_position == pytest.approx((0.8, 0.8 * 0.7, 0.8 * 0.7 * 0.6))
    assert Acceptance(tuple(by_position), count).length == pytest.approx(2.696)


def test_prompts_weigh_by_their_cycles() -> None:
    """One prompt of 1 cycle that accepts 3, one of 99 that accept nothing: 1.03, not the mean of 4 and 1."""
    assert acceptance([[3], [0] * 99], 3)[0] == pytest.approx(1.03)
