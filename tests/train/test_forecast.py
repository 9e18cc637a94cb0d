"""The two forecasts, by hand."""

from __future__ import annotations

import numpy as np

from draftproof.train.forecast import walk

K = 2


def _prefix(*accepted: int) -> np.ndarray:
    return np.array([[count > i for i in range(K)] for count in accepted])


def test_the_walk_jumps_over_what_it_accepted() -> None:
    # A turn of 8 answer tokens after index 0: starts 0..6, of which 0..5 have both steps.
    depth = np.array([2, 2, 2, 2, 2, 2, 1, 0, 0])
    prefix = _prefix(1, 0, 2, 0, 1, 0, 0, 0, 0)
    follows = np.ones(9, dtype=bool)
    # From 0 accept 1, jump to 2; accept 2, jump to 5; accept 0, jump to 6, which the end cuts short.
    assert list(walk(prefix, depth, follows, (0,), K)) == [1, 2, 0]


def test_the_walk_ends_where_the_row_leaves_the_targets_path() -> None:
    depth = np.array([2, 2, 2, 2, 2, 2, 1, 0, 0])
    prefix = _prefix(1, 0, 2, 0, 1, 0, 0, 0, 0)
    follows = np.ones(9, dtype=bool)
    follows[2] = False  # token 3, the bonus after the first cycle, is not the target's top-1
    assert list(walk(prefix, depth, follows, (0,), K)) == [1]
    follows[1] = False  # token 2, the accepted draft itself
    assert list(walk(prefix, depth, follows, (0,), K)) == []


def test_each_turn_starts_at_its_own_last_prompt_token() -> None:
    depth = np.array([0, 2, 1, 0, 0, 2, 2, 1, 0, 0])
    prefix = _prefix(0, 2, 0, 0, 0, 0, 1, 0, 0, 0)
    assert list(walk(prefix, depth, np.ones(10, dtype=bool), (1, 5), K)) == [2, 0, 1]
