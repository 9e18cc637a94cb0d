"""Which rows make up which batch."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from draftproof.train.batches import BatchPlan, pack


@given(lengths=st.lists(st.integers(1, 50), min_size=1, max_size=40), room=st.integers(10, 60))
def test_packing_keeps_every_row_once_and_in_order(lengths: list[int], room: int) -> None:
    batches = pack(np.arange(len(lengths)), np.array(lengths), room)
    assert np.concatenate(batches).tolist() == list(range(len(lengths)))
    for batch in batches:
        assert sum(lengths[row] for row in batch) <= room or len(batch) == 1


def test_steps_are_a_function_of_the_seed_alone() -> None:
    rows, lengths = np.array([1, 4, 5, 7, 8]), np.full(9, 10)
    forward, backward = (BatchPlan(rows, lengths, batch_tokens=20, seed=3) for _ in range(2))
    ahead = [forward.step(number).tolist() for number in range(7)]
    behind = [backward.step(number).tolist() for number in reversed(range(7))]
    assert ahead == behind[::-1]
    assert sorted(np.concatenate([forward.step(number) for number in range(3)]).tolist()) == rows.tolist()
    assert [BatchPlan(rows, lengths, batch_tokens=20, seed=4).step(number).tolist() for number in range(7)] != ahead


def test_epochs_may_be_fractions() -> None:
    plan = BatchPlan(np.arange(10), np.full(10, 10), batch_tokens=20, seed=0)
    assert (plan.steps(1), plan.steps(2), plan.steps(1.4), plan.steps(0.1)) == (5, 10, 7, 1)
