"""D3: unrolled steps with a needlessly shifted mask, unshifted positions, no carried keys, or another token source.

`tests/draft/test_unroll.py` proves parity for every option; here the reported faults are shown to be other numbers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from tests.draft.naive import NaiveDraft
from torch import Tensor

from draftproof.draft.eagle3 import Eagle3Draft
from draftproof.draft.unroll import plan_unroll, unroll

T, PROMPT = 8, 3


def _inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    return (
        torch.randint(0, 320, (T,), generator=generator),
        torch.randn(T, 3, 32, generator=generator),
        torch.randn(320, 32, generator=generator),
    )


def _unrolled(draft: Eagle3Draft, steps: int) -> dict[tuple[int, int], Tensor]:
    supervised, begins = np.arange(T) >= PROMPT, np.arange(T) == PROMPT
    tokens, aux, embedding = _inputs()
    with torch.no_grad():
        return {
            (out.step, t): state.double()
            for out in unroll(draft, plan_unroll(supervised, begins, np.array([T]), steps), tokens, aux, embedding)
            for t, state in zip(out.starts.tolist(), out.state, strict=True)
        }


def _one_by_one(draft: Eagle3Draft, steps: int, fault: str = "") -> dict[tuple[int, int], Tensor]:
    """Each start drafted alone with a growing cache; `fault` breaks one of the rules."""
    tokens, aux, embedding = _inputs()
    naive = NaiveDraft({name: value.detach() for name, value in draft.state_dict().items()}, draft.config, embedding)
    found = {}
    for t in range(PROMPT - 1, T - 2):
        cache: list[tuple[Tensor, Tensor]] = []
        for i in range(t + 1):
            state = naive.layer(int(tokens[i + 1]), naive.fuse(aux[i]), i, cache)
        found[0, t] = state
        for k in range(1, min(steps, T - 2 - t)):
            token = int(naive.logits(state).argmax()) if fault == "own tokens" else int(tokens[t + 1 + k])
            keys = list(cache[: t + 1]) if fault == "no carried keys" else cache
            state = naive.layer(token, state, t if fault == "same position" else t + k, keys)
            found[k, t] = state
    return found


@pytest.mark.parametrize("steps", range(1, 7))
def test_every_step_from_every_start_is_the_naive_loop(make_draft: Callable[..., Eagle3Draft], steps: int) -> None:
    draft = make_draft()
    unrolled, naive = _unrolled(draft, steps), _one_by_one(draft, steps)
    assert unrolled.keys() == naive.keys()
    assert len(unrolled) == sum(min(steps, 4 - i) for i in range(4))  # starts 2..5 have 4, 3, 2, 1 labels
    for place, state in unrolled.items():
        assert torch.allclose(state, naive[place], atol=1e-5, rtol=1e-5), place


@pytest.mark.parametrize(("fault", "first"), [("own tokens", 1), ("same position", 1), ("no carried keys", 2)])
def test_each_reported_fault_is_seen(make_draft: Callable[..., Eagle3Draft], fault: str, first: int) -> None:
    """Step 0 is equal whatever is wrong later. Without carried keys a step still sees its own, so it tells from step 2."""
    draft = make_draft()
    unrolled, wrong = _unrolled(draft, 4), _one_by_one(draft, 4, fault)
    for (k, t), state in unrolled.items():
        apart = (state - wrong[k, t]).abs().max().item()
        assert (apart < 1e-5) if k < first else (apart > 1e-3), (fault, k, t)
