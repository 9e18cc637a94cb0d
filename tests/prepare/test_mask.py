"""Masks by id prefixes, against a slow reference that walks the tokens one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.prepare.mask import WHOLE, Masked, Turn, after_prompt, assemble, produced
from draftproof.records.conversations import Unusable

PIECES = st.lists(st.integers(3, 20), min_size=1, max_size=6)


@given(st.lists(st.tuples(PIECES, PIECES), min_size=1, max_size=5))
def test_history_that_is_kept_gives_one_row(parts):
    turns, ids, mask, starts = [], [], [], []
    for index, (prompt, answer) in enumerate(parts):
        ids, mask = ids + prompt, mask + [False] * len(prompt)
        turns.append(Turn(2 * index + 1, list(ids), answer))
        starts.append(len(ids))
        ids, mask = ids + answer, mask + [True] * len(answer)
    (row,) = assemble(turns)
    assert row.ids.tolist() == ids
    assert row.supervised.tolist() == mask
    assert row.turn_start == tuple(starts)
    assert row.message == WHOLE
    for limit in range(1, len(ids) + 1):
        cut = row.cut(limit)
        assert cut.ids.tolist() == ids[:limit]
        assert cut.supervised.tolist() == mask[:limit]
        # A draft needs a second produced token of the same turn after the first one.
        assert cut.can_draft() == any(start + 1 < limit and len(parts[i][1]) > 1 for i, start in enumerate(starts))


def test_history_that_is_rewritten_gives_one_row_a_turn():
    first, second = Turn(1, [5, 6], [7, 8]), Turn(3, [5, 6, 8, 9], [7, 7, 2])
    one, two = assemble([first, second])
    assert (one.ids.tolist(), one.supervised.tolist(), one.turn_start, one.message) == ([5, 6, 7, 8], [False, False, True, True], (2,), 1)
    assert (two.ids.tolist(), two.supervised.tolist()) == ([5, 6, 8, 9, 7, 7, 2], [False] * 4 + [True] * 3)
    assert (two.turn_start, two.message) == ((4,), 3)
    assert assemble([]) == []


def test_turns_that_touch_are_two_turns():
    """Without anything between two answers their spans touch; a draft must still not cross the border."""
    row = Masked(np.array([1, 2, 3], np.int32), np.array([False, True, True]), (1, 2), WHOLE)
    assert not row.can_draft()


def test_after_prompt():
    assert after_prompt([1, 2], [1, 2, 3]) == [3]
    assert after_prompt([1, 2], [1, 2]) is None
    assert after_prompt([1, 2], [1, 3, 4]) is None


@pytest.mark.parametrize(
    ("rest", "closing", "reason", "wanted"),
    [
        ([5, 6, 2, 10], 1, "stop", [5, 6, 2]),
        ([5, 6, 2, 10], 1, "", [5, 6, 2]),
        ([5, 6, 2, 10], 1, "length", [5, 6]),
        ([5, 6, 2, 10, 2], 2, "stop", [5, 6, 2]),
        ([5, 6, 9], 0, "stop", "no stop token"),
        ([5, 2, 6, 2, 10], 1, "stop", "inside the answer"),
        ([2, 10], 1, "stop", "empty answer"),
        ([2, 10], 1, "length", "empty answer"),
    ],
)
def test_what_the_target_produced(rest, closing, reason, wanted):
    if isinstance(wanted, str):
        with pytest.raises(Unusable, match=wanted):
            produced(rest, {2}, closing, reason)
    else:
        assert produced(rest, {2}, closing, reason) == wanted
