"""B2: a draft vocabulary larger than the target's, zero, negative, or not a whole number."""

from __future__ import annotations

import numpy as np
import pytest

from draftproof.errors import UsageError
from draftproof.records.mapping import VocabMapping, check_draft_size
from draftproof.vocab.build import choose

COUNTS = np.bincount([1] * 5 + [2] * 4, minlength=12)


@pytest.mark.parametrize("size", [16, 0, -1, 4.0, True, "4"])
def test_refused(size):
    with pytest.raises(UsageError, match=r"vocab|vocabulary"):
        check_draft_size(size, 12)
    with pytest.raises(UsageError):
        choose(COUNTS, size, named=np.ones(12, bool), always=())


@pytest.mark.parametrize("size", [1, 2, 5, 11, 12, np.int64(7)])
def test_the_two_tables_agree(size):
    chosen = choose(COUNTS, size, named=np.ones(12, bool), always=())
    mapping = chosen.mapping
    kept = [int(mapping.d2t[i]) + i for i in range(int(size))]
    wanted = sorted([1, 2, 0, *range(3, 12)][: int(size)])
    assert kept == wanted
    assert mapping.t2d.tolist() == [i in wanted for i in range(12)]
    assert chosen.filled == max(0, int(size) - 2)
    assert mapping.is_full == (size == 12)


def test_more_ids_than_the_target_has_cannot_be_kept():
    with pytest.raises(UsageError, match="impossible"):
        VocabMapping.from_kept(np.arange(16), 12)
