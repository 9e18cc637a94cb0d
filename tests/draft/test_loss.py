"""The loss against sums written out by hand in float64, its gradient, and what counts as a hit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.loss import StepResult, Teacher, unrolled_loss
from draftproof.draft.unroll import plan_unroll, unroll
from draftproof.target.head import TargetHead
from draftproof.target.target import Target

LENGTHS = np.array([9, 7])
KEPT = np.arange(3, 320, 5)  # 64 ids, none of them its own number


def _mask() -> tuple[np.ndarray, np.ndarray]:
    """Document 0: tokens 4..8; document 1: tokens 2..5."""
    supervised, begins = np.zeros(16, dtype=bool), np.zeros(16, dtype=bool)
    supervised[4:9] = supervised[9 + 2 : 9 + 6] = True
    begins[[4, 9 + 2]] = True
    return supervised, begins


def _batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "token_ids": torch.randint(0, 320, (16,), generator=generator),
        "aux": torch.randn(16, 3, 32, generator=generator),
        "final": torch.randn(16, 32, generator=generator) * 3,
        "teacher_top1": torch.randint(0, 320, (16,), generator=generator),
        "embedding": torch.randn(320, 32, generator=generator),
    }


def _run(draft: Eagle3Draft, teacher: Teacher, steps: int, batch: dict[str, Tensor]) -> list[StepResult]:
    supervised, begins = _mask()
    return unrolled_loss(draft, plan_unroll(supervised, begins, LENGTHS, steps), teacher=teacher, **batch)


def _teacher(target: Target, **config: Any) -> Teacher:
    head = TargetHead.from_weights(target.weights(), dataclasses.replace(target.config, **config), torch.float32, "cpu", rows=KEPT)
    return Teacher(head, KEPT)


def _slow_teacher(final: list[float], norm: list[float], rows: list[list[float]], eps: float, config: dict[str, Any]) -> list[float]:
    """Probabilities over the draft vocabulary: norm, head, scale, soft-cap, softmax; Python floats only."""
    rms = math.sqrt(sum(x * x for x in final) / len(final) + eps)
    gain = [1.0 + w for w in norm] if config.get("norm_convention") == "one_plus_weight" else norm
    normed = [x / rms * w for x, w in zip(final, gain, strict=True)]
    logits = [sum(a * b for a, b in zip(normed, row, strict=True)) * config.get("logit_scale", 1.0) for row in rows]
    if cap := config.get("logit_softcap"):
        logits = [cap * math.tanh(x / cap) for x in logits]
    top = max(logits)
    exps = [math.exp(x - top) for x in logits]
    return [x / sum(exps) for x in exps]


@pytest.mark.parametrize("config", [{}, {"logit_softcap": 2.0, "logit_scale": 3.0}, {"norm_convention": "one_plus_weight"}])
def test_the_divergence_is_the_sum_written_out(
    make_draft: Callable[..., Eagle3Draft], tm: Any, tm_target: Target, config: dict[str, Any]
) -> None:
    """sum of p (log p - log q), p the target at index t+1+k over the draft vocabulary, q the draft's step k from t."""
    draft, batch = make_draft(), _batch()
    supervised, begins = _mask()
    results = _run(draft, _teacher(tm_target, **config), 3, batch)
    norm, rows = tm.model.norm.weight.double().tolist(), tm.lm_head.weight.double()[torch.from_numpy(KEPT)].tolist()
    outs = list(unroll(draft, plan_unroll(supervised, begins, LENGTHS, 3), batch["token_ids"], batch["aux"], batch["embedding"]))
    # By hand: the first draft starts at the last prompt token, and its last label is the last supervised one.
    expected_starts = [{3, 4, 5, 6, 10, 11, 12}, {3, 4, 5, 10, 11}, {3, 4, 10}]
    for k, (result, out) in enumerate(zip(results, outs, strict=True)):
        assert set(result.starts.tolist()) == expected_starts[k]
        expected = 0.0
        for t, logits in zip(result.starts.tolist(), draft.logits(out.state).double().tolist(), strict=True):
            p = _slow_teacher(batch["final"][t + 1 + k].double().tolist(), norm, rows, tm_target.config.rms_norm_eps, config)
            z = max(logits) + math.log(sum(math.exp(x - max(logits)) for x in logits))
            expected += sum(pi * (math.log(pi) - (qi - z)) for pi, qi in zip(p, logits, strict=True))
        assert result.loss_sum.item() == pytest.approx(expected, rel=2e-5)
        assert expected > 0.1


def test_the_gradient_of_each_logit_is_draft_minus_teacher(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    draft, batch, teacher = make_draft(), _batch(), _teacher(tm_target)
    seen: list[Tensor] = []

    def probe(module: Any, args: Any, out: Tensor) -> None:
        out.retain_grad()
        seen.append(out)

    hook = draft.lm_head.register_forward_hook(probe)
    (result,) = _run(draft, teacher, 1, batch)
    hook.remove()
    result.loss_sum.backward()
    (logits,) = seen
    p = teacher.log_probabilities(batch["final"][result.starts + 1]).exp()
    assert torch.allclose(logits.grad, logits.detach().softmax(-1) - p, atol=1e-6)


def test_a_draft_that_is_the_teacher_loses_nothing(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    draft, batch = make_draft(), _batch()
    batch["final"] = torch.zeros(16, 32)  # a target without preference
    with torch.no_grad():
        draft.lm_head.weight.zero_()
    for result in _run(draft, _teacher(tm_target), 2, batch):
        assert result.loss_sum.item() == pytest.approx(0.0, abs=1e-5)


def test_the_teacher_gets_no_gradient(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    batch = _batch()
    batch["final"].requires_grad_()
    batch["embedding"].requires_grad_(False)
    sum(result.loss_sum for result in _run(make_draft(), _teacher(tm_target), 2, batch)).backward()  # type: ignore[union-attr]
    assert batch["final"].grad is None


def test_hits_are_compared_in_target_ids(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    """Every teacher top-1 is set to what the draft says, as a target id; then to the draft id of the same choice."""
    draft, batch, teacher = make_draft(), _batch(), _teacher(tm_target)
    supervised, begins = _mask()
    plan = plan_unroll(supervised, begins, LENGTHS, 1)
    (out,) = unroll(draft, plan, batch["token_ids"], batch["aux"], batch["embedding"])
    chosen = draft.logits(out.state).argmax(-1)
    batch["teacher_top1"][out.starts + 1] = torch.from_numpy(KEPT)[chosen]
    assert _run(draft, teacher, 1, batch)[0].hits.all()
    batch["teacher_top1"][out.starts + 1] = chosen
    assert not _run(draft, teacher, 1, batch)[0].hits.any()


def test_a_top1_outside_the_draft_vocabulary_is_a_miss(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    draft, batch, teacher = make_draft(), _batch(), _teacher(tm_target)
    for outside in (0, 1, 2, 4, 319):
        batch["teacher_top1"][:] = outside
        assert not any(result.hits.any() for result in _run(draft, teacher, 3, batch))


def test_nothing_counted_is_no_result(make_draft: Callable[..., Eagle3Draft], tm_target: Target) -> None:
    plan = plan_unroll(np.zeros(16, dtype=bool), np.zeros(16, dtype=bool), LENGTHS, 3)
    assert unrolled_loss(make_draft(), plan, teacher=_teacher(tm_target), **_batch()) == []
