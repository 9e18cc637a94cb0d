"""C3: the final norm missing or applied twice trains anyway; the head applies it once, and the other two are far off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof.target.head import TargetHead
from draftproof.target.loaded import capture
from draftproof.target.target import Target

IDS = torch.randint(3, 300, (1, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def states(tm: Any) -> dict[str, torch.Tensor]:
    """What the three captures of the case would store as the final state."""
    with capture(tm, ()) as captured:
        tm(IDS)
        before = captured.take()[8][0]
    after = tm.model.norm(before)
    return {"before": before, "after": after, "after twice": tm.model.norm(after)}


def agreement(logits: torch.Tensor, wanted: torch.Tensor) -> float:
    return (logits.argmax(-1) == wanted.argmax(-1)).float().mean().item()


def test_only_the_state_before_the_norm_gives_the_targets_logits(tm: Any, tm_target: Target, states: dict[str, torch.Tensor]) -> None:
    wanted = tm(IDS).logits[0]
    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu")
    found = {name: head.logits(state) for name, state in states.items()}
    assert torch.equal(found["before"], wanted)
    for wrong in ("after", "after twice"):
        assert (found[wrong] - wanted).abs().max() > 0.1
        assert agreement(found[wrong], wanted) <= 0.9
    never = states["before"] @ tm.lm_head.weight.T
    assert (never - wanted).abs().max() > 0.1
    assert agreement(never, wanted) <= 0.9


def test_rows_of_the_head_are_the_draft_vocabularys(tm: Any, tm_target: Target, states: dict[str, torch.Tensor]) -> None:
    kept = torch.tensor([2, 3, 17, 64, 319])
    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.float32, "cpu", kept.numpy())
    assert head.weight.shape == (5, 32)
    assert torch.allclose(head.logits(states["before"]), tm(IDS).logits[0][:, kept], atol=1e-6)


def test_the_norm_is_computed_wide_as_the_target_does_in_bf16(tm_target: Target, states: dict[str, torch.Tensor]) -> None:
    from draftproof.target.loaded import load_model, text_parts

    norm = text_parts(load_model(tm_target, "cpu", torch.bfloat16)).final_norm
    head = TargetHead.from_weights(tm_target.weights(), tm_target.config, torch.bfloat16, "cpu")
    state = states["before"].bfloat16()
    assert torch.equal(head.normed(state), norm(state))
    assert head.logits(state).dtype == torch.float32
