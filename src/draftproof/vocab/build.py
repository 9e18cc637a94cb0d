"""The draft vocabulary by frequency: the target tokens that its answers use most.

One `np.bincount` over the supervised ids of the training rows and one sort of V counts. For 10 million ids at
V = 163,840 that is a fraction of a second, where lists of ids searched one by one take a minute.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np

from draftproof.errors import DataError, UsageError
from draftproof.records.mapping import VocabMapping, check_draft_size


@dataclass(frozen=True)
class DraftVocabulary:
    """A mapping and how much of the text it covers."""

    mapping: VocabMapping
    filled: int
    """Chosen tokens that never occur in the supervised training text."""


def count_tokens(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token id occurs. Raises DataError when an id is not one of the LM head's."""
    counts: np.ndarray = np.bincount(ids, minlength=vocab_size)
    if counts.size > vocab_size:
        raise DataError(
            f"The rows hold token id {counts.size - 1}, the target's head has {vocab_size} rows.",
            remedy="Make the rows again with --from prepare, with this target's tokenizer.",
        )
    return counts


def choose(counts: np.ndarray, size: int | None, *, named: np.ndarray, always: Collection[int]) -> DraftVocabulary:
    """The `size` most frequent of V tokens; of equally frequent ones the lower ids.

    `counts` int64 [V]. `named` bool [V]: ids with a tokenizer entry; others are never chosen. `always`: ids kept
    whatever their count, the stop tokens: a draft that cannot propose them misses the end of every answer. None keeps
    every id, so that draft and target ids are the same. Raises UsageError when `size` cannot be met.
    """
    vocab_size = counts.size
    if size is None:
        kept = np.arange(vocab_size)
        return DraftVocabulary(VocabMapping.from_kept(kept, vocab_size), int((counts == 0).sum()))
    check_draft_size(size, vocab_size)
    rank = np.where(named, counts, -1)
    forced = [index for index in sorted(always) if index < vocab_size]
    rank[forced] = np.iinfo(np.int64).max
    available = int((rank >= 0).sum())
    if size > available or size < len(forced):
        raise UsageError(
            f"A draft vocabulary of {size} tokens cannot be made: {available} of the target's {vocab_size} ids have a tokenizer entry, "
            f"and {len(forced)} of them are stop tokens that are always kept.",
            remedy=f"Set vocab.size to a number from {max(1, len(forced))} to {available}, or to null for the whole vocabulary.",
        )
    kept = np.argsort(-rank, kind="stable")[:size]
    return DraftVocabulary(VocabMapping.from_kept(kept, vocab_size), int((counts[kept] == 0).sum()))


def coverage(counts: np.ndarray, mapping: VocabMapping) -> float:
    """Share of the counted tokens that the draft can propose; 1.0 where nothing was counted."""
    total = int(counts.sum())
    return float(counts[mapping.t2d].sum() / total) if total else 1.0
